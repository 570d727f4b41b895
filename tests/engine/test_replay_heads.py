"""Traces of what heads have drawn verify offline: their distributions are computed anew.

Drafts of an output layer that cannot be made again, or is not known, are refused in words.
"""

import json
import shutil
from base64 import b64decode
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.engine.head_runs import TRAINED, mtp_engine, save_small_hybrid, traces_of
from tests.engine.test_replay import EVERYTHING, answer_of, tamper, traced
from tests.heads import Shape, random_head, save_head
from tests.models import save_random_llama
from tests.mtp import QWEN
from tests.mtp import random_head as naive_head
from truedraft.engine.commands.replay import RoundReport
from truedraft.engine.commands.replay_round import Outcome
from truedraft.engine.commands.trace_file import TraceFileError, parse_answer
from truedraft.engine.commands.verify_trace import ReplaySettings, _replayer, main
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.heads.named_vocabulary import Ids, token_ids_of
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.proposers.heads.proposer import HeadProposer

RULES = ("rejection", "block", "coupled", "exact_match")
Pair = tuple[str, str]


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_small_hybrid(tmp_path_factory.mktemp("target"), vocab_size=16), "mtp"


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Makes a head of three layers' states that drafts a part of the vocabulary."""
    root = tmp_path_factory.mktemp("eagle")
    target = save_random_llama(root / "target", 1, layers=5)
    shape = Shape(32, 16, tuple(range(12)), has_parts=True, norm_output=True)
    return target, save_head(root / "head", random_head(shape, target))


def answered(pair: Pair, config: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    target, draft = pair
    settings = {"method": "auto", "num_speculative_tokens": 3, **(config or {})}
    method = "mtp" if draft == "mtp" else "eagle"
    return traced(target, draft, config=settings, **{"max_tokens": 12, "method": method, **params})


def reports_of(answer: dict[str, Any], pair: Pair, **settings: Any) -> list[RoundReport]:
    named = {"target": pair[0], "draft": pair[1], "device": "cpu", "dtype": "float32", **settings}
    parsed = parse_answer(answer)
    replayer = _replayer(ReplaySettings(file=Path(), **named), parsed)
    return [report for choice in parsed.choices for report in replayer.replay(choice)]


def parameters(rule: str) -> dict[str, Any]:
    return {"temperature": 0} if rule == "exact_match" else {"verification": rule, "temperature": 1.3}


@pytest.mark.parametrize(("kind", "rule"), [*(("mtp", rule) for rule in RULES), ("eagle", "rejection")])
def test_a_trace_verifies(request: pytest.FixtureRequest, kind: str, rule: str) -> None:
    pair = request.getfixturevalue(kind)
    reports = reports_of(answered(pair, **parameters(rule)), pair)
    assert [report.findings for report in reports if report.findings] == []
    drafted = [report.round for report in reports if report.round.drafted]
    assert {round_.head_output for round_ in drafted} == {"own"}
    assert any(0 < token.draft_prob < 1 for round_ in drafted for token in round_.drafted) == (
        rule != "exact_match"
    )


def test_a_trace_with_every_parameter_verifies(mtp: Pair) -> None:
    reports = reports_of(answered(mtp, **EVERYTHING, verification="rejection"), mtp)
    assert {report.outcome for report in reports} == {Outcome.CONFIRMED}


@pytest.mark.parametrize("how", ["accepted too much", "drafted id"])
def test_a_tampered_trace_is_refused(mtp: Pair, how: str) -> None:
    answer = answered(mtp, **parameters("rejection"))
    number = tamper(answer["trace"][0], how)
    wrong = [report.number for report in reports_of(answer, mtp) if report.outcome is Outcome.WRONG]
    assert wrong[0] == number


def test_another_head_is_refused(mtp: Pair, tmp_path: Path) -> None:
    answer = answered(mtp, **parameters("rejection"))
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(Path(mtp[0], "config.json"), other)
    tensors = naive_head(mtp[0], seed=4).named_tensors(QWEN, "layers.0.")
    save_file({f"mtp.{name}": tensor for name, tensor in tensors.items()}, other / "model.safetensors")
    reports = reports_of(answer, (mtp[0], str(other)))
    assert Outcome.WRONG in {report.outcome for report in reports}


# Tokens and bits that a head drafts with, one after the other; None: all.
SOME, OTHERS = np.arange(0, 600, 2), np.arange(1, 600, 2)
TURNS: tuple[tuple[Ids | None, bool], ...] = (
    (SOME, False),
    (OTHERS, False),
    (None, True),
    (SOME, True),
    (None, False),
)


def switch(core: EngineCore) -> None:
    """Lets the head draft with another layer in each step: a trace says it of each round."""
    (proposer,) = core.scheduler.proposers
    assert isinstance(proposer, HeadProposer)
    head, cache, step = proposer.head, proposer.runner.cache, core.step
    make, own = head.model.weights.make_output, head.model.weights.head
    assert make is not None
    heads = []
    for ids, bits in TURNS:
        layer = make(ids, bits) if ids is not None or bits else own
        assert layer is not None
        heads.append(head.drafting(None if ids is None else torch.from_numpy(ids), layer, bits))
    turns = cycle(heads)

    def switched() -> Any:
        proposer.head = next(turns)
        model = proposer.head.model
        proposer.runner = ModelRunner(model, cache, model.fast_pass(cache))
        return step()

    core.step = switched  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def changing() -> dict[str, Any]:
    """Returns an answer of texts whose drafts are of other tokens, in other bits, in each round."""
    core = mtp_engine(dtype="auto", num_speculative_tokens=2)
    switch(core)
    drawn = SamplingParams(max_tokens=12, seed=5, trace=True, method="mtp", **parameters("rejection"))
    return dict(json.loads(answer_of(core, drawn)))


def outcomes_of(answer: dict[str, Any]) -> set[Outcome]:
    return {report.outcome for report in reports_of(answer, (TRAINED, "mtp"), dtype="auto")}


def drafting_rounds(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [round_ for rounds in answer["trace"] for round_ in rounds if round_["drafted"]]


def test_a_vocabulary_that_changes_within_texts(changing: dict[str, Any]) -> None:
    named = {round_["draft_vocabulary"] for round_ in drafting_rounds(changing)}
    bitmaps = {name: b64decode(bitmap) for name, bitmap in changing["draft_vocabularies"].items()}
    assert named == {None, *bitmaps}
    ids = [token_ids_of(bitmap).tolist() for bitmap in bitmaps.values()]
    assert sorted(ids) == [SOME.tolist(), OTHERS.tolist()]
    assert {round_["head_output"] for round_ in drafting_rounds(changing)} == {"own", "int4"}
    assert outcomes_of(changing) == {Outcome.CONFIRMED}


@pytest.mark.parametrize("planted", ["the old vocabulary", "all tokens", "other bits"])
def test_another_vocabulary_than_that_of_the_draft_is_caught(changing: dict[str, Any], planted: str) -> None:
    answer = deepcopy(changing)
    rounds = drafting_rounds(answer)
    before = [None, *(round_["draft_vocabulary"] for round_ in rounds)]
    for round_, old in zip(rounds, before, strict=False):
        match planted:
            case "the old vocabulary":
                round_["draft_vocabulary"] = old
            case "all tokens":
                round_["draft_vocabulary"] = None
            case "other bits":
                round_["head_output"] = "own" if round_["head_output"] == "int4" else "int4"
    assert Outcome.WRONG in outcomes_of(answer)


def test_a_vocabulary_that_the_trace_does_not_have_is_refused(changing: dict[str, Any]) -> None:
    (one, bitmap), (other, _) = changing["draft_vocabularies"].items()
    for told in ({}, {one: bitmap}, {one: bitmap, other: bitmap}):
        with pytest.raises(
            TraceFileError, match=f"does not have the tokens of ({one}|{other}), which rounds"
        ):
            parse_answer({**changing, "draft_vocabularies": told})


def test_a_text_tells_its_vocabulary_once(mtp: Pair) -> None:
    """Its bitmap is larger than all else of a round."""
    core = mtp_engine(mtp[0], draft_vocab_size=8)
    params = SamplingParams(max_tokens=12, method="mtp")
    for _, rounds in traces_of(core, [[1, 2, 3], [7, 5]], params):
        told = [round_.vocabulary and round_.vocabulary.bitmap for round_ in rounds]
        assert len(told) > 2
        assert told == [bytes([255]), *([None] * (len(told) - 1))]
        assert len({round_.vocabulary and round_.vocabulary.digest for round_ in rounds} - {None}) == 1


def of_an_older_version(answer: dict[str, Any]) -> dict[str, Any]:
    old = deepcopy(answer)
    del old["draft_vocabularies"]
    for round_ in drafting_rounds(old):
        assert round_.pop("draft_vocabulary")
        round_["head_output"] = "fewer"
    return old


def test_what_cannot_be_computed_again_is_refused(mtp: Pair, tmp_path: Path) -> None:
    """Greedy drafts are known whatever the layer was: nothing is drawn from it."""
    settings = {"draft_vocab_size": 8}
    answer = answered(mtp, settings, **parameters("rejection"))
    assert {report.outcome for report in reports_of(answer, mtp)} == {Outcome.CONFIRMED}
    with pytest.raises(TraceFileError, match="drawn some of its rounds from fewer tokens"):
        reports_of(of_an_older_version(answer), mtp)
    renamed = answered(mtp, **parameters("rejection"))
    for round_ in renamed["trace"][0]:
        round_["source"] = "memory"
    with pytest.raises(TraceFileError, match="memory has drawn some of its rounds"):
        reports_of(renamed, mtp)
    greedy = answered(mtp, settings, draft_sample_method="greedy", **parameters("rejection"))
    for each in (greedy, of_an_older_version(greedy)):
        assert {report.outcome for report in reports_of(each, mtp)} == {Outcome.CONFIRMED}
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answered(mtp, **parameters("rejection"))))
    assert main(ReplaySettings(file=file, target=mtp[0], draft="mtp", device="cpu")) == 0
    assert main(ReplaySettings(file=file, target=mtp[0], device="cpu")) == 2
