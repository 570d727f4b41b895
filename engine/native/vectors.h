/* What the C files share: vectors as wide as this processor's registers. */

#ifndef FORETOKEN_VECTORS_H
#define FORETOKEN_VECTORS_H

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
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

/* Below so many multiplications, some 10 microseconds, other threads are not woken: it takes as long. */
#define MIN_PARALLEL (1 << 19)

#define UNROLL _Pragma("GCC unroll 12")
#define ALWAYS __attribute__((always_inline))

#endif
