/* MLPs: one that all tokens go through, or many experts, of which each token takes a few.
 *
 * Rows are sorted by expert, so that an expert's weights are read once for all of its rows. Outputs of a row are added
 * in the order of its experts. Neither that order nor a product depends on the other rows, and so a row's bits do not.
 * All arrays are row-major.
 */

#include <string.h>

#include "kernels.h"
#include "vectors.h"

int64_t gated_mlp_bytes(const GatedMlp *part, int64_t rows) {
    return arena_size(rows * part->gate_up->out_features, sizeof(float))
        + arena_size(rows * part->down->in_features, sizeof(float));
}

int run_gated_mlp(const GatedMlp *part, float *out, const float *x, const float *residual, int64_t rows, Arena *arena) {
    const int64_t size = part->down->in_features;
    float *gate_up = arena_alloc(arena, rows * part->gate_up->out_features, sizeof(float));
    float *gated = arena_alloc(arena, rows * size, sizeof(float));
    if (!gate_up || !gated) return 0;
    multiply(part->gate_up, gate_up, x, NULL, rows);
    scale_columns(gate_up, part->scales, rows, part->gate_up->out_features);
    gate(gated, gate_up, part->activation, rows, size);
    multiply(part->down, out, gated, residual, rows);
    return 1;
}

/* The highest score, or the sum of the two highest. */
static float sum_of_highest(const float *scores, int64_t size, int64_t count) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < size; i++) {
        if (scores[i] > first) {
            second = first;
            first = scores[i];
        } else if (scores[i] > second) {
            second = scores[i];
        }
    }
    return count == 1 ? first : first + second;
}

/* Makes scores of experts less than any other, unless their group is among those with the highest sums; of equal ones
 * the first are. */
static void leave_groups(const Experts *part, float *wanted, float *sums) {
    const int64_t size = part->num_experts / part->num_groups;
    for (int64_t group = 0; group < part->num_groups; group++)
        sums[group] = sum_of_highest(wanted + group * size, size, part->num_summed);
    for (int64_t group = 0; group < part->num_groups; group++) {
        int64_t before = 0;
        for (int64_t i = 0; i < part->num_groups; i++)
            before += sums[i] > sums[group] || (sums[i] == sums[group] && i < group);
        for (int64_t i = 0; before >= part->num_chosen_groups && i < size; i++) wanted[group * size + i] = -INFINITY;
    }
}

/* A row's experts in ascending order, and their weights. Of experts with the same score the first are chosen; also of
 * scores that are no numbers there are as many as always. ``scores`` has room for three numbers of each expert. */
static void choose(const Experts *part, int64_t *chosen, float *weights, const float *numbers, float *scores) {
    const int64_t num_experts = part->num_experts, num_chosen = part->num_chosen;
    float *wanted = scores + num_experts;
    if (part->scoring == SOFTMAX) {
        float highest = numbers[0], sum = 0.0f;
        for (int64_t i = 1; i < num_experts; i++) highest = numbers[i] > highest ? numbers[i] : highest;
        for (int64_t i = 0; i < num_experts; i++) sum += scores[i] = expf(numbers[i] - highest);
        for (int64_t i = 0; i < num_experts; i++) scores[i] /= sum;
    } else {
        for (int64_t i = 0; i < num_experts; i++) scores[i] = 1.0f / (1.0f + expf(-numbers[i]));
    }
    for (int64_t i = 0; i < num_experts; i++)
        wanted[i] = part->choice_bias ? scores[i] + part->choice_bias[i] : scores[i];
    if (part->num_groups) leave_groups(part, wanted, wanted + num_experts);
    for (int64_t n = 0; n < num_chosen; n++) {
        int64_t best = -1, at = 0;
        float most = 0.0f;
        for (int64_t i = 0, taken = 0; i < num_experts; i++) {
            if (taken < n && chosen[taken] == i) {
                taken++;
                continue;
            }
            if (best < 0 || wanted[i] > most) {
                best = i;
                most = wanted[i];
                at = taken;
            }
        }
        memmove(chosen + at + 1, chosen + at, (n - at) * sizeof(int64_t));
        chosen[at] = best;
    }
    float sum = 0.0f;
    for (int64_t n = 0; n < num_chosen; n++) sum += weights[n] = scores[chosen[n]];
    const float factor = part->renormalises ? part->multiplier / (sum + part->added_to_sum) : part->multiplier;
    for (int64_t n = 0; n < num_chosen; n++)
        weights[n] *= part->expert_scales ? factor * part->expert_scales[chosen[n]] : factor;
}

/* Rows [rows, size] that an expert computes, from ``x``, or to ``x`` with the weights of each. */
typedef struct {
    float *to;
    const float *from, *weights;
    const int64_t *places;        /* of each row: row * num_chosen + number among its experts */
    int64_t size, num_chosen;
} Rows;

static void gather_task(const void *arguments, int64_t item) {
    const Rows *rows = arguments;
    const int64_t row = rows->places[item] / rows->num_chosen;
    memcpy(rows->to + item * rows->size, rows->from + row * rows->size, rows->size * sizeof(float));
}

static void scatter_task(const void *arguments, int64_t item) {
    const Rows *rows = arguments;
    const float weight = rows->weights[rows->places[item]], *from = rows->from + item * rows->size;
    float *to = rows->to + rows->places[item] / rows->num_chosen * rows->size;
    for (int64_t i = 0; i < rows->size; i++) to[i] += from[i] * weight;
}

/* The shared expert's rows, each by the sigmoid of its gate's number, unless that is NULL; and the residual or NULL. */
typedef struct {
    float *out;
    const float *found, *shared, *gates, *residual;
    int64_t size;
} Sum;

static void sum_task(const void *arguments, int64_t row) {
    const Sum *sum = arguments;
    const int64_t at = row * sum->size;
    const float factor = sum->gates ? 1.0f / (1.0f + expf(-sum->gates[row])) : 1.0f;
    for (int64_t i = at; i < at + sum->size; i++) {
        float value = sum->found[i];
        if (sum->shared) value += sum->shared[i] * factor;
        sum->out[i] = sum->residual ? sum->residual[i] + value : value; /* at the very last: it may be the residual */
    }
}

int64_t experts_bytes(const Experts *part, int64_t rows) {
    const int64_t size = part->router->in_features, num_experts = part->num_experts, places = rows * part->num_chosen;
    const int64_t shared = part->shared ? gated_mlp_bytes(part->shared, rows) : 0;
    const int64_t of_expert = gated_mlp_bytes(part->experts, rows);
    return arena_size(rows * num_experts, sizeof(float)) + arena_size(3 * num_experts, sizeof(float))
        + arena_size(num_experts + 1, sizeof(int64_t)) + 2 * arena_size(places, sizeof(int64_t))
        + arena_size(places, sizeof(float)) + 3 * arena_size(rows * size, sizeof(float))
        + arena_size(rows, sizeof(float)) + (shared > of_expert ? shared : of_expert);
}

/* out [rows, hidden size] = the experts' outputs for x, plus residual or NULL, which may be out itself; so may x. The
 * router gets ``routed``, which may be x. */
int run_experts(const Experts *part, float *out, const float *x, const float *routed, const float *residual,
                int64_t rows, Arena *arena) {
    const int64_t size = part->router->in_features, num_experts = part->num_experts, num_chosen = part->num_chosen;
    const int64_t num_places = rows * num_chosen;
    float *numbers = arena_alloc(arena, rows * num_experts, sizeof(float));
    float *scores = arena_alloc(arena, 3 * num_experts, sizeof(float));
    int64_t *first = arena_alloc(arena, num_experts + 1, sizeof(int64_t));
    int64_t *chosen = arena_alloc(arena, num_places, sizeof(int64_t));
    int64_t *places = arena_alloc(arena, num_places, sizeof(int64_t));
    float *weights = arena_alloc(arena, num_places, sizeof(float));
    float *inputs = arena_alloc(arena, rows * size, sizeof(float));
    float *outputs = arena_alloc(arena, rows * size, sizeof(float));
    float *found = arena_alloc(arena, rows * size, sizeof(float));
    float *gates = arena_alloc(arena, rows, sizeof(float));
    if (!gates) return 0;
    multiply(part->router, numbers, routed, NULL, rows);
    memset(first, 0, (num_experts + 1) * sizeof(int64_t));
    for (int64_t row = 0; row < rows; row++)
        choose(part, chosen + row * num_chosen, weights + row * num_chosen, numbers + row * num_experts, scores);
    for (int64_t place = 0; place < num_places; place++) first[chosen[place] + 1]++;
    for (int64_t i = 0; i < num_experts; i++) first[i + 1] += first[i];
    for (int64_t place = 0; place < num_places; place++) places[first[chosen[place]]++] = place;
    memset(found, 0, rows * size * sizeof(float));
    part->touched[1]++;
    const size_t used = arena->used;
    /* By now an expert's first place is where the one before it ends. */
    for (int64_t i = 0; i < num_experts; i++, arena->used = used) {
        const int64_t begin = i ? first[i - 1] : 0, count = first[i] - begin, work = count * size;
        if (!count) continue;
        part->touched[0]++;
        run_task(gather_task, &(Rows){ inputs, x, weights, places + begin, size, num_chosen }, count, work);
        if (!run_gated_mlp(&part->experts[i], outputs, inputs, NULL, count, arena)) return 0;
        run_task(scatter_task, &(Rows){ found, outputs, weights, places + begin, size, num_chosen }, count, work * 2);
    }
    if (part->shared && !run_gated_mlp(part->shared, outputs, x, NULL, rows, arena)) return 0;
    if (part->shared_gate) multiply(part->shared_gate, gates, x, NULL, rows);
    const Sum sum = { out, found, part->shared ? outputs : NULL, part->shared_gate ? gates : NULL, residual, size };
    run_task(sum_task, &sum, rows, rows * size * 2);
    return 1;
}

/* ``run_experts`` with memory of its own; 0 if there is none. */
int64_t mix_experts(const Experts *part, float *out, const float *x, const float *routed, const float *residual,
                    int64_t rows) {
    static _Thread_local Arena arena;
    return arena_reserve(&arena, experts_bytes(part, rows))
        && run_experts(part, out, x, routed, residual, rows, &arena);
}

int64_t dense_and_experts_bytes(const DenseAndExperts *part, int64_t rows) {
    const int64_t dense = gated_mlp_bytes(part->dense, rows), experts = experts_bytes(part->experts, rows);
    return 4 * arena_size(rows * part->dense->gate_up->in_features, sizeof(float)) + (dense > experts ? dense : experts);
}

/* out [rows, hidden size] = both outputs for x, plus residual or NULL, which may be out itself; so may x. */
int run_dense_and_experts(const DenseAndExperts *part, float *out, const float *x, const float *residual, int64_t rows,
                          Arena *arena) {
    const int64_t size = part->dense->gate_up->in_features;
    const float eps = part->norm_eps;
    float *normed = arena_alloc(arena, rows * size, sizeof(float));
    float *routed = arena_alloc(arena, rows * size, sizeof(float));
    float *dense = arena_alloc(arena, rows * size, sizeof(float));
    float *found = arena_alloc(arena, rows * size, sizeof(float));
    if (!found) return 0;
    const size_t used = arena->used;
    rms_norm(normed, x, part->dense_norm, NULL, rows, size, eps);
    if (!run_gated_mlp(part->dense, dense, normed, NULL, rows, arena)) return 0;
    arena->used = used;
    rms_norm(routed, x, part->router_norm, NULL, rows, size, eps);
    rms_norm(normed, x, part->experts_norm, NULL, rows, size, eps);
    if (!run_experts(part->experts, found, normed, routed, NULL, rows, arena)) return 0;
    rms_norm(dense, dense, part->dense_post_norm, NULL, rows, size, eps);
    rms_norm(found, found, part->experts_post_norm, dense, rows, size, eps);
    for (int64_t i = 0; i < rows * size; i++) out[i] = residual ? residual[i] + found[i] : found[i];
    return 1;
}
