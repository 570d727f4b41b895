"""One streamed request to any OpenAI-compatible server, with the time of everything that arrives.

Reads server-sent events itself: a generator that spends longer on a chunk than the server did would measure
itself. Tokens are counted by the server's ``usage``, because a chunk may carry several.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta or _Delta()
        return bool(self.text or delta.content or delta.reasoning_content)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Report(msgspec.Struct):
    """Truedraft sends this object next to the usage."""

    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class _Timings(msgspec.Struct):
    """llama.cpp sends this object next to the usage."""

    draft_n: int = 0
    draft_n_accepted: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    truedraft: _Report | None = None
    timings: _Timings | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class BenchmarkError(Exception):
    """Nothing can be measured, in a sentence for the terminal."""


@dataclass
class Reply:
    """All times by ``time.perf_counter``. ``due`` is when the load said that the request should be sent."""

    due: float
    sent: float
    text_times: list[float] = field(default_factory=list)
    finished: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    error: str | None = None

    @property
    def lag(self) -> float:
        """Seconds by which the generator itself was late."""
        return self.sent - self.due

    @property
    def seconds(self) -> float:
        """Counts from when the request was due: a client in a queue of ours would have waited too."""
        return self.finished - self.due

    @property
    def first_text_seconds(self) -> float:
        return self.text_times[0] - self.due

    @property
    def seconds_per_token(self) -> float | None:
        """Returns the time per token after the first text; None if there was no second chunk."""
        if len(self.text_times) < 2 or self.num_tokens < 2:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.num_tokens - 1)


@dataclass(frozen=True)
class Endpoint:
    """An endpoint says where requests go; ``body`` is added to each of them."""

    base_url: str
    model: str
    chat: bool
    body: dict[str, Any]

    async def send(self, session: aiohttp.ClientSession, prompt: str | list[int], due: float) -> Reply:
        """Never raises for what the server or the network does: that is ``Reply.error``."""
        content: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        )
        body = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **content,
            **self.body,
        }
        path = "/chat/completions" if self.chat else "/completions"
        reply = Reply(due=due, sent=time.perf_counter())
        try:
            async with session.post(self.base_url + path, json=body) as response:
                if response.status != 200:
                    reply.error = f"HTTP {response.status}: {(await response.text(errors='replace'))[:300]}"
                else:
                    await _read(response.content, reply)
        except (aiohttp.ClientError, msgspec.MsgspecError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        reply.finished = time.perf_counter()
        if reply.error is None and not reply.text_times:
            reply.error = "the answer has no text"
        return reply


async def _read(content: aiohttp.StreamReader, reply: Reply) -> None:
    async for data in _events(content):
        now = time.perf_counter()
        event = _decode(data)
        if event.error is not None:
            reply.error = str(event.error)[:300]
        if any(choice.has_text for choice in event.choices):
            reply.text_times.append(now)
        if event.usage is not None:
            reply.num_tokens = event.usage.completion_tokens
            reply.num_prompt_tokens = event.usage.prompt_tokens
        if event.truedraft is not None:
            reply.num_draft_tokens = event.truedraft.drafted_tokens
            reply.num_accepted_tokens = event.truedraft.accepted_tokens
        if event.timings is not None:
            reply.num_draft_tokens = event.timings.draft_n
            reply.num_accepted_tokens = event.timings.draft_n_accepted
    if reply.num_tokens == 0:
        reply.error = reply.error or "the server sent no usage, so tokens cannot be counted"


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields the data of each event but ``[DONE]``. OpenAI's events have one line of data each.

    Reads to the end: a connection that is left earlier is closed, and the next request would open another.
    """
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data != b"[DONE]":
                    yield data
