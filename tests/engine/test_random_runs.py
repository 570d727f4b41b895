"""Random engines and requests say what plain decoding says; bugs of parts and budgets are planted."""

from collections.abc import Callable

import pytest

from tests.engine.random_runs import Arrival, Pair, RandomRun, check, random_run
from truedraft.engine.core.scheduler import Scheduler
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import Kind, ScheduledSequence
from truedraft.engine.messages import Generate, SamplingParams

SEEDS = range(24)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.make(tmp_path_factory.mktemp("random_runs"))


def check_all(pair: Pair) -> None:
    for seed in SEEDS:
        check(pair, random_run(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_run(pair: Pair, seed: int) -> None:
    assert check(pair, random_run(seed)) > 0


@pytest.mark.parametrize("wants", [{}, {"logprobs": 1}, {"prompt_logprobs": 1}], ids=str)
@pytest.mark.parametrize("budget", [6, 1])
def test_a_piece_of_one_token_beside_rows(pair: Pair, budget: int, wants: dict[str, int]) -> None:
    """A row and its drafts leave one token of the budget to a prompt of five; or a step has one at all."""
    row = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    late = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, **wants)
    requests = [Generate("row", [0, 1], row), Generate("late", [1, 2, 3, 4, 0], late)]
    arrivals = [Arrival(request, 8 * place, None) for place, request in enumerate(requests)]
    config = {"num_speculative_tokens": 4, "max_num_batched_tokens": budget, "block_size": 4}
    assert check(pair, RandomRun(config, has_draft=True, num_blocks=100, arrivals=arrivals)) == 2


def pieces_of_one_token_are_whole(patch: pytest.MonkeyPatch) -> None:
    honest = ScheduledSequence.__post_init__

    def decide(self: ScheduledSequence) -> None:
        honest(self)
        if self.num_tokens == 1:
            self.kind = Kind.DECODE

    patch.setattr(ScheduledSequence, "__post_init__", decide)


def drafts_beyond_the_end_need_room(patch: pytest.MonkeyPatch) -> None:
    """A sequence that fits waits for ever for blocks that it could never use."""
    honest = Scheduler._admit

    def admit(self: Scheduler, sequence: Sequence, budget: int) -> ScheduledSequence | None:
        fits = self.can_ever_fit(len(sequence) + sequence.num_speculative_tokens)
        return honest(self, sequence, budget) if fits else None

    patch.setattr(Scheduler, "_admit", admit)


@pytest.mark.parametrize(
    "plant",
    [pieces_of_one_token_are_whole, drafts_beyond_the_end_need_room],
)
def test_planted_bug_is_caught(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """The crashes are the largest of none and a missing block."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, ZeroDivisionError, ValueError, IndexError)):
        check_all(pair)
