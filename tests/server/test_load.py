"""The load generator: what it sends, how it reads servers of any make, and that it owns up to being late."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic_settings import CliApp

from loadtest.client import BenchmarkError, Endpoint, Reply
from loadtest.command import loads
from loadtest.counters import DraftCounters, read_counters
from loadtest.generator import LoadResult, arrivals, closed_loop, open_loop
from loadtest.options import BenchOptions
from loadtest.prompts import read_prompts
from loadtest.report import print_table
from loadtest.rows import lag, load_row
from server.cli import main
from tests.server.running import PATIENCE_SECONDS

URL = "http://server/v1"
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6}}


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"text": piece}], "usage": None}


def event_stream(events: Iterable[object]) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return ("".join(lines) + ": ping\n\ndata: [DONE]\n\n").encode()


class Chunked(httpx.AsyncByteStream):
    """A body that arrives in pieces that know nothing of lines, ``delay`` seconds apart."""

    def __init__(self, body: bytes, size: int = 7, delay: float = 0.0) -> None:
        self.body, self.size, self.delay = body, size, delay

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self.body), self.size):
            await asyncio.sleep(self.delay)
            yield self.body[start : start + self.size]


def client_of(handle: Callable[[httpx.Request], httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(handle))


def endpoint(chat: bool = False, **body: Any) -> Endpoint:
    return Endpoint(URL, "a-model", chat, body)


async def one_reply(*events: object, chat: bool = False, status: int = 200) -> Reply:
    async with client_of(lambda _: httpx.Response(status, stream=Chunked(event_stream(events)))) as client:
        return await endpoint(chat).send(client, "Hello", due=time.perf_counter())


async def test_a_request_says_what_was_asked_for() -> None:
    seen = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, content=event_stream([text("a"), USAGE]))

    async with client_of(handle) as client:
        await endpoint(max_tokens=5, ignore_eos=True).send(client, [1, 2], due=0)
        await endpoint(chat=True, temperature=0).send(client, "Hi", due=0)
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
        {"foretoken": {"rounds": 2, "drafted_tokens": 8, "accepted_tokens": 4}},
        {"timings": {"draft_n": 8, "draft_n_accepted": 4}},
    ],
)
async def test_acceptance_comes_from_the_answers_of_foretoken_and_llama_cpp(extra: dict[str, Any]) -> None:
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
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with client_of(refuse) as client:
        reply = await endpoint().send(client, "Hello", due=time.perf_counter())
    assert reply.error == "ConnectError: refused"


async def test_a_closed_loop_keeps_its_clients_busy_and_sends_everything() -> None:
    running = most = 0
    prompts = []

    class Counting(Chunked):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            async for piece in super().__aiter__():
                yield piece
            running -= 1

    def handle(request: httpx.Request) -> httpx.Response:
        prompts.append(json.loads(request.content)["prompt"])
        return httpx.Response(200, stream=Counting(event_stream([text("a"), USAGE]), size=50, delay=0.002))

    async with client_of(handle) as client:
        result = await closed_loop(client, endpoint(), ["a", "b"], concurrency=3, num_requests=7)
    assert most == 3
    assert sorted(prompts) == ["a"] * 4 + ["b"] * 3
    assert (len(result.good), result.num_tokens) == (7, 42)
    assert result.tokens_per_second == pytest.approx(42 / result.seconds)


async def test_an_open_loop_does_not_wait_for_a_slow_server() -> None:
    """This one answers no request before all have come, for which a closed loop would wait in vain."""
    all_have_asked = asyncio.Event()

    class Late(Chunked):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await all_have_asked.wait()
            async for piece in super().__aiter__():
                yield piece

    requests: list[httpx.Request] = []

    def slow(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        if len(requests) == 20:
            all_have_asked.set()
        return httpx.Response(200, stream=Late(event_stream([text("a"), USAGE]), size=1000))

    async with client_of(slow) as client:
        result = await open_loop(client, endpoint(), ["a"], rate=200, num_requests=20, seed=3)
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

    def blocking(_: httpx.Request) -> httpx.Response:
        time.sleep(0.05)
        return httpx.Response(200, content=event_stream([text("a"), USAGE]))

    async with client_of(blocking) as client:
        result = await open_loop(client, endpoint(), ["a"], rate=1000, num_requests=5)
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
    ("prefix", "labels"), [("foretoken_", '{method="draft_model"}'), ("vllm:", '{engine="0",model_name="m"}')]
)
async def test_counters_of_foretoken_and_vllm(prefix: str, labels: str) -> None:
    names = {"drafts": 5, "draft_tokens": 20, "accepted_tokens": 13}
    lines = []
    for name, value in names.items():
        full = f"{prefix}spec_decode_num_{name}"
        lines += [f"# TYPE {full} counter", f"{full}_total{labels} {value}"]

    def handle(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://server/metrics"
        return httpx.Response(200, text="\n".join(lines) + "\n")

    async with client_of(handle) as client:
        counters = await read_counters(client, URL)
    assert counters == DraftCounters(5, 20, 13)
    assert counters - DraftCounters(1, 10, 8) == DraftCounters(4, 10, 5)


@pytest.mark.parametrize(
    "response", [httpx.Response(404), httpx.Response(200, text="<html>no metrics</html>")]
)
async def test_servers_without_counters(response: httpx.Response) -> None:
    async with client_of(lambda _: response) as client:
        assert await read_counters(client, URL) is None


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


def test_the_command_says_that_no_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--base-url", "http://127.0.0.1:9/v1", "--repeats", "1"]) == 1
    assert "No server answers at http://127.0.0.1:9/v1" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--concurrency", "0"], ["--rate", "-1"], ["--extra-body", "{"]])
def test_the_command_refuses_impossible_loads(flags: list[str]) -> None:
    assert main(["bench", *flags]) == 2


def test_the_environment_has_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the key: names such as SEED are anybody's."""
    for name in ("seed", "SEED", "MODEL", "BASE_URL"):
        monkeypatch.setenv(name, "other")
    flags = ["--concurrency", "1,4", "--rate", "0.5", "--extra-body", '{"top_k": 3}']
    options = CliApp.run(BenchOptions, cli_args=flags)
    assert (options.seed, options.model, options.extra_body) == (0, None, {"top_k": 3})
    assert [load.name for load in loads(options)] == ["1 client", "4 clients", "0.5 requests/s"]
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    assert options.key == "a-key"
