"""One forward pass, each way it can be computed: python -m benchmarks.forward

Batches of rows x new tokens, each row over as many cached tokens, interleaved; medians in milliseconds. The
ways: transformers' layers over our cache with linear layers in C; the fused forward with torch's operations;
the same with the kernels in C; and of those the linear layers alone. ``--compile`` adds transformers' own
module as it is and through torch.compile, one row of each length, with the seconds that compiling takes.
"""

import argparse
import statistics
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StaticCache

from benchmarks.common import (
    machine,
    median_seconds,
    note,
    print_facts,
    print_table,
    timed,
    warn_if_busy,
    write_json,
)
from benchmarks.result_file import Figure, record
from truedraft.engine.config import BUNDLED_PAIR
from truedraft.engine.layers.decoder import DecoderWeights
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.hf.module import load_decoder
from truedraft.engine.models.load import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.threads import set_num_threads
from truedraft.engine.rounds.calibrate import distinct_ids

BLOCK_SIZE = 16
Batch = tuple[int, int]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(BUNDLED_PAIR / "target"), help="checkpoint folder")
    parser.add_argument("--batches", nargs="+", default=["1x1", "1x5", "4x3", "16x1", "16x3"])
    parser.add_argument("--cached", type=int, default=100, help="tokens of each row that the cache holds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--save", type=Path, help="write PATH.json")
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
    return parser.parse_args()


def ways_of(folder: str, num_slots: int) -> dict[str, ModelRunner]:
    ways = {}
    for name in ("transformers' layers", "fused, torch", "fused, C"):
        model: Model
        if name == "transformers' layers":
            model = load_decoder(folder, LoadOptions())
        else:
            model = load_model(folder, LoadOptions(native_kernels=name == "fused, C"))
            if not isinstance(model, FusedDecoder) or model.is_native != (name == "fused, C"):
                raise SystemExit(f"{folder} does not run as: {name}")
        ways[name] = ModelRunner.build(model, -(-num_slots // BLOCK_SIZE), BLOCK_SIZE)
    return ways


def forward_of(runner: ModelRunner, rows: int, queries: int, cached: int) -> Callable[[], None]:
    num_blocks = -(-(cached + queries) // BLOCK_SIZE)
    tables = [BlockTable() for _ in range(rows)]
    for row, table in enumerate(tables):
        table.block_ids = list(range(row * num_blocks, (row + 1) * num_blocks))

    token_ids = distinct_ids(rows * queries, runner.vocab_size)

    def forward() -> None:
        for table in tables:
            table.num_computed_tokens = cached
        ids = iter(token_ids)
        runner.forward([Span(table, list(islice(ids, queries)), queries) for table in tables])

    return forward


def linears_of(weights: DecoderWeights, num_tokens: int) -> Callable[[], None]:
    hidden = weights.embed(torch.zeros(num_tokens, dtype=torch.int64), torch.float32)
    shape = weights.layers[0].mixer.shape
    width = shape.num_heads * shape.head_size

    @torch.inference_mode()
    def linears() -> None:
        x = hidden
        for layer in weights.layers:
            attended = layer.mixer.qkv(x)[:, :width].contiguous()
            x = layer.mixer.output.add_to(x, attended)
            gate_up = layer.mlp.gate_up(x)
            x = layer.mlp.down.add_to(x, gate_up[:, : gate_up.shape[1] // 2].contiguous())
        weights.head(x)

    return linears


def measure(ways: dict[str, ModelRunner], batch: Batch, cached: int, repeats: int) -> dict[str, Any]:
    rows, queries = batch
    work = {name: forward_of(runner, rows, queries, cached) for name, runner in ways.items()}
    for name, runner in ways.items():
        if isinstance(runner.model, FusedDecoder):
            work[f"{name}: linear layers"] = linears_of(runner.model.weights, rows * queries)
    times = {name: 1000 * seconds for name, seconds in median_seconds(work, repeats).items()}
    return {"rows x tokens": f"{rows} x {queries}", **times}


def measure_compiled(folder: str, queries: int, cached: int, repeats: int) -> dict[str, Any]:
    """transformers' module with its static cache, which holds no more than what is used here."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    row: dict[str, Any] = {"rows x tokens": f"1 x {queries}"}
    torch._dynamo.reset()
    for name, forward in (("module", model), ("compiled", torch.compile(model))):
        cache = StaticCache(config=model.config, max_cache_len=cached + queries * (repeats + 4))
        ids = torch.zeros(1, queries, dtype=torch.int64)

        @torch.inference_mode()
        def step(forward: Any = forward, cache: Any = cache, ids: torch.Tensor = ids) -> None:
            forward(ids, past_key_values=cache)

        with torch.inference_mode():
            model(torch.zeros(1, cached, dtype=torch.int64), past_key_values=cache)
        row[f"{name}, first, s"] = timed(step)
        row[name] = 1000 * statistics.median([timed(step) for _ in range(repeats + 3)][3:])
    return row


def main() -> None:
    arguments = parse_arguments()
    busy = warn_if_busy()
    set_num_threads(arguments.threads)
    batches: list[Batch] = [tuple(map(int, batch.split("x"))) for batch in arguments.batches]  # type: ignore[misc]
    longest = max(rows * (arguments.cached + queries + BLOCK_SIZE) for rows, queries in batches)
    ways = ways_of(arguments.model, longest)
    rows = []
    for batch in batches:
        rows.append(measure(ways, batch, arguments.cached, arguments.repeats))
        note(str(rows[-1]))
    facts = {**machine(), "busy": busy, "threads": arguments.threads, "cached": arguments.cached}
    print_facts(facts)
    print_table(rows, f"{arguments.model}: milliseconds of one forward pass")
    compiled = []
    if arguments.compile:
        lengths = sorted({queries for num_rows, queries in batches if num_rows == 1})
        compiled = [
            measure_compiled(arguments.model, queries, arguments.cached, arguments.repeats)
            for queries in lengths
        ]
        print_table(compiled, "transformers' own module, milliseconds")
    record(
        arguments.result,
        what=f"One forward pass of rows x new tokens, each row over {arguments.cached} cached ones",
        rows="layers",
        model="bundled target"
        if Path(arguments.model) == BUNDLED_PAIR / "target"
        else Path(arguments.model).name,
        dtype=f"{arguments.threads} thread{'s' * (arguments.threads > 1)}",
        num_repeats=arguments.repeats,
        machine=facts,
        figures=[
            Figure(name, f"{row['rows x tokens']}, ms", float(f"{value:.4g}"))
            for row in rows
            for name, value in row.items()
            if name != "rows x tokens"
        ],
    )
    if arguments.save:
        write_json(arguments.save.with_suffix(".json"), {"facts": facts, "rows": rows, "compiled": compiled})


if __name__ == "__main__":
    main()
