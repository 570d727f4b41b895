/* Quantised weights: blocks as GGUF files have them, and panels of 32 output columns as they are multiplied.
 *
 * A panel is read from end to end, one stream for the processor to fetch ahead of. Per 32 inputs it has the
 * columns' codes, four inputs of each column side by side, then the scales; per 256 inputs, before those, what they
 * share. The low four bits of codes (two of Q2_K's and Q3_K's) share bytes with those of the next four inputs (twelve);
 * then come the bits above those, of 32 or 16 inputs in a byte for each column and number within four.
 */

#ifndef TRUEDRAFT_QUANTISED_BLOCKS_H
#define TRUEDRAFT_QUANTISED_BLOCKS_H

#include <stdint.h>

#include "shared.h"

enum { BLOCK = 32, BLOCKS_PER_SUPER = 8, GROUP = 4, GROUP_BYTES = COLUMNS * GROUP };

/* SCALE: float16 of each column and block. SCALE_MIN: and float16 to add. POWER: a power of two, by its exponent in 8
 * bits. SUPER: scale and minimum in 8 bits each, times float16 of 256 inputs. SUPER_SIGNED: scale in 8 bits, times
 * float16 of 256 inputs. SUPER_HALF: scales in 8 bits of 16 inputs, times float16 of 256. SUPER_HALF_MIN: scale and
 * minimum in 4 bits each of 16 inputs, times float16 of 256. */
typedef enum { SCALE, SCALE_MIN, POWER, SUPER, SUPER_SIGNED, SUPER_HALF, SUPER_HALF_MIN } Scaling;

/* Bits of a code as it is stored. */
static inline __attribute__((always_inline)) int code_bits(int64_t type) {
    switch (type) {
        case Q2_K: return 2;
        case Q3_K: return 3;
        case Q5_0: case Q5_1: case Q5_K: return 5;
        case Q6_K: return 6;
        case Q8_0: return 8;
        default: return 4;
    }
}

/* How many of them are in the bytes that come first. */
static inline __attribute__((always_inline)) int low_bits(int bits) { return bits < 4 ? 2 : bits < 8 ? 4 : 8; }

static inline __attribute__((always_inline)) Scaling scaling_of(int64_t type) {
    switch (type) {
        case Q4_1: case Q5_1: return SCALE_MIN;
        case MXFP4: return POWER;
        case Q4_K: case Q5_K: return SUPER;
        case IQ4_XS: return SUPER_SIGNED;
        case Q3_K: case Q6_K: return SUPER_HALF;
        case Q2_K: return SUPER_HALF_MIN;
        default: return SCALE;
    }
}

/* Scales of a column in a block. */
static inline __attribute__((always_inline)) int num_scales(Scaling scaling) {
    return scaling == SUPER_HALF || scaling == SUPER_HALF_MIN ? 2 : 1;
}

/* Codes are weights divided by their scale plus this. */
static inline __attribute__((always_inline)) int code_offset(int64_t type) {
    switch (type) {
        case Q3_K: return 4;
        case Q4_0: return 8;
        case MXFP4: return 12;
        case Q5_0: return 16;
        case Q6_K: return 32;
        case Q8_0: case IQ4_NL: case IQ4_XS: return 128;
        default: return 0;
    }
}

/* The codes that stored ones stand for, by their number; NULL where those are the codes. */
static inline __attribute__((always_inline)) const uint8_t *code_book(int64_t type) {
    static const uint8_t levels[16] = { 1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241 };
    static const uint8_t floats[16] = { 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0 };
    return type == MXFP4 ? floats : type == IQ4_NL || type == IQ4_XS ? levels : 0;
}

/* Codes of these types need all eight bits, whatever is stored. */
static inline __attribute__((always_inline)) int has_byte_codes(int64_t type) { return code_offset(type) == 128; }

/* Bytes in a panel: of the codes of a block, of its scales, of what 8 blocks share. */
static inline __attribute__((always_inline)) int64_t code_bytes(int bits) { return bits * BLOCK * COLUMNS / 8; }
static inline __attribute__((always_inline)) int64_t scale_bytes(Scaling scaling) {
    switch (scaling) {
        case POWER: case SUPER_SIGNED: return COLUMNS;
        case SCALE_MIN: return 4 * COLUMNS;
        default: return 2 * COLUMNS;
    }
}
static inline __attribute__((always_inline)) int has_super_min(Scaling scaling) {
    return scaling == SUPER || scaling == SUPER_HALF_MIN;
}
static inline __attribute__((always_inline)) int64_t super_bytes(Scaling scaling) {
    return scaling < SUPER ? 0 : has_super_min(scaling) ? 4 * COLUMNS : 2 * COLUMNS;
}

#endif
