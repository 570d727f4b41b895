"""Multiplies by quantised weights in Triton, and unpacks the weights of single rows.

A program multiplies 64 outputs' weights of a share of the inputs by up to 128 rows. Weights are unpacked in
registers, rounded to the type of the inputs, and are the left factor of ``tl.dot``: so the instructions that
compute a number do not depend on how many rows there are. Nor do the shares, which a second kernel sums in
their order: a row's bits are the same in every batch.

Importing this module imports triton: ``quantised`` does where it has a use.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from truedraft.engine.cuda import blocks
from truedraft.engine.cuda.blocks import PackedBlocks
from truedraft.engine.cuda.multiprocessors import NORMED_BY_A_WARP, num_multiprocessors
from truedraft.engine.layers.weight import FP8, LARGEST_FP8, LEAST_LARGEST

# A program's tile of rows has one of these sizes; more rows take several of the largest. Products of float32
# numbers have no matrix units, and need registers for all of them.
MIN_ROWS, MOST_ROWS = 16, 128
# Blocks of each output that a program multiplies at a time, while it loads the next ones, or those after
# these, too. What waits in shared memory grows with the rows, and a multiprocessor of a consumer's card has
# 100 KiB: many rows have two stages, with which it holds two to four programs in place of one.
BLOCKS_AT_A_TIME, NUM_STAGES, MANY_ROWS, STAGES_OF_MANY = 4, 3, 64, 2
# A multiprocessor gets this many programs, as far as the inputs can be divided.
PROGRAMS_OF_MULTIPROCESSOR, MAX_SHARES = 4, 16
# One program sums this many numbers over the shares.
JOINED = 1024
# Kernels see a module's numbers only as constants of this type.
COLUMNS = tl.constexpr(blocks.COLUMNS)
BLOCK = tl.constexpr(blocks.BLOCK)
BLOCKS_OF_SUPER = tl.constexpr(blocks.BLOCKS_OF_SUPER)
# Numbers that differ from layer to layer must not be compiled in: all is compiled at load, by one small
# layer.
_VARIES = ("num_blocks", "num_rows", "first_output", "num_outputs", "out_features")


@triton.jit
def block_weights(
    low,  # the parts of PackedBlocks
    high,
    scales,
    supers,
    tile,  # int64, one for each row or one for all
    column,  # in the tile, one for each row
    block,
    num_blocks,
    KIND: tl.constexpr,  # the numbers that Kind.constants returns
):
    """Returns float32 [rows, 32]; zeros where there is no such block."""
    BITS: tl.constexpr = KIND[0]
    LOW_BITS: tl.constexpr = KIND[1]
    SCALING: tl.constexpr = KIND[2]  # SCALE and others of blocks.py
    OFFSET: tl.constexpr = KIND[3]
    FIRST_LEVELS: tl.constexpr = KIND[4]  # bytes, or 0 where codes are numbers
    LAST_LEVELS: tl.constexpr = KIND[5]
    number = tl.arange(0, BLOCK)
    is_block = 0 * column + block < num_blocks  # the interpreter takes no single number for a mask
    # The blocks that lie over each other in a byte of ``low`` and ``high``.
    LOW: tl.constexpr = 8 // LOW_BITS
    num_low = tl.cdiv(num_blocks, LOW)
    at = ((tile * num_low + block // LOW) * COLUMNS + column)[:, None] * BLOCK + number[None, :]
    codes = tl.load(low + at, mask=is_block[:, None], other=0).to(tl.int32)
    if LOW > 1:
        codes = (codes >> (block % LOW * LOW_BITS)) & ((1 << LOW_BITS) - 1)
    if BITS > LOW_BITS:
        HIGH_BITS: tl.constexpr = BITS - LOW_BITS
        HIGH: tl.constexpr = 8 // HIGH_BITS
        num_high = tl.cdiv(num_blocks, HIGH)
        at = ((tile * num_high + block // HIGH) * COLUMNS + column)[:, None] * BLOCK + number[None, :]
        top = tl.load(high + at, mask=is_block[:, None], other=0).to(tl.int32)
        codes |= ((top >> (block % HIGH * HIGH_BITS)) & ((1 << HIGH_BITS) - 1)) << LOW_BITS
    if FIRST_LEVELS != 0:
        half = tl.where(
            codes < 8, tl.full([1, 1], FIRST_LEVELS, tl.int64), tl.full([1, 1], LAST_LEVELS, tl.int64)
        )
        codes = ((half >> (codes % 8 * 8).to(tl.int64)) & 255).to(tl.int32)
    values = (codes - OFFSET).to(tl.float32)
    FIELDS: tl.constexpr = 1 if SCALING == 0 or SCALING >= 5 else 2
    at = (tile * num_blocks + block) * FIELDS * COLUMNS + column
    first = tl.load(scales + at, mask=is_block, other=0)
    if FIELDS == 2:
        second = tl.load(scales + at + COLUMNS, mask=is_block, other=0)
    if SCALING >= 2 and SCALING <= 5:
        SUPERS: tl.constexpr = 2 if SCALING == 2 or SCALING == 4 else 1
        num_supers = tl.cdiv(num_blocks, BLOCKS_OF_SUPER)
        of_supers = (tile * num_supers + block // BLOCKS_OF_SUPER) * SUPERS * COLUMNS + column
        scale = tl.load(supers + of_supers, mask=is_block, other=0).to(tl.float32)
        if SUPERS == 2:
            minimum = tl.load(supers + of_supers + COLUMNS, mask=is_block, other=0).to(tl.float32)
    is_first = number[None, :] < BLOCK // 2
    # Nothing but the last operation of a weight is rounded, so it does not matter whether two are fused.
    if SCALING == 0:
        weights = values * first.to(tl.float32)[:, None]
    elif SCALING == 1:
        weights = values * first.to(tl.float32)[:, None] + second.to(tl.float32)[:, None]
    elif SCALING == 2:
        minimum *= second.to(tl.float32)
        weights = values * (scale * first.to(tl.float32))[:, None] - minimum[:, None]
    elif SCALING == 3:
        one = scale * first.to(tl.int8, bitcast=True).to(tl.float32)
        other = scale * second.to(tl.int8, bitcast=True).to(tl.float32)
        weights = values * tl.where(is_first, one[:, None], other[:, None])
    elif SCALING == 4:
        both = tl.where(is_first, first[:, None], second[:, None]).to(tl.int32)
        weights = values * (scale[:, None] * (both & 15).to(tl.float32))
        weights -= minimum[:, None] * (both >> 4).to(tl.float32)
    elif SCALING == 5:
        weights = values * (scale * first.to(tl.int8, bitcast=True).to(tl.float32))[:, None]
    else:
        power = first.to(tl.int32)
        # Half of 2 to the power of ``power - 127``; the least two have no exponent of their own.
        power = tl.where(power < 2, 0x200000 << tl.minimum(power, 1), (power - 1) << 23)
        weights = values * power.to(tl.float32, bitcast=True)[:, None]
    return weights


@triton.jit(do_not_specialize=_VARIES)
def multiply_share(
    shares,  # float32 [shares, rows, out features]
    x,  # [rows, in features]
    low,
    high,
    scales,
    supers,
    num_blocks,
    num_rows,
    first_output,  # where this part of the layer begins
    num_outputs,
    out_features,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS_AT_A_TIME: tl.constexpr,
):
    tile, share, num_shares = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, COLUMNS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    number = tl.arange(0, BLOCK)
    is_row = row < num_rows
    num_units = tl.cdiv(num_blocks, BLOCKS_AT_A_TIME)
    units = tl.cdiv(num_units, num_shares)
    start = x + row.to(tl.int64)[None, :] * (num_blocks * BLOCK) + number[:, None]
    product = tl.zeros([COLUMNS, ROWS], tl.float32)
    for unit in range(share * units, tl.minimum((share + 1) * units, num_units)):
        for i in tl.static_range(BLOCKS_AT_A_TIME):
            block = unit * BLOCKS_AT_A_TIME + i
            weights = block_weights(
                low, high, scales, supers, tile.to(tl.int64), column, block, num_blocks, KIND
            )
            is_input = is_row[None, :] & (number + block * BLOCK < num_blocks * BLOCK)[:, None]
            inputs = tl.load(start + block * BLOCK, mask=is_input, other=0.0)
            product = tl.dot(weights.to(x.dtype.element_ty), inputs, product, input_precision="ieee")
    output = tile * COLUMNS + column
    at = (share * num_rows + row).to(tl.int64)[None, :] * out_features + (first_output + output)[:, None]
    tl.store(shares + at, product, mask=(output < num_outputs)[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=("num_rows", "num_shares", "out_features"))
def join_products(
    output,  # [rows, out features]
    shares,  # float32 [shares, rows, out features]
    bias,  # [out features], if HAS_BIAS
    residual,  # like output, if HAS_RESIDUAL
    multiplier,
    num_rows,
    num_shares,
    out_features,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
):
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_number = number < out_features
    at = row * out_features + number
    total = tl.zeros([TILE], tl.float32)
    place = shares + at
    for _ in range(num_shares):
        total += tl.load(place, mask=is_number, other=0.0)
        place += num_rows.to(tl.int64) * out_features
    if HAS_BIAS:
        total += tl.load(bias + number, mask=is_number, other=0.0).to(tl.float32)
    total *= multiplier
    if HAS_RESIDUAL:
        total += tl.load(residual + at, mask=is_number, other=0.0).to(tl.float32)
    tl.store(output + at, total.to(output.dtype.element_ty), mask=is_number)


@triton.jit(do_not_specialize=("num_blocks", "first", "num_rows"))
def unpack_block(
    output,  # [rows, in features]
    ids,  # int64 [rows], if HAS_IDS; else rows follow each other from ``first``
    low,
    high,
    scales,
    supers,
    num_blocks,
    first,
    num_rows,
    HAS_IDS: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = place < num_rows
    if HAS_IDS:
        row = tl.load(ids + place, mask=is_row, other=0)
    else:
        row = tl.where(is_row, first + place, 0).to(tl.int64)
    number = tl.arange(0, BLOCK)
    for i in tl.static_range(BLOCKS_OF_SUPER):
        block = tl.program_id(1) * BLOCKS_OF_SUPER + i
        tile, column = row // COLUMNS, row % COLUMNS
        weights = block_weights(low, high, scales, supers, tile, column, block, num_blocks, KIND)
        at = (place.to(tl.int64) * num_blocks + block)[:, None] * BLOCK + number[None, :]
        is_number = is_row[:, None] & (number + block * BLOCK < num_blocks * BLOCK)[None, :]
        tl.store(output + at, weights.to(output.dtype.element_ty), mask=is_number)


@triton.jit
def round_row(
    values,  # FP8 [rows, SIZE]
    scales,  # float32 [rows]
    x,  # [rows, SIZE]
    LARGEST: tl.constexpr,  # number of FP8
    LEAST: tl.constexpr,  # lower bound of the largest number of a row
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED_SIZE)
    is_number = number < SIZE
    numbers = tl.load(x + row * SIZE + number, mask=is_number, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), 0), LEAST) / LARGEST
    quotients = tl.minimum(tl.maximum(numbers / scale, -LARGEST), LARGEST)
    tl.store(values + row * SIZE + number, quotients.to(values.dtype.element_ty), mask=is_number)
    tl.store(scales + row, scale)


def multiply(
    x: torch.Tensor,
    parts: Sequence[PackedBlocks],
    bias: torch.Tensor | None,
    multiplier: float,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Computes as ``BlockKernels.multiply`` does. ``bias`` and ``residual`` are contiguous."""
    x = x.contiguous()
    num_rows, out_features = len(x), sum(part.rows for part in parts)
    output = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if not num_rows:
        return output
    num_shares = shares_of(out_features, x.shape[1], x.device)
    shares = torch.empty(num_shares, num_rows, out_features, dtype=torch.float32, device=x.device)
    rows = row_tile(num_rows, x.dtype)
    first_output = 0
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        for part in parts:
            grid = triton.cdiv(part.rows, blocks.COLUMNS), num_shares, triton.cdiv(num_rows, rows)
            multiply_share[grid](
                shares,
                x,
                part.low,
                part.high,
                part.scales,
                part.supers,
                part.num_blocks,
                num_rows,
                first_output,
                part.rows,
                out_features,
                ROWS=rows,
                KIND=part.kind.constants,
                BLOCKS_AT_A_TIME=BLOCKS_AT_A_TIME,
                num_stages=stages_of(rows),
                num_warps=4,
            )
            first_output += part.rows
        join_products[num_rows, triton.cdiv(out_features, JOINED)](
            output,
            shares,
            x if bias is None else bias,
            x if residual is None else residual,
            multiplier,
            num_rows,
            num_shares,
            out_features,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            TILE=JOINED,
            num_warps=4,
        )
    return output


def unpack(packed: PackedBlocks, dtype: torch.dtype, rows: range | torch.Tensor) -> torch.Tensor:
    """Computes as ``BlockKernels.unpack`` does."""
    device = packed.low.device
    output = torch.empty(len(rows), packed.in_features, dtype=dtype, device=device)
    if not len(rows):
        return output
    has_ids = isinstance(rows, torch.Tensor)
    tile = MIN_ROWS if has_ids else blocks.COLUMNS
    grid = triton.cdiv(len(rows), tile), triton.cdiv(packed.num_blocks, blocks.BLOCKS_OF_SUPER)
    with torch.cuda.device_of(output):  # type: ignore[no-untyped-call]
        unpack_block[grid](
            output,
            rows if has_ids else output,
            packed.low,
            packed.high,
            packed.scales,
            packed.supers,
            packed.num_blocks,
            0 if isinstance(rows, torch.Tensor) else rows.start,
            len(rows),
            HAS_IDS=has_ids,
            KIND=packed.kind.constants,
            ROWS=tile,
            num_warps=4,
        )
    return output


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes as ``RoundRows`` does."""
    x = x.contiguous()
    values = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    padded_size = triton.next_power_of_2(x.shape[1])
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        round_row[(len(x),)](
            values,
            scales,
            x,
            LARGEST=LARGEST_FP8,
            LEAST=LEAST_LARGEST,
            SIZE=x.shape[1],
            PADDED_SIZE=padded_size,
            num_warps=min(8, max(1, padded_size // NORMED_BY_A_WARP)),
        )
    return values, scales


def row_tile(num_rows: int, dtype: torch.dtype) -> int:
    """Returns how many of ``num_rows`` rows one program multiplies."""
    largest = MIN_ROWS if dtype == torch.float32 else MOST_ROWS
    return min(largest, max(MIN_ROWS, int(triton.next_power_of_2(num_rows))))


def stages_of(rows: int) -> int:
    """Returns how many units of blocks a program with such a tile of rows has in flight."""
    return NUM_STAGES if rows < MANY_ROWS else STAGES_OF_MANY


def shares_of(out_features: int, in_features: int, device: torch.device) -> int:
    """Returns the number of shares into which a layer's inputs are divided, by the layer and the device
    alone."""
    wanted = PROGRAMS_OF_MULTIPROCESSOR * num_multiprocessors(device) // -(-out_features // blocks.COLUMNS)
    return max(1, min(wanted, -(-in_features // (blocks.BLOCK * BLOCKS_AT_A_TIME)), MAX_SHARES))
