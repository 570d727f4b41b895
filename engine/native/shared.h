/* Written by "python -m tools.write_headers" from shared.py; change that. */

#ifndef TRUEDRAFT_SHARED_H
#define TRUEDRAFT_SHARED_H

/* Rules of verification. */
enum {
    EXACT_MATCH_RULE = 0,
    COUPLED_RULE = 1,
    REJECTION_RULE = 2,
    BLOCK_RULE = 3,
};

/* Streams of random numbers. */
enum {
    DRAFT_STREAM = 1,
    ACCEPT_STREAM = 2,
    RECOVER_STREAM = 3,
    NOISE_STREAM = 4,
    ROUND_STREAM = 5,
};

/* What weights are kept in; quantised embeddings add a type of blocks to QUANTISED. */
enum {
    FLOAT32 = 0,
    FLOAT16 = 1,
    BFLOAT16 = 2,
    WHOLE8 = 3,
    FLOAT8 = 4,
    QUANTISED = 16,
};

/* Types of quantised blocks, as ggml numbers them. */
enum {
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    IQ4_XS = 23,
    MXFP4 = 39,
};

/* Activations of MLPs. */
enum {
    SILU = 0,
    GELU_PYTORCH_TANH = 1,
    CLAMPED_SWISH = 2,
    RELU2 = 3,
    GELU = 4,
    LONE_GELU = 5,
};

/* How a router's numbers become scores. */
enum {
    SOFTMAX = 0,
    SIGMOID = 1,
};

/* What layers are made of: a part's kind says which structure its data is. */
enum {
    ATTENTION = 0,
    GATED_MLP = 1,
    EXPERTS = 2,
    RECURRENT = 3,
    PARALLEL = 4,
    DENSE_AND_EXPERTS = 5,
    LATENT_ATTENTION = 6,
};

/* What layers with a running state do with it. */
enum {
    SHORT_CONV = 0,
    DELTA_RULE = 1,
    MAMBA2 = 2,
};

#define RULES_BY_PROBS 0xc /* a bit for each rule that compares the models' probabilities */
#define STATE_CHUNK 16 /* tokens between two positions where a state is folded */
#define STATE_ROLLBACK 32 /* the most tokens that may be taken back after a pass */
#define PROB_UNIT 0x1.0000000000000p-56 /* sums of probabilities count it */
#define COLUMNS 32 /* columns of quantised weights that lie together */
#define E4M3_DIVISOR 256 /* divides numbers of the type FLOAT8 */
#define SWISH_LIMIT 7.0f /* the largest number that clamped_swish lets through */
#define SWISH_SLOPE 1.702f /* makes x sigmoid(SWISH_SLOPE x) of x */
#define WEYL 0x9e3779b97f4a7c15u /* of splitmix64 */
#define MIX_1 0xbf58476d1ce4e5b9u /* of splitmix64 */
#define MIX_2 0x94d049bb133111ebu /* of splitmix64 */

#endif
