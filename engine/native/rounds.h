/* Several rounds of a step as one call, for targets whose rounds take a millisecond (rounds.c). */

#ifndef TRUEDRAFT_ROUNDS_H
#define TRUEDRAFT_ROUNDS_H

#include "kernels.h"

typedef struct {
    int64_t num_rows, num_rounds;
    int64_t max_drafts;           /* the longest draft of any row */
    int64_t max_draft_len;        /* tokens that the draft model can hold of a sequence */
    int64_t max_missed;           /* the draft model drafts for a row only if its cache misses no more tokens of it */
    double seconds;               /* no round begins that would end later, taking as long as the longest */
    Row *table;
    const int64_t *index;         /* [num_rows] lines of the table */
    int64_t *draft_ids;           /* [num_rows, max_drafts] with the known drafts of the first round */
    /* Results, round by round. */
    int64_t *num_drafted, *num_accepted; /* [num_rounds, num_rows] */
    double *phase_seconds;        /* [num_rounds, 3] of drafting, scoring and verifying */
} Rounds;

int64_t run_rounds(const Decoder *target, const Decoder *draft, const Rounds *rounds);

#endif
