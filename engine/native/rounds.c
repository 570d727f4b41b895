/* A loop over the operations of a round (ops.c) and passes of two decoders: drafts, scores, verdicts.
 *
 * The same as rounds of "engine/rounds/round.py", one after the other, for rows that draft with a draft model, from what
 * is known, or not at all. All arrays are row-major.
 */

#include <math.h>
#include <string.h>
#include <time.h>

#include "ops.h"
#include "rounds.h"

/* Working memory of a call: [num_rows] unless another shape is given. */
typedef struct {
    int64_t *limit;               /* tokens to draft in this round */
    int64_t *first_block, *first_draft_block; /* into blocks */
    int64_t *blocks;              /* block tables of all rows, as in Spans */
    int64_t *first_scored;        /* of a row's logits */
    /* Spans of a pass. */
    int64_t *query_lens, *num_logits, *num_stored, *span_first_block, *state_slot, *num_folded, *num_certain;
    int64_t *adapter, *shift;     /* of the target's passes */
    int64_t *token_ids;           /* [tokens of a pass] */
    int64_t *active;              /* rows that draft on */
    float *logits;                /* [tokens scored, vocab] */
    float *draft_logits;          /* [num_rows, vocab of the draft model] */
    float *draft_probs;           /* [num_rows, max_drafts, vocab], if a rule asks for them */
    float *padded;                /* [threads, vocab], if the draft model knows fewer tokens */
    float *work;                  /* of each thread */
    Verdict *verdicts;
    int64_t vocab, work_drafts;
} Scratch;

typedef struct {
    void **pointer;
    int64_t length;
    size_t size;
} Piece;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static inline Row *row_at(const Rounds *rounds, int64_t i) { return rounds->table + rounds->index[i]; }

/* memcpy, but either array may be NULL where there is nothing to copy. */
static inline void copy_ids(int64_t *to, const int64_t *from, int64_t count) {
    if (count) memcpy(to, from, count * sizeof(int64_t));
}

/* 0 if there is no memory. */
static int make_scratch(Scratch *scratch, const Decoder *target, const Decoder *draft, const Rounds *rounds,
                        int64_t vocab) {
    static _Thread_local Arena arena;
    const int64_t rows = rounds->num_rows, drafts = rows * rounds->max_drafts, threads = get_num_threads();
    const int64_t draft_vocab = draft ? draft->head->out_features : 0;
    const int64_t kinds = target->num_window_blocks ? 2 : 1, draft_kinds = draft && draft->num_window_blocks ? 2 : 1;
    int64_t num_blocks = 0, num_new = 0, uses_probs = 0, has_block = 0;
    for (int64_t i = 0; i < rows; i++) {
        const Row *row = row_at(rounds, i);
        num_blocks += kinds * row->num_blocks + draft_kinds * row->num_draft_blocks;
        num_new += row->num_stored + 1 - row->num_computed;
        uses_probs |= RULES_BY_PROBS >> row->rule & 1;
        has_block |= row->rule == BLOCK_RULE;
    }
    const int64_t drafting = draft ? rows * rounds->max_missed : 0;
    scratch->vocab = vocab;
    scratch->work_drafts = has_block ? rounds->max_drafts : -1;
    const size_t integer = sizeof(int64_t), number = sizeof(float);
    const Piece pieces[] = {
        { (void **)&scratch->limit, rows, integer },
        { (void **)&scratch->first_block, rows, integer },
        { (void **)&scratch->first_draft_block, rows, integer },
        { (void **)&scratch->first_scored, rows, integer },
        { (void **)&scratch->query_lens, rows, integer },
        { (void **)&scratch->num_logits, rows, integer },
        { (void **)&scratch->num_stored, rows, integer },
        { (void **)&scratch->span_first_block, rows, integer },
        { (void **)&scratch->state_slot, rows, integer },
        { (void **)&scratch->num_folded, rows, integer },
        { (void **)&scratch->num_certain, rows, integer },
        { (void **)&scratch->adapter, rows, integer },
        { (void **)&scratch->shift, rows, integer },
        { (void **)&scratch->active, rows, integer },
        { (void **)&scratch->verdicts, rows, sizeof(Verdict) },
        { (void **)&scratch->blocks, num_blocks, integer },
        { (void **)&scratch->token_ids, drafting > num_new + drafts ? drafting : num_new + drafts, integer },
        { (void **)&scratch->logits, (rows + drafts) * vocab, number },
        { (void **)&scratch->draft_logits, rows * draft_vocab, number },
        { (void **)&scratch->draft_probs, draft && uses_probs ? drafts * vocab : 0, number },
        { (void **)&scratch->padded, draft_vocab < vocab ? threads * vocab : 0, number },
        { (void **)&scratch->work, threads * work_size(vocab, scratch->work_drafts), number },
    };
    const int num_pieces = sizeof pieces / sizeof *pieces;
    size_t bytes = 0;
    for (int i = 0; i < num_pieces; i++) bytes += arena_size(pieces[i].length, pieces[i].size);
    if (!arena_reserve(&arena, bytes)) return 0;
    for (int i = 0; i < num_pieces; i++)
        *pieces[i].pointer = pieces[i].length ? arena_alloc(&arena, pieces[i].length, pieces[i].size) : NULL;
    int64_t size = 0;
    for (int64_t i = 0; i < rows; i++) {
        const Row *row = row_at(rounds, i);
        scratch->first_block[i] = size;
        copy_ids(scratch->blocks + size, row->blocks, kinds * row->num_blocks);
        size += kinds * row->num_blocks;
        scratch->first_draft_block[i] = size;
        copy_ids(scratch->blocks + size, row->draft_blocks, draft_kinds * row->num_draft_blocks);
        size += draft_kinds * row->num_draft_blocks;
    }
    return 1;
}

/* How much a row drafts in a round: it emits one token more, and the text must hold it. */
static int64_t limit_of(const Decoder *draft, const Rounds *rounds, const Row *row) {
    const int64_t length = row->num_stored + 1, room = row->max_num_tokens - length - 1;
    int64_t limit = row->num_known ? row->num_known : row->num_wanted;
    if (room < limit) limit = room;
    if (rounds->max_drafts < limit) limit = rounds->max_drafts;
    if (row->num_known) return limit > 0 ? limit : 0;
    if (rounds->max_draft_len - length < limit) limit = rounds->max_draft_len - length;
    if (!draft || length - row->num_draft_stored > rounds->max_missed) return 0;
    return limit > 0 ? limit : 0;
}

/* What a pass of the draft model computes of its active rows: what its cache misses, or the last draft. */
static void plan_pass(const Decoder *draft, const Rounds *rounds, Scratch *scratch, int64_t num_active, int64_t offset) {
    /* Any token stands in for those that only the target has. */
    const int64_t known = draft->head->out_features;
    int64_t size = 0;
    for (int64_t i = 0; i < num_active; i++) {
        const int64_t place = scratch->active[i], begin = size;
        const Row *row = row_at(rounds, place);
        const int64_t length = row->num_stored + 1;
        if (offset) scratch->token_ids[size++] = rounds->draft_ids[place * rounds->max_drafts + offset - 1];
        else for (int64_t j = row->num_draft_stored; j < length; j++) scratch->token_ids[size++] = row->token_ids[j];
        for (int64_t j = begin; j < size; j++)
            if (scratch->token_ids[j] >= known) scratch->token_ids[j] = known - 1;
        scratch->query_lens[i] = size - begin;
        scratch->num_stored[i] = offset ? length + offset - 1 : row->num_draft_stored;
        scratch->num_logits[i] = 1;
        scratch->span_first_block[i] = scratch->first_draft_block[place];
        scratch->state_slot[i] = row->draft_state_slot;
        scratch->num_folded[i] = row->draft_num_folded;
        scratch->num_certain[i] = row->num_draft_stored + 1;
    }
}

/* Runs the pass that is planned. What a round stores is not certain before it is complete. Drafts have no adapters and
 * see no pictures: ``adapter`` and ``shift`` are NULL. */
static int run_pass(const Decoder *decoder, const Scratch *scratch, const int64_t *adapter, const int64_t *shift,
                    int64_t num_spans, float *logits) {
    const NewTokens new = {
        .num_spans = num_spans, .num_tokens = scratch->query_lens, .num_stored = scratch->num_stored,
        .num_logits = scratch->num_logits, .first_block = scratch->span_first_block,
        .token_ids = scratch->token_ids, .blocks = scratch->blocks,
        .state_slot = scratch->state_slot, .num_folded = scratch->num_folded, .num_certain = scratch->num_certain,
        .adapter = adapter, .shift = shift,
    };
    return decode(decoder, &new, NULL, logits) != 0;
}

typedef struct {
    const Decoder *draft;
    const Rounds *rounds;
    Scratch *scratch;
    int64_t offset;
} Draws;

static void draw_task(const void *arguments, int64_t i) {
    const Draws *task = arguments;
    const Rounds *rounds = task->rounds;
    const Scratch *scratch = task->scratch;
    const int64_t place = scratch->active[i], vocab = scratch->vocab, known = task->draft->head->out_features;
    Row *row = row_at(rounds, place);
    int64_t *drafts = rounds->draft_ids + place * rounds->max_drafts;
    float *logits = scratch->draft_logits + i * known;
    int64_t width = vocab;
    /* The most likely of the ids that the draft model knows is found without the others, which have probability 0. */
    if (known < vocab && row->drafts_greedily && !row->num_drawn) width = known;
    if (known < width) {
        float *padded = scratch->padded + this_thread() * vocab;
        memcpy(padded, logits, known * sizeof(float));
        for (int64_t id = known; id < vocab; id++) padded[id] = -INFINITY;
        logits = padded;
    }
    adjust_row(row, drafts, task->offset, logits, 1, width);
    const Work work = work_at(scratch->work, vocab, scratch->work_drafts);
    float *probs = NULL;
    if (row->num_drawn) probs = scratch->draft_probs + (place * rounds->max_drafts + task->offset) * vocab;
    drafts[task->offset] = draw_row(row, task->offset, logits, probs, &work, width);
    row->num_drafts = task->offset + 1;
}

/* Drafts of all rows: those that are known, and the draft model's, by a pass and a draw for each token. 0 if there is no
 * memory, or a row's table has no blocks for its drafts. */
static int draft_round(const Decoder *draft, const Rounds *rounds, Scratch *scratch, int64_t work_of_draws) {
    int64_t num_active = 0;
    for (int64_t i = 0; i < rounds->num_rows; i++) {
        Row *row = row_at(rounds, i);
        const int64_t limit = scratch->limit[i] = limit_of(draft, rounds, row);
        row->num_drafts = row->num_known ? limit : 0;
        /* A greedy draft is certain. */
        row->num_drawn = limit && !row->num_known && !row->drafts_greedily && RULES_BY_PROBS >> row->rule & 1;
        if (row->num_known || !limit) continue;
        if (row->num_stored + limit > row->num_draft_blocks * draft->block_size) return 0;
        scratch->active[num_active++] = i;
    }
    for (int64_t offset = 0; num_active; offset++) {
        plan_pass(draft, rounds, scratch, num_active, offset);
        if (!run_pass(draft, scratch, NULL, NULL, num_active, scratch->draft_logits)) return 0;
        for (int64_t i = 0; i < num_active; i++) {
            Row *row = row_at(rounds, scratch->active[i]);
            row->draft_num_folded = num_folded_after(scratch->num_folded[i], scratch->num_certain[i]);
        }
        run_task(draw_task, &(Draws){ draft, rounds, scratch, offset }, num_active, num_active * work_of_draws);
        int64_t num_left = 0;
        for (int64_t i = 0; i < num_active; i++)
            if (offset + 1 < scratch->limit[scratch->active[i]]) scratch->active[num_left++] = scratch->active[i];
        num_active = num_left;
    }
    return 1;
}

/* The target's logits of every row's pending token and its drafts, behind what its cache does not have yet of a prompt.
 * 0 as draft_round. */
static int score(const Decoder *target, const Rounds *rounds, Scratch *scratch) {
    int64_t size = 0, num_logits = 0;
    for (int64_t i = 0; i < rounds->num_rows; i++) {
        const Row *row = row_at(rounds, i);
        const int64_t count = 1 + row->num_drafts, num_new = row->num_stored + 1 - row->num_computed;
        if (row->num_stored + count > row->num_blocks * target->block_size) return 0;
        scratch->first_scored[i] = num_logits;
        scratch->num_logits[i] = count;
        scratch->query_lens[i] = num_new + row->num_drafts;
        scratch->num_stored[i] = row->num_computed;
        scratch->span_first_block[i] = scratch->first_block[i];
        scratch->state_slot[i] = row->state_slot;
        scratch->num_folded[i] = row->num_folded;
        scratch->num_certain[i] = row->num_computed + 1;
        scratch->adapter[i] = row->adapter;
        scratch->shift[i] = row->shift;
        copy_ids(scratch->token_ids + size, row->token_ids + row->num_computed, num_new);
        copy_ids(scratch->token_ids + size + num_new, rounds->draft_ids + i * rounds->max_drafts, row->num_drafts);
        size += num_new + row->num_drafts;
        num_logits += count;
    }
    if (!run_pass(target, scratch, scratch->adapter, scratch->shift, rounds->num_rows, scratch->logits)) return 0;
    for (int64_t i = 0; i < rounds->num_rows; i++)
        row_at(rounds, i)->num_folded = num_folded_after(scratch->num_folded[i], scratch->num_certain[i]);
    return 1;
}

static void verdict_task(const void *arguments, int64_t i) {
    const Draws *task = arguments;
    const Rounds *rounds = task->rounds;
    const Scratch *scratch = task->scratch;
    const int64_t vocab = scratch->vocab;
    Row *row = row_at(rounds, i);
    const Judged judged = {
        .drafts = rounds->draft_ids + i * rounds->max_drafts,
        .draft_probs = row->num_drawn ? scratch->draft_probs + i * rounds->max_drafts * vocab : NULL,
        .logits = scratch->logits + scratch->first_scored[i] * vocab,
        .vocab = vocab,
    };
    const Work work = work_at(scratch->work, vocab, scratch->work_drafts);
    adjust_row(row, judged.drafts, 0, judged.logits, 1 + row->num_drafts, vocab);
    scratch->verdicts[i] = judge_row(row, &judged, &work);
}

/* Appends what a row emits; whether it may go on. */
static int append(const Rounds *rounds, const Scratch *scratch, int64_t i) {
    Row *row = row_at(rounds, i);
    const int64_t num_accepted = scratch->verdicts[i].num_accepted, length = row->num_stored + 1;
    int64_t *emitted = row->token_ids + length;
    if (!row->num_known && row->num_drafts) {
        /* The last draft was not stored; what was stored of rejected ones is overwritten. */
        const int64_t stored = length + row->num_drafts - 1, valid = length + num_accepted;
        row->num_draft_stored = stored < valid ? stored : valid;
    }
    copy_ids(emitted, rounds->draft_ids + i * rounds->max_drafts, num_accepted);
    emitted[num_accepted] = scratch->verdicts[i].next_token;
    row->num_stored += num_accepted + 1;
    row->num_computed = row->num_stored;
    row->num_known = 0;
    for (int64_t j = 0; j <= num_accepted; j++)
        for (int64_t stop = 0; stop < row->num_stops; stop++)
            if (emitted[j] == row->stop_ids[stop]) return 0;
    return row->num_stored + 1 < row->max_num_tokens;
}

/* Runs rounds and returns how many are complete. It ends when a row has ended, when time is up, and before a round that
 * cannot be verified here: logits that are no distribution, no memory. draft is NULL if no row draws drafts. */
int64_t run_rounds(const Decoder *target, const Decoder *draft, const Rounds *rounds) {
    const int64_t num_rows = rounds->num_rows, vocab = target->head->out_features;
    const double began = now();
    double round_began = began, longest = 0.0;
    Scratch scratch;
    if (!make_scratch(&scratch, target, draft, rounds, vocab)) return 0;
    int64_t samples = 0, round = 0, num_ended = 0;
    for (int64_t i = 0; i < num_rows; i++) samples |= row_at(rounds, i)->rule != EXACT_MATCH_RULE;
    const int64_t work_of_draws = samples ? vocab * WORK_OF_A_DRAW : 0;
    for (; round < rounds->num_rounds && !num_ended; round++) {
        if (round_began - began + longest > rounds->seconds) break;
        if (!draft_round(draft, rounds, &scratch, work_of_draws)) break;
        const double drafted = now();
        if (!score(target, rounds, &scratch)) break;
        const double scored = now();
        run_task(verdict_task, &(Draws){ draft, rounds, &scratch, 0 }, num_rows, num_rows * work_of_draws);
        int64_t num_failed = 0;
        for (int64_t i = 0; i < num_rows; i++) num_failed += scratch.verdicts[i].failed;
        if (num_failed) break;
        for (int64_t i = 0; i < num_rows; i++) {
            rounds->num_drafted[round * num_rows + i] = row_at(rounds, i)->num_drafts;
            rounds->num_accepted[round * num_rows + i] = scratch.verdicts[i].num_accepted;
            num_ended += !append(rounds, &scratch, i);
        }
        const double verified = now();
        double *seconds = rounds->phase_seconds + 3 * round;
        seconds[0] = drafted - round_began;
        seconds[1] = scored - drafted;
        seconds[2] = verified - scored;
        if (verified - round_began > longest) longest = verified - round_began;
        round_began = verified;
    }
    return round;
}
