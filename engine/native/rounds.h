/* The rows of a step as C knows them, and what the files that run their rounds call of each other. */

#ifndef TRUEDRAFT_ROUNDS_H
#define TRUEDRAFT_ROUNDS_H

#include <string.h>

#include "kernels.h"

/* Verification rules, and with them how a row's drafts are drawn. */
enum { GREEDY, COUPLED, REJECTION };

/* A sequence that decodes, or whose prompt ends in the call's first round; serves in many calls. */
typedef struct {
    /* These follow the rounds. */
    int64_t num_tokens;           /* the last one is pending: in no cache yet */
    int64_t num_computed;         /* tokens in the target's cache: of a prompt any number, else all but that one */
    int64_t num_draft_computed;   /* tokens in the drafter's cache; of a head's, states with the tokens after them */
    int64_t num_waiting;          /* states that wait for a head: those of the tokens after the computed ones */
    int64_t num_folded, num_draft_folded; /* tokens that states in both caches are folded over: no more than are in
                                             them when a round begins, so that it can be begun anew elsewhere */
    int64_t num_distinct;         /* entries of distinct_ids and counts */
    int64_t num_counted;          /* tokens of the text that they know of */
    /* The step's. */
    int64_t num_draft_tokens;     /* to draft in each round, as far as there is room for them */
    const int64_t *draft_ids;     /* [num_draft_tokens] drafts from outside, of one round; NULL: the draft
                                     model's */
    int64_t num_stop_rates;       /* drafts of the draft model may be stopped by the rates of as many parts of 0 to 1, as */
    double stop_below;            /* in draft_choice.py */
    const double *stop_rates;     /* NULL: they are not */
    int64_t num_blocks, num_draft_blocks;
    const int64_t *blocks, *draft_blocks; /* block tables with room for all rounds */
    int64_t state_slot, draft_state_slot; /* of caches with states, or -1 */
    float *waiting;               /* [the drafter's max_waiting, its hidden size]; NULL: no head follows the row */
    int64_t num_masked, mask_words;
    const uint32_t *mask;         /* [max_drafts + 1, mask_words] a bit for each allowed token, by position of
                                     this round; beyond num_masked all are allowed. NULL: not constrained */
    float *logits;                /* [num_rounds, max_drafts + 1, vocab] receives the target's raw logits of
                                     all emitted tokens; NULL: not needed */
    /* The sequence's. */
    int64_t *token_ids;           /* [max_num_tokens] */
    int64_t max_num_tokens;
    int64_t min_num_tokens;       /* stop tokens are forbidden below */
    int64_t num_stops;
    const int64_t *stop_ids;
    int64_t rule, seed, top_k;
    float temperature, top_p, min_p;
    float repetition, frequency, presence; /* penalties */
    int64_t *distinct_ids, *counts; /* [max_num_tokens] tokens of the text, and how often they stand in its output;
                                     NULL: no penalties */
    int64_t num_distinct_in_prompt; /* the first so many of them stand in the prompt */
    int64_t num_biases;
    const int64_t *bias_ids;
    const float *biases;
} Row;

/* Who drafts what does not come from outside: a draft model, or a head, which takes a state with each token and is told
 * what the target makes of all of them. */
typedef struct {
    const Decoder *model;
    const Fusion *fusion;         /* makes a head's states; NULL: a draft model */
    const int64_t *taps;          /* the target's layers that are fused */
    int64_t output;               /* the layer of ``model`` after which its state stands for the next token's */
    const int64_t *token_ids;     /* the target's ids of what its logits are of; NULL: of all in order */
    int64_t max_waiting;          /* states that a row keeps before the cache is brought up to date */
} Drafter;

/* Called for constrained rows: before each round but the first, with num_drafted 0, to renew drafts from outside
 * and masks; and after each token that the draft model has drafted, to write the mask behind it. 0 if it
 * cannot. */
typedef int64_t (*Constrain)(int64_t row, int64_t num_drafted, int64_t last_draft);

typedef struct {
    int64_t num_rows, num_rounds;
    int64_t max_drafts;           /* the longest draft of any row */
    int64_t max_draft_len;        /* tokens that the drafter can hold of a sequence */
    int64_t max_missed;           /* a draft model drafts for a row only if its cache misses no more tokens of it */
    double seconds;               /* no round begins that would end later, taking as long as the longest */
    Row **rows;
    Constrain constrain;          /* NULL: no row is constrained */
    /* Results, round by round. */
    int64_t *num_drafted, *num_accepted; /* [num_rounds, num_rows] */
    float *confidences;           /* [num_rows, max_drafts] of the first round, of rows whose drafts may be stopped: the
                                     largest probability before each draft; NULL: there are no such rows */
    double *phase_seconds;        /* [num_rounds, 3] of drafting, scoring and verifying */
} Rounds;

/* Working memory of a call: [num_rows] unless another shape is given. */
typedef struct {
    int64_t *limit;               /* tokens to draft in this round, as far as is known */
    double *chance;               /* that all of a draft is accepted */
    float *confidences;           /* those of the first round, NULL in others */
    int64_t *num_drafted;
    int64_t *draft_ids;           /* [num_rows, max_drafts] */
    float *draft_probs;           /* [num_rows, max_drafts, vocab], if a row follows the rejection rule */
    int64_t *next_id, *is_broken;
    int64_t *first_block, *first_draft_block; /* into blocks */
    int64_t *blocks;              /* block tables of all rows */
    /* Spans of a pass. */
    int64_t *ones, *zeros, *query_lens, *num_computed, *span_first_block;
    int64_t *state_slot, *num_folded, *num_certain;
    int64_t *token_ids;           /* [tokens of a pass] */
    int64_t *active;              /* rows that draft on */
    int64_t *num_scored;          /* tokens with logits: the pending one and the drafts */
    int64_t *first_scored;        /* of a row's logits */
    float *logits;                /* [tokens scored, vocab] */
    float *draft_logits;          /* [num_rows, vocab of the drafter] */
    /* Of a head. */
    float *tapped;                /* [tokens scored, taps, the target's hidden size] */
    float *fused;                 /* [tokens scored, hidden size] */
    float *states, *outputs;      /* [tokens of a pass, hidden size] that come with its tokens, and that it gives */
    float *next_states;           /* [num_rows, hidden size] of the last tokens drafted */
    float *probs;                 /* [threads, vocab], if a row samples or drafts may be stopped */
    float *padded;                /* the same, if the drafter knows other tokens */
    float *cut;                   /* the same, if a row has top-k, top-p or min-p */
    float *one_hot;               /* the same, if drafts from outside meet the rejection rule */
    int64_t vocab;                /* the target's; all distributions have its width */
    int64_t samples, stops;       /* whether a row does, and whether a row's drafts may be stopped */
} Scratch;

/* rounds.c */
int64_t run_rounds(const Decoder *target, const Drafter *drafter, const Rounds *rounds);

/* adjust.c */
void adjust_logits(const Row *row, int64_t position, float *logits, int64_t vocab);
void count_token(Row *row, int64_t id);
void uncount_token(Row *row, int64_t id);
void process_adjusted(const Row *row, const Scratch *scratch, float *probs, const float *logits);

/* draft.c */
int draft_round(const Drafter *drafter, const Rounds *rounds, Scratch *scratch);

/* follow.c */
int follow_rows(const Drafter *drafter, const Rounds *rounds, Scratch *scratch, const int64_t *num_accepted);

/* Whether a drafter is a head. NULL is nobody. */
static inline int is_head(const Drafter *drafter) { return drafter && drafter->fusion; }

/* Whether the drafter has drafted for a row in this round. */
static inline int has_drafted(const Rounds *rounds, const Scratch *scratch, int64_t row) {
    return !rounds->rows[row]->draft_ids && scratch->num_drafted[row] > 0;
}

/* Whether an id from outside is one of the tokens of a distribution. */
static inline int is_token(int64_t id, int64_t vocab) { return id >= 0 && id < vocab; }

/* memcpy, but either array may be NULL where there is nothing to copy. */
static inline void copy_ids(int64_t *to, const int64_t *from, int64_t count) {
    if (count) memcpy(to, from, count * sizeof(int64_t));
}

#endif
