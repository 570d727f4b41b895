"""Attention to latent vectors in Triton: all heads share one key, whose last numbers are the value, too.

A tile of keys is loaded once. Its first numbers, which are turned, and the latent vectors are multiplied
apart: both fill powers of two, which their sum does not. Everything else is as in ``kernels``, whose shares
of a row's keys are joined in the same way.
"""

import triton
import triton.language as tl

# Numbers that differ from pass to pass must not be compiled in: whatever is served is compiled at load.
VARIES = (
    "tables",
    "first_tokens",
    "counts",
    "positions",
    "block_size",
    "max_blocks",
    "max_queries",
    "num_tiles",
)


@triton.jit(do_not_specialize=VARIES)
def attend_share_of_latents(
    output,  # [tokens, heads, LATENT]; split: float32 [rows, max_queries, heads, splits, LATENT]
    log_sums,  # split: float32 [rows, max_queries, heads, splits], of exponentials, base 2
    query,  # [tokens, heads, TURNED + LATENT], QUERY_STRIDE numbers from one token to the next
    keys,  # [slots, TURNED + LATENT]
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
    TURNED: tl.constexpr,
    PADDED_TURNED: tl.constexpr,
    LATENT: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    SIZE: tl.constexpr = TURNED + LATENT
    row = tl.program_id(0) // num_tiles
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    place = tl.program_id(0) % num_tiles * TILE + tl.arange(0, TILE)
    index = place // HEADS  # counts the tokens of a row
    head = place % HEADS
    is_query = index < tl.load(counts + row)
    token = tl.load(first_tokens + row) + index
    position = tl.load(positions + token, mask=is_query, other=-1).to(tl.int32)
    turned, number = tl.arange(0, PADDED_TURNED), tl.arange(0, PADDED_LATENT)
    is_turned, is_number = turned < TURNED, number < LATENT
    of_query = (token * QUERY_STRIDE + head * SIZE)[:, None]
    q_turned = tl.load(
        query + of_query + turned[None, :], mask=is_query[:, None] & is_turned[None, :], other=0.0
    )
    q = tl.load(
        query + of_query + TURNED + number[None, :], mask=is_query[:, None] & is_number[None, :], other=0.0
    )

    # These queries see the keys up to here; this program takes its share of them.
    end = tl.max(position, 0) + 1
    share = tl.cdiv(tl.cdiv(end, num_splits), KEY_TILE) * KEY_TILE
    begin = split * share
    end = tl.minimum(begin + share, end)

    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    attended = tl.zeros([TILE, PADDED_LATENT], tl.float32)
    for start in range(begin, end, KEY_TILE):
        key = start + tl.arange(0, KEY_TILE)
        # Memory beyond a row's keys may hold anything, even NaN, so it is not loaded.
        is_key = key < end
        block = tl.load(tables + row * max_blocks + key // block_size, mask=is_key, other=0)
        stored = (block * block_size + key % block_size) * SIZE
        k_turned = tl.load(
            keys + stored[None, :] + turned[:, None], mask=is_key[None, :] & is_turned[:, None], other=0.0
        )
        k = tl.load(
            keys + stored[:, None] + TURNED + number[None, :],
            mask=is_key[:, None] & is_number[None, :],
            other=0.0,
        )
        scores = tl.dot(q_turned, k_turned, input_precision="ieee")
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee") * scale
        sees = is_key[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(sees, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A query that has seen no key yet: minus infinity less itself is no number.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        attended = attended * shrink[:, None]
        attended = tl.dot(weights.to(k.dtype), k, attended, input_precision="ieee")
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
        output + at[:, None].to(tl.int64) * LATENT + number[None, :],
        (attended / total[:, None]).to(output.dtype.element_ty),
        mask=is_query[:, None] & is_number[None, :],
    )
