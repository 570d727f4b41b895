/* Layers with a running state: Gated DeltaNet (arXiv 2412.06464), Mamba 2 (arXiv 2405.21060), short convolutions.
 *
 * A state is folded at positions that are multiples of STATE_CHUNK, and in place only over tokens that nothing can take
 * back. With S that state, a token's key k, query q and value u, and d(j, i) what is left at token i of token j's part,
 *
 *     answer i = d(i) S q + sum of d(j, i) (k[j] q[i]) u[j] over the chunk's tokens up to i,
 *
 * where Gated DeltaNet's u is what the value differs by from the same answer to its key. Nothing else is written, so drafts
 * are taken back by forgetting them. Each sum has one order, by position: a token's bits do not depend on how passes were
 * cut, on other rows or on threads.
 */

#if defined(__clang__)
#pragma clang fp reassociate(off)
#else
#pragma GCC optimize("no-associative-math")
#endif

#include "kernels.h"
#include "vectors.h"

/* Rows of x times a matrix [length, columns], plus ``scale`` times ``start``, unless that is NULL. Each number is one chain
 * of sums, from the matrix's first row to its last. */
typedef struct {
    float *out;
    const float *start;           /* it may be out; rows of both are ``out_stride`` apart */
    const float *x, *matrix;
    float scale;
    int64_t rows, columns, length;
    int64_t out_stride, x_row, x_step, matrix_stride; /* x[row * x_row + i * x_step] */
} Product;

/* Vectors of sums that stay in registers. */
#define MAX_BLOCK 16

/* ``rows`` rows and ``width`` vectors of the product. */
static inline ALWAYS void multiply_block(const Product *p, int64_t row, int64_t column, const int64_t rows,
                                         const int64_t width) {
    vec sum[MAX_BLOCK];
    const float *start = p->start + row * p->out_stride + column, *matrix = p->matrix + column;
    const float *x = p->x + row * p->x_row;
    float *out = p->out + row * p->out_stride + column;
    UNROLL
    for (int64_t r = 0; r < rows; r++) {
        UNROLL
        for (int64_t w = 0; w < width; w++) {
            sum[r * width + w] = SPREAD(0.0f);
            if (p->start) sum[r * width + w] = *(const vec *)(start + r * p->out_stride + w * LANES) * p->scale;
        }
    }
    for (int64_t i = 0; i < p->length; i++, matrix += p->matrix_stride, x += p->x_step) {
        UNROLL
        for (int64_t r = 0; r < rows; r++) {
            const vec number = SPREAD(x[r * p->x_row]);
            UNROLL
            for (int64_t w = 0; w < width; w++)
                sum[r * width + w] = multiply_add(number, *(const vec *)(matrix + w * LANES), sum[r * width + w]);
        }
    }
    UNROLL
    for (int64_t r = 0; r < rows; r++) {
        UNROLL
        for (int64_t w = 0; w < width; w++) *(vec *)(out + r * p->out_stride + w * LANES) = sum[r * width + w];
    }
}

/* Columns that fill no vector. */
static void multiply_rest(const Product *p, int64_t row, int64_t column, int64_t rows) {
    for (const int64_t end = row + rows; row < end; row++) {
        for (int64_t j = column; j < p->columns; j++) {
            float sum = p->start ? p->start[row * p->out_stride + j] * p->scale : 0.0f;
            for (int64_t i = 0; i < p->length; i++)
                sum = fmaf(p->x[row * p->x_row + i * p->x_step], p->matrix[i * p->matrix_stride + j], sum);
            p->out[row * p->out_stride + j] = sum;
        }
    }
}

/* All columns of ``rows`` rows, as many at a time as registers hold. */
#define MULTIPLY_ROWS(rows, most) \
    static void multiply_##rows(const Product *p, int64_t row) { \
        int64_t column = 0; \
        for (; p->columns - column >= most * LANES; column += most * LANES) multiply_block(p, row, column, rows, most); \
        for (; p->columns - column >= 4 * LANES; column += 4 * LANES) multiply_block(p, row, column, rows, 4); \
        for (; p->columns - column >= LANES; column += LANES) multiply_block(p, row, column, rows, 1); \
        multiply_rest(p, row, column, rows); \
    }
MULTIPLY_ROWS(4, 4)
MULTIPLY_ROWS(3, 4)
MULTIPLY_ROWS(2, 8)
MULTIPLY_ROWS(1, 8)

static void multiply_small(const Product *p) {
    int64_t row = 0;
    for (; p->rows - row >= 4; row += 4) multiply_4(p, row);
    switch (p->rows - row) {
        case 3: multiply_3(p, row); break;
        case 2: multiply_2(p, row); break;
        case 1: multiply_1(p, row); break;
    }
}

/* Where a token's row of inputs has what: first columns, -1 for what there is not. */
typedef struct {
    int64_t convolved, queries, keys, values, gates, betas, dts, size;
} Columns;

static Columns find_columns(const Recurrence *layer) {
    const int64_t keys = layer->key_heads * layer->rows, values = layer->heads * layer->columns;
    if (layer->rule == SHORT_CONV) return (Columns){ .size = 3 * layer->convolution->channels };
    if (layer->rule == MAMBA2)
        return (Columns){
            .convolved = values, .queries = 2 * values + keys, .keys = 2 * values, .values = values, .gates = 0,
            .betas = -1, .dts = 2 * values + 2 * keys, .size = 2 * values + 2 * keys + layer->heads,
        };
    return (Columns){
        .convolved = 0, .queries = 0, .keys = keys, .values = 2 * keys, .gates = 2 * keys + values,
        .betas = 2 * keys + 2 * values, .dts = 2 * keys + 2 * values + layer->heads,
        .size = 2 * keys + 2 * values + 2 * layer->heads,
    };
}

/* One layer's pass. */
typedef struct {
    const Spans *spans;
    const Recurrence *layer;
    Columns at;
    float *x, *out;               /* [tokens, at.size], [tokens, heads * columns] */
    float *products;              /* [tokens, key_heads, 2, STATE_CHUNK] of keys of a token's chunk with its key and query */
    float *folded;                /* [threads, rows * columns] states with drafts in them */
} Pass;

/* A span's place among the others, and the record of a position. */
typedef struct {
    int64_t slot, stored, first, end, num_folded, last_fold;
} Place;

static Place find_place(const Spans *spans, int64_t span) {
    const int64_t stored = spans->num_stored[span], first = spans->first_token[span];
    return (Place){
        .slot = spans->state_slot[span], .stored = stored, .first = first,
        .end = stored + spans->first_token[span + 1] - first, .num_folded = spans->num_folded[span],
        .last_fold = num_folded_after(spans->num_folded[span], spans->num_certain[span]),
    };
}

static int64_t span_of(const Spans *spans, int64_t token) {
    int64_t span = 0;
    while (spans->first_token[span + 1] <= token) span++;
    return span;
}

static inline int64_t record_of(const Recurrence *layer, const Place *place, int64_t position) {
    return place->slot * layer->num_records + position % layer->num_records;
}

/* The key of a position, of this pass or of one before. */
static inline const float *key_of(const Pass *pass, const Place *place, int64_t position, int64_t key_head) {
    const Recurrence *layer = pass->layer;
    if (position >= place->stored)
        return pass->x + (place->first + position - place->stored) * pass->at.size + pass->at.keys
            + key_head * layer->rows;
    return layer->keys + (record_of(layer, place, position) * layer->key_heads + key_head) * layer->rows;
}

static inline ALWAYS float dot(const float *a, const float *b, int64_t size) {
    vec sum = { 0 };
    int64_t i = 0;
    for (; size - i >= LANES; i += LANES) sum = multiply_add(*(const vec *)(a + i), *(const vec *)(b + i), sum);
    float total = lane_sum(sum);
    for (; i < size; i++) total = fmaf(a[i], b[i], total);
    return total;
}

/* x to a vector of the length ``scale``. */
static void set_length(float *x, int64_t size, float scale) {
    const float factor = scale / sqrtf(dot(x, x, size) + 1e-6f);
    for (int64_t i = 0; i < size; i++) x[i] *= factor;
}

static void normalise_task(const void *arguments, int64_t token) {
    const Pass *pass = arguments;
    const Recurrence *layer = pass->layer;
    float *row = pass->x + token * pass->at.size;
    for (int64_t head = 0; head < layer->key_heads; head++) {
        set_length(row + pass->at.queries + head * layer->rows, layer->rows, 1.0f / sqrtf((float)layer->rows));
        set_length(row + pass->at.keys + head * layer->rows, layer->rows, 1.0f);
    }
}

/* Products of a token's key, if values are corrected, and of its query with the keys of its chunk. */
static void products_task(const void *arguments, int64_t item) {
    const Pass *pass = arguments;
    const Recurrence *layer = pass->layer;
    const int64_t token = item / layer->key_heads, key_head = item % layer->key_heads;
    const Place place = find_place(pass->spans, span_of(pass->spans, token));
    const int64_t position = place.stored + token - place.first, start = position / STATE_CHUNK * STATE_CHUNK;
    const float *query = pass->x + token * pass->at.size + pass->at.queries + key_head * layer->rows;
    const float *own = key_of(pass, &place, position, key_head);
    float *of_key = pass->products + item * 2 * STATE_CHUNK, *of_query = of_key + STATE_CHUNK;
    for (int64_t at = start; at <= position; at++) {
        const float *key = key_of(pass, &place, at, key_head);
        if (layer->rule == DELTA_RULE && at < position) of_key[at - start] = dot(key, own, layer->rows);
        of_query[at - start] = dot(key, query, layer->rows);
    }
}

static double softplus(double x) { return x > 20.0 ? x : log1p(exp(x)); }

/* weights[j] = what is left at token ``last`` of a chunk of what token j has added, times factors[j] unless that is NULL.
 * Returns what is left of the state before the chunk. The newest factor comes first. */
static float weigh(float *weights, const double *decays, int64_t stride, const float *factors, int64_t last) {
    double left = 1.0;
    for (int64_t j = last; j >= 0; j--) {
        weights[j] = factors ? (float)left * factors[j] : (float)left;
        left *= decays[j * stride];
    }
    return (float)left;
}

/* A head's records of one chunk, and the state before it, or NULL for zeros. */
typedef struct {
    const float *state;
    float *values;
    double *decays;               /* strides of both: those of a layer's records */
    int64_t start;
} Log;

/* out [columns] = an answer of the state and of ``count`` records, by the weights that ``products`` give them. */
static void answer(const Recurrence *layer, const Log *log, float *out, const float *of_state, const float *products,
                   int64_t last, int64_t count) {
    float weights[STATE_CHUNK];
    const float left = weigh(weights, log->decays, layer->heads, products, last);
    multiply_small(&(Product){
        .out = out, .start = log->state ? of_state : NULL, .scale = left, .x = weights, .x_step = 1,
        .matrix = log->values, .matrix_stride = layer->heads * layer->columns,
        .rows = 1, .columns = layer->columns, .length = count,
    });
}

/* Values that the state and the records before would answer to a token's key are taken off its own. */
static void correct(const Pass *pass, const Log *log, const float *row, int64_t head, const float *of_state,
                    const float *products, int64_t offset) {
    const Recurrence *layer = pass->layer;
    const float *value = row + pass->at.values + head * layer->columns;
    const float beta = 1.0f / (1.0f + fast_exp(-row[pass->at.betas + head]));
    float *to = log->values + offset * layer->heads * layer->columns, known[layer->columns];
    answer(layer, log, known, of_state, products, offset, offset);
    for (int64_t i = 0; i < layer->columns; i++) to[i] = beta * (value[i] - known[i]);
}

/* A token's gate and norm, and Mamba's way around the state. */
static void finish(const Pass *pass, const float *row, int64_t head, float *out) {
    const Recurrence *layer = pass->layer;
    const int64_t size = layer->columns;
    const float *gate = row + pass->at.gates + head * size, *value = row + pass->at.values + head * size;
    if (layer->rule == DELTA_RULE) norm_row(out, out, layer->norm, NULL, size, layer->norm_eps);
    else for (int64_t i = 0; i < size; i++) out[i] = fmaf(layer->skip[head], value[i], out[i]);
    for (int64_t i = 0; i < size; i++) out[i] *= silu(gate[i]);
}

/* The tokens of a chunk from ``offset`` to ``end``, in one head. */
static void add_tokens(const Pass *pass, const Place *place, const Log *log, int64_t head, int64_t key_head,
                       int64_t offset, int64_t end) {
    const Recurrence *layer = pass->layer;
    const int64_t is_delta = layer->rule == DELTA_RULE, count = end - offset, size = layer->columns;
    const int64_t first = place->first + log->start + offset - place->stored;
    float x[2 * count * layer->rows], of_state[2 * count * size];
    if (log->state) {
        for (int64_t i = 0; i < count; i++) {
            const float *row = pass->x + (first + i) * pass->at.size + key_head * layer->rows;
            memcpy(x + i * layer->rows, row + pass->at.queries, layer->rows * sizeof(float));
            if (is_delta) memcpy(x + (count + i) * layer->rows, row + pass->at.keys, layer->rows * sizeof(float));
        }
        multiply_small(&(Product){
            .out = of_state, .out_stride = size, .x = x, .x_row = layer->rows, .x_step = 1,
            .matrix = log->state, .matrix_stride = size,
            .rows = is_delta ? 2 * count : count, .columns = size, .length = layer->rows,
        });
    }
    for (int64_t i = 0; i < count; i++) {
        const float *row = pass->x + (first + i) * pass->at.size;
        const float *products = pass->products + ((first + i) * layer->key_heads + key_head) * 2 * STATE_CHUNK;
        const int64_t at = offset + i;
        float *out = pass->out + ((first + i) * layer->heads + head) * size;
        double dt = softplus((double)row[pass->at.dts + head] + layer->dt_bias[head]);
        if (!is_delta) dt = dt < layer->least_dt ? layer->least_dt : dt > layer->most_dt ? layer->most_dt : dt;
        log->decays[at * layer->heads] = exp(layer->decay_rate[head] * dt);
        if (is_delta) {
            correct(pass, log, row, head, of_state + (count + i) * size, products, at);
        } else {
            const float *value = row + pass->at.values + head * size;
            float *to = log->values + at * layer->heads * size;
            for (int64_t j = 0; j < size; j++) to[j] = (float)dt * value[j];
        }
        answer(layer, log, out, of_state + i * size, products + STATE_CHUNK, at, at + 1);
        finish(pass, row, head, out);
    }
}

/* to [rows, columns] = the state with all of a chunk in it; it may be the state itself. */
static void fold(const Pass *pass, const Place *place, const Log *log, int64_t key_head, float *to) {
    const Recurrence *layer = pass->layer;
    float weights[STATE_CHUNK], keys[STATE_CHUNK * layer->rows];
    const float left = weigh(weights, log->decays, layer->heads, NULL, STATE_CHUNK - 1);
    for (int64_t j = 0; j < STATE_CHUNK; j++) {
        const float *key = key_of(pass, place, log->start + j, key_head);
        for (int64_t i = 0; i < layer->rows; i++) keys[j * layer->rows + i] = weights[j] * key[i];
    }
    multiply_small(&(Product){
        .out = to, .start = log->state, .scale = left, .out_stride = layer->columns,
        .x = keys, .x_row = 1, .x_step = layer->rows,
        .matrix = log->values, .matrix_stride = layer->heads * layer->columns,
        .rows = layer->rows, .columns = layer->columns, .length = STATE_CHUNK,
    });
}

/* One head of one span, chunk by chunk. */
static void recur_task(const void *arguments, int64_t item) {
    const Pass *pass = arguments;
    const Recurrence *layer = pass->layer;
    const int64_t head = item % layer->heads, numbers = layer->rows * layer->columns;
    const int64_t key_head = layer->tiled ? head % layer->key_heads : head / (layer->heads / layer->key_heads);
    const Place place = find_place(pass->spans, item / layer->heads);
    float *state = layer->state + (place.slot * layer->heads + head) * numbers;
    float *folded = pass->folded + this_thread() * numbers;
    /* A slot of which nothing is folded yet may have another text's state. */
    Log log = { .state = place.num_folded ? state : NULL };
    for (log.start = place.num_folded; log.start < place.end; log.start += STATE_CHUNK) {
        const int64_t record = record_of(layer, &place, log.start), next = log.start + STATE_CHUNK;
        const int64_t end = place.end < next ? place.end : next, from = place.stored - log.start;
        log.values = layer->values + (record * layer->heads + head) * layer->columns;
        log.decays = layer->decays + record * layer->heads + head;
        if (place.stored < end)
            add_tokens(pass, &place, &log, head, key_head, from > 0 ? from : 0, end - log.start);
        if (next > place.last_fold && next >= place.end) break;
        fold(pass, &place, &log, key_head, next <= place.last_fold ? state : folded);
        log.state = next <= place.last_fold ? state : folded;
    }
}

/* Keeps the newest keys: those before are read until all heads are done. */
static void keep_keys(const Pass *pass) {
    const Recurrence *layer = pass->layer;
    const int64_t size = layer->key_heads * layer->rows;
    for (int64_t span = 0; span < pass->spans->num_spans; span++) {
        const Place place = find_place(pass->spans, span);
        int64_t position = place.end - layer->num_records;
        if (position < place.stored) position = place.stored;
        for (; position < place.end; position++)
            memcpy(layer->keys + record_of(layer, &place, position) * size, key_of(pass, &place, position, 0),
                   size * sizeof(float));
    }
}

static void norm_groups_task(const void *arguments, int64_t item) {
    const Pass *pass = arguments;
    const Recurrence *layer = pass->layer;
    const int64_t size = layer->heads * layer->columns / layer->norm_groups;
    float *out = pass->out + item * size;
    norm_row(out, out, layer->norm + item % layer->norm_groups * size, NULL, size, layer->norm_eps);
}

/* Numbers that come in for each token. */
int64_t recurrence_inputs(const Recurrence *layer) { return find_columns(layer).size; }

/* Floats of the working memory that ``recur`` needs. */
int64_t recurrence_scratch(const Recurrence *layer, int64_t num_tokens) {
    if (layer->rule == SHORT_CONV) return 0;
    return num_tokens * layer->key_heads * 2 * STATE_CHUNK + get_num_threads() * layer->rows * layer->columns;
}

/* out [tokens, heads * columns, or a short convolution's channels] of the layer's inputs x, which are overwritten. */
void recur(const Spans *spans, const Recurrence *layer, float *x, float *out, float *scratch) {
    if (layer->rule == SHORT_CONV) {
        convolve_gated(spans, layer->convolution, x, out);
        return;
    }
    const Columns at = find_columns(layer);
    const int64_t tokens = spans->num_tokens, of_keys = tokens * layer->key_heads * layer->rows;
    float *folded = scratch + tokens * layer->key_heads * 2 * STATE_CHUNK;
    const Pass pass = { spans, layer, at, x, out, scratch, folded };
    convolve(spans, layer->convolution, x, at.size, at.convolved);
    if (layer->rule == DELTA_RULE) run_task(normalise_task, &pass, tokens, of_keys * 4);
    run_task(products_task, &pass, tokens * layer->key_heads, of_keys * STATE_CHUNK);
    run_task(recur_task, &pass, spans->num_spans * layer->heads,
             (tokens + spans->num_spans) * layer->heads * layer->rows * layer->columns * 2);
    keep_keys(&pass);
    if (layer->rule == MAMBA2 && layer->norm)
        run_task(norm_groups_task, &pass, tokens * layer->norm_groups, tokens * layer->heads * layer->columns * 4);
}
