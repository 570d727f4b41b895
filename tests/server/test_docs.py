"""docs/http-api.md names what there is: every route, request field, error code, metric and common refusal."""

import re
from pathlib import Path

import pytest

from tests.server.running import RunningServer
from truedraft.server import errors
from truedraft.server.http import error_handlers
from truedraft.server.observability.metrics import Metrics
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.schemas.common import SamplingRequest, SpeculationOptions
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.schemas.messages import MessagesRequest
from truedraft.server.schemas.responses import ResponsesRequest
from truedraft.server.schemas.tokenize import DetokenizeRequest, TokenizeRequest

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"[a-z0-9_]+", PAGE))

# The OpenAPI document explains these fields of /tokenize and the relatives of prompt_cache_key.
ELSEWHERE = {"add_special_tokens", "add_generation_prompt", "return_token_strs", "tokens"}
RELATIVES = {"prompt_cache_retention", "prompt_cache_options"}


def test_routes(server: RunningServer) -> None:
    for path in server.get("/openapi.json").json()["paths"]:
        assert f"{path.replace('{model_id}', '{id}')}`" in PAGE, path


@pytest.mark.parametrize(
    "model",
    [
        CompletionRequest,
        ChatRequest,
        ResponsesRequest,
        SpeculationOptions,
        TokenizeRequest,
        DetokenizeRequest,
    ],
)
def test_fields(model: type) -> None:
    fields = set(model.model_fields) - ELSEWHERE - RELATIVES  # type: ignore[attr-defined]
    assert fields <= WORDS


def test_fields_of_messages() -> None:
    """Fields that differ between endpoints are on a page of their own."""
    page = (Path(__file__).parents[2] / "docs" / "messages.md").read_text(encoding="utf-8")
    fields = MessagesRequest.model_fields.items()
    names = {field.alias or name for name, field in fields if name not in SamplingRequest.model_fields}
    assert names | {"stop_sequences"} <= set(re.findall(r"[a-z0-9_]+", page))


def test_error_codes() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.code for kind in kinds if issubclass(kind, errors.ApiError) and kind.__subclasses__() == []}
    codes |= set(error_handlers._FRAMEWORK_CODES.values()) | set(error_handlers._VALIDATION_CODES.values())
    assert codes - {None, "client_disconnected"} <= WORDS


def test_metrics() -> None:
    names = {family.name.removeprefix("truedraft_") for family in Metrics().exposed.collect()}
    names = {name for name in names if not name.startswith("process_")}
    assert names - {"build", "cache_config"} <= {word.removesuffix("_total") for word in WORDS}
    assert {"build_info", "cache_config_info"} <= WORDS
