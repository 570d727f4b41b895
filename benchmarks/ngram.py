"""What ngram costs and gives: python -m benchmarks.ngram [--edits edits.jsonl]

The automaton's cost per token at growing lengths of the text (it must not grow), its memory, and the rounds
per token of a scripted target (``benchmarks.scripted_target``) with ngram against none, on edits of programs
and on summaries that use their article's sentences. The first part needs no model (``--only-automaton``).
"""

import argparse
import random
import statistics
import time
import tracemalloc
from pathlib import Path

from benchmarks.common import machine, print_table, warn_if_busy
from benchmarks.edits import Edit, read_edits, summaries
from truedraft.engine.messages import NgramChoice, SamplingParams
from truedraft.engine.proposers.ngram import SuffixAutomaton

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
MEASURED = 512  # tokens at the end of each length
CHOICES: tuple[NgramChoice, ...] = ("most_recent", "most_frequent")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--edits", type=Path, help="JSON lines; default: made-up programs")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only-automaton", action="store_true")
    return parser.parse_args()


def texts() -> dict[str, list[int]]:
    """Words by a Zipf law, as in prose; program-like lines that repeat with changes; noise."""
    chance = random.Random(1)
    size = LENGTHS[-1] + MEASURED
    weights = [1 / rank for rank in range(1, 4001)]
    prose = chance.choices(range(4000), weights, k=size)
    lines = [[chance.randrange(500) for _ in range(chance.randint(4, 12))] for _ in range(200)]
    program: list[int] = []
    while len(program) < size:
        line = list(chance.choice(lines))
        line[chance.randrange(len(line))] = chance.randrange(500)
        program += line
    return {
        "prose": prose,
        "program": program[:size],
        "noise": [chance.randrange(50_000) for _ in range(size)],
        "one token": [7] * size,
    }


def automaton_rows(text: list[int], choice: NgramChoice, repeats: int) -> dict[int, float]:
    """Microseconds per token, by the text's length."""
    samples: dict[int, list[float]] = {}
    for _ in range(repeats):
        automaton = SuffixAutomaton(choice)
        for length in LENGTHS:
            automaton.extend(text[len(automaton) : length - MEASURED])
            started = time.perf_counter()
            for token in text[length - MEASURED : length]:
                automaton.extend([token])
            samples.setdefault(length, []).append((time.perf_counter() - started) / MEASURED * 1e6)
    return {length: statistics.median(values) for length, values in samples.items()}


def build_row(name: str, text: list[int]) -> dict[str, object]:
    started = time.perf_counter()
    SuffixAutomaton().extend(text[: LENGTHS[-1]])
    seconds = time.perf_counter() - started
    tracemalloc.start()
    kept = SuffixAutomaton()
    kept.extend(text[: LENGTHS[-1]])
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"text": name, "tokens": LENGTHS[-1], "build_ms": 1000 * seconds, "MiB": size / 2**20}


def rounds_rows(sets: dict[str, list[Edit]]) -> list[dict[str, object]]:
    from benchmarks.scripted_target import ScriptedEngine, total
    from benchmarks.synthetic_pair import Shape

    rows: list[dict[str, object]] = []
    for choice in CHOICES:
        engine = ScriptedEngine(Shape(64, 1, 4, 2, 128), num_speculative_tokens=8, ngram_choice=choice)
        for name, edits in sets.items():
            runs = []
            for edit in edits:
                output = engine.encode(edit.expected)
                params = SamplingParams(
                    max_tokens=len(output), temperature=0, ignore_eos=True, method="ngram"
                )
                runs.append(engine.run(engine.encode(edit.instruction + edit.input), output, None, params))
            run = total(runs)
            rows.append(
                {
                    "prompts": name,
                    "choice": choice,
                    "tokens": run.num_tokens,
                    "rounds_per_token": run.num_rounds / run.num_tokens,
                    "none": 1.0,
                    "acceptance": run.num_accepted_tokens / max(1, run.num_draft_tokens),
                }
            )
    return rows


def main() -> None:
    args = parse_arguments()
    warn_if_busy()
    where = machine()
    costs = [
        {"text": name, "choice": choice, **automaton_rows(text, choice, args.repeats)}
        for name, text in texts().items()
        for choice in CHOICES
    ]
    print_table(
        [{str(key): value for key, value in row.items()} for row in costs],
        f"microseconds per token, by length of the text, {where}",
    )
    print_table([build_row(name, text) for name, text in texts().items()], "a prompt of 32k tokens")
    if not args.only_automaton:
        sets = {
            "code edits": read_edits(args.edits, args.num_prompts),
            "summaries": summaries(args.num_prompts),
        }
        print_table(rounds_rows(sets), "rounds per token, 8 a round")


if __name__ == "__main__":
    main()
