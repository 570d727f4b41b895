"""What caches in fewer bits save and cost: python -m benchmarks.cache_types model.gguf --texts FILE

One model reads the same texts with its keys and values kept in each type: how likely the texts are to it, and
how far their tokens' log-probabilities are from those with a cache in float32, on average; weights and inputs of
layers are in float32 for that. Then, with the weights as they are served, it computes a token after so many
others, with all types in turn: these others are random numbers in the cache, for which no prompt of that
length has to be computed. Lines ``<|endoftext|>`` separate the texts of the file.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import CpuWatch, machine, note, print_table, warn_of_others
from benchmarks.result_file import Figure, record, table_of
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import KVCache, quantised
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.hf.fresh import from_empty_cache
from truedraft.engine.models.load import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import CACHE_DTYPES, LoadOptions
from truedraft.engine.native.threads import set_num_threads
from truedraft.engine.proposers.translated.pairing import load_tokenizer

TYPES = ("float32", "float16", "int8")
REFERENCE, BASE = "float32", "float16"
BLOCK_SIZE = 16


def texts_of(path: Path, tokenizer: Any, number: int, length: int) -> list[list[int]]:
    """Returns the first texts of the file, joined until they have ``length`` tokens each."""
    ids = list(
        tokenizer.encode(" ".join(path.read_text(encoding="utf-8").split("<|endoftext|>")[: 40 * number]))
    )
    return [ids[start : start + length] for start in range(0, number * length, length)]


@torch.inference_mode()
def log_probs(model: FusedDecoder, texts: Sequence[list[int]]) -> torch.Tensor:
    """Returns the log-probabilities of all tokens but the first of each text."""
    found = []
    for ids in texts:
        logits = from_empty_cache(model, ids).logits[:-1].double().log_softmax(-1)
        found.append(logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(found)


def fill(cache: KVCache, dtype: torch.dtype) -> None:
    for tensor in {id(each): each for each in (*cache.keys, *cache.values)}.values():
        size = tensor.shape[-1] - (4 if dtype == torch.int8 else 0)
        for part in tensor.split(4096):
            numbers = torch.randn(*part.shape[:-1], size)
            part.copy_(quantised(numbers) if dtype == torch.int8 else numbers)


class Pass:
    """Computes one token after ``length`` others, over and over."""

    def __init__(self, model: FusedDecoder, dtype: torch.dtype, length: int) -> None:
        model.keep_cache_in(dtype)
        num_blocks = length // BLOCK_SIZE + 1
        self.runner = ModelRunner.build(model, num_blocks, BLOCK_SIZE)
        fill(self.runner.cache, dtype)
        self.table, self.length = BlockTable(), length
        self.table.block_ids = list(range(num_blocks))

    def seconds(self) -> float:
        self.table.num_computed_tokens = self.length
        started = time.perf_counter()
        self.runner.forward([Span(self.table, [17], 1)])
        return time.perf_counter() - started


def measure(arguments: argparse.Namespace) -> None:
    # Where inputs of layers are rounded to 8 bits, too, that hides what the caches do.
    exact, model = (
        load_model(str(arguments.model), LoadOptions(compact_weights=each)) for each in (False, True)
    )
    assert isinstance(exact, FusedDecoder)
    assert isinstance(model, FusedDecoder)
    set_num_threads(arguments.threads)
    texts = texts_of(
        arguments.texts, load_tokenizer(str(arguments.model)), arguments.number, arguments.length
    )
    found = {}
    for name in TYPES:
        exact.keep_cache_in(CACHE_DTYPES[name])
        found[name] = log_probs(exact, texts), exact.cache_bytes_per_token
        note(f"  {name}: {-float(found[name][0].mean()):.6f}")
    times: dict[tuple[str, int], list[float]] = {}
    watch = CpuWatch([])
    for length in arguments.after:
        passes = {name: Pass(model, CACHE_DTYPES[name], length) for name in TYPES}
        for repeat in range(arguments.repeats + 1):
            for name, one in passes.items():
                seconds = one.seconds()
                if repeat:  # the first one warms up
                    times.setdefault((name, length), []).append(seconds)
        note(f"  after {length} tokens: measured")
    figures = list(figures_of(found, times, arguments.after))
    what = (
        f"Types of the cache: {len(texts)} texts of {arguments.length} tokens, and passes over one token, "
        f"{arguments.threads} thread{'s' * (arguments.threads > 1)}"
    )
    print_table(table_of(figures, "cache"), what)
    record(
        arguments.result,
        what=what,
        rows="cache",
        model=arguments.model.stem,
        dtype="float32",
        num_repeats=arguments.repeats,
        machine=machine() | {"others": warn_of_others(watch)},
        figures=figures,
    )


def figures_of(
    found: dict[str, tuple[torch.Tensor, int]],
    times: dict[tuple[str, int], list[float]],
    after: Sequence[int],
) -> Iterator[Figure]:
    for name, (each, num_bytes) in found.items():
        yield Figure.of(name, "bytes a token", [num_bytes])
        yield Figure.of(name, "perplexity", [math.exp(-float(each.mean()))])
        away = (each - found[REFERENCE][0]).abs()
        yield Figure.of(
            name, "log-probabilities away from float32's, thousandths", [1e3 * float(away.mean())]
        )
        for length in after:
            yield Figure.of_ratios(
                name, f"a token after {length:,}, time to float16's", times[name, length], times[BASE, length]
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--number", type=int, default=6, help="texts that are read")
    parser.add_argument("--length", type=int, default=1000, help="tokens of each")
    parser.add_argument("--after", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
