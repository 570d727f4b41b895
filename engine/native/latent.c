/* Attention to a short vector of each token in place of keys and values (arXiv 2405.04434), as latent.py says.
 *
 * Attention itself is that of heads that share one key, which is its value, too. Here is what comes before and after
 * it. A row's numbers depend on no other row. All arrays are row-major.
 */

#include <string.h>

#include "kernels.h"

/* Numbers of a row at each step. */
typedef struct {
    int64_t heads, size;          /* of the key, and as many heads of queries that attend to it */
    int64_t turned, others;       /* of a query before that: those that are turned, and those that are not */
    int64_t values;               /* of a head */
    int64_t first, latent;        /* of the queries' vector or the queries, and of the latent vector */
} Widths;

static Widths widths_of(const LatentAttention *part) {
    const int64_t size = part->heads->head_size, latent = part->key_up->out_features, turned = size - latent;
    return (Widths){
        .heads = part->heads->num_heads, .size = size, .turned = turned, .others = part->key_up->in_features,
        .values = part->value_up->out_features, .first = part->down->out_features - latent - turned, .latent = latent,
    };
}

/* What is made of the rows step by step. */
typedef struct {
    const LatentAttention *part;
    Widths widths;
    int64_t rows;
    float *low;                   /* [rows, down's outputs] */
    float *query_latent;          /* [rows, first], normed */
    float *queries;               /* [rows, heads, turned + others] */
    float *others, *latents, *values; /* [heads, rows, ...]: of queries, for or of the key, and values */
    float *qkv;                   /* [rows, heads + 1, size] */
    float *attended;              /* [rows, heads, size] */
    float *joined;                /* [rows, heads, values] */
} Step;

/* Norms both vectors of a row; the latent one becomes the key's. */
static void norm_task(const void *arguments, int64_t row) {
    const Step *step = arguments;
    const LatentAttention *part = step->part;
    const Widths of = step->widths;
    const float *low = step->low + row * part->down->out_features, *latent = low + of.first;
    float *key = step->qkv + (row * (of.heads + 1) + of.heads) * of.size;
    if (part->query_up)
        norm_row(step->query_latent + row * of.first, low, part->query_norm, NULL, of.first, part->query_norm_eps);
    memcpy(key, latent + of.latent, of.turned * sizeof(float));
    norm_row(key + of.turned, latent, part->norm, NULL, of.latent, part->norm_eps);
}

/* A row's queries: what is turned is there, what is not is multiplied head by head. */
static void split_task(const void *arguments, int64_t row) {
    const Step *step = arguments;
    const Widths of = step->widths;
    const int64_t size = of.turned + of.others;
    const float *from = step->part->query_up ? step->queries + row * of.heads * size
                                             : step->low + row * step->part->down->out_features;
    float *to = step->qkv + row * (of.heads + 1) * of.size;
    for (int64_t head = 0; head < of.heads; head++, from += size, to += of.size) {
        memcpy(to, from, of.turned * sizeof(float));
        memcpy(step->others + (head * step->rows + row) * of.others, from + of.turned, of.others * sizeof(float));
    }
}

static void join_task(const void *arguments, int64_t row) {
    const Step *step = arguments;
    const Widths of = step->widths;
    float *to = step->qkv + row * (of.heads + 1) * of.size + of.turned;
    for (int64_t head = 0; head < of.heads; head++, to += of.size)
        memcpy(to, step->latents + (head * step->rows + row) * of.latent, of.latent * sizeof(float));
}

/* What a row's heads attended, without the numbers that are turned. */
static void cut_task(const void *arguments, int64_t row) {
    const Step *step = arguments;
    const Widths of = step->widths;
    const float *from = step->attended + row * of.heads * of.size + of.turned;
    for (int64_t head = 0; head < of.heads; head++, from += of.size)
        memcpy(step->latents + (head * step->rows + row) * of.latent, from, of.latent * sizeof(float));
}

static void collect_task(const void *arguments, int64_t row) {
    const Step *step = arguments;
    const Widths of = step->widths;
    float *to = step->joined + row * of.heads * of.values;
    for (int64_t head = 0; head < of.heads; head++, to += of.values)
        memcpy(to, step->values + (head * step->rows + row) * of.values, of.values * sizeof(float));
}

int64_t latent_attention_bytes(const LatentAttention *part, int64_t rows) {
    const Widths of = widths_of(part);
    const int64_t queries = part->query_up ? of.heads * (of.turned + of.others) : 0;
    const int64_t sizes[] = {
        part->down->out_features, queries ? of.first : 0, queries, of.heads * of.others, of.heads * of.latent,
        of.heads * of.values, (of.heads + 1) * of.size, of.heads * of.size, of.heads * of.values,
    };
    int64_t bytes = 0;
    for (int64_t i = 0; i < (int64_t)(sizeof sizes / sizeof *sizes); i++)
        bytes += arena_size(rows * sizes[i], sizeof(float));
    return bytes;
}

/* out [tokens, hidden size] = the attention's output for x, plus residual or NULL, which may be out itself; so may x. */
int run_latent_attention(const LatentAttention *part, const Spans *spans, float *out, const float *x,
                         const float *residual, Arena *arena) {
    const Widths of = widths_of(part);
    const int64_t rows = spans->num_tokens, queries = part->query_up ? of.heads * (of.turned + of.others) : 0;
    const Step step = {
        .part = part, .widths = of, .rows = rows,
        .low = arena_alloc(arena, rows * part->down->out_features, sizeof(float)),
        .query_latent = arena_alloc(arena, queries ? rows * of.first : 0, sizeof(float)),
        .queries = arena_alloc(arena, rows * queries, sizeof(float)),
        .others = arena_alloc(arena, rows * of.heads * of.others, sizeof(float)),
        .latents = arena_alloc(arena, rows * of.heads * of.latent, sizeof(float)),
        .values = arena_alloc(arena, rows * of.heads * of.values, sizeof(float)),
        .qkv = arena_alloc(arena, rows * (of.heads + 1) * of.size, sizeof(float)),
        .attended = arena_alloc(arena, rows * of.heads * of.size, sizeof(float)),
        .joined = arena_alloc(arena, rows * of.heads * of.values, sizeof(float)),
    };
    if (arena->used > arena->reserved) return 0;
    const int64_t moved = rows * of.heads * of.size;
    multiply(part->down, step.low, x, NULL, rows);
    run_task(norm_task, &step, rows, rows * part->down->out_features * 4);
    if (part->query_up) multiply(part->query_up, step.queries, step.query_latent, NULL, rows);
    run_task(split_task, &step, rows, moved);
    for (int64_t head = 0; head < of.heads; head++)
        multiply(&part->key_up[head], step.latents + head * rows * of.latent, step.others + head * rows * of.others,
                 NULL, rows);
    run_task(join_task, &step, rows, moved);
    attend(spans, part->heads, step.qkv, step.attended);
    run_task(cut_task, &step, rows, moved);
    for (int64_t head = 0; head < of.heads; head++)
        multiply(&part->value_up[head], step.values + head * rows * of.values, step.latents + head * rows * of.latent,
                 NULL, rows);
    run_task(collect_task, &step, rows, moved);
    multiply(part->output, out, step.joined, residual, rows);
    return 1;
}
