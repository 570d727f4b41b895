"""Draws and verifies rows by their own rules in Triton: one program draws a row's next draft, one makes the
distribution of each scored position, one judges a row.

Nothing is sorted. The cuts of top-k and top-p are found by halving the interval of weights in which they lie,
as the bits of positive numbers are ordered like the numbers; in registers, once few weights are left. Every
number is bit for bit that of torch in ``sampling.ops``, ``processors``, ``random`` and ``verify``: operations
round one by one (no multiplication is fused with an addition), and sums are of integers. Only logarithms are
the library's: two tokens' scores would have to agree in 50 bits for that to matter.

Importing this module imports triton, which is no dependency: ``triton_sampling`` does where it has a use.
"""

import torch
import triton
import triton.language as tl

from truedraft.engine.rows.columns import DRAFTS_AT, Field, Rule
from truedraft.engine.sampling import ops
from truedraft.engine.sampling.random import Stream
from truedraft.engine.sampling.splitmix import MASK_64, MIX_1, MIX_2, WEYL

# A program looks at this many tokens together, with this many warps.
TILE, NUM_WARPS = 4096, 16


def _signed(x: int) -> tl.constexpr:
    """Returns the int64 of the same 64 bits; sums and products of int64 wrap."""
    x &= MASK_64
    return tl.constexpr(x - (1 << 64) if x >> 63 else x)


_WEYL, _MIX_1, _MIX_2 = _signed(WEYL), _signed(MIX_1), _signed(MIX_2)
_DRAFT, _ACCEPT, _RECOVER, _NOISE, _ROUND = (_signed(stream * WEYL) for stream in Stream)
_NUM_STORED = tl.constexpr(int(Field.NUM_STORED))
_NUM_DRAFTS = tl.constexpr(int(Field.NUM_DRAFTS))
_NUM_DRAWN = tl.constexpr(int(Field.NUM_DRAWN))
_SEED, _RULE, _TOP_K = (tl.constexpr(int(f)) for f in (Field.SEED, Field.RULE, Field.TOP_K))
_TEMPERATURE, _TOP_P, _MIN_P = (tl.constexpr(int(f)) for f in (Field.TEMPERATURE, Field.TOP_P, Field.MIN_P))
_DRAFTS = tl.constexpr(DRAFTS_AT)
_EXACT_MATCH = tl.constexpr(Rule.EXACT_MATCH.code)
_REJECTION = tl.constexpr(Rule.REJECTION.code)
_COUPLED = tl.constexpr(Rule.COUPLED.code)
_BLOCK = tl.constexpr(Rule.BLOCK.code)
# The mass 1 has this many units, and a unit is a power of two, so that products are exact.
_WEIGHT_UNITS, _WEIGHT_UNIT = tl.constexpr(1 / ops.WEIGHT_UNIT), tl.constexpr(ops.WEIGHT_UNIT)
_PROB_UNITS, _PROB_UNIT = tl.constexpr(1 / ops.PROB_UNIT), tl.constexpr(ops.PROB_UNIT)
_LOWEST_EXPONENT, _ROUNDER = tl.constexpr(ops.LOWEST_EXPONENT), tl.constexpr(ops.ROUNDER)
_LOG2_E = tl.constexpr(ops.LOG2_E)
_LOG_2_HIGH, _LOG_2_LOW = tl.constexpr(ops.LOG_2_HIGH), tl.constexpr(ops.LOG_2_LOW)
_TERM_0, _TERM_1, _TERM_2, _TERM_3, _TERM_4, _TERM_5, _TERM_6 = (tl.constexpr(term) for term in ops.TERMS)
# This is one more than the bits of the highest weight, 1.
_BITS_ABOVE = tl.constexpr(0x3F800001)
# This is beyond every token id.
_NO_ID = tl.constexpr(1 << 30)


@triton.jit
def shifted(x, BITS: tl.constexpr):
    """Returns ``x`` int64 shifted right as an unsigned number."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def mixed(x):
    x = (x ^ shifted(x, 30)) * _MIX_1
    x = (x ^ shifted(x, 27)) * _MIX_2
    return x ^ shifted(x, 31)


@triton.jit
def key_of(seed, position, STREAM: tl.constexpr):
    return mixed(mixed(seed + STREAM) + position * _WEYL)


@triton.jit
def in_unit_interval(x):
    return (shifted(x, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def exp_below(x):
    bounded = tl.maximum(x, _LOWEST_EXPONENT)
    n = (bounded * _LOG2_E + _ROUNDER) - _ROUNDER
    rest = (bounded - n * _LOG_2_HIGH) - n * _LOG_2_LOW
    series = rest * _TERM_0 + _TERM_1
    series = series * rest + _TERM_2
    series = series * rest + _TERM_3
    series = series * rest + _TERM_4
    series = series * rest + _TERM_5
    series = series * rest + _TERM_6
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < _LOWEST_EXPONENT, 0.0, series * power)


@triton.jit
def goal_of(share, total):
    return tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def float_of(number):
    """Returns a row's float64, given by its bits, as the float32 with which distributions are made."""
    return number.to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def most_likely(logits, VOCAB: tl.constexpr, NUM_LOGITS: tl.constexpr, TILE: tl.constexpr):
    """Returns the first of the most likely tokens, its logit, and whether the logits are no distribution."""
    top = tl.full([TILE], float("-inf"), tl.float32)
    ids = tl.zeros([TILE], tl.int32)
    is_nan = tl.zeros([TILE], tl.int32)
    for start in range(0, VOCAB, TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(logits + token, mask=(token < VOCAB) & (token < NUM_LOGITS), other=float("-inf"))
        is_nan = is_nan | (x != x).to(tl.int32)
        is_higher = x > top
        top = tl.where(is_higher, x, top)
        ids = tl.where(is_higher, token, ids)
    highest = tl.max(top, 0)
    first = tl.min(tl.where(top == highest, ids, _NO_ID), 0)
    is_broken = (tl.max(is_nan, 0) > 0) | (highest == float("inf")) | (highest == float("-inf"))
    return tl.where(is_broken, 0, first), tl.where(is_broken, 0.0, highest), is_broken


@triton.jit
def mass_from(weights, lowest, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Returns the units of all weights that are not below ``lowest``."""
    total = tl.zeros([TILE], tl.int64)
    for start in range(0, VOCAB, TILE):
        token = start + tl.arange(0, TILE)
        weight = tl.load(weights + token, mask=token < VOCAB, other=0.0)
        total += tl.where(weight >= lowest, weight * _WEIGHT_UNITS, 0.0).to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def mass_of_top(weights, lowest, num, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Returns the units of the ``num`` highest weights; the last of them is ``lowest``, which others may
    equal."""
    total = tl.zeros([TILE], tl.int64)
    count = tl.zeros([TILE], tl.int64)
    for start in range(0, VOCAB, TILE):
        token = start + tl.arange(0, TILE)
        weight = tl.load(weights + token, mask=token < VOCAB, other=0.0)
        is_above = weight > lowest
        total += tl.where(is_above, weight * _WEIGHT_UNITS, 0.0).to(tl.int64)
        count += is_above.to(tl.int64)
    return tl.sum(total, 0) + (num - tl.sum(count, 0)) * (lowest * _WEIGHT_UNITS).to(tl.int64)


@triton.jit
def reached_by(bits, middle, BY_COUNT: tl.constexpr):
    """Returns the units, or the number, of weights of these bits that are not below ``middle``."""
    is_above = bits >= middle
    if BY_COUNT:
        return tl.sum(is_above.to(tl.int64), 0)
    weight = tl.where(is_above, bits, 0).to(tl.float32, bitcast=True)
    return tl.sum((weight * _WEIGHT_UNITS).to(tl.int64), 0)


@triton.jit
def cut_of(weights, goal, lowest, BY_COUNT: tl.constexpr):
    """Computes what ``cut`` does for weights in registers."""
    low = lowest.to(tl.int32, bitcast=True)
    high = low * 0 + _BITS_ABOVE
    bits = weights.to(tl.int32, bitcast=True)
    while high - low > 1:
        middle = (low + high) >> 1
        is_reached = reached_by(bits, middle, BY_COUNT) >= goal
        # Both bounds are weights that occur, so few halvings remain where there are few tokens.
        above = tl.min(tl.where(bits >= middle, bits, high), 0)
        below = tl.max(tl.where(bits < middle, bits, low), 0)
        low = tl.where(is_reached, above, low)
        high = tl.where(is_reached, high, tl.maximum(below, low) + 1)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def cut(
    weights, kept, highest, goal, lowest, BY_COUNT: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr
):
    """Returns the highest weight at which all weights from there up are together ``goal`` or more, in units
    or in number. Those from ``lowest`` up are known to reach it.

    ``highest`` [TILE] are weights of different tokens, most of them among the highest. The cut of these
    alone, if they reach the goal, is a lower bound: weights from there on are few, as a rule, and are put to
    ``kept`` [TILE] by one pass over the vocabulary, and halved in registers. If there are more, each halving
    is a pass of its own.
    """
    low = lowest.to(tl.int32, bitcast=True)
    bits = highest.to(tl.int32, bitcast=True)
    if reached_by(bits, low, BY_COUNT) >= goal:
        lowest = cut_of(highest, goal, lowest, BY_COUNT)
        low = lowest.to(tl.int32, bitcast=True)
    num_kept = low * 0
    for start in range(0, VOCAB, TILE):
        token = start + tl.arange(0, TILE)
        weight = tl.load(weights + token, mask=token < VOCAB, other=-1.0)
        is_kept = weight >= lowest
        place = num_kept + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(kept + place, weight, mask=is_kept & (place < TILE))
        num_kept += tl.sum(is_kept.to(tl.int32), 0)
    # Threads read what another thread has written.
    tl.debug_barrier()
    if num_kept <= TILE:
        place = tl.arange(0, TILE)
        lowest = cut_of(tl.load(kept + place, mask=place < num_kept, other=-1.0), goal, lowest, BY_COUNT)
    else:
        lowest = cut_by_passes(weights, goal, lowest, BY_COUNT, VOCAB, TILE)
    # Another cut may write there again.
    tl.debug_barrier()
    return lowest


@triton.jit
def cut_by_passes(weights, goal, lowest, BY_COUNT: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Computes what ``cut`` does for any number of weights."""
    low = lowest.to(tl.int32, bitcast=True)
    high = low * 0 + _BITS_ABOVE
    while high - low > 1:
        middle = (low + high) >> 1
        mass = tl.zeros([TILE], tl.int64)
        above = tl.zeros([TILE], tl.int32) + high
        below = tl.zeros([TILE], tl.int32) + low
        for start in range(0, VOCAB, TILE):
            token = start + tl.arange(0, TILE)
            weight = tl.load(weights + token, mask=token < VOCAB, other=-1.0)
            bits = weight.to(tl.int32, bitcast=True)
            is_above = bits >= middle
            if BY_COUNT:
                mass += is_above.to(tl.int64)
            else:
                mass += tl.where(is_above, weight * _WEIGHT_UNITS, 0.0).to(tl.int64)
            above = tl.minimum(above, tl.where(is_above, bits, high))
            below = tl.maximum(below, tl.where(bits < middle, bits, low))
        is_reached = tl.sum(mass, 0) >= goal
        low = tl.where(is_reached, tl.min(above, 0), low)
        high = tl.where(is_reached, high, tl.max(below, 0) + 1)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def distribute(
    probs,
    kept,
    logits,
    row,
    highest,
    is_broken,
    VOCAB: tl.constexpr,
    NUM_LOGITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes to ``probs`` the distribution that the parameters of ``row`` make of ``logits``, and returns its
    units. ``kept`` [TILE] is the program's own memory."""
    temperature = float_of(tl.load(row + _TEMPERATURE))
    top_k = tl.load(row + _TOP_K)
    top_p, min_p = float_of(tl.load(row + _TOP_P)), float_of(tl.load(row + _MIN_P))
    # These are each thread's own highest weights, or a number below all weights where it has none.
    tops = tl.zeros([TILE], tl.float32) - 1
    for start in range(0, VOCAB, TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(logits + token, mask=(token < VOCAB) & (token < NUM_LOGITS), other=float("-inf"))
        x = tl.where(is_broken, 0.0, x)
        weight = exp_below(tl.div_rn(x - highest, temperature))
        tops = tl.maximum(tops, tl.where(token < VOCAB, weight, -1.0))
        tl.store(probs + token, weight, mask=token < VOCAB)
    # Threads read what another thread has written.
    tl.debug_barrier()
    lowest = min_p * 0
    total = mass_from(probs, lowest, VOCAB, TILE)
    if (top_k > 0) & (top_k < VOCAB):
        lowest = cut(probs, kept, tops, top_k, lowest, True, VOCAB, TILE)
        total = mass_of_top(probs, lowest, top_k, VOCAB, TILE)
    if top_p < 1:
        goal = tl.maximum(goal_of(top_p.to(tl.float64), total), 1)
        lowest = cut(probs, kept, tops, goal, lowest, False, VOCAB, TILE)
    lowest = tl.maximum(lowest, min_p)
    total = mass_from(probs, lowest, VOCAB, TILE)
    divisor = (total.to(tl.float64) * _WEIGHT_UNIT).to(tl.float32)
    units = tl.zeros([TILE], tl.int64)
    for start in range(0, VOCAB, TILE):
        token = start + tl.arange(0, TILE)
        weight = tl.load(probs + token, mask=token < VOCAB, other=0.0)
        prob = tl.where(weight >= lowest, tl.div_rn(weight, divisor), 0.0)
        units += (prob * _PROB_UNITS).to(tl.int64)
        tl.store(probs + token, prob, mask=token < VOCAB)
    tl.debug_barrier()
    return tl.sum(units, 0)


@triton.jit
def race(probs, key, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Returns the token with the highest ratio of probability and noise, the first among equals."""
    top = tl.zeros([TILE], tl.float64) - 1
    ids = tl.zeros([TILE], tl.int32)
    highest = tl.max(top, 0)
    for start in range(0, VOCAB, TILE):
        token = start + tl.arange(0, TILE)
        prob = tl.load(probs + token, mask=token < VOCAB, other=0.0)
        hashed = mixed(key + (token + 1).to(tl.int64) * _WEYL)
        # Most tokens, and most tiles, are excluded without a logarithm, as -log(u) > 1 - u.
        rest = (((1 << 24) - 1) - shifted(hashed, 40)).to(tl.float32) * 5.9604644775390625e-08
        may_win = (token < VOCAB) & (prob * 1.0001 >= highest.to(tl.float32) * rest)
        if tl.max(may_win.to(tl.int32), 0) > 0:
            score = prob.to(tl.float64) / -tl.log(in_unit_interval(hashed))
            is_higher = may_win & (score > top)
            top = tl.where(is_higher, score, top)
            ids = tl.where(is_higher, token, ids)
            highest = tl.max(top, 0)
    return tl.min(tl.where(top == highest, ids, _NO_ID), 0)


@triton.jit
def units_left(target, draft, scale, end, certain, start, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Returns the units of max(scale * target - draft, 0). The draft's distribution ends before token
    ``end``, which is 0 where there is none; all of its mass is on ``certain``, unless that is -1."""
    token = start + tl.arange(0, TILE)
    had = tl.load(draft + token, mask=token < end, other=0.0)
    had = tl.where(token == certain, 1.0, had).to(tl.float64)
    left = scale * tl.load(target + token, mask=token < VOCAB, other=0.0).to(tl.float64) - had
    return (tl.maximum(left, 0.0) * _PROB_UNITS).to(tl.int64)


@triton.jit
def mass_left(target, draft, scale, end, certain, VOCAB: tl.constexpr, TILE: tl.constexpr):
    total = tl.zeros([TILE], tl.int64)
    for start in range(0, VOCAB, TILE):
        total += units_left(target, draft, scale, end, certain, start, VOCAB, TILE)
    return tl.sum(total, 0)


@triton.jit
def draw(target, draft, scale, end, certain, uniform, total, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Returns the first token up to which more than the share ``uniform`` of ``total`` units is left."""
    goal = goal_of(uniform, total)
    before = total * 0
    start = certain * 0
    units = units_left(target, draft, scale, end, certain, start, VOCAB, TILE)
    here = tl.sum(units, 0)
    while before + here <= goal:
        before += here
        start += TILE
        units = units_left(target, draft, scale, end, certain, start, VOCAB, TILE)
        here = tl.sum(units, 0)
    is_beyond = before + tl.cumsum(units, 0) > goal
    return tl.min(tl.where(is_beyond, start + tl.arange(0, TILE), _NO_ID), 0)


# Rows of columns may begin anywhere, and are read number by number.
@triton.jit(do_not_specialize_on_alignment=["numbers", "place_of_draft"])
def draw_row(
    logits,  # float32 [rows, NUM_LOGITS]: tokens from there to the vocabulary's end cannot be drawn
    probs,  # float32 [rows, VOCAB]
    kept,  # float32 [rows, TILE]
    numbers,  # int64 [rows, WIDTH]
    place_of_draft,  # int64 [1]
    VOCAB: tl.constexpr,
    NUM_LOGITS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = numbers + place * WIDTH
    number = tl.load(place_of_draft)
    if number < tl.load(row + _NUM_DRAWN):
        logits += place * NUM_LOGITS
        drawn, highest, is_broken = most_likely(logits, VOCAB, NUM_LOGITS, TILE)
        rule = tl.load(row + _RULE)
        if rule != _EXACT_MATCH:
            probs += place * VOCAB
            kept += place * TILE
            units = distribute(probs, kept, logits, row, highest, is_broken, VOCAB, NUM_LOGITS, TILE)
            seed, first = tl.load(row + _SEED), tl.load(row + _NUM_STORED) + 1
            if rule == _COUPLED:
                drawn = race(probs, key_of(seed, first + number, _NOISE), VOCAB, TILE)
            else:
                seed = key_of(seed, first, _ROUND)
                uniform = in_unit_interval(mixed(key_of(seed, first + number, _DRAFT)))
                scale, none = uniform * 0 + 1, drawn * 0
                drawn = draw(probs, probs, scale, none, none - 1, uniform, units, VOCAB, TILE)
        tl.store(row + _DRAFTS + number, drawn.to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=["found", "numbers"])
def judge_position(
    probs,  # float32 [rows, queries, VOCAB]
    kept,  # float32 [rows, queries, TILE]
    found,  # int64 [rows, queries, 3]: a token, units of probs, whether there is no distribution
    logits,  # float32 [rows, queries, VOCAB]
    numbers,  # int64 [rows, WIDTH]
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    place, position = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = numbers + place * WIDTH
    if position <= tl.load(row + _NUM_DRAFTS):
        index = place * tl.num_programs(1) + position
        logits += index * VOCAB
        token, highest, is_broken = most_likely(logits, VOCAB, VOCAB, TILE)
        rule = tl.load(row + _RULE)
        units = place * 0
        if rule != _EXACT_MATCH:
            probs += index * VOCAB
            kept += index * TILE
            units = distribute(probs, kept, logits, row, highest, is_broken, VOCAB, VOCAB, TILE)
            if rule == _COUPLED:
                at = tl.load(row + _NUM_STORED) + 1 + position
                token = race(probs, key_of(tl.load(row + _SEED), at, _NOISE), VOCAB, TILE)
        found += index * 3
        tl.store(found, token.to(tl.int64))
        tl.store(found + 1, units)
        tl.store(found + 2, is_broken.to(tl.int64))


@triton.jit(
    do_not_specialize=["queries", "most_drawn"],  # they change from round to round
    do_not_specialize_on_alignment=["verdicts", "found", "numbers"],
)
def judge_row(
    # int64 [rows, VERDICT_WIDTH]: number of accepted drafts, next token, whether it failed, the drafts
    verdicts,
    found,  # int64 [rows, queries, 3]
    probs,  # float32 [rows, queries, VOCAB]
    draft_probs,  # float32 [rows, most_drawn, VOCAB]
    numbers,  # int64 [rows, WIDTH]
    queries,
    most_drawn,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    VERDICT_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = numbers + place * WIDTH
    num_drafts = tl.load(row + _NUM_DRAFTS).to(tl.int32)
    if num_drafts >= 0:
        found += place * queries * 3
        verdicts += place * VERDICT_WIDTH
        probs += place * queries * VOCAB
        draft_probs += place * most_drawn * VOCAB
        drafts = row + _DRAFTS
        is_drawn = tl.load(row + _NUM_DRAWN) > 0
        end = tl.where(is_drawn, VOCAB, 0)
        rule, seed = tl.load(row + _RULE), tl.load(row + _SEED)
        first = tl.load(row + _NUM_STORED) + 1
        spent = key_of(seed, first, _ROUND)
        accepted = num_drafts * 0
        goes_on = num_drafts >= 0
        scale = spent.to(tl.float64) * 0 + 1  # belongs to the prefix that stands
        weight = scale  # belongs to every prefix, one after the other
        for position in range(num_drafts):
            drafted = tl.load(drafts + position)
            tl.store(verdicts + 3 + position, drafted)
            if (rule == _EXACT_MATCH) | (rule == _COUPLED):
                goes_on = goes_on & (tl.load(found + position * 3) == drafted)
                accepted += goes_on.to(tl.int32)
            else:
                uniform = in_unit_interval(mixed(key_of(spent, first + position, _ACCEPT)))
                of_target = tl.load(probs + position * VOCAB + drafted).to(tl.float64)
                of_draft = tl.load(draft_probs + position * VOCAB + drafted, mask=is_drawn, other=1.0)
                of_draft = of_draft.to(tl.float64)
                if rule == _REJECTION:
                    goes_on = goes_on & (uniform * of_draft < of_target)
                    accepted += goes_on.to(tl.int32)
                else:
                    scaled = weight * of_target
                    weight = tl.where(scaled >= of_draft, 1.0, scaled / of_draft)
                    weight = tl.where(scaled == 0, 0.0, weight)
                    stand = weight
                    length = position + 1
                    if length < num_drafts:
                        target, draft = probs + length * VOCAB, draft_probs + length * VOCAB
                        certain = tl.where(is_drawn, -1, tl.load(drafts + length)).to(tl.int32)
                        units = mass_left(target, draft, weight, end, certain, VOCAB, TILE)
                        mass = units.to(tl.float64) * _PROB_UNIT
                        slack = mass + 1 - weight
                        stand = tl.where(slack > 0, mass / slack, 1.0)
                    stands = uniform < stand
                    accepted = tl.where(stands, length, accepted)
                    scale = tl.where(stands, weight, scale)
        following = tl.load(found + accepted * 3)
        if (rule == _REJECTION) | (rule == _BLOCK):
            target = probs + accepted * VOCAB
            total = tl.load(found + accepted * 3 + 1)
            draft = draft_probs
            is_rejected = accepted < num_drafts
            certain = num_drafts * 0 - 1
            if is_rejected:
                draft = draft_probs + accepted * VOCAB
                certain = tl.where(is_drawn, -1, tl.load(drafts + accepted)).to(tl.int32)
                mass = mass_left(target, draft, scale, end, certain, VOCAB, TILE)
                # Equal rows leave nothing: the target's row is the limit.
                is_rejected = mass > 0
                total = tl.where(is_rejected, mass, total)
            end, certain = tl.where(is_rejected, end, 0), tl.where(is_rejected, certain, -1)
            scale = tl.where(is_rejected, scale, 1.0)
            uniform = in_unit_interval(mixed(key_of(seed, first + accepted, _RECOVER)))
            chosen = draw(target, draft, scale, end, certain, uniform, total, VOCAB, TILE)
            following = chosen.to(tl.int64)
        failed = following * 0
        for position in range(accepted + 1):
            failed = failed | tl.load(found + position * 3 + 2)
        tl.store(verdicts, accepted.to(tl.int64))
        tl.store(verdicts + 1, following)
        tl.store(verdicts + 2, failed)


def draw_drafts(
    logits: torch.Tensor,
    probs: torch.Tensor,
    numbers: torch.Tensor,
    place: torch.Tensor,
    tile: int = TILE,
) -> None:
    """Draws the draft at ``place`` int64 [1], which counts from 0, of those rows that have one there: its id
    goes to ``numbers`` int64 [rows, fields and ids], and the distribution drawn from, which the rule of
    exact match never asks for, to ``probs`` float32 [rows, V]. ``logits`` float32 [rows, the draft's
    vocabulary]. All are contiguous."""
    kept = torch.empty(len(logits), tile, device=logits.device)
    # Triton launches on the current device, whatever its arguments are on.
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        draw_row[(logits.shape[0],)](
            logits,
            probs,
            kept,
            numbers,
            place,
            VOCAB=probs.shape[1],
            NUM_LOGITS=logits.shape[1],
            WIDTH=numbers.shape[1],
            TILE=tile,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def judge(
    logits: torch.Tensor,
    draft_probs: torch.Tensor,
    numbers: torch.Tensor,
    verdicts: torch.Tensor,
    tile: int = TILE,
) -> None:
    """Writes to ``verdicts`` int64 [rows, 3 + most drafts], for each of the rows in ``numbers``, how many
    drafts are accepted, the token after them, whether some logits were no distribution, and the drafts.

    ``logits`` are float32 [rows, K+1, V] of up to K drafts; ``draft_probs`` float32 [rows, most drafts, V]
    belong to drafts that the draft model has drawn; others are certain. All tensors are contiguous.
    """
    num_rows, queries, vocab_size = logits.shape
    probs = torch.empty_like(logits)
    kept = torch.empty(num_rows, queries, tile, device=logits.device)
    found = torch.empty(num_rows, queries, 3, dtype=torch.int64, device=logits.device)
    options = {"TILE": tile, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
    sizes = {"VOCAB": vocab_size, "WIDTH": numbers.shape[1]}
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        judge_position[num_rows, queries](probs, kept, found, logits, numbers, **sizes, **options)
        judge_row[(num_rows,)](
            verdicts,
            found,
            probs,
            draft_probs,
            numbers,
            queries,
            draft_probs.shape[1],
            VERDICT_WIDTH=verdicts.shape[1],
            **sizes,
            **options,
        )
