/* What a Llama-shaped layer does between its matrix products, for a few float32 rows on a CPU.
 *
 * torch spends a microsecond or more on starting each small operation, and a layer has some forty of them.
 * Here they are three calls: a norm, everything from rotary embedding to attention, a gated activation.
 * Rows of different lengths are attended as they are, straight from the cache: no padding, no copies.
 *
 * All arrays are float32 and row-major. "library.py" compiles this file and says what it is called with.
 */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Cached tokens that are looked at together. */
#define CHUNK 32
/* Numbers in a vector register; head sizes are multiples of 16. */
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

/* The new tokens of some sequences, one after the other, and where their caches lie. */
typedef struct {
    int64_t num_spans, num_tokens, block_size;
    int64_t max_queries;          /* longer spans are stored, but attended by somebody else */
    const int64_t *slots;         /* [num_tokens], where the new keys and values go */
    const int64_t *first_token;   /* [num_spans + 1] into the packed tokens */
    const int64_t *num_stored;    /* [num_spans] tokens that the cache had before */
    const int64_t *first_block;   /* [num_spans] into blocks */
    const int64_t *blocks;        /* block ids of all spans */
    const int64_t *angle;         /* [num_tokens] row of cos and sin */
    const float *cos, *sin;       /* [rows, head_size]; sin is negative in the first half */
} Spans;

/* A linear layer with weights in float16 or float32. */
typedef struct {
    int64_t in_features, out_features, is_half;
    const void *weights;          /* [panels, in_features, PANEL], zeros past the last column */
    float scale;                  /* of all sums: float16 weights are kept near the largest there is */
    const float *bias;            /* [out_features] or NULL */
} Product;

typedef struct {
    int64_t num_heads, num_kv_heads, head_size;
    int64_t window;               /* keys that a query sees, itself included; 0: all */
    float scaling, norm_eps;
    const float *norm_weight;     /* [num_heads + num_kv_heads, head_size] or NULL */
    float *keys, *values;         /* [slots, num_kv_heads, head_size] */
} Layer;

/* A head of 256. */
#define MAX_WIDTH (256 / LANES)
#define UNROLL _Pragma("GCC unroll 12")
#define ALWAYS __attribute__((always_inline))

/* Columns and rows of a product that are summed up together: as many as there are registers for. */
#define PANEL (2 * LANES)
#if LANES == 16 || defined(__aarch64__)
#define MAX_ROWS 12
#else
#define MAX_ROWS 6
#endif

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
    union { int32_t i; float f; } power = { ((int32_t)n + 127) << 23 };
    return p * power.f;
}

static inline void norm_row(float *out, const float *x, const float *weight, int64_t size, float eps) {
    float sum = 0.0f;
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / (float)size + eps);
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

/* RMSNorm (arXiv 1910.07467) of rows [rows, size]. */
void rms_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t size, float eps) {
    #pragma omp parallel for if (rows * size * 4 > MIN_PARALLEL)
    for (int64_t row = 0; row < rows; row++) norm_row(out + row * size, x + row * size, weight, size, eps);
}

/* out [rows, size] = silu(gate) * up of gate_up [rows, 2 * size]. */
void gated_silu(float *out, const float *gate_up, int64_t rows, int64_t size) {
    #pragma omp parallel for if (rows * size * 16 > MIN_PARALLEL)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * size, *up = gate + size;
        float *to = out + row * size;
        for (int64_t i = 0; i < size; i++) to[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
    }
}

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

/* Parts of x [rows, size] as [size, rows of the part]: what is needed together lies together, and not all in
 * the same few cache lines, as it would if rows were a power of two long. */
static void interleave(float *to, const float *x, int64_t rows, int64_t size, int64_t num_parts) {
    #pragma omp parallel for if (rows * size * 8 > MIN_PARALLEL)
    for (int64_t part = 0; part < num_parts; part++) {
        const int64_t first = part * rows / num_parts, num_rows = (part + 1) * rows / num_parts - first;
        float *out = to + first * size;
        const float *from = x + first * size;
        for (int64_t k = 0; k < size; k++)
            for (int64_t row = 0; row < num_rows; row++) *out++ = from[row * size + k];
    }
}

/* out [rows, out_features] = x [rows, in_features] times the weights, plus bias, plus residual or NULL,
 * which may be out itself. */
void multiply(const Product *product, float *out, const float *x, const float *residual, int64_t rows) {
    const int64_t in = product->in_features, width = product->out_features;
    int64_t num_parts = (rows + MAX_ROWS - 1) / MAX_ROWS;
    float *room = num_parts < rows ? room_for(rows * in) : NULL;
    if (room) {
        interleave(room, x, rows, in, num_parts);
        x = room;
    } else {
        num_parts = rows; /* single rows are in order as they are */
    }
    #pragma omp parallel for if (in * width * rows > MIN_PARALLEL)
    for (int64_t column = 0; column < width; column += PANEL) {
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
}

/* Columns of a Product's weights together, panel by panel: what the weights must be laid out as. */
int64_t panel_size(void) { return PANEL; }

/* Slots of ``length`` positions of a span, from ``begin`` on. */
static inline void find_slots(int64_t *slots, const Spans *spans, int64_t span, int64_t begin, int64_t length) {
    const int64_t *block = spans->blocks + spans->first_block[span] + begin / spans->block_size;
    int64_t offset = begin % spans->block_size;
    for (int64_t j = 0; j < length; j++) {
        slots[j] = *block * spans->block_size + offset;
        if (++offset == spans->block_size) {
            offset = 0;
            block++;
        }
    }
}

/* (a, b) to (a cos - b sin, b cos + a sin), halves of one head; in place. */
static inline void rotate(float *x, const float *cos, const float *sin, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] + b * sin[i];
        x[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}

/* Norms, rotates and stores one token's heads: qkv [num_heads + 2 * num_kv_heads, head_size]. */
static void place(const Spans *spans, const Layer *layer, float *qkv, int64_t token) {
    const int64_t size = layer->head_size, rotated = layer->num_heads + layer->num_kv_heads;
    const int64_t angle = spans->angle[token], to = spans->slots[token];
    for (int64_t head = 0; head < rotated; head++) {
        float *x = qkv + head * size;
        if (layer->norm_weight) norm_row(x, x, layer->norm_weight + head * size, size, layer->norm_eps);
        rotate(x, spans->cos + angle * size, spans->sin + angle * size, size);
    }
    const int64_t width = layer->num_kv_heads * size;
    memcpy(layer->keys + to * width, qkv + layer->num_heads * size, width * sizeof(float));
    memcpy(layer->values + to * width, qkv + rotated * size, width * sizeof(float));
}

static inline ALWAYS float sum_of(vec x) {
    float sum = 0.0f;
#if LANES == 16 && __has_builtin(__builtin_shufflevector)
    typedef float half __attribute__((vector_size(32)));
    typedef float quarter __attribute__((vector_size(16)));
    half h = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7)
           + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    quarter q = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
    q += __builtin_shufflevector(q, q, 2, 3, 0, 1);
    sum = q[0] + q[1];
#else
    for (int i = 0; i < LANES; i++) sum += x[i];
#endif
    return sum;
}

/* Scores of one query's chunk to weights, from ``from`` to ``last``, 0 elsewhere. Returns their sum;
 * *best is the highest score so far. */
static inline ALWAYS float soften(float *score, int64_t from, int64_t last, float *best) {
    for (int64_t j = 0; j < from; j++) score[j] = -INFINITY;
    for (int64_t j = last; j < CHUNK; j++) score[j] = -INFINITY;
    float highest[LANES], sum = 0.0f;
    for (int i = 0; i < LANES; i++) highest[i] = *best;
    for (int64_t j = 0; j < CHUNK; j += LANES)
        for (int i = 0; i < LANES; i++) highest[i] = score[j + i] > highest[i] ? score[j + i] : highest[i];
    for (int i = 0; i < LANES; i++) *best = highest[i] > *best ? highest[i] : *best;
    for (int64_t j = 0; j < CHUNK; j++) score[j] = fast_exp(score[j] - *best);
    for (int64_t j = 0; j < from; j++) score[j] = 0.0f;
    for (int64_t j = last; j < CHUNK; j++) score[j] = 0.0f;
    for (int64_t j = 0; j < CHUNK; j++) sum += score[j];
    return sum;
}

/* One span's queries against its keys and values, for the kv heads from first_head to end_head, with a
 * running softmax (arXiv 1805.02867). Cached tokens are read from end to end, once, as memory likes it.
 * Inlined for the usual head sizes, LANES * width, so that a head stays in registers. */
static inline ALWAYS void attend_span(
    const Spans *spans, const Layer *layer, int64_t span, int64_t first_head, int64_t end_head,
    const float *qkv, float *out, const int64_t width) {
    const int64_t size = LANES * width;
    const int64_t first = spans->first_token[span], num_queries = spans->first_token[span + 1] - first;
    const int64_t shared = layer->num_heads / layer->num_kv_heads;
    const int64_t heads = (end_head - first_head) * shared, rows = num_queries * heads;
    const int64_t qkv_size = (layer->num_heads + 2 * layer->num_kv_heads) * size;
    const int64_t out_size = layer->num_heads * size, kv_size = layer->num_kv_heads * size;
    const int64_t stored = spans->num_stored[span], num_keys = stored + num_queries;
    qkv += first * qkv_size + first_head * shared * size;
    out += first * out_size + first_head * shared * size;
    const float *keys = layer->keys + first_head * size, *values = layer->values + first_head * size;
    float best[rows], total[rows], scores[rows][CHUNK];
    for (int64_t row = 0; row < rows; row++) {
        best[row] = -INFINITY;
        total[row] = 0.0f;
    }
    for (int64_t query = 0; query < num_queries; query++)
        memset(out + query * out_size, 0, heads * size * sizeof(float));
    int64_t begin = 0;
    if (layer->window && stored + 1 > layer->window) begin = stored + 1 - layer->window;
    for (; begin < num_keys; begin += CHUNK) {
        const int64_t length = num_keys - begin < CHUNK ? num_keys - begin : CHUNK;
        int64_t offset[CHUNK];
        find_slots(offset, spans, span, begin, length);
        for (int64_t j = 0; j < length; j++) offset[j] *= kv_size;
        for (int64_t j = 0; j < length; j++) {
            const int64_t at = offset[j];
            for (int64_t i = 0; i < (end_head - first_head) * size; i += 16)
                __builtin_prefetch(values + at + i);
            for (int64_t head = 0; head < heads; head++) {
                const vec *key = (const vec *)(keys + at + head / shared * size);
                for (int64_t query = 0; query < num_queries; query++) {
                    const vec *of = (const vec *)(qkv + query * qkv_size + head * size);
                    vec score = of[0] * key[0];
                    UNROLL
                    for (int64_t i = 1; i < width; i++) score += of[i] * key[i];
                    scores[head * num_queries + query][j] = sum_of(score) * layer->scaling;
                }
            }
        }
        for (int64_t row = 0; row < rows; row++) {
            const int64_t head = row / num_queries, query = row % num_queries;
            const int64_t past = stored + query + 1 - begin, window_start = past - layer->window;
            const int64_t last = past < length ? past : length;
            const int64_t from = layer->window && window_start > 0 ? window_start : 0;
            if (from >= last) continue;
            const float before = best[row], sum = soften(scores[row], from, last, &best[row]);
            const float shrink = before == -INFINITY ? 0.0f : fast_exp(before - best[row]);
            total[row] = total[row] * shrink + sum;
            vec *to = (vec *)(out + query * out_size + head * size), value[MAX_WIDTH];
            UNROLL
            for (int64_t i = 0; i < width; i++) value[i] = to[i] * shrink;
            for (int64_t j = from; j < last; j++) {
                const vec *of = (const vec *)(values + offset[j] + head / shared * size);
                UNROLL
                for (int64_t i = 0; i < width; i++) value[i] += scores[row][j] * of[i];
            }
            UNROLL
            for (int64_t i = 0; i < width; i++) to[i] = value[i];
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        float *to = out + row % num_queries * out_size + row / num_queries * size;
        for (int64_t i = 0; i < size; i++) to[i] /= total[row];
    }
}

static void attend_part(const Spans *spans, const Layer *layer, int64_t span, int64_t part,
                        int64_t num_parts, const float *qkv, float *out) {
    if (spans->first_token[span + 1] - spans->first_token[span] > spans->max_queries) return;
    const int64_t first = part * layer->num_kv_heads / num_parts;
    const int64_t end = (part + 1) * layer->num_kv_heads / num_parts;
    switch (layer->head_size) {
        case 64: attend_span(spans, layer, span, first, end, qkv, out, 64 / LANES); break;
        case 128: attend_span(spans, layer, span, first, end, qkv, out, 128 / LANES); break;
        default: attend_span(spans, layer, span, first, end, qkv, out, layer->head_size / LANES);
    }
}

/* Stores the new tokens and attends: qkv [num_tokens, num_heads + 2 * num_kv_heads, head_size], whose
 * queries are normed and rotated in place; out [num_tokens, num_heads, head_size]. */
void attend(const Spans *spans, const Layer *layer, float *qkv, float *out) {
    const int64_t width = (layer->num_heads + 2 * layer->num_kv_heads) * layer->head_size;
    #pragma omp parallel for if (spans->num_tokens * width * 4 > MIN_PARALLEL)
    for (int64_t token = 0; token < spans->num_tokens; token++)
        place(spans, layer, qkv + token * width, token);
    int64_t num_scores = 0;
    for (int64_t span = 0; span < spans->num_spans; span++) {
        const int64_t num_queries = spans->first_token[span + 1] - spans->first_token[span];
        if (num_queries <= spans->max_queries)
            num_scores += num_queries * (spans->num_stored[span] + num_queries);
    }
    /* Heads are shared out only where there are fewer spans than threads. */
    int64_t split = (omp_get_max_threads() + spans->num_spans - 1) / spans->num_spans;
    if (split > layer->num_kv_heads) split = layer->num_kv_heads;
    #pragma omp parallel for schedule(dynamic) \
        if (num_scores * layer->num_heads * layer->head_size * 2 > MIN_PARALLEL)
    for (int64_t i = 0; i < spans->num_spans * split; i++)
        attend_part(spans, layer, i / split, i % split, split, qkv, out);
}
