/* What is added to or taken from raw logits before temperature: bias, penalties, the minimum length, a mask.
 *
 * The same arithmetic as in "engine/sampling/adjust.py", the reference: float32, each operation rounded. Only
 * the tokens that a row names or has seen are touched. Tokens of the prompt are seen but not counted: only the
 * repetition penalty asks for them.
 */

#include <math.h>

#include "rounds.h"

/* The compiler can neither fuse what goes in with what follows, nor reorder it, nor take it for invariant. */
static inline float rounded(float x) {
    volatile float stored = x;
    return stored;
}

static void penalize(const Row *row, float *logits, int64_t vocab) {
    for (int64_t i = 0; i < row->num_distinct; i++) {
        const int64_t id = row->distinct_ids[i];
        if (!is_token(id, vocab)) continue;
        float logit = logits[id];
        logit = rounded(logit > 0.0f ? logit / rounded(row->repetition) : logit * row->repetition);
        logit = rounded(logit - rounded(row->frequency * (float)row->counts[i]));
        logits[id] = row->counts[i] ? logit - row->presence : logit;
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

/* Logits [vocab] at a position of a round; counts are those of the output up to there. */
void adjust_logits(const Row *row, int64_t position, float *logits, int64_t vocab) {
    for (int64_t i = 0; i < row->num_biases; i++)
        if (is_token(row->bias_ids[i], vocab)) logits[row->bias_ids[i]] += row->biases[i];
    if (row->counts) penalize(row, logits, vocab);
    if (row->num_tokens + position < row->min_num_tokens)
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
void count_token(Row *row, int64_t id) {
    if (!row->counts) return;
    const int64_t i = find_token(row, id);
    if (i == row->num_distinct) {
        row->distinct_ids[row->num_distinct++] = id;
        row->counts[i] = 0;
    }
    row->counts[i]++;
    row->num_counted++;
}

/* Takes back the last token counted. */
void uncount_token(Row *row, int64_t id) {
    if (!row->counts) return;
    const int64_t i = find_token(row, id);
    row->counts[i]--;
    if (i >= row->num_distinct_in_prompt && !row->counts[i]) row->num_distinct--;
    row->num_counted--;
}

/* probs [vocab] of adjusted logits, by the row's temperature, top-k, top-p and min-p. */
void process_adjusted(const Row *row, const Scratch *scratch, float *probs, const float *logits) {
    const Processors own = { &row->temperature, &row->top_k, &row->top_p, &row->min_p };
    float *cut = scratch->cut ? scratch->cut + this_thread() * scratch->vocab : NULL;
    process_row(probs, logits, &own, 0, cut, scratch->vocab);
}
