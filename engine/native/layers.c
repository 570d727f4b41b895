/* What a Llama-shaped layer does between its matrix products, for a few float32 rows on a CPU.
 *
 * torch spends a microsecond or more on starting each small operation, and a layer has some forty of them.
 * Here they are three calls: a norm, everything from rotary embedding to attention, a gated activation.
 * Rows of different lengths are attended as they are, straight from the cache: no padding, no copies.
 *
 * All arrays are float32 and row-major. "library.py" compiles this file and declares what it is called with.
 */

#include "kernels.h"
#include "vectors.h"

/* Cached tokens that are looked at together. */
#define CHUNK 32
/* Keys are fetched this many tokens before they are scored: where a thread reads some of the heads, the processor's
 * own prefetching ends with each token. */
#define AHEAD 8
/* A head of 256; head sizes are multiples of 16. */
#define MAX_WIDTH (256 / LANES)

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

static inline void norm_row(float *out, const float *x, const float *weight, const float *residual, int64_t size,
                            float eps) {
    float sum = 0.0f;
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / (float)size + eps);
    if (residual) {
        for (int64_t i = 0; i < size; i++) out[i] = residual[i] + x[i] * scale * weight[i];
    } else {
        for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
    }
}

typedef struct {
    float *out;
    const float *x, *weight, *residual;
    int64_t size;
    float eps;
} Norm;

static void norm_task(const void *arguments, int64_t row) {
    const Norm *norm = arguments;
    const int64_t at = row * norm->size;
    const float *residual = norm->residual ? norm->residual + at : NULL;
    norm_row(norm->out + at, norm->x + at, norm->weight, residual, norm->size, norm->eps);
}

/* RMSNorm (arXiv 1910.07467) of rows [rows, size], plus the residual unless that is NULL; it may be out. */
void rms_norm(float *out, const float *x, const float *weight, const float *residual, int64_t rows, int64_t size,
              float eps) {
    run_task(norm_task, &(Norm){ out, x, weight, residual, size, eps }, rows, rows * size * 4);
}

typedef struct {
    float *out;
    const float *gate_up;
    int64_t activation, size;
} Gate;

static void gate_task(const void *arguments, int64_t row) {
    const Gate *of = arguments;
    const int64_t size = of->size;
    const float *gate = of->gate_up + row * 2 * size, *up = gate + size;
    float *out = of->out + row * size;
    if (of->activation == SILU) {
        for (int64_t i = 0; i < size; i++) out[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
    } else {
        /* 1 + tanh(u) is 2 / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3). */
        for (int64_t i = 0; i < size; i++) {
            const float x = gate[i], twice = 1.59576912f * (x + 0.044715f * x * x * x);
            out[i] = x / (1.0f + fast_exp(-twice)) * up[i];
        }
    }
}

/* out [rows, size] = activation(gate) * up of gate_up [rows, 2 * size]. */
void gate(float *out, const float *gate_up, int64_t activation, int64_t rows, int64_t size) {
    run_task(gate_task, &(Gate){ out, gate_up, activation, size }, rows, rows * size * 16);
}

static inline ALWAYS void cap_row(float *x, int64_t size, float softcap) {
    for (int64_t i = 0; i < size; i++)
        x[i] = softcap - 2.0f * softcap / (1.0f + fast_exp(2.0f / softcap * x[i])); /* c tanh(x / c) */
}

typedef struct {
    float *x;
    int64_t size;
    float softcap;
} Cap;

static void cap_task(const void *arguments, int64_t row) {
    const Cap *of = arguments;
    cap_row(of->x + row * of->size, of->size, of->softcap);
}

/* Soft cap (arXiv 2408.00118) of rows [rows, size]. */
void cap(float *x, int64_t rows, int64_t size, float softcap) {
    run_task(cap_task, &(Cap){ x, size, softcap }, rows, rows * size * 16);
}

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

/* (a, b) to (a cos - b sin, b cos + a sin), halves of a head or of its first numbers; in place. */
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
    const int64_t rotary_size = spans->rotary_size, to = spans->slots[token];
    const int64_t angle = (layer->rotary * spans->num_angles + spans->angle[token]) * rotary_size;
    for (int64_t head = 0; head < rotated; head++) {
        float *x = qkv + head * size;
        if (layer->norm_weight) norm_row(x, x, layer->norm_weight + head * size, NULL, size, layer->norm_eps);
        rotate(x, spans->cos + angle, spans->sin + angle, rotary_size);
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
    const float scaling = layer->scaling;
    float best[rows], total[rows], scores[rows][CHUNK];
    for (int64_t row = 0; row < rows; row++) {
        best[row] = -INFINITY;
        total[row] = 0.0f;
    }
    for (int64_t query = 0; query < num_queries; query++)
        memset(out + query * out_size, 0, heads * size * sizeof(float));
    int64_t begin = 0;
    /* Chunks begin at the same tokens whatever the span: a query's sums must not depend on its neighbours. */
    if (layer->window && stored + 1 > layer->window)
        begin = (stored + 1 - layer->window) / CHUNK * CHUNK;
    for (; begin < num_keys; begin += CHUNK) {
        const int64_t length = num_keys - begin < CHUNK ? num_keys - begin : CHUNK;
        const int64_t known = num_keys - begin < CHUNK + AHEAD ? num_keys - begin : CHUNK + AHEAD;
        int64_t offset[CHUNK + AHEAD];
        find_slots(offset, spans, span, begin, known);
        for (int64_t j = 0; j < known; j++) offset[j] *= kv_size;
        for (int64_t j = 0; j < length; j++) {
            const int64_t at = offset[j], later = offset[j + AHEAD < known ? j + AHEAD : j];
            for (int64_t i = 0; i < (end_head - first_head) * size; i += 16) {
                __builtin_prefetch(values + at + i);
                __builtin_prefetch(keys + later + i);
            }
            const float *at_head = keys + at;
            for (int64_t head = 0; head < heads; at_head += size) {
                const vec *key = (const vec *)at_head;
                for (int64_t end = head + shared; head < end; head++) {
                    for (int64_t query = 0; query < num_queries; query++) {
                        const vec *of = (const vec *)(qkv + query * qkv_size + head * size);
                        vec score = of[0] * key[0];
                        UNROLL
                        for (int64_t i = 1; i < width; i++) score += of[i] * key[i];
                        scores[head * num_queries + query][j] = sum_of(score) * scaling;
                    }
                }
            }
        }
        for (int64_t row = 0; row < rows; row++) {
            const int64_t head = row / num_queries, query = row % num_queries;
            const int64_t past = stored + query + 1 - begin, window_start = past - layer->window;
            const int64_t last = past < length ? past : length;
            const int64_t from = layer->window && window_start > 0 ? window_start : 0;
            if (from >= last) continue;
            if (layer->softcap > 0) cap_row(scores[row], CHUNK, layer->softcap);
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

/* ``split``: parts of the heads of each span, which are items of their own. */
typedef struct {
    const Spans *spans;
    const Layer *layer;
    int64_t split;
    float *qkv, *out;
} Attention;

static void place_task(const void *arguments, int64_t token) {
    const Attention *of = arguments;
    const int64_t width = (of->layer->num_heads + 2 * of->layer->num_kv_heads) * of->layer->head_size;
    place(of->spans, of->layer, of->qkv + token * width, token);
}

static void attend_task(const void *arguments, int64_t item) {
    const Attention *of = arguments;
    const Spans *spans = of->spans;
    const Layer *layer = of->layer;
    const float *qkv = of->qkv;
    float *out = of->out;
    const int64_t span = item / of->split, part = item % of->split;
    const int64_t first = part * layer->num_kv_heads / of->split;
    const int64_t end = (part + 1) * layer->num_kv_heads / of->split;
    switch (layer->head_size) {
        case 64: attend_span(spans, layer, span, first, end, qkv, out, 64 / LANES); break;
        case 128: attend_span(spans, layer, span, first, end, qkv, out, 128 / LANES); break;
        default: attend_span(spans, layer, span, first, end, qkv, out, layer->head_size / LANES);
    }
}

/* Stores the new tokens and attends: qkv [num_tokens, num_heads + 2 * num_kv_heads, head_size], whose
 * queries are normed and rotated in place; out [num_tokens, num_heads, head_size]. */
void attend(const Spans *spans, const Layer *layer, float *qkv, float *out) {
    /* Heads are shared out only where there are fewer spans than threads. */
    int64_t split = (get_num_threads() + spans->num_spans - 1) / spans->num_spans;
    if (split > layer->num_kv_heads) split = layer->num_kv_heads;
    const Attention attention = { spans, layer, split, qkv, out };
    const int64_t width = (layer->num_heads + 2 * layer->num_kv_heads) * layer->head_size;
    run_task(place_task, &attention, spans->num_tokens, spans->num_tokens * width * 4);
    int64_t num_scores = 0;
    for (int64_t span = 0; span < spans->num_spans; span++) {
        const int64_t num_queries = spans->first_token[span + 1] - spans->first_token[span];
        num_scores += num_queries * (spans->num_stored[span] + num_queries);
    }
    /* A score and its share of the values take as long as eight times its multiplications in a product. */
    run_task(attend_task, &attention, spans->num_spans * split,
             num_scores * layer->num_heads * layer->head_size * 8);
}
