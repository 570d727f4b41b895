/* A round of drafts in one call: passes of the draft model, a draw after each, an early end where it is unsure.
 *
 * Draws are those of sampling.c, with the same random numbers as anywhere else. "draft.py" calls this; all
 * arrays are row-major.
 */

#include <omp.h>
#include <string.h>

#include "kernels.h"
#include "room.h"

/* What a row's next pass reads. */
typedef struct {
    int64_t row;
    double survival;
} Active;

static int64_t draw(const DraftRows *rows, int64_t row, int64_t position, float *logits, float *probs) {
    const int64_t vocab = rows->vocab, at = row * rows->longest + position;
    const int64_t way = rows->way ? rows->way[row] : GREEDY;
    float unused, *confidence = rows->confidence ? &rows->confidence[at] : &unused;
    int64_t id;
    if (rows->probs) probs = rows->probs + at * vocab;
    if (way == GREEDY) {
        likeliest(&id, confidence, logits, 1, vocab);
        if (rows->probs) {
            memset(probs, 0, vocab * sizeof(float));
            probs[id] = 1.0f;
        }
        return id;
    }
    /* Any guess is a guess. */
    if (!is_distribution(logits, vocab)) memset(logits, 0, vocab * sizeof(float));
    const Processors *all = rows->processors;
    const Processors own = { all->temperature + row, all->top_k + row, all->top_p + row, all->min_p + row };
    float *few = rows->few ? rows->few + omp_get_thread_num() * vocab : NULL;
    process(probs, logits, &own, few, 1, 1, vocab, 1);
    if (way == RACE) {
        race(&id, probs, rows->seeds + row, rows->positions + row, position, 1, 1, vocab, 1);
    } else {
        const int64_t place = rows->positions[row] + position;
        double number;
        uniform(&number, rows->seeds + row, &place, DRAFT_STREAM, 1);
        inverse_cdf(&id, probs, &number, 1, vocab, 1);
    }
    if (rows->confidence) {
        *confidence = 0.0f;
        for (int64_t i = 0; i < vocab; i++) *confidence = probs[i] > *confidence ? probs[i] : *confidence;
    }
    return id;
}

/* Whether a row that has just drawn from a distribution of this confidence drafts another token. Counts the
 * token, unless the row ends before it. */
static int goes_on(const DraftRows *rows, Active *active, float confidence, int64_t position) {
    const int64_t row = active->row, is_last = position + 1 >= rows->limit[row];
    rows->num_drawn[row] = position + 1;
    rows->num_kept[row] = position + 1;
    if (!rows->bins) return !is_last;
    int64_t bin = 0;
    while (bin + 1 < rows->num_bins && !((double)confidence < rows->bins[bin + 1])) bin++;
    const double survival = active->survival * rows->rates[row * rows->num_bins + bin];
    if (survival < rows->least_to_score[row]) {
        rows->num_kept[row] = position;
        return 0;
    }
    active->survival = survival;
    return !is_last && !(survival < rows->least_to_draft[row]);
}

/* What rows would have drafted in place of their last tokens, where there are logits of that; the others move up. */
static void look_back(const DraftRows *rows, const NewTokens *new, float *logits) {
    const int64_t vocab = rows->vocab;
    const float *next = logits;
    float unused;
    for (int64_t row = 0; row < rows->num_rows; row++) {
        rows->hindsight[row] = -1;
        if (rows->limit[row] == 0) continue;
        if (new->num_logits[rows->span[row]] == 2) {
            likeliest(&rows->hindsight[row], &unused, next, 1, vocab);
            next += vocab;
        }
        if (next != logits) memmove(logits, next, vocab * sizeof(float));
        logits += vocab;
        next += vocab;
    }
}

/* Stores new, whose drafting rows' spans want one logit each, or two where somebody looks back, and others none;
 * then drafts. Rows of limit 0 have no part in it. 0 if there is no memory. */
int64_t draft(const Decoder *decoder, const NewTokens *new, const DraftRows *rows) {
    static _Thread_local Room room;
    const int64_t num_rows = rows->num_rows, vocab = decoder->head->out_features;
    const size_t numbers = 5 * piece(num_rows, sizeof(int64_t)) + piece(num_rows, sizeof(Active));
    if (!make_room(&room, numbers + 3 * piece(num_rows * vocab, sizeof(float)))) return 0;
    int64_t *token_ids = take(&room, num_rows, sizeof(int64_t)), *ones = take(&room, num_rows, sizeof(int64_t));
    int64_t *num_stored = take(&room, num_rows, sizeof(int64_t));
    int64_t *first_block = take(&room, num_rows, sizeof(int64_t));
    int64_t *going_on = take(&room, num_rows, sizeof(int64_t));
    Active *active = take(&room, num_rows, sizeof(Active));
    float *logits = take(&room, 2 * num_rows * vocab, sizeof(float));
    float *probs = take(&room, num_rows * vocab, sizeof(float));
    int64_t num_active = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        ones[row] = 1;
        rows->num_drawn[row] = rows->num_kept[row] = 0;
        if (rows->limit[row] > 0) active[num_active++] = (Active){ row, 1.0 };
    }
    if (!decode(decoder, new, logits)) return 0;
    if (rows->hindsight) look_back(rows, new, logits);
    for (int64_t position = 0;; position++) {
        #pragma omp parallel for num_threads(rows->num_threads) if (rows->way && num_active * vocab > MIN_PARALLEL_DRAWS)
        for (int64_t i = 0; i < num_active; i++) {
            const int64_t row = active[i].row, at = row * rows->longest + position;
            rows->ids[at] = draw(rows, row, position, logits + i * vocab, probs + i * vocab);
            going_on[i] = goes_on(rows, &active[i], rows->confidence ? rows->confidence[at] : 1.0f, position);
        }
        int64_t num_left = 0;
        for (int64_t i = 0; i < num_active; i++)
            if (going_on[i]) active[num_left++] = active[i];
        num_active = num_left;
        if (!num_active) return 1;
        for (int64_t i = 0; i < num_active; i++) {
            const int64_t row = active[i].row, span = rows->span[row];
            token_ids[i] = rows->ids[row * rows->longest + position];
            num_stored[i] = new->num_stored[span] + new->num_tokens[span] + position;
            first_block[i] = new->first_block[span];
        }
        const NewTokens next = {
            .num_spans = num_active, .num_tokens = ones, .num_stored = num_stored, .num_logits = ones,
            .first_block = first_block, .token_ids = token_ids, .blocks = new->blocks,
        };
        if (!decode(decoder, &next, logits)) return 0;
    }
}
