/* The parts of a decoder's layers: what a part needs beside its inputs and outputs, and how it is run.
 *
 * A part may be of any size, whatever those of other layers are. All arrays are row-major.
 */

#include "kernels.h"

static int64_t attention_bytes(const Attention *part, int64_t rows) {
    return arena_size(rows * part->qkv->out_features, sizeof(float))
        + arena_size(rows * part->output->in_features, sizeof(float));
}

static int run_attention(const Attention *part, const Spans *spans, float *out, const float *x, const float *residual,
                         Arena *arena) {
    const int64_t rows = spans->num_tokens;
    float *qkv = arena_alloc(arena, rows * part->qkv->out_features, sizeof(float));
    float *attended = arena_alloc(arena, rows * part->output->in_features, sizeof(float));
    if (!qkv || !attended) return 0;
    multiply(part->qkv, qkv, x, NULL, rows);
    attend(spans, part->heads, qkv, attended);
    multiply(part->output, out, attended, residual, rows);
    return 1;
}

static int64_t recurrent_bytes(const Recurrent *part, int64_t rows) {
    return arena_size(rows * part->output->in_features, sizeof(float))
        + arena_size(rows * part->inputs->out_features, sizeof(float))
        + arena_size(recurrence_scratch(part->recurrence, rows), sizeof(float));
}

static int run_recurrent(const Recurrent *part, const Spans *spans, float *out, const float *x, const float *residual,
                         Arena *arena) {
    const int64_t rows = spans->num_tokens;
    float *inputs = arena_alloc(arena, rows * part->inputs->out_features, sizeof(float));
    float *given = arena_alloc(arena, rows * part->output->in_features, sizeof(float));
    float *scratch = arena_alloc(arena, recurrence_scratch(part->recurrence, rows), sizeof(float));
    if (!inputs || !given || !scratch) return 0;
    multiply(part->inputs, inputs, x, NULL, rows);
    scale_columns(inputs, part->scales, rows, part->inputs->out_features);
    recur(spans, part->recurrence, inputs, given, scratch);
    multiply(part->output, out, given, residual, rows);
    return 1;
}

static int64_t parallel_bytes(const Parallel *part, int64_t rows) {
    const int64_t first = part_bytes(&part->first, rows), second = part_bytes(&part->second, rows);
    return first > second ? first : second;
}

/* Returns the bytes of an arena that ``run_part`` needs for this many rows. */
int64_t part_bytes(const Part *part, int64_t rows) {
    switch (part->kind) {
        case ATTENTION: return attention_bytes(part->data, rows);
        case GATED_MLP: return gated_mlp_bytes(part->data, rows);
        case EXPERTS: return experts_bytes(part->data, rows);
        case DENSE_AND_EXPERTS: return dense_and_experts_bytes(part->data, rows);
        case RECURRENT: return recurrent_bytes(part->data, rows);
        case PARALLEL: return parallel_bytes(part->data, rows);
        case LATENT_ATTENTION: return latent_attention_bytes(part->data, rows);
        default: return 0;
    }
}

/* out [tokens, hidden size] = the part's output for x, plus residual or NULL, which may be out itself; so may x, but of
 * PARALLEL. The arena is as full afterwards as before. 0 if it had no room, or there is no such kind of parts. */
int run_part(const Part *part, const Spans *spans, float *out, const float *x, const float *residual, Arena *arena) {
    const size_t used = arena->used;
    const int64_t rows = spans->num_tokens;
    int is_done = 0;
    switch (part->kind) {
        case ATTENTION: is_done = run_attention(part->data, spans, out, x, residual, arena); break;
        case GATED_MLP: is_done = run_gated_mlp(part->data, out, x, residual, rows, arena); break;
        case EXPERTS: is_done = run_experts(part->data, out, x, x, residual, rows, arena); break;
        case DENSE_AND_EXPERTS: is_done = run_dense_and_experts(part->data, out, x, residual, rows, arena); break;
        case RECURRENT: is_done = run_recurrent(part->data, spans, out, x, residual, arena); break;
        case LATENT_ATTENTION: is_done = run_latent_attention(part->data, spans, out, x, residual, arena); break;
        case PARALLEL: {
            const Parallel *both = part->data;
            is_done = run_part(&both->first, spans, out, x, residual, arena)
                && run_part(&both->second, spans, out, x, out, arena);
            break;
        }
    }
    arena->used = used;
    return is_done;
}
