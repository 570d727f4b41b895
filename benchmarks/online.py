"""Load on a running server: python -m benchmarks.online --streams 1 8

Closed loop: each of N streams sends its next request when the last one is finished. Works against any
OpenAI-compatible ``base_url`` through the openai SDK. Prints, for each N, tokens per second of the whole and
of one stream, time to first token, time between chunks and time of a request; percentiles, not averages.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from openai import APIConnectionError, AsyncOpenAI

from benchmarks.common import machine, note, percentile, print_table, read_prompts, warn_if_busy, write_json


class Reply(NamedTuple):
    """Times of one request, in seconds from its start; ``chunk_times`` are those that carried text."""

    chunk_times: list[float]
    seconds: float
    num_tokens: int


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--chat", action="store_true", help="chat completions instead of completions")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--requests-per-stream", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--extra-body", type=json.loads, default={}, help="JSON added to every request")
    parser.add_argument("--prompts", type=Path, help="file of prompts; default: story openings")
    parser.add_argument("--json", type=Path, help="also write everything here")
    return parser.parse_args()


async def request(client: AsyncOpenAI, arguments: argparse.Namespace, model: str, prompt: str) -> Reply:
    """One streamed request. Tokens are counted by the server's ``usage``: a chunk may carry several."""
    settings: dict[str, Any] = {
        "model": model,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": arguments.extra_body,
    }
    start = time.perf_counter()
    if arguments.chat:
        stream = await client.chat.completions.create(
            messages=[{"role": "user", "content": prompt}], **settings
        )
    else:
        stream = await client.completions.create(prompt=prompt, **settings)
    chunk_times, num_tokens = [], 0
    async for chunk in stream:
        if any(text_of(choice) for choice in chunk.choices):
            chunk_times.append(time.perf_counter() - start)
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    return Reply(chunk_times, time.perf_counter() - start, num_tokens)


def text_of(choice: Any) -> str:
    return str((choice.delta.content if hasattr(choice, "delta") else choice.text) or "")


async def measure(
    client: AsyncOpenAI, arguments: argparse.Namespace, model: str, num_streams: int
) -> dict[str, Any]:
    """``num_streams`` streams that share one queue of requests."""
    prompts = read_prompts(arguments.prompts)
    queue: Iterator[str] = (
        prompts[index % len(prompts)] for index in range(num_streams * arguments.requests_per_stream)
    )
    replies: list[Reply] = []

    async def stream() -> None:
        for prompt in queue:
            replies.append(await request(client, arguments, model, prompt))

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_streams):
            group.create_task(stream())
    return report(num_streams, replies, time.perf_counter() - start)


def report(num_streams: int, replies: list[Reply], seconds: float) -> dict[str, Any]:
    """One row of the table, times in milliseconds."""
    spoken = [reply for reply in replies if reply.chunk_times]
    if not spoken:
        raise SystemExit("No request produced any text.")
    first = [reply.chunk_times[0] for reply in spoken]
    gaps = [
        later - earlier
        for reply in spoken
        for earlier, later in zip(reply.chunk_times, reply.chunk_times[1:], strict=False)
    ]
    row: dict[str, Any] = {
        "streams": num_streams,
        "requests": len(replies),
        "tokens": sum(reply.num_tokens for reply in replies),
        "tokens/s": sum(reply.num_tokens for reply in replies) / seconds,
        "tokens/s_a_stream": percentile([reply.num_tokens / reply.seconds for reply in spoken], 50),
    }
    for name, values in (("first", first), ("gap", gaps or [0.0]), ("all", [r.seconds for r in replies])):
        for percent in (50, 90, 99):
            row[f"{name}_p{percent}"] = 1000 * percentile(values, percent)
    return row


async def run(arguments: argparse.Namespace) -> None:
    busy = warn_if_busy()
    async with AsyncOpenAI(base_url=arguments.base_url, api_key=arguments.api_key) as client:
        model = arguments.model or (await client.models.list()).data[0].id
        note(f"Warming up {model}")
        await request(client, arguments, model, read_prompts(arguments.prompts)[0])
        rows = []
        for num_streams in arguments.streams:
            note(f"{num_streams} streams")
            rows.append(await measure(client, arguments, model, num_streams))
    about = machine() | {"busy": busy, "model": model}
    print("  ".join(f"{key}: {value}" for key, value in about.items()))
    print_table(rows, "Closed loop; milliseconds: first = to first text, gap = between chunks, all = request")
    write_json(
        arguments.json,
        {"machine": about, "arguments": {k: str(v) for k, v in vars(arguments).items()}, "results": rows},
    )


def main() -> None:
    arguments = parse_arguments()
    connection_lost = False
    try:
        asyncio.run(run(arguments))
    except* APIConnectionError:
        connection_lost = True
    if connection_lost:
        raise SystemExit(f"No server answers at {arguments.base_url}: start one with make serve")


if __name__ == "__main__":
    main()
