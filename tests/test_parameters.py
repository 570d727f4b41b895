"""A parameter is a row of a table: what else knows it derives from the row, and asks for what it says."""

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs
from pydantic import BaseModel, ValidationError

from tools.write_parameters import WRITTEN
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.needs import Need, Needs
from truedraft.engine.core.ranges import checked
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.generation_defaults import default_sampling
from truedraft.engine.parameters import (
    CUTS,
    INT64_MAX,
    PARAMETERS,
    PENALTIES,
    RECOMMENDED,
    SPECULATION,
    Parameter,
)
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.schemas.common import SamplingRequest, SpeculationOptions
from truedraft.server.schemas.completion import CompletionRequest

# The API's own fields have other names and rules: see ``server.generation.sampling_params``.
OTHERWISE = {"max_tokens", "logprobs", "grammar", "grammar_after", "thinking_budget", "thinking_marks"}


def schema_of(name: str) -> type[BaseModel]:
    return SpeculationOptions if PARAMETERS[name].where == SPECULATION else CompletionRequest


def edges(row: Parameter) -> tuple[list[float], list[float]]:
    """Returns numbers that are just within a row's range, and such that are just outside."""
    assert row.range is not None
    step = 1 if int in {row.type, *get_args(row.type)} else 1e-6
    low, high = row.range.low, row.range.high
    inside = [low + step if row.range.above else low]
    outside = [low if row.range.above else low - step]
    if high is not None and high < INT64_MAX:
        inside.append(high)
        outside.append(high + step)
    return inside, outside


RANGED = [name for name, row in PARAMETERS.items() if row.range is not None and row.default not in ([], {})]


@pytest.mark.parametrize("name", RANGED)
def test_the_library_checks_the_range(name: str) -> None:
    inside, outside = edges(PARAMETERS[name])
    for value in inside:
        checked(SamplingParams(**{"max_tokens": 5, name: value}))
    for value in outside:
        with pytest.raises(RequestError, match=f"{name} is .*, but must be"):
            checked(SamplingParams(**{"max_tokens": 5, name: value}))


@pytest.mark.parametrize("name", [name for name in RANGED if name not in OTHERWISE])
def test_the_api_has_the_same_range(name: str) -> None:
    schema, needed = schema_of(name), {}
    if schema is CompletionRequest:
        needed = {"model": "m", "prompt": "p"}
    inside, outside = edges(PARAMETERS[name])
    for value in inside:
        schema.model_validate({**needed, name: value})
    for value in outside:
        with pytest.raises(ValidationError, match=name):
            schema.model_validate({**needed, name: value})


def test_what_a_parameter_holds_is_checked_likewise() -> None:
    request = {"model": "m", "prompt": "p"}
    for bias in (100, -100):
        checked(SamplingParams(max_tokens=1, logit_bias={3: bias}))
        CompletionRequest.model_validate(request | {"logit_bias": {"3": bias}})
    for bias in (100.5, -101):
        with pytest.raises(RequestError, match="logit_bias of 3 is"):
            checked(SamplingParams(max_tokens=1, logit_bias={3: bias}))
        with pytest.raises(ValidationError, match="logit_bias"):
            CompletionRequest.model_validate(request | {"logit_bias": {"3": bias}})
    with pytest.raises(RequestError, match="one of stop_token_ids is -1"):
        checked(SamplingParams(max_tokens=1, stop_token_ids=[-1]))


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_api_describes_it_by_the_row(name: str) -> None:
    if name in OTHERWISE:
        return
    fields = (
        SpeculationOptions.model_fields if schema_of(name) is SpeculationOptions else ChatRequest.model_fields
    )
    description = fields[name].description
    assert description is not None
    assert description.startswith(PARAMETERS[name].help)


def test_every_number_has_a_range() -> None:
    for name, row in PARAMETERS.items():
        kinds = {row.type, *get_args(row.type)}
        holds_numbers = bool({int, float} & kinds) and bool not in kinds
        assert (row.range is not None) == (holds_numbers and name != "grammar_after"), name


def needs_of(params: SamplingParams) -> Needs:
    return Sequence(
        request_id="r",
        index=0,
        params=params,
        seed=0,
        verification="coupled",
        sources=(),
        num_speculative_tokens=0,
        fixed_draft_length=False,
        stop_token_ids=frozenset(),
        token_ids=[1],
        num_prompt_tokens=1,
        max_num_tokens=9,
    ).needs


def test_kinds_and_needs() -> None:
    assert CUTS == ("top_p", "top_k", "min_p")
    assert set(PENALTIES) == {"presence_penalty", "frequency_penalty", "repetition_penalty"}
    assert {row.need for row in PARAMETERS.values() if row.need} <= set(Need)
    plain = SamplingParams(max_tokens=1, temperature=0.3, top_p=0.5, seed=4)
    assert needs_of(plain) == {Need.SAMPLING}
    asked: dict[str, Any] = {"repetition_penalty": 1.5, "logit_bias": {1: 2.0}, "logprobs": 0, "trace": True}
    more = {Need.PENALTIES, Need.BIAS, Need.LOGPROBS, Need.TRACE}
    assert needs_of(structs.replace(plain, **asked)) == {Need.SAMPLING} | more


def test_makers_recommend_what_a_request_could_ask_for() -> None:
    class Config:
        temperature = 0.6
        top_k = 20

    assert default_sampling(Config()) == {"temperature": 0.6, "top_k": 20}
    for name in RECOMMENDED:
        _, (outside, *_) = edges(PARAMETERS[name])
        with pytest.raises(ModelLoadError, match=f"{name} .*out of range"):
            default_sampling(type("Config", (), {name: outside})())


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_pages_are_written_from_the_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``make written`` writes them anew; a row that changes is noticed."""
    assert path.read_text(encoding="utf-8") == WRITTEN[path]()
    changed = dataclasses.replace(PARAMETERS["top_k"], step=2, help="Another sentence.")
    monkeypatch.setitem(PARAMETERS, "top_k", changed)
    assert path.read_text(encoding="utf-8") != WRITTEN[path]()


def test_every_field_of_the_api_that_the_engine_knows_is_a_row() -> None:
    """A parameter that both have, but for the strings that the front end looks for, has one description."""
    both = SamplingRequest.model_fields.keys() & SamplingParams.__struct_fields__
    assert both == {name for name in PARAMETERS if PARAMETERS[name].where == "all"}
