"""Has the kernels of a decoder's layer in Triton: attention over the paged cache, rotary embedding with the
write to it, RMSNorm, and the MLP's gate; recurrences are in ``recurrent_kernels``.

Attention gathers nothing. One program takes a row, one key-value head and a share of the row's keys, and
computes all query heads that share them, with a running softmax in float32 (FlashAttention-2, arXiv
2307.08691). Few rows with many keys are split over more programs (https://pytorch.org/blog/flash-decoding),
and a second kernel joins their shares. How many there are depends on shapes alone, so that a CUDA graph can
hold it.

Importing this module imports triton, which is no dependency: ``triton_run`` does where it has a use.
"""

import math

import torch
import triton
import triton.language as tl

from truedraft.engine.cuda.latent_kernels import VARIES, attend_share_of_latents
from truedraft.engine.cuda.launch_experts import choose_experts as choose_experts
from truedraft.engine.cuda.launch_experts import group_tokens as group_tokens
from truedraft.engine.cuda.launch_experts import join_experts as join_experts
from truedraft.engine.cuda.launch_experts import multiply_experts as multiply_experts
from truedraft.engine.cuda.launch_recurrent import recur as recur
from truedraft.engine.cuda.multiprocessors import NORMED_BY_A_WARP, num_multiprocessors
from truedraft.engine.memory.batch import PagedRows

# A program multiplies this many rows of queries x shared heads, and keys, at a time: tl.dot wants 16 of each,
# and 64 rows of float32 numbers, which are not multiplied by matrix units, do not fit into registers.
MIN_TILE, MAX_TILE = 16, 64
# A tile of keys has this many bytes, and one of values as many. Keys wait for their entry in the table, so
# stages are shared by two loads (https://github.com/triton-lang/triton/issues/4721): from five on the
# compiler gives keys and values a second buffer, and loads the next tile while this one is computed.
KEY_TILE_BYTES, NUM_STAGES = 8 << 10, 5
# A share below this many keys is not worth a program; each multiprocessor gets at most this many programs.
MIN_KEYS_OF_SPLIT, PROGRAMS_OF_MULTIPROCESSOR, MAX_SPLITS = 128, 2, 32

# Latent vectors are long: more rows of queries would not fit into registers, nor a larger tile of keys into
# the least shared memory there is. In float32 there is no second buffer of keys.
MAX_LATENT_TILE, LATENT_KEY_TILE, LATENT_ROWS_OF_WARP = 32, 16, 4

# One warp turns this many numbers of a head.
TURNED_BY_A_WARP = 256
# One program gates this many numbers of the MLP.
GATE_TILE = 1024


@triton.jit(do_not_specialize=VARIES)
def attend_share(
    output,  # [tokens, heads, size]; split: float32 [rows, max_queries, heads, splits, size]
    log_sums,  # split: float32 [rows, max_queries, heads, splits], of exponentials, base 2
    query,  # [tokens, heads, size], QUERY_STRIDE numbers from one token to the next
    keys,  # [slots, kv heads, size]
    values,
    tables,  # int64 [rows, max_blocks]
    first_tokens,  # int64 [rows]
    counts,  # int64 [rows]
    positions,  # int64 [tokens]
    scale,  # multiplies scores, for exponentials of base 2
    block_size,
    max_blocks,
    max_queries,
    num_tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    SHARED: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0)
    kv_head = tl.program_id(1) // num_tiles
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    place = tl.program_id(1) % num_tiles * TILE + tl.arange(0, TILE)
    index = place // SHARED  # counts the tokens of a row
    head = kv_head * SHARED + place % SHARED
    is_query = index < tl.load(counts + row)
    token = tl.load(first_tokens + row) + index
    position = tl.load(positions + token, mask=is_query, other=-1).to(tl.int32)
    number = tl.arange(0, PADDED_SIZE)
    is_number = number < SIZE
    q = tl.load(
        query + (token * QUERY_STRIDE + head * SIZE)[:, None] + number[None, :],
        mask=is_query[:, None] & is_number[None, :],
        other=0.0,
    )

    # These queries see the keys up to here; this program takes its share of them.
    end = tl.max(position, 0) + 1
    begin = tl.zeros_like(end)
    if WINDOW > 0:
        begin = tl.maximum(tl.min(tl.where(is_query, position, end), 0) - WINDOW + 1, 0)
    share = tl.cdiv(tl.cdiv(end - begin, num_splits), KEY_TILE) * KEY_TILE
    begin += split * share
    end = tl.minimum(begin + share, end)

    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    attended = tl.zeros([TILE, PADDED_SIZE], tl.float32)
    for start in range(begin, end, KEY_TILE):
        key = start + tl.arange(0, KEY_TILE)
        # Memory beyond a row's keys may hold anything, even NaN, so it is not loaded.
        is_key = key < end
        block = tl.load(tables + row * max_blocks + key // block_size, mask=is_key, other=0)
        stored = ((block * block_size + key % block_size) * KV_HEADS + kv_head) * SIZE
        k = tl.load(
            keys + stored[None, :] + number[:, None], mask=is_key[None, :] & is_number[:, None], other=0.0
        )
        v = tl.load(
            values + stored[:, None] + number[None, :], mask=is_key[:, None] & is_number[None, :], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        sees = is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            sees = sees & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(sees, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A query that has seen no key yet: minus infinity less itself is no number.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        attended = attended * shrink[:, None]
        attended = tl.dot(weights.to(v.dtype), v, attended, input_precision="ieee")
        largest = new_largest

    has_seen = total > 0
    total = tl.where(has_seen, total, 1.0)
    if IS_SPLIT:
        at = ((row * max_queries + index) * HEADS + head) * num_splits + split
        log_sum = tl.where(has_seen, largest + tl.log2(total), float("-inf"))
        tl.store(log_sums + at, log_sum, mask=is_query)
    else:
        at = token * HEADS + head
    tl.store(
        output + at[:, None].to(tl.int64) * SIZE + number[None, :],
        (attended / total[:, None]).to(output.dtype.element_ty),
        mask=is_query[:, None] & is_number[None, :],
    )


@triton.jit(do_not_specialize=("first_tokens", "counts", "max_queries", "num_splits"))
def join_shares(
    output,  # [tokens, heads, size]
    shares,  # float32 [rows, max_queries, heads, splits, size]
    log_sums,  # float32 [rows, max_queries, heads, splits]
    first_tokens,
    counts,
    max_queries,
    num_splits,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    place, head = tl.program_id(0), tl.program_id(1)
    row, index = place // max_queries, place % max_queries
    if index < tl.load(counts + row):
        split = tl.arange(0, MOST_SPLITS)
        is_split = split < num_splits
        at = (place * HEADS + head) * num_splits + split
        number = tl.arange(0, PADDED_SIZE)
        is_number = number < SIZE
        log_sum = tl.load(log_sums + at, mask=is_split, other=float("-inf"))
        # Every query sees a key, so the largest is finite.
        weights = tl.exp2(log_sum - tl.max(log_sum, 0))
        share = tl.load(
            shares + at[:, None].to(tl.int64) * SIZE + number[None, :],
            mask=is_split[:, None] & is_number[None, :],
            other=0.0,
        )
        joined = tl.sum(share * weights[:, None], 0) / tl.sum(weights, 0)
        token = tl.load(first_tokens + row) + index
        tl.store(
            output + (token * HEADS + head) * SIZE + number,
            joined.to(output.dtype.element_ty),
            mask=is_number,
        )


def attend_rows(
    output: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PagedRows,
    positions: torch.Tensor,
    block_size: int,
    scaling: float,
    sliding_window: int | None,
    num_splits: int | None = None,
) -> None:
    """Writes to ``output`` [tokens, heads, size], contiguous, the attention of the tokens of ``rows``.

    ``query`` is like ``output``, its heads and numbers contiguous; ``keys`` and ``values`` are [slots, kv
    heads, size], contiguous; ``positions`` are int64 [tokens]: a token sees its row's keys up to its own
    position. ``num_splits``, up to ``MAX_SPLITS``, is chosen by the shapes unless given.
    """
    _, heads, size = query.shape
    kv_heads = keys.shape[1]
    num_rows, max_blocks = rows.tables.shape
    places = rows.queries * (heads // kv_heads)
    tile = tile_size(places, query.dtype)
    num_tiles = triton.cdiv(places, tile)
    if num_splits is None:
        longest = min(max_blocks * block_size, (sliding_window or 1 << 30) + rows.queries)
        num_splits = splits(num_rows * kv_heads * num_tiles, longest, query.device)
    padded_size = max(16, triton.next_power_of_2(size))
    key_tile = key_tile_size(padded_size, keys.dtype)
    target, log_sums = _shares(output, rows, num_splits)
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        attend_share[num_rows, kv_heads * num_tiles, num_splits](
            target,
            log_sums,
            query,
            keys,
            values,
            rows.tables,
            rows.first_tokens,
            rows.counts,
            positions,
            scaling * math.log2(math.e),
            block_size,
            max_blocks,
            rows.queries,
            num_tiles,
            HEADS=heads,
            KV_HEADS=kv_heads,
            SIZE=size,
            PADDED_SIZE=padded_size,
            QUERY_STRIDE=query.stride(0),
            WINDOW=sliding_window or 0,
            TILE=tile,
            KEY_TILE=key_tile,
            IS_SPLIT=num_splits > 1,
            num_warps=4,
            num_stages=NUM_STAGES,
            enable_fp_fusion=True,
        )
        _join(output, target, log_sums, rows, num_splits)


def attend_latents(
    output: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    rows: PagedRows,
    positions: torch.Tensor,
    block_size: int,
    scaling: float,
    num_splits: int | None = None,
) -> None:
    """Writes to ``output`` [tokens, heads, latent size], contiguous, the attention of the tokens of ``rows``,
    any number of them. ``query`` is [tokens, heads, size], ``keys`` are [slots, 1, size], whose last numbers
    are the latent vectors. The other arguments are those of ``attend_rows``."""
    _, heads, size = query.shape
    latent = output.shape[-1]
    num_rows, max_blocks = rows.tables.shape
    tile = latent_tile_size(rows.queries * heads, query.dtype)
    num_tiles = triton.cdiv(rows.queries * heads, tile)
    if num_splits is None:
        num_splits = splits(num_rows * num_tiles, max_blocks * block_size, query.device)
    target, log_sums = _shares(output, rows, num_splits)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        # Prompts have more tiles than the second number of a grid can be.
        attend_share_of_latents[num_rows * num_tiles, num_splits](
            target,
            log_sums,
            query,
            keys,
            rows.tables,
            rows.first_tokens,
            rows.counts,
            positions,
            scaling * math.log2(math.e),
            block_size,
            max_blocks,
            rows.queries,
            num_tiles,
            HEADS=heads,
            TURNED=size - latent,
            PADDED_TURNED=max(16, triton.next_power_of_2(size - latent)),
            LATENT=latent,
            PADDED_LATENT=max(16, triton.next_power_of_2(latent)),
            QUERY_STRIDE=query.stride(0),
            TILE=tile,
            KEY_TILE=LATENT_KEY_TILE,
            IS_SPLIT=num_splits > 1,
            num_warps=tile // LATENT_ROWS_OF_WARP,
            num_stages=latent_stages(query.dtype),
            enable_fp_fusion=True,
        )
        _join(output, target, log_sums, rows, num_splits)


def _shares(output: torch.Tensor, rows: PagedRows, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the buffers of the shares' outputs and logarithms; a lone share goes to the output directly."""
    if num_splits == 1:
        return output, output
    shape = len(rows.counts), rows.queries, output.shape[1], num_splits
    shares = torch.empty(*shape, output.shape[2], dtype=torch.float32, device=output.device)
    return shares, torch.empty(shape, dtype=torch.float32, device=output.device)


def _join(
    output: torch.Tensor, shares: torch.Tensor, log_sums: torch.Tensor, rows: PagedRows, num_splits: int
) -> None:
    if num_splits == 1:
        return
    _, heads, size = output.shape
    join_shares[len(rows.counts) * rows.queries, heads](
        output,
        shares,
        log_sums,
        rows.first_tokens,
        rows.counts,
        rows.queries,
        num_splits,
        HEADS=heads,
        SIZE=size,
        PADDED_SIZE=max(16, triton.next_power_of_2(size)),
        MOST_SPLITS=MAX_SPLITS,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=("slots",))
def rotate_and_store_head(
    query_key,  # [tokens, heads + kv heads, size], QUERY_STRIDE numbers from one token to the next
    value,  # [tokens, kv heads, size], VALUE_STRIDE from one to the next, if there are programs for it
    cos,  # [tokens, ROTATED]: the first ROTATED numbers of a head are turned
    sin,  # likewise, negative in the first half
    slots,  # int64 [tokens]
    keys,  # [slots, kv heads, size]
    values,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
):
    # Tokens times their numbers may not fit into 32 bits.
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.arange(0, PADDED_SIZE)
    is_number = number < SIZE
    if head < HEADS + KV_HEADS:
        start = query_key + token * QUERY_STRIDE + head * SIZE
        x = tl.load(start + number, mask=is_number, other=0.0).to(tl.float32)
        is_turned = number < ROTATED
        half: tl.constexpr = ROTATED // 2
        other_half = tl.where(number < half, number + half, number - half)
        swapped = tl.load(start + other_half, mask=is_turned, other=0.0).to(tl.float32)
        c = tl.load(cos + token * ROTATED + number, mask=is_turned, other=1.0).to(tl.float32)
        s = tl.load(sin + token * ROTATED + number, mask=is_turned, other=0.0).to(tl.float32)
        rotated = (x * c + swapped * s).to(query_key.dtype.element_ty)
        if head < HEADS:
            # Other threads of the program may still have to read what is overwritten.
            tl.debug_barrier()
            tl.store(start + number, rotated, mask=is_number)
        else:
            slot = tl.load(slots + token)
            place = keys + (slot * KV_HEADS + head - HEADS) * SIZE
            tl.store(place + number, rotated, mask=is_number)
    else:
        kv_head = head - HEADS - KV_HEADS
        slot = tl.load(slots + token)
        v = tl.load(value + token * VALUE_STRIDE + kv_head * SIZE + number, mask=is_number)
        tl.store(values + (slot * KV_HEADS + kv_head) * SIZE + number, v, mask=is_number)


def rotate_and_store(
    query_key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Rotates the queries of ``query_key`` [tokens, heads + kv heads, size] in place, and writes its rotated
    keys and ``value`` [tokens, kv heads, size] to ``slots`` int64 [tokens] of ``keys`` and ``values`` [slots,
    kv heads, size]; without heads of values only keys are written. ``cos`` and ``sin`` [tokens, n] are as in
    ``Rotary``, and the first n numbers of each head are rotated. Sums are in float32; heads and numbers of
    the first two tensors are contiguous, the other tensors wholly."""
    tokens, heads, size = query_key.shape
    kv_heads = keys.shape[1]
    padded_size = triton.next_power_of_2(size)
    with torch.cuda.device_of(query_key):  # type: ignore[no-untyped-call]
        rotate_and_store_head[tokens, heads + value.shape[1]](
            query_key,
            value,
            cos,
            sin,
            slots,
            keys,
            values,
            HEADS=heads - kv_heads,
            KV_HEADS=kv_heads,
            SIZE=size,
            PADDED_SIZE=padded_size,
            ROTATED=cos.shape[1],
            QUERY_STRIDE=query_key.stride(0),
            VALUE_STRIDE=value.stride(0),
            num_warps=max(1, padded_size // TURNED_BY_A_WARP),
        )


@triton.jit
def gated_silu_part(output, gate_up, SIZE: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0)
    number = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_number = number < SIZE
    start = gate_up + token.to(tl.int64) * 2 * SIZE
    gate = tl.load(start + number, mask=is_number, other=0.0).to(tl.float32)
    up = tl.load(start + SIZE + number, mask=is_number, other=0.0).to(tl.float32)
    gated = gate / (1 + tl.exp(-gate)) * up
    place = output + token.to(tl.int64) * SIZE + number
    tl.store(place, gated.to(output.dtype.element_ty), mask=is_number)


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up, [tokens, size], of ``gate_up`` [tokens, 2 * size]; computes in float32."""
    gate_up = gate_up.contiguous()
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    grid = tokens, triton.cdiv(size, GATE_TILE)
    with torch.cuda.device_of(gate_up):  # type: ignore[no-untyped-call]
        gated_silu_part[grid](output, gate_up, SIZE=size, TILE=GATE_TILE, num_warps=4)
    return output


@triton.jit
def rms_norm_row(
    output,  # [tokens, heads, size]
    x,  # [tokens, heads, size], X_STRIDE numbers from one token to the next
    weight,  # [heads, size]
    residual,  # like output, if HAS_RESIDUAL
    eps,
    X_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.arange(0, PADDED_SIZE)
    is_number = number < SIZE
    row = tl.load(x + token * X_STRIDE + head * SIZE + number, mask=is_number, other=0.0).to(tl.float32)
    scale = tl.load(weight + head * SIZE + number, mask=is_number, other=0.0).to(tl.float32)
    normed = row * tl.rsqrt(tl.sum(row * row, 0) / SIZE + eps) * scale
    place = (token * HEADS + head) * SIZE + number
    if HAS_RESIDUAL:
        normed += tl.load(residual + place, mask=is_number, other=0.0).to(tl.float32)
    tl.store(output + place, normed.to(output.dtype.element_ty), mask=is_number)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the RMSNorm of ``x`` [tokens, size], contiguous, by ``weight`` [size], or of [tokens, heads,
    size], heads and numbers contiguous, by [heads, size]; plus ``residual``, if there is one, contiguous and
    of the same shape. Sums are in float32."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, size = len(x), x.shape[-1]
    heads = weight.numel() // size
    padded_size = triton.next_power_of_2(size)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        rms_norm_row[tokens, heads](
            output,
            x,
            weight,
            x if residual is None else residual,
            eps,
            X_STRIDE=heads * size if x.dim() == 2 else x.stride(0),
            HEADS=heads,
            SIZE=size,
            PADDED_SIZE=padded_size,
            HAS_RESIDUAL=residual is not None,
            num_warps=min(8, max(1, padded_size // NORMED_BY_A_WARP)),
        )
    return output


def tile_size(places: int, dtype: torch.dtype) -> int:
    """Rows of queries x shared heads that one program takes, of ``places``."""
    largest = MIN_TILE if dtype == torch.float32 else MAX_TILE
    return min(largest, max(MIN_TILE, int(triton.next_power_of_2(places))))


def latent_tile_size(places: int, dtype: torch.dtype) -> int:
    """Returns the same for attention to latent vectors."""
    return MIN_TILE if dtype == torch.float32 or places <= MIN_TILE else MAX_LATENT_TILE


def latent_stages(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.float32 else NUM_STAGES


def key_tile_size(padded_size: int, dtype: torch.dtype) -> int:
    """Keys that one program multiplies at a time."""
    return min(MAX_TILE, max(MIN_TILE, KEY_TILE_BYTES // (padded_size * dtype.itemsize)))


def splits(num_programs: int, num_keys: int, device: torch.device) -> int:
    """Shares of each row's ``num_keys``: as many as fill the device, if each brings ``num_programs``."""
    wanted = PROGRAMS_OF_MULTIPROCESSOR * num_multiprocessors(device) // num_programs
    return max(1, min(wanted, num_keys // MIN_KEYS_OF_SPLIT, MAX_SPLITS))
