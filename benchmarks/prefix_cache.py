"""What a shared beginning saves: python -m benchmarks.prefix_cache

Two requests with the same first 300 tokens, one after the other, in an engine that has seen nothing: prompt
tokens that the target computes, time to the first token, and acceptance afterwards. The second is also sent
with ``cache_prompt: false``, in the same repeat: what it would have been without. Medians and ratios within a
repeat.
"""

import argparse
import statistics
import time
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import STORY_OPENINGS, machine, print_facts, print_table, warn_if_busy, write_json
from benchmarks.engine_runs import decode_params
from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Generate, TokenOutput
from truedraft.engine.proposers.translated.pairing import load_tokenizer

KINDS = ("first", "second", "second, cache declined")


class Request(NamedTuple):
    computed: int  # prompt tokens
    first_token: float  # seconds
    drafted: int
    accepted: int


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="default: the bundled pair")
    parser.add_argument("--draft")
    parser.add_argument("--shared", type=int, default=300, help="tokens that both prompts begin with")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--save", type=Path, help="write the rows to this file")
    return parser.parse_args()


def send(core: EngineCore, prompt: list[int], max_tokens: int, salt: str, cached: bool) -> Request:
    """``salt`` keeps repeats from sharing with each other."""
    params = decode_params(max_tokens, num_speculative_tokens=4)
    request = Generate(
        request_id="r", prompt_token_ids=prompt, params=params, cache_prompt=cached, cache_salt=salt
    )
    started = time.perf_counter()
    core.add(request)
    outputs: list[TokenOutput] = []
    first_token = 0.0
    while core.has_work:
        for output in core.step():
            assert isinstance(output, TokenOutput)
            first_token = first_token or time.perf_counter() - started
            outputs.append(output)
    return Request(
        computed=len(prompt) - outputs[0].num_cached_tokens,
        first_token=first_token,
        drafted=sum(output.num_draft_tokens for output in outputs),
        accepted=sum(output.num_accepted_tokens for output in outputs),
    )


def main() -> None:
    arguments = parse_arguments()
    busy = warn_if_busy()
    given = {name: getattr(arguments, name) for name in ("target", "draft") if getattr(arguments, name)}
    config = EngineConfig(**given, method="draft_model", num_speculative_tokens=4)
    core = build_engine(config)
    tokenizer = load_tokenizer(str(config.target))
    assert tokenizer is not None
    text = list(tokenizer.encode(" ".join(STORY_OPENINGS * 10)))
    shared, tails = text[: arguments.shared], [text[i : i + 12] for i in (12, 40)]
    requests: dict[str, list[Request]] = {kind: [] for kind in KINDS}
    for repeat in count():
        sent = [
            send(
                core,
                shared + tails[kind != "first"],
                arguments.max_tokens,
                str(repeat),
                "declined" not in kind,
            )
            for kind in KINDS
        ]
        if repeat:  # the first one only warms up
            for kind, request in zip(KINDS, sent, strict=True):
                requests[kind].append(request)
        if repeat == arguments.repeats:
            break
    rows = [row(kind, requests) for kind in KINDS]
    facts: dict[str, Any] = {**machine(), "busy": busy, "target": Path(str(config.target)).name}
    print_facts(facts)
    print_table(
        rows, f"{arguments.shared} shared tokens of {arguments.shared + 12}, greedy, 4 drafts a round"
    )
    write_json(arguments.save, {"facts": facts, "rows": rows})


def row(kind: str, requests: dict[str, list[Request]]) -> dict[str, Any]:
    mine, declined = requests[kind], requests[KINDS[-1]]
    ratios = [a.first_token / b.first_token for a, b in zip(mine, declined, strict=True)]
    rates = [1 / request.first_token for request in mine]
    return {
        "variant": kind,
        "computed": mine[0].computed,
        "first token, ms": 1000 * statistics.median(request.first_token for request in mine),
        "to declined": statistics.median(ratios),
        "acceptance": sum(r.accepted for r in mine) / sum(r.drafted for r in mine),
        "tokens/s": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
    }


if __name__ == "__main__":
    main()
