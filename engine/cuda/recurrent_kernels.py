"""Computes recurrences in Triton: a convolution over the newest tokens, the gated delta rule, and Mamba 2.

Chunks stand where ``memory.recurrent_state`` folds, at multiples of their length, and are computed as a whole
however few of their tokens are there. A token's numbers depend on its place and on the tokens before it, and
not on the pass that brings it or on other rows. The places of a row's states and the numbers of its folded
tokens are read on the device, so that a CUDA graph can hold the launch.

A program owns some columns of the state of one head of a row. Records are written by a launch of their own,
when all programs have read those that they may overwrite. ``launch_recurrent`` launches these kernels.
"""

import triton
import triton.language as tl

# What differs from pass to pass must not be compiled in: whatever is served is compiled at load.
_ROWS = ("first_tokens", "counts", "num_stored", "slots", "num_folded", "num_folded_after")


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Returns float64; exponentials of small numbers keep their digits."""
    x = x.to(tl.float64)
    small = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(small < 1e-6, small * (1 - small / 2), tl.log(1 + small))


@triton.jit
def new_inputs(
    x, token, channel, is_there, X_SIZE: tl.constexpr, CHANNELS: tl.constexpr, GATED: tl.constexpr
):
    """Returns float32 inputs of a convolution. The channels come first in ``x``; or they are the product of
    the second and the last third with the first."""
    start = x + token.to(tl.int64)[:, None] * X_SIZE + channel[None, :]
    value = tl.load(start, mask=is_there, other=0.0).to(tl.float32)
    if GATED:
        value *= tl.load(start + 2 * CHANNELS, mask=is_there, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=_ROWS)
def convolve_tokens(
    output,  # [tokens, channels]
    x,  # [tokens, X_SIZE], the inputs from FIRST on
    weight,  # [channels, width]
    bias,  # [channels], if HAS_BIAS
    inputs,  # float32 [slots, NUM_INPUTS, channels]
    first_tokens,  # int64 [rows], as in StateRows
    counts,
    num_stored,
    slots,
    FIRST: tl.constexpr,
    X_SIZE: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    row, start = tl.program_id(0), tl.program_id(1) * TOKENS
    count = tl.load(counts + row).to(tl.int32)
    if start < count:
        place = start + tl.arange(0, TOKENS)
        channel = tl.program_id(2) * TILE + tl.arange(0, TILE)
        is_channel = channel < NUM_CHANNELS
        first = tl.load(first_tokens + row)
        stored = tl.load(num_stored + row)
        kept = inputs + tl.load(slots + row) * NUM_INPUTS * NUM_CHANNELS
        total = tl.zeros([TOKENS, TILE], tl.float32)
        for i in tl.static_range(WIDTH):
            at = place - (WIDTH - 1) + i
            is_new = (at >= 0) & (place < count)
            is_old = (at < 0) & (stored + at >= 0) & (place < count)
            new = new_inputs(
                x + FIRST,
                first + at,
                channel,
                is_new[:, None] & is_channel[None, :],
                X_SIZE,
                NUM_CHANNELS,
                GATED,
            )
            there = (stored + at) % NUM_INPUTS * NUM_CHANNELS
            old = tl.load(
                kept + there[:, None] + channel[None, :],
                mask=is_old[:, None] & is_channel[None, :],
                other=0.0,
            )
            factor = tl.load(weight + channel * WIDTH + i, mask=is_channel, other=0.0)
            total += tl.where(is_new[:, None], new, old) * factor[None, :]
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=is_channel, other=0.0)[None, :]
        if SILU:
            total *= sigmoid(total)
        is_there = (place < count)[:, None] & is_channel[None, :]
        token = first + place
        if GATED:
            gate = x + FIRST + token[:, None] * X_SIZE + NUM_CHANNELS + channel[None, :]
            total *= tl.load(gate, mask=is_there, other=0.0).to(tl.float32)
        place_of = output + token[:, None] * NUM_CHANNELS + channel[None, :]
        tl.store(place_of, total.to(output.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=_ROWS)
def keep_inputs(
    x,
    inputs,
    first_tokens,
    counts,
    num_stored,
    slots,
    FIRST: tl.constexpr,
    X_SIZE: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    count = tl.load(counts + row).to(tl.int32)
    place = tl.maximum(count - NUM_INPUTS, 0) + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_there = (place < count)[:, None] & (channel < NUM_CHANNELS)[None, :]
    token = tl.load(first_tokens + row) + place
    value = new_inputs(x + FIRST, token, channel, is_there, X_SIZE, NUM_CHANNELS, GATED)
    position = (tl.load(num_stored + row) + place) % NUM_INPUTS
    kept = inputs + (tl.load(slots + row) * NUM_INPUTS + position)[:, None] * NUM_CHANNELS + channel[None, :]
    tl.store(kept, value, mask=is_there)


@triton.jit
def prepare_delta(
    mixed,  # float32 [tokens, MIXED_SIZE]: queries and keys first, which are normed in place
    decays,  # float64 [tokens, heads]
    betas,  # float32 [tokens, heads]
    x,  # [tokens, X_SIZE], of which the last are b and a
    decay_rate,
    dt_bias,
    query_scale,
    X_SIZE: tl.constexpr,
    MIXED_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part < 2 * KEY_HEADS:
        number = tl.arange(0, PADDED_SIZE)
        place = mixed + token * MIXED_SIZE + part * SIZE + number
        value = tl.load(place, mask=number < SIZE, other=0.0)
        value *= tl.rsqrt(tl.sum(value * value, 0) + 1e-6)
        value *= tl.where(part < KEY_HEADS, query_scale, 1.0)
        tl.store(place, value, mask=number < SIZE)
    else:
        head = tl.arange(0, PADDED_HEADS)
        is_head = head < HEADS
        start = x + token * X_SIZE + (X_SIZE - 2 * HEADS) + head
        beta = sigmoid(tl.load(start, mask=is_head, other=0.0).to(tl.float32))
        a = tl.load(start + HEADS, mask=is_head, other=0.0).to(tl.float32)
        a += tl.load(dt_bias + head, mask=is_head, other=0.0)
        rate = tl.load(decay_rate + head, mask=is_head, other=0.0)
        tl.store(betas + token * HEADS + head, beta, mask=is_head)
        tl.store(decays + token * HEADS + head, tl.exp(rate.to(tl.float64) * softplus(a)), mask=is_head)


@triton.jit
def prepare_mamba(
    added,  # float32 [tokens, heads, SIZE]: values times dt
    decays,  # float64 [tokens, heads]
    mixed,  # float32 [tokens, MIXED_SIZE], values first
    x,  # [tokens, X_SIZE], of which the last are dt
    decay_rate,
    dt_bias,
    smallest,
    largest,
    X_SIZE: tl.constexpr,
    MIXED_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dt = tl.load(x + token * X_SIZE + (X_SIZE - HEADS) + head).to(tl.float32) + tl.load(dt_bias + head)
    dt = tl.minimum(tl.maximum(softplus(dt), smallest), largest)
    tl.store(decays + token * HEADS + head, tl.exp(tl.load(decay_rate + head).to(tl.float64) * dt))
    number = tl.arange(0, PADDED_SIZE)
    value = tl.load(mixed + token * MIXED_SIZE + head * SIZE + number, mask=number < SIZE, other=0.0)
    tl.store(added + (token * HEADS + head) * SIZE + number, value * dt.to(tl.float32), mask=number < SIZE)


@triton.jit(do_not_specialize=_ROWS)
def recur_head(
    output,  # float32 [tokens, heads, columns]
    added,  # float32 [tokens, heads, columns]: the values of records, which the delta rule writes
    query,  # float32 [tokens, key heads, size], KEY_STRIDE numbers from one token to the next
    key,  # likewise
    value,  # float32 [tokens, heads, columns], VALUE_STRIDE from one token to the next
    decays,  # float64 [tokens, heads]
    betas,  # float32 [tokens, heads], of the delta rule
    state,  # the tensors of LayerState
    keys,
    values,
    factors,
    first_tokens,  # int64 [rows], as in StateRows
    counts,
    num_stored,
    slots,
    num_folded,
    num_folded_after,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_RECORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILED: tl.constexpr,
    IS_DELTA: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    stored, folded = tl.load(num_stored + row), tl.load(num_folded + row)
    end = stored + tl.load(counts + row)
    if stored < end:
        slot = tl.load(slots + row)
        folded_after = tl.load(num_folded_after + row)
        first = tl.load(first_tokens + row) - stored
        key_head = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
        number = tl.arange(0, PADDED_SIZE)
        is_number = number < SIZE
        column = tl.program_id(2) * TILE + tl.arange(0, TILE)
        is_column = column < COLUMNS
        place = tl.arange(0, CHUNK)
        is_before = place[:, None] > place[None, :]
        at = state + ((slot * HEADS + head) * SIZE + number)[:, None] * COLUMNS + column[None, :]
        is_state = is_number[:, None] & is_column[None, :]
        # A slot of which nothing is folded yet may have another text's state.
        s = tl.load(at, mask=is_state & (number * 0 + folded > 0)[:, None], other=0.0)
        for start in range(folded, end, CHUNK):
            position = start + place
            is_old, is_new = position < stored, (position >= stored) & (position < end)
            token = first + position
            record = slot * NUM_RECORDS + position % NUM_RECORDS
            # Records that are missing are zeros, and change nothing.
            k = tl.load(
                keys + ((record * KEY_HEADS + key_head) * SIZE)[:, None] + number[None, :],
                mask=is_old[:, None] & is_number[None, :],
                other=0.0,
            )
            in_token = (token * KEY_STRIDE + key_head * SIZE)[:, None] + number[None, :]
            is_key = is_new[:, None] & is_number[None, :]
            k = tl.where(is_old[:, None], k, tl.load(key + in_token, mask=is_key, other=0.0))
            v = tl.load(
                values + ((record * HEADS + head) * COLUMNS)[:, None] + column[None, :],
                mask=is_old[:, None] & is_column[None, :],
                other=0.0,
            )
            is_value = is_new[:, None] & is_column[None, :]
            own = (token * VALUE_STRIDE + head * COLUMNS)[:, None] + column[None, :]
            v = tl.where(is_old[:, None], v, tl.load(value + own, mask=is_value, other=0.0))
            factor = tl.load(factors + record * HEADS + head, mask=is_old, other=1.0)
            new_factor = tl.load(decays + token * HEADS + head, mask=is_new, other=1.0)
            factor = tl.where(is_old, factor, new_factor)
            # This is the share of token j's contribution, and of the state, that is left at token i.
            through = tl.cumprod(tl.where(is_before, factor[:, None], 1.0), 0).to(tl.float32)
            whole = tl.cumprod(factor, 0).to(tl.float32)
            for p in range(tl.maximum(stored - start, 0), tl.minimum(end - start, CHUNK)):
                # Products of matrices in float32 would hold both factors in registers, and more.
                of_token = (first + start + p) * KEY_STRIDE + key_head * SIZE + number
                is_p = place == p
                left = tl.sum(tl.where(is_p[:, None], through, 0.0), 0)
                left_of_state = tl.sum(tl.where(is_p, whole, 0.0), 0)
                if IS_DELTA:
                    own_key = tl.load(key + of_token, mask=is_number, other=0.0)
                    alike = tl.sum(k * own_key[None, :], 1) * left
                    known = tl.sum(s * own_key[:, None], 0) * left_of_state
                    known += tl.sum(tl.where(place < p, alike, 0.0)[:, None] * v, 0)
                    beta = tl.load(betas + (first + start + p) * HEADS + head)
                    mine = beta * (tl.sum(tl.where(is_p[:, None], v, 0.0), 0) - known)
                    v = tl.where(is_p[:, None], mine[None, :], v)
                asked = tl.load(query + of_token, mask=is_number, other=0.0)
                weights = tl.sum(k * asked[None, :], 1) * left
                answer = tl.sum(s * asked[:, None], 0) * left_of_state
                answer += tl.sum(tl.where(place <= p, weights, 0.0)[:, None] * v, 0)
                there = ((first + start + p) * HEADS + head) * COLUMNS + column
                tl.store(output + there, answer, mask=is_column)
                if IS_DELTA:
                    tl.store(added + there, mine, mask=is_column)
            if start + CHUNK <= end:
                is_last = place == CHUNK - 1
                left = tl.sum(tl.where(is_last[:, None], through, 0.0), 0)
                s *= tl.sum(tl.where(is_last, whole, 0.0), 0)
                k *= left[:, None]
                for j in range(CHUNK):
                    is_j = (place == j)[:, None]
                    added_key, added_value = tl.where(is_j, k, 0.0), tl.where(is_j, v, 0.0)
                    s += tl.sum(added_key, 0)[:, None] * tl.sum(added_value, 0)[None, :]
                if start + CHUNK == folded_after:
                    tl.store(at, s, mask=is_state)


@triton.jit(do_not_specialize=_ROWS)
def keep_records(
    key,  # like those of recur_head
    added,
    decays,
    keys,
    values,
    factors,
    first_tokens,
    counts,
    num_stored,
    slots,
    KEY_STRIDE: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    HEADS: tl.constexpr,
    NUM_RECORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.load(counts + row) - 1 - tl.program_id(1)  # from the newest on
    position = tl.load(num_stored + row) + place
    if place >= 0:
        token = tl.load(first_tokens + row) + place
        record = tl.load(slots + row) * NUM_RECORDS + position % NUM_RECORDS
        number = tl.program_id(2) * TILE + tl.arange(0, TILE)
        is_key, is_value, is_factor = number < NUM_KEYS, number < NUM_VALUES, number < HEADS
        k = tl.load(key + token * KEY_STRIDE + number, mask=is_key, other=0.0)
        v = tl.load(added + token * NUM_VALUES + number, mask=is_value, other=0.0)
        factor = tl.load(decays + token * HEADS + number, mask=is_factor, other=1.0)
        tl.store(keys + record * NUM_KEYS + number, k, mask=is_key)
        tl.store(values + record * NUM_VALUES + number, v, mask=is_value)
        tl.store(factors + record * HEADS + number, factor, mask=is_factor)


@triton.jit
def finish_heads(
    output,  # [tokens, heads * SIZE]
    answers,  # float32 [tokens, heads, SIZE]
    x,  # [tokens, X_SIZE], z from Z_FIRST on
    values,  # float32 [tokens, VALUE_STRIDE], whose first are times ``skip`` [heads] if HAS_SKIP
    skip,
    weight,  # [SIZE], or [heads, SIZE] where what is gated is normed, if HAS_NORM
    eps,
    X_SIZE: tl.constexpr,
    Z_FIRST: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    SKIP_SIZE: tl.constexpr,  # numbers that share one of ``skip``
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Norms and gates a head; with skips the gate comes first."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.arange(0, PADDED_SIZE)
    is_number = number < SIZE
    at = head * SIZE + number
    there = token * tl.num_programs(1) * SIZE + at
    y = tl.load(answers + there, mask=is_number, other=0.0)
    z = tl.load(x + token * X_SIZE + Z_FIRST + at, mask=is_number, other=0.0).to(tl.float32)
    if HAS_SKIP:
        factor = tl.load(skip + at // SKIP_SIZE, mask=is_number, other=0.0)
        y += tl.load(values + token * VALUE_STRIDE + at, mask=is_number, other=0.0) * factor
        y *= z * sigmoid(z)
    if HAS_NORM:
        y *= tl.rsqrt(tl.sum(y * y, 0) / SIZE + eps)
        y *= tl.load(weight + (at if HAS_SKIP else number), mask=is_number, other=0.0)
    if not HAS_SKIP:
        y *= z * sigmoid(z)
    tl.store(output + there, y.to(output.dtype.element_ty), mask=is_number)
