"""Layers with a running state by the tokens of a pass: python -m benchmarks.recurrences --threads 2

One sequence passes through as many layers as a model has, each with its own state, so that states come from
memory as in a model. Passes of some tokens are in the middle of a chunk and fold nothing (up to 16); ``fold``
is what a token costs more where states are folded, once in 16 tokens. Microseconds a layer, medians of
interleaved repeats, and the same divided by what one token costs.
"""

import argparse
from functools import partial
from typing import Any

import torch

from benchmarks.common import machine, median_seconds, note, print_facts, print_table, warn_if_busy
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.recurrent import Convolution, DeltaRule, Mamba2, Recurrence, ShortConv
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.memory.recurrent_state import CHUNK, RecurrentCache
from truedraft.engine.native.library import load_library
from truedraft.engine.native.recurrence import NativeRecurrence, NativeStates
from truedraft.engine.native.threads import set_num_threads

CPU = torch.device("cpu")


def delta_rule(key_heads: int, heads: int) -> DeltaRule:
    """Has heads of 128 x 128, as all families do."""
    channels = (2 * key_heads + heads) * 128
    return DeltaRule(
        layer=0,
        convolution=Convolution(torch.randn(channels, 4), silu=True),
        key_heads=key_heads,
        heads=heads,
        key_size=128,
        value_size=128,
        decay_rate=-torch.rand(heads),
        dt_bias=torch.randn(heads),
        norm=Norm(torch.ones(128), 1e-6),
    )


def mamba2(heads: int) -> Mamba2:
    inner = heads * 64
    return Mamba2(
        layer=0,
        convolution=Convolution(torch.randn(inner + 256, 4), torch.randn(inner + 256), silu=True),
        heads=heads,
        head_size=64,
        groups=1,
        state_size=128,
        decay_rate=-torch.rand(heads),
        skip=torch.randn(heads),
        dt_bias=torch.randn(heads),
        dt_limits=(0.0, float("inf")),
        norm=Norm(torch.ones(inner), 1e-5),
    )


RULES: dict[str, Recurrence] = {
    "Qwen3.5-0.8B": delta_rule(16, 16),
    "Qwen3.5-4B": delta_rule(16, 32),
    "Granite 4 H 1B": mamba2(48),
    "LFM2-1.2B": ShortConv(0, Convolution(torch.randn(2048, 3))),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 5, 9])
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    return parser.parse_args()


class Layers:
    """Are layers of one recurrence, whose states and logs are random."""

    def __init__(self, rule: Recurrence, num_layers: int) -> None:
        channels, width = rule.convolution.weight.shape
        self.cache = KVCache([RecurrentCache(channels, width, rule.state, CPU)] * num_layers, 1, 1, 1)
        for layer in self.cache.states.values():
            for tensor in layer.tensors:
                tensor.uniform_(0, 0.1)
        self.layers = [NativeRecurrence(rule, state) for state in self.cache.states.values()]
        self.library = load_library()
        if self.library is None:
            raise SystemExit("benchmarks.recurrences needs the kernels in C")
        self.num_inputs = rule.input_size

    def run(self, x: torch.Tensor, stored: int) -> None:
        """Passes tokens of which all but the first may be taken back."""
        assert self.library is not None
        table = BlockTable()
        table.state_slot, table.num_computed_tokens, table.num_folded_tokens = 0, stored, CHUNK
        states = NativeStates(self.library, [Span(table, [0] * len(x), 0, stored + 1)])
        for layer in self.layers:
            states.recur(layer, x.clone())  # it is overwritten


@torch.inference_mode()
def measure(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    layers = Layers(RULES[name], arguments.layers)
    work = {
        str(count): partial(layers.run, torch.randn(count, layers.num_inputs), CHUNK + (CHUNK - count) // 2)
        for count in arguments.tokens
    }
    work["fold"] = partial(layers.run, torch.randn(1, layers.num_inputs), 2 * CHUNK)
    seconds = median_seconds(work, arguments.repeats)
    seconds["fold"] -= seconds["1"]
    note(name)
    micros = {each: round(1e6 * taken / arguments.layers, 1) for each, taken in seconds.items()}
    ratios = {each: round(taken / seconds["1"], 2) for each, taken in seconds.items()}
    return [
        {"layers of": name, "": "microseconds", **micros},
        {"layers of": name, "": "to one token", **ratios},
    ]


def main() -> None:
    arguments = parse_arguments()
    arguments.tokens = sorted({1, *arguments.tokens})
    busy = warn_if_busy()
    set_num_threads(arguments.threads)
    rows = [row for name in RULES for row in measure(name, arguments)]
    print_table(rows, "tokens of a pass")
    print_facts({**machine(), "busy": busy, "threads": arguments.threads})


if __name__ == "__main__":
    main()
