/* A head's states, made of what layers of its target know of a token. All arrays are row-major. */

#include <string.h>

#include "kernels.h"

/* Normalises each tap of each row by itself; ``out`` may be ``x``. */
static void norm_taps(const Fusion *fusion, float *out, const float *x, int64_t rows) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t tap = 0; tap < fusion->num_taps; tap++) {
            const int64_t first = (row * fusion->num_taps + tap) * fusion->tap_size;
            norm_row(out + first, x + first, fusion->tap_norms + tap * fusion->tap_size, NULL, fusion->tap_size,
                     fusion->tap_norm_eps);
        }
}

/* states [rows, size] of tapped [rows, num_taps, tap_size]. 0 if there is no memory. */
int64_t fuse(const Fusion *fusion, float *states, const float *tapped, int64_t rows) {
    static _Thread_local Arena arena;
    const int64_t width = fusion->num_taps * fusion->tap_size;
    if (!arena_reserve(&arena, arena_size(rows * width, sizeof(float)))) return 0;
    float *normed = arena_alloc(&arena, rows * width, sizeof(float));
    if (fusion->joint_norm) {
        rms_norm(normed, tapped, fusion->joint_norm, NULL, rows, width, fusion->joint_norm_eps);
        tapped = normed;
    }
    if (fusion->tap_norms) {
        norm_taps(fusion, normed, tapped, rows);
        tapped = normed;
    }
    if (fusion->combine) multiply(fusion->combine, states, tapped, NULL, rows);
    else memcpy(states, tapped, rows * width * sizeof(float));
    return 1;
}
