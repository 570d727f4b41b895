"""Decisions have the numbers of transformers' models, and the same bits in any company."""

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.conftest import DRAFTED, Server, serving
from tests.models import smollm2
from truedraft.engine.config import BUNDLED_PAIR
from truedraft.server.schemas.decisions import DecisionRequest
from truedraft.server.text.decisions import Asked, ask, normalised
from truedraft.server.text.prompt import PromptLimits
from truedraft.server.text.tokenizer import load_tokenizer

STORY = "The dog ran to the park. It saw a big red ball and was very happy. Then it went home to sleep. "
TEXT = STORY * 4
EXACT = ("--cache-dtype", "float32", "--cache-memory", "64MiB", "--draft", "none")
LABELS = ("happy", "very sad", "tired and a bit hungry", "angry", "happy again", "in the park")
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "There is a dog."},
    {"type": "choice", "instructions": "How does it feel?", "choices": [{"value": one} for one in LABELS]},
    {
        "type": "choice",
        "instructions": "Is it so?",
        "choices": [{"value": one} for one in (True, "true", False)],
    },
    {
        "type": "score",
        "instructions": "How long is it?",
        "levels": [{"label": one} for one in ("1", "2", "10")],
    },
]


def two_hundred() -> list[dict[str, Any]]:
    return [
        one | {"instructions": f"{one['instructions']} ({number})"}
        for number in range(50)
        for one in QUESTIONS
    ]


def decided(server: Server, questions: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    body = {"model": "truedraft-demo", "input": TEXT, "questions": questions, **more}
    response = server.post("/v1/decisions", body)
    assert response.status_code == 200, response.text
    answers: list[dict[str, Any]] = response.json()["answers"]
    return answers


def probabilities(answer: dict[str, Any]) -> list[float]:
    if answer["type"] == "predicate":
        return [answer["probability"], 1 - answer["probability"]]
    return [one["probability"] for one in answer["probabilities"]]


def by_transformers(asked: Sequence[Asked], model: Any) -> list[list[float]]:
    """Returns the shares of the labels by a log-softmax in float64 over all of their tokens, each label in a
    pass of its own over the whole text."""
    found = []
    for prompt, labels in asked:
        sums = []
        for label in labels:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *label]])).logits[0, len(prompt) - 1 : -1]
            rows = logits.double().log_softmax(-1)
            sums.append(float(rows.gather(-1, torch.tensor(label)[:, None]).sum()))
        found.append(normalised(sums))
    return found


@pytest.mark.parametrize(("cache_dtype", "tolerance"), [("float32", 1e-4), ("auto", 2e-3)])
def test_probabilities_are_those_of_transformers(
    server: Server, tmp_path: Path, cache_dtype: str, tolerance: float
) -> None:
    """A cache in 16 bits, the default, rounds keys and values, which transformers does not."""
    request = DecisionRequest.model_validate({"model": "m", "input": TEXT, "questions": QUESTIONS})
    asked = ask(request, load_tokenizer(str(BUNDLED_PAIR / "target")), PromptLimits(10**6, 1024, "", 10**6))
    assert any(len(label) > 2 for one in asked for label in one.labels)
    want = by_transformers(
        asked, AutoModelForCausalLM.from_pretrained(BUNDLED_PAIR / "target", dtype=torch.float32)
    )
    with nullcontext(server) if cache_dtype == "auto" else serving(tmp_path, *EXACT) as running:
        answers = decided(running, QUESTIONS)
    for answer, expected in zip(answers, want, strict=True):
        assert probabilities(answer) == pytest.approx(expected, abs=tolerance)


@dataclass(frozen=True)
class RealModel:
    """Has a GGUF file of 4-bit weights, what its tokenizer makes of the questions, and the shares of the
    labels by transformers, which computes with the same weights, dequantised."""

    path: Path
    asked: list[Asked]
    shares: list[list[float]]

    def decided(self, server: Server) -> list[list[float]]:
        answers = decided(server, QUESTIONS, model=self.path.name, input=STORY)
        return [probabilities(answer) for answer in answers]


@pytest.fixture(scope="module")
def real() -> RealModel:
    path = smollm2()
    request = DecisionRequest.model_validate({"model": "m", "input": STORY, "questions": QUESTIONS})
    asked = ask(request, load_tokenizer(str(path)), PromptLimits(10**6, 4096, "", 10**6))
    assert any(len(label) > 2 for one in asked for label in one.labels)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return RealModel(path, asked, by_transformers(asked, model))


def test_a_quantised_model_is_that_of_transformers_where_layers_are_in_float32(
    real: RealModel, tmp_path: Path
) -> None:
    with serving(tmp_path, "--target", str(real.path), *EXACT, "--dtype", "float32") as running:
        found = real.decided(running)
    for one, expected in zip(found, real.shares, strict=True):
        assert one == pytest.approx(expected, abs=1e-4)


def test_a_quantised_model_has_the_probabilities_of_its_own_tokens(real: RealModel, tmp_path: Path) -> None:
    """With inputs of layers in 8 bits, the engine's log-probabilities of all tokens of a label, summed and
    normalised in float64, are what the answers say, and near those of layers in float32."""
    arguments = "--target", str(real.path), "--draft", "none", "--cache-memory", "256MiB"
    with serving(tmp_path, *arguments) as running:
        found = real.decided(running)
        for (prompt, labels), shares, in_float32 in zip(real.asked, found, real.shares, strict=True):
            body = {
                "model": real.path.name,
                "prompt": [[*prompt, *label] for label in labels],
                "max_tokens": 0,
                "prompt_logprobs": 0,
                "prompt_logprobs_start": len(prompt),
            }
            choices = running.post("/v1/completions", body).json()["choices"]
            sums = [
                math.fsum(
                    entry[str(token)]["logprob"]
                    for token, entry in zip(label, choice["prompt_logprobs"][len(prompt) :], strict=True)
                )
                for label, choice in zip(labels, choices, strict=True)
            ]
            assert shares == pytest.approx(normalised(sums), abs=1e-6)
            assert shares == pytest.approx(in_float32, abs=0.1)


def test_bits_are_the_same_in_any_company(server: Server) -> None:
    """Alone, among 200 questions, without and with prefix hits, and while 8 streams are drafted for."""
    among = decided(server, two_hundred())
    body = {"model": "truedraft-demo", "prompt": STORY, "max_tokens": 200, "speculation": DRAFTED, "seed": 1}
    with ThreadPoolExecutor(9) as threads:
        streams = [threads.submit(_read_stream, server, body | {"seed": seed}) for seed in range(8)]
        beside = decided(server, two_hundred()[:24])
        assert all(stream.result() for stream in streams)
    assert json.dumps(beside) == json.dumps(among[:24])
    for number in (0, 1, 2, 3, 5, 98, 199):
        question = two_hundred()[number]
        for more in ({"cache_prompt": False}, {"cache_salt": "new"}, {"cache_salt": "new"}, {}):
            assert json.dumps(decided(server, [question], **more)) == json.dumps([among[number]])
    assert json.dumps(decided(server, two_hundred()[::-1])) == json.dumps(among[::-1])


def _read_stream(server: Server, body: dict[str, Any]) -> bool:
    with server.stream("/v1/completions", body) as response:
        return any(line == "data: [DONE]" for line in response.iter_lines())
