/* The three operations of a round: adjust, draw and judge, as "engine/sampling/torch_ops.py" defines them.
 *
 * A row is a line of the table (rows.h). Adjustments are the arithmetic of sampling/adjust.py: float32, each operation
 * rounded, and only tokens that a row names or has seen are touched; those of the prompt are seen, but not counted. Draws are those of sampling.c. Rows are independent:
 * what becomes of one depends neither on the others nor on their number. All arrays are row-major.
 */

#include <math.h>
#include <string.h>

#include "ops.h"

static inline int is_token(int64_t id, int64_t vocab) { return id >= 0 && id < vocab; }

/* The compiler can neither fuse what goes in with what follows, nor reorder it, nor take it for invariant. */
static inline float rounded(float x) {
    volatile float stored = x;
    return stored;
}

static void penalise(const Row *row, float *logits, int64_t vocab) {
    const float repetition = row->repetition, frequency = row->frequency, presence = row->presence;
    for (int64_t i = 0; i < row->num_distinct; i++) {
        const int64_t id = row->distinct_ids[i];
        if (!is_token(id, vocab)) continue;
        float logit = logits[id];
        logit = rounded(logit > 0.0f ? logit / rounded(repetition) : logit * repetition);
        logit = rounded(logit - rounded(frequency * (float)row->counts[i]));
        logits[id] = row->counts[i] ? logit - presence : logit;
    }
}

static void forbid_masked(const Row *row, int64_t position, float *logits, int64_t vocab) {
    const uint32_t *mask = row->mask + position * row->mask_words;
    const int64_t num_known = vocab < 32 * row->mask_words ? vocab : 32 * row->mask_words;
    for (int64_t first = 0; first < num_known; first += 32) {
        const uint32_t bits = mask[first / 32];
        const int64_t end = first + 32 < num_known ? first + 32 : num_known;
        if (bits == UINT32_MAX) continue;
        for (int64_t id = first; id < end; id++)
            if (!(bits >> (id - first) & 1)) logits[id] = -INFINITY;
    }
    for (int64_t id = num_known; id < vocab; id++) logits[id] = -INFINITY;
}

/* Logits [vocab] behind ``num_drafts`` drafts, which are counted already; the mask is that of ``position``. */
static void adjust_position(const Row *row, int64_t num_drafts, int64_t position, float *logits, int64_t vocab) {
    for (int64_t i = 0; i < row->num_biases; i++)
        if (is_token(row->bias_ids[i], vocab)) logits[row->bias_ids[i]] += row->biases[i];
    if (row->counts) penalise(row, logits, vocab);
    if (row->num_stored + 1 + num_drafts < row->min_num_tokens)
        for (int64_t i = 0; i < row->num_stops; i++)
            if (is_token(row->stop_ids[i], vocab)) logits[row->stop_ids[i]] = -INFINITY;
    if (row->mask && position < row->num_masked) forbid_masked(row, position, logits, vocab);
}

static int64_t find_token(const Row *row, int64_t id) {
    int64_t i = 0;
    while (i < row->num_distinct && row->distinct_ids[i] != id) i++;
    return i;
}

/* One more of a token in the output; nothing without penalties. */
static void count_token(Row *row, int64_t id) {
    if (!row->counts) return;
    const int64_t i = find_token(row, id);
    if (i == row->num_distinct) {
        row->distinct_ids[row->num_distinct++] = id;
        row->counts[i] = 0;
    }
    row->counts[i]++;
}

/* Takes back the last token of the output that was counted. */
static void uncount_token(Row *row, int64_t id) {
    if (!row->counts) return;
    const int64_t i = find_token(row, id);
    row->counts[i]--;
    if (i >= row->num_distinct_in_prompt && !row->counts[i]) row->num_distinct--;
}

/* Adjusts logits [positions, vocab] of a row, of which the first one predicts what follows ``offset`` drafts. */
void adjust_row(Row *row, const int64_t *drafts, int64_t offset, float *logits, int64_t positions, int64_t vocab) {
    while (row->counts && row->num_counted <= row->num_stored) count_token(row, row->token_ids[row->num_counted++]);
    for (int64_t i = 0; i < offset; i++) count_token(row, drafts[i]);
    for (int64_t i = 0; i < positions; i++) {
        if (i) count_token(row, drafts[offset + i - 1]);
        adjust_position(row, offset + i, i, logits + i * vocab, vocab);
    }
    for (int64_t i = offset + positions - 2; i >= 0; i--) uncount_token(row, drafts[i]);
}

static double number_of(const Row *row, int64_t position, int64_t stream) {
    const int64_t first = row->num_stored + 1, place = first + position;
    int64_t seed = row->seed;
    double number;
    /* A round spends its numbers for drafting and accepting: round_seeds says why. */
    if (stream != RECOVER_STREAM) round_seed(&seed, row->seed, first);
    uniform(&number, &seed, &place, stream, 1);
    return number;
}

static int64_t draw_coupled(const Row *row, int64_t position, const float *probs, int64_t vocab) {
    const int64_t place = row->num_stored + 1 + position;
    int64_t id;
    gumbel_argmax(&id, probs, &row->seed, &place, 0, 1, 1, vocab);
    return id;
}

/* A row's draft behind ``offset`` others, from adjusted logits [vocab], which may be changed. Writes what it was drawn from
 * to probs [vocab], unless that is NULL. */
int64_t draw_row(const Row *row, int64_t offset, float *logits, float *probs, const Work *work, int64_t vocab) {
    int64_t id;
    if (row->drafts_greedily) {
        id = argmax(logits, vocab);
        if (probs) memset(probs, 0, vocab * sizeof(float));
        if (probs) probs[id] = 1.0f;
        return id;
    }
    if (!probs) probs = work->probs;
    /* Drafts are guesses: a draft model without a distribution has a flat one. */
    if (!is_distribution(logits, vocab)) memset(logits, 0, vocab * sizeof(float));
    process_row(probs, logits, row, work->cut, vocab);
    if (row->rule == COUPLED_RULE) return draw_coupled(row, offset, probs, vocab);
    const double number = number_of(row, offset, DRAFT_STREAM);
    inverse_cdf(&id, probs, &number, 1, vocab);
    return id;
}

/* The distribution [vocab] that a draft was drawn from; a certain one's has a 1. */
static const float *draft_row(const Judged *judged, int64_t position, const Work *work) {
    if (judged->draft_probs) return judged->draft_probs + position * judged->vocab;
    memset(work->certain, 0, judged->vocab * sizeof(float));
    work->certain[judged->drafts[position]] = 1.0f;
    return work->certain;
}

/* The token that follows accepted drafts: what the rejected one leaves of the target, or the target's own. */
static int64_t draw_following(const Row *row, const Judged *judged, int64_t num_accepted, const float *target, double weight,
                              const Work *work) {
    const float *draft = num_accepted < row->num_drafts ? draft_row(judged, num_accepted, work) : NULL;
    return sample_residual(target, draft, weight, number_of(row, num_accepted, RECOVER_STREAM), judged->vocab);
}

/* Speculative sampling (Leviathan et al. 2211.17192, algorithm 1) and the rules by equality: position by position, up to
 * the first draft that is rejected. */
static Verdict judge_in_order(const Row *row, const Judged *judged, const Work *work) {
    const int64_t vocab = judged->vocab;
    Verdict verdict = { 0, 0, 0 };
    for (int64_t i = 0;; i++) {
        const float *logits = judged->logits + i * vocab;
        const int64_t draft = i < row->num_drafts ? judged->drafts[i] : -1;
        verdict.num_accepted = i;
        verdict.failed = !is_distribution(logits, vocab);
        if (verdict.failed) return verdict;
        if (row->rule != EXACT_MATCH_RULE) process_row(work->probs, logits, row, work->cut, vocab);
        if (row->rule == REJECTION_RULE) {
            const float of_draft = judged->draft_probs && draft >= 0 ? judged->draft_probs[i * vocab + draft] : 1.0f;
            if (draft >= 0 && number_of(row, i, ACCEPT_STREAM) * of_draft < work->probs[draft]) continue;
            verdict.next_token = draw_following(row, judged, i, work->probs, 1.0, work);
            return verdict;
        }
        verdict.next_token =
            row->rule == EXACT_MATCH_RULE ? argmax(logits, vocab) : draw_coupled(row, i, work->probs, vocab);
        if (verdict.next_token != draft) return verdict;
    }
}

/* The mass that a draft's distribution leaves of weight times the target's. */
static double mass_left(const float *target, const float *draft, double weight, int64_t vocab) {
    int64_t units = 0;
    for (int64_t id = 0; id < vocab; id++) {
        const double left = weight * target[id] - draft[id];
        units += left > 0.0 ? (int64_t)(left * (1 / PROB_UNIT)) : 0;
    }
    return units * PROB_UNIT;
}

/* Block verification (Sun et al. 2403.10444), as longest_block: all lengths are tried, and the longest one is kept. */
static Verdict judge_block(const Row *row, const Judged *judged, const Work *work) {
    const int64_t vocab = judged->vocab, num_drafts = row->num_drafts;
    int64_t first_broken = num_drafts + 1;
    for (int64_t i = num_drafts; i >= 0; i--) {
        float *logits = judged->logits + i * vocab;
        if (!is_distribution(logits, vocab)) {
            memset(logits, 0, vocab * sizeof(float));
            first_broken = i;
        }
        process_row(work->target_probs + i * vocab, logits, row, work->cut, vocab);
    }
    double weight = 1.0, weight_kept = 1.0;
    int64_t kept = 0;
    for (int64_t i = 0; i < num_drafts; i++) {
        const int64_t draft = judged->drafts[i], length = i + 1;
        const double of_draft = judged->draft_probs ? judged->draft_probs[i * vocab + draft] : 1.0;
        const double scaled = weight * work->target_probs[i * vocab + draft];
        weight = scaled >= of_draft ? 1.0 : scaled / of_draft;
        if (scaled == 0.0) weight = 0.0;
        double stands = weight;
        if (length < num_drafts) {
            const double mass =
                mass_left(work->target_probs + length * vocab, draft_row(judged, length, work), weight, vocab);
            const double slack = mass + 1 - weight;
            stands = slack > 0.0 ? mass / slack : 1.0;
        }
        if (number_of(row, i, ACCEPT_STREAM) < stands) {
            kept = length;
            weight_kept = weight;
        }
    }
    const int64_t next = draw_following(row, judged, kept, work->target_probs + kept * vocab, weight_kept, work);
    return (Verdict){ kept, next, first_broken <= kept };
}

Verdict judge_row(const Row *row, const Judged *judged, const Work *work) {
    return (row->rule == BLOCK_RULE ? judge_block : judge_in_order)(row, judged, work);
}

/* Numbers of a thread's working memory; no row follows the block rule if max_drafts is -1. */
int64_t work_size(int64_t vocab, int64_t max_drafts) { return (4 + max_drafts) * vocab; }

Work work_at(float *start, int64_t vocab, int64_t max_drafts) {
    start += this_thread() * work_size(vocab, max_drafts);
    return (Work){ start, start + vocab, start + 2 * vocab, start + 3 * vocab };
}

/* The same for a call; NULL if there is no memory. */
static float *work_for_call(const Row *table, const int64_t *index, int64_t num_rows, int64_t *max_drafts, int64_t vocab) {
    static _Thread_local Arena arena;
    int has_block = 0;
    for (int64_t i = 0; i < num_rows; i++) has_block |= table[index[i]].rule == BLOCK_RULE;
    if (!has_block) *max_drafts = -1;
    const int64_t size = get_num_threads() * work_size(vocab, *max_drafts);
    return arena_reserve(&arena, arena_size(size, sizeof(float))) ? arena_alloc(&arena, size, sizeof(float)) : NULL;
}

static int64_t work_of_draws(const Row *table, const int64_t *index, int64_t num_rows, int64_t rows_of_logits, int64_t vocab) {
    int samples = 0;
    for (int64_t i = 0; i < num_rows; i++)
        samples |= table[index[i]].rule != EXACT_MATCH_RULE || !table[index[i]].drafts_greedily;
    return samples ? rows_of_logits * vocab * WORK_OF_A_DRAW : 0;
}

/* Adjusts packed logits, of which counts [num_rows] are each row's, behind ``offset`` of its drafts [max_drafts]. */
void adjust(Row *table, const int64_t *index, int64_t num_rows, const int64_t *drafts, int64_t max_drafts, int64_t offset,
            const int64_t *counts, float *logits, int64_t vocab) {
    for (int64_t i = 0; i < num_rows; i++) {
        adjust_row(table + index[i], drafts + i * max_drafts, offset, logits, counts[i], vocab);
        logits += counts[i] * vocab;
    }
}

typedef struct {
    Row *table;
    const int64_t *index, *drafts;
    float *logits, *probs, *work;
    const float *draft_probs;
    int64_t offset, vocab, max_drafts, work_drafts;
    int64_t *ids, *verdicts;
    const int64_t *first;
} Call;

static void draw_task(const void *arguments, int64_t i) {
    const Call *call = arguments;
    const Work work = work_at(call->work, call->vocab, call->work_drafts);
    float *probs = call->probs ? call->probs + i * call->vocab : NULL;
    const Row *row = call->table + call->index[i];
    call->ids[i] = draw_row(row, call->offset, call->logits + i * call->vocab, probs, &work, call->vocab);
}

/* ids [num_rows] drawn from adjusted logits [num_rows, vocab], and probs of the same shape or NULL. 0 if there is no
 * memory. */
int64_t draw(Row *table, const int64_t *index, int64_t num_rows, int64_t offset, float *logits, int64_t vocab,
             int64_t *ids, float *probs) {
    int64_t work_drafts = -1;
    float *work = work_for_call(table, index, 0, &work_drafts, vocab);
    if (!work) return 0;
    const Call call = { .table = table, .index = index, .logits = logits, .probs = probs, .work = work, .offset = offset,
                        .vocab = vocab, .work_drafts = work_drafts, .ids = ids };
    run_task(draw_task, &call, num_rows, work_of_draws(table, index, num_rows, num_rows, vocab));
    return 1;
}

static void judge_task(const void *arguments, int64_t i) {
    const Call *call = arguments;
    const Work work = work_at(call->work, call->vocab, call->work_drafts);
    const Row *row = call->table + call->index[i];
    const int64_t vocab = call->vocab;
    const Judged judged = {
        .drafts = call->drafts + i * call->max_drafts,
        .draft_probs = row->num_drawn ? call->draft_probs + i * call->max_drafts * vocab : NULL,
        .logits = call->logits + call->first[i] * vocab,
        .vocab = vocab,
    };
    const Verdict verdict = judge_row(row, &judged, &work);
    call->verdicts[3 * i] = verdict.num_accepted;
    call->verdicts[3 * i + 1] = verdict.next_token;
    call->verdicts[3 * i + 2] = verdict.failed;
}

/* verdicts [num_rows, 3] of drafts [num_rows, max_drafts] by adjusted logits [sum of (num_drafts + 1), vocab]; draft_probs
 * [num_rows, max_drafts, vocab] are those of rows with num_drawn. 0 if there is no memory. */
int64_t judge(Row *table, const int64_t *index, int64_t num_rows, const int64_t *drafts, const float *draft_probs,
              int64_t max_drafts, float *logits, int64_t vocab, int64_t *verdicts) {
    int64_t work_drafts = max_drafts, num_scored = 0;
    float *work = work_for_call(table, index, num_rows, &work_drafts, vocab);
    int64_t *first = malloc((num_rows + 1) * sizeof(int64_t));
    if (!work || !first) {
        free(first);
        return 0;
    }
    for (int64_t i = 0; i < num_rows; i++) {
        first[i] = num_scored;
        num_scored += 1 + table[index[i]].num_drafts;
    }
    const Call call = { .table = table, .index = index, .drafts = drafts, .logits = logits, .work = work,
                        .draft_probs = draft_probs, .vocab = vocab, .max_drafts = max_drafts, .work_drafts = work_drafts,
                        .verdicts = verdicts, .first = first };
    run_task(judge_task, &call, num_rows, work_of_draws(table, index, num_rows, num_scored, vocab));
    free(first);
    return 1;
}
