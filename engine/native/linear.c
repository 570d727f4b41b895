/* Linear layers of float32 rows on a CPU, with weights in float32, float16 or bfloat16.
 *
 * Weights are read once for as many rows as there are registers for their sums: few rows cost what it takes to
 * read them. Sums are float32, each in the order of the inputs, whatever the number of rows. To bfloat16 weights
 * rows are rounded like them, and a product is of a pair of inputs. "linear.py" lays the weights out and calls
 * this; all arrays are row-major.
 */

#include "kernels.h"
#include "arena.h"
#include "vectors.h"

/* Columns and rows of a product that are summed up together: as many as there are registers for. */
#define PANEL (2 * LANES)
#if LANES == 16 || defined(__aarch64__)
#define MAX_ROWS 12
#else
#define MAX_ROWS 6
#endif
#define VECTORS (PANEL / LANES)
/* Weights are fetched this many bytes before they are used, but for a single row: the processor's own
 * prefetching is as good there. */
#define PREFETCH 4096

/* With AVX-512 a multiplication reads its factor from memory and spreads it over all lanes itself. The
 * compiler would spread it once for several, by an instruction that takes the place of a multiplication;
 * unless it does not know that the factors are the same. Then it would rather read the weights from memory. */
#if LANES == 16
#define UNKNOWN(weight, factors) __asm__ volatile("" : "+v"(weight), "+r"(factors))
#else
#define UNKNOWN(weight, factors)
#endif

typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
#define QUAD(at) (*(quad *)(at))
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)

/* A panel's columns of some rows from their sums. One function for any number of rows, so that rounding does
 * not depend on it. */
static __attribute__((noinline)) void finish(
    const Linear *linear, float *out, const float *residual, const vec *sum, int64_t column, int64_t rows) {
    const int64_t width = linear->out_features, end = width - column < PANEL ? width - column : PANEL;
    const float *bias = linear->bias ? linear->bias + column : NULL;
    for (int64_t row = 0; row < rows; row++, sum += VECTORS) {
        float *to = out + row * width + column;
        const float *add = residual ? residual + row * width + column : NULL;
        if (end == PANEL) {
            for (int i = 0; i < VECTORS; i++) {
                vec value = sum[i] * linear->scale;
                if (bias) value += *(const vec *)(bias + i * LANES);
                if (add) value += *(const vec *)(add + i * LANES);
                *(vec *)(to + i * LANES) = value;
            }
        } else {
            for (int64_t i = 0; i < end; i++) {
                float value = sum[i / LANES][i % LANES] * linear->scale;
                if (bias) value += bias[i];
                if (add) value += add[i];
                to[i] = value; /* at the very last: it may be what is added */
            }
        }
    }
}

#ifdef __AVX512BF16__
#define HAS_BFLOAT16 1
#else
#define HAS_BFLOAT16 0
#endif

/* Whether there are products of bfloat16 numbers. */
int64_t multiplies_bfloat16(void) { return HAS_BFLOAT16; }

/* Adds the products of each column's weight, or pair of weights, with the factor that all columns share. */
static inline ALWAYS vec add_products(vec sum, vec weight, const float *factor, const int type) {
#if HAS_BFLOAT16
    if (type == BFLOAT16) {
        __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weight), "m"(*factor));
        return sum;
    }
#endif
    (void)type;
    return sum + weight * *factor;
}

/* Inputs of a product laid out for it: ``x`` [rows, size] to ``to``. */
typedef struct {
    float *to;
    const float *x;
    int64_t rows, size, num_parts;
} Layout;

/* A row rounded to bfloat16, in pairs; the last one may have a zero in place of a number. */
static void round_task(const void *arguments, int64_t row) {
    const Layout *of = arguments;
#if HAS_BFLOAT16
    const int64_t size = of->size;
    const float *x = of->x + row * size;
    float *to = of->to + row * ((size + 1) / 2);
    for (int64_t k = 0; k < size; k += LANES) {
        const int64_t left = size - k < LANES ? size - k : LANES;
        const __m512 part = _mm512_maskz_loadu_ps((__mmask16)((1 << left) - 1), x + k);
        const __m256i pairs = (__m256i)_mm512_cvtneps_pbh(part);
        _mm256_mask_storeu_epi32(to + k / 2, (__mmask8)((1 << (left + 1) / 2) - 1), pairs);
    }
#else
    (void)of, (void)row;
#endif
}

/* What a row is multiplied by at once: inputs, or pairs of them. */
static inline int64_t num_factors(const Linear *linear) {
    return linear->type == BFLOAT16 ? (linear->in_features + 1) / 2 : linear->in_features;
}

/* A panel's columns for some rows, whose sums stay in registers; x [factors, num_rows]. */
static inline ALWAYS void multiply_rows(
    const Linear *linear, float *out, const float *x, const float *residual, int64_t column,
    const int type, const int num_rows) {
    const int64_t in = num_factors(linear);
    const int is_half = type == FLOAT16;
    const uint16_t *half = (const uint16_t *)linear->weights + column * in;
    const float *whole = (const float *)linear->weights + column * in;
    vec sum[MAX_ROWS][VECTORS], kept[MAX_ROWS][VECTORS];
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < VECTORS; i++) sum[row][i] = (vec){0};
    for (int64_t k = 0; k < in; k++) {
        vec weight[VECTORS];
        const float *factors[VECTORS];
        UNROLL
        for (int i = 0; i < VECTORS; i++) {
            const int64_t at = k * PANEL + i * LANES;
            weight[i] = is_half ? widen(half + at) : *(const vec *)(whole + at);
            factors[i] = x + k * num_rows;
            UNKNOWN(weight[i], factors[i]);
        }
        if (num_rows > 1) {
            const char *now = is_half ? (const char *)(half + k * PANEL) : (const char *)(whole + k * PANEL);
            for (int i = 0; i < PANEL * (is_half ? 2 : 4); i += 64) __builtin_prefetch(now + PREFETCH + i);
        }
        UNROLL
        for (int row = 0; row < num_rows; row++) {
            UNROLL
            for (int i = 0; i < VECTORS; i++) sum[row][i] = add_products(sum[row][i], weight[i], factors[i] + row, type);
        }
    }
    /* Sums whose address is known elsewhere would not be kept in registers. */
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < VECTORS; i++) kept[row][i] = sum[row][i];
    finish(linear, out, residual, kept[0], column, num_rows);
}

/* Part ``part`` of num_parts of the rows as [size, rows of the part]. */
static void interleave_task(const void *arguments, int64_t part) {
    const Layout *of = arguments;
    const int64_t size = of->size, first = part * of->rows / of->num_parts;
    const int64_t num_rows = (part + 1) * of->rows / of->num_parts - first;
    float *out = of->to + first * size;
    const float *from = of->x + first * size;
    const int64_t last = num_rows - 1, b = size, c = (last < 2 ? last : 2) * size, d = (last < 3 ? last : 3) * size;
    int64_t k = 0;
    /* Four by four. The last four rows may be in part those before them, once more. Of fewer than four the
     * last is taken for the missing ones: what comes next overwrites it. */
    for (; k + 4 < size; k += 4) {
        for (int64_t done = 0; done < num_rows; done += 4) {
            const int64_t row = done + 4 <= num_rows || last < 3 ? done : num_rows - 4;
            const float *at = from + row * size + k;
            const quad ab = ZIP_LOW(QUAD(at), QUAD(at + b)), cd = ZIP_LOW(QUAD(at + c), QUAD(at + d));
            const quad ef = ZIP_HIGH(QUAD(at), QUAD(at + b)), gh = ZIP_HIGH(QUAD(at + c), QUAD(at + d));
            float *column = out + k * num_rows + row;
            QUAD(column) = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
            QUAD(column + num_rows) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
            QUAD(column + 2 * num_rows) = __builtin_shufflevector(ef, gh, 0, 1, 4, 5);
            QUAD(column + 3 * num_rows) = __builtin_shufflevector(ef, gh, 2, 3, 6, 7);
        }
    }
    for (; k < size; k++)
        for (int64_t row = 0; row < num_rows; row++) out[k * num_rows + row] = from[row * size + k];
}

/* A product whose rows are in ``num_parts`` parts, each interleaved in ``x``. */
typedef struct {
    const Linear *linear;
    float *out;
    const float *x, *residual;
    int64_t rows, num_parts;
} Product;

/* A panel's columns for all rows, part by part. */
static void multiply_task(const void *arguments, int64_t panel) {
    const Product *product = arguments;
    const Linear *linear = product->linear;
    const float *x = product->x, *residual = product->residual;
    const int64_t rows = product->rows, num_parts = product->num_parts;
    const int64_t in = num_factors(linear), width = linear->out_features, column = panel * PANEL;
    for (int64_t part = 0; part < num_parts; part++) {
        const int64_t row = part * rows / num_parts, num_rows = (part + 1) * rows / num_parts - row;
        float *to = product->out + row * width;
        const float *from = x + row * in, *add = residual ? residual + row * width : NULL;
        switch (num_rows + linear->type * MAX_ROWS) {
#define OF_TYPE(type, n) case type * MAX_ROWS + n: multiply_rows(linear, to, from, add, column, type, n); break;
#if HAS_BFLOAT16
#define CASE(n) OF_TYPE(FLOAT32, n) OF_TYPE(FLOAT16, n) OF_TYPE(BFLOAT16, n)
#else
#define CASE(n) OF_TYPE(FLOAT32, n) OF_TYPE(FLOAT16, n)
#endif
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MAX_ROWS == 12
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
#undef OF_TYPE
        }
    }
}

/* out [rows, out_features] = x [rows, in_features] times the weights, plus bias, plus residual or NULL,
 * which may be out itself. */
void multiply(const Linear *linear, float *out, const float *x, const float *residual, int64_t rows) {
    if (linear->type == QUANTISED) {
        multiply_quantised(linear, out, x, residual, rows);
        return;
    }
    const int64_t size = linear->in_features, in = num_factors(linear), width = linear->out_features;
    int64_t num_parts = (rows + MAX_ROWS - 1) / MAX_ROWS;
    static _Thread_local Arena arena;
    if (!arena_reserve(&arena, 2 * arena_size(rows * in, sizeof(float)))) {
        for (int64_t i = 0; i < rows * width; i++) out[i] = NAN; /* no memory: not a distribution */
        return;
    }
    if (linear->type == BFLOAT16) {
        float *to = arena_alloc(&arena, rows * in, sizeof(float));
        run_task(round_task, &(Layout){ to, x, rows, size, 0 }, rows, rows * size);
        x = to;
    }
    /* What is needed together then lies together, and not all in the same few cache lines, as it would if rows
     * were a power of two long. */
    if (num_parts < rows) {
        float *to = arena_alloc(&arena, rows * in, sizeof(float));
        run_task(interleave_task, &(Layout){ to, x, rows, in, num_parts }, num_parts, rows * in * 4);
        x = to;
    }
    run_task(multiply_task, &(Product){ linear, out, x, residual, rows, num_parts }, (width + PANEL - 1) / PANEL,
             in * width * rows);
}

/* Columns of a Linear's weights together, panel by panel: what the weights must be laid out as. */
int64_t panel_size(void) { return PANEL; }
