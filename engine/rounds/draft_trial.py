"""Tries a draft that nobody asked for: how much is accepted in short texts, and what its passes take.

The target continues built-in beginnings, greedily, with the draft in the way in which it would serve. What is
accepted at each place, and the seconds of passes, say how many times the speed of the target alone that is.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from truedraft.engine.core.engine import EngineCore
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.formats.pretrained_tokenizer import load_pretrained_tokenizer
from truedraft.engine.messages import Failed, Generate, Method, SamplingParams
from truedraft.engine.rounds.calibrate import distinct_ids
from truedraft.engine.speculation.costs import PassCosts

# Beginnings of a story, a program and a list of facts.
BEGINNINGS = (
    "The train was late again, so the two sisters sat down on the bench and began to talk about",
    "def mean(numbers: list[float]) -> float:\n    if not numbers:\n        raise ValueError(",
    "Answer in one sentence. Question: Why does ice float on water? Answer:",
)
# Tokens of a beginning at most and of what follows it, and drafted tokens where the length is open.
MAX_PROMPT, NUM_TOKENS, LENGTH = 32, 24, 4
# Seconds after which no further text is begun.
SECONDS = 4.0
# Room for a text in the caches, in tokens.
ROOM = 128


@dataclass(frozen=True)
class Trial:
    """Holds what a draft brought. ``accepted`` is the share of rounds in which the token at each place was
    accepted; ``cost`` is that of a drafted token in passes of the target, and ``gain`` how many times the
    target's own speed ``length`` drafted tokens are expected to make."""

    accepted: list[float]
    cost: float
    gain: float
    length: int

    def __str__(self) -> str:
        """Says the speed, and the two figures that it is made of."""
        kept = ", ".join(f"{share:.0%}" for share in self.accepted)
        return (
            f"{self.gain:.2f} times the speed at length {self.length} ({kept} accepted by place, "
            f"{self.cost:.2f} of a pass for a drafted token)"
        )


def beginnings(target: str, vocab_size: int) -> list[list[int]]:
    """Returns the built-in texts as the tokenizer of the model at ``target`` writes them; ids from all over
    the vocabulary where it cannot."""
    try:
        tokenizer = load_pretrained_tokenizer(target)
        found = [list(tokenizer(text)["input_ids"])[:MAX_PROMPT] for text in BEGINNINGS]
    except (OSError, ValueError):
        found = []
    usable = [ids for ids in found if ids and max(ids) < vocab_size]
    return usable or [distinct_ids(min(8, vocab_size), vocab_size)]


def accepted_by_place(
    core: EngineCore, method: Method, prompts: Sequence[list[int]], length: int
) -> list[float]:
    """Returns the share of rounds in which each of ``length`` drafted tokens was accepted; raises
    ``ModelLoadError`` if the draft fails."""
    params = SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        seed=0,
        ignore_eos=True,
        method=method,
        num_speculative_tokens=length,
    )
    deadline = time.monotonic() + SECONDS
    for number, prompt in enumerate(prompts):
        core.add(Generate(str(number), prompt, params))
        while core.has_work:
            for output in core.step():
                if isinstance(output, Failed):
                    raise ModelLoadError(output.message)
        if time.monotonic() > deadline:
            break
    stats = core.snapshot()
    drafted, accepted = stats.draft_tokens_per_position, stats.accepted_tokens_per_position
    # A draft that is cut at the end of a text says nothing of later places.
    return [
        kept / made if made else 0.0 for made, kept in zip(drafted[:length], accepted[:length], strict=True)
    ]


def trial_of(accepted: list[float], score: PassCosts, draft: PassCosts, lengths: Sequence[int]) -> Trial:
    """Returns what the best of the ``lengths`` is expected to make of such acceptance and such passes."""
    # What is accepted at a place was accepted before it; few rounds may count otherwise.
    reached = [*accumulate(accepted, min)]
    plain, drafted = score(1), draft(1)

    def gain(length: int) -> float:
        return (1 + sum(reached[:length])) * plain / (score(length + 1) + length * drafted)

    best = max(lengths, key=gain)
    return Trial(reached, drafted / plain, gain(best), best)
