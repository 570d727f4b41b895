/* Linear layers with quantised weights, for a few rows on a CPU.
 *
 * A row's inputs are rounded to 8 bits, 32 by 32, each with the scale that makes the largest 127, as ggml does
 * (whose scales are float16; these are float32). Sums of 32 (16 for Q6_K) products are integers, and so exact;
 * they are scaled and summed up in float32, in the order of the inputs, whatever the number of rows.
 *
 * "quantised.py" calls this; all arrays are row-major, and "blocks.h" says what a panel is.
 */

/* The order of sums is part of what a row is. */
#if defined(__clang__)
#pragma clang fp reassociate(off)
#else
#pragma GCC optimize("no-associative-math", "no-reciprocal-math")
#endif

#include "kernels.h"
#include "arena.h"
#include "blocks.h"
#include "vectors.h"

/* Rows of a product that are summed up together, and for how many there is code: missing ones are zeros. */
#if LANES == 16
#define MAX_ROWS 12
#define PADDED(rows) ((rows) <= 6 ? (rows) : (rows) <= 8 ? 8 : 12)
#else
#define MAX_ROWS 4
#define PADDED(rows) (rows)
#endif
#define VECTORS (COLUMNS / LANES)
#define PREFETCH 4096

/* 32 inputs of a row: about scale * codes. ``sum``: scale times the sum of the codes. ``minus``: minus the sums of
 * the first 16 codes, of the others, and of all. */
typedef struct {
    int8_t codes[BLOCK];
    float scale, sum;
    int32_t minus[3];
} Inputs;

typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint8_t narrow __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int8_t narrow_signed __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int32_t four __attribute__((aligned(1), may_alias)); /* inputs */

/* Without instructions for it these are loops, which a compiler would not finish with if they were inlined. */
#if LANES >= 8 && defined(__AVX2__)
#define SIMD static inline ALWAYS
#else
#define SIMD static __attribute__((noinline))
#endif

static inline ALWAYS ivec all(int32_t x) { return x - (ivec){0}; }

/* ``x`` times a constant, in all lanes: multiplied there, as the other way costs a detour for every row. */
static inline ALWAYS ivec all_times(int32_t x, const int factor) {
    ivec out = all(x);
#if LANES >= 8
    __asm__("" : "+v"(out));
#endif
    return out * factor;
}

/* Adds to each column's sum the products of four codes with four inputs. Without ``is_byte`` codes are below 64,
 * and pairs of products fit into 16 bits. */
SIMD ivec dot(ivec sum, bytes codes, const four *at, const int is_byte) {
    const int32_t inputs = *at;
#if LANES == 16 && defined(__AVX512VNNI__)
    /* Not by the intrinsic: gcc does not let it read one number for all lanes from memory. */
    (void)is_byte, (void)inputs;
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*at));
    return sum;
#elif LANES == 8 && defined(__AVX2__) && defined(__AVXVNNI__)
    (void)is_byte;
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)all(inputs));
#elif LANES == 8 && defined(__AVX2__)
    __m256i weights = (__m256i)codes, x = (__m256i)all(inputs);
    if (is_byte) { /* signed, as nothing else fits */
        weights = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
        x = _mm256_sign_epi8(x, weights);
        weights = _mm256_abs_epi8(weights);
    }
    const __m256i pairs = _mm256_maddubs_epi16(weights, x);
    return sum + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    (void)is_byte;
    const int8_t *x = (const int8_t *)&inputs;
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < GROUP; j++) sum[i] += codes[GROUP * i + j] * x[j];
    return sum;
#endif
}
#if LANES == 8 && defined(__AVX2__) && !defined(__AVXVNNI__)
#define BYTES_ARE_SIGNED 1
#else
#define BYTES_ARE_SIGNED 0
#endif

/* Codes plus ``value`` where the mask has a bit. */
SIMD bytes add_bits(bytes codes, const uint8_t *mask, int value) {
#if LANES == 16 && defined(__AVX512BW__)
    uint64_t bits;
    memcpy(&bits, mask, sizeof bits);
    return (bytes)_mm512_mask_add_epi8((__m512i)codes, bits, (__m512i)codes, _mm512_set1_epi8(value));
#elif LANES == 8 && defined(__AVX2__)
    int32_t bits;
    memcpy(&bits, mask, sizeof bits);
    const __m256i from = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
    const __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), from), bit);
    return codes + (bytes)_mm256_and_si256(_mm256_cmpeq_epi8(spread, bit), _mm256_set1_epi8(value));
#else
    for (int i = 0; i < 4 * LANES; i++) codes[i] += mask[i / 8] >> i % 8 & 1 ? value : 0;
    return codes;
#endif
}

/* Codes of group ``group`` of a block, of the columns of vector ``i``. */
static inline ALWAYS bytes load(const uint8_t *block, const int group, const int i, const int bits) {
    if (bits == 8) return *(const bytes *)(block + group * GROUP_BYTES + i * 4 * LANES);
    bytes codes = *(const bytes *)(block + group % 4 * GROUP_BYTES + i * 4 * LANES);
    if (group < 4) codes &= 15;
    else codes >>= 4;
    const uint8_t *mask = block + 4 * GROUP_BYTES + group * 8 + i * LANES / 2;
    if (bits > 4) codes = add_bits(codes, mask, 16);
    if (bits > 5) codes = add_bits(codes, mask + 64, 32);
    return codes;
}

/* Eight bits of each column as float32. gcc converts number by number where it is not given the instruction. */
static inline ALWAYS vec widen_bytes(const uint8_t *x) {
#if LANES == 16
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x)));
#elif LANES == 8 && defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x)));
#else
    return __builtin_convertvector(*(const narrow *)x, vec);
#endif
}
static inline ALWAYS vec widen_signed(const uint8_t *x) {
#if LANES == 16
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
#elif LANES == 8 && defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
#else
    return __builtin_convertvector(*(const narrow_signed *)x, vec);
#endif
}
static inline ALWAYS vec widen_half(const uint8_t *x) { return widen((const uint16_t *)x); }

/* Columns of some rows from their sums. One function for any number of rows. */
static __attribute__((noinline)) void finish(const Linear *linear, float *out, const float *residual, const float *sum,
                                             int64_t column, int64_t rows) {
    const int64_t width = linear->out_features, count = width - column < COLUMNS ? width - column : COLUMNS;
    for (int64_t row = 0; row < rows; row++, sum += COLUMNS) {
        const int64_t at = row * width + column;
        for (int64_t i = 0; i < count; i++) {
            float value = sum[i];
            if (linear->bias) value += linear->bias[column + i];
            if (residual) value += residual[at + i];
            out[at + i] = value; /* at the very last: it may be what is added */
        }
    }
}

/* sums [num_rows, 16] of a panel; x [blocks, num_rows]. */
static inline ALWAYS void multiply_rows(float *sums, const uint8_t *panel, const Inputs *x, int64_t num_blocks,
                                        const int64_t type, const int num_rows) {
    const int bits = code_bits(type), offset = bits == 8 && BYTES_ARE_SIGNED ? 0 : code_offset(type);
    const Scaling scaling = scaling_of(type);
    const int num_units = scaling == SUPER_HALF ? 2 : 1; /* scales of a column in a block */
    const uint8_t *scales = panel + num_blocks * code_bytes(bits);
    const uint8_t *supers = scales + num_blocks * scale_bytes(scaling);
    vec sum[MAX_ROWS][VECTORS];
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < VECTORS; i++) sum[row][i] = (vec){0};
    for (int64_t block = 0; block < num_blocks; block++, panel += code_bytes(bits), x += num_rows) {
        for (int i = 0; i < code_bytes(bits); i += 64) __builtin_prefetch(panel + PREFETCH + i);
        const uint8_t *super = supers + block / BLOCKS_PER_SUPER * super_bytes(scaling);
        const uint8_t *scale = scales + block * scale_bytes(scaling);
        UNROLL
        for (int unit = 0; unit < num_units; unit++) {
            ivec dots[MAX_ROWS][VECTORS];
            UNROLL
            for (int row = 0; row < num_rows; row++) {
                const int32_t minus = x[row].minus[num_units == 2 ? unit : 2];
                UNROLL
                for (int i = 0; i < VECTORS; i++) dots[row][i] = offset ? all_times(minus, offset) : (ivec){0};
            }
            UNROLL
            for (int number = 0; number < 8 / num_units; number++) {
                const int group = unit * 4 + number;
                UNROLL
                for (int i = 0; i < VECTORS; i++) {
                    const bytes codes = load(panel, group, i, bits);
                    UNROLL
                    for (int row = 0; row < num_rows; row++)
                        dots[row][i] = dot(dots[row][i], codes, (const four *)x[row].codes + group, bits == 8);
                }
            }
            UNROLL
            for (int i = 0; i < VECTORS; i++) {
                const int at = i * LANES;
                vec factor, min = {0};
                if (scaling == SUPER) {
                    factor = widen_half(super + 2 * at) * widen_bytes(scale + at);
                    min = widen_half(super + 2 * (COLUMNS + at)) * -widen_bytes(scale + COLUMNS + at);
                } else if (scaling == SUPER_HALF) {
                    factor = widen_half(super + 2 * at) * widen_signed(scale + unit * COLUMNS + at);
                } else {
                    factor = widen_half(scale + 2 * at);
                    if (scaling == SCALE_MIN) min = widen_half(scale + 2 * (COLUMNS + at));
                }
                UNROLL
                for (int row = 0; row < num_rows; row++) {
                    sum[row][i] += __builtin_convertvector(dots[row][i], vec) * (factor * x[row].scale);
                    if (scaling == SUPER || scaling == SCALE_MIN) sum[row][i] += min * x[row].sum;
                }
            }
        }
    }
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < VECTORS; i++) *(vec *)(sums + row * COLUMNS + i * LANES) = sum[row][i];
}

#if LANES == 16
#define FOR_ROWS(CASE, type) \
    CASE(type, 1) CASE(type, 2) CASE(type, 3) CASE(type, 4) CASE(type, 5) CASE(type, 6) CASE(type, 8) CASE(type, 12)
#else
#define FOR_ROWS(CASE, type) CASE(type, 1) CASE(type, 2) CASE(type, 3) CASE(type, 4)
#endif
#define CASE(type, rows) case rows: multiply_rows(sums, panel, x, num_blocks, type, rows); break;
/* One function per type, so that a compiler has less to look at together. */
#define DEFINE(type) \
    static __attribute__((noinline)) void multiply_##type( \
        float *sums, const uint8_t *panel, const Inputs *x, int64_t num_blocks, int64_t num_rows) { \
        switch (num_rows) { FOR_ROWS(CASE, type) } \
    }
DEFINE(Q4_0) DEFINE(Q4_1) DEFINE(Q5_0) DEFINE(Q5_1) DEFINE(Q8_0) DEFINE(Q4_K) DEFINE(Q5_K) DEFINE(Q6_K)

/* Rows ``part`` of num_parts; ``first`` is where they begin, ``padded`` how many are computed. */
typedef struct {
    int64_t first, rows, padded, start; /* ``start``: of their inputs, in blocks */
} Part;

static Part find_part(int64_t part, int64_t num_parts, int64_t rows, int64_t num_blocks) {
    const int64_t first = part * rows / num_parts, count = (part + 1) * rows / num_parts - first;
    return (Part){first, count, PADDED(count), part * MAX_ROWS * num_blocks};
}

static void multiply_panel(const Linear *linear, float *out, const Inputs *x, const float *residual, int64_t rows,
                           int64_t num_parts, int64_t number) {
    const QuantisedPanel *panel = (const QuantisedPanel *)linear->weights + number;
    const int64_t num_blocks = linear->in_features / BLOCK, width = linear->out_features;
    for (int64_t i = 0; i < num_parts; i++) {
        const Part part = find_part(i, num_parts, rows, num_blocks);
        float sums[MAX_ROWS * COLUMNS];
        switch (panel->type) {
#define MULTIPLY(type) case type: multiply_##type(sums, panel->data, x + part.start, num_blocks, part.padded); break;
            MULTIPLY(Q4_0) MULTIPLY(Q4_1) MULTIPLY(Q5_0) MULTIPLY(Q5_1)
            MULTIPLY(Q8_0) MULTIPLY(Q4_K) MULTIPLY(Q5_K) MULTIPLY(Q6_K)
        }
        finish(linear, out + part.first * width, residual ? residual + part.first * width : NULL, sums,
               number * COLUMNS, part.rows);
    }
}

/* A row of a part, or a missing one: ``row`` NULL. */
static void quantise_row(Inputs *to, const float *row, int64_t num_blocks, int64_t stride) {
    for (int64_t block = 0; block < num_blocks; block++, to += stride) {
        if (!row) {
            *to = (Inputs){0};
            continue;
        }
        const float *x = row + block * BLOCK;
        float largest = 0.0f, strange = 0.0f;
        int32_t sums[2] = {0};
        for (int i = 0; i < BLOCK; i++) {
            const float size = fabsf(x[i]);
            largest = size > largest ? size : largest;
            strange += x[i] * 0.0f; /* NaN and infinity go through the scale */
        }
        const float scale = largest / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        for (int i = 0; i < BLOCK; i++) {
            const float code = rintf(x[i] * inverse);
            to->codes[i] = code >= -127.0f && code <= 127.0f ? (int8_t)code : 0;
        }
        for (int i = 0; i < BLOCK; i++) sums[i / 16] += to->codes[i];
        to->scale = scale + strange;
        to->sum = to->scale * (float)(sums[0] + sums[1]);
        to->minus[0] = -sums[0];
        to->minus[1] = -sums[1];
        to->minus[2] = -sums[0] - sums[1];
    }
}

static void quantise_part(Inputs *to, const float *x, Part part, int64_t num_blocks) {
    for (int64_t row = 0; row < part.padded; row++)
        quantise_row(to + part.start + row, row < part.rows ? x + (part.first + row) * num_blocks * BLOCK : NULL,
                     num_blocks, part.padded);
}

/* As ``multiply`` in linear.c, for a linear layer whose weights are QuantisedPanels. */
void multiply_quantised(const Linear *linear, float *out, const float *x, const float *residual, int64_t rows) {
    const int64_t num_blocks = linear->in_features / BLOCK, width = linear->out_features;
    const int64_t num_parts = (rows + MAX_ROWS - 1) / MAX_ROWS;
    static _Thread_local Arena arena;
    if (!arena_reserve(&arena, num_parts * MAX_ROWS * num_blocks * sizeof(Inputs) + CACHE_LINE)) {
        for (int64_t i = 0; i < rows * width; i++) out[i] = NAN; /* no memory: not a distribution */
        return;
    }
    Inputs *inputs = arena_alloc(&arena, num_parts * MAX_ROWS * num_blocks, sizeof(Inputs));
    FOR_EACH(part, num_parts, rows * linear->in_features * 16,
             quantise_part(inputs, x, find_part(part, num_parts, rows, num_blocks), num_blocks));
    FOR_EACH(panel, (width + COLUMNS - 1) / COLUMNS, width * linear->in_features * rows / 4,
             multiply_panel(linear, out, inputs, residual, rows, num_parts, panel));
}
