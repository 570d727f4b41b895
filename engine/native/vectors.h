/* What the C files share: vectors as wide as this processor's registers. */

#ifndef TRUEDRAFT_VECTORS_H
#define TRUEDRAFT_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "shared.h"
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

/* A number in all lanes. */
#define SPREAD(x) ((vec){ 0 } + (x))

#define UNROLL _Pragma("GCC unroll 12")
#define ALWAYS __attribute__((always_inline))

/* Prefetches weights PREFETCH bytes before they are used, into the L2 cache: in L1 they would evict data in use.
 * Where the hardware prefetches far enough ahead by itself, with few rows, such instructions only slow it down. */
#define PREFETCH 6144
static inline ALWAYS void fetch_ahead(const void *used_now) {
    __builtin_prefetch((const char *)used_now + PREFETCH, 0, 2);
}

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

/* Rounds what has been computed so far: a compiler that may reorder products would do it here and there. */
#if defined(__AVX512F__)
#define ROUND(x) __asm__("" : "+v"(x))
#elif defined(__x86_64__)
#define ROUND(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define ROUND(x) __asm__("" : "+w"(x))
#else
#define ROUND(x) (void)(x)
#endif

/* LANES numbers of a byte each as float32: whole numbers, or floating point with four bits of exponent and three of what
 * follows (e4m3), divided by E4M3_DIVISOR. That is a float16 number with the same bits in another place; what stands for no
 * number becomes one. */
static inline ALWAYS vec widen_eight(const uint8_t *bytes, const int is_whole) {
#if LANES == 16
    const __m128i loaded = _mm_loadu_si128((const __m128i *)bytes);
    if (is_whole) return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(loaded));
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(loaded), 7);
    return (vec)_mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16((int16_t)0xbfff)));
#elif defined(__F16C__) && LANES == 8
    const __m128i loaded = _mm_loadl_epi64((const __m128i *)bytes);
    if (!is_whole) {
        const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(loaded), 7);
        return (vec)_mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16((int16_t)0xbfff)));
    }
#elif defined(__aarch64__)
    uint32_t four;
    memcpy(&four, bytes, sizeof four);
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)));
    if (is_whole) return (vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
    const int16x4_t shifted = vand_s16(vshl_n_s16(vget_low_s16(wide), 7), vdup_n_s16((int16_t)0xbfff));
    return (vec)vcvt_f32_f16(vreinterpret_f16_s16(shifted));
#endif
    vec out;
    uint16_t half[LANES];
    for (int i = 0; i < LANES; i++) half[i] = (uint16_t)((bytes[i] & 0x80) << 8 | (bytes[i] & 0x7f) << 7);
    for (int i = 0; i < LANES; i++) out[i] = (float)(int8_t)bytes[i];
    return is_whole ? out : widen(half);
}

/* x * y + z, rounded once where the processor can do that: a compiler that is left to fuse products and sums may do so
 * in one place and not in another. */
static inline ALWAYS vec multiply_add(vec x, vec y, vec z) {
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__) && LANES == 8
    return (vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
    return x * y + z;
#endif
}

/* Sum of LANES numbers: the upper half is added to the lower one until one is left. */
static inline ALWAYS float lane_sum(vec x) {
#if LANES >= 8 && __has_builtin(__builtin_shufflevector)
    typedef float half __attribute__((vector_size(32)));
    typedef float quarter __attribute__((vector_size(16)));
#if LANES == 16
    half h = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7)
           + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    half h = x;
#endif
    quarter q = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
    q += __builtin_shufflevector(q, q, 2, 3, 0, 1);
    return q[0] + q[1];
#else
    float part[LANES];
    memcpy(part, &x, sizeof part);
    for (int64_t n = LANES / 2; n; n /= 2)
        for (int64_t i = 0; i < n; i++) part[i] += part[i + n];
    return part[0];
#endif
}

/* exp with a relative error of 2e-7 (Cody-Waite reduction, polynomial of degree 6); NaN stays NaN. */
static inline ALWAYS float fast_exp(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, x));
    float p = 1.38888889e-3f;
    p = fmaf(p, r, 8.33333333e-3f);
    p = fmaf(p, r, 4.16666667e-2f);
    p = fmaf(p, r, 1.66666667e-1f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    union { uint32_t i; float f; } power = { ((uint32_t)(int32_t)n + 127u) << 23 };
    return p * power.f;
}

static inline ALWAYS float silu(float x) { return x / (1.0f + fast_exp(-x)); }

#endif
