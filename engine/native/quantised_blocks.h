/* Quantised weights: blocks as GGUF files have them, and panels of 32 output columns as they are multiplied.
 *
 * A panel is read from end to end, one stream for the processor to fetch ahead of. Per 32 inputs it has the
 * columns' codes, four inputs of each column side by side, then the scales; per 256 inputs, before those, what they
 * share. Codes of four bits share bytes with those of the next four inputs; then come the fifth and sixth bits, those
 * of 32 or 16 inputs in a byte for each column and number within four.
 */

#ifndef TRUEDRAFT_QUANTISED_BLOCKS_H
#define TRUEDRAFT_QUANTISED_BLOCKS_H

#include <stdint.h>

/* As ggml numbers them. */
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

enum { COLUMNS = 32, BLOCK = 32, BLOCKS_PER_SUPER = 8, GROUP = 4, GROUP_BYTES = COLUMNS * GROUP };

/* SCALE: float16 of each column and block. SCALE_MIN: and float16 to add. SUPER: scale and minimum in 8 bits each,
 * times float16 of 256 inputs. SUPER_HALF: scales in 8 bits of 16 inputs, times float16 of 256. */
typedef enum { SCALE, SCALE_MIN, SUPER, SUPER_HALF } Scaling;

static inline __attribute__((always_inline)) int code_bits(int64_t type) {
    switch (type) {
        case Q4_0: case Q4_1: case Q4_K: return 4;
        case Q5_0: case Q5_1: case Q5_K: return 5;
        case Q6_K: return 6;
        default: return 8;
    }
}

static inline __attribute__((always_inline)) Scaling scaling_of(int64_t type) {
    switch (type) {
        case Q4_1: case Q5_1: return SCALE_MIN;
        case Q4_K: case Q5_K: return SUPER;
        case Q6_K: return SUPER_HALF;
        default: return SCALE;
    }
}

/* Codes are weights divided by their scale plus this. */
static inline __attribute__((always_inline)) int code_offset(int64_t type) {
    switch (type) {
        case Q4_0: return 8;
        case Q5_0: return 16;
        case Q6_K: return 32;
        case Q8_0: return 128;
        default: return 0;
    }
}

/* Bytes in a panel: of the codes of a block, of its scales, of what 8 blocks share. */
static inline __attribute__((always_inline)) int64_t code_bytes(int bits) { return bits * BLOCK * COLUMNS / 8; }
static inline __attribute__((always_inline)) int64_t scale_bytes(Scaling scaling) {
    return scaling == SCALE_MIN ? 4 * COLUMNS : 2 * COLUMNS;
}
static inline __attribute__((always_inline)) int64_t super_bytes(Scaling scaling) {
    return scaling == SUPER ? 4 * COLUMNS : scaling == SUPER_HALF ? 2 * COLUMNS : 0;
}

#endif
