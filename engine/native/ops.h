/* The three operations of a round on a row (ops.c), for those who call them for many. */

#ifndef TRUEDRAFT_OPS_H
#define TRUEDRAFT_OPS_H

#include "kernels.h"

/* Working memory of one thread: [vocab] each, and [most drafts + 1, vocab] of target_probs for the block rule. */
typedef struct {
    float *probs, *cut, *certain, *target_probs;
} Work;

/* What a row's verdict is about. */
typedef struct {
    const int64_t *drafts;        /* [num_drafts] */
    const float *draft_probs;     /* [num_drafts, vocab]; NULL: the drafts are certain */
    float *logits;                /* [num_drafts + 1, vocab] adjusted; they may be changed */
    int64_t vocab;
} Judged;

/* A row's verdict. */
typedef struct {
    int64_t num_accepted, next_token, failed;
} Verdict;

int64_t work_size(int64_t vocab, int64_t max_drafts);
Work work_at(float *start, int64_t vocab, int64_t max_drafts);
void adjust_row(Row *row, const int64_t *drafts, int64_t offset, float *logits, int64_t positions, int64_t vocab);
int64_t draw_row(const Row *row, int64_t offset, float *logits, float *probs, const Work *work, int64_t vocab);
Verdict judge_row(const Row *row, const Judged *judged, const Work *work);

/* For all rows of a step, whose lines in the table have the numbers in ``index``. */
void adjust(Row *table, const int64_t *index, int64_t num_rows, const int64_t *drafts, int64_t max_drafts, int64_t offset,
            const int64_t *counts, float *logits, int64_t vocab);
int64_t draw(Row *table, const int64_t *index, int64_t num_rows, int64_t offset, float *logits, int64_t vocab,
             int64_t *ids, float *probs);
int64_t judge(Row *table, const int64_t *index, int64_t num_rows, const int64_t *drafts, const float *draft_probs,
              int64_t max_drafts, float *logits, int64_t vocab, int64_t *verdicts);

#endif
