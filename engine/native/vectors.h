/* What the C files share: vectors as wide as this processor's registers. */

#ifndef FORETOKEN_VECTORS_H
#define FORETOKEN_VECTORS_H

#include <math.h>
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

#endif
