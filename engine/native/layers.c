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
/* Queries of a span that score the keys token by token. More do it otherwise where instructions name the sums, so that
 * no compiler chooses another order for them. */
#define MAX_FEW 8
#if LANES >= 8 && defined(__FMA__)
#define ARE_FUSED 1
#else
#define ARE_FUSED 0
#endif
/* A head of 256; head sizes are multiples of 16. */
#define MAX_WIDTH (256 / LANES)
/* Statements with WIDTH, the vectors of a head: compiled for the usual head sizes, so that a head stays in registers. */
#define BY_WIDTH(size, ...) \
    do { \
        if ((size) == 64) { const int64_t WIDTH = 64 / LANES; __VA_ARGS__ } \
        else if ((size) == 128) { const int64_t WIDTH = 128 / LANES; __VA_ARGS__ } \
        else { const int64_t WIDTH = (size) / LANES; __VA_ARGS__ } \
    } while (0)

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

/* RMSNorm (arXiv 1910.07467) of rows [rows, size], plus the residual unless that is NULL; it may be out. */
void rms_norm(float *out, const float *x, const float *weight, const float *residual, int64_t rows, int64_t size,
              float eps) {
    FOR_EACH(row, rows, rows * size * 4,
             norm_row(out + row * size, x + row * size, weight, residual ? residual + row * size : NULL, size, eps));
}

static inline void gate_row(float *out, const float *gate, const float *up, int64_t activation, int64_t size) {
    if (activation == SILU) {
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
    FOR_EACH(row, rows, rows * size * 16,
             gate_row(out + row * size, gate_up + row * 2 * size, gate_up + (row * 2 + 1) * size, activation, size));
}

static inline ALWAYS void cap_row(float *x, int64_t size, float softcap) {
    for (int64_t i = 0; i < size; i++)
        x[i] = softcap - 2.0f * softcap / (1.0f + fast_exp(2.0f / softcap * x[i])); /* c tanh(x / c) */
}

/* Soft cap (arXiv 2408.00118) of rows [rows, size]. */
void cap(float *x, int64_t rows, int64_t size, float softcap) {
    FOR_EACH(row, rows, rows * size * 16, cap_row(x + row * size, size, softcap));
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

/* A score's sums have one order in both loops for it. */
static inline ALWAYS vec multiply_add(vec a, vec b, vec sum) {
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif ARE_FUSED
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return a * b + sum;
#endif
}

/* Products of a query's and a key's numbers, summed up but for the lanes. */
static inline ALWAYS vec multiply_heads(const vec *query, const vec *key, const int64_t width) {
    vec sum = query[0] * key[0];
    UNROLL
    for (int64_t i = 1; i < width; i++) sum = multiply_add(query[i], key[i], sum);
    return sum;
}

typedef float quad __attribute__((vector_size(16)));

static inline ALWAYS float sum_of(vec x) {
#if LANES == 16
    typedef float half __attribute__((vector_size(32)));
    const half h = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7)
                 + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    const vec h = x;
#endif
#if LANES >= 8
    quad q = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
#else
    quad q = h;
#endif
    q += __builtin_shufflevector(q, q, 2, 3, 0, 1);
    return q[0] + q[1];
}

#if ARE_FUSED
/* sum_of each of LANES vectors in fewer steps: quarters first, of those LANES / 4 whose numbers differ by multiples of
 * four, then within quarters. */
#if LANES == 16
#define ADD(kind, a, b, low, high) \
    ((vec)_mm512_shuffle_##kind((__m512)(a), (__m512)(b), low) + (vec)_mm512_shuffle_##kind((__m512)(a), (__m512)(b), high))
static inline ALWAYS vec sum_quarters(const vec x[LANES / 4]) {
    const vec first = ADD(f32x4, x[0], x[1], 0x44, 0xee), second = ADD(f32x4, x[2], x[3], 0x44, 0xee);
    return ADD(f32x4, first, second, 0x88, 0xdd);
}
#else
#define ADD(kind, a, b, low, high) \
    ((vec)_mm256_shuffle_##kind((__m256)(a), (__m256)(b), low) + (vec)_mm256_shuffle_##kind((__m256)(a), (__m256)(b), high))
static inline ALWAYS vec sum_quarters(const vec x[LANES / 4]) {
    return (vec)_mm256_permute2f128_ps((__m256)x[0], (__m256)x[1], 0x20)
         + (vec)_mm256_permute2f128_ps((__m256)x[0], (__m256)x[1], 0x31);
}
#endif
static inline ALWAYS vec sum_within(const vec x[4]) {
    const vec first = ADD(ps, x[0], x[1], 0x44, 0xee), second = ADD(ps, x[2], x[3], 0x44, 0xee);
    return ADD(ps, first, second, 0x88, 0xdd);
}
#endif

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

/* Where the keys and values of a chunk's tokens begin: ``known`` of them, the first ``length`` to be looked at. */
typedef struct {
    int64_t length, known, offset[CHUNK + AHEAD];
} Chunk;

/* Scores [heads, queries, CHUNK] of some queries, as memory likes it: tokens are read from end to end, once. */
static __attribute__((noinline)) void score_tokens(
    float *scores, const Layer *layer, const Chunk *chunk, const float *queries, const float *keys, const float *values,
    int64_t num_queries, int64_t kv_heads) {
    const int64_t size = layer->head_size, shared = layer->num_heads / layer->num_kv_heads, heads = kv_heads * shared;
    const int64_t qkv_size = (layer->num_heads + 2 * layer->num_kv_heads) * size;
    BY_WIDTH(size, for (int64_t j = 0; j < chunk->length; j++) {
        const int64_t at = chunk->offset[j], later = chunk->offset[j + AHEAD < chunk->known ? j + AHEAD : j];
        for (int64_t i = 0; i < kv_heads * size; i += 16) {
            __builtin_prefetch(values + at + i);
            __builtin_prefetch(keys + later + i);
        }
        const float *key = keys + at;
        for (int64_t head = 0; head < heads; key += size)
            for (int64_t end = head + shared; head < end; head++)
                for (int64_t query = 0; query < num_queries; query++) {
                    const float *of = queries + query * qkv_size + head * size;
                    const vec score = multiply_heads((const vec *)of, (const vec *)key, WIDTH);
                    scores[(head * num_queries + query) * CHUNK + j] = sum_of(score) * layer->scaling;
                }
    });
}

#if ARE_FUSED
/* The same scores of one query and the first ``length`` tokens, LANES at a time; of some more, too. */
static __attribute__((noinline)) void score_query(
    float *scores, const Layer *layer, const Chunk *chunk, const float *query, const float *keys, int64_t length) {
    const vec *of = (const vec *)query;
    BY_WIDTH(layer->head_size, for (int64_t j = 0; j < length; j += LANES) {
        vec quads[4];
        UNROLL
        for (int i = 0; i < 4; i++) {
            vec products[LANES / 4];
            UNROLL
            for (int quarter = 0; quarter < LANES / 4; quarter++) {
                const int64_t number = j + 4 * quarter + i, at = chunk->offset[number < length ? number : length - 1];
                products[quarter] = multiply_heads(of, (const vec *)(keys + at), WIDTH);
            }
            quads[i] = sum_quarters(products);
        }
        *(vec *)(scores + j) = sum_within(quads) * layer->scaling;
    });
}
#endif

/* Adds a chunk's tokens ``from`` to ``last`` to a query's running softmax (arXiv 1805.02867): to its sum of the weights
 * ``total`` and of the weighted values ``out``, which are as if the highest score so far, ``best``, were 0. */
static __attribute__((noinline)) void weigh(
    float *out, float *best, float *total, float *scores, const Layer *layer, const Chunk *chunk, const float *values,
    int64_t from, int64_t last) {
    if (layer->softcap > 0) cap_row(scores, CHUNK, layer->softcap);
    const float before = *best, sum = soften(scores, from, last, best);
    const float shrink = before == -INFINITY ? 0.0f : fast_exp(before - *best);
    *total = *total * shrink + sum;
    BY_WIDTH(layer->head_size, {
        vec *to = (vec *)out, value[MAX_WIDTH];
        UNROLL
        for (int64_t i = 0; i < WIDTH; i++) value[i] = to[i] * shrink;
        for (int64_t j = from; j < last; j++) {
            const vec *of = (const vec *)(values + chunk->offset[j]);
            UNROLL
            for (int64_t i = 0; i < WIDTH; i++) value[i] += scores[j] * of[i];
        }
        UNROLL
        for (int64_t i = 0; i < WIDTH; i++) to[i] = value[i];
    });
}

/* One span's queries against its keys and values, for the kv heads from first_head to end_head. */
static void attend_span(const Spans *spans, const Layer *layer, int64_t span, int64_t first_head, int64_t end_head,
                        const float *qkv, float *out, int are_many) {
    const int64_t size = layer->head_size;
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
    /* Chunks begin at the same tokens whatever the span: a query's sums must not depend on its neighbours. */
    if (layer->window && stored + 1 > layer->window)
        begin = (stored + 1 - layer->window) / CHUNK * CHUNK;
    for (; begin < num_keys; begin += CHUNK) {
        const int64_t left = num_keys - begin;
        Chunk chunk = { .length = left < CHUNK ? left : CHUNK, .known = left < CHUNK + AHEAD ? left : CHUNK + AHEAD };
        find_slots(chunk.offset, spans, span, begin, chunk.known);
        for (int64_t j = 0; j < chunk.known; j++) chunk.offset[j] *= kv_size;
        if (!are_many)
            score_tokens(scores[0], layer, &chunk, qkv, keys, values, num_queries, end_head - first_head);
        for (int64_t row = 0; row < rows; row++) {
            const int64_t head = row / num_queries, query = row % num_queries, kv_head = head / shared * size;
            const int64_t past = stored + query + 1 - begin, window_start = past - layer->window;
            const int64_t last = past < chunk.length ? past : chunk.length;
            const int64_t from = layer->window && window_start > 0 ? window_start : 0;
            if (from >= last) continue;
#if ARE_FUSED
            if (are_many)
                score_query(scores[row], layer, &chunk, qkv + query * qkv_size + head * size, keys + kv_head, last);
#endif
            weigh(out + query * out_size + head * size, &best[row], &total[row], scores[row], layer, &chunk,
                  values + kv_head, from, last);
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        float *to = out + row % num_queries * out_size + row / num_queries * size;
        for (int64_t i = 0; i < size; i++) to[i] /= total[row];
    }
}

/* A part of the kv heads; of many queries one after the other, as a head's keys and scores stay in the cache then. */
static void attend_part(const Spans *spans, const Layer *layer, int64_t span, int64_t part, int64_t num_parts,
                        const float *qkv, float *out) {
    const int64_t first = part * layer->num_kv_heads / num_parts;
    const int64_t end = (part + 1) * layer->num_kv_heads / num_parts;
    const int are_many = ARE_FUSED && spans->first_token[span + 1] - spans->first_token[span] > MAX_FEW;
    const int64_t step = are_many ? 1 : end - first;
    for (int64_t head = first; head < end; head += step)
        attend_span(spans, layer, span, head, head + step, qkv, out, are_many);
}

/* Stores the new tokens and attends: qkv [num_tokens, num_heads + 2 * num_kv_heads, head_size], whose
 * queries are normed and rotated in place; out [num_tokens, num_heads, head_size]. */
void attend(const Spans *spans, const Layer *layer, float *qkv, float *out) {
    const int64_t width = (layer->num_heads + 2 * layer->num_kv_heads) * layer->head_size;
    FOR_EACH(token, spans->num_tokens, spans->num_tokens * width * 4,
             place(spans, layer, qkv + token * width, token));
    int64_t num_scores = 0;
    for (int64_t span = 0; span < spans->num_spans; span++) {
        const int64_t num_queries = spans->first_token[span + 1] - spans->first_token[span];
        num_scores += num_queries * (spans->num_stored[span] + num_queries);
    }
    /* Heads are shared out only where there are fewer spans than threads. */
    int64_t split = (omp_get_max_threads() + spans->num_spans - 1) / spans->num_spans;
    if (split > layer->num_kv_heads) split = layer->num_kv_heads;
    /* The last parts of a prompt take longest, and come first. A score and its share of the values take as long as
     * eight times its multiplications in a product. */
    FOR_EACH_UNEVEN(i, spans->num_spans * split, num_scores * layer->num_heads * layer->head_size * 8,
                    attend_part(spans, layer, spans->num_spans - 1 - i / split, i % split, split, qkv, out));
}
