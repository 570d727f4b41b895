/* What the C files call of each other, and what Python calls: each function is explained where it is. "headers.py" reads
 * structures and functions here, so a declaration has one type, and an argument is a number or a pointer. */

#ifndef TRUEDRAFT_KERNELS_H
#define TRUEDRAFT_KERNELS_H

#include <stdint.h>

#include "arena.h"
#include "rows.h"
#include "shared.h"
#include "threads.h"

/* Multiplications that take as long as a number to draw from. */
#define WORK_OF_A_DRAW 32

/* The new tokens of some sequences, one after the other, and where their caches lie. */
typedef struct {
    int64_t num_spans, num_tokens, block_size;
    int64_t num_kinds;            /* of layers that have blocks of their own: 1; 2: those with a window have others */
    const int64_t *slots;         /* [num_kinds, num_tokens], where the new keys and values go */
    const int64_t *first_token;   /* [num_spans + 1] into the packed tokens */
    const int64_t *num_stored;    /* [num_spans] tokens that the cache had before */
    const int64_t *first_block;   /* [num_spans] into blocks */
    const int64_t *blocks;        /* block ids of all spans, [blocks of a span, num_kinds] each */
    const int64_t *angle;         /* [num_tokens] row of cos and sin, of num_angles */
    int64_t num_angles, rotary_size;
    const float *cos, *sin;       /* [rotaries, num_angles, rotary_size]; sin is negative in the first half */
    /* Where states lie, over how many tokens they are folded, and how many nothing can take back; [num_spans] each, or
     * NULL where no layer has a state. */
    const int64_t *state_slot, *num_folded, *num_certain;
} Spans;

/* How a layer attends, and where its keys and values lie. */
typedef struct {
    int64_t num_heads, num_kv_heads, head_size;
    int64_t gated;                /* after the values come as many numbers as there are queries: out is multiplied by their
                                   * sigmoid */
    int64_t kind;                 /* whose blocks it has: 0, or 1 where layers with a window have others */
    int64_t window;               /* keys that a query sees, itself included; 0: all */
    int64_t looks_ahead;          /* it sees later keys of its span, too, as many as earlier ones if there is a window */
    int64_t rotary;               /* whose cos and sin; -1: none */
    int64_t interleaved;          /* they turn neighbours, not halves */
    int64_t turned_pairs, distance; /* of the numbers of a pair; 0: all angles of a kind turn halves of as many numbers */
    int64_t is_reader;            /* it has queries only: another layer has stored keys and values */
    int64_t values_are_keys;      /* no values come in: keys, as they are stored, are the values, too */
    int64_t norm_after_rotary;    /* norm_weight's */
    float scaling, norm_eps;
    float softcap;                /* c makes c tanh(s / c) of each score s; 0: none */
    const float *norm_weight;     /* [num_heads + num_kv_heads, head_size] or NULL; a reader's [num_heads, head_size] */
    const float *value_norm;      /* [head_size] or NULL */
    const float *query_norm, *key_norm; /* of all numbers of a token's queries, and of its keys, or NULL */
    const float *sinks;           /* [num_heads], a further score each whose value is nothing, or NULL */
    int64_t cache_type;           /* FLOAT32, FLOAT16 or WHOLE8: what keys and values are kept in */
    void *keys, *values;          /* [slots, num_kv_heads, head_size], after each head of WHOLE8 a float that multiplies
                                   * it; may be the same */
} Heads;

/* COLUMNS columns of quantised weights. ``type``: one of the types of blocks. */
typedef struct {
    const uint8_t *data;
    int64_t type;
} QuantisedPanel;

/* Which adapter each row of the pass that goes on has, or -1. */
typedef struct {
    int64_t num_rows;
    const int64_t *numbers;       /* [num_rows], or NULL: no row has one */
} AdaptedRows;

/* What an adapter of one module adds to a layer's outputs from ``first`` on: what ``up`` makes of what ``down`` makes of the
 * inputs. */
typedef struct {
    const void *down, *up;        /* Linears */
    int64_t first;
} LowRank;

/* What one adapter adds to a linear layer, which may have several modules. */
typedef struct {
    const LowRank *parts;         /* [num_parts] */
    int64_t num_parts;            /* 0 where the adapter leaves the layer as it is */
} Adapter;

/* A linear layer. ``type``: of its weights. */
typedef struct {
    int64_t in_features, out_features, type;
    const void *weights;          /* [panels, in_features, PANEL], zeros past the last column; in bfloat16
                                   * [panels, pairs of inputs, PANEL, 2]; or QuantisedPanels */
    float scale;                  /* of all sums: the layer's own; float16 weights are kept near the largest there is */
    const float *bias;            /* [out_features] or NULL */
    int64_t group;                /* inputs whose weights share a scale, in bytes */
    const float *scales;          /* [panels, groups, PANEL], those of FLOAT8 times E4M3_DIVISOR; or NULL */
    const Adapter *adapters;      /* by their numbers; NULL: there are none */
    const AdaptedRows *adapted;   /* rows of the layer's inputs that have one */
} Linear;

/* Sums of each channel over the newest tokens. */
typedef struct {
    int64_t channels, width;
    int64_t silu;                 /* whether it is applied to the sums */
    const float *weight;          /* [width, channels], the oldest token's first */
    const float *bias;            /* [channels] or NULL */
    int64_t num_inputs;           /* of a sequence that are kept: position p's lies at p modulo their number */
    float *inputs;                /* [slots, num_inputs, channels] */
} Convolution;

/* Over how many tokens a state is folded after a pass. One record stays at least, for who shares all of a text but its
 * last token. */
static inline int64_t num_folded_after(int64_t num_folded, int64_t num_certain) {
    const int64_t folds = num_certain < 1 ? 0 : (num_certain - 1) / STATE_CHUNK * STATE_CHUNK;
    return folds > num_folded ? folds : num_folded;
}

/* A layer with a running state. A short convolution has no more than its convolution. */
typedef struct {
    int64_t rule;
    const Convolution *convolution;
    int64_t heads, key_heads, rows, columns; /* of the state; its rows are what keys and queries address */
    int64_t tiled;                /* head h has the key head h modulo key_heads; else as many running heads share one */
    const float *decay_rate, *dt_bias; /* [heads] */
    const float *skip;            /* [heads], Mamba's */
    double least_dt, most_dt;
    const float *norm;            /* [columns], or Mamba's [heads * columns] in ``norm_groups`` parts or NULL */
    int64_t norm_groups;
    float norm_eps;
    int64_t num_records;          /* of a sequence that are kept: position p's lies at p modulo their number */
    float *state;                 /* [slots, heads, rows, columns] */
    float *keys, *values;         /* [slots, num_records, key_heads * rows] and [..., heads * columns] */
    double *decays;               /* [slots, num_records, heads] */
} Recurrence;

/* What layers are made of. */
typedef struct {
    int64_t kind;                 /* says which of the structures below ``data`` is */
    const void *data;
} Part;

typedef struct {
    const Linear *qkv, *output;
    const Heads *heads;
} Attention;

/* Attention to a short vector of each token in place of keys and values, as latent.py says. */
typedef struct {
    const Linear *down;           /* to the queries' vector or the queries, the latent vector, the turned numbers */
    const Linear *query_up;       /* NULL: ``down`` makes queries */
    const Linear *key_up, *value_up; /* [num_heads], each of the same sizes */
    const Linear *output;
    const float *query_norm, *norm; /* of the two vectors */
    float query_norm_eps, norm_eps;
    const Heads *heads;
} LatentAttention;

typedef struct {
    const Linear *gate_up, *down; /* gates and what they gate, or as many numbers as come in below */
    int64_t activation;
    const float *scales;          /* of each number that gate_up computes, or NULL */
} GatedMlp;

/* MLPs of which each token takes the num_chosen with the highest scores. */
typedef struct {
    const Linear *router;         /* a number for each expert */
    const GatedMlp *experts;      /* [num_experts], of the same sizes */
    const GatedMlp *shared;       /* of all tokens, or NULL */
    const Linear *shared_gate;    /* of one output, whose sigmoid multiplies the shared one's; or NULL */
    const float *choice_bias;     /* [num_experts], added to scores where experts are chosen, or NULL */
    const float *expert_scales;   /* [num_experts], multiply the weights of theirs, or NULL */
    int64_t num_experts, num_chosen, scoring;
    int64_t renormalises;         /* weights of a token are divided by their sum and added_to_sum */
    float added_to_sum, multiplier;
    int64_t num_groups;           /* of experts, of the same size; 0: none */
    int64_t num_chosen_groups, num_summed; /* those are chosen whose highest scores, one or two, have the highest sums */
    int64_t *touched;             /* experts that passes have read, and in how many layers of them */
} Experts;

/* An MLP of all tokens and experts, whose outputs are added; norms [hidden_size] of what each gets and gives. */
typedef struct {
    const GatedMlp *dense;
    const Experts *experts;
    const float *dense_norm, *experts_norm, *router_norm, *dense_post_norm, *experts_post_norm;
    float norm_eps;
} DenseAndExperts;

typedef struct {
    const Linear *inputs, *output;
    const Recurrence *recurrence;
    const float *scales;          /* of each number that inputs computes, or NULL */
} Recurrent;

/* What both compute is added. */
typedef struct {
    Part first, second;
} Parallel;

/* A layer's last branch: gates of a token's hidden state, the numbers that it has for the layer, and a norm. */
typedef struct {
    const Linear *gate, *output;
    const float *norm;            /* [hidden_size] */
    float norm_eps;
    int64_t activation;
} TokenBranch;

/* Numbers of each token for each layer: a row of a table, times a scale, plus a norm of what is computed of embeddings. */
typedef struct {
    const void *table;            /* [vocab, layers * size] */
    int64_t table_type, size;     /* as a decoder's embedding_type */
    const Linear *projection;
    const float *norm;            /* [size] */
    float norm_eps, scale;
} LayerInputs;

/* Two parts, each with a norm before it and one of what it adds to the hidden states, or NULL.
 * One of them may have no data: there is none. */
typedef struct {
    Part mixer, mlp;
    const float *mixer_norm, *mixer_post_norm, *mlp_norm, *mlp_post_norm; /* [hidden_size] */
    float mixer_norm_eps, mixer_post_norm_eps, mlp_norm_eps, mlp_post_norm_eps;
    int64_t is_parallel;          /* both parts get what the mixer's norm makes of the layer's input */
    const TokenBranch *token_branch; /* after the parts, or NULL */
    float scale;                  /* of the hidden states in the end */
} DecoderLayer;

/* A decoder and the cache it writes to. */
typedef struct {
    int64_t num_layers, hidden_size;
    int64_t vocab_size;           /* ids from here on have no embedding */
    int64_t num_blocks, block_size; /* of the cache */
    int64_t num_window_blocks;    /* of its layers with a window, the last of which nobody writes to; 0: as the others */
    int64_t num_state_slots;      /* of layers with a running state; 0: there are none */
    int64_t num_angles, rotary_size; /* as in Spans */
    int64_t num_reached;          /* positions that have angles; of others the table may hold anything */
    int64_t embedding_type;
    const DecoderLayer *layers;
    const void *embeddings;       /* [vocab, hidden_size] */
    const LayerInputs *layer_inputs; /* of token branches, or NULL */
    int64_t centres;              /* norms of hidden states take the mean off first */
    const float *norm;            /* [hidden_size] */
    const Linear *head;
    const float *cos, *sin;       /* as in Spans */
    float norm_eps, embedding_scale;
    float softcap;                /* of logits, as in Heads */
    const float *embedding_norm, *state_norm; /* [hidden_size], if it takes hidden states, too: embeddings and states
                                               * are put side by side, each normed; or NULL */
    float embedding_norm_eps, state_norm_eps;
    const Linear *projection;     /* makes the first hidden states of both; NULL: the first mixer gets both */
    int64_t adds_to_normed;       /* states, when the first layer adds to them */
    AdaptedRows *adapted;         /* what its linear layers know of rows with adapters; NULL: there are no adapters */
} Decoder;

/* What a pass is to store, by span: tokens of one sequence that follow those stored before. */
typedef struct {
    int64_t num_spans;
    const int64_t *num_tokens, *num_stored, *num_logits; /* [num_spans]; logits of the last tokens */
    const int64_t *first_block;   /* [num_spans] into blocks */
    const int64_t *token_ids;     /* of all spans, one after the other */
    const int64_t *blocks;        /* block ids of all spans, as in Spans */
    const int64_t *state_slot, *num_folded, *num_certain; /* [num_spans] as in Spans */
    const float *states;          /* [tokens, hidden_size] that come with them, where a decoder takes such; NULL: zeros */
    const int64_t *adapter;       /* [num_spans] each one's, or -1; NULL: none has one */
    const int64_t *shift;         /* [num_spans] what is added to an index for its position; NULL: nothing */
} NewTokens;

/* Hidden states that a pass gives in addition to logits. */
typedef struct {
    int64_t num_taps;
    const int64_t *layers;        /* [num_taps] after which; their number: what the last norm makes of the states */
    float *states;                /* [tokens of the pass, num_taps, hidden_size] */
} Taps;

/* Makes the states that a head takes of what layers of a target know of a token. */
typedef struct {
    int64_t num_taps, tap_size, size;
    const float *joint_norm;      /* [num_taps * tap_size] of all taps together, or NULL */
    const float *tap_norms;       /* [num_taps, tap_size] of each one, or NULL */
    float joint_norm_eps, tap_norm_eps;
    const Linear *combine;        /* NULL: the only tap is the state */
} Fusion;

/* layers.c */
void rms_norm(float *out, const float *x, const float *weight, const float *residual, int64_t rows, int64_t size,
              float eps);
void centre(float *out, const float *x, int64_t rows, int64_t size);
void layer_norm(float *out, const float *x, const float *weight, const float *bias, int64_t rows, int64_t size,
                float eps);
void norm_row(float *out, const float *x, const float *weight, const float *residual, int64_t size, float eps);
void gate(float *out, const float *gate_up, int64_t activation, int64_t rows, int64_t size);
void scale_columns(float *x, const float *scales, int64_t rows, int64_t size);
void cap(float *x, int64_t rows, int64_t size, float softcap);
void cap_row(float *x, int64_t size, float softcap);

/* convolution.c */
void convolve(const Spans *spans, const Convolution *layer, float *x, int64_t size, int64_t first);
void convolve_gated(const Spans *spans, const Convolution *layer, const float *x, float *out);

/* recurrence.c */
int64_t recurrence_inputs(const Recurrence *layer);
int64_t recurrence_scratch(const Recurrence *layer, int64_t num_tokens);
void recur(const Spans *spans, const Recurrence *layer, float *x, float *out, float *scratch);

/* attention.c */
void attend(const Spans *spans, const Heads *layer, float *qkv, float *out);

/* linear.c */
int64_t panel_size(void);
int64_t multiplies_bfloat16(void);
void multiply(const Linear *linear, float *out, const float *x, const float *residual, int64_t rows);

/* quantised.c */
void multiply_quantised(const Linear *linear, float *out, const float *x, const float *residual, int64_t rows);

/* quantised_blocks.c */
int64_t row_bytes(int64_t type, int64_t size);
int64_t packed_bytes(int64_t type, int64_t in_features);
void pack_panels(int64_t type, uint8_t *to, const uint8_t *blocks, const int64_t *rows, int64_t num_rows,
                 int64_t in_features);
void dequantise_rows(int64_t type, float *to, const uint8_t *blocks, const int64_t *rows, int64_t count,
                     int64_t size);
void dequantise(int64_t type, float *to, const uint8_t *blocks, int64_t size);

/* latent.c */
int64_t latent_attention_bytes(const LatentAttention *part, int64_t rows);
int run_latent_attention(const LatentAttention *part, const Spans *spans, float *out, const float *x,
                         const float *residual, Arena *arena);

/* mlp.c */
int64_t gated_mlp_bytes(const GatedMlp *part, int64_t rows);
int run_gated_mlp(const GatedMlp *part, float *out, const float *x, const float *residual, int64_t rows, Arena *arena);
int64_t experts_bytes(const Experts *part, int64_t rows);
int run_experts(const Experts *part, float *out, const float *x, const float *routed, const float *residual,
                int64_t rows, Arena *arena);
int64_t mix_experts(const Experts *part, float *out, const float *x, const float *routed, const float *residual,
                    int64_t rows);
int64_t dense_and_experts_bytes(const DenseAndExperts *part, int64_t rows);
int run_dense_and_experts(const DenseAndExperts *part, float *out, const float *x, const float *residual, int64_t rows,
                          Arena *arena);

/* parts.c */
int64_t part_bytes(const Part *part, int64_t rows);
int run_part(const Part *part, const Spans *spans, float *out, const float *x, const float *residual, Arena *arena);

/* decoder.c */
int64_t decode(const Decoder *decoder, const NewTokens *new, const Taps *taps, float *logits);

/* fusion.c */
int64_t fuse(const Fusion *fusion, float *states, const float *tapped, int64_t rows);

/* sampling.c */
void process_row(float *probs, const float *logits, const Row *row, float *scratch, int64_t vocab);
void gumbel_argmax(int64_t *ids, const float *probs, const int64_t *seeds, const int64_t *first_positions,
                   int64_t offset, int64_t sequences, int64_t positions, int64_t vocab);
void noise_uniforms(double *out, int64_t seed, int64_t position, int64_t vocab);
float highest_of(const float *x, int64_t size);
void round_seed(int64_t *out, int64_t seed, int64_t first_position);
void uniform(double *out, const int64_t *seeds, const int64_t *positions, int64_t stream, int64_t size);
void inverse_cdf(int64_t *ids, const float *probs, const double *uniforms, int64_t rows, int64_t vocab);
int64_t sample_residual(const float *target, const float *draft, double scale, double uniform, int64_t vocab);
int is_distribution(const float *logits, int64_t vocab);
int64_t argmax(const float *logits, int64_t vocab);

#endif
