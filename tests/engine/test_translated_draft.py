"""Drafts from a model with another tokenizer: the same output, useful drafts, a cache that stays right."""

import gc
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers import models as token_models
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.conftest import Models
from tests.engine.hybrid_models import hybrid
from tests.engine.other_tokenizers import LEARNT, TOKENIZERS, save_learnt, save_tokenizer
from tests.engine.planners import loops_in_c, phases_of
from tests.engine.simulation import chi_square
from tests.engine.test_replay import Outcome, replay, traced
from tests.models import make_engine, run_engine, save_random_llama, stepped
from tests.reference import joint_distribution, with_temperature
from truedraft.engine import build
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.step import StepPlan
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.process.worker import describe
from truedraft.engine.proposers.draft_model import DraftModelProposer
from truedraft.engine.proposers.translated.draft_text import DraftText
from truedraft.engine.proposers.translated.proposer import TranslatedDraftProposer
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling.sampler import Sampler

STEPS = {"coarse": 80, "fine": 100, "metaspace": 100, "characters": 150}
DRAFTS = ["fine", "metaspace", "characters"]
GREEDY = SamplingParams(max_tokens=60, temperature=0)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of models that know the same text, by tokenizer; that of ``fine`` is padded."""
    root: Path = tmp_path_factory.mktemp("learnt")
    return {
        name: save_learnt(root / name, name, steps, vocab_size=320 if name == "fine" else None)
        for name, steps in STEPS.items()
    }


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Places in the text; one ends inside a character, one has no sense and broken UTF-8."""
    tokenizer = TOKENIZERS["coarse"]()
    texts = (LEARNT[:30], LEARNT[40:70], LEARNT[95:110])
    ids = [tokenizer.encode(text).ids for text in texts]
    turtle = tokenizer.encode("tortoise 🐢").ids
    return [*ids, turtle[:-1], [200, 201, 5, 190, 60, 61, 200]]


@pytest.fixture(scope="module")
def plain(learnt: dict[str, str], prompts: list[list[int]]) -> list[list[int]]:
    return run_engine(make_engine(learnt["coarse"], None), prompts, GREEDY)


def proposer_of(core: EngineCore) -> TranslatedDraftProposer:
    (proposer,) = phases_of(core).proposers
    assert isinstance(proposer, TranslatedDraftProposer)
    return proposer


def acceptance_rate(core: EngineCore) -> float:
    return core.stats.num_accepted_tokens / core.stats.num_draft_tokens


@pytest.mark.parametrize(
    ("draft", "k"),
    [*(("fine", k) for k in range(9)), *((draft, k) for draft in DRAFTS[1:] for k in (1, 4, 8))],
)
def test_greedy_text_is_the_same_and_drafts_are_accepted(
    learnt: dict[str, str], prompts: list[list[int]], plain: list[list[int]], draft: str, k: int
) -> None:
    core = make_engine(learnt["coarse"], learnt[draft], num_speculative_tokens=k)
    assert run_engine(core, prompts, GREEDY) == plain
    if k:
        assert acceptance_rate(core) > 0.5
        assert core.stats.draft_tokens_per_position[k - 1] > 0
        assert set(core.stats.drafts) == {"draft_model"}


@pytest.mark.parametrize("draft", DRAFTS)
def test_one_at_a_time_drafts_the_same(
    learnt: dict[str, str], prompts: list[list[int]], plain: list[list[int]], draft: str
) -> None:
    alone = make_engine(learnt["coarse"], learnt[draft], max_num_sequences=1)
    together = make_engine(learnt["coarse"], learnt[draft])
    assert run_engine(alone, prompts, GREEDY) == run_engine(together, prompts, GREEDY) == plain
    assert alone.stats.drafts == together.stats.drafts


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_seed_says_the_same_with_the_draft_and_without(
    learnt: dict[str, str], prompts: list[list[int]], draft: str
) -> None:
    params = [SamplingParams(max_tokens=40, seed=seed) for seed in range(len(prompts))]
    expected = run_engine(make_engine(learnt["coarse"], None), prompts, params)
    core = make_engine(learnt["coarse"], learnt[draft])
    assert run_engine(core, prompts, params) == expected
    assert 0.2 < acceptance_rate(core) < 1


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled", "exact_match"])
def test_traces_verify(learnt: dict[str, str], verification: str) -> None:
    rule = {"temperature": 0} if verification == "exact_match" else {"verification": verification}
    answer = traced(learnt["coarse"], learnt["fine"], **rule)
    reports = replay(answer, learnt["coarse"], learnt["fine"])
    assert {report.outcome for report in reports} == {Outcome.CONFIRMED}
    assert {report.round.source for report in reports} == {"none", "translated"}


class CheckedProposer:
    """After every draft: what the cache holds is right, and the draft is the model's own continuation."""

    def __init__(self, core: EngineCore, draft: str) -> None:
        self.proposer = proposer_of(core)
        self.fresh = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
        self.num_checked = 0
        self.inner = self.proposer._draft
        self.proposer._draft = self.draft  # type: ignore[method-assign]

    def draft(self, rows: list) -> None:  # type: ignore[type-arg]
        self.inner(rows)
        for row in rows:
            ids = row.state.draft_text.ids + row.drafted
            with torch.no_grad():
                logits = self.fresh(torch.tensor([ids])).logits[0, -len(row.drafted) - 1 : -1]
            most_likely = logits[:, : self.proposer.draft_tokenizer.num_tokens].argmax(-1)
            assert most_likely.tolist() == row.drafted
            # An end that is drawn is no draft, and what it follows is stored.
            assert row.state.stored == (ids if row.ended else ids[:-1])
            self.num_checked += len(row.drafted)
        used = 0
        for state in self.proposer._states.values():
            assert len(state.stored) == state.table.num_computed_tokens
            assert self.proposer.pool.blocks_for(len(state.stored)) <= len(state.table.block_ids)
            used += len(state.table.block_ids)
        assert used == self.proposer.pool.num_blocks - self.proposer.pool.num_free


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_draft_is_what_a_fresh_model_says_to_the_whole_text(
    learnt: dict[str, str], prompts: list[list[int]], draft: str
) -> None:
    core = make_engine(learnt["coarse"], learnt[draft], max_num_batched_tokens=11)
    checked = CheckedProposer(core, learnt[draft])
    params = [
        SamplingParams(max_tokens=30, temperature=seed % 2, seed=seed, verification="rejection")
        for seed in range(len(prompts))
    ]
    run_engine(core, prompts, params, arrivals=[0, 0, 3, 5, 9])
    assert checked.num_checked > 100


def test_a_draft_with_states_follows_text_that_is_cut_anew(
    learnt: dict[str, str], prompts: list[list[int]], plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further text changes the draft's last tokens, which its states must not have been folded over."""
    honest, draft = build.load_model, hybrid(vocab_size=320, kinds=("delta rule", "attention"))
    monkeypatch.setattr(
        build, "load_model", lambda path, options: draft if path == learnt["fine"] else honest(path, options)
    )
    core = make_engine(learnt["coarse"], learnt["fine"], num_speculative_tokens=5)
    checked = CheckedProposer(core, learnt["fine"])

    def fresh(ids: torch.Tensor) -> SimpleNamespace:
        table = BlockTable()
        table.block_ids, table.state_slot = [0], 0
        runner = ModelRunner.build(draft, num_blocks=1, block_size=ids.numel(), num_state_slots=1)
        return SimpleNamespace(
            logits=runner.forward([Span(table, ids[0].tolist(), ids.numel())]).logits[None]
        )

    checked.fresh = fresh
    params = msgspec.structs.replace(GREEDY, max_tokens=24)
    assert run_engine(core, prompts[:2], params) == [text[:24] for text in plain[:2]]
    assert checked.num_checked > 50


def test_few_draft_blocks_mean_fewer_drafts_and_nothing_else(
    learnt: dict[str, str], prompts: list[list[int]], plain: list[list[int]]
) -> None:
    roomy = make_engine(learnt["coarse"], learnt["fine"])
    tight = make_engine(learnt["coarse"], learnt["fine"])
    proposer_of(tight).pool.__init__(40, 4)  # type: ignore[misc]
    CheckedProposer(tight, learnt["fine"])
    assert run_engine(roomy, prompts, GREEDY) == run_engine(tight, prompts, GREEDY) == plain
    assert 0 < tight.stats.num_draft_tokens < 0.9 * roomy.stats.num_draft_tokens


def test_preempted_sequences_lend_their_draft_blocks(
    learnt: dict[str, str], prompts: list[list[int]]
) -> None:
    params = [SamplingParams(max_tokens=60, seed=seed) for seed in range(len(prompts))]
    expected = run_engine(make_engine(learnt["coarse"], None), prompts, params)
    core = make_engine(learnt["coarse"], learnt["fine"])
    core.scheduler.target_pool.__init__(40, 4)  # type: ignore[misc]
    proposer_of(core).pool.__init__(60, 4)  # type: ignore[misc]
    proposer, lent = proposer_of(core), []
    truncate = proposer._truncate

    def watched(state: Any, num_tokens: int) -> None:
        lent.extend(state.stored[num_tokens:] if num_tokens == 0 else [])
        truncate(state, num_tokens)

    proposer._truncate = watched  # type: ignore[method-assign]
    CheckedProposer(core, learnt["fine"])
    assert run_engine(core, prompts, params) == expected
    assert core.scheduler.num_preemptions > 0
    assert lent


def test_ended_and_aborted_sequences_leave_nothing_behind(learnt: dict[str, str]) -> None:
    core = make_engine(learnt["coarse"], learnt["fine"])
    proposer = proposer_of(core)
    for name in "abc":
        params = SamplingParams(max_tokens=8 if name == "a" else 500, temperature=0)
        core.add(Generate(request_id=name, prompt_token_ids=[5, 60, 61], params=params))
    for _ in range(10):
        core.step()
    gc.collect()
    assert len(proposer._states) == 2
    core.abort("b")
    core.abort("c")
    core.step()
    gc.collect()
    assert len(proposer._states) == 0
    assert proposer.pool.usage == 0


@pytest.mark.usefixtures("needs_compiler")
def test_prompts_are_stored_beside_rounds_in_c(learnt: dict[str, str]) -> None:
    core = make_engine(learnt["coarse"], learnt["fine"], num_speculative_tokens="auto")
    assert loops_in_c(core)
    core.add(Generate("a", [5, 60, 61], SamplingParams(max_tokens=9, temperature=0)))
    core.step()
    (state,) = proposer_of(core)._states.values()
    assert state.draft_text.ids == state.stored


def test_a_text_longer_than_the_drafts_context_goes_on_undrafted(learnt: dict[str, str]) -> None:
    core = make_engine(learnt["coarse"], learnt["characters"])
    proposer_of(core).max_num_ids = 120
    params = SamplingParams(max_tokens=100, temperature=0)
    expected = run_engine(make_engine(learnt["coarse"], None), [[5, 60]], params)
    assert run_engine(core, [[5, 60]], params) == expected
    assert 0 < core.stats.num_draft_tokens < 60


def test_where_the_draft_ends_its_text_the_target_is_to_end_too(
    learnt: dict[str, str], prompts: list[list[int]]
) -> None:
    core = make_engine(learnt["coarse"], learnt["characters"], num_speculative_tokens=8)
    proposer = proposer_of(core)
    assert proposer.eos_token_id == proposer.target_tokenizer._fast.token_to_id("<|end|>")
    proposer._end_ids |= {proposer.draft_tokenizer.encode("?").ids[0]}
    core.add(Generate("r", prompts[1][:-6], msgspec.structs.replace(GREEDY, trace=True)))
    rounds = [output.trace for _ in range(20) if core.has_work for output in stepped(core)]
    ended = [r for r in rounds if r is not None and r.draft_ids[-1:] == [proposer.eos_token_id]]
    assert ended
    assert all(r.num_accepted == len(r.draft_ids) - 1 for r in ended)


def test_the_policy_takes_it_for_a_source_with_costs(
    learnt: dict[str, str], prompts: list[list[int]], plain: list[list[int]]
) -> None:
    core = make_engine(learnt["coarse"], learnt["fine"], num_speculative_tokens="auto")
    assert run_engine(core, prompts * 2, GREEDY) == plain * 2
    assert core.stats.num_draft_tokens > 0
    state = core.speculation()
    assert state["policy"] == "auto"
    assert any(key.startswith("draft_model") for key in state["sources"])  # type: ignore[attr-defined]


VOCAB_SIZE, NUM_TOKENS, TEMPERATURE = 6, 3, 0.8


@dataclass(frozen=True)
class TinyPair:
    target: str
    draft: str
    joint: np.ndarray  # exact distribution of the three tokens after [2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Random models over a, b and c: some of the target's tokens are two letters, as are others of the
    draft's. What the target draws is seldom how its tokenizer would cut it."""
    root: Path = tmp_path_factory.mktemp("tiny")

    def save(name: str, seed: int, merges: list[tuple[str, str]]) -> str:
        strings = ["a", "b", "c", *("".join(merge) for merge in merges)]
        tokenizer = Tokenizer(token_models.BPE({string: i for i, string in enumerate(strings)}, merges))
        tokenizer.decoder = decoders.Fuse()
        folder = save_random_llama(root / name, seed, vocab_size=len(strings), layers=1, hidden=16)
        tokenizer.save(f"{folder}/tokenizer.json")
        return folder

    target = save("target", 11, [("a", "b"), ("b", "c"), ("c", "a")])
    draft = save("draft", 12, [("a", "c"), ("b", "a")])
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)

    def logits(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(torch.tensor([ids])).logits[0])

    return TinyPair(target, draft, joint_distribution(with_temperature(logits, TEMPERATURE), [2], NUM_TOKENS))


def p_value(pair: TinyPair, verification: str, in_flight: int, num_samples: int) -> float:
    core = make_engine(
        pair.target,
        pair.draft,
        num_speculative_tokens=2,
        max_num_sequences=in_flight,
        verification=verification,
    )
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=TEMPERATURE, seed=seed)
        for seed in range(num_samples)
    ]
    outputs = run_engine(core, [[2]] * num_samples, params)
    assert acceptance_rate(core) > 0.02
    counts = np.zeros_like(pair.joint)
    for tokens, count in Counter(map(tuple, outputs)).items():
        counts[tokens] = count
    return chi_square(counts.ravel(), pair.joint.ravel())


@pytest.mark.parametrize(("in_flight", "num_samples"), [(1, 200), (8, 1500)])
@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_joint_distribution_is_the_targets(
    tiny: TinyPair, verification: str, in_flight: int, num_samples: int
) -> None:
    assert p_value(tiny, verification, in_flight, num_samples) > 1e-4


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_drafts_called_drawn_are_caught(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch, verification: str
) -> None:
    """A planted bug: the greedy draft claims to have been drawn from a distribution."""
    honest = TranslatedDraftProposer.propose

    def propose(self: TranslatedDraftProposer, plan: StepPlan, sampler: Sampler) -> Drafts:
        drafts = honest(self, plan, sampler)
        flat = torch.full((*drafts.token_ids.shape, VOCAB_SIZE), 1 / VOCAB_SIZE)
        return Drafts(drafts.token_ids, flat, drafts.lengths)

    monkeypatch.setattr(TranslatedDraftProposer, "propose", propose)
    assert p_value(tiny, verification, 8, 1500) < 1e-6


def test_a_lost_piece_of_text_costs_acceptance_only(
    learnt: dict[str, str], prompts: list[list[int]], plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: the draft never hears of every third character."""
    honest = DraftText.append
    monkeypatch.setattr(DraftText, "append", lambda self, text: honest(self, text[:1] + text[3:]))
    core = make_engine(learnt["coarse"], learnt["fine"])
    assert run_engine(core, prompts, GREEDY) == plain
    assert acceptance_rate(core) < 0.6


def test_a_cache_that_keeps_rejected_tokens_is_caught(
    learnt: dict[str, str], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: as many of the cached tokens are kept as before, whatever they are."""

    def truncate(self: TranslatedDraftProposer, state: object, num_tokens: int) -> None:
        ids = state.draft_text.ids  # type: ignore[attr-defined]
        num_kept = min(len(state.stored), max(0, len(ids) - 1))  # type: ignore[attr-defined]
        self.pool.truncate(state.table, num_kept)  # type: ignore[attr-defined]
        state.stored[:] = ids[:num_kept]  # type: ignore[attr-defined]

    monkeypatch.setattr(TranslatedDraftProposer, "_truncate", truncate)
    core = make_engine(learnt["coarse"], learnt["fine"])
    CheckedProposer(core, learnt["fine"])
    with pytest.raises(AssertionError):
        run_engine(core, prompts, msgspec.structs.replace(GREEDY, temperature=1, seed=1))


def test_which_way_a_pair_gets(learnt: dict[str, str], models: Models, tmp_path: Path) -> None:
    """The meaning of the ids decides, not their number."""
    padded = save_random_llama(tmp_path / "padded", seed=1, vocab_size=2000)
    save_tokenizer(TOKENIZERS["coarse"](), padded)
    core = make_engine(learnt["coarse"], padded)
    assert isinstance(phases_of(core).proposers[0], DraftModelProposer)
    assert len(core.scheduler.draft_pools) == 1

    same_size = save_random_llama(tmp_path / "same_size", seed=1, vocab_size=400)
    save_tokenizer(TOKENIZERS["metaspace"](), same_size)
    core = make_engine(learnt["coarse"], same_size)
    assert proposer_of(core)
    assert core.scheduler.draft_pools == []

    without = make_engine(models.target, models.padded_draft)
    assert isinstance(phases_of(without).proposers[0], DraftModelProposer)
    nameless = save_random_llama(tmp_path / "nameless", seed=1, vocab_size=2000)
    with pytest.raises(ModelLoadError, match="2000 tokens, the target's 16.*no"):
        make_engine(models.target, nameless)


@pytest.mark.parametrize("error", [TypeError, AssertionError, KeyError, OSError])
def test_a_tokenizer_that_fails_to_load_is_none(
    error: type[Exception], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' classes fail on missing files in their own ways, if the package they need is there."""

    def fail(path: str) -> None:
        raise error

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    core = make_engine(models.target, models.close_draft)
    assert isinstance(phases_of(core).proposers[0], DraftModelProposer)


def test_the_server_names_the_draft(learnt: dict[str, str]) -> None:
    from truedraft.engine.config import EngineConfig

    core = make_engine(learnt["coarse"], learnt["fine"])
    ready = describe(core, EngineConfig(target=learnt["coarse"], draft=learnt["fine"]))
    assert ready.draft == learnt["fine"]
    assert ready.methods == ["draft_model", "grammar", "ngram", "prediction"]
