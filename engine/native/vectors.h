/* What the C files share: vectors as wide as this processor's registers. */

#ifndef FORETOKEN_VECTORS_H
#define FORETOKEN_VECTORS_H

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Numbers in a vector register. */
#ifdef __AVX512F__
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Multiplications, some 10 microseconds, below which other threads are not woken: that takes as long. */
#define MIN_PARALLEL (1 << 19)

#define UNROLL _Pragma("GCC unroll 12")
#define ALWAYS __attribute__((always_inline))

/* LANES float16 numbers as float32. */
static inline ALWAYS vec widen(const uint16_t *half) {
    vec out;
#if LANES == 16
    out = (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)half));
#elif defined(__F16C__) && LANES == 8
    out = (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)half));
#elif defined(__aarch64__)
    out = (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half)));
#else
    for (int i = 0; i < LANES; i++) out[i] = (float)((const _Float16 *)half)[i];
#endif
    return out;
}

/* Does BODY (a call; it is compiled twice) for i = 0 .. count - 1, on all threads if that is worth it: if
 * there is more than one and ``work`` multiplications are many. A parallel region of one thread takes a
 * microsecond, as long as a small row, so none is opened for it. FOR_EACH_UNEVEN is for calls of which some
 * take much longer than others. */
#define FOR_EACH(i, count, work, BODY) FOR_EACH_BY(static, i, count, work, BODY)
#define FOR_EACH_UNEVEN(i, count, work, BODY) FOR_EACH_BY(dynamic, i, count, work, BODY)
#define FOR_EACH_BY(kind, i, count, work, BODY) \
    do { \
        const int64_t count_ = (count); \
        if (count_ > 1 && (work) > MIN_PARALLEL && omp_get_max_threads() > 1) { \
            PRAGMA(omp parallel for schedule(kind)) \
            for (int64_t i = 0; i < count_; i++) BODY; \
        } else { \
            for (int64_t i = 0; i < count_; i++) BODY; \
        } \
    } while (0)
#define PRAGMA(text) _Pragma(#text)

#endif
