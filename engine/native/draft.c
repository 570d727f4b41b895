/* A round of drafts in one call: passes of the draft model, a draw after each, an early end where it is unsure.
 *
 * Draws are those of sampling.c, with the same random numbers as anywhere else. "draft.py" calls this; all
 * arrays are row-major.
 */

#include <math.h>
#include <omp.h>
#include <string.h>

#include "kernels.h"
#include "room.h"

/* As in random.py. */
#define DRAFT_STREAM 1
/* Below so many numbers, some 10 microseconds, other threads are not woken. */
#define MIN_PARALLEL (1 << 14)

/* How a row draws. */
enum { GREEDY, RACE, INVERSE_CDF };

/* The sequences that draft, in the order of their spans. */
typedef struct {
    int64_t num_rows, longest, vocab, num_bins, num_threads;
    const int64_t *span;          /* [num_rows] a row's, whose last token its first draft follows */
    const int64_t *limit;         /* [num_rows] tokens to draft, at least 1 */
    const int64_t *way;           /* [num_rows]; NULL: everybody is greedy */
    const int64_t *seeds, *positions; /* [num_rows] of their first draws; NULL if everybody is greedy */
    const Processors *processors;
    float *few;                   /* [num_threads, vocab] work space; NULL if nothing is cut */
    /* When a row ends early, as in confidence.py; all NULL: never. */
    const double *least_to_score, *least_to_draft; /* [num_rows] */
    const double *rates;          /* [num_rows, num_bins] */
    const double *bins;           /* [num_bins] lower ends */
    /* What comes of it. */
    int64_t *ids;                 /* [num_rows, longest] */
    float *probs;                 /* the same, of all tokens [vocab]; NULL: nobody asks */
    float *confidence;            /* [num_rows, longest]; NULL: nobody asks */
    int64_t *num_drawn;           /* [num_rows]; where a row has ended early, the last one may be refused */
} DraftRows;

/* What a row's next pass reads. */
typedef struct {
    int64_t row;
    double survival;
} Active;

/* Logits that are no distribution become flat: any guess is a guess. */
static void mend(float *logits, int64_t vocab) {
    float highest = -INFINITY;
    for (int64_t i = 0; i < vocab; i++) {
        if (isnan(logits[i])) highest = NAN;
        highest = logits[i] > highest ? logits[i] : highest;
    }
    if (!isfinite(highest)) memset(logits, 0, vocab * sizeof(float));
}

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
    mend(logits, vocab);
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

/* Whether a row that has just drawn from a distribution of this confidence drafts another token. */
static int goes_on(const DraftRows *rows, Active *active, float confidence, int64_t position) {
    const int64_t row = active->row;
    if (position + 1 >= rows->limit[row]) return 0;
    if (!rows->bins) return 1;
    int64_t bin = 0;
    while (bin + 1 < rows->num_bins && !((double)confidence < rows->bins[bin + 1])) bin++;
    const double survival = active->survival * rows->rates[row * rows->num_bins + bin];
    if (survival < rows->least_to_score[row]) return 0;
    active->survival = survival;
    return !(survival < rows->least_to_draft[row]);
}

/* Stores new, whose rows' spans want one logit each and others none, then drafts. 0 if there is no memory. */
int64_t draft(const Decoder *decoder, const NewTokens *new, const DraftRows *rows) {
    static _Thread_local Room room;
    const int64_t num_rows = rows->num_rows, vocab = decoder->head->out_features;
    const size_t numbers = 5 * piece(num_rows, sizeof(int64_t)) + piece(num_rows, sizeof(Active));
    if (!make_room(&room, numbers + 2 * piece(num_rows * vocab, sizeof(float)))) return 0;
    int64_t *token_ids = take(&room, num_rows, sizeof(int64_t)), *ones = take(&room, num_rows, sizeof(int64_t));
    int64_t *num_stored = take(&room, num_rows, sizeof(int64_t));
    int64_t *first_block = take(&room, num_rows, sizeof(int64_t));
    int64_t *going_on = take(&room, num_rows, sizeof(int64_t));
    Active *active = take(&room, num_rows, sizeof(Active));
    float *logits = take(&room, num_rows * vocab, sizeof(float));
    float *probs = take(&room, num_rows * vocab, sizeof(float));
    int64_t num_active = num_rows;
    for (int64_t row = 0; row < num_rows; row++) {
        ones[row] = 1;
        active[row] = (Active){ row, 1.0 };
    }
    if (!decode(decoder, new, logits)) return 0;
    for (int64_t position = 0;; position++) {
        #pragma omp parallel for num_threads(rows->num_threads) if (rows->way && num_active * vocab > MIN_PARALLEL)
        for (int64_t i = 0; i < num_active; i++) {
            const int64_t row = active[i].row, at = row * rows->longest + position;
            rows->ids[at] = draw(rows, row, position, logits + i * vocab, probs + i * vocab);
            rows->num_drawn[row] = position + 1;
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
