/* A whole pass of a decoder in one call: token ids in, logits out, for a few tokens on a CPU.
 *
 * A small model's pass is over a hundred calls of the functions in layers.c, attention.c and linear.c. Python takes
 * longer to make such a call than C to run it. The functions and their order are the same, and so are the bits.
 * "decoder.py" calls this; all arrays are row-major.
 */

#include <string.h>

#include "kernels.h"
#include "vectors.h"

static int64_t sum_of(const int64_t *x, int64_t size) {
    int64_t sum = 0;
    for (int64_t i = 0; i < size; i++) sum += x[i];
    return sum;
}

/* A row of a table in float32, whatever it is kept in, times a number. */
static void look_up(float *to, const void *table, int64_t kept_in, int64_t row, int64_t size, float scale) {
    const int64_t start = row * size;
    if (kept_in >= QUANTISED) {
        const int64_t type = kept_in - QUANTISED;
        dequantise(type, to, (const uint8_t *)table + row * row_bytes(type, size), size);
    } else if (kept_in == FLOAT32) {
        memcpy(to, (const float *)table + start, size * sizeof(float));
    } else if (kept_in == FLOAT16) {
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t count = size - i < LANES ? size - i : LANES;
            uint16_t from[LANES] = {0};
            memcpy(from, (const uint16_t *)table + start + i, count * sizeof(uint16_t));
            const vec wide = widen(from);
            memcpy(to + i, &wide, count * sizeof(float));
        }
    } else {
        const uint16_t *from = (const uint16_t *)table + start;
        for (int64_t i = 0; i < size; i++) {
            union { uint32_t i; float f; } wide = { (uint32_t)from[i] << 16 };
            to[i] = wide.f;
        }
    }
    for (int64_t i = 0; i < size; i++) to[i] *= scale;
}

/* A token's embedding. What has none, or no angles at its position, is NaN, and so are its logits: only its own sequence
 * ends. Of the table of ``layer_inputs`` it gets a row, too. */
static void embed(float *to, float *given, const Decoder *decoder, int64_t token_id, int64_t position) {
    const LayerInputs *inputs = decoder->layer_inputs;
    const int64_t size = decoder->hidden_size, num_given = inputs ? decoder->num_layers * inputs->size : 0;
    if (token_id < 0 || token_id >= decoder->vocab_size || position >= decoder->num_reached) {
        for (int64_t i = 0; i < size; i++) to[i] = NAN;
        for (int64_t i = 0; i < num_given; i++) given[i] = NAN;
        return;
    }
    look_up(to, decoder->embeddings, decoder->embedding_type, token_id, size, decoder->embedding_scale);
    if (inputs) look_up(given, inputs->table, inputs->table_type, token_id, num_given, inputs->scale);
}

static inline int64_t num_kinds(const Decoder *decoder) { return decoder->num_window_blocks ? 2 : 1; }

/* Whether the cache has all blocks of the spans: what is written to others is somebody else's memory. Layers with a
 * window may have let go of blocks, but not of those that are written to. */
static int has_blocks(const Decoder *decoder, const NewTokens *new) {
    const int64_t kinds = num_kinds(decoder), own = decoder->num_window_blocks;
    for (int64_t span = 0; span < new->num_spans; span++) {
        const int64_t *blocks = new->blocks + new->first_block[span];
        const int64_t end = new->num_stored[span] + new->num_tokens[span];
        if (new->num_stored[span] < 0) return 0;
        for (int64_t i = 0; i * decoder->block_size < end; i++, blocks += kinds) {
            if (blocks[0] < 0 || blocks[0] >= decoder->num_blocks) return 0;
            const int is_written = (i + 1) * decoder->block_size > new->num_stored[span];
            if (own && (blocks[1] < 0 || blocks[1] >= own - is_written)) return 0;
        }
    }
    return 1;
}

/* Whether the spans' states lie in the cache, and their records in its logs. */
static int has_states(const Decoder *decoder, const NewTokens *new) {
    if (decoder->num_state_slots && !new->state_slot) return 0;
    for (int64_t span = 0; decoder->num_state_slots && span < new->num_spans; span++) {
        const int64_t stored = new->num_stored[span], folded = new->num_folded[span];
        const int64_t num_uncertain = stored + new->num_tokens[span] - new->num_certain[span];
        if (new->state_slot[span] < 0 || new->state_slot[span] >= decoder->num_state_slots) return 0;
        if (folded < 0 || folded % STATE_CHUNK || folded > stored) return 0;
        if (stored - folded > STATE_CHUNK + STATE_ROLLBACK) return 0;
        if (num_uncertain < 0 || num_uncertain > STATE_ROLLBACK) return 0;
    }
    return 1;
}

/* Where every token is stored and stands, and how its span lies among the others. */
static Spans find_places(const Decoder *decoder, const NewTokens *new, int64_t num_tokens, int64_t *slots,
                         int64_t *angle, int64_t *first_token) {
    const int64_t block_size = decoder->block_size, kinds = num_kinds(decoder);
    int64_t token = 0;
    for (int64_t span = 0; span < new->num_spans; span++) {
        first_token[span] = token;
        const int64_t *blocks = new->blocks + new->first_block[span];
        const int64_t start = new->num_stored[span], end = start + new->num_tokens[span];
        const int64_t shift = new->shift ? new->shift[span] : 0;
        for (int64_t at = start; at < end; at++, token++) {
            angle[token] = at + shift >= 0 && at + shift < decoder->num_angles ? at + shift : 0;
            for (int64_t kind = 0; kind < kinds; kind++) {
                const int64_t block = blocks[at / block_size * kinds + kind];
                slots[kind * num_tokens + token] = block * block_size + at % block_size;
            }
        }
    }
    first_token[new->num_spans] = token;
    return (Spans){
        .num_spans = new->num_spans, .num_tokens = num_tokens, .block_size = block_size,
        .num_kinds = kinds, .slots = slots, .first_token = first_token,
        .num_stored = new->num_stored, .first_block = new->first_block, .blocks = new->blocks,
        .angle = angle, .num_angles = decoder->num_angles, .rotary_size = decoder->rotary_size,
        .cos = decoder->cos, .sin = decoder->sin,
        .state_slot = new->state_slot, .num_folded = new->num_folded, .num_certain = new->num_certain,
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

/* The hidden states of a pass, and as much room for what is made of them. */
typedef struct {
    const Spans *spans;
    float *hidden, *normed;       /* [rows, size] */
    int64_t rows, size, centres;
    Arena *arena;
} Pass;

/* A norm of ``rows`` of hidden states, which may be ``out``. */
static void norm_states(const Pass *pass, float *out, const float *x, const float *weight, int64_t rows, float eps) {
    if (pass->centres) centre(out, x, rows, pass->size);
    rms_norm(out, pass->centres ? out : x, weight, NULL, rows, pass->size, eps);
}

/* Adds a part's output to the hidden states, with a norm before it and one after it, unless they are NULL. */
static int add_part(const Pass *pass, const Part *part, const float *norm, float eps, const float *post_norm,
                    float post_eps) {
    float *hidden = pass->hidden, *normed = pass->normed;
    if (norm) norm_states(pass, normed, hidden, norm, pass->rows, eps);
    const float *x = norm ? normed : hidden, *residual = post_norm ? NULL : hidden;
    if (!run_part(part, pass->spans, post_norm ? normed : hidden, x, residual, pass->arena)) return 0;
    if (post_norm && pass->centres) centre(normed, normed, pass->rows, pass->size);
    if (post_norm) rms_norm(hidden, normed, post_norm, hidden, pass->rows, pass->size, post_eps);
    return 1;
}

/* Replaces embeddings by the states that come with the tokens, or by what is made of both. Returns what the first
 * mixer gets in their place, or NULL. */
static const float *join(const Pass *pass, const Decoder *decoder, const float *states) {
    const int64_t size = pass->size;
    float *joined = arena_alloc(pass->arena, 2 * pass->rows * size, sizeof(float));
    for (int64_t row = 0; row < pass->rows; row++) {
        float *hidden = pass->hidden + row * size, *left = joined + 2 * row * size, *right = left + size;
        norm_row(left, hidden, decoder->embedding_norm, NULL, size, decoder->embedding_norm_eps);
        if (states) memcpy(hidden, states + row * size, size * sizeof(float));
        else memset(hidden, 0, size * sizeof(float));
        norm_row(right, hidden, decoder->state_norm, NULL, size, decoder->state_norm_eps);
        if (decoder->adds_to_normed) memcpy(hidden, right, size * sizeof(float));
    }
    if (!decoder->projection) return joined;
    multiply(decoder->projection, pass->hidden, joined, NULL, pass->rows);
    return NULL;
}

/* Adds to the numbers that each token has for each layer what is computed of its embedding. */
static void add_layer_inputs(const Pass *pass, const LayerInputs *inputs, float *given, float *projected) {
    const int64_t num_layers = inputs->projection->out_features / inputs->size;
    multiply(inputs->projection, projected, pass->hidden, NULL, pass->rows);
    rms_norm(given, projected, inputs->norm, given, pass->rows * num_layers, inputs->size, inputs->norm_eps);
}

/* A layer's last branch, whose numbers for a token lie ``stride`` apart from the next one's. */
static int run_token_branch(const Pass *pass, const TokenBranch *branch, const float *given, int64_t stride) {
    const int64_t size = branch->output->in_features, rows = pass->rows;
    const size_t used = pass->arena->used;
    float *gates = arena_alloc(pass->arena, rows * size, sizeof(float));
    float *pairs = arena_alloc(pass->arena, 2 * rows * size, sizeof(float));
    if (!pairs) return 0;
    multiply(branch->gate, gates, pass->hidden, NULL, rows);
    for (int64_t row = 0; row < rows; row++) {
        memcpy(pairs + 2 * row * size, gates + row * size, size * sizeof(float));
        memcpy(pairs + (2 * row + 1) * size, given + row * stride, size * sizeof(float));
    }
    gate(gates, pairs, branch->activation, rows, size);
    multiply(branch->output, pass->normed, gates, NULL, rows);
    rms_norm(pass->hidden, pass->normed, branch->norm, pass->hidden, rows, pass->size, branch->norm_eps);
    pass->arena->used = used;
    return 1;
}

/* Runs a layer whose mixer gets ``joined``, or else what its norm makes of the hidden states. */
static int run_layer(const Pass *pass, const DecoderLayer *layer, const float *joined) {
    if (layer->is_parallel) {
        norm_states(pass, pass->normed, pass->hidden, layer->mixer_norm, pass->rows, layer->mixer_norm_eps);
        return run_part(&layer->mixer, pass->spans, pass->hidden, pass->normed, pass->hidden, pass->arena)
            && run_part(&layer->mlp, pass->spans, pass->hidden, pass->normed, pass->hidden, pass->arena);
    }
    int is_mixed = 1;
    if (joined)
        is_mixed = run_part(&layer->mixer, pass->spans, pass->hidden, joined, pass->hidden, pass->arena);
    else if (layer->mixer.data)
        is_mixed = add_part(pass, &layer->mixer, layer->mixer_norm, layer->mixer_norm_eps, layer->mixer_post_norm,
                            layer->mixer_post_norm_eps);
    if (!is_mixed || !layer->mlp.data) return is_mixed;
    return add_part(pass, &layer->mlp, layer->mlp_norm, layer->mlp_norm_eps, layer->mlp_post_norm,
                    layer->mlp_post_norm_eps);
}

/* Copies the states after ``layer`` to where they are wanted. */
static void give(const Taps *taps, int64_t layer, const float *states, int64_t rows, int64_t size) {
    for (int64_t tap = 0; taps && tap < taps->num_taps; tap++)
        for (int64_t row = 0; taps->layers[tap] == layer && row < rows; row++)
            memcpy(taps->states + (row * taps->num_taps + tap) * size, states + row * size, size * sizeof(float));
}

/* Bytes of the largest part of any layer. */
static int64_t largest_part(const Decoder *decoder, int64_t rows) {
    int64_t largest = 0;
    for (int64_t i = 0; i < decoder->num_layers; i++) {
        const int64_t mixer = decoder->layers[i].mixer.data ? part_bytes(&decoder->layers[i].mixer, rows) : 0;
        const int64_t mlp = decoder->layers[i].mlp.data ? part_bytes(&decoder->layers[i].mlp, rows) : 0;
        const TokenBranch *branch = decoder->layers[i].token_branch;
        const int64_t size = branch ? branch->output->in_features : 0;
        const int64_t last = arena_size(rows * size, sizeof(float)) + arena_size(2 * rows * size, sizeof(float));
        if (last > largest) largest = last;
        if (mixer > largest) largest = mixer;
        if (mlp > largest) largest = mlp;
    }
    return largest;
}

/* Tells linear layers which adapter each of their rows has: those of all new tokens, or of those that want logits. */
static void adapt(const Decoder *decoder, const NewTokens *new, int64_t *numbers, const int64_t *counts) {
    if (!decoder->adapted || !new->adapter) return;
    int64_t row = 0;
    for (int64_t span = 0; span < new->num_spans; span++)
        for (int64_t i = 0; i < counts[span]; i++) numbers[row++] = new->adapter[span];
    *decoder->adapted = (AdaptedRows){ row, numbers };
}

/* ``decode``, which leaves layers with rows of this pass. */
static int64_t run_pass(const Decoder *decoder, const NewTokens *new, const Taps *taps, float *logits) {
    static _Thread_local Arena arena;
    const int64_t rows = sum_of(new->num_tokens, new->num_spans), size = decoder->hidden_size;
    const int64_t num_logits = sum_of(new->num_logits, new->num_spans);
    const size_t integers = 2 * arena_size(rows, sizeof(int64_t)) + arena_size(num_kinds(decoder) * rows, sizeof(int64_t))
        + arena_size(new->num_spans + 1, sizeof(int64_t));
    const LayerInputs *inputs = decoder->layer_inputs;
    const int64_t num_given = inputs ? decoder->num_layers * inputs->size : 0;
    const size_t vectors = 4 * arena_size(rows * size, sizeof(float)) + 2 * arena_size(rows * num_given, sizeof(float))
        + largest_part(decoder, rows);
    if (!has_blocks(decoder, new) || !has_states(decoder, new) || !arena_reserve(&arena, integers + vectors)) return 0;
    int64_t *slots = arena_alloc(&arena, num_kinds(decoder) * rows, sizeof(int64_t));
    int64_t *angle = arena_alloc(&arena, rows, sizeof(int64_t));
    int64_t *first_token = arena_alloc(&arena, new->num_spans + 1, sizeof(int64_t));
    int64_t *numbers = arena_alloc(&arena, rows, sizeof(int64_t));
    const Spans spans = find_places(decoder, new, rows, slots, angle, first_token);
    float *hidden = arena_alloc(&arena, rows * size, sizeof(float));
    float *normed = arena_alloc(&arena, rows * size, sizeof(float));
    float *given = arena_alloc(&arena, rows * num_given, sizeof(float));
    float *projected = arena_alloc(&arena, rows * num_given, sizeof(float));
    const Pass pass = { &spans, hidden, normed, rows, size, decoder->centres, &arena };

    for (int64_t span = 0, row = 0; span < new->num_spans; span++)
        for (int64_t i = 0; i < new->num_tokens[span]; i++, row++)
            embed(hidden + row * size, given + row * num_given, decoder, new->token_ids[row], new->num_stored[span] + i);
    adapt(decoder, new, numbers, new->num_tokens);
    const float *joined = decoder->state_norm ? join(&pass, decoder, new->states) : NULL;
    if (inputs) add_layer_inputs(&pass, inputs, given, projected);
    for (int64_t i = 0; i < decoder->num_layers; i++) {
        const DecoderLayer *layer = &decoder->layers[i];
        if (!run_layer(&pass, layer, i ? NULL : joined)) return 0;
        if (layer->token_branch && !run_token_branch(&pass, layer->token_branch, given + i * inputs->size, num_given))
            return 0;
        for (int64_t n = 0; layer->scale != 1.0f && n < rows * size; n++) hidden[n] *= layer->scale;
        give(taps, i, hidden, rows, size);
    }
    if (taps) {
        norm_states(&pass, normed, hidden, decoder->norm, rows, decoder->norm_eps);
        give(taps, decoder->num_layers, normed, rows, size);
    }
    gather(normed, hidden, new, size);
    norm_states(&pass, normed, normed, decoder->norm, num_logits, decoder->norm_eps);
    adapt(decoder, new, numbers, new->num_logits);
    multiply(decoder->head, logits, normed, NULL, num_logits);
    if (decoder->softcap > 0) cap(logits, num_logits, decoder->head->out_features, decoder->softcap);
    return 1;
}

/* Stores the new tokens; logits [sum of num_logits, vocab] of each span's last ones, and taps unless that is NULL. 0 if
 * there is no memory, or a block or state is not the cache's, and then nothing has happened. States are folded as far as
 * ``num_folded_after`` says. */
int64_t decode(const Decoder *decoder, const NewTokens *new, const Taps *taps, float *logits) {
    const int64_t is_done = run_pass(decoder, new, taps, logits);
    /* A head that drafts may share layers, and is not adapted. */
    if (decoder->adapted) decoder->adapted->numbers = NULL;
    return is_done;
}
