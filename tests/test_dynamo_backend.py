"""The backend for NVIDIA Dynamo keeps the contract of the package's own classes: make test-dynamo."""

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import make_engine, run_engine
from truedraft.engine.config import BUNDLED_PAIR
from truedraft.engine.core.admission import RequestError
from truedraft.engine.library.params import SamplingParams

dynamo = pytest.importorskip("dynamo.common.backend", reason="ai-dynamo is not installed")

PATH = Path(__file__).parents[1] / "examples" / "dynamo_backend.py"
TARGET, DRAFT = str(BUNDLED_PAIR / "target"), str(BUNDLED_PAIR / "draft")
PROMPT = [5, 9, 40, 12]


class Context:
    """Is what Dynamo gives with each request, as far as a backend reads it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped = False

    def id(self) -> str:
        return self.name

    def is_stopped(self) -> bool:
        return self.stopped


@pytest.fixture(scope="module")
def module() -> Any:
    spec = importlib.util.spec_from_file_location("dynamo_backend", PATH)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """Returns the greedy text without drafts."""
    plain = make_engine(TARGET, None, num_speculative_tokens=0)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    (text,) = run_engine(plain, [PROMPT], params.for_engine())
    return text


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def backend(module: Any, loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    engine, worker = loop.run_until_complete(module.TruedraftEngine.from_args([TARGET, "--draft", DRAFT]))
    assert isinstance(engine, dynamo.LLMEngine)
    assert isinstance(worker, dynamo.WorkerConfig)
    loop.run_until_complete(engine.cleanup())  # before a start it releases nothing, and does not fail
    engine, worker = loop.run_until_complete(module.TruedraftEngine.from_args([TARGET, "--draft", DRAFT]))
    told = loop.run_until_complete(engine.start(7))
    assert isinstance(told, dynamo.EngineConfig)
    assert told.llm.context_length == 1024
    assert told.llm.kv_cache_block_size == 16
    assert told.llm.total_kv_blocks > 0
    yield engine
    loop.run_until_complete(engine.cleanup())
    loop.run_until_complete(engine.cleanup())


def greedy(**more: Any) -> dict[str, Any]:
    stops = {"max_tokens": 40, "ignore_eos": True, "stop": None}
    sampling = {"temperature": 0.0, "n": None, "top_p": None, "guided_decoding": None}
    return {"token_ids": PROMPT, "sampling_options": sampling | more, "stop_conditions": stops}


async def text_of(backend: Any, request: dict[str, Any], name: str = "a") -> list[dict[str, Any]]:
    return [chunk async for chunk in backend.generate(request, Context(name))]


def test_text_is_the_targets(backend: Any, loop: asyncio.AbstractEventLoop, expected: list[int]) -> None:
    chunks = loop.run_until_complete(text_of(backend, greedy()))
    assert [token for chunk in chunks for token in chunk["token_ids"]] == expected
    assert [chunk.get("finish_reason") for chunk in chunks][-1] == "length"
    assert chunks[-1]["completion_usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 40,
        "total_tokens": 44,
    }
    assert backend.engine.core.snapshot().drafts["draft_model"].num_accepted_tokens > 0


def test_requests_are_decoded_together(
    backend: Any, loop: asyncio.AbstractEventLoop, expected: list[int]
) -> None:
    async def together() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(text_of(backend, greedy(), f"request {i}") for i in range(6)))

    for chunks in loop.run_until_complete(together()):
        assert [token for chunk in chunks for token in chunk["token_ids"]] == expected


def test_choices_have_their_numbers(
    backend: Any, loop: asyncio.AbstractEventLoop, expected: list[int]
) -> None:
    chunks = loop.run_until_complete(text_of(backend, greedy(n=2)))
    for index in (0, 1):
        own = [token for chunk in chunks if chunk["index"] == index for token in chunk["token_ids"]]
        assert own == expected


def test_log_probabilities_belong_to_tokens(backend: Any, loop: asyncio.AbstractEventLoop) -> None:
    chunks = loop.run_until_complete(text_of(backend, greedy() | {"output_options": {"logprobs": 1}}))
    assert all(len(chunk["log_probs"]) == len(chunk["token_ids"]) for chunk in chunks)


def test_an_aborted_request_ends_and_leaves_nothing(backend: Any, loop: asyncio.AbstractEventLoop) -> None:
    async def aborted() -> list[dict[str, Any]]:
        context, chunks = Context("to be aborted"), []
        request = greedy() | {"stop_conditions": {"max_tokens": 900, "ignore_eos": True}}
        async for chunk in backend.generate(request, context):
            chunks.append(chunk)
            if not context.stopped:
                context.stopped = True
                await backend.abort(context)
        return chunks

    chunks = loop.run_until_complete(aborted())
    assert chunks[-1]["finish_reason"] == "cancelled"
    assert sum(len(chunk["token_ids"]) for chunk in chunks) < 900
    text = loop.run_until_complete(text_of(backend, greedy()))  # whose submission aborts what was closed
    assert text[-1]["finish_reason"] == "length"
    assert not backend._answers


@pytest.mark.parametrize("more", [{"length_penalty": 2.0}, {"use_beam_search": True}, {"best_of": 3}])
def test_what_is_not_served_is_refused(
    backend: Any, loop: asyncio.AbstractEventLoop, more: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"not served by this backend: {next(iter(more))}"):
        loop.run_until_complete(text_of(backend, greedy(**more)))
    with pytest.raises(RequestError):
        loop.run_until_complete(text_of(backend, greedy() | {"token_ids": [5] * 5000}))
