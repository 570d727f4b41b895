"""Draws and verdicts are chosen independently of each other: every pair is exact, or refused by name."""

import msgspec
import pytest
import torch

from tests.engine import gates
from tests.engine.conftest import Models
from tests.engine.test_replay import replay, traced
from tests.models import make_engine, run_engine
from truedraft.engine.commands.replay_round import Outcome
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.needs import Need
from truedraft.engine.messages import DraftSampleMethod, Generate, SamplingParams
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.drafts import DraftDraw
from truedraft.engine.sampling.step_rows import StepRows
from truedraft.engine.sampling.torch_ops import TorchOps
from truedraft.engine.speculation.planner import group_name

SAMPLED_RULES = (Rule.REJECTION, Rule.BLOCK, Rule.COUPLED)
METHODS: tuple[DraftSampleMethod, ...] = ("greedy", "probabilistic")
CUTS = {
    "plain": SamplingParams(max_tokens=9),
    "cut": SamplingParams(max_tokens=9, temperature=0.7, top_k=3),
    "changed": SamplingParams(max_tokens=9, temperature=1.3, frequency_penalty=0.9, logit_bias={2: 1.0}),
}
every_method = pytest.mark.parametrize("method", METHODS)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rule", SAMPLED_RULES)
def test_a_greedy_draft_is_exact(rule: Rule, cut: str) -> None:
    gates.joint_distribution(CUTS[cut], rule, drafts_greedily=True)


def judged_as_if_drawn(patch: pytest.MonkeyPatch) -> None:
    """Takes the most likely token, and lets the softmax stand for what it was drawn from."""
    honest = TorchOps._draw

    def draw(
        self: TorchOps,
        step: StepRows,
        rule: Rule,
        greedily: bool,
        indices: list[int],
        logits: torch.Tensor,
        offset: int,
    ) -> DraftDraw:
        drawn = honest(self, step, rule, False, indices, logits, offset)
        return DraftDraw(logits.argmax(-1), drawn.probs) if greedily else drawn

    patch.setattr(TorchOps, "_draw", draw)


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
def test_a_greedy_draft_that_is_judged_as_if_drawn_is_caught(
    monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    """A planted bug."""
    judged_as_if_drawn(monkeypatch)
    with pytest.raises(AssertionError):
        gates.joint_distribution(CUTS["plain"], rule, drafts_greedily=True)


def drafting(models: Models, **config: object) -> EngineCore:
    return make_engine(models.target, models.close_draft, num_speculative_tokens=4, **config)


@every_method
@pytest.mark.parametrize(
    "base",
    [
        SamplingParams(max_tokens=30, temperature=0),
        SamplingParams(max_tokens=30, temperature=0, verification="exact_match"),
        SamplingParams(max_tokens=30, top_k=1, verification="block"),
        SamplingParams(max_tokens=30, seed=3),
    ],
    ids=["greedy", "exact match", "top-k 1", "coupled"],
)
def test_the_tokens_are_those_of_plain_decoding(
    models: Models, base: SamplingParams, method: DraftSampleMethod
) -> None:
    params = [msgspec.structs.replace(base, draft_sample_method=method) for _ in gates.PROMPTS]
    core = drafting(models)
    plain = run_engine(make_engine(models.target, None), gates.PROMPTS, base)
    assert run_engine(core, gates.PROMPTS, params) == plain
    assert 0 < core.stats.num_accepted_tokens < core.stats.num_draft_tokens


def test_a_random_draft_of_a_greedy_request_is_drawn(models: Models) -> None:
    """It is accepted less often than the most likely one, which a draft that is the target itself shows."""
    rates = {}
    for method in METHODS:
        core = make_engine(models.target, models.target, method="draft_model", num_speculative_tokens=4)
        params = SamplingParams(max_tokens=40, temperature=0, draft_sample_method=method)
        run_engine(core, gates.PROMPTS, params)
        rates[method] = core.stats.num_accepted_tokens / core.stats.num_draft_tokens
    assert rates["greedy"] == 1
    assert rates["probabilistic"] < 0.9


def test_rows_that_draw_differently_share_a_batch(models: Models) -> None:
    """Bit for bit what each says alone, whatever noise its neighbours keep."""
    params = [
        SamplingParams(max_tokens=20, seed=number, draft_sample_method=method, verification=verification)
        for number, (method, verification) in enumerate(
            (method, verification)
            for verification in ("coupled", "rejection", "block")
            for method in (None, *METHODS)
        )
    ]
    params.append(SamplingParams(max_tokens=20, temperature=0, draft_sample_method="probabilistic"))
    prompts = [gates.PROMPTS[number % len(gates.PROMPTS)] for number in range(len(params))]
    core = drafting(models)
    alone = [run_engine(core, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert run_engine(core, prompts, params) == alone
    seeded = [number for number, one in enumerate(params) if one.verification == "coupled"]
    plain = make_engine(models.target, None)
    for number in seeded:
        assert run_engine(plain, [prompts[number]], params[number])[0] == alone[number]


@every_method
@pytest.mark.parametrize("verification", ["rejection", "block", "coupled", "exact_match"])
def test_a_trace_verifies(models: Models, verification: str, method: DraftSampleMethod) -> None:
    rule: dict[str, object] = {"verification": verification, "draft_sample_method": method}
    if verification == "exact_match":
        rule["temperature"] = 0
    answer = traced(models.target, models.close_draft, n=2, **rule)
    reports = replay(answer, models.target, models.close_draft)
    assert [report.findings for report in reports if report.findings] == []
    certain = {token.draft_prob for report in reports for token in report.round.drafted} == {1.0}
    assert certain is (method == "greedy")


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_a_trace_of_another_way_to_draw_is_refused(models: Models, verification: str) -> None:
    """A greedy draft that is passed off as drawn, and the other way round."""
    for method, other in (METHODS, METHODS[::-1]):
        answer = traced(
            models.target, models.close_draft, verification=verification, draft_sample_method=method
        )
        answer["sampling_params"]["draft_sample_method"] = other
        outcomes = {report.outcome for report in replay(answer, models.target, models.close_draft)}
        assert Outcome.WRONG in outcomes


def test_the_servers_setting_is_the_default(models: Models) -> None:
    params = SamplingParams(max_tokens=20, seed=1, verification="rejection")
    asked = msgspec.structs.replace(params, draft_sample_method="greedy")
    texts = [
        run_engine(drafting(models, **config), gates.PROMPTS, one)
        for config, one in (({}, params), ({}, asked), ({"draft_sample_method": "greedy"}, params))
    ]
    assert texts[1] == texts[2] != texts[0]


def test_what_is_drawn_in_another_way_is_learned_apart(models: Models) -> None:
    """Acceptance depends on how drafts are drawn."""
    core = drafting(models)
    names = [
        group_name(core.admission.sequences(Generate("x", [1], params))[0])
        for params in (
            SamplingParams(max_tokens=3, temperature=temperature, draft_sample_method=method)
            for temperature in (0.0, 0.5)
            for method in METHODS
        )
    ]
    assert names == ["greedy", "greedy, random drafts", "up to 0.8, greedy drafts", "up to 0.8"]


def test_only_the_phases_draw_in_another_way(models: Models) -> None:
    core = drafting(models)
    for method, temperature, needs in (
        (None, 1.0, False),
        ("probabilistic", 1.0, False),
        ("greedy", 1.0, True),
        ("greedy", 0.0, False),
        ("probabilistic", 0.0, True),
    ):
        params = SamplingParams(max_tokens=3, temperature=temperature, draft_sample_method=method)
        (sequence,) = core.admission.sequences(Generate("x", [1], params))
        assert (Need.OTHER_DRAWS in sequence.needs) is needs


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"verification": "exact_match"}, ["verification", "temperature", "'rejection'"]),
        ({"draft_sample_method": "probabilistic", "method": "ngram"}, ["draft_sample_method", "'greedy'"]),
    ],
)
def test_what_would_not_be_exact_or_cannot_be_had_is_refused(
    models: Models, fields: dict[str, str], names: list[str]
) -> None:
    params = SamplingParams(max_tokens=3, **fields)  # type: ignore[arg-type]
    with pytest.raises(RequestError) as refusal:
        drafting(models).add(Generate("x", [1], params))
    assert all(name in str(refusal.value) for name in names)
