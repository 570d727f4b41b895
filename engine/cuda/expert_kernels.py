"""Experts in Triton: what the router chooses, which tokens each expert has, and products with its weights.

Nothing is decided on the host: a program takes a tile of tokens that an expert may have, and ends at once if
there are none, so that a CUDA graph can hold it. Weights lie where they were loaded, at addresses in a
table. They are the left factor of ``tl.dot``, and what experts say of a token is added in their order: its
bits do not depend on other tokens.
"""

import triton
import triton.language as tl

from truedraft.engine.cuda.quantised_kernels import BLOCK, COLUMNS, block_weights


@triton.jit
def choose_for_token(
    chosen,  # int32 [tokens, CHOSEN], ascending; -1: there is no token
    weights,  # float32 [tokens, CHOSEN]
    numbers,  # [tokens, experts]
    bias,  # float32 [experts], if HAS_BIAS
    is_there,  # bool [tokens], if HAS_PADDING
    added_to_sum,
    multiplier,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    RENORMALISES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    SUMMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED_EXPERTS)
    is_expert = number < EXPERTS
    x = tl.load(numbers + token * EXPERTS + number, mask=is_expert, other=float("-inf")).to(tl.float32)
    if IS_SOFTMAX:
        scores = tl.exp(x - tl.max(x, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        scores = 1 / (1 + tl.exp(-x))
    wanted = scores
    if HAS_BIAS:
        wanted += tl.load(bias + number, mask=is_expert, other=0.0)
    # Numbers that are not finite choose experts, too; the outputs of these are not finite either.
    wanted = tl.where(is_expert & (wanted == wanted), wanted, float("-inf"))
    if GROUPS > 1:
        group = number // (EXPERTS // GROUPS)
        of_group = tl.full([PADDED_EXPERTS], float("-inf"), tl.float32)
        for i in range(GROUPS):
            rest = tl.where(is_expert & (group == i), wanted, float("-inf"))
            total = 0.0
            for _ in range(SUMMED):
                best = tl.max(rest, 0)
                first = tl.min(tl.where(rest == best, number, PADDED_EXPERTS), 0)
                rest = tl.where(number == first, float("-inf"), rest)
                total += best
            of_group = tl.where(is_expert & (group == i), total, of_group)
        is_allowed = number < 0
        for _ in range(CHOSEN_GROUPS):
            best = tl.max(tl.where(is_allowed, float("-inf"), of_group), 0)
            first = tl.min(tl.where((of_group == best) & (is_allowed == 0), group, GROUPS), 0)
            is_allowed = is_allowed | (group == first)
        wanted = tl.where(is_allowed, wanted, float("-inf"))
    is_chosen = number < 0
    for _ in range(CHOSEN):
        best = tl.max(tl.where(is_chosen, float("-inf"), wanted), 0)
        first = tl.min(tl.where((wanted == best) & (is_chosen == 0), number, PADDED_EXPERTS), 0)
        is_chosen = is_chosen | (number == first)
    if RENORMALISES:
        scores = scores / (tl.sum(tl.where(is_chosen, scores, 0.0), 0) + added_to_sum)
    place = token * CHOSEN + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(weights + place, scores * multiplier, mask=is_chosen)
    if HAS_PADDING:
        number = tl.where(tl.load(is_there + token) != 0, number, -1)
    tl.store(chosen + place, number, mask=is_chosen)


@triton.jit(do_not_specialize=("num_tokens", "num_pairs"))
def find_tokens_of_expert(
    pairs,  # int32 [experts, tokens]: tokens and their experts, numbered as in ``chosen``
    counts,  # int32 [experts]
    touched,  # int64 [2]: the numbers of experts and of layers that were read, added up
    chosen,  # int32 [tokens, CHOSEN]
    num_tokens,
    num_pairs,
    TILE: tl.constexpr,
):
    expert = tl.program_id(0)
    count = expert * 0
    for start in range(0, num_pairs, TILE):
        pair = start + tl.arange(0, TILE)
        is_mine = tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert
        place = expert.to(tl.int64) * num_tokens + count + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(pairs + place, pair, mask=is_mine)
        count += tl.sum(is_mine.to(tl.int32), 0)
    tl.store(counts + expert, count)
    if count > 0:
        tl.atomic_add(touched, 1)
    if expert == 0:
        tl.atomic_add(touched + 1, 1)


@triton.jit(do_not_specialize=("num_tokens", "num_tiles", "first_output", "num_outputs", "out_features"))
def multiply_tile(
    output,  # [pairs, out features]
    x,  # [pairs / PAIRS_OF_ROW, inputs]
    addresses,  # int64 [parts, TENSORS, experts]: of weights [outputs, inputs], or of PackedBlocks' tensors
    bias,  # [experts, out features], if HAS_BIAS
    pairs,  # int32 [experts, tokens]
    counts,  # int32 [experts]
    multiplier,
    num_tokens,
    num_tiles,
    first_output,  # rows at which these parts of the layer begin
    num_outputs,  # number of outputs of each part
    out_features,
    NUM_INPUTS: tl.constexpr,  # says how rows are aligned
    EXPERTS: tl.constexpr,
    TENSORS: tl.constexpr,
    PAIRS_OF_ROW: tl.constexpr,
    KIND: tl.constexpr,  # KIND is one of the kinds of blocks, or DENSE.
    ROWS: tl.constexpr,
    BLOCKS_AT_A_TIME: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    expert, first = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles * ROWS
    count = tl.load(counts + expert)
    if first < count:
        place = first + tl.arange(0, ROWS)
        is_row = place < count
        pair = tl.load(pairs + expert.to(tl.int64) * num_tokens + place, mask=is_row, other=0).to(tl.int64)
        column, tile = tl.arange(0, COLUMNS), tl.program_id(1)
        out = tile * COLUMNS + column
        product = tl.zeros([COLUMNS, ROWS], tl.float32)
        part = tl.program_id(2)
        address = addresses + part * TENSORS * EXPERTS + expert
        if KIND[0] == 0:
            WIDTH: tl.constexpr = BLOCK * BLOCKS_AT_A_TIME
            number = tl.arange(0, WIDTH)
            weights = tl.load(address).to(tl.pointer_type(x.dtype.element_ty))
            weights = tl.multiple_of(weights, 16)
            start = x + (pair // PAIRS_OF_ROW)[None, :] * NUM_INPUTS + number[:, None]
            of_outputs = out.to(tl.int64)[:, None] * NUM_INPUTS + number[None, :]
            for i in range(0, NUM_INPUTS, WIDTH):
                is_input = number + i < NUM_INPUTS
                w = tl.load(
                    weights + of_outputs + i, mask=(out < num_outputs)[:, None] & is_input[None, :], other=0.0
                )
                inputs = tl.load(start + i, mask=is_row[None, :] & is_input[:, None], other=0.0)
                product = tl.dot(w, inputs, product, input_precision="ieee")
        else:
            number = tl.arange(0, BLOCK)
            num_blocks = NUM_INPUTS // BLOCK
            low = tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.uint8)), 16)
            high = tl.multiple_of(tl.load(address + EXPERTS).to(tl.pointer_type(tl.uint8)), 16)
            # Scales have 16 bits, or 8 where blocks share more.
            SCALE_TYPE: tl.constexpr = tl.float16 if KIND[2] < 2 else tl.uint8
            scales = tl.multiple_of(tl.load(address + 2 * EXPERTS).to(tl.pointer_type(SCALE_TYPE)), 16)
            supers = tl.multiple_of(tl.load(address + 3 * EXPERTS).to(tl.pointer_type(tl.float16)), 16)
            start = x + (pair // PAIRS_OF_ROW)[None, :] * NUM_INPUTS + number[:, None]
            for unit in range(tl.cdiv(num_blocks, BLOCKS_AT_A_TIME)):
                # Several blocks are loaded while others are multiplied.
                for i in tl.static_range(BLOCKS_AT_A_TIME):
                    block = unit * BLOCKS_AT_A_TIME + i
                    w = block_weights(
                        low, high, scales, supers, tile.to(tl.int64), column, block, num_blocks, KIND
                    )
                    is_input = is_row[None, :] & (number + block * BLOCK < NUM_INPUTS)[:, None]
                    inputs = tl.load(start + block * BLOCK, mask=is_input, other=0.0)
                    product = tl.dot(w.to(x.dtype.element_ty), inputs, product, input_precision="ieee")
        number_of_output = first_output + part * num_outputs + out
        if HAS_BIAS:
            added = tl.load(
                bias + expert * out_features + number_of_output, mask=out < num_outputs, other=0.0
            )
            product += added.to(tl.float32)[:, None]
        at = pair[None, :] * out_features + number_of_output[:, None]
        tl.store(
            output + at,
            (product * multiplier).to(output.dtype.element_ty),
            mask=(out < num_outputs)[:, None] & is_row[None, :],
        )


@triton.jit
def join_experts_of_token(
    output,  # [tokens, SIZE]
    said,  # [tokens, CHOSEN, SIZE]
    chosen,  # int32 [tokens, CHOSEN]
    weights,  # float32 [tokens, CHOSEN]
    shared,  # like output, if HAS_SHARED
    residual,  # like output, if HAS_RESIDUAL
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    token, number = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_number = number < SIZE
    total = tl.zeros([TILE], tl.float32)
    for i in range(CHOSEN):
        pair = token * CHOSEN + i
        is_said = is_number & (number * 0 + tl.load(chosen + pair) >= 0)
        one = tl.load(said + pair * SIZE + number, mask=is_said, other=0.0).to(tl.float32)
        total += one * tl.load(weights + pair)
    at = token * SIZE + number
    if HAS_SHARED:
        total += tl.load(shared + at, mask=is_number, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + at, mask=is_number, other=0.0).to(tl.float32)
    tl.store(output + at, total.to(output.dtype.element_ty), mask=is_number)
