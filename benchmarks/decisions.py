"""Measures questions about one long input against as many completions of one token with the same prompts.

    python -m benchmarks.decisions --target SmolLM2-135M-Instruct.Q4_1.gguf [--result NAME]

A server with the prefix cache on gets, in turns, one request to /v1/decisions with all questions and requests
to /v1/completions with the questions' prompts, 32 at a time; the first of these goes alone, so that the input
is computed once for both. Every turn has a ``cache_salt`` of its own. Labels have one token or several.
The processors' time of the server's processes is a figure of its own, which other programs change less.
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.common import STORY_OPENINGS, CpuWatch, Times, machine, note, print_table, warn_of_others
from benchmarks.defaults import process_ids
from benchmarks.online import running_server, until_ready
from benchmarks.result_file import Figure, record, table_of
from truedraft.engine.config import BUNDLED_PAIR
from truedraft.loadtest.client import BenchmarkError
from truedraft.loadtest.command import find_model
from truedraft.loadtest.generator import new_session
from truedraft.server.schemas.decisions import DecisionRequest
from truedraft.server.text.decisions import ask
from truedraft.server.text.prompt import PromptLimits
from truedraft.server.text.tokenizer import Tokenizer, load_tokenizer

AT_ONCE = 32
DECISIONS, COMPLETIONS = WAYS = "decisions", "completions"
LIMITS = PromptLimits(10**9, 10**9, "", 10**9)
CHOICES = [{"value": value} for value in ("very happy", "a little sad", "rather tired", "quite angry")]
KINDS: dict[str, dict[str, Any]] = {
    "labels of one token": {"type": "predicate"},
    "four labels of several tokens": {"type": "choice", "choices": CHOICES},
}


def questions(kind: str, number: int) -> list[dict[str, Any]]:
    return [KINDS[kind] | {"instructions": f"Is it so in sentence {place + 1}?"} for place in range(number)]


def text_of(num_tokens: int, tokenizer: Tokenizer) -> str:
    """Returns a text of about ``num_tokens`` tokens."""
    words = " ".join(STORY_OPENINGS).split()
    text = " ".join(words[place % len(words)] for place in range(num_tokens))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.decode(ids[:num_tokens], skip_special_tokens=True)


async def post(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Any:
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise BenchmarkError(f"HTTP {response.status}: {(await response.text())[:300]}")
        return await response.json()


async def complete(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], prompts: Sequence[list[int]]
) -> None:
    """Asks for one token after each prompt."""
    rest, body = iter(prompts), {**body, "max_tokens": 1, "temperature": 0}

    async def one_client() -> None:
        for prompt in rest:
            await post(session, f"{url}/completions", {**body, "prompt": prompt})

    await post(session, f"{url}/completions", {**body, "prompt": next(rest)})
    await asyncio.gather(*(one_client() for _ in range(AT_ONCE)))


async def measure(arguments: argparse.Namespace) -> None:
    target = arguments.target or str(BUNDLED_PAIR / "target")
    tokenizer = load_tokenizer(target)
    text = text_of(arguments.input_tokens, tokenizer)
    asked = {kind: questions(kind, arguments.questions) for kind in arguments.kinds}
    prompts = {
        kind: [
            one.prompt_ids
            for one in ask(
                DecisionRequest.model_validate({"model": "m", "input": text, "questions": some}),
                tokenizer,
                LIMITS,
            )
        ]
        for kind, some in asked.items()
    }
    seconds: dict[tuple[str, str], list[Times]] = {(kind, way): [] for kind in asked for way in WAYS}
    settings = {"draft": "none", "num_threads": arguments.threads, "max_prompt_characters": 10**8}
    async with new_session("none", timeout=3600.0) as session:
        with running_server(settings | {"target": target}) as server:
            await until_ready(session, server)
            url = server.base_url
            model = await find_model(session, url)
            for path, warm in (
                ("decisions", {"input": "A dog.", "questions": asked[arguments.kinds[0]][:2]}),
                ("completions", {"prompt": "A dog", "max_tokens": 1}),
            ):
                await post(session, f"{url}/{path}", {"model": model, **warm})  # warms up
            processes = [psutil.Process(each) for each in process_ids({server})]
            watch = CpuWatch([process.pid for process in processes])
            for repeat in range(arguments.repeats):
                for kind, way in seconds:
                    body: dict[str, Any] = {"model": model, "cache_salt": f"{kind} {repeat} {way}"}
                    started = Times.now(processes)
                    if way == DECISIONS:
                        body |= {"input": text, "questions": asked[kind]}
                        await post(session, f"{url}/decisions", body)
                    else:
                        await complete(session, url, body, prompts[kind])
                    seconds[kind, way].append(Times.now(processes).since(started))
                    note(f"  {repeat + 1}, {kind}, {way}: {seconds[kind, way][-1]}")
            others = warn_of_others(watch)
    figures = [
        figure
        for (kind, way), ours in seconds.items()
        for theirs in [seconds[kind, COMPLETIONS]]
        for figure in (
            Figure.of(f"{kind}, {way}", "seconds", [one.wall for one in ours]),
            Figure.of(f"{kind}, {way}", "processor seconds", [one.processor for one in ours]),
            Figure.of_ratios(
                f"{kind}, {way}",
                "processor seconds to completions",
                [one.processor for one in ours],
                [one.processor for one in theirs],
            ),
        )
    ]
    what = (
        f"One request of {arguments.questions} questions about an input of {arguments.input_tokens:,} "
        f"tokens, and {arguments.questions} completions of one token with the same prompts"
    )
    print_table(table_of(figures, "questions, asked by"), what)
    record(
        arguments.result,
        what=what,
        rows="questions, asked by",
        model="bundled target" if arguments.target is None else Path(target).stem,
        dtype="the file's own weights",
        num_repeats=arguments.repeats,
        machine=machine() | {"others": others},
        figures=figures,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="default: the bundled target, which reads 1,024 tokens")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--input-tokens", type=int, default=2000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
