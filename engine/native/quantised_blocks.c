/* Quantised weights of GGUF files: to float32, bit for bit as the package gguf has it, and to panels ("quantised_blocks.h").
 *
 * "quantised.py" calls this.
 */

/* Products and sums are rounded one by one, as numpy does. */
#if defined(__clang__)
#pragma clang fp contract(off) reassociate(off)
#else
#pragma GCC optimize("no-associative-math", "fp-contract=off")
#endif

#include "kernels.h"
#include "quantised_blocks.h"
#include "vectors.h"

static inline float half_at(const uint8_t *at) {
    _Float16 half;
    memcpy(&half, at, sizeof half);
    return (float)half;
}

/* Bytes of a block in a file, which holds 32 or 256 weights. */
static int64_t block_bytes(int64_t type) {
    switch (type) {
        case Q4_0: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case IQ4_NL: return 18;
        case MXFP4: return 17;
        case Q2_K: return 84;
        case Q3_K: return 110;
        case IQ4_XS: return 136;
        case Q4_K: return 144;
        case Q5_K: return 176;
        case Q6_K: return 210;
        default: return 34;
    }
}

/* Scale and minimum number ``i`` of 8, of six bits each in 12 bytes. */
static inline void six_bits(const uint8_t *packed, int i, uint8_t *scale, uint8_t *min) {
    if (i < 4) {
        *scale = packed[i] & 63;
        *min = packed[4 + i] & 63;
    } else {
        *scale = (packed[4 + i] & 15) | (packed[i - 4] >> 2 & 48);
        *min = packed[4 + i] >> 4 | (packed[i] >> 2 & 48);
    }
}

/* What is multiplied with the codes of half ``half`` of part ``part`` of 8 of a super-block, and with its scale. */
static inline int signed_scale(int64_t type, const uint8_t *block, int part, int half) {
    if (type == Q6_K) return (int8_t)block[192 + 2 * part + half];
    if (type == IQ4_XS) {
        const int low = block[4 + part / 2] >> part % 2 * 4 & 15, high = block[2 + part / 4] >> part % 4 * 2 & 3;
        return (low | high << 4) - 32;
    }
    const uint8_t *packed = block + 96; /* Q3_K */
    const int i = 2 * part + half;
    return ((packed[i % 8] >> i / 8 * 4 & 15) | (packed[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
}

/* Where the float16 scale of a super-block is; its minimum comes after it. */
static inline const uint8_t *super_scale_of(int64_t type, const uint8_t *block) {
    return block + (type == Q6_K ? 208 : type == Q3_K ? 108 : type == Q2_K ? 80 : 0);
}

/* 2 ** (exponent - 128), which is subnormal at 0 and 1. */
static inline float power_of_two(uint8_t exponent) {
    const uint32_t bits = exponent < 2 ? 0x200000u << exponent : (exponent - 1u) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* Where block ``index`` of 32 is: the start of the block in the file that it is in. */
static inline const uint8_t *find_block(int64_t type, const uint8_t *row, int64_t index) {
    const int is_super = super_bytes(scaling_of(type)) > 0;
    return row + (is_super ? index / BLOCKS_PER_SUPER : index) * block_bytes(type);
}

/* The 32 codes of block ``index`` of a row, as they are stored. */
static void unpack(int64_t type, uint8_t *codes, const uint8_t *row, int64_t index) {
    const uint8_t *block = find_block(type, row, index);
    const int part = index % BLOCKS_PER_SUPER, is_odd = part & 1;
    uint32_t high = 0;
    switch (type) {
        case Q4_0: case Q4_1: case Q5_0: case Q5_1: case IQ4_NL: case IQ4_XS: case MXFP4: {
            const uint8_t *at = block + (type == Q4_1 || type == Q5_1 ? 4 : type == MXFP4 ? 1 : 2);
            if (type == IQ4_XS) at = block + 8 + part * 16;
            if (type == Q5_0 || type == Q5_1) {
                memcpy(&high, at, sizeof high);
                at += sizeof high;
            }
            for (int i = 0; i < BLOCK; i++)
                codes[i] = (i < 16 ? at[i] & 15 : at[i - 16] >> 4) | (high >> i & 1) << 4;
            break;
        }
        case Q2_K: case Q3_K: {
            const uint8_t *low = block + (type == Q2_K ? 16 : 32) + part / 4 * BLOCK;
            for (int i = 0; i < BLOCK; i++) {
                codes[i] = low[i] >> part % 4 * 2 & 3;
                if (type == Q3_K) codes[i] |= (block[i] >> part & 1) << 2;
            }
            break;
        }
        case Q4_K: case Q5_K: {
            const uint8_t *at = block + (type == Q4_K ? 16 : 48) + part / 2 * BLOCK;
            for (int i = 0; i < BLOCK; i++) {
                codes[i] = is_odd ? at[i] >> 4 : at[i] & 15;
                if (type == Q5_K) codes[i] |= (block[16 + i] >> part & 1) << 4;
            }
            break;
        }
        case Q6_K: {
            const int half = part / 4, quarter = part % 4;
            const uint8_t *low = block + half * 64 + quarter % 2 * BLOCK, *top = block + 128 + half * BLOCK;
            for (int i = 0; i < BLOCK; i++)
                codes[i] = (quarter / 2 ? low[i] >> 4 : low[i] & 15) | (top[i] >> 2 * quarter & 3) << 4;
            break;
        }
        default:
            for (int i = 0; i < BLOCK; i++) codes[i] = block[2 + i] ^ 128;
    }
}

/* ``size`` weights, a multiple of what a block holds. */
void dequantise(int64_t type, float *to, const uint8_t *blocks, int64_t size) {
    const Scaling scaling = scaling_of(type);
    const int offset = code_offset(type), has_min = has_super_min(scaling) || scaling == SCALE_MIN;
    const uint8_t *book = code_book(type);
    for (int64_t index = 0; index < size / BLOCK; index++, to += BLOCK) {
        const uint8_t *block = find_block(type, blocks, index);
        const int part = index % BLOCKS_PER_SUPER;
        uint8_t codes[BLOCK];
        unpack(type, codes, blocks, index);
        float factor[2], min[2] = { 0 }; /* of 16 weights each */
        for (int half = 0; half < 2; half++) {
            if (scaling == SUPER) {
                uint8_t scale, less;
                six_bits(block + 4, part, &scale, &less);
                factor[half] = half_at(block) * (float)scale;
                min[half] = half_at(block + 2) * (float)less;
            } else if (scaling == SUPER_HALF_MIN) {
                const uint8_t both = block[2 * part + half], *shared = super_scale_of(type, block);
                factor[half] = half_at(shared) * (float)(both & 15);
                min[half] = half_at(shared + 2) * (float)(both >> 4);
            } else if (super_bytes(scaling)) {
                factor[half] = half_at(super_scale_of(type, block)) * (float)signed_scale(type, block, part, half);
            } else {
                factor[half] = scaling == POWER ? power_of_two(*block) : half_at(block);
                if (scaling == SCALE_MIN) min[half] = -half_at(block + 2);
            }
        }
        for (int i = 0; i < BLOCK; i++) {
            const float product = factor[i / 16] * (float)((book ? book[codes[i]] : codes[i]) - offset);
            to[i] = has_min ? product - min[i / 16] : product;
        }
    }
}

typedef struct {
    int64_t type;
    float *to;
    const uint8_t *blocks;
    const int64_t *rows;
    int64_t size;
} Rows;

static void dequantise_task(const void *arguments, int64_t i) {
    const Rows *task = arguments;
    dequantise(task->type, task->to + i * task->size, task->blocks + task->rows[i] * row_bytes(task->type, task->size), task->size);
}

/* to [count, size]: the rows of that number; blocks [rows, size]. */
void dequantise_rows(int64_t type, float *to, const uint8_t *blocks, const int64_t *rows, int64_t count,
                     int64_t size) {
    run_task(dequantise_task, &(Rows){ type, to, blocks, rows, size }, count, count * size * 4);
}

int64_t row_bytes(int64_t type, int64_t size) {
    return size / (super_bytes(scaling_of(type)) ? BLOCK * BLOCKS_PER_SUPER : BLOCK) * block_bytes(type);
}

/* Bytes of a panel. */
int64_t packed_bytes(int64_t type, int64_t in_features) {
    const Scaling scaling = scaling_of(type);
    const int64_t num_blocks = in_features / BLOCK;
    return num_blocks * (code_bytes(code_bits(type)) + scale_bytes(scaling))
        + num_blocks / BLOCKS_PER_SUPER * super_bytes(scaling);
}

static void pack_codes(uint8_t *to, const uint8_t *codes, int column, int bits) {
    const int low = low_bits(bits), high = bits - low;
    for (int i = 0; i < BLOCK; i++) {
        const int group = i / GROUP, at = column * GROUP + i % GROUP;
        to[group * low / 8 * GROUP_BYTES + at] |= (codes[i] & ((1 << low) - 1)) << group * low % 8;
        if (high) to[(low + group * high / 8) * GROUP_BYTES + at] |= codes[i] >> low << group * high % 8;
    }
}

static void pack_column(int64_t type, uint8_t *at, const uint8_t *row, int column, int64_t num_blocks) {
    const Scaling scaling = scaling_of(type);
    const int bits = code_bits(type);
    for (int64_t index = 0; index < num_blocks; index++) {
        const uint8_t *block = find_block(type, row, index);
        const int part = index % BLOCKS_PER_SUPER;
        if (!part && super_bytes(scaling)) {
            const uint8_t *shared = super_scale_of(type, block);
            memcpy(at + 2 * column, shared, 2);
            if (has_super_min(scaling)) memcpy(at + 2 * (COLUMNS + column), shared + 2, 2);
            at += super_bytes(scaling);
        }
        uint8_t codes[BLOCK];
        unpack(type, codes, row, index);
        pack_codes(at, codes, column, bits);
        at += code_bytes(bits);
        switch (scaling) {
            case SUPER: six_bits(block + 4, part, at + column, at + COLUMNS + column); break;
            case SUPER_HALF_MIN:
                for (int half = 0; half < 2; half++) at[half * COLUMNS + column] = block[2 * part + half];
                break;
            case SUPER_SIGNED: case SUPER_HALF:
                for (int half = 0; half < num_scales(scaling); half++)
                    at[half * COLUMNS + column] = signed_scale(type, block, part, half);
                break;
            case POWER: at[column] = *block; break;
            default:
                memcpy(at + 2 * column, block, 2);
                if (scaling == SCALE_MIN) memcpy(at + 2 * (COLUMNS + column), block + 2, 2);
        }
        at += scale_bytes(scaling);
    }
}

typedef struct {
    int64_t type;
    uint8_t *to;
    const uint8_t *blocks;
    const int64_t *rows;
    int64_t num_rows, in_features;
} Packing;

static void pack_task(const void *arguments, int64_t panel) {
    const Packing *task = arguments;
    const int64_t first = panel * COLUMNS, left = task->num_rows - first;
    uint8_t *to = task->to + panel * packed_bytes(task->type, task->in_features);
    for (int column = 0; column < COLUMNS && column < left; column++) {
        const uint8_t *row = task->blocks + task->rows[first + column] * row_bytes(task->type, task->in_features);
        pack_column(task->type, to, row, column, task->in_features / BLOCK);
    }
}

/* Panels of the rows of that number, 32 in each; ``to`` holds zeros before. */
void pack_panels(int64_t type, uint8_t *to, const uint8_t *blocks, const int64_t *rows, int64_t num_rows,
                 int64_t in_features) {
    run_task(pack_task, &(Packing){ type, to, blocks, rows, num_rows, in_features },
             (num_rows + COLUMNS - 1) / COLUMNS, num_rows * in_features * 4);
}
