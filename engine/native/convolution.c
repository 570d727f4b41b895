/* Causal convolutions of each channel by itself, over the newest tokens of a sequence.
 *
 * Inputs of tokens that are stored come from a ring by position. A sum begins with its oldest token, whatever comes in a
 * pass together with it.
 */

#if defined(__clang__)
#pragma clang fp reassociate(off)
#else
#pragma GCC optimize("no-associative-math")
#endif

#include "kernels.h"
#include "vectors.h"

/* Channels of an item of work, and tokens that it takes at a time. */
#define CHANNELS 128
#define TOKENS 32

/* Which columns of x [tokens, size] come in, and what becomes of the sums. */
typedef struct {
    const Spans *spans;
    const Convolution *layer;
    const float *x;
    int64_t size, first;          /* the first column that comes in */
    int64_t factor, gate;         /* columns that inputs and sums are multiplied by; -1: by none */
    float *out;                   /* [tokens, out_size], from its first column on */
    int64_t out_size;
} Convolving;

/* A token's inputs, from ``channel`` on. */
static inline ALWAYS void take(float *to, const Convolving *task, int64_t token, int64_t channel, int64_t count) {
    const float *row = task->x + token * task->size + channel, *from = row + task->first, *factor = row + task->factor;
    if (task->factor < 0) memcpy(to, from, count * sizeof(float));
    else for (int64_t i = 0; i < count; i++) to[i] = factor[i] * from[i];
}

/* The sums of one token, whose window [width, CHANNELS] ends with it. */
static inline ALWAYS void sum_window(const Convolving *task, int64_t token, int64_t channel, int64_t count,
                                     const float *window) {
    const Convolution *layer = task->layer;
    float *out = task->out + token * task->out_size + channel;
    const float *gate = task->x + token * task->size + channel + task->gate;
    int64_t i = 0;
    for (; count - i >= LANES; i += LANES) {
        vec sum = { 0 };
        if (layer->bias) sum = *(const vec *)(layer->bias + channel + i);
        for (int64_t j = 0; j < layer->width; j++) {
            const vec weight = *(const vec *)(layer->weight + j * layer->channels + channel + i);
            sum = multiply_add(weight, *(const vec *)(window + j * CHANNELS + i), sum);
        }
        if (task->gate >= 0) sum *= *(const vec *)(gate + i);
        *(vec *)(out + i) = sum;
    }
    for (; i < count; i++) {
        float sum = layer->bias ? layer->bias[channel + i] : 0.0f;
        for (int64_t j = 0; j < layer->width; j++)
            sum = fmaf(layer->weight[j * layer->channels + channel + i], window[j * CHANNELS + i], sum);
        out[i] = task->gate >= 0 ? sum * gate[i] : sum;
    }
    if (layer->silu)
        for (i = 0; i < count; i++) out[i] = silu(out[i]);
}

static void convolve_task(const void *arguments, int64_t item) {
    const Convolving *task = arguments;
    const Spans *spans = task->spans;
    const Convolution *layer = task->layer;
    const int64_t span = item % spans->num_spans, channel = item / spans->num_spans * CHANNELS;
    const int64_t left = layer->channels - channel, count = left < CHANNELS ? left : CHANNELS;
    const int64_t kept = layer->num_inputs, past = layer->width - 1, stored = spans->num_stored[span];
    const int64_t first = spans->first_token[span], num_tokens = spans->first_token[span + 1] - first;
    float *inputs = layer->inputs + spans->state_slot[span] * kept * layer->channels + channel;
    float window[past + TOKENS][CHANNELS];
    for (int64_t i = 0; i < past; i++) {
        const int64_t position = stored - past + i;
        if (position < 0) memset(window[i], 0, sizeof *window);
        else memcpy(window[i], inputs + position % kept * layer->channels, count * sizeof(float));
    }
    for (int64_t done = 0; done < num_tokens; done += TOKENS) {
        const int64_t few = num_tokens - done < TOKENS ? num_tokens - done : TOKENS;
        for (int64_t i = 0; i < few; i++) {
            take(window[past + i], task, first + done + i, channel, count);
            float *to = inputs + (stored + done + i) % kept * layer->channels;
            memcpy(to, window[past + i], count * sizeof(float));
        }
        for (int64_t i = 0; i < few; i++) sum_window(task, first + done + i, channel, count, window[i]);
        if (past) memmove(window[0], window[few], past * sizeof *window);
    }
}

static void run(const Convolving *task) {
    const int64_t num_parts = (task->layer->channels + CHANNELS - 1) / CHANNELS;
    run_task(convolve_task, task, task->spans->num_spans * num_parts,
             task->spans->num_tokens * task->layer->channels * (task->layer->width + 8));
}

/* Convolves the columns of x [tokens, size] from ``first`` on, in place. */
void convolve(const Spans *spans, const Convolution *layer, float *x, int64_t size, int64_t first) {
    run(&(Convolving){ spans, layer, x, size, first, -1, -1, x + first, size });
}

/* out [tokens, channels] = C convolution(B x) of rows [B | C | x]. */
void convolve_gated(const Spans *spans, const Convolution *layer, const float *x, float *out) {
    const int64_t size = layer->channels;
    run(&(Convolving){ spans, layer, x, 3 * size, 2 * size, 0, size, out, size });
}
