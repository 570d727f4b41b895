"""Models with running states run in C, whole passes and rounds: the same bits in every way to run them."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec import structs

from tests.engine import grammars
from tests.engine.hybrid_models import CONTEXT, KINDS, VOCAB_SIZE, hybrid, hybrid_engine
from tests.engine.planners import loops_in_c
from tests.engine.random_runs import Pair, check, random_run
from tests.engine.test_hybrids import GREEDY, PROMPTS, SEEDED, few_slots, text, turns
from tests.models import outputs_by_choice, run_engine, stepped
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.messages import Failed, Generate, TokenOutput
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.library import load_library

pytestmark = pytest.mark.usefixtures("needs_compiler")

LAWS = {"greedy": GREEDY, "seeded": SEEDED}
ATTENTION = ("attention", "attention")


def engine(draft: FusedDecoder | None = None, kinds: tuple[str, ...] = KINDS, **config: Any) -> EngineCore:
    core = hybrid_engine(hybrid(in_c=True, kinds=kinds), draft, **{"step_seconds": 1.0, **config})
    assert loops_in_c(core)
    return core


def drafting(**config: Any) -> EngineCore:
    return engine(hybrid(noise=0.05, in_c=True), **config)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    """Each prompt alone, without drafts."""
    core = engine(num_speculative_tokens=0, max_num_sequences=1, prefix_caching=False)
    return {law: run_engine(core, PROMPTS, params) for law, params in LAWS.items()}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    library = load_library()
    assert library is not None
    before = library.get_num_threads()
    library.set_num_threads(request.param)
    yield
    library.set_num_threads(before)


IDS = text(1, 100)


def logits_of(model: FusedDecoder, cuts: list[int], is_whole: bool) -> torch.Tensor:
    cache = KVCache(model.caches, 30, 4, 2)
    runner = ModelRunner(model, cache, model.fast_pass(cache) if is_whole else None)
    assert isinstance(runner.fast_pass, NativeDecoder) == is_whole
    table = BlockTable()
    table.block_ids, table.state_slot = list(range(25)), 1
    ids, rows = iter(IDS), []
    for count in cuts:
        rows.append(runner.forward([Span(table, list(itertools.islice(ids, count)), count)]).logits)
    return torch.cat(rows)


@pytest.mark.usefixtures("threads")
def test_passes_have_the_same_bits_however_they_are_cut() -> None:
    """Whole passes in C are those of its functions, one by one, and agree with torch."""
    model = hybrid(in_c=True)
    at_once = logits_of(model, [100], is_whole=False)
    torch.testing.assert_close(at_once, logits_of(hybrid(), [100], is_whole=False), rtol=1e-4, atol=1e-4)
    for cuts in ([1] * 100, [33, 33, 33, 1], [7, 2, 16, 16, 29, 30]):
        assert torch.equal(logits_of(model, cuts, is_whole=True), at_once)
    assert torch.equal(logits_of(model, [61, 39], is_whole=False), at_once)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("k", "law"), [(0, "seeded"), (1, "greedy"), (3, "seeded"), (8, "greedy"), (32, "greedy")]
)
def test_drafts_change_nothing(expected: dict[str, list[list[int]]], k: int, law: str) -> None:
    """Requests arrive while others run, in chunks of some tokens, several rounds at a time."""
    core = drafting(num_speculative_tokens=k, max_num_batched_tokens=45)
    assert run_engine(core, PROMPTS, LAWS[law], arrivals=[0, 1, 2, 9]) == expected[law]
    if k:
        assert 0 < core.stats.num_accepted_tokens < core.stats.num_draft_tokens


@pytest.mark.parametrize(("of_target", "of_draft"), [(KINDS, ATTENTION), (ATTENTION, KINDS)])
def test_one_of_a_pair_has_states(of_target: tuple[str, ...], of_draft: tuple[str, ...]) -> None:
    alone = run_engine(engine(kinds=of_target, num_speculative_tokens=0), PROMPTS, GREEDY)
    core = engine(hybrid(kinds=of_draft, in_c=True), of_target)
    assert run_engine(core, PROMPTS, GREEDY) == alone


def test_many_rows_with_a_source_of_each_kind(expected: dict[str, list[list[int]]]) -> None:
    """Sixteen texts at a time: n-grams draft where they can, the draft model elsewhere."""
    core = drafting(max_num_sequences=16, method="auto", num_speculative_tokens=4)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(16)]
    found = run_engine(core, prompts, GREEDY, arrivals=[i // 5 for i in range(16)])
    assert found == [expected["greedy"][i % len(PROMPTS)] for i in range(16)]


def test_preempted_and_aborted_sequences_change_nothing(expected: dict[str, list[list[int]]]) -> None:
    core = drafting(max_num_sequences=4, prefix_caching=False)
    states = few_slots(core, 4, num_blocks=30)
    core.add(Generate("gone", PROMPTS[2], GREEDY))
    core.step()
    core.abort("gone")
    assert run_engine(core, PROMPTS, GREEDY) == expected["greedy"]
    assert core.scheduler.num_preemptions > 0
    assert states.num_free == 4


def test_a_chat_goes_on_from_its_states() -> None:
    cold, none = turns(engine(num_speculative_tokens=0, prefix_caching=False))
    warm, cached = turns(drafting())
    assert none == [0, 0, 0]
    assert cached[1] > 0
    assert warm == cold


def test_choices_share_the_state_of_their_prompt() -> None:
    found = []
    for core in (drafting(), engine(num_speculative_tokens=0, prefix_caching=False)):
        core.add(Generate("r", PROMPTS[3], SEEDED, n=3))
        found.append(outputs_by_choice(core))
    assert found[0] == found[1]


def test_log_probabilities_have_the_same_bits() -> None:
    params = structs.replace(GREEDY, logprobs=3)
    found = []
    for core in (drafting(max_num_batched_tokens=45), engine(num_speculative_tokens=0)):
        for number, prompt in enumerate(PROMPTS):
            core.add(Generate(str(number), prompt, params))
        logprobs: dict[str, list[Any]] = {str(number): [] for number in range(len(PROMPTS))}
        while core.has_work:
            for output in stepped(core):
                logprobs[output.request_id] += output.logprobs or []
        found.append(logprobs)
    assert found[0] == found[1]
    assert all(len(each) == GREEDY.max_tokens for each in found[0].values())


def test_a_round_that_cannot_be_verified_is_begun_anew() -> None:
    """A text ends whose logits are no numbers, in the round where others' prompts end past a fold."""
    core = engine(hybrid(noise=0.05, in_c=True), max_num_sequences=8)
    unknown = VOCAB_SIZE - 1
    params = structs.replace(GREEDY, logit_bias={unknown: -1000.0})  # no other text has it
    core.target.fast_pass._kept[2].embeddings.weight[unknown] = torch.nan
    prompts = [[unknown], *([token_id % unknown for token_id in text(n, 20)] for n in range(4))]
    for number, prompt in enumerate(prompts):
        core.add(Generate(str(number), prompt, params))
    found: dict[str, list[int]] = {}
    failed = []
    while core.has_work:
        for output in core.step():
            if isinstance(output, Failed):
                failed.append(output.request_id)
            elif isinstance(output, TokenOutput):
                found.setdefault(output.request_id, []).extend(output.token_ids)
    assert failed == ["0"]
    alone = engine(num_speculative_tokens=0, max_num_sequences=1)
    assert [found[str(n)] for n in range(1, 5)] == run_engine(alone, prompts[1:], params)


@pytest.fixture(scope="module")
def random_pair() -> Pair:
    models = [
        hybrid(2, noise, vocab_size=grammars.VOCAB_SIZE, eos_token_id=grammars.END, in_c=True)
        for noise in (0, 0.05)
    ]
    plain = hybrid_engine(models[0], num_speculative_tokens=0, max_model_len=CONTEXT)
    return Pair(*models, grammars.know_grammars(plain), hybrid_engine)


@pytest.mark.parametrize("seed", [3, 4, 5, 11])
def test_random_run(random_pair: Pair, seed: int) -> None:
    """Any parameters, priorities, aborts, chunks, blocks and slots give what plain decoding gives."""
    assert check(random_pair, random_run(seed)) > 0
