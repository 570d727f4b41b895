"""Attention of one layer, by the kernel that reads keys in place and by gathering, on a GPU:
python -m benchmarks.paged_attention

Rows of a few new tokens after a context of scattered blocks, as decoding and scoring bring them; in turns,
medians, in microseconds. Both write the new keys and values first. *graph* is a pass of 20 layers captured as
a CUDA graph, which is how the engine runs it. *GB/s*
is what the kernel reads of the cache, over its time in a graph. All layers read the same keys: what fits into
the device's L2 cache (50 MB on an H100) comes from there, and only the larger rows of the table are memory's.

It needs an NVIDIA GPU. With TRITON_INTERPRET=1 in the environment it runs at a tiny size in Triton's
interpreter, to see that it runs; those times mean nothing.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine, median_seconds, note, print_facts, print_table, write_json
from benchmarks.on_device import synchronise
from truedraft.engine.cuda.triton_run import AttendRows, InPlaceAttention, find_kernels
from truedraft.engine.layers.attention import PagedAttention
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.memory.batch import ForwardBatch, Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache
from truedraft.engine.rounds.capture.capture import CudaCapture

BLOCK_SIZE = 16
# Layers of a pass, between two looks at the clock.
LAYERS = 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 5], help="new tokens a row")
    parser.add_argument("--heads", default="32:8:128", help="query heads, kv heads, head size")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--window", type=int, help="keys that a token sees; default: all")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--save", type=Path, help="write PATH.json")
    return parser.parse_args()


class Layer:
    """One layer's attention, to be measured over batches of different shapes."""

    def __init__(
        self, shape: AttentionShape, kernel: AttendRows, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.kernel = kernel
        self.dtype = dtype
        self.device = device

    def measure(self, rows: int, queries: int, context: int, repeats: int) -> dict[str, Any]:
        spans, num_blocks = spans_of(rows, queries, context)
        shape, device = self.shape, self.device
        stored = (shape.num_kv_heads, shape.head_size)
        cache = KVCache([AttentionCache(stored, stored, self.dtype, device)], num_blocks, BLOCK_SIZE)
        for tensor in (cache.keys[0], cache.values[0]):
            tensor.normal_()
        heads = shape.num_heads + 2 * shape.num_kv_heads
        qkv = torch.randn(rows * queries, heads, shape.head_size, device=device, dtype=self.dtype)
        query, key, value = qkv.split_with_sizes((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), 1)

        batch = ForwardBatch.build(spans, BLOCK_SIZE, device)
        in_place, gathering = InPlaceAttention(self.kernel, batch, cache), PagedAttention(batch, cache)

        @torch.inference_mode()
        def by_kernel() -> None:
            for _ in range(layers):
                cache.write(0, batch.slots, key, value)
                in_place.attend(shape.call, query)

        @torch.inference_mode()
        def by_gathering() -> None:
            for _ in range(layers):
                gathering.attend(shape.call, query, key, value)

        layers = 1 if device.type == "cpu" else LAYERS
        work: dict[str, Callable[[], None]] = {"kernel": by_kernel, "gathering": by_gathering}
        if device.type == "cuda":
            capture = CudaCapture(device)
            work |= {f"{name}, graph": capture.record(run) for name, run in list(work.items())}
        times = self._times(work, repeats, layers)
        row: dict[str, Any] = {"rows": rows, "new tokens": queries, "context": context, **times}
        row["gathering / kernel"] = times["gathering"] / times["kernel"]
        if device.type == "cuda":
            row["graphs"] = times["gathering, graph"] / times["kernel, graph"]
            seen = min(context + queries, shape.sliding_window or context + queries)
            num_bytes = 2 * rows * seen * stored[0] * stored[1] * self.dtype.itemsize
            row["GB/s"] = num_bytes / times["kernel, graph"] / 1e3
        return row

    def _times(self, work: dict[str, Callable[[], None]], repeats: int, layers: int) -> dict[str, float]:
        """Microseconds of a layer."""

        @torch.inference_mode()
        def finished(run: Callable[[], None]) -> None:
            run()
            synchronise(self.device.type)

        seconds = median_seconds({name: partial(finished, run) for name, run in work.items()}, repeats)
        return {name: 1e6 * each / layers for name, each in seconds.items()}


def spans_of(rows: int, queries: int, context: int) -> tuple[list[Span], int]:
    """Rows whose blocks lie anywhere, and how many blocks there are."""
    each = -(-(context + queries) // BLOCK_SIZE)
    blocks = torch.randperm(rows * each, generator=torch.Generator().manual_seed(0)).tolist()
    spans = []
    for row in range(rows):
        table = BlockTable()
        table.block_ids = blocks[row * each : (row + 1) * each]
        table.num_computed_tokens = context
        spans.append(Span(table, [0] * queries, queries))
    return spans, rows * each


def main() -> None:
    arguments = parse_arguments()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device = torch.device("cpu" if interpreted else "cuda")
    if interpreted:
        arguments.batch, arguments.context, arguments.heads = [1, 2], [20, 40], "4:2:16"
        arguments.dtype, arguments.repeats = "float32", 2
    elif not torch.cuda.is_available():
        raise SystemExit("This needs an NVIDIA GPU; TRITON_INTERPRET=1 shows, at a tiny size, that it runs")
    heads, kv_heads, size = map(int, arguments.heads.split(":"))
    shape = AttentionShape(0, heads, kv_heads, size, size**-0.5, arguments.window, None)
    dtype = getattr(torch, arguments.dtype)
    kernels = (
        import_module("truedraft.engine.cuda.kernels")
        if interpreted
        else find_kernels([shape], dtype, device)
    )
    if kernels is None:
        raise SystemExit("The kernels are not used here: triton is missing, or a warning above says why")
    layer = Layer(shape, kernels.attend_rows, dtype, device)
    rows = []
    for batch in arguments.batch:
        for context in arguments.context:
            for queries in arguments.queries:
                rows.append(layer.measure(batch, queries, context, arguments.repeats))
                note(str(rows[-1]))
    name = "Triton's interpreter: times mean nothing" if interpreted else torch.cuda.get_device_name()
    facts = {**machine(), "torch": str(torch.__version__), "device": name, "heads": arguments.heads}
    print_facts(facts)
    print_table(rows, f"Attention of one layer in {arguments.dtype}, microseconds")
    if arguments.save:
        write_json(arguments.save.with_suffix(".json"), {"facts": facts, "rows": rows})


if __name__ == "__main__":
    main()
