"""Measures what passes over several tokens take and read in a mixture of experts of real widths.

    python -m benchmarks.experts --layers 2 --file /tmp/a3b.gguf

Writes a GGUF file with random Q4_K weights in the shape of Qwen3-30B-A3B, but for its number of layers and
its vocabulary, and times passes over one to nine tokens of one text. In addition to seconds it prints how
many of a layer's experts were read, and how many tokens that are routed at random would read. The last
column is the acceptance rate from which on drafts of that length would gain, if drafting took no time.
"""

import argparse
import time
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.models.loader import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.threads import set_num_threads
from truedraft.engine.runtime.calibrate import distinct_ids

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE = 2048, 32, 4, 128
NUM_EXPERTS, CHOSEN, EXPERT_SIZE = 128, 8, 768
VOCAB_SIZE, CONTEXT = 4096, 512
SIZES, REPEATS = (1, 2, 3, 5, 9), 30
KIND = "Q4_K"
# Scales of such blocks, and of what is taken off so that weights are about zero, by their places in a block.
SCALE, PLACES = 2e-4, {0: 1.0, 2: 7.5}


def write(path: Path, num_layers: int, seed: int = 1) -> None:
    """Writes the file."""
    draws = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[KIND]]
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_block_count(num_layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(3 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_expert_feed_forward_length(EXPERT_SIZE)

    def quantised(name: str, *shape: int) -> None:
        rows = int(np.prod(shape[:-1]))
        data = draws.integers(0, 256, (rows, shape[-1] // block, size), dtype=np.uint8)
        scales = draws.uniform(0, SCALE, (rows, shape[-1] // block, 1))
        for place, factor in PLACES.items():
            data[:, :, place : place + 2] = (factor * scales).astype(np.float16).view(np.uint8)
        writer.add_tensor(name, data.reshape(*shape[:-1], -1), raw_dtype=GGMLQuantizationType[KIND])

    def dense(name: str, *shape: int, mean: float = 0.0, deviation: float = 0.02) -> None:
        writer.add_tensor(name, draws.normal(mean, deviation, shape).astype(np.float32))

    dense("token_embd.weight", VOCAB_SIZE, HIDDEN)
    quantised("output.weight", VOCAB_SIZE, HIDDEN)
    dense("output_norm.weight", HIDDEN, mean=1.0)
    for layer in range(num_layers):
        name = f"blk.{layer}"
        quantised(f"{name}.attn_q.weight", HEADS * HEAD_SIZE, HIDDEN)
        quantised(f"{name}.attn_k.weight", KV_HEADS * HEAD_SIZE, HIDDEN)
        quantised(f"{name}.attn_v.weight", KV_HEADS * HEAD_SIZE, HIDDEN)
        quantised(f"{name}.attn_output.weight", HIDDEN, HEADS * HEAD_SIZE)
        for norm, length in (("attn", HIDDEN), ("ffn", HIDDEN), ("attn_q", HEAD_SIZE), ("attn_k", HEAD_SIZE)):
            dense(f"{name}.{norm}_norm.weight", length, mean=1.0)
        dense(f"{name}.ffn_gate_inp.weight", NUM_EXPERTS, HIDDEN)
        for part in ("gate", "up"):
            quantised(f"{name}.ffn_{part}_exps.weight", NUM_EXPERTS, EXPERT_SIZE, HIDDEN)
        quantised(f"{name}.ffn_down_exps.weight", NUM_EXPERTS, HIDDEN, EXPERT_SIZE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(runner: ModelRunner, size: int) -> tuple[float, float]:
    """Returns the median seconds of a pass over ``size`` tokens, and the experts that a layer reads."""
    table = BlockTable()
    table.block_ids = list(range(4))
    counted = runner.model.touched
    assert counted is not None
    seconds, before = [], counted()
    for repeat in range(REPEATS):
        table.num_computed_tokens = 0
        ids = [(token + 97 * repeat) % VOCAB_SIZE for token in distinct_ids(size, VOCAB_SIZE)]
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
    parser.add_argument("--file", type=Path, default=Path("/tmp/a3b.gguf"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    assert KIND in TYPES
    set_num_threads(args.threads)
    if not args.file.exists():
        write(args.file, args.layers)
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
