"""Has the kernels of a decoder's layer in Triton: attention over the paged cache. The other kernels have
modules of their own, and can be called by their names here, too.

Attention gathers nothing. A row's keys are divided into pieces by their number alone, so that a long row does
not keep the others waiting (https://pytorch.org/blog/flash-decoding). As many programs as fill the device, a
number that a CUDA graph can hold, take the pieces of all rows and key-value heads in turn. They compute all
query heads that share the key-value head, with a running softmax in float32 (FlashAttention-2, arXiv
2307.08691). A second kernel joins the pieces of rows that have several.

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
from truedraft.engine.cuda.multiprocessors import num_multiprocessors
from truedraft.engine.cuda.pointwise_kernels import gated_silu as gated_silu
from truedraft.engine.cuda.pointwise_kernels import rms_norm as rms_norm
from truedraft.engine.cuda.pointwise_kernels import rotate_and_store as rotate_and_store
from truedraft.engine.memory.batch import PagedRows

LOG2_OF_E = tl.constexpr(math.log2(math.e))

# A program multiplies this many rows of queries x shared heads at a time, and this many keys: tl.dot wants 16
# of each. More rows, or float32 numbers, which are not multiplied by matrix units, do not fit into registers.
MIN_TILE, MAX_TILE, MAX_KEY_TILE = 16, 32, 64
# A tile of keys has this many bytes, and one of values as many. Keys wait for their entry in the table, so
# stages are shared by two loads (https://github.com/triton-lang/triton/issues/4721): from five on the
# compiler gives keys and values a second buffer, and loads the next tile while this one is computed.
KEY_TILE_BYTES, NUM_STAGES = 8 << 10, 5
# A share below this many keys is not worth a program; each multiprocessor gets at most this many programs.
MIN_KEYS_OF_SPLIT, PROGRAMS_OF_MULTIPROCESSOR, MAX_SPLITS = 128, 2, 32
# Each multiprocessor gets this many programs that take pieces of rows. The outputs of all pieces take at most
# this many bytes, but a row may always have two pieces.
PROGRAMS_OF_PIECES, BYTES_OF_PIECES = 4, 32 << 20
# A program looks for its pieces among this many rows; further rows have a launch of their own.
ROWS_LOOKED_AT = 256

# Latent vectors are long: more rows of queries would not fit into registers, nor a larger tile of keys into
# the least shared memory there is. In float32 there is no second buffer of keys.
MAX_LATENT_TILE, LATENT_KEY_TILE, LATENT_ROWS_OF_WARP = 32, 16, 4


@triton.jit
def pieces_of(
    row,
    is_row,
    first_tokens,
    counts,
    positions,
    keys_of_piece,
    most_pieces,
    WINDOW: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """Returns, for rows or for one row, where the keys begin and end that any of its queries sees, how many
    keys each piece has, and how many pieces there are."""
    first = tl.load(first_tokens + row, mask=is_row, other=0)
    count = tl.load(counts + row, mask=is_row, other=0)
    is_there = is_row & (count > 0)
    end = tl.load(positions + first + count - 1, mask=is_there, other=-1).to(tl.int32) + 1
    begin = 0 * end
    if WINDOW > 0:
        begin = tl.maximum(tl.load(positions + first, mask=is_there, other=0).to(tl.int32) - WINDOW + 1, 0)
    num_keys = end - begin
    wanted = tl.minimum(tl.cdiv(num_keys, keys_of_piece), most_pieces)
    share = tl.cdiv(tl.cdiv(num_keys, tl.maximum(wanted, 1)), KEY_TILE) * KEY_TILE
    return begin, end, share, tl.cdiv(num_keys, tl.maximum(share, 1))


_VARIES = (*VARIES, "num_rows", "keys_of_piece", "most_pieces")


@triton.jit(do_not_specialize=_VARIES)
def attend_share(
    output,  # [tokens, heads, size]
    shares,  # float32 [rows, max_queries, heads, most pieces, size]
    log_sums,  # float32 [rows, max_queries, heads, most pieces], of exponentials, base 2
    query,  # [tokens, heads, size], QUERY_STRIDE numbers from one token to the next
    keys,  # [slots, kv heads, size]
    values,
    sinks,  # float32 [heads], if HAS_SINKS
    tables,  # int64 [rows, max_blocks]
    first_tokens,  # int64 [rows]
    counts,  # int64 [rows]
    positions,  # int64 [tokens]
    scale,  # multiplies scores, for exponentials of base 2
    block_size,
    max_blocks,
    max_queries,
    num_tiles,
    num_rows,
    keys_of_piece,
    most_pieces,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    SHARED: tl.constexpr = HEADS // KV_HEADS
    number = tl.arange(0, PADDED_SIZE)
    is_number = number < SIZE
    rows = tl.arange(0, ROWS)
    _, _, _, pieces = pieces_of(
        rows, rows < num_rows, first_tokens, counts, positions, keys_of_piece, most_pieces, WINDOW, KEY_TILE
    )
    ends = tl.cumsum(pieces, 0)
    parts = KV_HEADS * num_tiles
    for part in range(tl.program_id(0), tl.sum(pieces, 0) * parts, tl.num_programs(0)):
        piece, kv_head = part // parts, part % parts // num_tiles
        place = part % num_tiles * TILE + tl.arange(0, TILE)
        index = place // SHARED  # counts the tokens of a row
        head = kv_head * SHARED + place % SHARED
        row = tl.sum((ends <= piece).to(tl.int32), 0)
        split = piece - tl.sum(tl.where(rows < row, pieces, 0), 0)
        begin, end, share, num_splits = pieces_of(
            row, row >= 0, first_tokens, counts, positions, keys_of_piece, most_pieces, WINDOW, KEY_TILE
        )
        is_query = index < tl.load(counts + row)
        token = tl.load(first_tokens + row) + index
        position = tl.load(positions + token, mask=is_query, other=-1).to(tl.int32)
        q = tl.load(
            query + (token * QUERY_STRIDE + head * SIZE)[:, None] + number[None, :],
            mask=is_query[:, None] & is_number[None, :],
            other=0.0,
        )

        # The piece ends where these queries see no further key.
        begin += split * share
        end = tl.minimum(tl.minimum(begin + share, end), tl.max(position, 0) + 1)
        if WINDOW > 0:
            seen = tl.min(tl.where(is_query, position, end), 0) - WINDOW + 1
            begin = tl.maximum(begin, seen // KEY_TILE * KEY_TILE)

        largest = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        if HAS_SINKS:
            # The sink is one more score of each head, which the first piece counts.
            is_counted = split == 0
            sink = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * LOG2_OF_E
            largest = tl.where(is_counted, sink, largest)
            total = tl.where(is_counted, 1.0, total)
        attended = tl.zeros([TILE, PADDED_SIZE], tl.float32)
        for start in range(begin, end, KEY_TILE):
            key = start + tl.arange(0, KEY_TILE)
            # Memory beyond a row's keys may hold anything, even NaN, so it is not loaded.
            is_key = key < end
            block = tl.load(tables + row * max_blocks + key // block_size, mask=is_key, other=0)
            stored = ((block * block_size + key % block_size) * KV_HEADS + kv_head) * SIZE
            k = tl.load(
                keys + stored[None, :] + number[:, None],
                mask=is_key[None, :] & is_number[:, None],
                other=0.0,
            )
            v = tl.load(
                values + stored[:, None] + number[None, :],
                mask=is_key[:, None] & is_number[None, :],
                other=0.0,
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
        attended = attended / total[:, None]
        is_stored = is_query[:, None] & is_number[None, :]
        if num_splits > 1:
            at = ((row * max_queries + index) * HEADS + head) * most_pieces + split
            log_sum = tl.where(has_seen, largest + tl.log2(total), float("-inf"))
            tl.store(log_sums + at, log_sum, mask=is_query)
            tl.store(shares + at[:, None].to(tl.int64) * SIZE + number[None, :], attended, mask=is_stored)
        else:
            own = (token * HEADS + head)[:, None].to(tl.int64) * SIZE + number[None, :]
            tl.store(output + own, attended.to(output.dtype.element_ty), mask=is_stored)


@triton.jit(
    do_not_specialize=("first_tokens", "counts", "positions", "max_queries", "keys_of_piece", "most_pieces")
)
def join_pieces(
    output,  # [tokens, heads, size]
    shares,  # float32 [rows, max_queries, heads, most pieces, size]
    log_sums,  # float32 [rows, max_queries, heads, most pieces]
    first_tokens,
    counts,
    positions,
    max_queries,
    keys_of_piece,
    most_pieces,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    row = tl.program_id(0) // max_queries
    _, _, _, num_splits = pieces_of(
        row, row >= 0, first_tokens, counts, positions, keys_of_piece, most_pieces, WINDOW, KEY_TILE
    )
    if num_splits > 1:
        join_one(
            output,
            shares,
            log_sums,
            first_tokens,
            counts,
            max_queries,
            num_splits,
            most_pieces,
            HEADS,
            SIZE,
            PADDED_SIZE,
            MOST_SPLITS,
        )


@triton.jit
def join_one(
    output,
    shares,
    log_sums,
    first_tokens,
    counts,
    max_queries,
    num_splits,
    most_splits,  # there is place for
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
        at = (place * HEADS + head) * most_splits + split
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
    join_one(
        output,
        shares,
        log_sums,
        first_tokens,
        counts,
        max_queries,
        num_splits,
        num_splits,
        HEADS,
        SIZE,
        PADDED_SIZE,
        MOST_SPLITS,
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
    sinks: torch.Tensor | None = None,
) -> None:
    """Writes to ``output`` [tokens, heads, size], contiguous, the attention of the tokens of ``rows``.

    ``query`` is like ``output``, its heads and numbers contiguous; ``keys`` and ``values`` are [slots, kv
    heads, size], contiguous; ``positions`` are int64 [tokens]: a token sees its row's keys up to its own
    position. ``sinks`` float32 [heads] are those of ``AttentionCall``. A row is divided into at most
    ``num_splits`` pieces, however few keys they have; by default pieces have ``MIN_KEYS_OF_SPLIT`` or more.
    """
    for start in range(0, len(rows.counts), ROWS_LOOKED_AT):
        some = slice(start, start + ROWS_LOOKED_AT)
        part = PagedRows(rows.tables[some], rows.first_tokens[some], rows.counts[some], rows.queries)
        _attend(
            output,
            query,
            keys,
            values,
            part,
            positions,
            block_size,
            scaling,
            sliding_window,
            num_splits,
            sinks,
        )


def _attend(
    output: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PagedRows,
    positions: torch.Tensor,
    block_size: int,
    scaling: float,
    sliding_window: int | None,
    num_splits: int | None,
    sinks: torch.Tensor | None,
) -> None:
    _, heads, size = query.shape
    kv_heads = keys.shape[1]
    num_rows, max_blocks = rows.tables.shape
    places = rows.queries * (heads // kv_heads)
    tile = tile_size(places, query.dtype)
    num_tiles = triton.cdiv(places, tile)
    padded_size = max(16, triton.next_power_of_2(size))
    key_tile = key_tile_size(padded_size, keys.dtype)
    longest = min(max_blocks * block_size, (sliding_window or 1 << 30) + rows.queries)
    numbers = num_rows * rows.queries * heads * size
    most = most_pieces(longest, numbers) if num_splits is None else num_splits
    sizes = {"HEADS": heads, "SIZE": size, "PADDED_SIZE": padded_size}
    tiles = {"WINDOW": sliding_window or 0, "KEY_TILE": key_tile}
    keys_of_piece = MIN_KEYS_OF_SPLIT if num_splits is None else 1
    shares, log_sums = _shares(output, rows, most)
    filling = PROGRAMS_OF_PIECES * num_multiprocessors(query.device)
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        attend_share[(min(num_rows * most * kv_heads * num_tiles, filling),)](
            output,
            shares,
            log_sums,
            query,
            keys,
            values,
            log_sums if sinks is None else sinks,
            rows.tables,
            rows.first_tokens,
            rows.counts,
            positions,
            scaling * LOG2_OF_E.value,
            block_size,
            max_blocks,
            rows.queries,
            num_tiles,
            num_rows,
            keys_of_piece,
            most,
            KV_HEADS=kv_heads,
            QUERY_STRIDE=query.stride(0),
            TILE=tile,
            ROWS=ROWS_LOOKED_AT,
            HAS_SINKS=sinks is not None,
            num_warps=4,
            num_stages=NUM_STAGES,
            enable_fp_fusion=True,
            **sizes,
            **tiles,
        )
        if most > 1:
            join_pieces[num_rows * rows.queries, heads](
                output,
                shares,
                log_sums,
                rows.first_tokens,
                rows.counts,
                positions,
                rows.queries,
                keys_of_piece,
                most,
                MOST_SPLITS=MAX_SPLITS,
                num_warps=4,
                enable_fp_fusion=True,
                **sizes,
                **tiles,
            )


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
    return min(MAX_KEY_TILE, max(MIN_TILE, KEY_TILE_BYTES // (padded_size * dtype.itemsize)))


def most_pieces(num_keys: int, numbers: int) -> int:
    """Returns the most pieces of a row of up to ``num_keys``, where the output of all rows is ``numbers``."""
    fitting = max(2, BYTES_OF_PIECES // (numbers * torch.float32.itemsize))
    return max(1, min(-(-num_keys // MIN_KEYS_OF_SPLIT), fitting, MAX_SPLITS))


def splits(num_programs: int, num_keys: int, device: torch.device) -> int:
    """Shares of each row's ``num_keys``: as many as fill the device, if each brings ``num_programs``."""
    wanted = PROGRAMS_OF_MULTIPROCESSOR * num_multiprocessors(device) // num_programs
    return max(1, min(wanted, num_keys // MIN_KEYS_OF_SPLIT, MAX_SPLITS))
