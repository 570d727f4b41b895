"""Measures what passes over several tokens take and read in a mixture of experts of real widths.

    python -m benchmarks.experts --layers 2 --file /tmp/a3b.gguf

Writes a GGUF file with random weights in the shape of Qwen3-30B-A3B, but for its number of layers and its
vocabulary (``synthetic_gguf``), and times passes over one to nine tokens of one text. In addition to seconds
it prints how many of a layer's experts were read, and how many tokens that are routed at random would read.
The last column is the acceptance rate from which on drafts of that length would gain, if drafting took no
time.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.synthetic_gguf import SCALES, SHAPES, write
from benchmarks.synthetic_pair import cycle, successors
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.models.load import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.threads import set_num_threads
from truedraft.engine.rounds.calibrate import distinct_ids

SHAPE = SHAPES["a3b"]
NUM_EXPERTS, CHOSEN = SHAPE.experts
SIZES, REPEATS = (1, 2, 3, 5, 9), 30


def measure(runner: ModelRunner, size: int) -> tuple[float, float]:
    """Returns the median seconds of a pass over ``size`` tokens, and the experts that a layer reads."""
    table = BlockTable()
    table.block_ids = list(range(4))
    counted = runner.model.touched
    assert counted is not None
    seconds, before = [], counted()
    for repeat in range(REPEATS):
        table.num_computed_tokens = 0
        ids = [(token + 97 * repeat) % SHAPE.vocab_size for token in distinct_ids(size, SHAPE.vocab_size)]
        started = time.perf_counter()
        runner.forward([Span(table, ids, size)])
        seconds.append(time.perf_counter() - started)
    experts, layers = (now - then for now, then in zip(counted(), before, strict=True))
    return float(np.median(seconds)), experts / layers


def break_even(ratio: float, length: int) -> float | None:
    """Returns the acceptance rate at which rounds that take ``ratio`` times as long emit as many times the
    tokens; None if none does."""
    if ratio >= length + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        emitted = sum(middle**position for position in range(length + 1))
        low, high = (middle, high) if emitted < ratio else (low, middle)
    return high


def main() -> None:
    parser = argparse.ArgumentParser(description="Time passes of a mixture of experts of real widths.")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--type", choices=SCALES, default="Q4_K", help="of all matrices")
    parser.add_argument("--file", type=Path, default=Path("/tmp/a3b.gguf"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    set_num_threads(args.threads)
    if not args.file.exists():
        write(
            args.file, replace(SHAPE, layers=args.layers), args.type, successors(cycle(SHAPE.vocab_size, 0))
        )
    model = load_model(str(args.file), LoadOptions())
    print(f"{args.file}: {args.file.stat().st_size / 1e6:.0f} MB, {model.way}, {args.threads} threads")
    runner = ModelRunner.build(model, 8, 16)
    print(f"{'tokens':>6} {'ms':>8} {'ratio':>6} {'experts':>8} {'at random':>9} {'gains from':>10}")
    first = 0.0
    for size in SIZES:
        seconds, experts = measure(runner, size)
        first = first or seconds
        at_random = NUM_EXPERTS * (1 - (1 - CHOSEN / NUM_EXPERTS) ** size)
        even = break_even(seconds / first, size - 1) if size > 1 else None
        words = "" if size == 1 else "never" if even is None else f"{even:.2f}"
        columns = f"{size:6} {1000 * seconds:8.2f} {seconds / first:6.2f} {experts:8.1f}"
        print(f"{columns} {at_random:9.1f} {words:>10}")


if __name__ == "__main__":
    main()
