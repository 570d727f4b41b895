/* Written by "python -m tools.write_headers" from engine/rows/columns.py; change that. */

#ifndef TRUEDRAFT_ROWS_H
#define TRUEDRAFT_ROWS_H

#include <stdint.h>

typedef struct {
    int64_t num_stored;             /* tokens before the pending one, which is its position */
    int64_t num_drafts;             /* drafts that the round scores; -1: the round has no such row */
    int64_t num_drawn;              /* drafts that come with distributions: num_drafts, or none */
    int64_t num_skipped;            /* 1: the draft model's cache has the token before the pending one */
    int64_t state_slot;             /* where the target's cache has the row's states; -1: it has none */
    int64_t num_folded;             /* tokens that these states are folded over before the round */
    int64_t num_folded_after;       /* the same after the round */
    int64_t draft_state_slot;       /* where the draft model's cache has the row's states; -1: it has none */
    int64_t draft_num_folded;       /* tokens that these states are folded over before the round */
    int64_t draft_num_folded_after; /* the same after the round */
    int64_t seed;                   /* what all random numbers of the row depend on */
    int64_t rule;                   /* how drafts are verified */
    int64_t top_k;                  /* tokens that may be drawn; 0: all */
    double temperature;             /* above 0; greedy rows have 1 and do not look at it */
    double top_p;                   /* mass that may be drawn; 1: all */
    double min_p;                   /* smallest ratio to the most likely token's probability; 0: any */
    int64_t drafts_greedily;        /* whether a draft model drafts its most likely token */
    double repetition;              /* repetition penalty; 1: off */
    double frequency;               /* frequency penalty; 0: off */
    double presence;                /* presence penalty; 0: off */
    int64_t min_num_tokens;         /* length of the text below which stop tokens are forbidden */
    int64_t max_num_tokens;         /* the longest text, prompt included */
    int64_t num_stops;              /* entries of stop_ids */
    const int64_t *stop_ids;        /* tokens that end the text */
    int64_t num_biases;             /* entries of bias_ids and biases */
    const int64_t *bias_ids;        /* tokens with a bias */
    const float *biases;            /* what is added to their logits */
    int64_t *token_ids;             /* [max_num_tokens] the text */
    int64_t num_counted;            /* tokens of the text that counts know */
    int64_t num_distinct;           /* entries of distinct_ids and counts */
    int64_t num_distinct_in_prompt; /* entries of tokens that stand in the prompt: the first ones */
    int64_t *distinct_ids;          /* [max_num_tokens] tokens of the text; NULL: the row has no penalties */
    int64_t *counts;                /* [max_num_tokens] how often each of them stands in the output */
    int64_t num_masked;             /* positions that mask knows; later ones allow every token */
    int64_t mask_words;             /* words of 32 tokens in the mask of a position */
    uint32_t *mask;                 /* [positions, mask_words] a bit for each allowed token; NULL: no mask */
    int64_t num_computed;           /* tokens in the target's cache: of a prompt any number, else num_stored */
    int64_t num_wanted;             /* tokens to draft in each round, as far as there is room for them */
    int64_t num_known;              /* drafts that are known before the first round, in place of drawn ones */
    int64_t num_draft_stored;       /* tokens of the text in the draft model's cache */
    int64_t num_blocks;             /* blocks of the row in the target's cache */
    const int64_t *blocks;          /* [num_blocks, kinds of layers] the target's block table, with room for all rounds */
    int64_t num_draft_blocks;       /* blocks of the row in the draft model's cache */
    const int64_t *draft_blocks;    /* [num_draft_blocks, kinds of layers] the draft model's, with room for all rounds */
    int64_t adapter;                /* the number of the target's adapter; -1: none */
    int64_t shift;                  /* what is added to an index for its position in the target's passes, after pictures */
} Row;

#endif
