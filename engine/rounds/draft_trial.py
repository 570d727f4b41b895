"""Tries a draft that nobody asked for: how much is accepted in short texts, and how long its passes take.

The target continues built-in beginnings, greedily, with the draft as it would serve. The acceptance at each
place, and the seconds of passes, give the expected speed relative to the target alone.
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

# The texts begin a story, a program and a list of facts.
BEGINNINGS = (
    "The train was late again, so the two sisters sat down on the bench and began to talk about",
    "def mean(numbers: list[float]) -> float:\n    if not numbers:\n        raise ValueError(",
    "Answer in one sentence. Question: Why does ice float on water? Answer:",
)
# A beginning has at most this many tokens, this many follow it, and this many are drafted where the length is
# open.
MAX_PROMPT, NUM_TOKENS, LENGTH = 32, 24, 4
# No further text is begun after this many seconds.
SECONDS = 4.0
# The caches have memory for a text of this many tokens.
ROOM = 128


@dataclass(frozen=True)
class Trial:
    """Holds the results for a draft.

    ``accepted`` is the share of rounds in which the token at each place was accepted; ``cost`` is that of a
    drafted token in passes of the target, and ``gain`` the expected speed with ``length`` drafted tokens
    relative to the target's own.
    """

    accepted: list[float]
    cost: float
    gain: float
    length: int

    def __str__(self) -> str:
        """Returns the speed, and the two figures of which it is made."""
        kept = ", ".join(f"{share:.0%}" for share in self.accepted)
        return (
            f"{self.gain:.2f} times the speed at length {self.length} ({kept} accepted by place, "
            f"{self.cost:.2f} of a pass for a drafted token)"
        )


def beginnings(target: str, vocab_size: int) -> list[list[int]]:
    """Returns the built-in texts as the tokenizer of the model at ``target`` encodes them; ids from all over
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
    """Returns the trial with the best of the ``lengths``, given this acceptance and these passes."""
    # A token is accepted only if the one before it was; with few rounds the counts may contradict that.
    reached = [*accumulate(accepted, min)]
    plain, drafted = score(1), draft(1)

    def gain(length: int) -> float:
        return (1 + sum(reached[:length])) * plain / (score(length + 1) + length * drafted)

    best = max(lengths, key=gain)
    return Trial(reached, drafted / plain, gain(best), best)
