"""Chooses a head's output layer at start, from the time of passes with different ones.

A head that shares the target's output layer reads all of it for each drafted token. A copy in four bits takes
a third of that, and fewer tokens take their share: drafts then come from another distribution, which
verification knows. The loss of acceptance is known roughly: a token that is not drafted is rejected, and
texts that have been counted tell how many those are.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sized
from typing import Literal, NamedTuple

import torch

from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.state_slots import StateSlots
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.models.base import Model
from truedraft.engine.models.heads.head import Head
from truedraft.engine.models.heads.vocabulary import most_frequent
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.rounds.calibrate import pass_seconds

# These numbers of tokens are tried, as far as they are no more than half of the vocabulary: the two largest.
SIZES, MOST_SIZES = tuple(1 << power for power in range(16, 7, -1)), 2
# This share of drafts is accepted where nothing is left out; four bits keep this part of it.
ACCEPTED, LEFT_BY_FOUR_BITS = 0.7, 0.97
LENGTHS = range(1, 9)
# A layer that leaves something out must be faster by this share: less is noise of the measurement.
MARGIN = 0.02
# A measured pass has this many tokens before it, which states need.
BLOCKS, BLOCK_SIZE, SCORED = 8, 16, 5
# A run this much slower was descheduled, and says nothing about its model.
REPEATS = 3

logger = logging.getLogger(__name__)


class Output(NamedTuple):
    """Is an output layer that a head may have: of some ids; None: of all."""

    token_ids: torch.Tensor | None
    in_four_bits: bool


def choose_output(
    head: Head,
    target: Model,
    size: int | Literal["auto", "full"],
    counts: Counter[int] | None,
    length: int | None = None,
) -> Head:
    """Returns the head with the output layer that makes most tokens a second.

    Chooses by passes of the head and of the target, or takes ``size`` tokens. ``counts`` are those of texts
    like the ones that will be served: without them and a size all tokens are drafted. Drafts have that
    ``length``, or the best one.
    """
    make = head.model.weights.make_output
    if isinstance(size, int) and make is None:
        raise ModelLoadError(
            f"draft_vocab_size is {size}, but the head has an output layer of its own: leave it out"
        )
    score = [_seconds(target, num_tokens) for num_tokens in (1, SCORED)]
    best, best_speed, chosen = head, 0.0, Output(None, in_four_bits=False)
    for output in _outputs(target.vocab_size, "full" if make is None else size, counts, target.eos_token_ids):
        tried = _drafting(head, output)
        if tried is None:
            continue
        accepted = ACCEPTED * _covered(output.token_ids, counts)
        accepted *= LEFT_BY_FOUR_BITS if output.in_four_bits else 1.0
        speed = _speed(accepted, score, _seconds(tried.model, 1), length)
        logger.debug("%s: %.1f", _in_words(output.token_ids, target.vocab_size, output.in_four_bits), speed)
        if speed > best_speed * (1 + MARGIN):
            best, best_speed, chosen = tried, speed, output
    logger.info("The head drafts %s", _in_words(chosen.token_ids, target.vocab_size, chosen.in_four_bits))
    return best


def _drafting(head: Head, output: Output) -> Head | None:
    """Returns the head with that output layer, if there are kernels for it."""
    if output.token_ids is None and not output.in_four_bits:
        return head
    make = head.model.weights.make_output
    assert make is not None
    linear = make(None if output.token_ids is None else output.token_ids.numpy(), output.in_four_bits)
    return None if linear is None else head.drafting(output.token_ids, linear, output.in_four_bits)


def _outputs(
    vocab_size: int, size: int | Literal["auto", "full"], counts: Counter[int] | None, always: Iterable[int]
) -> Iterator[Output]:
    """Yields the layers to try. Without counts nothing is left out unless the settings ask for it."""
    if isinstance(size, int):
        sizes: list[int | None] = [size if size < vocab_size else None]
    elif size == "full":
        yield Output(None, in_four_bits=False)
        return
    else:
        sizes = [None, *(_smaller_sizes(vocab_size) if counts else [])]
    for number in sizes:
        ids = None if number is None else most_frequent(counts or Counter(), number, vocab_size, always)
        yield from (Output(ids, in_four_bits) for in_four_bits in (False, True))


def _smaller_sizes(vocab_size: int) -> list[int]:
    """Returns how many tokens a head may draft instead of all."""
    return [each for each in SIZES if each <= vocab_size // 2][:MOST_SIZES]


def _covered(token_ids: torch.Tensor | None, counts: Counter[int] | None) -> float:
    """Returns the share of tokens that can be drafted at all."""
    if token_ids is None or not counts:
        return 1.0
    return sum(counts[token] for token in token_ids.tolist()) / counts.total()


def _speed(accepted: float, score: list[float], draft: float, fixed_length: int | None) -> float:
    """Returns the tokens per second with this draft length, or with the best one."""
    first, later = score
    more = max(0.0, later - first) / (SCORED - 1)
    return max(
        sum(accepted**place for place in range(length + 1)) / (first + length * (more + draft))
        for length in (LENGTHS if fixed_length is None else [fixed_length])
    )


def _seconds(model: Model, num_tokens: int) -> float:
    runner = ModelRunner.build(model, BLOCKS, BLOCK_SIZE, num_state_slots=1)
    states = StateSlots(1, runner.cache.copy_state) if runner.cache.states else None
    pool = BlockPool(BLOCKS, BLOCK_SIZE, states)
    found = [pass_seconds(runner, pool, [num_tokens]) for _ in range(REPEATS)]
    return min(seconds for seconds in found if seconds is not None)


def _in_words(token_ids: Sized | None, vocab_size: int, in_four_bits: bool) -> str:
    """Describes the layer with which a head drafts."""
    number = vocab_size if token_ids is None else len(token_ids)
    bits = ", with a copy of the output layer in 4 bits" if in_four_bits else ""
    return f"{number} of {vocab_size} tokens{bits}"
