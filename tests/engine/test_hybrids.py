"""Models with running states say the same whoever drafts, whoever is near, and whatever is taken back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from tests.engine import grammars
from tests.engine.hybrid_models import CONTEXT, KINDS, VOCAB_SIZE, hybrid, hybrid_engine
from tests.engine.planners import draft_cache
from tests.engine.random_runs import Pair, check, random_run
from tests.models import outputs_by_choice, run_engine
from truedraft.engine.config import BUNDLED_PAIR
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.state_slots import StateSlots
from truedraft.engine.core.step import AUTO_LIMITS, PROPOSER_LIMIT
from truedraft.engine.layers import torch_recurrent
from truedraft.engine.llm import LLM
from truedraft.engine.memory import batch
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.memory.recurrent_state import CHUNK, ROLLBACK
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models.base import ForwardOutput
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.parameters import PARAMETERS

TRAINED = Path(__file__).parents[2] / "benchmarks" / "story_hybrid"
NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
SEEDED = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.2, seed=5)


def text(number: int, length: int) -> list[int]:
    return [(5 * i * i + i + 7 * number) % VOCAB_SIZE for i in range(length)]


PROMPTS = [text(number, length) for number, length in enumerate((1, 16, 48, 70))]


def few_slots(core: EngineCore, num_slots: int, num_blocks: int = 200) -> StateSlots:
    """Gives the target's pool less room."""
    pool = core.scheduler.target_pool
    assert pool.states is not None
    states = StateSlots(num_slots, pool.states.copy)
    core.scheduler.target_pool = BlockPool(num_blocks, pool.block_size, states)
    return states


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    """Each prompt alone, without drafts, greedily and with a seed."""
    core = hybrid_engine(hybrid(), num_speculative_tokens=0, max_num_sequences=1, prefix_caching=False)
    return {
        "greedy": run_engine(core, PROMPTS, GREEDY),
        "seeded": run_engine(core, PROMPTS, SEEDED),
    }


@pytest.mark.parametrize(("k", "law"), [(0, "greedy"), (3, "seeded"), (8, "greedy"), (32, "greedy")])
def test_drafts_change_nothing(expected: dict[str, list[list[int]]], k: int, law: str) -> None:
    """Requests arrive while others run, in chunks of some tokens."""
    core = hybrid_engine(hybrid(), hybrid(noise=0.05), num_speculative_tokens=k, max_num_batched_tokens=45)
    params = {"greedy": GREEDY, "seeded": SEEDED}[law]
    assert run_engine(core, PROMPTS, params, arrivals=[0, 1, 2, 9]) == expected[law]
    if k:
        assert 0 < core.stats.num_accepted_tokens < core.stats.num_draft_tokens


ATTENTION = ("attention", "attention")


@pytest.mark.parametrize(("of_target", "of_draft"), [(KINDS, ATTENTION), (ATTENTION, KINDS)])
def test_one_of_a_pair_has_states(of_target: tuple[str, ...], of_draft: tuple[str, ...]) -> None:
    target = hybrid(kinds=of_target)
    alone = run_engine(hybrid_engine(target, num_speculative_tokens=0), PROMPTS, GREEDY)
    assert run_engine(hybrid_engine(target, hybrid(kinds=of_draft)), PROMPTS, GREEDY) == alone


def test_a_sequence_without_a_slot_waits(expected: dict[str, list[list[int]]]) -> None:
    core = hybrid_engine(hybrid(), hybrid(noise=0.05), max_num_sequences=4)
    states, running = few_slots(core, 2), []
    honest = core.scheduler.schedule
    core.scheduler.schedule = lambda: (running.append(len(core.scheduler.running)), honest())[1]  # type: ignore[method-assign]
    assert run_engine(core, PROMPTS, GREEDY) == expected["greedy"]
    assert max(running) == 2
    assert states.num_free == 2


def test_preempted_sequences_go_on_as_if_nothing_was(expected: dict[str, list[list[int]]]) -> None:
    core = hybrid_engine(hybrid(), hybrid(noise=0.05), max_num_sequences=4, prefix_caching=False)
    states = few_slots(core, 4, num_blocks=30)
    assert run_engine(core, PROMPTS, GREEDY) == expected["greedy"]
    assert core.scheduler.num_preemptions > 0
    assert states.num_free == 4


def test_an_aborted_sequence_gives_its_slots_back(expected: dict[str, list[list[int]]]) -> None:
    core = hybrid_engine(hybrid(), hybrid(noise=0.05))
    core.add(Generate("gone", PROMPTS[2], GREEDY))
    core.step()
    core.abort("gone")
    assert run_engine(core, PROMPTS, GREEDY) == expected["greedy"]
    for pool in (core.scheduler.target_pool, draft_cache(core).pool):
        assert pool.states is not None
        assert pool.states.num_free == pool.states.num_slots
        assert pool.num_free == pool.num_blocks


def turns(core: EngineCore, num_turns: int = 3) -> tuple[list[list[int]], list[int]]:
    """Returns the answers of a chat, and how many tokens of each prompt were found in the cache."""
    prompt, answers, cached = text(3, 30), [], []
    for _ in range(num_turns):
        before = core.scheduler.num_prefix_hits
        answers += run_engine(core, [prompt], GREEDY)
        cached.append(core.scheduler.num_prefix_hits - before)
        prompt = [*prompt, *answers[-1], *text(9, 7)]
    return answers, cached


def test_a_chat_goes_on_from_its_states() -> None:
    """Block by block all that a turn has computed is taken over by the next one, and changes nothing."""
    cold, none = turns(hybrid_engine(hybrid(), prefix_caching=False))
    assert none == [0, 0, 0]
    warm, cached = turns(hybrid_engine(hybrid(), hybrid(noise=0.05)))
    assert warm == cold
    # A turn has all tokens of the one before but the last, which was never computed.
    lengths = [30 + NUM_TOKENS - 1, 30 + NUM_TOKENS + 7 + NUM_TOKENS - 1]
    assert cached == [0, *(length // 4 * 4 for length in lengths)]


def test_choices_share_the_state_of_their_prompt(expected: dict[str, list[list[int]]]) -> None:
    core = hybrid_engine(hybrid(), hybrid(noise=0.05))
    core.add(Generate("r", PROMPTS[3], SEEDED, n=3))
    found = outputs_by_choice(core)
    assert found["r", 0] == expected["seeded"][3]
    assert len({tuple(each) for each in found.values()}) == 3
    assert core.scheduler.num_prefix_hits == 2 * 68
    alone = hybrid_engine(hybrid(), num_speculative_tokens=0, prefix_caching=False)
    alone.add(Generate("r", PROMPTS[3], SEEDED, n=3))
    assert outputs_by_choice(alone) == found


def test_a_hit_is_cut_to_what_has_a_state() -> None:
    """A text that differs from another in the middle finds its blocks, but no states. When a third one has
    begun in the same way, they are there."""
    core, alone = (
        hybrid_engine(hybrid(), num_speculative_tokens=0, prefix_caching=on) for on in (True, False)
    )
    hits = []
    for number in range(4):
        prompt = [*text(3, 90), *text(5 + number, 10)]
        before = core.scheduler.num_prefix_hits
        assert run_engine(core, [prompt], GREEDY) == run_engine(alone, [prompt], GREEDY)
        hits.append(core.scheduler.num_prefix_hits - before)
    assert hits == [0, 0, 88, 88]


def test_all_drafts_that_may_be_asked_for_can_be_taken_back() -> None:
    longest = max(PARAMETERS["num_speculative_tokens"].range.high, PROPOSER_LIMIT, *AUTO_LIMITS.values())
    assert longest <= ROLLBACK


def check_hits(answers: list[list[int]]) -> None:
    """Asks everything twice, and to go on from each answer, all at the same time."""
    core = hybrid_engine(hybrid(), hybrid(noise=0.05))
    alone = hybrid_engine(hybrid(), num_speculative_tokens=0, prefix_caching=False)
    longer = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    few = structs.replace(GREEDY, max_tokens=2)
    for number in range(2):
        assert run_engine(core, PROMPTS, GREEDY) == answers
        assert core.scheduler.num_prefix_hits >= number * (12 + 44 + 68)  # all but a token, in blocks of four
        assert run_engine(core, longer, few) == run_engine(alone, longer, few)


def test_hits_change_nothing(expected: dict[str, list[list[int]]]) -> None:
    check_hits(expected["greedy"])


def test_a_trained_hybrid_accepts_what_the_bundled_draft_drafts() -> None:
    """Its checkpoint has the layout of Qwen 3.5; the draft was trained for another target."""
    prompts = ["Once upon a time, there was a little girl named Lily.", "Tom had a dog."]
    greedy, found = structs.replace(GREEDY, max_tokens=48), []
    for draft, k in (("none", 0), (str(BUNDLED_PAIR / "draft"), 4)):
        llm = LLM(target=str(TRAINED), draft=draft, num_speculative_tokens=k, num_threads=1)
        found.append(llm.generate(prompts, greedy))
    assert [each.text for each in found[0]] == [each.text for each in found[1]]
    drafted, accepted = (
        sum(getattr(each, f"num_{what}_tokens") for each in found[1]) for what in ("draft", "accepted")
    )
    assert 0.3 * drafted < accepted < drafted


@pytest.fixture(scope="module")
def random_pair() -> Pair:
    models = [
        hybrid(2, noise, vocab_size=grammars.VOCAB_SIZE, eos_token_id=grammars.END) for noise in (0, 0.05)
    ]
    plain = hybrid_engine(models[0], num_speculative_tokens=0, max_model_len=CONTEXT)
    return Pair(*models, grammars.know_grammars(plain), hybrid_engine)


@pytest.mark.parametrize("seed", [2, 11])
def test_random_run(random_pair: Pair, seed: int) -> None:
    """Any parameters, priorities, aborts, chunks, blocks and slots give what plain decoding gives."""
    assert check(random_pair, random_run(seed)) > 0


def drafts_are_certain(patch: pytest.MonkeyPatch) -> None:
    """States are folded over drafts that may be rejected."""
    patch.setattr(batch.Span, "num_folded_after", property(lambda span: span.end // CHUNK * CHUNK))


def the_log_is_not_truncated(patch: pytest.MonkeyPatch) -> None:
    """A rejected draft's record stays where another token has come in its place."""

    def keep(self: torch_recurrent._Chunks) -> None:
        for stored, ours in zip(self.stored, (self.keys, self.values, self.decays), strict=True):
            written = stored[self.log] != 0
            stored[self.log] = torch.where(written, stored[self.log], ours.view(CHUNK, -1))

    patch.setattr(torch_recurrent._Chunks, "keep", keep)


def states_are_folded_a_token_early(patch: pytest.MonkeyPatch) -> None:
    honest = torch_recurrent._Chunks.fold

    def fold(self: torch_recurrent._Chunks) -> None:
        self.values[-1] = 0
        honest(self)

    patch.setattr(torch_recurrent._Chunks, "fold", fold)


def snapshots_are_of_steps(patch: pytest.MonkeyPatch) -> None:
    """A copy is made when the next pass has run: of that step, not of the position that it is for."""
    copy, forward = KVCache.copy_state, ModelRunner.forward
    late: list[tuple[KVCache, int, int]] = []

    def run(self: ModelRunner, *args: Any, **more: Any) -> ForwardOutput:
        output = forward(self, *args, **more)
        for which in [each for each in late if each[0] is self.cache]:
            late.remove(which)
            copy(*which)
        return output

    patch.setattr(KVCache, "copy_state", lambda *which: late.append(which))
    patch.setattr(ModelRunner, "forward", run)


def value_heads_are_in_the_other_order(patch: pytest.MonkeyPatch) -> None:
    honest = torch_recurrent._per_head
    patch.setattr(torch_recurrent, "_per_head", lambda x, heads, tiled: honest(x, heads, not tiled))


def nothing_is_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "copy_state", lambda *_: None)


def slots_are_shared(patch: pytest.MonkeyPatch) -> None:
    honest = StateSlots.take

    def take(self: StateSlots, table: BlockTable) -> None:
        honest(self, table)
        table.state_slot = 0

    patch.setattr(StateSlots, "take", take)


@pytest.mark.parametrize(
    "plant",
    [
        drafts_are_certain,
        the_log_is_not_truncated,
        states_are_folded_a_token_early,
        value_heads_are_in_the_other_order,
        snapshots_are_of_steps,
        nothing_is_copied,
        slots_are_shared,
    ],
)
def test_planted_bug_is_caught(
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_hits(expected["greedy"])
