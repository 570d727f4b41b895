/* Linear layers with quantised weights, for a few rows on a CPU.
 *
 * A row's inputs are rounded to 8 bits, 32 by 32, each with the scale that makes the largest 127, as ggml does
 * (whose scales are float16; these are float32). Sums of 32 (16 for Q2_K, Q3_K and Q6_K) products are integers, and so exact;
 * they are scaled and summed up in float32, in the order of the inputs, whatever the number of rows.
 *
 * "quantised.py" calls this; all arrays are row-major, and "quantised_blocks.h" says what a panel is.
 */

/* The order of sums is part of what a row is. */
#if defined(__clang__)
#pragma clang fp reassociate(off)
#else
#pragma GCC optimize("no-associative-math", "no-reciprocal-math")
#endif

#include "kernels.h"
#include "arena.h"
#include "quantised_blocks.h"
#include "vectors.h"

/* Columns and rows of a product that are summed up together: as many as there are registers for. */
#define VECTORS 2
#define TILE (VECTORS * LANES)
#if LANES == 16
#define MAX_ROWS 6
#else
#define MAX_ROWS 4
#endif
/* Rows from which weights are fetched ahead (``fetch_ahead``). One or two rows of narrow codes take 0.75 to 1.0 of the
 * time on Zen 5 then, and up to 1.3 on Zen 4 (into L1): of the two only Zen 5 has AVX-VNNI. One to four rows of 8 bits
 * take 0.7 to 0.9 on Intel's servers, which have AMX. */
#if defined(__AMX_TILE__)
#define FETCHED_ROWS(bits) 1
#elif defined(__AVXVNNI__)
#define FETCHED_ROWS(bits) ((bits) == 8 ? MAX_ROWS - 1 : 1)
#else
#define FETCHED_ROWS(bits) ((bits) == 8 ? MAX_ROWS - 1 : 3)
#endif
/* Of inputs that stay in a core's cache while the panels pass by. */
#define TILE_BYTES (256 << 10)
/* 1.5 * 2^23 */
#define ROUNDING 12582912.0f

/* 32 inputs of a row: about scale * codes. ``sum``: scale times the sum of the codes. ``minus``: minus the sums of
 * the first 16 codes, of the others, and of all. */
typedef struct {
    int8_t codes[BLOCK];
    float scale, sum;
    int32_t minus[3];
} Inputs;

typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint16_t words __attribute__((vector_size(4 * LANES)));
typedef uint8_t narrow __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int8_t narrow_signed __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int32_t four __attribute__((aligned(1), may_alias)); /* inputs */

/* Without instructions for it these are loops, which a compiler would not finish with if they were inlined. */
#if (LANES >= 8 && defined(__AVX2__)) || (LANES == 4 && defined(__SSSE3__)) || defined(__ARM_FEATURE_DOTPROD)
#define SIMD static inline ALWAYS
#else
#define SIMD static __attribute__((noinline))
#endif

static inline ALWAYS ivec all(int32_t x) { return x - (ivec){0}; }

/* ``x`` times a constant, in all lanes: multiplied there, as the other way costs a detour for every row. */
static inline ALWAYS ivec all_times(int32_t x, const int factor) {
    if (!factor) return (ivec){0};
    ivec out = all(x);
#if LANES >= 8
    __asm__("" : "+v"(out));
#endif
    return out * factor;
}

/* Adds to each column's sum the products of four codes with four inputs, the same for all columns. Without
 * ``is_byte`` codes are below 64, and pairs of products fit into 16 bits. */
SIMD ivec dot(ivec sum, bytes codes, ivec inputs, const int is_byte) {
#if LANES == 16 && defined(__AVX512VNNI__)
    (void)is_byte;
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)inputs);
#elif LANES == 16 && defined(__AVX512BW__)
    __m512i weights = (__m512i)codes, x = (__m512i)inputs;
    if (is_byte) { /* signed, as nothing else fits */
        weights = _mm512_xor_si512(weights, _mm512_set1_epi8(-128));
        x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), x);
        weights = _mm512_abs_epi8(weights);
    }
    const __m512i pairs = _mm512_maddubs_epi16(weights, x);
    return sum + (ivec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif LANES == 8 && defined(__AVX2__) && defined(__AVXVNNI__)
    (void)is_byte;
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)inputs);
#elif LANES == 8 && defined(__AVX2__)
    __m256i weights = (__m256i)codes, x = (__m256i)inputs;
    if (is_byte) { /* signed, as nothing else fits */
        weights = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
        x = _mm256_sign_epi8(x, weights);
        weights = _mm256_abs_epi8(weights);
    }
    const __m256i pairs = _mm256_maddubs_epi16(weights, x);
    return sum + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif LANES == 4 && defined(__SSSE3__)
    __m128i weights = (__m128i)codes, x = (__m128i)inputs;
    if (is_byte) { /* signed, as nothing else fits */
        weights = _mm_xor_si128(weights, _mm_set1_epi8(-128));
        x = _mm_sign_epi8(x, weights);
        weights = _mm_abs_epi8(weights);
    }
    const __m128i pairs = _mm_maddubs_epi16(weights, x);
    return sum + (ivec)_mm_madd_epi16(pairs, _mm_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    if (is_byte) codes ^= 128; /* signed, as the inputs are */
    return (ivec)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)inputs);
#else
    (void)is_byte;
    const int8_t *x = (const int8_t *)&inputs;
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < GROUP; j++) sum[i] += codes[GROUP * i + j] * x[j];
    return sum;
#endif
}
#if (LANES == 16 && defined(__AVX512BW__) && !defined(__AVX512VNNI__)) \
    || (LANES == 8 && defined(__AVX2__) && !defined(__AVXVNNI__)) \
    || (LANES == 4 && defined(__SSSE3__)) || defined(__ARM_FEATURE_DOTPROD)
#define BYTES_ARE_SIGNED 1
#else
#define BYTES_ARE_SIGNED 0
#endif

/* The codes that stored ones stand for. */
SIMD bytes look_up(const bytes stored, const uint8_t *book) {
#if LANES == 16 && defined(__AVX512BW__)
    return (bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)book)), (__m512i)stored);
#elif LANES == 8 && defined(__AVX2__)
    return (bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)book)), (__m256i)stored);
#elif LANES == 4 && defined(__SSSE3__)
    return (bytes)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)book), (__m128i)stored);
#elif defined(__aarch64__)
    return (bytes)vqtbl1q_u8(vld1q_u8(book), (uint8x16_t)stored);
#else
    bytes out;
    for (int i = 0; i < 4 * LANES; i++) out[i] = book[stored[i]];
    return out;
#endif
}

/* Bits ``from`` to from + count - 1 of each byte, as those from ``to`` on. */
static inline ALWAYS bytes move_bits(const bytes x, const int from, const int count, const int to) {
    const words shifted = from < to ? (words)x << (to - from) : (words)x >> (from - to);
    return (bytes)shifted & (uint8_t)(((1 << count) - 1) << to);
}

/* Codes of groups ``group`` (even) and ``group + 1`` of a block, of LANES columns. */
static inline ALWAYS void load(bytes codes[2], const uint8_t *block, const int group, const int64_t type) {
    const int bits = code_bits(type), low = low_bits(bits), high = bits - low;
    UNROLL
    for (int i = 0; i < 2; i++) {
        const int at = (group + i) * low;
        const bytes stored = *(const bytes *)(block + at / 8 * GROUP_BYTES);
        codes[i] = low == 8 ? stored : move_bits(stored, at % 8, low, 0);
        if (high) {
            const int above = (group + i) * high;
            const bytes rest = *(const bytes *)(block + (low + above / 8) * GROUP_BYTES);
            codes[i] |= move_bits(rest, above % 8, high, low);
        }
        if (code_book(type)) codes[i] = look_up(codes[i], code_book(type));
    }
}

/* Eight bits of each column as int32, as float32. gcc converts number by number where it is not given the
 * instruction. */
static inline ALWAYS ivec integers(const uint8_t *x) {
#if LANES == 16
    return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x));
#elif LANES == 8 && defined(__AVX2__)
    return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x));
#elif defined(__aarch64__)
    uint32_t four;
    memcpy(&four, x, sizeof four);
    return (ivec)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#else
    return __builtin_convertvector(*(const narrow *)x, ivec);
#endif
}
static inline ALWAYS vec widen_bytes(const uint8_t *x) { return __builtin_convertvector(integers(x), vec); }
static inline ALWAYS vec widen_signed(const uint8_t *x) {
#if LANES == 16
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
#elif LANES == 8 && defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
#elif defined(__aarch64__)
    uint32_t four;
    memcpy(&four, x, sizeof four);
    return (vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
#else
    return __builtin_convertvector(*(const narrow_signed *)x, vec);
#endif
}
static inline ALWAYS vec widen_half(const uint8_t *x) { return widen((const uint16_t *)x); }
/* 2 ** (exponent - 128), which is subnormal at 0 and 1. */
static inline ALWAYS vec widen_powers(const uint8_t *x) {
    const ivec exponents = integers(x), is_small = exponents < 2;
    return (vec)(((exponents + 1) * 0x200000 & is_small) | ((exponents - 1) << 23 & ~is_small));
}

/* Columns of some rows from their sums. One function for any number of rows. */
static __attribute__((noinline)) void finish(const Linear *linear, float *out, const float *residual, const float *sum,
                                             int64_t column, int64_t rows) {
    const int64_t width = linear->out_features, count = width - column < TILE ? width - column : TILE;
    for (int64_t row = 0; row < rows; row++, sum += TILE) {
        const int64_t at = row * width + column;
        for (int64_t i = 0; i < count; i++) {
            float value = sum[i] * linear->scale;
            if (linear->bias) value += linear->bias[column + i];
            if (residual) value += residual[at + i];
            out[at + i] = value; /* at the very last: it may be what is added */
        }
    }
}

/* What a column's codes in a unit of a block are times, and what is added for each of their inputs. */
typedef struct {
    vec factor, min;
} Factor;

/* The factors of the columns from ``at``; those of 256 inputs are ``super_scale`` and ``super_min``. */
static inline ALWAYS Factor factor_of(const uint8_t *scale, const int at, const int unit, const Scaling scaling,
                                      const vec super_scale, const vec super_min) {
    Factor by = {{0}, {0}};
    switch (scaling) {
        case SUPER:
            by.factor = super_scale * widen_bytes(scale + at);
            by.min = super_min * widen_bytes(scale + COLUMNS + at);
            break;
        case SUPER_HALF_MIN: {
            const ivec both = integers(scale + unit * COLUMNS + at);
            by.factor = super_scale * __builtin_convertvector(both & 15, vec);
            by.min = super_min * __builtin_convertvector(both >> 4, vec);
            break;
        }
        case SUPER_SIGNED: case SUPER_HALF:
            by.factor = super_scale * widen_signed(scale + unit * COLUMNS + at);
            break;
        case POWER: by.factor = widen_powers(scale + at); break;
        default:
            by.factor = widen_half(scale + 2 * at);
            if (scaling == SCALE_MIN) by.min = widen_half(scale + 2 * (COLUMNS + at));
    }
    return by;
}

/* sums [num_rows, TILE] of the columns from ``column`` of a panel; x [blocks, num_rows]. */
static inline ALWAYS void multiply_rows(vec *sums, const uint8_t *panel, const int column, const Inputs *x,
                                        int64_t num_blocks, const int64_t type, const int num_rows) {
    const int bits = code_bits(type), is_byte = has_byte_codes(type);
    const int offset = is_byte && BYTES_ARE_SIGNED ? 0 : code_offset(type);
    const Scaling scaling = scaling_of(type);
    const int num_units = num_scales(scaling);
    const int64_t size = code_bytes(bits) + scale_bytes(scaling);
    vec sum[MAX_ROWS][VECTORS];
    UNROLL
    for (int row = 0; row < num_rows; row++) {
        UNROLL
        for (int i = 0; i < VECTORS; i++) sum[row][i] = (vec){0};
    }
    /* Scales and minus minima of 256 inputs, converted once for their eight blocks. */
    vec super_scale[VECTORS] = {{0}}, super_min[VECTORS] = {{0}};
    for (int64_t block = 0; block < num_blocks; block++, panel += size, x += num_rows) {
        const int64_t shared = block % BLOCKS_PER_SUPER ? 0 : super_bytes(scaling);
        if (num_rows >= FETCHED_ROWS(bits))
            for (int64_t i = 0; i < shared + size; i += CACHE_LINE) fetch_ahead(panel + i);
        if (shared) {
            UNROLL
            for (int i = 0; i < VECTORS; i++) {
                const int at = column + i * LANES;
                super_scale[i] = widen_half(panel + 2 * at);
                if (has_super_min(scaling)) super_min[i] = -widen_half(panel + 2 * (COLUMNS + at));
            }
            panel += shared;
        }
        const uint8_t *scale = panel + code_bytes(bits);
        UNROLL
        for (int unit = 0; unit < num_units; unit++) {
            ivec dots[MAX_ROWS][VECTORS];
            UNROLL
            for (int row = 0; row < num_rows; row++) {
                const ivec start = all_times(x[row].minus[num_units == 2 ? unit : 2], offset);
                UNROLL
                for (int i = 0; i < VECTORS; i++) dots[row][i] = start;
            }
            UNROLL
            for (int number = 0; number < 8 / num_units; number += 2) {
                const int group = unit * 4 + number;
                bytes codes[VECTORS][2];
                UNROLL
                for (int i = 0; i < VECTORS; i++)
                    load(codes[i], panel + (column + i * LANES) * GROUP, group, type);
                UNROLL
                for (int row = 0; row < num_rows; row++) {
                    UNROLL
                    for (int j = 0; j < 2; j++) {
                        const ivec inputs = all(((const four *)x[row].codes)[group + j]);
                        UNROLL
                        for (int i = 0; i < VECTORS; i++)
                            dots[row][i] = dot(dots[row][i], codes[i][j], inputs, is_byte);
                    }
                }
            }
            UNROLL
            for (int i = 0; i < VECTORS; i++) {
                const int at = column + i * LANES;
                const Factor by = factor_of(scale, at, unit, scaling, super_scale[i], super_min[i]);
                UNROLL
                for (int row = 0; row < num_rows; row++) {
                    sum[row][i] += __builtin_convertvector(dots[row][i], vec) * (by.factor * x[row].scale);
                    if (scaling == SUPER_HALF_MIN) sum[row][i] -= by.min * (x[row].scale * (float)x[row].minus[unit]);
                    else if (has_super_min(scaling) || scaling == SCALE_MIN) sum[row][i] += by.min * x[row].sum;
                }
            }
        }
    }
    UNROLL
    for (int row = 0; row < num_rows; row++) {
        UNROLL
        for (int i = 0; i < VECTORS; i++) sums[row * VECTORS + i] = sum[row][i];
    }
}

#define CASE(type, rows) case rows: multiply_rows(sums, panel, column, x, num_blocks, type, rows); break;
#if MAX_ROWS == 6
#define FIVE_AND_SIX(type) CASE(type, 5) CASE(type, 6)
#else
#define FIVE_AND_SIX(type)
#endif
/* One function per type, so that a compiler has less to look at together. */
#define DEFINE(type) \
    static __attribute__((noinline)) void multiply_##type( \
        vec *sums, const uint8_t *panel, int column, const Inputs *x, int64_t num_blocks, int64_t num_rows) { \
        switch (num_rows) { CASE(type, 1) CASE(type, 2) CASE(type, 3) CASE(type, 4) FIVE_AND_SIX(type) } \
    }
DEFINE(Q4_0) DEFINE(Q4_1) DEFINE(Q5_0) DEFINE(Q5_1) DEFINE(Q8_0) DEFINE(Q2_K)
DEFINE(Q3_K) DEFINE(Q4_K) DEFINE(Q5_K) DEFINE(Q6_K) DEFINE(IQ4_NL) DEFINE(IQ4_XS) DEFINE(MXFP4)

/* Row where part ``part`` of num_parts begins. */
static inline int64_t first_row(int64_t part, int64_t num_parts, int64_t rows) { return part * rows / num_parts; }

/* The part that a row is in: the last one that begins before the next row. */
static inline int64_t part_of(int64_t row, int64_t num_parts, int64_t rows) {
    return ((row + 1) * num_parts - 1) / rows;
}

/* Parts ``first_part`` to end_part - 1 of a product whose rows are in ``num_parts`` parts; inputs [blocks, rows of the
 * part] of each. */
typedef struct {
    const Linear *linear;
    float *out;
    const Inputs *inputs;
    const float *residual;
    int64_t rows, first_part, end_part, num_parts;
} Product;

/* A panel's columns for these rows. */
static void multiply_task(const void *arguments, int64_t number) {
    const Product *product = arguments;
    const Linear *linear = product->linear;
    const Inputs *x = product->inputs;
    const float *residual = product->residual;
    float *out = product->out;
    const int64_t rows = product->rows, num_parts = product->num_parts;
    const QuantisedPanel *panel = (const QuantisedPanel *)linear->weights + number;
    const int64_t num_blocks = linear->in_features / BLOCK, width = linear->out_features;
    for (int64_t part = product->first_part; part < product->end_part; part++) {
        const int64_t first = first_row(part, num_parts, rows), count = first_row(part + 1, num_parts, rows) - first;
        for (int column = 0; column < COLUMNS && number * COLUMNS + column < width; column += TILE) {
            vec sums[MAX_ROWS * VECTORS];
            switch (panel->type) {
#define MULTIPLY(type) \
                case type: \
                    multiply_##type(sums, panel->data, column, x + first * num_blocks, num_blocks, count); \
                    break;
                MULTIPLY(Q4_0) MULTIPLY(Q4_1) MULTIPLY(Q5_0) MULTIPLY(Q5_1)
                MULTIPLY(Q8_0) MULTIPLY(Q2_K) MULTIPLY(Q3_K) MULTIPLY(Q4_K) MULTIPLY(Q5_K) MULTIPLY(Q6_K)
                MULTIPLY(IQ4_NL) MULTIPLY(IQ4_XS) MULTIPLY(MXFP4)
            }
            finish(linear, out + first * width, residual ? residual + first * width : NULL, (const float *)sums,
                   number * COLUMNS + column, count);
        }
    }
}

static inline int32_t largest_lane(ivec x) {
#if LANES == 16
    return _mm512_reduce_max_epi32((__m512i)x);
#elif defined(__aarch64__)
    return vmaxvq_s32((int32x4_t)x);
#else
    int32_t out = x[0];
    for (int i = 1; i < LANES; i++) out = x[i] > out ? x[i] : out;
    return out;
#endif
}

static inline int32_t sum_of_lanes(ivec x) {
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(__aarch64__)
    return vaddvq_s32((int32x4_t)x);
#else
    int32_t out = x[0];
    for (int i = 1; i < LANES; i++) out += x[i];
    return out;
#endif
}

static void quantise_row(Inputs *to, const float *row, int64_t num_blocks, int64_t stride) {
    enum { PARTS = BLOCK / LANES };
    for (int64_t block = 0; block < num_blocks; block++, to += stride) {
        const vec *x = (const vec *)(row + block * BLOCK);
        /* Sizes compare as integers, infinity above all numbers and NaN above that: they go through the scale. */
        ivec sizes = {0};
        UNROLL
        for (int i = 0; i < PARTS; i++) {
            const ivec size = (ivec)x[i] & INT32_MAX, larger = size > sizes;
            sizes = (size & larger) | (sizes & ~larger);
        }
        const int32_t bits = largest_lane(sizes);
        float largest;
        memcpy(&largest, &bits, sizeof largest);
        const float scale = largest / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        ivec sums[2] = {0};
        UNROLL
        for (int i = 0; i < PARTS; i++) {
            const vec scaled = x[i] * inverse;
            /* Rounded to even: float32 has no more bits above that number. What is none becomes 0. */
            const ivec is_code = (scaled > -127.5f) & (scaled < 127.5f);
            const vec rounded = ((vec)((ivec)scaled & is_code) + ROUNDING) - ROUNDING;
            const ivec codes = __builtin_convertvector(rounded, ivec);
            *(narrow_signed *)(to->codes + i * LANES) = __builtin_convertvector(codes, narrow_signed);
            sums[2 * i / PARTS] += codes;
        }
        const int32_t first = sum_of_lanes(sums[0]), second = sum_of_lanes(sums[1]);
        to->scale = scale;
        to->sum = to->scale * (float)(first + second);
        to->minus[0] = -first;
        to->minus[1] = -second;
        to->minus[2] = -first - second;
    }
}

typedef struct {
    Inputs *to;
    const float *x;
    int64_t rows, num_parts, num_blocks;
} Quantisation;

/* A row beside the others of its part, block by block. */
static void quantise_task(const void *arguments, int64_t row) {
    const Quantisation *task = arguments;
    const int64_t num_blocks = task->num_blocks;
    const int64_t part = part_of(row, task->num_parts, task->rows);
    const int64_t first = first_row(part, task->num_parts, task->rows);
    quantise_row(task->to + first * num_blocks + row - first, task->x + row * num_blocks * BLOCK, num_blocks,
                 first_row(part + 1, task->num_parts, task->rows) - first);
}

/* As ``multiply`` in linear.c, for a linear layer whose weights are QuantisedPanels. */
void multiply_quantised(const Linear *linear, float *out, const float *x, const float *residual, int64_t rows) {
    const int64_t num_blocks = linear->in_features / BLOCK, width = linear->out_features;
    const int64_t num_parts = (rows + MAX_ROWS - 1) / MAX_ROWS;
    static _Thread_local Arena arena;
    if (!arena_reserve(&arena, rows * num_blocks * sizeof(Inputs) + CACHE_LINE)) {
        for (int64_t i = 0; i < rows * width; i++) out[i] = NAN; /* no memory: not a distribution */
        return;
    }
    Inputs *inputs = arena_alloc(&arena, rows * num_blocks, sizeof(Inputs));
    run_task(quantise_task, &(Quantisation){ inputs, x, rows, num_parts, num_blocks }, rows,
             rows * linear->in_features * 16);
    const int64_t most = TILE_BYTES / (MAX_ROWS * num_blocks * (int64_t)sizeof(Inputs)), several = most > 1 ? most : 1;
    for (int64_t part = 0; part < num_parts; part += several) {
        const int64_t end = part + several < num_parts ? part + several : num_parts;
        run_task(multiply_task, &(Product){ linear, out, inputs, residual, rows, part, end, num_parts },
                 (width + COLUMNS - 1) / COLUMNS, width * linear->in_features * rows / 4);
    }
}
