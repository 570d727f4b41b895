/* Rows of logits to distributions, and one exact draw from each, for a CPU.
 *
 * The same definitions as "engine/sampling" has for torch: processors.py, random.py and verify.py, which are the
 * reference. Rows are independent: what becomes of one depends neither on the others nor on their number, and
 * drafts and verification use the same functions, so that seeds survive batching and speculation bit for bit.
 *
 * Arrays are row-major. "library.py" compiles this file, "ops.c" calls it.
 */

#include <math.h>
#include <string.h>

#include "kernels.h"

/* Numbers that are looked at together; all of them by the same instructions, so that ties stay ties. */
#define CHUNK 64
/* Tokens of a row whose noise is hashed together. */
#define HASHED 16

#define ALWAYS __attribute__((always_inline))
#define NEVER __attribute__((noinline))

/* exp of x <= 0 with a relative error of 2e-7 (Cody-Waite reduction, polynomial of degree 6); 0 where float32
 * has no normal number for it. */
static inline ALWAYS float exp_or_zero(float x) {
    const float bounded = x < -87.0f ? -87.0f : x;
    const float n = rintf(bounded * 1.44269504f);
    const float r = (bounded - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union { uint32_t i; float f; } power = { ((uint32_t)(int32_t)n + 127u) << 23 };
    return x < -87.0f ? 0.0f : p * power.f;
}

float highest_of(const float *x, int64_t size) {
    float top[CHUNK], highest = x[0];
    int64_t begin = 0;
    for (int i = 0; i < CHUNK; i++) top[i] = highest;
    for (; begin + CHUNK <= size; begin += CHUNK)
        for (int i = 0; i < CHUNK; i++) top[i] = x[begin + i] > top[i] ? x[begin + i] : top[i];
    for (; begin < size; begin++) highest = x[begin] > highest ? x[begin] : highest;
    for (int i = 0; i < CHUNK; i++) highest = top[i] > highest ? top[i] : highest;
    return highest;
}

/* exp of a chunk's logits below the highest, times scale. Returns their sum. */
static NEVER float softmax_chunk(float *restrict out, const float *restrict logits, float highest, float scale) {
    float sum = 0.0f;
    for (int i = 0; i < CHUNK; i++) out[i] = exp_or_zero((logits[i] - highest) * scale);
    for (int i = 0; i < CHUNK; i++) sum += out[i];
    return sum;
}

/* A chunk's numbers that reach the threshold, divided by total; 0 elsewhere. */
static NEVER void divide(float *x, float threshold, float total) {
    for (int i = 0; i < CHUNK; i++) x[i] = x[i] >= threshold ? x[i] / total : 0.0f;
}

static void divide_row(float *x, int64_t size, float threshold, float total) {
    int64_t begin = 0;
    for (; begin + CHUNK <= size; begin += CHUNK) divide(x + begin, threshold, total);
    float last[CHUNK] = {0};
    memcpy(last, x + begin, (size - begin) * sizeof(float));
    divide(last, threshold, total);
    memcpy(x + begin, last, (size - begin) * sizeof(float));
}

static void softmax_row(float *probs, const float *logits, int64_t size, float temperature) {
    /* The maximum goes first: a temperature next to zero would make infinities of the logits. */
    const float highest = highest_of(logits, size), scale = 1.0f / temperature;
    double total = 0.0;
    int64_t begin = 0;
    for (; begin + CHUNK <= size; begin += CHUNK)
        total += softmax_chunk(probs + begin, logits + begin, highest, scale);
    float last[CHUNK], padded[CHUNK];
    for (int i = 0; i < CHUNK; i++) padded[i] = -INFINITY;
    memcpy(padded, logits + begin, (size - begin) * sizeof(float));
    total += softmax_chunk(last, padded, highest, scale);
    memcpy(probs + begin, last, (size - begin) * sizeof(float));
    divide_row(probs, size, 0.0f, (float)total);
}

/* Copies what reaches the threshold to kept, in order; returns how many there are. */
static int64_t keep(float *kept, const float *x, int64_t size, float threshold) {
    int64_t num_kept = 0;
    for (int64_t i = 0; i < size; i++) {
        kept[num_kept] = x[i];
        num_kept += x[i] >= threshold;
    }
    return num_kept;
}

static inline ALWAYS uint32_t bits_of(float x) {
    union { float f; uint32_t i; } both = { x };
    return both.i;
}

/* The highest t such that the numbers >= t, none negative, weigh as much as goal: by their sum, or by how many
 * they are. 0 if all of them do not. The bits of positive floats are ordered as they are: t is found digit by
 * digit, and x, which is overwritten, shrinks to the numbers that begin like t. */
static inline ALWAYS float radix_select(float *x, int64_t size, double goal, const int by_sum) {
    static const int shifts[] = {23, 15, 7, 0};
    uint32_t found = 0;
    double above = 0.0;
    for (int level = 0; level < 4; level++) {
        const int shift = shifts[level];
        /* Four sums of each digit: neighbours often have the same, and would wait for each other. */
        double weight[256][4] = {0};
        for (int64_t i = 0; i < size; i++)
            weight[bits_of(x[i]) >> shift & 255][i & 3] += by_sum ? x[i] : 1.0;
        int digit = 255;
        for (; digit > 0; digit--) {
            const double *w = weight[digit], here = (w[0] + w[1]) + (w[2] + w[3]);
            if (above + here >= goal) break;
            above += here;
        }
        found |= (uint32_t)digit << shift;
        int64_t num_left = 0;
        for (int64_t i = 0; i < size; i++) {
            const float each = x[i];
            x[num_left] = each;
            num_left += bits_of(each) >> shift == found >> shift;
        }
        if (num_left == 1) return x[0];
        size = num_left;
    }
    union { uint32_t i; float f; } threshold = { found };
    return threshold.f;
}

/* The lowest of the size probabilities that top-k and top-p keep; ties with it are kept as well. scratch has
 * room for all. */
static float lowest_kept(float *scratch, const float *probs, int64_t size, int64_t top_k, float top_p) {
    float lowest = 0.0f;
    double total = 1.0;
    if (top_k > 0 && top_k < size) {
        memcpy(scratch, probs, size * sizeof(float));
        lowest = radix_select(scratch, size, (double)top_k, 0);
        /* The mass that top-p is a share of is that of k tokens, however many tie with the last. */
        double rest = (double)top_k;
        total = 0.0;
        for (int64_t i = 0; i < size; i++) {
            total += probs[i] > lowest ? probs[i] : 0.0f;
            rest -= probs[i] > lowest;
        }
        total += rest * lowest;
    } else if (top_p < 0.9999f) {
        /* All that is rarer adds up to half of what is cut at most. */
        lowest = (1.0f - top_p) * 0.5f / (float)size;
    }
    if (top_p >= 1.0f) return lowest;
    return radix_select(scratch, keep(scratch, probs, size, lowest), top_p * total, 1);
}

/* probs [vocab] of a row's adjusted logits, by its temperature and cuts; scratch [vocab] is work space. */
void process_row(float *probs, const float *logits, const Row *row, float *scratch, int64_t vocab) {
    const int64_t top_k = row->top_k;
    const float top_p = row->top_p, min_p = row->min_p;
    softmax_row(probs, logits, vocab, row->temperature);
    float lowest = 0.0f;
    if (top_k > 0 || top_p < 1.0f) lowest = lowest_kept(scratch, probs, vocab, top_k, top_p);
    if (min_p > 0.0f) {
        const float share = min_p * highest_of(probs, vocab);
        lowest = share > lowest ? share : lowest;
    }
    if (lowest == 0.0f) return;
    double total = 0.0;
    for (int64_t i = 0; i < vocab; i++) total += probs[i] >= lowest ? probs[i] : 0.0f;
    divide_row(probs, vocab, lowest, (float)total);
}

/* splitmix64's finaliser. */
static inline ALWAYS uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * MIX_1;
    x = (x ^ x >> 27) * MIX_2;
    return x ^ x >> 31;
}

static inline uint64_t key_of(int64_t seed, int64_t position, int64_t stream) {
    return mix(mix((uint64_t)seed + (uint64_t)stream * WEYL) + (uint64_t)position * WEYL);
}

/* (n + 0.5) / 2^52 for n of 52 bits, exactly: as the digits of a number between 1 and 2. */
static inline ALWAYS double to_unit_interval(uint64_t n) {
    union { uint64_t i; double f; } both = { n | 0x3FF0000000000000u };
    return both.f - (1.0 - 0x1p-53);
}

#define ALL_52 ((1ull << 52) - 1)

/* out [size]: one number for each of seeds and positions [size]. */
void uniform(double *out, const int64_t *seeds, const int64_t *positions, int64_t stream, int64_t size) {
    for (int64_t i = 0; i < size; i++)
        out[i] = to_unit_interval(mix(key_of(seeds[i], positions[i], stream)) >> 12);
}

/* The seed of drafting and accepting in the round that begins at a position, as round_seeds. */
void round_seed(int64_t *out, int64_t seed, int64_t first_position) {
    *out = (int64_t)key_of(seed, first_position, ROUND_STREAM);
}

/* out [vocab]: the numbers that the noise of gumbel_argmax is made of, for comparisons. */
void noise_uniforms(double *out, int64_t seed, int64_t position, int64_t vocab) {
    const uint64_t key = key_of(seed, position, NOISE_STREAM);
    for (int64_t i = 0; i < vocab; i++) out[i] = to_unit_interval(mix(key + (uint64_t)(i + 1) * WEYL) >> 12);
}

/* The token with the highest p / -log(u), the first among equals: argmax of log p and Gumbel noise. As -log(u) > 1 - u, most
 * tokens are out of it without a logarithm, and those with p = 0 mostly without a number. */
static int64_t gumbel_argmax_row(const float *probs, uint64_t key, int64_t vocab) {
    double best = 0.0;
    int64_t winner = 0;
    for (int64_t begin = 0; begin < vocab; begin += HASHED) {
        float last[HASHED] = {0};
        const float *p = probs + begin;
        if (vocab - begin < HASHED) p = memcpy(last, p, (vocab - begin) * sizeof(float));
        int runs = 0;
        for (int i = 0; i < HASHED; i++) runs |= p[i] > 0.0f;
        if (!runs) continue;
        uint64_t n[HASHED];
        /* Unrolled, these loops would no longer be taken for vectors. */
        #pragma GCC unroll 1
        for (int i = 0; i < HASHED; i++) n[i] = mix(key + (uint64_t)(begin + i + 1) * WEYL) >> 12;
        /* The highest score there can be, a little more than that for rounding, against the best so far. */
        int64_t may_win[HASHED], any = 0;
        #pragma GCC unroll 1
        for (int i = 0; i < HASHED; i++)
            may_win[i] = p[i] * (1.0 + 1e-12) >= best * to_unit_interval(ALL_52 - n[i]);
        for (int i = 0; i < HASHED; i++) any |= may_win[i];
        if (!any) continue;
        for (int i = 0; i < HASHED; i++) {
            if (!may_win[i] || !(p[i] > 0.0f)) continue;
            const double score = p[i] / -log(to_unit_interval(n[i]));
            if (score > best) {
                best = score;
                winner = begin + i;
            }
        }
    }
    return winner;
}

typedef struct {
    int64_t *ids;
    const float *probs;
    const int64_t *seeds, *first_positions;
    int64_t offset, positions, vocab;
} Noise;

static void gumbel_argmax_task(const void *arguments, int64_t row) {
    const Noise *task = arguments;
    const int64_t sequence = row / task->positions, position = task->offset + row % task->positions;
    const uint64_t key = key_of(task->seeds[sequence], task->first_positions[sequence] + position, NOISE_STREAM);
    task->ids[row] = gumbel_argmax_row(task->probs + row * task->vocab, key, task->vocab);
}

/* ids [sequences, positions]: what each row of probs [sequences, positions, vocab] draws with the noise of its
 * sequence's seed, the first at its sequence's position + offset. */
void gumbel_argmax(int64_t *ids, const float *probs, const int64_t *seeds, const int64_t *first_positions,
                   int64_t offset, int64_t sequences, int64_t positions, int64_t vocab) {
    const int64_t rows = sequences * positions;
    run_task(gumbel_argmax_task, &(Noise){ ids, probs, seeds, first_positions, offset, positions, vocab }, rows,
             rows * vocab * WORK_OF_A_DRAW);
}

/* What one draw is proportional to: target alone, or max(scale * target - draft, 0) if there is a draft. */
typedef struct {
    const float *target, *draft;
    double scale;
} Weights;

static inline ALWAYS double weight_at(Weights w, int64_t i, const int has_draft) {
    if (!has_draft) return w.target[i];
    const double left = w.scale * w.target[i] - w.draft[i];
    return left > 0.0 ? left : 0.0;
}

static inline ALWAYS double sum_of(Weights w, int64_t begin, int64_t end, const int has_draft) {
    double sum = 0.0;
    for (int64_t i = begin; i < end; i++) sum += weight_at(w, i, has_draft);
    return sum;
}

/* The first id up to which the weights add up to more than their share u; -1 if all are 0. */
static inline ALWAYS int64_t id_at(Weights w, double u, int64_t size, const int has_draft) {
    double total = 0.0, sum = 0.0;
    for (int64_t begin = 0; begin < size; begin += CHUNK)
        total += sum_of(w, begin, begin + CHUNK < size ? begin + CHUNK : size, has_draft);
    int64_t last = -1;
    for (int64_t begin = 0; begin < size; begin += CHUNK) {
        const int64_t end = begin + CHUNK < size ? begin + CHUNK : size;
        const double after = sum + sum_of(w, begin, end, has_draft);
        if (after > sum && after >= u * total) {
            for (int64_t i = begin; i < end; i++) {
                const double weight = weight_at(w, i, has_draft);
                if (!(weight > 0.0)) continue;
                sum += weight;
                last = i;
                if (sum > u * total) return i;
            }
        }
        sum = after;
    }
    /* Rounding has lifted the goal to the total. */
    return last;
}

/* Whether the highest logit is a number. */
int is_distribution(const float *logits, int64_t vocab) {
    int has_nan = 0;
    for (int64_t i = 0; i < vocab; i++) has_nan |= logits[i] != logits[i];
    return !has_nan && isfinite(highest_of(logits, vocab));
}

/* The id of the highest logit, the first among equals. */
int64_t argmax(const float *logits, int64_t vocab) {
    const float highest = highest_of(logits, vocab);
    int64_t id = 0;
    while (id < vocab - 1 && logits[id] != highest) id++;
    return id;
}

typedef struct {
    int64_t *ids;
    const float *probs;
    const double *uniforms;
    int64_t vocab;
} Draws;

static void inverse_cdf_task(const void *arguments, int64_t row) {
    const Draws *task = arguments;
    const Weights weights = { task->probs + row * task->vocab, NULL, 1.0 };
    const int64_t id = id_at(weights, task->uniforms[row], task->vocab, 0);
    task->ids[row] = id < 0 ? 0 : id;
}

/* ids [rows] drawn from probs [rows, vocab] by uniforms [rows]. */
void inverse_cdf(int64_t *ids, const float *probs, const double *uniforms, int64_t rows, int64_t vocab) {
    run_task(inverse_cdf_task, &(Draws){ ids, probs, uniforms, vocab }, rows, rows * vocab * WORK_OF_A_DRAW);
}

/* The id that follows accepted tokens, drawn from target, less scale times what draft had if one was rejected;
 * else draft is NULL. */
int64_t sample_residual(const float *target, const float *draft, double scale, double uniform, int64_t vocab) {
    const Weights w = { target, draft, scale };
    int64_t id = draft ? id_at(w, uniform, vocab, 1) : -1;
    /* Equal rows leave rounding dust at most: the target's row is the limit. */
    if (id < 0) id = id_at(w, uniform, vocab, 0);
    return id < 0 ? 0 : id;
}
