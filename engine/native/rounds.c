/* Rounds of speculation in one call: drafts, the target's pass over them, the verdict, and on from there.
 *
 * For models whose round takes hardly longer than what Python does around it. Each round is what it would be
 * alone: the same passes, the same random numbers, the same comparisons as in sampler.py and verify.py, the
 * reference. "runner.py" calls this; all arrays are row-major.
 */

#include <string.h>
#include <time.h>

#include "arena.h"
#include "rounds.h"

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

typedef struct {
    void **pointer;
    int64_t length;
    size_t size;
} Piece;

/* 0 if there is no memory. */
static int make_scratch(Scratch *scratch, const Drafter *drafter, const Rounds *rounds, int64_t vocab) {
    static _Thread_local Arena arena;
    const int64_t draft_vocab = drafter ? drafter->model->head->out_features : 0;
    const int64_t rows = rounds->num_rows, drafts = rows * rounds->max_drafts, threads = get_num_threads();
    int64_t num_blocks = 0, num_new = 0, samples = 0, stops = 0, uses_probs = 0, cuts = 0, uses_one_hot = 0;
    for (int64_t i = 0; i < rows; i++) {
        const Row *row = rounds->rows[i];
        const int is_sampled = row->rule != GREEDY;
        num_blocks += row->num_blocks + row->num_draft_blocks;
        num_new += row->num_tokens - row->num_computed;
        samples |= is_sampled;
        stops |= row->stop_rates != NULL;
        cuts |= is_sampled && (row->top_k > 0 || row->top_p < 1.0f || row->min_p > 0.0f);
        uses_probs |= row->rule == REJECTION && (!row->draft_ids || rounds->constrain);
        uses_one_hot |= row->rule == REJECTION && (row->draft_ids || rounds->constrain);
    }
    const int64_t num_drafting = rows * (rounds->max_missed + 1), num_scoring = num_new + drafts;
    const int64_t num_following = is_head(drafter) ? rows * drafter->max_waiting + num_scoring : 0;
    int64_t num_tokens = num_drafting > num_scoring ? num_drafting : num_scoring;
    if (num_following > num_tokens) num_tokens = num_following;
    const int64_t taps = is_head(drafter) ? drafter->fusion->num_taps * drafter->fusion->tap_size : 0;
    const int64_t size = is_head(drafter) ? drafter->model->hidden_size : 0;
    const int pads = drafter && (drafter->token_ids || (samples && draft_vocab < vocab));
    const size_t integer = sizeof(int64_t), number = sizeof(float);
    const Piece pieces[] = {
        { (void **)&scratch->limit, rows, integer },
        { (void **)&scratch->chance, rows, sizeof(double) },
        { (void **)&scratch->num_drafted, rows, integer },
        { (void **)&scratch->next_id, rows, integer },
        { (void **)&scratch->is_broken, rows, integer },
        { (void **)&scratch->first_block, rows, integer },
        { (void **)&scratch->first_draft_block, rows, integer },
        { (void **)&scratch->ones, rows, integer },
        { (void **)&scratch->zeros, rows, integer },
        { (void **)&scratch->query_lens, rows, integer },
        { (void **)&scratch->num_computed, rows, integer },
        { (void **)&scratch->span_first_block, rows, integer },
        { (void **)&scratch->state_slot, rows, integer },
        { (void **)&scratch->num_folded, rows, integer },
        { (void **)&scratch->num_certain, rows, integer },
        { (void **)&scratch->active, rows, integer },
        { (void **)&scratch->num_scored, rows, integer },
        { (void **)&scratch->first_scored, rows, integer },
        { (void **)&scratch->draft_ids, drafts, integer },
        { (void **)&scratch->token_ids, num_tokens, integer },
        { (void **)&scratch->blocks, num_blocks, integer },
        { (void **)&scratch->logits, (rows + drafts) * vocab, number },
        { (void **)&scratch->draft_logits, rows * draft_vocab, number },
        { (void **)&scratch->tapped, num_scoring * taps, number },
        { (void **)&scratch->fused, num_scoring * size, number },
        { (void **)&scratch->states, num_tokens * size, number },
        { (void **)&scratch->outputs, num_tokens * size, number },
        { (void **)&scratch->next_states, rows * size, number },
        { (void **)&scratch->draft_probs, uses_probs ? drafts * vocab : 0, number },
        { (void **)&scratch->probs, samples || stops ? threads * vocab : 0, number },
        { (void **)&scratch->padded, pads ? threads * vocab : 0, number },
        { (void **)&scratch->cut, cuts ? threads * vocab : 0, number },
        { (void **)&scratch->one_hot, uses_one_hot ? threads * vocab : 0, number },
    };
    const int num_pieces = sizeof pieces / sizeof *pieces;
    size_t bytes = 0;
    for (int i = 0; i < num_pieces; i++) bytes += arena_size(pieces[i].length, pieces[i].size);
    if (!arena_reserve(&arena, bytes)) return 0;
    for (int i = 0; i < num_pieces; i++)
        *pieces[i].pointer = pieces[i].length ? arena_alloc(&arena, pieces[i].length, pieces[i].size) : NULL;
    scratch->vocab = vocab;
    scratch->samples = samples;
    scratch->stops = stops;
    return 1;
}

/* What stays the same for all rounds, and counts of tokens that came from elsewhere. */
static void prepare_rows(const Rounds *rounds, Scratch *scratch) {
    int64_t size = 0;
    for (int64_t i = 0; i < rounds->num_rows; i++) {
        Row *row = rounds->rows[i];
        scratch->ones[i] = 1;
        scratch->zeros[i] = 0;
        scratch->first_block[i] = size;
        copy_ids(scratch->blocks + size, row->blocks, row->num_blocks);
        size += row->num_blocks;
        scratch->first_draft_block[i] = size;
        copy_ids(scratch->blocks + size, row->draft_blocks, row->num_draft_blocks);
        size += row->num_draft_blocks;
        while (row->counts && row->num_counted < row->num_tokens)
            count_token(row, row->token_ids[row->num_counted]);
    }
}

/* Masks and drafts from outside of a later round. */
static int constrain_rows(const Rounds *rounds) {
    for (int64_t row = 0; row < rounds->num_rows; row++)
        if (rounds->rows[row]->mask && !rounds->constrain(row, 0, -1)) return 0;
    return 1;
}

/* The target's logits of every row's pending token and its drafts, behind what its cache does not have yet, and the
 * states that a head's are made of. 0 if a row's table has no blocks for them, or as ``decode``. */
static int score(const Decoder *target, const Drafter *drafter, const Rounds *rounds, Scratch *scratch) {
    int64_t size = 0, num_logits = 0;
    for (int64_t i = 0; i < rounds->num_rows; i++) {
        const Row *row = rounds->rows[i];
        const int64_t num_new = row->num_tokens - row->num_computed, num_drafted = scratch->num_drafted[i];
        if (row->num_tokens + num_drafted > row->num_blocks * target->block_size) return 0;
        scratch->first_scored[i] = num_logits;
        scratch->num_scored[i] = 1 + num_drafted;
        scratch->query_lens[i] = num_new + num_drafted;
        scratch->num_computed[i] = row->num_computed;
        scratch->state_slot[i] = row->state_slot;
        scratch->num_folded[i] = row->num_folded;
        scratch->num_certain[i] = row->num_computed + 1;
        copy_ids(scratch->token_ids + size, row->token_ids + row->num_computed, num_new);
        copy_ids(scratch->token_ids + size + num_new, scratch->draft_ids + i * rounds->max_drafts, num_drafted);
        size += num_new + num_drafted;
        num_logits += 1 + num_drafted;
    }
    const NewTokens new = {
        .num_spans = rounds->num_rows, .num_tokens = scratch->query_lens, .num_stored = scratch->num_computed,
        .num_logits = scratch->num_scored, .first_block = scratch->first_block,
        .token_ids = scratch->token_ids, .blocks = scratch->blocks,
        .state_slot = scratch->state_slot, .num_folded = scratch->num_folded, .num_certain = scratch->num_certain,
    };
    Taps taps = { .states = scratch->tapped };
    if (is_head(drafter)) {
        taps.num_taps = drafter->fusion->num_taps;
        taps.layers = drafter->taps;
    }
    if (!decode(target, &new, is_head(drafter) ? &taps : NULL, scratch->logits)) return 0;
    for (int64_t i = 0; i < rounds->num_rows; i++)
        rounds->rows[i]->num_folded = num_folded_after(scratch->num_folded[i], scratch->num_certain[i]);
    return 1;
}

/* Speculative sampling (Leviathan et al. 2211.17192, algorithm 1), as verify_rejection: whether a draft is
 * accepted. Sets the token emitted at its position; draft is -1 behind the last one. */
static int accept_or_recover(const Rounds *rounds, const Scratch *scratch, int64_t row, int64_t position,
                             int64_t draft, const float *probs, int64_t *emitted) {
    const Row *sequence = rounds->rows[row];
    const int64_t vocab = scratch->vocab, place = sequence->num_tokens + position;
    float *draft_probs = NULL;
    double number;
    if (draft >= 0 && !sequence->draft_ids)
        draft_probs = scratch->draft_probs + (row * rounds->max_drafts + position) * vocab;
    int64_t seed;
    round_seed(&seed, sequence->seed, sequence->num_tokens);
    uniform(&number, &seed, &place, ACCEPT_STREAM, 1);
    *emitted = draft;
    /* A draft from outside is deterministic: its distribution is one-hot. */
    if (draft >= 0 && number * (draft_probs ? draft_probs[draft] : 1.0f) < probs[draft]) return 1;
    if (draft >= 0 && !draft_probs) {
        draft_probs = scratch->one_hot + this_thread() * vocab;
        memset(draft_probs, 0, vocab * sizeof(float));
        draft_probs[draft] = 1.0f;
    }
    uniform(&number, &sequence->seed, &place, RECOVER_STREAM, 1);
    *emitted = sample_residual(probs, draft_probs, 1.0, number, vocab);
    return 0;
}

/* Whether a row's draft is accepted by the target's logits, adjusted and a distribution; as above. */
static int accept(const Rounds *rounds, const Scratch *scratch, int64_t row, int64_t position, int64_t draft,
                  const float *logits, int64_t *emitted) {
    const Row *sequence = rounds->rows[row];
    const int64_t vocab = scratch->vocab, place = sequence->num_tokens + position;
    if (sequence->rule == GREEDY) {
        *emitted = argmax(logits, vocab);
        return *emitted == draft;
    }
    float *probs = scratch->probs + this_thread() * vocab;
    process_adjusted(sequence, scratch, probs, logits);
    if (sequence->rule == COUPLED) {
        gumbel_argmax(emitted, probs, &sequence->seed, &place, 0, 1, 1, vocab);
        return *emitted == draft;
    }
    return accept_or_recover(rounds, scratch, row, position, draft, probs, emitted);
}

/* How many of a row's drafts are accepted; next_id follows them. Ends at logits that are no distribution. */
static int64_t verify(const Rounds *rounds, Scratch *scratch, int64_t row, int64_t round) {
    Row *sequence = rounds->rows[row];
    const int64_t vocab = scratch->vocab, *drafts = scratch->draft_ids + row * rounds->max_drafts;
    int64_t position = 0;
    for (;; position++) {
        float *logits = scratch->logits + (scratch->first_scored[row] + position) * vocab;
        if (sequence->logits) {
            float *copy = sequence->logits + (round * (rounds->max_drafts + 1) + position) * vocab;
            memcpy(copy, logits, vocab * sizeof(float));
        }
        adjust_logits(sequence, position, logits, vocab);
        scratch->is_broken[row] = !is_distribution(logits, vocab);
        if (scratch->is_broken[row]) break;
        const int64_t draft = position < scratch->num_drafted[row] ? drafts[position] : -1;
        if (!accept(rounds, scratch, row, position, draft, logits, &scratch->next_id[row])) break;
        count_token(sequence, draft);
    }
    for (int64_t i = position - 1; i >= 0; i--) uncount_token(sequence, drafts[i]);
    return position;
}

typedef struct {
    const Rounds *rounds;
    Scratch *scratch;
    int64_t *num_accepted;        /* [num_rows] */
    int64_t round;
} Verdicts;

static void verify_task(const void *arguments, int64_t row) {
    const Verdicts *task = arguments;
    task->num_accepted[row] = verify(task->rounds, task->scratch, row, task->round);
}

/* Appends what a row emits; whether it may go on. */
static int append(const Rounds *rounds, const Scratch *scratch, int64_t i, int64_t num_accepted) {
    Row *row = rounds->rows[i];
    int64_t *emitted = row->token_ids + row->num_tokens;
    copy_ids(emitted, scratch->draft_ids + i * rounds->max_drafts, num_accepted);
    emitted[num_accepted] = scratch->next_id[i];
    if (row->draft_ids) row->num_draft_tokens = 0;
    row->num_tokens += num_accepted + 1;
    row->num_computed = row->num_tokens - 1;
    for (int64_t j = 0; j <= num_accepted; j++) count_token(row, emitted[j]);
    for (int64_t j = 0; j <= num_accepted; j++)
        for (int64_t stop = 0; stop < row->num_stops; stop++)
            if (emitted[j] == row->stop_ids[stop]) return 0;
    return row->num_tokens < row->max_num_tokens;
}

/* Runs rounds and returns how many are complete. It ends when a row has ended, when time is up, and before a
 * round that cannot be verified here: logits that are no distribution, no memory. drafter is NULL if no row
 * needs it, and none is followed by a head. */
int64_t run_rounds(const Decoder *target, const Drafter *drafter, const Rounds *rounds) {
    const int64_t num_rows = rounds->num_rows, vocab = target->head->out_features;
    const double began = now();
    double round_began = began, longest = 0.0;
    Scratch scratch;
    if (!make_scratch(&scratch, drafter, rounds, vocab)) return 0;
    prepare_rows(rounds, &scratch);
    int64_t round = 0, num_ended = 0;
    for (; round < rounds->num_rounds && !num_ended; round++) {
        if (round_began - began + longest > rounds->seconds) break;
        int64_t *num_accepted = rounds->num_accepted + round * num_rows, num_broken = 0;
        if (round > 0 && !constrain_rows(rounds)) break;
        scratch.confidences = round == 0 ? rounds->confidences : NULL;
        if (!draft_round(drafter, rounds, &scratch)) break;
        const double drafted = now();
        if (!score(target, drafter, rounds, &scratch)) break;
        const double scored = now();
        run_task(verify_task, &(Verdicts){ rounds, &scratch, num_accepted, round }, num_rows,
                 scratch.samples ? num_rows * vocab * WORK_OF_A_DRAW : 0);
        for (int64_t row = 0; row < num_rows; row++) num_broken += scratch.is_broken[row];
        if (num_broken) break;
        const double judged = now();
        if (!follow_rows(drafter, rounds, &scratch, num_accepted)) break;
        const double followed = now();
        for (int64_t row = 0; row < num_rows; row++)
            num_ended += !append(rounds, &scratch, row, num_accepted[row]);
        memcpy(rounds->num_drafted + round * num_rows, scratch.num_drafted, num_rows * sizeof(int64_t));
        const double verified = now();
        double *seconds = rounds->phase_seconds + 3 * round;
        seconds[0] = drafted - round_began + followed - judged;
        seconds[1] = scored - drafted;
        seconds[2] = verified - followed + judged - scored;
        if (verified - round_began > longest) longest = verified - round_began;
        round_began = verified;
    }
    return round;
}
