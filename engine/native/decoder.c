/* A whole pass of a Llama-shaped decoder in one call: token ids in, logits out, for a few tokens on a CPU.
 *
 * A small model's pass is over a hundred calls of the functions in layers.c, attention.c and linear.c. Python takes
 * longer to make such a call than C to run it. The same functions in the same order, so the same bits.
 * "decoder.py" calls this; all arrays are row-major.
 */

#include <string.h>

#include "kernels.h"
#include "arena.h"
#include "vectors.h"

static int64_t sum_of(const int64_t *x, int64_t size) {
    int64_t sum = 0;
    for (int64_t i = 0; i < size; i++) sum += x[i];
    return sum;
}

/* A token's embedding in float32, whatever it is kept in. What has none, or no angles at its position, is NaN, and so
 * are its logits: only its own sequence ends. */
static void embed(float *to, const Decoder *decoder, int64_t token_id, int64_t position) {
    const int64_t size = decoder->hidden_size, start = token_id * size;
    if (token_id < 0 || token_id >= decoder->vocab_size || position >= decoder->num_angles) {
        for (int64_t i = 0; i < size; i++) to[i] = NAN;
        return;
    }
    if (decoder->embedding_type >= QUANTISED) {
        const int64_t type = decoder->embedding_type - QUANTISED;
        dequantise(type, to, (const uint8_t *)decoder->embeddings + token_id * row_bytes(type, size), size);
    } else if (decoder->embedding_type == FLOAT32) {
        memcpy(to, (const float *)decoder->embeddings + start, size * sizeof(float));
    } else if (decoder->embedding_type == FLOAT16) {
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t count = size - i < LANES ? size - i : LANES;
            uint16_t from[LANES] = {0};
            memcpy(from, (const uint16_t *)decoder->embeddings + start + i, count * sizeof(uint16_t));
            const vec wide = widen(from);
            memcpy(to + i, &wide, count * sizeof(float));
        }
    } else {
        const uint16_t *from = (const uint16_t *)decoder->embeddings + start;
        for (int64_t i = 0; i < size; i++) {
            union { uint32_t i; float f; } wide = { (uint32_t)from[i] << 16 };
            to[i] = wide.f;
        }
    }
    for (int64_t i = 0; i < size; i++) to[i] *= decoder->embedding_scale;
}

/* Whether the cache has all blocks of the spans: what is written to others is somebody else's memory. */
static int has_blocks(const Decoder *decoder, const NewTokens *new) {
    for (int64_t span = 0; span < new->num_spans; span++) {
        const int64_t *blocks = new->blocks + new->first_block[span];
        const int64_t end = new->num_stored[span] + new->num_tokens[span];
        for (int64_t i = 0; i * decoder->block_size < end; i++)
            if (blocks[i] < 0 || blocks[i] >= decoder->num_blocks) return 0;
    }
    return 1;
}

/* Where every token is stored and stands, and how its span lies among the others. */
static Spans find_places(const Decoder *decoder, const NewTokens *new, int64_t num_tokens, int64_t *slots,
                         int64_t *angle, int64_t *first_token) {
    const int64_t block_size = decoder->block_size;
    int64_t token = 0;
    for (int64_t span = 0; span < new->num_spans; span++) {
        first_token[span] = token;
        const int64_t *blocks = new->blocks + new->first_block[span];
        const int64_t start = new->num_stored[span], end = start + new->num_tokens[span];
        for (int64_t at = start; at < end; at++, token++) {
            angle[token] = at < decoder->num_angles ? at : 0;
            slots[token] = blocks[at / block_size] * block_size + at % block_size;
        }
    }
    first_token[new->num_spans] = token;
    return (Spans){
        .num_spans = new->num_spans, .num_tokens = num_tokens, .block_size = block_size,
        .slots = slots, .first_token = first_token,
        .num_stored = new->num_stored, .first_block = new->first_block, .blocks = new->blocks,
        .angle = angle, .num_angles = decoder->num_angles, .rotary_size = decoder->rotary_size,
        .cos = decoder->cos, .sin = decoder->sin,
    };
}

/* The last rows of each span, as many as want logits, one after the other. */
static void gather(float *to, const float *hidden, const NewTokens *new, int64_t size) {
    for (int64_t span = 0, end = 0; span < new->num_spans; span++) {
        const int64_t num_rows = new->num_logits[span];
        end += new->num_tokens[span];
        memcpy(to, hidden + (end - num_rows) * size, num_rows * size * sizeof(float));
        to += num_rows * size;
    }
}

/* Adds a layer's output for x to the rows, normed before unless norm is NULL. */
static void add(float *rows, const Linear *layer, const float *x, const float *norm, float eps, float *normed,
                int64_t num_rows) {
    multiply(layer, norm ? normed : rows, x, norm ? NULL : rows, num_rows);
    if (norm) rms_norm(rows, normed, norm, rows, num_rows, layer->out_features, eps);
}

/* Stores the new tokens; logits [sum of num_logits, vocab] of each span's last ones. 0 if there is no memory, or a
 * block is not the cache's, and then nothing has happened. */
int64_t decode(const Decoder *decoder, const NewTokens *new, float *logits) {
    static _Thread_local Arena arena;
    const int64_t rows = sum_of(new->num_tokens, new->num_spans), size = decoder->hidden_size;
    const int64_t num_logits = sum_of(new->num_logits, new->num_spans);
    const DecoderLayer *shape = decoder->layers;
    const int64_t width = shape->qkv->out_features, attended_width = shape->output->in_features;
    const int64_t mlp = shape->down->in_features;
    const size_t integers = 2 * arena_size(rows, sizeof(int64_t))
        + arena_size(new->num_spans + 1, sizeof(int64_t));
    const size_t vectors = 2 * arena_size(rows * size, sizeof(float))
        + arena_size(rows * width, sizeof(float)) + arena_size(rows * attended_width, sizeof(float))
        + 3 * arena_size(rows * mlp, sizeof(float));
    if (!has_blocks(decoder, new) || !arena_reserve(&arena, integers + vectors)) return 0;
    int64_t *slots = arena_alloc(&arena, rows, sizeof(int64_t));
    int64_t *angle = arena_alloc(&arena, rows, sizeof(int64_t));
    int64_t *first_token = arena_alloc(&arena, new->num_spans + 1, sizeof(int64_t));
    const Spans spans = find_places(decoder, new, rows, slots, angle, first_token);
    float *hidden = arena_alloc(&arena, rows * size, sizeof(float));
    float *normed = arena_alloc(&arena, rows * size, sizeof(float));
    float *qkv = arena_alloc(&arena, rows * width, sizeof(float));
    float *attended = arena_alloc(&arena, rows * attended_width, sizeof(float));
    float *gate_up = arena_alloc(&arena, 2 * rows * mlp, sizeof(float));
    float *gated = arena_alloc(&arena, rows * mlp, sizeof(float));

    for (int64_t span = 0, row = 0; span < new->num_spans; span++)
        for (int64_t i = 0; i < new->num_tokens[span]; i++, row++)
            embed(hidden + row * size, decoder, new->token_ids[row], new->num_stored[span] + i);
    for (int64_t i = 0; i < decoder->num_layers; i++) {
        const DecoderLayer *layer = &decoder->layers[i];
        rms_norm(normed, hidden, layer->input_norm, NULL, rows, size, layer->input_eps);
        multiply(layer->qkv, qkv, normed, NULL, rows);
        attend(&spans, layer->attention, qkv, attended);
        add(hidden, layer->output, attended, layer->output_norm, layer->output_eps, normed, rows);
        rms_norm(normed, hidden, layer->mlp_norm, NULL, rows, size, layer->mlp_eps);
        multiply(layer->gate_up, gate_up, normed, NULL, rows);
        gate(gated, gate_up, layer->activation, rows, mlp);
        add(hidden, layer->down, gated, layer->down_norm, layer->down_eps, normed, rows);
    }
    gather(normed, hidden, new, size);
    rms_norm(normed, normed, decoder->norm, NULL, num_logits, size, decoder->norm_eps);
    multiply(decoder->head, logits, normed, NULL, num_logits);
    if (decoder->softcap > 0) cap(logits, num_logits, decoder->head->out_features, decoder->softcap);
    return 1;
}
