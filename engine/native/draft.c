/* The drafts of a round: those from outside, and the drafter's, by a pass and a draw for each token.
 *
 * A row's first pass computes what the drafter's cache misses of it, too. A head's is fed with the states that wait,
 * and its further ones with what it gives. Draws are those of sampling.c, with the same random numbers as anywhere
 * else.
 */

#include <math.h>
#include <string.h>

#include "rounds.h"

/* The drafter's logits [known] in the target's width: ids that it does not know have probability 0. */
static float *pad_logits(const Drafter *drafter, const Scratch *scratch, float *logits, int64_t known) {
    const int64_t *ids = drafter->token_ids, vocab = scratch->vocab;
    if (!ids && known >= vocab) return logits;
    float *padded = scratch->padded + this_thread() * vocab;
    for (int64_t id = ids ? 0 : known; id < vocab; id++) padded[id] = -INFINITY;
    if (!ids) memcpy(padded, logits, known * sizeof(float));
    for (int64_t i = 0; ids && i < known; i++) padded[ids[i]] = logits[i];
    return padded;
}

/* The largest probability of logits [known] as they are, which is how sure the drafter is of a greedy draft. */
static float greedy_confidence(const Row *sequence, const Scratch *scratch, const float *logits, int64_t known) {
    const float temperature = 1.0f;
    const Processors uncut = { &temperature, &sequence->top_k, &sequence->top_p, &sequence->min_p };
    float *probs = scratch->probs + this_thread() * scratch->vocab;
    process_row(probs, logits, &uncut, 0, NULL, known);
    return highest_of(probs, known);
}

/* A row's draft at a position, from logits [known], which are changed. Sets how sure the drafter is before it draws, if
 * drafts may be stopped. */
static int64_t draw_draft(const Drafter *drafter, const Rounds *rounds, const Scratch *scratch, int64_t row,
                          int64_t position, float *logits, int64_t known, float *confidence) {
    const Row *sequence = rounds->rows[row];
    const int64_t vocab = scratch->vocab, place = sequence->num_tokens + position;
    int64_t id;
    /* The most likely of the first ids in order is found without the others. */
    const int is_short = sequence->rule == GREEDY && !drafter->token_ids && known < vocab;
    if (!is_short) {
        logits = pad_logits(drafter, scratch, logits, known);
        known = vocab;
    }
    adjust_logits(sequence, position, logits, known);
    if (sequence->rule == GREEDY && sequence->stop_rates)
        *confidence = greedy_confidence(sequence, scratch, logits, known);
    if (sequence->rule == GREEDY) return argmax(logits, known);
    float *probs = scratch->probs + this_thread() * vocab;
    if (sequence->rule == REJECTION)
        probs = scratch->draft_probs + (row * rounds->max_drafts + position) * vocab;
    /* Drafts are guesses: a draft model without a distribution has a flat one. */
    if (!is_distribution(logits, vocab)) memset(logits, 0, vocab * sizeof(float));
    process_adjusted(sequence, scratch, probs, logits);
    if (sequence->stop_rates) *confidence = highest_of(probs, vocab);
    if (sequence->rule == COUPLED) {
        gumbel_argmax(&id, probs, &sequence->seed, &place, 0, 1, 1, vocab);
    } else {
        double number;
        int64_t seed;
        round_seed(&seed, sequence->seed, sequence->num_tokens);
        uniform(&number, &seed, &place, DRAFT_STREAM, 1);
        inverse_cdf(&id, probs, &number, 1, vocab);
    }
    return id;
}

/* A pass over the tokens that the drafter's cache misses of its rows. Returns how many rows there are. */
static int64_t plan_first_pass(const Drafter *drafter, const Rounds *rounds, Scratch *scratch) {
    /* Any token stands in for those that only the target has; a head knows them all. */
    const int64_t known = is_head(drafter) ? INT64_MAX : drafter->model->head->out_features;
    const int64_t hidden_size = drafter->model->hidden_size;
    int64_t size = 0, num_active = 0;
    for (int64_t row = 0; row < rounds->num_rows; row++) {
        const Row *sequence = rounds->rows[row];
        if (sequence->draft_ids || scratch->limit[row] == 0) continue;
        const int64_t stored = sequence->num_draft_computed, first = stored + is_head(drafter);
        const int64_t count = sequence->num_tokens - first;
        if (is_head(drafter))
            memcpy(scratch->states + size * hidden_size, sequence->waiting, count * hidden_size * sizeof(float));
        for (int64_t i = first; i < sequence->num_tokens; i++)
            scratch->token_ids[size++] = sequence->token_ids[i] < known ? sequence->token_ids[i] : known - 1;
        scratch->query_lens[num_active] = count;
        scratch->num_computed[num_active] = stored;
        scratch->span_first_block[num_active] = scratch->first_draft_block[row];
        scratch->chance[row] = 1.0;
        scratch->active[num_active++] = row;
    }
    return num_active;
}

/* A pass over the last drafts. */
static void plan_next_pass(const Drafter *drafter, const Rounds *rounds, Scratch *scratch, int64_t num_active,
                           int64_t position) {
    const int64_t size = drafter->model->hidden_size;
    for (int64_t i = 0; i < num_active; i++) {
        const int64_t row = scratch->active[i];
        scratch->token_ids[i] = scratch->draft_ids[row * rounds->max_drafts + position];
        scratch->query_lens[i] = 1;
        scratch->num_computed[i] = rounds->rows[row]->num_tokens - is_head(drafter) + position;
        scratch->span_first_block[i] = scratch->first_draft_block[row];
        if (is_head(drafter))
            memcpy(scratch->states + i * size, scratch->next_states + row * size, size * sizeof(float));
    }
}

/* Keeps the states that a head has given for the last token of each active row. */
static void keep_states(const Scratch *scratch, int64_t num_active, int64_t size) {
    const float *end = scratch->outputs;
    for (int64_t i = 0; i < num_active; i++) {
        end += scratch->query_lens[i] * size;
        memcpy(scratch->next_states + scratch->active[i] * size, end - size, size * sizeof(float));
    }
}

/* Runs the pass that is planned for the active rows. What the round stores is not certain before it is complete. */
static int run_pass(const Drafter *drafter, const Rounds *rounds, Scratch *scratch, int64_t num_active) {
    for (int64_t i = 0; i < num_active; i++) {
        const Row *row = rounds->rows[scratch->active[i]];
        scratch->state_slot[i] = row->draft_state_slot;
        scratch->num_folded[i] = row->num_draft_folded;
        scratch->num_certain[i] = row->num_draft_computed + 1;
    }
    const NewTokens new = {
        .num_spans = num_active, .num_tokens = scratch->query_lens, .num_stored = scratch->num_computed,
        .num_logits = scratch->ones, .first_block = scratch->span_first_block,
        .token_ids = scratch->token_ids, .blocks = scratch->blocks,
        .state_slot = scratch->state_slot, .num_folded = scratch->num_folded, .num_certain = scratch->num_certain,
        .states = scratch->states,
    };
    const Taps output = { .num_taps = 1, .layers = &drafter->output, .states = scratch->outputs };
    if (!decode(drafter->model, &new, is_head(drafter) ? &output : NULL, scratch->draft_logits)) return 0;
    if (is_head(drafter)) keep_states(scratch, num_active, drafter->model->hidden_size);
    for (int64_t i = 0; i < num_active; i++)
        rounds->rows[scratch->active[i]]->num_draft_folded =
            num_folded_after(scratch->num_folded[i], scratch->num_certain[i]);
    return 1;
}

/* Draws of all rows that draft on, behind ``position`` drafts of each. */
typedef struct {
    const Drafter *drafter;
    const Rounds *rounds;
    Scratch *scratch;
    int64_t position, known;
} DraftDraws;

/* Ends a row's draft behind ``num_drafted`` tokens where another pass would not pay, as Stop in draft_choice.py. What was
 * drawn stays in it: to drop a token for its own probability would not be exact. */
static void stop_or_go_on(const Row *sequence, Scratch *scratch, int64_t row, int64_t num_drafted, float confidence) {
    const int64_t num_rates = sequence->num_stop_rates;
    int64_t part = confidence > 0.0f ? (int64_t)((double)confidence * num_rates) : 0;
    if (part >= num_rates) part = num_rates - 1;
    scratch->chance[row] *= sequence->stop_rates[part];
    if (scratch->chance[row] < sequence->stop_below) scratch->limit[row] = num_drafted;
}

static void draw_task(const void *arguments, int64_t i) {
    const DraftDraws *task = arguments;
    Scratch *scratch = task->scratch;
    const int64_t row = scratch->active[i];
    float *logits = scratch->draft_logits + i * task->known;
    float confidence = 0.0f;
    const int64_t id =
        draw_draft(task->drafter, task->rounds, scratch, row, task->position, logits, task->known, &confidence);
    scratch->draft_ids[row * task->rounds->max_drafts + task->position] = id;
    count_token(task->rounds->rows[row], id);
    scratch->num_drafted[row] = task->position + 1;
    if (!task->rounds->rows[row]->stop_rates) return;
    if (scratch->confidences) scratch->confidences[row * task->rounds->max_drafts + task->position] = confidence;
    stop_or_go_on(task->rounds->rows[row], scratch, row, task->position + 1, confidence);
}

static int draw_drafts(const Drafter *drafter, const Rounds *rounds, Scratch *scratch) {
    const int64_t known = drafter->model->head->out_features, max_drafts = rounds->max_drafts;
    int64_t num_active = plan_first_pass(drafter, rounds, scratch);
    for (int64_t position = 0; num_active > 0; position++) {
        if (!run_pass(drafter, rounds, scratch, num_active)) return 0;
        run_task(draw_task, &(DraftDraws){ drafter, rounds, scratch, position, known }, num_active,
                 scratch->samples || scratch->stops ? num_active * scratch->vocab * WORK_OF_A_DRAW : 0);
        for (int64_t i = 0; i < num_active; i++) {
            const int64_t row = scratch->active[i], id = scratch->draft_ids[row * max_drafts + position];
            if (rounds->rows[row]->mask && !rounds->constrain(row, position + 1, id)) return 0;
        }
        int64_t num_left = 0;
        for (int64_t i = 0; i < num_active; i++)
            if (position + 1 < scratch->limit[scratch->active[i]]) scratch->active[num_left++] = scratch->active[i];
        num_active = num_left;
        plan_next_pass(drafter, rounds, scratch, num_active, position);
    }
    return 1;
}

/* Whether the drafter can go on from what it has of a row: few tokens that its cache misses, or the states of all tokens
 * but the pending one. Those of a text's first token are not known before it has been computed. */
static int can_draft(const Drafter *drafter, const Rounds *rounds, const Row *row) {
    if (!is_head(drafter)) return row->num_tokens - row->num_draft_computed <= rounds->max_missed;
    return row->num_waiting > 0 && row->num_draft_computed + row->num_waiting == row->num_tokens - 1;
}

/* How much a row drafts in a round: it emits one token more, and the text must hold it. */
static int64_t limit_of(const Drafter *drafter, const Rounds *rounds, const Row *row) {
    const int64_t room = row->max_num_tokens - row->num_tokens - 1;
    const int64_t draft_room = row->draft_ids ? room : rounds->max_draft_len - row->num_tokens;
    int64_t limit = row->num_draft_tokens < room ? row->num_draft_tokens : room;
    if (draft_room < limit) limit = draft_room;
    if (rounds->max_drafts < limit) limit = rounds->max_drafts;
    if (!row->draft_ids && !can_draft(drafter, rounds, row)) return 0;
    return limit > 0 ? limit : 0;
}

/* How many of a row's drafts from outside the target knows, up to the first that it does not. */
static int64_t count_known(const int64_t *ids, int64_t count, int64_t vocab) {
    int64_t known = 0;
    while (known < count && is_token(ids[known], vocab)) known++;
    return known;
}

/* Sets num_drafted, draft_ids and draft_probs of all rows. drafter is NULL if no row needs it. 0 if there is no memory,
 * or a row's table has no blocks for its drafts. */
int draft_round(const Drafter *drafter, const Rounds *rounds, Scratch *scratch) {
    for (int64_t row = 0; row < rounds->num_rows; row++) {
        const Row *sequence = rounds->rows[row];
        scratch->limit[row] = limit_of(drafter, rounds, sequence);
        scratch->num_drafted[row] = 0;
        if (!sequence->draft_ids) {
            const int64_t end = sequence->num_tokens + scratch->limit[row] - 1;
            const int64_t room = drafter ? sequence->num_draft_blocks * drafter->model->block_size : 0;
            if (drafter && scratch->limit[row] && end > room) return 0;
            continue;
        }
        scratch->num_drafted[row] = count_known(sequence->draft_ids, scratch->limit[row], scratch->vocab);
        int64_t *drafts = scratch->draft_ids + row * rounds->max_drafts;
        copy_ids(drafts, sequence->draft_ids, scratch->num_drafted[row]);
    }
    if (!drafter) return 1;
    const int is_done = draw_drafts(drafter, rounds, scratch);
    for (int64_t row = 0; row < rounds->num_rows; row++)
        for (int64_t i = scratch->num_drafted[row] - 1; i >= 0 && !rounds->rows[row]->draft_ids; i--)
            uncount_token(rounds->rows[row], scratch->draft_ids[row * rounds->max_drafts + i]);
    return is_done;
}
