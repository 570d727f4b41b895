"""Traces of the engine verify offline, under every rule; tampered ones are refused by round."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engine.conftest import Models
from tests.models import make_engine, stepped
from truedraft.engine.commands.replay import DraftKey, Replayer, RoundReport
from truedraft.engine.commands.replay_round import Outcome
from truedraft.engine.commands.trace_file import TracedRound, TraceFileError, parse_answer
from truedraft.engine.commands.verify_trace import ReplaySettings, main
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.options import LoadOptions

CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3], [7, 5, 7, 2, 9]]
EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 9,
    "top_p": 0.9,
    "min_p": 0.02,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": {3: 1.0, 5: -2.0},
    "min_tokens": 10,
    "stop_token_ids": [4],
}


made_before: dict[str, str] = {}


def traced(target: str, draft: str | None, **how: Any) -> dict[str, Any]:
    """The ``truedraft`` object of an answer, as the server writes it; what is asked for again is a copy."""
    asked = repr((target, draft, how))
    if asked not in made_before:
        made_before[asked] = _traced(target, draft, **how)
    return dict(json.loads(made_before[asked]))


def _traced(
    target: str,
    draft: str | None,
    n: int = 1,
    dtype: str = "float32",
    config: dict[str, Any] | None = None,
    **params: Any,
) -> str:
    core = make_engine(target, draft, **{"dtype": dtype, **(config or {})})
    return answer_of(core, SamplingParams(**{"max_tokens": 30, "trace": True, "seed": 5, **params}), n)


def answer_of(core: EngineCore, sampling: SamplingParams, n: int = 1) -> str:
    for number, prompt in enumerate(PROMPTS):
        core.add(Generate(f"answer-{number}", prompt, sampling, n))
    rounds: dict[int, list[TracedRound]] = {index: [] for index in range(len(PROMPTS) * n)}
    seeds: dict[int, int] = {}
    vocabularies: dict[str, bytes] = {}
    while core.has_work:
        for output in stepped(core):
            choice = int(output.request_id[-1]) * n + output.index
            assert output.trace is not None
            rounds[choice].append(TracedRound.of(output.trace))
            seeds[choice] = output.seed
            if (told := output.trace.vocabulary) is not None and told.bitmap is not None:
                vocabularies[told.digest] = told.bitmap
    plain = msgspec.to_builtins(
        {
            "sampling_params": sampling,
            "prompt_token_ids": PROMPTS,
            "seeds": [seeds[choice] for choice in sorted(seeds)],
            "trace": [rounds[choice] for choice in sorted(rounds)],
            "draft_vocabularies": vocabularies,
        },
        str_keys=True,
    )
    return json.dumps(plain)


@cache
def fresh(path: str) -> FreshModel:
    return FreshModel(path, LoadOptions())


def replay(answer: dict[str, Any], target: str, draft: str | None) -> list[RoundReport]:
    parsed = parse_answer(answer)
    replayer = Replayer(
        fresh(target),
        {DraftKey("draft_model"): fresh(draft)} if draft else {},
        parsed.params,
        tolerance=1e-4,
    )
    return [report for choice in parsed.choices for report in replayer.replay(choice)]


@pytest.mark.parametrize("draft", ["close_draft", "random_draft", "padded_draft", None])
@pytest.mark.parametrize("verification", ["rejection", "block", "coupled", "exact_match"])
def test_a_trace_verifies(models: Models, draft: str | None, verification: str) -> None:
    path = getattr(models, draft) if draft else None
    rule = {"temperature": 0} if verification == "exact_match" else {"verification": verification}
    answer = traced(models.target, path, n=2, **rule)
    reports = replay(answer, models.target, path)
    assert {report.round.rule for report in reports} == {verification}
    assert [report.findings for report in reports if report.findings] == []


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_a_trace_with_every_parameter_verifies(models: Models, verification: str) -> None:
    answer = traced(models.target, models.close_draft, **EVERYTHING, verification=verification)
    reports = replay(answer, models.target, models.close_draft)
    assert sum(report.round.num_accepted for report in reports) > 0
    assert {report.outcome for report in reports} == {Outcome.CONFIRMED}


def other(token_id: int) -> int:
    return (token_id + 5) % 16


def tamper(rounds: list[dict[str, Any]], how: str) -> int:
    """Change one thing; returns the number of the round."""
    candidates = [
        number
        for number, round_ in enumerate(rounds)
        if round_["drafted"] and round_["drafted"][0]["accepted"] == (how != "accepted too much")
    ]
    number = candidates[-1]
    round_ = rounds[number]
    first = round_["drafted"][0]
    match how:
        case "accepted too much":
            first["accepted"] = True
        case "accepted too little":
            for token in round_["drafted"]:
                token["accepted"] = False
        case "hole":
            first["accepted"] = False
            round_["drafted"].append({**first, "accepted": True})
        case "drafted id":
            first["id"] = other(first["id"])
        case "target_prob":
            first["target_prob"] = abs(first["target_prob"] - 0.01)
        case "draft_prob":
            first["draft_prob"] = abs(first["draft_prob"] - 0.01)
        case "next token":
            round_["next_token"] = other(round_["next_token"])
        case "position":
            round_["position"] += 1
        case "rule":
            round_["rule"] = "typical"
        case "unknown id":
            round_["next_token"] = 16
    return number + 1


TAMPERING = [
    "accepted too much",
    "accepted too little",
    "hole",
    "drafted id",
    "target_prob",
    "draft_prob",
    "next token",
    "position",
    "rule",
    "unknown id",
]


@pytest.mark.parametrize("how", TAMPERING)
@pytest.mark.parametrize("verification", ["rejection", "block", "coupled", "exact_match"])
def test_a_tampered_trace_is_refused(models: Models, verification: str, how: str) -> None:
    rule = {"temperature": 0} if verification == "exact_match" else {"verification": verification}
    answer = traced(models.target, models.close_draft, **rule)
    number = tamper(answer["trace"][0], how)
    reports = replay(answer, models.target, models.close_draft)[: len(answer["trace"][0])]
    wrong = [report.number for report in reports if report.outcome is Outcome.WRONG]
    assert wrong
    assert wrong[0] == number


def test_another_seed_is_refused(models: Models) -> None:
    answer = traced(models.target, models.close_draft)
    answer["seeds"][0] += 1
    assert replay(answer, models.target, models.close_draft)[0].outcome is Outcome.WRONG


def test_the_answer_must_say_what_the_trace_says(models: Models) -> None:
    report = traced(models.target, models.close_draft)
    choice = parse_answer(report).choices[0]
    text = [i for r in choice.rounds for i in [*r.draft_ids[: r.num_accepted], r.next_token]]

    def outcomes(token_ids: list[int]) -> set[Outcome]:
        answer = {"truedraft": report, "choices": [{"index": 0, "token_ids": token_ids, "text": ""}]}
        return {r.outcome for r in replay(answer, models.target, models.close_draft)}

    assert outcomes(text) == {Outcome.CONFIRMED}
    assert outcomes(text[:-3]) == {Outcome.CONFIRMED}  # a stop string may cut it
    assert Outcome.WRONG in outcomes([*text[:4], other(text[4]), *text[5:]])
    assert Outcome.WRONG in outcomes([*text, 1])


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled", "exact_match"])
def test_a_near_tie_is_not_a_failure(models: Models, verification: str) -> None:
    """Decisions that noise of the probabilities may have changed are told apart from those that it cannot
    have changed. At temperature 0 the tolerance is one of logits."""
    rule = {"temperature": 0} if verification == "exact_match" else {"verification": verification}
    answer = traced(models.target, models.close_draft, n=2, **rule)
    before = deepcopy(answer)
    parsed = parse_answer(answer)
    target, draft = (FreshModel(path, LoadOptions()) for path in (models.target, models.close_draft))
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.mul_(1.02)

    def outcomes(tolerance: float) -> set[Outcome]:
        drafts = {DraftKey("draft_model"): draft}
        replayer = Replayer(target, drafts, parsed.params, tolerance)
        return {report.outcome for choice in parsed.choices for report in replayer.replay(choice)}

    assert Outcome.WRONG not in outcomes(1.0 if verification == "exact_match" else 0.3)
    assert Outcome.WRONG in outcomes(1e-5)
    assert answer == before


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"truedraft": {"rounds": 3}},
        {"truedraft": None},
        {"trace": [[]], "seeds": [1]},
        {"trace": [[]], "seeds": [1, 2], "prompt_token_ids": [[1]], "sampling_params": {"max_tokens": 1}},
        {"trace": [[]], "seeds": [1], "prompt_token_ids": [], "sampling_params": {"max_tokens": 1}},
    ],
)
def test_what_is_no_trace_is_refused_in_words(broken: dict[str, Any]) -> None:
    with pytest.raises(TraceFileError):
        parse_answer(broken)


def run_command(models: Models, file: Path) -> int:
    return main(ReplaySettings(file=file, target=models.target, draft=models.close_draft, device="cpu"))


def test_the_command(models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = traced(models.target, models.close_draft)
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answer))
    assert run_command(models, file) == 0
    assert "confirmed" in capsys.readouterr().out

    number = tamper(answer["trace"][1], "accepted too little")
    file.write_text(json.dumps(answer))
    assert run_command(models, file) == 1
    output = capsys.readouterr().out
    assert "NOT CONFIRMED" in output
    assert f"round {number}, wrong: drafted token 1 was rejected" in output

    file.write_text("no JSON")
    assert run_command(models, file) == 2
    assert "cannot read" in capsys.readouterr().err
