/* What a layer does between its matrix products, for a few float32 rows on a CPU.
 *
 * torch spends a microsecond or more on starting each small operation, and a layer has some forty of them.
 * Here they are three calls: a norm, everything from rotary embedding to attention ("attention.c"), a gated activation.
 *
 * All arrays are float32 and row-major. "library.py" compiles this file and declares what it is called with.
 */

#include "kernels.h"
#include "vectors.h"

/* One row of ``rms_norm``. */
void norm_row(float *out, const float *x, const float *weight, const float *residual, int64_t size, float eps) {
    float sum = 0.0f;
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / (float)size + eps);
    if (residual) {
        for (int64_t i = 0; i < size; i++) out[i] = residual[i] + x[i] * scale * weight[i];
    } else {
        for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
    }
}

typedef struct {
    float *out;
    const float *x, *weight, *residual;
    int64_t size;
    float eps;
} Norm;

static void norm_task(const void *arguments, int64_t row) {
    const Norm *norm = arguments;
    const int64_t at = row * norm->size;
    const float *residual = norm->residual ? norm->residual + at : NULL;
    norm_row(norm->out + at, norm->x + at, norm->weight, residual, norm->size, norm->eps);
}

/* RMSNorm (arXiv 1910.07467) of rows [rows, size], plus the residual unless that is NULL; it may be out. */
void rms_norm(float *out, const float *x, const float *weight, const float *residual, int64_t rows, int64_t size,
              float eps) {
    run_task(norm_task, &(Norm){ out, x, weight, residual, size, eps }, rows, rows * size * 4);
}

typedef struct {
    float *out;
    const float *x;
    int64_t size;
} Centre;

static void centre_task(const void *arguments, int64_t row) {
    const Centre *task = arguments;
    const float *x = task->x + row * task->size;
    float *out = task->out + row * task->size, sum = 0.0f;
    for (int64_t i = 0; i < task->size; i++) sum += x[i];
    const float mean = sum / (float)task->size;
    for (int64_t i = 0; i < task->size; i++) out[i] = x[i] - mean;
}

/* out [rows, size] = x less the mean of its row, which makes LayerNorm (arXiv 1607.06450) of RMSNorm; it may be x. */
void centre(float *out, const float *x, int64_t rows, int64_t size) {
    run_task(centre_task, &(Centre){ out, x, size }, rows, rows * size * 2);
}

typedef struct {
    float *out;
    const float *x, *weight, *bias;
    int64_t size;
    float eps;
} WholeNorm;

static void layer_norm_task(const void *arguments, int64_t row) {
    const WholeNorm *norm = arguments;
    const int64_t size = norm->size;
    const float *x = norm->x + row * size;
    float *out = norm->out + row * size, sum = 0.0f, squares = 0.0f;
    for (int64_t i = 0; i < size; i++) sum += x[i];
    const float mean = sum / (float)size;
    for (int64_t i = 0; i < size; i++) squares += (x[i] - mean) * (x[i] - mean);
    const float scale = 1.0f / sqrtf(squares / (float)size + norm->eps);
    for (int64_t i = 0; i < size; i++) out[i] = (x[i] - mean) * scale * norm->weight[i] + norm->bias[i];
}

/* LayerNorm (arXiv 1607.06450) of rows [rows, size] with a bias; it may be x. */
void layer_norm(float *out, const float *x, const float *weight, const float *bias, int64_t rows, int64_t size,
                float eps) {
    run_task(layer_norm_task, &(WholeNorm){ out, x, weight, bias, size, eps }, rows, rows * size * 6);
}

/* x times the probability that a normal number is less (arXiv 1606.08415): the share above |x| has an error of 1e-7
 * (Abramowitz and Stegun, 7.1.26). */
static inline float gelu(float x) {
    const float size = fabsf(x) * 0.707106781f, t = 1.0f / (1.0f + 0.3275911f * size);
    const float p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const float above = 0.5f * p * fast_exp(-size * size);
    return x * (x > 0.0f ? 1.0f - above : above);
}

/* What is no number stays none. */
static inline float clamp(float x, float least, float most) { return x > most ? most : x < least ? least : x; }

typedef struct {
    float *out;
    const float *gate_up;
    int64_t activation, size;
} Gate;

static void gate_task(const void *arguments, int64_t row) {
    const Gate *task = arguments;
    const int64_t size = task->size;
    const int is_lone = task->activation == RELU2 || task->activation == LONE_GELU;
    const float *gate = task->gate_up + row * (is_lone ? 1 : 2) * size, *up = gate + size;
    float *out = task->out + row * size;
    if (task->activation == RELU2) {
        for (int64_t i = 0; i < size; i++) out[i] = gate[i] < 0.0f ? 0.0f : gate[i] * gate[i];
    } else if (task->activation == LONE_GELU) {
        for (int64_t i = 0; i < size; i++) out[i] = gelu(gate[i]);
    } else if (task->activation == GELU) {
        for (int64_t i = 0; i < size; i++) out[i] = gelu(gate[i]) * up[i];
    } else if (task->activation == SILU) {
        for (int64_t i = 0; i < size; i++) out[i] = silu(gate[i]) * up[i];
    } else if (task->activation == CLAMPED_SWISH) {
        for (int64_t i = 0; i < size; i++) {
            const float x = clamp(gate[i], -INFINITY, SWISH_LIMIT), y = clamp(up[i], -SWISH_LIMIT, SWISH_LIMIT);
            out[i] = x / (1.0f + fast_exp(-SWISH_SLOPE * x)) * (y + 1.0f);
        }
    } else {
        /* 1 + tanh(u) is 2 / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3). */
        for (int64_t i = 0; i < size; i++) {
            const float x = gate[i], twice = 1.59576912f * (x + 0.044715f * x * x * x);
            out[i] = x / (1.0f + fast_exp(-twice)) * up[i];
        }
    }
}

/* out [rows, size] = activation(gate) * up of gate_up [rows, 2 * size]; RELU2 and LONE_GELU have nothing else than
 * [rows, size]. */
void gate(float *out, const float *gate_up, int64_t activation, int64_t rows, int64_t size) {
    run_task(gate_task, &(Gate){ out, gate_up, activation, size }, rows, rows * size * 16);
}

typedef struct {
    float *x;
    const float *scales;
    int64_t size;
} Scale;

static void scale_task(const void *arguments, int64_t row) {
    const Scale *task = arguments;
    float *x = task->x + row * task->size;
    for (int64_t i = 0; i < task->size; i++) x[i] *= task->scales[i];
}

/* Multiplies each of x [rows, size] by the scale of its column; nothing if scales is NULL. */
void scale_columns(float *x, const float *scales, int64_t rows, int64_t size) {
    if (scales) run_task(scale_task, &(Scale){ x, scales, size }, rows, rows * size);
}

/* One row of ``cap``. */
void cap_row(float *x, int64_t size, float softcap) {
    for (int64_t i = 0; i < size; i++)
        x[i] = softcap - 2.0f * softcap / (1.0f + fast_exp(2.0f / softcap * x[i])); /* c tanh(x / c) */
}

typedef struct {
    float *x;
    int64_t size;
    float softcap;
} Cap;

static void cap_task(const void *arguments, int64_t row) {
    const Cap *task = arguments;
    cap_row(task->x + row * task->size, task->size, task->softcap);
}

/* Soft cap (arXiv 2408.00118) of rows [rows, size]. */
void cap(float *x, int64_t rows, int64_t size, float softcap) {
    run_task(cap_task, &(Cap){ x, size, softcap }, rows, rows * size * 16);
}
