/* Attention over the paged cache, for float32 rows on a CPU: a decoding row's, or a prompt's. The cache is in float32,
 * or in float16 or int8, whose numbers are widened as they are read. The scales of int8 multiply scores, and weights of
 * values.
 *
 * Rows of different lengths are attended as they are, straight from the cache: no padding, no copies. A query's sums
 * have one order, however many queries there are.
 */

/* Sums keep the order that is written here, and how they are rounded is left to ``multiply_add``. */
#if defined(__clang__)
#pragma clang fp reassociate(off)
#else
#pragma GCC optimize("no-associative-math")
#endif

#include <float.h>

#include "kernels.h"
#include "vectors.h"

/* Cached tokens that are looked at together. */
#define CHUNK 32
/* Keys are fetched this many tokens before they are scored: where a thread reads some of the heads, the processor's
 * own prefetching ends with each token. */
#define AHEAD 8
/* A head of 576; head sizes are multiples of 16. */
#define MAX_WIDTH (576 / LANES)
/* Vectors of values that two rows' sums of them have registers for. */
#define STRIP 4
/* Queries of a span that are attended together; of a prompt, those that an item of work has. */
#define QUERIES 32
/* Queries of a kv head, of all heads that share it, that an item of work has, if it has more than one token. */
#define MAX_ITEM_ROWS 1024
/* From this many queries of a kv head on, its keys are turned over, so that a vector holds one number of many keys. */
#define TURNED_FROM 8

/* Slots of ``length`` positions of a span, from ``begin`` on, in layers of that kind. */
static inline void find_slots(int64_t *slots, const Spans *spans, int64_t kind, int64_t span, int64_t begin,
                              int64_t length) {
    const int64_t *block = spans->blocks + spans->first_block[span] + begin / spans->block_size * spans->num_kinds + kind;
    int64_t offset = begin % spans->block_size;
    for (int64_t j = 0; j < length; j++) {
        slots[j] = *block * spans->block_size + offset;
        if (++offset == spans->block_size) {
            offset = 0;
            block += spans->num_kinds;
        }
    }
}

/* (a, b) to (a cos - b sin, b cos + a sin) in place, of numbers that are so far apart. */
static void rotate(float *x, const float *cos, const float *sin, int64_t pairs, int64_t distance) {
    for (int64_t i = 0; i < pairs; i++) {
        const float a = x[i], b = x[distance + i];
        x[i] = a * cos[i] + b * sin[i];
        x[distance + i] = b * cos[pairs + i] + a * sin[pairs + i];
    }
}

/* The same of neighbours. */
static void rotate_neighbours(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos[i] + b * sin[i];
        x[2 * i + 1] = b * cos[half + i] + a * sin[half + i];
    }
}

/* Numbers that come in for each token. */
static inline int64_t qkv_width(const Heads *layer) {
    const int64_t num_stored = layer->is_reader ? 0 : layer->num_kv_heads;
    const int64_t num_values = layer->values_are_keys ? 0 : num_stored;
    return ((layer->gated ? 2 : 1) * layer->num_heads + num_stored + num_values) * layer->head_size;
}

/* Float16 has no larger numbers: what is larger, and finite, becomes this. */
#define LARGEST_HALF 65504.0f

/* Bytes that a cached head takes. */
static inline ALWAYS int64_t bytes_of_head(const int64_t size, const int64_t type) {
    return type == WHOLE8 ? size + (int64_t)sizeof(float) : size * (type == FLOAT32 ? 4 : 2);
}

/* Vector ``i`` of cached numbers of that type, as float32; those of WHOLE8 without their scale. */
static inline ALWAYS vec cached(const char *from, const int64_t i, const int64_t type) {
    if (type == FLOAT16) return widen((const uint16_t *)from + i * LANES);
    if (type == WHOLE8) return widen_eight((const uint8_t *)from + i * LANES, 1);
    return ((const vec *)from)[i];
}

static inline uint16_t to_half(float x) {
    const float size = fabsf(x);
    if (size > LARGEST_HALF && size < INFINITY) x = copysignf(LARGEST_HALF, x);
    const _Float16 half = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

/* The largest number of int8 that is used. */
#define MOST 127

/* A head in int8, and after it what multiplies it: as kv_cache.py does, whose bits these are. */
static void quantise(int8_t *to, const float *x, int64_t size) {
    /* Numbers that are none or infinite have the largest bits. */
    uint32_t bits, largest = 0;
    for (int64_t i = 0; i < size; i++) {
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float scale;
    memcpy(&scale, &largest, sizeof scale);
    scale *= 1.0f / MOST;
    if (scale < FLT_MIN) scale = 0.0f;
    const int is_usual = scale > 0.0f && scale < INFINITY;
    const float inverse = is_usual ? 1.0f / scale : 0.0f;
    for (int64_t i = 0; i < size; i++) to[i] = is_usual ? (int8_t)rintf(x[i] * inverse) : 0;
    memcpy(to + size, &scale, sizeof scale);
}

/* Heads of one token into a slot of a cache. */
static void store(void *cache, int64_t slot, const float *x, int64_t num_heads, int64_t size, int64_t type) {
    const int64_t head_bytes = bytes_of_head(size, type);
    char *to = (char *)cache + slot * num_heads * head_bytes;
    for (int64_t head = 0; head < num_heads; head++, x += size, to += head_bytes) {
        if (type == FLOAT32) memcpy(to, x, head_bytes);
        else if (type == WHOLE8) quantise((int8_t *)to, x, size);
        else for (int64_t i = 0; i < size; i++) ((uint16_t *)to)[i] = to_half(x[i]);
    }
}

/* Norms, rotates and stores one token's heads: qkv [num_heads + 2 * num_kv_heads, head_size], or without values, or
 * queries only. */
static void place(const Spans *spans, const Heads *layer, float *qkv, int64_t token) {
    const int64_t size = layer->head_size, num_stored = layer->is_reader ? 0 : layer->num_kv_heads;
    const int64_t rotated = layer->num_heads + num_stored;
    const int64_t rotary_size = spans->rotary_size, to = spans->slots[layer->kind * spans->num_tokens + token];
    const int64_t angle = (layer->rotary * spans->num_angles + spans->angle[token]) * rotary_size;
    float *keys = qkv + layer->num_heads * size;
    const int64_t pairs = layer->turned_pairs ? layer->turned_pairs : rotary_size / 2;
    const int64_t distance = layer->distance ? layer->distance : pairs;
    const float *cos = spans->cos + angle, *sin = spans->sin + angle;
    if (layer->query_norm) norm_row(qkv, qkv, layer->query_norm, NULL, layer->num_heads * size, layer->norm_eps);
    if (layer->key_norm) norm_row(keys, keys, layer->key_norm, NULL, layer->num_kv_heads * size, layer->norm_eps);
    for (int64_t head = 0; head < rotated; head++) {
        float *x = qkv + head * size;
        const float *weight = layer->norm_weight ? layer->norm_weight + head * size : NULL;
        if (weight && !layer->norm_after_rotary) norm_row(x, x, weight, NULL, size, layer->norm_eps);
        if (layer->rotary >= 0) {
            if (layer->interleaved) rotate_neighbours(x, cos, sin, pairs);
            else rotate(x, cos, sin, pairs, distance);
        }
        if (weight && layer->norm_after_rotary) norm_row(x, x, weight, NULL, size, layer->norm_eps);
    }
    float *values = qkv + rotated * size;
    for (int64_t head = 0; layer->value_norm && head < num_stored; head++)
        norm_row(values + head * size, values + head * size, layer->value_norm, NULL, size, layer->norm_eps);
    if (layer->is_reader) return;
    store(layer->keys, to, keys, num_stored, size, layer->cache_type);
    if (!layer->values_are_keys) store(layer->values, to, values, num_stored, size, layer->cache_type);
}

/* One query's product with one key. */
static inline ALWAYS float score(const float *query, const char *key, const int64_t width, const int64_t type) {
    const vec *a = (const vec *)query;
    vec sum = { 0 };
    UNROLL
    for (int64_t i = 0; i < width; i++) sum = multiply_add(a[i], cached(key, i, type), sum);
    return lane_sum(sum);
}

/* Products of two queries with 2 * LANES keys; and the same in parts, summed as ``lane_sum`` does: ``lane`` is what
 * ``score`` has in one lane of its sum. */
typedef struct {
    vec sums[2][2];
} Tile;

typedef struct {
    const float *query[2];
    const float *keys; /* [head size, CHUNK] */
} Operands;

static inline ALWAYS Tile lane(const Operands x, const int64_t width, const int64_t i) {
    Tile sum = { 0 };
    UNROLL
    for (int64_t at = i; at < width * LANES; at += LANES) {
        const vec *key = (const vec *)(x.keys + at * CHUNK);
        for (int q = 0; q < 2; q++)
            for (int v = 0; v < 2; v++) sum.sums[q][v] = multiply_add(SPREAD(x.query[q][at]), key[v], sum.sums[q][v]);
    }
    return sum;
}

#define FOLD(name, n, next) \
    static inline ALWAYS Tile name(const Operands x, const int64_t width, const int64_t i) { \
        Tile a = next(x, width, i); \
        const Tile b = next(x, width, i + n); \
        for (int q = 0; q < 2; q++) \
            for (int v = 0; v < 2; v++) a.sums[q][v] += b.sums[q][v]; \
        return a; \
    }
#if LANES == 16
FOLD(eights, 8, lane)
#else
#define eights lane
#endif
#if LANES >= 8
FOLD(fours, 4, eights)
#else
#define fours lane
#endif
FOLD(twos, 2, fours)
FOLD(ones, 1, twos)

/* Scores of ``num_rows`` queries with a chunk's keys [head size, CHUNK], in pairs; an odd one is its own partner. */
static inline ALWAYS void score_turned(
    float (*scores)[CHUNK], const float *const *queries, int64_t num_rows, const float *keys, float scaling,
    const int64_t width) {
    for (int64_t row = 0; row < num_rows; row += 2) {
        const int64_t rows[2] = { row, row + 1 < num_rows ? row + 1 : row };
        for (int64_t j = 0; j < CHUNK; j += 2 * LANES) {
            const Tile tile = ones((Operands){ { queries[rows[0]], queries[rows[1]] }, keys + j }, width, 0);
            for (int q = 0; q < 2; q++)
                for (int v = 0; v < 2; v++) *(vec *)(scores[rows[q]] + j + v * LANES) = tile.sums[q][v] * scaling;
        }
    }
}

/* A chunk's keys of one head to [size, CHUNK]; past the last key there is something finite. */
static inline ALWAYS void turn(
    float *to, const char *keys, const int64_t *offset, int64_t length, int64_t size, const int64_t type) {
    for (int64_t j = 0; j < CHUNK; j += 4) {
        float wide[4][type == FLOAT32 ? 1 : size];
        const float *from[4];
        for (int64_t k = 0; k < 4; k++) {
            const char *key = keys + offset[j + k < length ? j + k : length - 1];
            from[k] = type == FLOAT32 ? (const float *)key : wide[k];
            for (int64_t i = 0; type != FLOAT32 && i < size / LANES; i++) ((vec *)wide[k])[i] = cached(key, i, type);
        }
        for (int64_t i = 0; i < size; i += 4) {
            float block[4][4];
            for (int64_t k = 0; k < 4; k++)
                for (int64_t n = 0; n < 4; n++) block[n][k] = from[k][i + n];
            for (int64_t n = 0; n < 4; n++) memcpy(to + (i + n) * CHUNK + j, block[n], sizeof block[n]);
        }
    }
}

/* Multiplies what rows have for each key or value of a chunk by the scales that follow these, for ``num_heads`` with
 * ``num_rows`` each; past the last key there may be anything. */
static inline ALWAYS void rescale(
    float (*rows)[CHUNK], int64_t num_heads, int64_t num_rows, const char *heads, const int64_t *offset, int64_t length,
    int64_t size) {
    for (; num_heads > 0; num_heads--, rows += num_rows, heads += bytes_of_head(size, WHOLE8)) {
        float scales[CHUNK] = { 0 };
        for (int64_t j = 0; j < length; j++) memcpy(scales + j, heads + offset[j] + size, sizeof scales[j]);
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t j = 0; j < CHUNK; j++) rows[row][j] *= scales[j];
    }
}

/* Scores of one query's chunk to weights, from ``from`` to ``last``, 0 elsewhere. Returns their sum;
 * *best is the highest score so far. */
static inline ALWAYS float soften(float *score, int64_t from, int64_t last, float *best) {
    for (int64_t j = 0; j < from; j++) score[j] = -INFINITY;
    for (int64_t j = last; j < CHUNK; j++) score[j] = -INFINITY;
    float highest[LANES];
    for (int i = 0; i < LANES; i++) highest[i] = *best;
    for (int64_t j = 0; j < CHUNK; j += LANES)
        for (int i = 0; i < LANES; i++) highest[i] = score[j + i] > highest[i] ? score[j + i] : highest[i];
    for (int i = 0; i < LANES; i++) *best = highest[i] > *best ? highest[i] : *best;
    for (int64_t j = 0; j < CHUNK; j++) score[j] = fast_exp(score[j] - *best);
    for (int64_t j = 0; j < from; j++) score[j] = 0.0f;
    for (int64_t j = last; j < CHUNK; j++) score[j] = 0.0f;
    vec sum = *(const vec *)score;
    for (int64_t j = LANES; j < CHUNK; j += LANES) sum += *(const vec *)(score + j);
    return lane_sum(sum);
}

/* Values of a chunk from ``from`` to ``last``, and their weights for one or two rows. */
typedef struct {
    float *const *out;
    const float *shrink;
    float (*weights)[CHUNK];
    const char *values;
    const int64_t *offset;
    int64_t from, last;
} Addends;

/* Adds them to what the rows have, times ``shrink``: to ``width`` vectors from ``first`` on. */
static inline ALWAYS void add_vectors(
    const Addends x, const int64_t first, const int64_t width, const int64_t type, const int64_t num_rows) {
    vec sum[2][MAX_WIDTH];
    for (int64_t row = 0; row < num_rows; row++) {
        UNROLL
        for (int64_t i = 0; i < width; i++) sum[row][i] = ((const vec *)x.out[row])[first + i] * x.shrink[row];
    }
    for (int64_t j = x.from; j < x.last; j++) {
        UNROLL
        for (int64_t i = 0; i < width; i++) {
            const vec value = cached(x.values + x.offset[j], first + i, type);
            for (int64_t row = 0; row < num_rows; row++)
                sum[row][i] = multiply_add(SPREAD(x.weights[row][j]), value, sum[row][i]);
        }
    }
    for (int64_t row = 0; row < num_rows; row++) {
        UNROLL
        for (int64_t i = 0; i < width; i++) ((vec *)x.out[row])[first + i] = sum[row][i];
    }
}

/* Adds them to all of the rows' vectors: those of sizes that are not known in advance some at a time, whose sums stay
 * in registers. */
static inline ALWAYS void add_values(
    const Addends x, const int64_t width, const int64_t type, const int64_t num_rows) {
    if (x.from >= x.last) return;
    int64_t first = 0;
    if (width != 64 / LANES && width != 128 / LANES)
        for (; first + STRIP <= width; first += STRIP) add_vectors(x, first, STRIP, type, num_rows);
    if (first < width) add_vectors(x, first, width - first, type, num_rows);
}

/* Adds one more score, ``number``, with a value of zeros to what a query has: the highest score may be that one. */
static void sink(float *out, int64_t size, float number, float best, float *total) {
    const float highest = number > best ? number : best, shrink = fast_exp(best - highest);
    for (int64_t i = 0; i < size; i++) out[i] *= shrink;
    *total = *total * shrink + fast_exp(number - highest);
}

/* How many of a span's keys, from the first one on, are those that a query at this position sees and those before them. */
static inline ALWAYS int64_t seen_until(const Spans *spans, const Heads *layer, int64_t span, int64_t position) {
    if (!layer->looks_ahead) return position + 1;
    const int64_t end = spans->num_stored[span] + spans->first_token[span + 1] - spans->first_token[span];
    return layer->window && position + layer->window < end ? position + layer->window : end;
}

/* Heads of queries and of keys that an item of work has: of those that share a head of keys, ``num_shared``. */
typedef struct {
    int64_t first_head, end_head, first_shared, num_shared;
} HeadRange;

/* Where the first chunk of keys begins that a window leaves to the token after ``stored``. Chunks begin at the same
 * tokens whatever the queries: a query's sums must not depend on its neighbours. */
static inline int64_t first_chunk(const Heads *layer, int64_t stored) {
    const int64_t unseen = layer->window ? stored + 1 - layer->window : 0;
    return unseen > 0 ? unseen / CHUNK * CHUNK : 0;
}

/* Some queries of a span against its keys and values, for the kv heads from first_head to end_head, with a running
 * softmax (arXiv 1805.02867). Cached tokens are read from end to end, once, as memory likes it; ``turned``, for one kv
 * head, turns its keys over. Inlined for the usual head sizes, LANES * width, so that a head stays in registers. */
static inline ALWAYS void attend_queries(
    const Spans *spans, const Heads *layer, int64_t span, int64_t first_query, int64_t num_queries,
    const HeadRange range, int turned, const float *qkv, float *out, const int64_t width, const int64_t type) {
    const int64_t size = LANES * width, head_bytes = bytes_of_head(size, type);
    const int64_t shared = layer->num_heads / layer->num_kv_heads, rows_of_head = range.num_shared * num_queries;
    const int64_t num_kv_heads = range.end_head - range.first_head, rows = num_kv_heads * rows_of_head;
    const int64_t qkv_size = qkv_width(layer);
    const int64_t out_size = layer->num_heads * size, token_bytes = layer->num_kv_heads * head_bytes;
    const int64_t stored = spans->num_stored[span] + first_query;
    const int64_t num_keys = seen_until(spans, layer, span, stored + num_queries - 1);
    const int64_t first = spans->first_token[span] + first_query;
    const char *keys = (const char *)layer->keys + range.first_head * head_bytes;
    const char *values = (const char *)layer->values + range.first_head * head_bytes;
    const float scaling = layer->scaling;
    const float *queries[rows];
    int64_t from[rows], last[rows], heads[rows];
    float *outs[rows], best[rows], total[rows], shrink[rows], scores[rows][CHUNK];
    float turned_keys[turned ? size * CHUNK : 1];
    for (int64_t row = 0; row < rows; row++) {
        const int64_t kv_head = range.first_head + row / rows_of_head, token = first + row % num_queries;
        const int64_t head = kv_head * shared + range.first_shared + row % rows_of_head / num_queries;
        heads[row] = head;
        queries[row] = qkv + token * qkv_size + head * size;
        outs[row] = out + token * out_size + head * size;
        best[row] = -INFINITY;
        total[row] = 0.0f;
        memset(outs[row], 0, size * sizeof(float));
    }
    for (int64_t begin = first_chunk(layer, stored); begin < num_keys; begin += CHUNK) {
        const int64_t length = num_keys - begin < CHUNK ? num_keys - begin : CHUNK;
        const int64_t known = num_keys - begin < CHUNK + AHEAD ? num_keys - begin : CHUNK + AHEAD;
        int64_t offset[CHUNK + AHEAD];
        find_slots(offset, spans, layer->kind, span, begin, known);
        for (int64_t j = 0; j < known; j++) offset[j] *= token_bytes;
        if (turned) {
            turn(turned_keys, keys, offset, length, size, type);
            score_turned(scores, queries, rows, turned_keys, scaling, width);
        }
        for (int64_t j = 0; !turned && j < length; j++) {
            const int64_t at = offset[j], later = offset[j + AHEAD < known ? j + AHEAD : j];
            for (int64_t i = 0; i < num_kv_heads * head_bytes; i += CACHE_LINE) {
                __builtin_prefetch(values + at + i);
                __builtin_prefetch(keys + later + i);
            }
            const char *key = keys + at;
            for (int64_t row = 0; row < rows; key += head_bytes)
                for (const int64_t end = row + rows_of_head; row < end; row++)
                    scores[row][j] = score(queries[row], key, width, type) * scaling;
        }
        if (type == WHOLE8) rescale(scores, num_kv_heads, rows_of_head, keys, offset, length, size);
        for (int64_t row = 0; row < rows; row++) {
            const int64_t past = stored + row % num_queries + 1 - begin, window_start = past - layer->window;
            const int64_t until = seen_until(spans, layer, span, past + begin - 1) - begin;
            last[row] = until < length ? until : length;
            from[row] = layer->window && window_start > 0 ? window_start : 0;
            if (from[row] >= last[row]) continue;
            if (layer->softcap > 0) cap_row(scores[row], CHUNK, layer->softcap);
            const float before = best[row], sum = soften(scores[row], from[row], last[row], &best[row]);
            shrink[row] = before == -INFINITY ? 0.0f : fast_exp(before - best[row]);
            total[row] = total[row] * shrink[row] + sum;
        }
        if (type == WHOLE8) rescale(scores, num_kv_heads, rows_of_head, values, offset, length, size);
        const char *of_head = values;
        for (int64_t row = 0; row < rows; of_head += head_bytes) {
            for (const int64_t end = row + rows_of_head; row < end;) {
                const int64_t count = row + 1 < end && from[row] == from[row + 1] && last[row] == last[row + 1] ? 2 : 1;
                const Addends x = { outs + row, shrink + row, scores + row, of_head, offset, from[row], last[row] };
                if (count == 2) add_values(x, width, type, 2);
                else add_values(x, width, type, 1);
                row += count;
            }
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        if (layer->sinks) sink(outs[row], size, layer->sinks[heads[row]], best[row], &total[row]);
        for (int64_t i = 0; i < size; i++) outs[row][i] /= total[row];
    }
}

/* Items: for each of ``pieces`` of the heads that share one of keys, and of ``split`` parts of the heads of keys, the
 * parts of each span's queries, at most ``queries`` of them. */
typedef struct {
    const Spans *spans;
    const Heads *layer;
    const int64_t *first_part; /* [num_spans + 1] */
    int64_t split, pieces, queries;
    float *qkv, *out;
} Attending;

static void place_task(const void *arguments, int64_t token) {
    const Attending *task = arguments;
    const int64_t width = qkv_width(task->layer);
    place(task->spans, task->layer, task->qkv + token * width, token);
}

static void attend_task(const void *arguments, int64_t item) {
    const Attending *task = arguments;
    const Spans *spans = task->spans;
    const Heads *layer = task->layer;
    const int64_t num_parts = task->first_part[spans->num_spans], part = item % num_parts;
    const int64_t heads = item / num_parts % task->split, piece = item / num_parts / task->split;
    const int64_t shared = layer->num_heads / layer->num_kv_heads, first_shared = piece * shared / task->pieces;
    const int64_t num_shared = (piece + 1) * shared / task->pieces - first_shared;
    int64_t span = 0;
    while (task->first_part[span + 1] <= part) span++;
    const int64_t query = (part - task->first_part[span]) * task->queries;
    const int64_t left = spans->first_token[span + 1] - spans->first_token[span] - query;
    const int64_t num_queries = left < task->queries ? left : task->queries;
    const int64_t first = heads * layer->num_kv_heads / task->split;
    const int64_t end = (heads + 1) * layer->num_kv_heads / task->split;
    /* Of many queries, the scores of one kv head at a time stay in the processor's first cache. */
    const int turned = num_queries * layer->num_heads >= TURNED_FROM * layer->num_kv_heads;
    const int64_t step = turned ? 1 : end - first;
#define ATTEND(size, type) \
    attend_queries(spans, layer, span, query, num_queries, (HeadRange){ head, head + step, first_shared, num_shared }, \
                   turned, task->qkv, task->out, (size) / LANES, type)
#define ATTEND_IN(type) \
    switch (layer->head_size) { \
        case 64: ATTEND(64, type); break; \
        case 128: ATTEND(128, type); break; \
        default: ATTEND(layer->head_size, type); \
    }
    for (int64_t head = first; head < end; head += step) {
        if (layer->cache_type == FLOAT16) ATTEND_IN(FLOAT16)
        else if (layer->cache_type == WHOLE8) ATTEND_IN(WHOLE8)
        else ATTEND_IN(FLOAT32)
    }
}

static void gate_task(const void *arguments, int64_t token) {
    const Attending *task = arguments;
    const Heads *layer = task->layer;
    const int64_t size = layer->num_heads * layer->head_size;
    const float *gate = task->qkv + (token + 1) * qkv_width(layer) - size;
    float *out = task->out + token * size;
    for (int64_t i = 0; i < size; i++) out[i] *= 1.0f / (1.0f + fast_exp(-gate[i]));
}

/* Stores the new tokens and attends: qkv [num_tokens, num_heads + 2 * num_kv_heads, head_size], whose
 * queries are normed and rotated in place, with a gate if there is one; out [num_tokens, num_heads, head_size]. */
void attend(const Spans *spans, const Heads *layer, float *qkv, float *out) {
    /* Heads are shared out only where there are fewer spans than threads; and where these cannot have equally many, each
     * span's queries, too. Later parts of a prompt take longer than earlier ones: items are by heads first, so that each
     * thread has some of both. */
    const int64_t threads = get_num_threads();
    int64_t split = (threads + spans->num_spans - 1) / spans->num_spans, queries = QUERIES;
    if (layer->num_kv_heads % split) {
        const int64_t of_thread = (spans->num_tokens + threads - 1) / threads;
        if (of_thread < queries) queries = of_thread;
        split = layer->num_kv_heads;
    }
    const int64_t shared = layer->num_heads / layer->num_kv_heads;
    if (queries > MAX_ITEM_ROWS / shared) queries = shared < MAX_ITEM_ROWS ? MAX_ITEM_ROWS / shared : 1;
    int64_t first_part[spans->num_spans + 1], num_scores = 0;
    first_part[0] = 0;
    for (int64_t span = 0; span < spans->num_spans; span++) {
        const int64_t num_queries = spans->first_token[span + 1] - spans->first_token[span];
        first_part[span + 1] = first_part[span] + (num_queries + queries - 1) / queries;
        num_scores += num_queries * (spans->num_stored[span] + num_queries);
    }
    /* Threads that would have nothing to do look at some of the queries that share a head of keys. */
    const int64_t items = first_part[spans->num_spans] * split;
    int64_t pieces = items && items < threads ? (threads + items - 1) / items : 1;
    if (pieces > shared) pieces = shared;
    const Attending attention = { spans, layer, first_part, split, pieces, queries, qkv, out };
    const int64_t width = qkv_width(layer);
    run_task(place_task, &attention, spans->num_tokens, spans->num_tokens * width * 4);
    /* A score and its share of the values take as long as eight times its multiplications in a product. */
    run_task(attend_task, &attention, items * pieces,
             num_scores * layer->num_heads * layer->head_size * 8);
    if (layer->gated) run_task(gate_task, &attention, spans->num_tokens, spans->num_tokens * width * 8);
}
