"""The load generator sends what it should, reads servers of any make, and owns up to being late."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer as Server
from pydantic_settings import CliApp

from tests.server.running import TIMEOUT_SECONDS
from truedraft.loadtest.client import BenchmarkError, Endpoint, Reply
from truedraft.loadtest.command import loads
from truedraft.loadtest.counters import DraftCounters, read_counters
from truedraft.loadtest.generator import LoadResult, arrivals, closed_loop, new_session, open_loop
from truedraft.loadtest.options import BenchOptions
from truedraft.loadtest.prompts import read_prompts
from truedraft.loadtest.report import print_table
from truedraft.loadtest.rows import lag, load_row
from truedraft.server.cli.main import main

USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6}}


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"text": piece}], "usage": None}


def event_stream(events: Iterable[object]) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return ("".join(lines) + ": ping\n\ndata: [DONE]\n\n").encode()


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[tuple[aiohttp.ClientSession, Endpoint]]:
    """``handler`` answers every request."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with Server(app) as server, new_session("a-key", TIMEOUT_SECONDS) as session:
        yield session, Endpoint(str(server.make_url("/v1")), "a-model", chat=False, body={})


async def in_pieces(request: web.Request, body: bytes, *, status: int = 200) -> web.StreamResponse:
    """A body that arrives in pieces that know nothing of lines."""
    response = web.StreamResponse(status=status)
    await response.prepare(request)
    for start in range(0, len(body), 7):
        await response.write(body[start : start + 7])
        await asyncio.sleep(0)
    return response


async def one_reply(*events: object, chat: bool = False, status: int = 200) -> Reply:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await in_pieces(request, event_stream(events), status=status)

    async with served(handle) as (session, endpoint):
        return await replace(endpoint, chat=chat).send(session, "Hello", due=time.perf_counter())


async def test_a_request_says_what_was_asked_for() -> None:
    seen = []

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == "Bearer a-key"
        seen.append((request.path, await request.json()))
        return web.Response(body=event_stream([text("a"), USAGE]))

    async with served(handle) as (session, endpoint):
        body = {"max_tokens": 5, "ignore_eos": True}
        await replace(endpoint, body=body).send(session, [1, 2], due=0)
        await replace(endpoint, chat=True, body={"temperature": 0}).send(session, "Hi", due=0)
    common = {"model": "a-model", "stream": True, "stream_options": {"include_usage": True}}
    assert seen == [
        ("/v1/completions", {**common, "prompt": [1, 2], "max_tokens": 5, "ignore_eos": True}),
        (
            "/v1/chat/completions",
            {**common, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0},
        ),
    ]


async def test_tokens_are_the_servers_count_and_only_text_has_times() -> None:
    reply = await one_reply(text("a b"), text(""), text("c d e f"), {**text(""), "unknown": 1}, USAGE)
    assert (reply.error, reply.num_tokens, reply.num_prompt_tokens) == (None, 6, 3)
    assert len(reply.text_times) == 2
    assert reply.sent <= reply.text_times[0] <= reply.text_times[1] <= reply.finished
    assert reply.seconds_per_token == (reply.text_times[1] - reply.text_times[0]) / 5


@pytest.mark.parametrize("key", ["content", "reasoning_content"])
async def test_chat_deltas_are_text(key: str) -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    reply = await one_reply(role, {"choices": [{"delta": {key: "x"}}]}, USAGE, chat=True)
    assert reply.error is None
    assert len(reply.text_times) == 1


@pytest.mark.parametrize(
    "extra",
    [
        {"truedraft": {"rounds": 2, "drafted_tokens": 8, "accepted_tokens": 4}},
        {"timings": {"draft_n": 8, "draft_n_accepted": 4}},
    ],
)
async def test_acceptance_comes_from_the_answers_of_truedraft_and_llama_cpp(extra: dict[str, Any]) -> None:
    reply = await one_reply(text("a"), {**USAGE, **extra})
    assert (reply.num_draft_tokens, reply.num_accepted_tokens) == (8, 4)
    assert load_row("x", [LoadResult([reply], 1.0)], None)["acceptance"] == 0.5


@pytest.mark.parametrize(
    ("events", "status", "words"),
    [
        ([{"error": {"message": "no more memory"}}], 200, "no more memory"),
        ([text("a")], 200, "no usage"),
        ([USAGE], 200, "no text"),
        ([{"detail": "busy"}], 429, "HTTP 429"),
        ([[1]], 200, "ValidationError"),
    ],
)
async def test_what_goes_wrong_is_an_error_of_the_reply(
    events: list[object], status: int, words: str
) -> None:
    reply = await one_reply(*events, status=status)
    assert reply.error is not None
    assert words in reply.error


async def test_a_lost_connection_is_an_error_of_the_reply() -> None:
    async def leave(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event_stream([text("a")])[:5])
        assert request.transport is not None
        request.transport.abort()
        return response

    async with served(leave) as (session, endpoint):
        reply = await endpoint.send(session, "Hello", due=time.perf_counter())
    assert (reply.error or "").startswith("ClientPayloadError: ")


async def test_a_refused_connection_is_an_error_of_the_reply() -> None:
    async with new_session("a-key", TIMEOUT_SECONDS) as session:
        endpoint = Endpoint("http://127.0.0.1:9/v1", "a-model", chat=False, body={})
        reply = await endpoint.send(session, "Hello", due=time.perf_counter())
    assert (reply.error or "").startswith("ClientConnectorError: Cannot connect to host 127.0.0.1:9 ")


async def test_a_silent_server_is_an_error_of_the_reply() -> None:
    async def say_nothing(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(TIMEOUT_SECONDS)
        return web.Response()

    async with served(say_nothing) as (_, endpoint), new_session("a-key", timeout=0.05) as session:
        reply = await endpoint.send(session, "Hello", due=time.perf_counter())
    assert (reply.error or "").startswith("SocketTimeoutError: ")


async def test_a_closed_loop_keeps_its_clients_busy_and_sends_everything() -> None:
    running = most = 0
    prompts = []

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        prompts.append((await request.json())["prompt"])
        response = await in_pieces(request, event_stream([text("a"), USAGE]))
        running -= 1
        return response

    async with served(handle) as (session, endpoint):
        result = await closed_loop(session, endpoint, ["a", "b"], concurrency=3, num_requests=7)
    assert most == 3
    assert sorted(prompts) == ["a"] * 4 + ["b"] * 3
    assert (len(result.good), result.num_tokens) == (7, 42)
    assert result.tokens_per_second == pytest.approx(42 / result.seconds)


async def test_an_open_loop_does_not_wait_for_a_slow_server() -> None:
    """This one answers no request before all have come, for which a closed loop would wait in vain."""
    all_have_asked = asyncio.Event()
    num_asked = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 20:
            all_have_asked.set()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await all_have_asked.wait()
        return web.Response(body=event_stream([text("a"), USAGE]))

    async with served(handle) as (session, endpoint):
        result = await open_loop(session, endpoint, ["a"], rate=200, num_requests=20, seed=3)
    assert len(result.good) == 20
    planned = list(arrivals(200, 20, seed=3))
    due = sorted(reply.due for reply in result.replies)
    assert [time - due[0] for time in due] == pytest.approx([time - planned[0] for time in planned])
    assert all(reply.sent >= reply.due for reply in result.replies)


def test_arrivals_are_a_poisson_process() -> None:
    times = list(arrivals(rate=5, number=20000, seed=1))
    gaps = [later - earlier for earlier, later in pairwise([0.0, *times])]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5, rel=0.03)
    # Exponential: the deviation is the mean, and a share of 1/e is longer than it.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)
    assert list(arrivals(5, 10, seed=1)) == times[:10]
    assert list(arrivals(5, 10, seed=2)) != times[:10]


async def test_a_late_generator_is_found_out() -> None:
    """Work that blocks the event loop, which is what an overloaded generator looks like."""

    async def blocking(_: web.Request) -> web.StreamResponse:
        time.sleep(0.05)
        return web.Response(body=event_stream([text("a"), USAGE]))

    async with served(blocking) as (session, endpoint):
        result = await open_loop(session, endpoint, ["a"], rate=1000, num_requests=5)
    assert lag([result]) > 0.05
    # Latencies count from when a request was due, so they own up to it, too.
    assert max(reply.seconds for reply in result.good) > 0.2


def test_a_row_has_medians_of_rates_and_pooled_percentiles() -> None:
    def result(seconds: float, *firsts: float) -> LoadResult:
        replies = [
            Reply(due=1.0, sent=1.0, text_times=[1.0 + first, 2.0 + first], finished=4.0, num_tokens=11)
            for first in firsts
        ]
        return LoadResult([*replies, Reply(due=1.0, sent=1.0, finished=2.0, error="refused")], seconds)

    row = load_row(
        "2 clients", [result(1, 0.1, 0.2), result(2, 0.3, 0.4), result(10, 0.5, 0.6)], DraftCounters(3, 10, 4)
    )
    assert (row["requests"], row["errors"], row["acceptance"]) == (6, 3, 0.4)
    assert (row["tokens/s"], row["requests/s"]) == (11.0, 1.0)
    assert row["first_p50"] == pytest.approx(350)
    assert (row["gap_p50"], row["token_p50"], row["all_p99"]) == pytest.approx((1000, 100, 3000))


def test_nothing_is_reported_of_requests_that_all_failed() -> None:
    with pytest.raises(BenchmarkError, match="refused"):
        load_row("1 client", [LoadResult([Reply(due=1.0, sent=1.0, error="refused")], 1.0)], None)


@pytest.mark.parametrize(
    ("prefix", "labels"), [("truedraft_", '{method="draft_model"}'), ("vllm:", '{engine="0",model_name="m"}')]
)
async def test_counters_of_truedraft_and_vllm(prefix: str, labels: str) -> None:
    names = {"drafts": 5, "draft_tokens": 20, "accepted_tokens": 13}
    lines = []
    for name, value in names.items():
        full = f"{prefix}spec_decode_num_{name}"
        lines += [f"# TYPE {full} counter", f"{full}_total{labels} {value}"]

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.path == "/metrics"
        return web.Response(text="\n".join(lines) + "\n")

    async with served(handle) as (session, endpoint):
        counters = await read_counters(session, endpoint.base_url)
    assert counters == DraftCounters(5, 20, 13)
    assert counters - DraftCounters(1, 10, 8) == DraftCounters(4, 10, 5)


@pytest.mark.parametrize(
    ("status", "content"), [(404, ""), (200, "<html>no metrics</html>"), (200, "no_drafts_at_all 1\n")]
)
async def test_servers_without_counters(status: int, content: str) -> None:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=content)

    async with served(handle) as (session, endpoint):
        assert await read_counters(session, endpoint.base_url) is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [("one\n\ntwo\n", ["one", "two"]), ('{"prompt": "a"}\n{"text": "b"}\n', ["a", "b"])],
)
def test_prompts_from_a_file(tmp_path: Path, content: str, expected: list[str]) -> None:
    (tmp_path / "prompts").write_text(content)
    assert read_prompts(tmp_path / "prompts") == expected


def test_an_empty_file_of_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts(tmp_path / "prompts")


def test_tables_align(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([{"load": "a", "tokens/s": 1234.5}, {"load": "long", "tokens/s": None}], "Title")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["", "Title", "load  tokens/s", "a         1234", "long         -"]


@pytest.mark.parametrize("path", ["", "/", "/v1"])
def test_the_command_says_that_no_server_answers(capsys: pytest.CaptureFixture[str], path: str) -> None:
    assert main(["bench", "--base-url", f"http://127.0.0.1:9{path}", "--repeats", "1"]) == 1
    assert "No server answers at http://127.0.0.1:9/v1" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--concurrency", "0"], ["--rate", "-1"], ["--extra-body", "{"]])
def test_the_command_refuses_impossible_loads(flags: list[str]) -> None:
    assert main(["bench", *flags]) == 2


def test_the_environment_has_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the key is read from there: names such as SEED are anybody's."""
    for name in ("seed", "SEED", "MODEL", "BASE_URL"):
        monkeypatch.setenv(name, "other")
    flags = ["--concurrency", "1,4", "--rate", "0.5", "--extra-body", '{"top_k": 3}']
    options = CliApp.run(BenchOptions, cli_args=flags)
    assert (options.seed, options.model, options.extra_body) == (0, None, {"top_k": 3})
    assert [load.name for load in loads(options)] == ["1 client", "4 clients", "0.5 requests/s"]
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    assert options.key == "a-key"
