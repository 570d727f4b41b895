/* Linear layers of a few float32 rows on a CPU, with weights in float32 or float16.
 *
 * Weights are read once for as many rows as there are registers for their sums: few rows cost what it takes to
 * read them. "product.py" lays them out and calls this; all arrays are row-major.
 */

#include <stdlib.h>

#include "vectors.h"

/* Columns and rows of a product that are summed up together: as many as there are registers for. */
#define PANEL (2 * LANES)
#if LANES == 16 || defined(__aarch64__)
#define MAX_ROWS 12
#else
#define MAX_ROWS 6
#endif

/* A linear layer with weights in float16 or float32. */
typedef struct {
    int64_t in_features, out_features, is_half;
    const void *weights;          /* [panels, in_features, PANEL], zeros past the last column */
    float scale;                  /* of all sums: float16 weights are kept near the largest there is */
    const float *bias;            /* [out_features] or NULL */
} Product;

/* LANES float16 numbers as float32. */
static inline ALWAYS vec widen(const uint16_t *half) {
    vec out;
#if LANES == 16
    out = (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)half));
#elif defined(__F16C__) && LANES == 8
    out = (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)half));
#else
    for (int i = 0; i < LANES; i++) out[i] = (float)((const _Float16 *)half)[i];
#endif
    return out;
}

/* A panel's columns for some rows, whose sums stay in registers; x [in_features, num_rows]. */
static inline ALWAYS void multiply_rows(
    float *out, const float *x, const Product *product, const float *residual, int64_t column,
    const int is_half, const int num_rows) {
    const int64_t in = product->in_features, width = product->out_features;
    const uint16_t *half = (const uint16_t *)product->weights + column * in;
    const float *whole = (const float *)product->weights + column * in;
    vec sum[MAX_ROWS][PANEL / LANES];
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < PANEL / LANES; i++) sum[row][i] = (vec){0};
    for (int64_t k = 0; k < in; k++) {
        vec weight[PANEL / LANES];
        UNROLL
        for (int i = 0; i < PANEL / LANES; i++) {
            const int64_t at = k * PANEL + i * LANES;
            weight[i] = is_half ? widen(half + at) : *(const vec *)(whole + at);
        }
        UNROLL
        for (int row = 0; row < num_rows; row++) {
            const float factor = x[k * num_rows + row];
            UNROLL
            for (int i = 0; i < PANEL / LANES; i++) sum[row][i] += weight[i] * factor;
        }
    }
    const int64_t end = width - column < PANEL ? width - column : PANEL;
    for (int row = 0; row < num_rows; row++) {
        const float *from = (const float *)sum[row];
        float *to = out + row * width + column;
        for (int64_t i = 0; i < end; i++) to[i] = from[i] * product->scale;
        if (product->bias)
            for (int64_t i = 0; i < end; i++) to[i] += product->bias[column + i];
        if (residual)
            for (int64_t i = 0; i < end; i++) to[i] += residual[row * width + column + i];
    }
}

/* Room for so many numbers, kept from call to call; NULL if there is no memory. */
static float *room_for(int64_t length) {
    static _Thread_local float *room;
    static _Thread_local int64_t size;
    if (size < length) {
        free(room);
        room = malloc(length * sizeof(float));
        size = room ? length : 0;
    }
    return room;
}

/* One of num_parts parts of x [rows, size] as [size, rows of the part]. */
static void interleave(float *to, const float *x, int64_t rows, int64_t size, int64_t part, int64_t num_parts) {
    const int64_t first = part * rows / num_parts, num_rows = (part + 1) * rows / num_parts - first;
    float *out = to + first * size;
    const float *from = x + first * size;
    for (int64_t k = 0; k < size; k++)
        for (int64_t row = 0; row < num_rows; row++) *out++ = from[row * size + k];
}

/* A panel's columns for all rows, num_parts of them in turn; x: each part interleaved. */
static void multiply_panel(const Product *product, float *out, const float *x, const float *residual,
                           int64_t rows, int64_t num_parts, int64_t panel) {
    const int64_t in = product->in_features, width = product->out_features, column = panel * PANEL;
    for (int64_t part = 0; part < num_parts; part++) {
        const int64_t row = part * rows / num_parts, num_rows = (part + 1) * rows / num_parts - row;
        float *to = out + row * width;
        const float *from = x + row * in, *add = residual ? residual + row * width : NULL;
        switch (num_rows + (product->is_half ? MAX_ROWS : 0)) {
#define CASE(n) \
            case n: multiply_rows(to, from, product, add, column, 0, n); break; \
            case MAX_ROWS + n: multiply_rows(to, from, product, add, column, 1, n); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MAX_ROWS == 12
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
        }
    }
}

/* out [rows, out_features] = x [rows, in_features] times the weights, plus bias, plus residual or NULL,
 * which may be out itself. */
void multiply(const Product *product, float *out, const float *x, const float *residual, int64_t rows) {
    const int64_t in = product->in_features, width = product->out_features;
    int64_t num_parts = (rows + MAX_ROWS - 1) / MAX_ROWS;
    /* What is needed together then lies together, and not all in the same few cache lines, as it would if rows
     * were a power of two long. */
    float *room = num_parts < rows ? room_for(rows * in) : NULL;
    if (room) {
        FOR_EACH(part, num_parts, rows * in * 8, interleave(room, x, rows, in, part, num_parts));
        x = room;
    } else {
        num_parts = rows; /* single rows are in order as they are */
    }
    FOR_EACH(panel, (width + PANEL - 1) / PANEL, in * width * rows,
             multiply_panel(product, out, x, residual, rows, num_parts, panel));
}

/* Columns of a Product's weights together, panel by panel: what the weights must be laid out as. */
int64_t panel_size(void) { return PANEL; }
