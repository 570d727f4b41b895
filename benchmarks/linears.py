"""One linear layer of few rows, each way there is: python -m benchmarks.linears --threads 2

Float32 rows times weights that float16 holds: ``F.linear`` and oneDNN's packed layer on them as float32,
the kernels in C on them as float32, as float16 and rounded to bfloat16. Each way has as many copies of
the weights as layers would have, used in turn, so that they come from memory as in a model. Microseconds,
medians of interleaved repeats.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import machine, median_seconds, note, print_facts, print_table, warn_if_busy
from truedraft.engine.layers.linear import OneDnnLinear
from truedraft.engine.native.library import load_library
from truedraft.engine.native.linear import NativeLinear
from truedraft.engine.native.threads import set_num_threads

# Enough copies to be larger than the processor's caches.
COPIES_BYTES, MAX_COPIES = 200 << 20, 64


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["1024x2048"], help="out x in features")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 5, 9, 16, 48])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


def ways_of(weight: torch.Tensor) -> dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]]:
    """Each call makes another copy of the weights."""

    def plain() -> Callable[[torch.Tensor], torch.Tensor]:
        copy = weight.clone()
        return lambda x: F.linear(x, copy)

    ways: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
        "F.linear": plain,
        "oneDNN": lambda: OneDnnLinear(weight, None),
    }
    library = load_library()
    if library is not None:
        ways["C"] = lambda: NativeLinear(library, [weight], None, None)
        ways["C, 16 bits"] = lambda: NativeLinear(library, [weight], None, 1.0)
        if library.multiplies_bfloat16():
            ways["C, bfloat16"] = lambda: NativeLinear(library, [weight], None, None, bf16=True)
    return ways


@torch.inference_mode()
def measure(shape: tuple[int, int], num_rows: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    weight = (torch.randn(shape) * 0.02).half().float()
    copies = max(2, min(MAX_COPIES, COPIES_BYTES // (4 * weight.numel())))
    linears = {name: [make() for _ in range(copies)] for name, make in ways_of(weight).items()}
    table: dict[str, dict[str, Any]] = {name: {"linear layer": name} for name in linears}
    for rows in num_rows:
        x = torch.randn(rows, shape[1])

        def run(name: str, x: torch.Tensor = x) -> None:
            for linear in linears[name]:
                linear(x)

        work = {name: partial(run, name) for name in linears}
        for name, seconds in median_seconds(work, repeats).items():
            table[name][f"{rows} rows"] = round(1e6 * seconds / copies, 1)
        note(f"{rows} rows")
    return list(table.values())


def main() -> None:
    arguments = parse_arguments()
    busy = warn_if_busy()
    set_num_threads(arguments.threads)
    for name in arguments.shapes:
        out, size = map(int, name.split("x"))
        rows = measure((out, size), arguments.rows, arguments.repeats)
        print_table(rows, f"{out} x {size}, microseconds")
    print_facts({**machine(), "busy": busy, "threads": arguments.threads})


if __name__ == "__main__":
    main()
