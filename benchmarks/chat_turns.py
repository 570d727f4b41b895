"""What a chat's beginning saves, turn by turn: python -m benchmarks.chat_turns --target FOLDER

A chat grows by some tokens from its user and an answer in each turn. Every turn is sent twice in the same
repeat, also with ``cache_prompt: false``: tokens found in the cache, time to the first token, ratios within a
repeat. For a model with running states, what those of one sequence take, and what copies after each of
four drafted tokens would take instead of records.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import STORY_OPENINGS, machine, print_facts, print_table, warn_if_busy, write_json
from benchmarks.prefix_cache import send
from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.memory.recurrent_state import RecurrentCache, StateShape
from truedraft.engine.models.base import Model
from truedraft.engine.proposers.translated.pairing import load_tokenizer

NUM_SNAPSHOTS = 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="default: the bundled pair's")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--turn-tokens", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", type=Path, help="write the rows to this file")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    busy = warn_if_busy()
    given = {"target": arguments.target} if arguments.target else {}
    config = EngineConfig(**given, draft="none", method="ngram", num_speculative_tokens=4)
    core = build_engine(config)
    tokenizer = load_tokenizer(str(config.target))
    assert tokenizer is not None
    text = list(tokenizer.encode(" ".join(STORY_OPENINGS * 99)))
    turns: list[list[tuple[int, int, float, float]]] = [[] for _ in range(arguments.turns)]
    for repeat in range(arguments.repeats + 1):
        prompt: list[int] = []
        for number, turn in enumerate(turns):
            first = number * arguments.turn_tokens
            prompt += text[first : first + arguments.turn_tokens]
            warm, cold = (
                send(core, prompt, arguments.max_tokens, str(repeat), cached) for cached in (True, False)
            )
            if repeat:  # the first one only warms up
                turn.append((len(prompt), len(prompt) - warm.computed, warm.first_token, cold.first_token))
    rows = [row(number, turn) for number, turn in enumerate(turns, start=1)]
    facts: dict[str, Any] = {**machine(), "busy": busy, "target": Path(str(config.target)).name}
    facts |= memory(core.target.model)
    print_facts(facts)
    print_table(rows, f"{arguments.turns} turns of {arguments.turn_tokens} tokens, greedy")
    write_json(arguments.save, {"facts": facts, "rows": rows})


def memory(model: Model) -> dict[str, float]:
    """Returns megabytes of one sequence, whatever its length, and of a thousand tokens."""
    caches = [cache for cache in model.caches if isinstance(cache, RecurrentCache)]
    shapes = [cache.state or StateShape(0, 0, 0, 0) for cache in caches]
    state = sum(4 * shape.heads * shape.rows * shape.columns for shape in shapes)
    inputs = sum(4 * cache.channels * (cache.width - 1 + NUM_SNAPSHOTS) for cache in caches)
    return {
        "states and records of a sequence, MB": model.state_bytes_per_sequence / 1e6,
        "a state, MB": state / 1e6,
        f"states with {NUM_SNAPSHOTS} snapshots, MB": ((1 + NUM_SNAPSHOTS) * state + inputs) / 1e6,
        "keys and values of 1,000 tokens, MB": model.cache_bytes_per_token / 1e3,
    }


def row(number: int, turn: list[tuple[int, int, float, float]]) -> dict[str, Any]:
    return {
        "turn": number,
        "prompt": turn[0][0],
        "cached": turn[0][1],
        "first token, ms": 1000 * statistics.median(warm for *_, warm, _ in turn),
        "without, ms": 1000 * statistics.median(cold for *_, cold in turn),
        "ratio": statistics.median(warm / cold for *_, warm, cold in turn),
    }


if __name__ == "__main__":
    main()
