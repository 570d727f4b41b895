/* Linear layers of float32 rows on a CPU, with weights in float32, float16, bfloat16 or bytes with scales.
 *
 * Weights are read once for as many rows as there are registers for their sums: few rows cost what it takes to
 * read them. Sums are float32, each in the order of the inputs, whatever the number of rows. To bfloat16 weights
 * rows are rounded like them, and a product is of a pair of inputs. Bytes become float32, are multiplied by their scale and
 * rounded, so that sums have the bits of those of float32 weights. "linear.py" lays the weights out and calls
 * this; all arrays are row-major.
 */

#include "kernels.h"
#include "arena.h"
#include "tiles.h"
#include "vectors.h"

/* Columns and rows of a product that are summed up together: as many as there are registers for. */
#define PANEL (2 * LANES)
#if LANES == 16 || defined(__aarch64__)
#define MAX_ROWS 12
#else
#define MAX_ROWS 6
#endif
#define VECTORS (PANEL / LANES)
/* Rows from which weights are fetched ahead (``fetch_ahead``). On Intel's servers, which have AMX, one to five rows of
 * float32 take 0.7 to 0.9 of the time then, and one row of float16 0.7 to 0.8. */
#ifdef __AMX_TILE__
#define FETCHED_ROWS(type) 1
#else
#define FETCHED_ROWS(type) ((type) == FLOAT32 || (type) == BFLOAT16 ? MAX_ROWS / 2 : 2)
#endif

/* Rows that share a pointer, which is a register, in a product. */
#define GROUP 3
/* Rows of a multiple of this many numbers begin in the same few places of the first cache, which has no room for
 * CROWD of them there. */
#define CROWDING 512
#define CROWD 5

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

/* Pairs of bfloat16 numbers that a tile has of a row: there are a multiple of them, in all layers. */
enum { PAIRS = TILE_BYTES_OF_ROW / 4 };

/* Whether there are products of bfloat16 numbers. */
int64_t multiplies_bfloat16(void) { return HAS_BFLOAT16; }

/* Adds the products of each column's weight, or pair of weights, with the factor that all columns share. With AVX-512
 * a multiplication reads it from memory and spreads it over all lanes itself. A compiler would spread it once for
 * several, by an instruction that takes the place of a multiplication. */
static inline ALWAYS vec add_products(vec sum, vec weight, const float *factor, const int type) {
#if HAS_BFLOAT16
    if (type == BFLOAT16) {
        __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weight), "m"(*factor));
        return sum;
    }
#endif
    (void)type;
#if LANES == 16
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weight), "m"(*factor));
    return sum;
#else
    return multiply_add(weight, SPREAD(*factor), sum);
#endif
}

/* Rows x [rows, size] copied to others that begin ``stride`` numbers apart, or tile by tile. */
typedef struct {
    float *to;
    const float *x;
    int64_t size, stride, is_tiled;
} Copy;

static void copy_task(const void *arguments, int64_t row) {
    const Copy *task = arguments;
    memcpy(task->to + row * task->stride, task->x + row * task->size, task->size * sizeof(float));
}

/* A row rounded to bfloat16, in pairs, with zeros up to a multiple of PAIRS. For tiles sixteen rows are together, PAIRS
 * after PAIRS of each. */
static void round_task(const void *arguments, int64_t row) {
    const Copy *task = arguments;
#if HAS_BFLOAT16
    enum { STEP = 2 * PAIRS };
    const int64_t size = task->size, stride = task->stride, num_steps = (size + STEP - 1) / STEP;
    const float *x = task->x + row * size;
    float *to = task->to + row * stride;
    int64_t step = PAIRS;
    if (task->is_tiled) {
        to = task->to + row / TILE_ROWS * TILE_ROWS * stride + row % TILE_ROWS * PAIRS;
        step = TILE_ROWS * PAIRS;
    }
    for (int64_t k = 0; k < num_steps; k++, x += STEP, to += step) {
        const int64_t left = size - k * STEP;
        const __mmask32 inputs = left < STEP ? (1u << left) - 1 : UINT32_MAX;
        const __m512 first = _mm512_maskz_loadu_ps((__mmask16)inputs, x);
        const __m512 second = _mm512_maskz_loadu_ps((__mmask16)(inputs >> LANES), x + LANES);
        _mm512_storeu_ps(to, (__m512)_mm512_cvtne2ps_pbh(second, first));
    }
#else
    (void)task, (void)row;
#endif
}

/* What a row is multiplied by at once: inputs, or pairs of them. */
static inline int64_t num_factors(const Linear *linear) {
    return linear->type == BFLOAT16 ? (linear->in_features + 2 * PAIRS - 1) / (2 * PAIRS) * PAIRS : linear->in_features;
}

/* A panel's columns for some rows, whose sums stay in registers; x [num_rows, factors], ``stride`` from row to row. */
static inline ALWAYS void multiply_rows(
    const Linear *linear, float *out, const float *x, int64_t stride, const float *residual, int64_t column,
    const int type, const int num_rows) {
    const int64_t in = num_factors(linear);
    const int in_bytes = type == WHOLE8 || type == FLOAT8, size = in_bytes ? 1 : type == FLOAT16 ? 2 : 4;
    const char *weights = (const char *)linear->weights + column * in * size;
    const int64_t group_size = in_bytes ? linear->group : in;
    const float *scales = in_bytes ? linear->scales + column * ((in + group_size - 1) / group_size) : NULL;
    vec sum[MAX_ROWS][VECTORS], kept[MAX_ROWS][VECTORS];
    const float *group[(MAX_ROWS + GROUP - 1) / GROUP];
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < VECTORS; i++) sum[row][i] = (vec){0};
    for (int row = 0; row < num_rows; row += GROUP) group[row / GROUP] = x + row * stride;
    int64_t end = 0;
    vec scale[VECTORS] = {{0}};
    for (int64_t k = 0; k < in; k++, weights += PANEL * size) {
        if (in_bytes && k == end) {
            for (int i = 0; i < VECTORS; i++) scale[i] = *(const vec *)(scales + i * LANES);
            end += group_size;
            scales += PANEL;
        }
        vec weight[VECTORS];
        UNROLL
        for (int i = 0; i < VECTORS; i++) {
            const char *from = weights + i * LANES * size;
            if (in_bytes) {
                weight[i] = widen_eight((const uint8_t *)from, type == WHOLE8) * scale[i];
                ROUND(weight[i]);
                continue;
            }
            weight[i] = type == FLOAT16 ? widen((const uint16_t *)from) : *(const vec *)from;
        }
        if (num_rows >= FETCHED_ROWS(type))
            for (int i = 0; i < PANEL * size; i += CACHE_LINE) fetch_ahead(weights + i);
        UNROLL
        for (int row = 0; row < num_rows; row++) {
            const float *factor = group[row / GROUP] + row % GROUP * stride;
            UNROLL
            for (int i = 0; i < VECTORS; i++) sum[row][i] = add_products(sum[row][i], weight[i], factor, type);
        }
        UNROLL
        for (int row = 0; row < num_rows; row += GROUP) {
            group[row / GROUP]++;
            __asm__("" : "+r"(group[row / GROUP])); /* or a compiler would keep a pointer for each row */
        }
    }
    /* Sums whose address is known elsewhere would not be kept in registers. */
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < VECTORS; i++) kept[row][i] = sum[row][i];
    finish(linear, out, residual, kept[0], column, num_rows);
}

/* A product whose rows are in ``num_parts`` parts, and ``stride`` numbers from each other in ``x``; ``number``: as
 * ``shape_tiles`` has it. */
typedef struct {
    const Linear *linear;
    float *out;
    const float *x, *residual;
    int64_t rows, num_parts, stride, number;
} Product;

/* A panel's columns for all rows, part by part. */
static void multiply_task(const void *arguments, int64_t panel) {
    const Product *product = arguments;
    const Linear *linear = product->linear;
    const float *residual = product->residual;
    const int64_t rows = product->rows, num_parts = product->num_parts, stride = product->stride;
    const int64_t width = linear->out_features, column = panel * PANEL;
    for (int64_t part = 0; part < num_parts; part++) {
        const int64_t row = part * rows / num_parts, num_rows = (part + 1) * rows / num_parts - row;
        float *to = product->out + row * width;
        const float *x = product->x + row * stride, *add = residual ? residual + row * width : NULL;
        switch (num_rows + linear->type * MAX_ROWS) {
#define OF_TYPE(type, n) case type * MAX_ROWS + n: multiply_rows(linear, to, x, stride, add, column, type, n); break;
#if HAS_BFLOAT16
#define OF_BFLOAT16(n) OF_TYPE(BFLOAT16, n)
#else
#define OF_BFLOAT16(n)
#endif
#define CASE(n) OF_TYPE(FLOAT32, n) OF_TYPE(FLOAT16, n) OF_BFLOAT16(n) OF_TYPE(WHOLE8, n) OF_TYPE(FLOAT8, n)
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MAX_ROWS == 12
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
#undef OF_BFLOAT16
#undef OF_TYPE
        }
    }
}

#if HAS_TILES
/* Rows whose sums share the loads of weights: as many as there are tiles for. */
enum { ROWS_OF_TILES = 2 * TILE_ROWS };
static const TileShapes SHAPES = {
    .palette = 1,
    .row_bytes = { [0 ... 7] = TILE_BYTES_OF_ROW },
    .rows = { [0 ... 7] = TILE_ROWS },
};

/* As ``multiply_rows``, with tiles: 0 to 3 are sums, 4 and 5 rows, 6 and 7 the panel's columns. */
static inline ALWAYS void multiply_tiles(
    const Linear *linear, float *out, const float *x, const float *residual, int64_t column, int64_t rows,
    const int is_double) {
    enum { STEP = PAIRS * PANEL };
    const int64_t pairs = num_factors(linear);
    const float *weights = (const float *)linear->weights + column * pairs, *second = x + TILE_ROWS * pairs;
    vec sum[ROWS_OF_TILES][VECTORS];
    CLEAR_TILE(0);
    CLEAR_TILE(1);
    if (is_double) CLEAR_TILE(2);
    if (is_double) CLEAR_TILE(3);
    for (int64_t k = 0; k < pairs; k += PAIRS, weights += STEP) {
        for (int i = 0; i < STEP; i += CACHE_LINE / sizeof(float)) fetch_ahead(weights + i);
        LOAD_TILE(6, weights, PANEL * sizeof(float));
        LOAD_TILE(7, weights + LANES, PANEL * sizeof(float));
        LOAD_TILE(4, x + k * TILE_ROWS, TILE_BYTES_OF_ROW);
        ADD_BFLOAT16(0, 4, 6);
        ADD_BFLOAT16(1, 4, 7);
        if (is_double) {
            LOAD_TILE(5, second + k * TILE_ROWS, TILE_BYTES_OF_ROW);
            ADD_BFLOAT16(2, 5, 6);
            ADD_BFLOAT16(3, 5, 7);
        }
    }
    STORE_TILE(0, sum[0], sizeof sum[0]);
    STORE_TILE(1, sum[0] + 1, sizeof sum[0]);
    if (is_double) STORE_TILE(2, sum[TILE_ROWS], sizeof sum[0]);
    if (is_double) STORE_TILE(3, sum[TILE_ROWS] + 1, sizeof sum[0]);
    finish(linear, out, residual, sum[0], column, rows);
}

static void multiply_tiles_task(const void *arguments, int64_t panel) {
    const Product *product = arguments;
    const Linear *linear = product->linear;
    const int64_t stride = product->stride, width = linear->out_features, column = panel * PANEL;
    shape_tiles(&SHAPES, product->number);
    for (int64_t row = 0; row < product->rows; row += ROWS_OF_TILES) {
        const int64_t left = product->rows - row, count = left < ROWS_OF_TILES ? left : ROWS_OF_TILES;
        const float *x = product->x + row * stride;
        const float *residual = product->residual ? product->residual + row * width : NULL;
        float *out = product->out + row * width;
        if (count > TILE_ROWS) multiply_tiles(linear, out, x, residual, column, count, 1);
        else multiply_tiles(linear, out, x, residual, column, count, 0);
    }
}
#else
#define multiply_tiles_task multiply_task
#endif

/* ``multiply`` without adapters. */
static void multiply_weights(const Linear *linear, float *out, const float *x, const float *residual, int64_t rows) {
    if (linear->type == QUANTISED) {
        multiply_quantised(linear, out, x, residual, rows);
        return;
    }
    const int64_t size = linear->in_features, in = num_factors(linear), width = linear->out_features;
    const int64_t num_parts = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const int is_tiled = linear->type == BFLOAT16 && has_tiles();
    const int64_t num_kept = is_tiled ? (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS : rows;
    const int is_crowded = !is_tiled && in % CROWDING == 0 && rows >= CROWD;
    const int64_t stride = is_crowded ? in + CACHE_LINE / (int64_t)sizeof(float) : in;
    if (is_crowded || linear->type == BFLOAT16) {
        static _Thread_local Arena arena;
        if (!arena_reserve(&arena, arena_size(num_kept * stride, sizeof(float)))) {
            for (int64_t i = 0; i < rows * width; i++) out[i] = NAN; /* no memory: not a distribution */
            return;
        }
        float *to = arena_alloc(&arena, num_kept * stride, sizeof(float));
        run_task(linear->type == BFLOAT16 ? round_task : copy_task, &(Copy){ to, x, size, stride, is_tiled }, rows,
                 rows * size);
        x = to;
    }
    const Product product = { linear, out, x, residual, rows, num_parts, stride, next_product() };
    run_task(is_tiled ? multiply_tiles_task : multiply_task, &product, (width + PANEL - 1) / PANEL, in * width * rows);
}

/* Adds to the outputs of the ``count`` rows ``members`` what the adapter's parts make of their inputs ``x`` [count,
 * in_features], one row after the other. */
static int add_adapter(const Adapter *adapter, const Linear *linear, float *out, const float *x, const int64_t *members,
                       int64_t count) {
    static _Thread_local Arena arena;
    for (const LowRank *part = adapter->parts; part < adapter->parts + adapter->num_parts; part++) {
        const Linear *down = part->down, *up = part->up;
        const int64_t rank = down->out_features, width = up->out_features;
        if (!arena_reserve(&arena, arena_size(count * rank, sizeof(float)) + arena_size(count * width, sizeof(float))))
            return 0;
        float *low = arena_alloc(&arena, count * rank, sizeof(float));
        float *added = arena_alloc(&arena, count * width, sizeof(float));
        multiply_weights(down, low, x, NULL, count);
        multiply_weights(up, added, low, NULL, count);
        for (int64_t i = 0; i < count; i++) {
            float *to = out + members[i] * linear->out_features + part->first;
            for (int64_t j = 0; j < width; j++) to[j] += added[i * width + j];
        }
    }
    return 1;
}

/* Adds to each row's outputs what its adapter makes of its inputs. The rows of one adapter are computed together; their
 * bits do not depend on that. Returns 0 if there is no memory. */
static int add_adapters(const Linear *linear, float *out, const float *x, int64_t rows) {
    static _Thread_local Arena arena;
    const int64_t *numbers = linear->adapted->numbers, size = linear->in_features;
    if (!arena_reserve(&arena, arena_size(rows * size, sizeof(float)) + arena_size(rows, sizeof(int64_t)))) return 0;
    float *inputs = arena_alloc(&arena, rows * size, sizeof(float));
    int64_t *members = arena_alloc(&arena, rows, sizeof(int64_t));
    for (int64_t first = 0; first < rows; first++) {
        int64_t before = 0, count = 0;
        while (numbers[before] != numbers[first]) before++;
        if (before < first || numbers[first] < 0 || !linear->adapters[numbers[first]].num_parts) continue;
        for (int64_t row = first; row < rows; row++) {
            if (numbers[row] != numbers[first]) continue;
            memcpy(inputs + count * size, x + row * size, size * sizeof(float));
            members[count++] = row;
        }
        if (!add_adapter(&linear->adapters[numbers[first]], linear, out, inputs, members, count)) return 0;
    }
    return 1;
}

/* out [rows, out_features] = x [rows, in_features] times the weights, plus bias, plus residual or NULL,
 * which may be out itself; plus what the rows' adapters add. */
void multiply(const Linear *linear, float *out, const float *x, const float *residual, int64_t rows) {
    multiply_weights(linear, out, x, residual, rows);
    if (!linear->adapters || !linear->adapted->numbers) return;
    /* Without memory, or where nobody knows whose rows these are, the outputs are no distribution. */
    if (linear->adapted->num_rows == rows && add_adapters(linear, out, x, rows)) return;
    for (int64_t i = 0; i < rows * linear->out_features; i++) out[i] = NAN;
}

/* Columns of a Linear's weights together, panel by panel: what the weights must be laid out as. */
int64_t panel_size(void) { return PANEL; }
