"""Single layers for ``gpu_minutes``: a recurrence and a layer of experts, by the kernels, or by torch's
operations where there are none."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import accumulate

import torch

from truedraft.engine.cuda.blocks import pack, random_blocks
from truedraft.engine.cuda.expert_tables import _group
from truedraft.engine.cuda.grouped_experts import run_grouped
from truedraft.engine.cuda.quantised import PackedLinear
from truedraft.engine.layers.linear import Linear, TorchLinear
from truedraft.engine.layers.mlp import Experts, GatedMlp, Router
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.layers.recurrent import Convolution, DeltaRule
from truedraft.engine.layers.torch_recurrent import TorchStates
from truedraft.engine.layers.torch_run import TorchPointwise
from truedraft.engine.memory.batch import Span, state_rows
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.huge_pages import HugePages
from truedraft.engine.memory.recurrent_state import CHUNK, LayerState, RecurrentCache

Work = Callable[[], object]


def delta_layer(
    heads: tuple[int, int], size: int, rows: int, new: int, device: torch.device, dtype: torch.dtype
) -> Work:
    """Returns a pass of ``rows`` texts with ``new`` tokens each over a Gated DeltaNet, in the middle of a
    chunk."""
    key_heads, value_heads = heads
    channels = (2 * key_heads + value_heads) * size
    numbers = torch.rand(value_heads, device=device)
    convolution = Convolution(torch.randn(channels, 4, device=device), silu=True)
    norm = Norm(torch.ones(size, device=device), 1e-6)
    rule = DeltaRule(0, convolution, key_heads, value_heads, size, size, -numbers, numbers, norm)
    spec = RecurrentCache(channels, 4, rule.state, device)
    state = LayerState.zeros(spec, rows, HugePages())
    spans = []
    for slot in range(rows):
        table = BlockTable()
        table.state_slot, table.num_computed_tokens = slot, CHUNK // 2
        spans.append(Span(table, [0] * new, 0))
    x = torch.randn(rows * new, rule.input_size, device=device, dtype=dtype)
    if device.type == "cpu":
        return lambda: TorchStates(spans, {0: state}).recur(rule, x)
    recur = import_module("truedraft.engine.cuda.launch_recurrent").recur
    told = state_rows(spans, list(accumulate([new] * rows, initial=0)), device)
    return lambda: recur(rule, x, told, state)


class ExpertLayer:
    """Is a layer of experts, of weights in 16 bits or in blocks of a type (its name)."""

    def __init__(
        self,
        number: tuple[int, int],
        sizes: tuple[int, int],
        name: str | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.device, self.dtype, self.hidden = device, dtype, sizes[0]
        num_experts, num_chosen = number
        hidden, inner = sizes
        blocks = import_module("truedraft.engine.cuda.quantised_kernels") if device.type != "cpu" else None

        def linear(parts: int, outputs: int, inputs: int) -> Linear:
            if name is None or blocks is None:
                weight = torch.randn(parts * outputs, inputs, device=device, dtype=dtype) * inputs**-0.5
                return TorchLinear(weight, None)
            packed = [pack(random_blocks(TYPES[name], outputs, inputs), device) for _ in range(parts)]
            return PackedLinear(blocks, packed, None)

        router = TorchLinear(torch.randn(num_experts, hidden, device=device, dtype=dtype), None)
        one = GatedMlp("silu", linear(2, inner, hidden), linear(1, hidden, inner))
        mlps = [one if number == 0 else _copied(one) for number in range(num_experts)]
        self.experts = Experts(Router(router, num_experts, num_chosen, "softmax"), tuple(mlps))
        self.num_bytes = _num_bytes(one)
        self.grouped = None if device.type == "cpu" else _group(self.experts, dtype)

    def work(self, tokens: int) -> Work:
        x = torch.randn(tokens, self.hidden, device=self.device, dtype=self.dtype)
        run, grouped = TorchPointwise(), self.grouped
        if grouped is None:
            return lambda: self.experts.by_definition(x, run, None)
        kernels = import_module("truedraft.engine.cuda.kernels")
        return lambda: run_grouped(kernels, grouped, run, x, None)


def _copied(mlp: GatedMlp) -> GatedMlp:
    """Returns the same numbers in memory of their own: experts that share it would be read once."""

    def linear(one: Linear) -> Linear:
        if isinstance(one, PackedLinear):
            names = ("low", "high", "scales", "supers")
            parts = [replace(p, **{name: getattr(p, name).clone() for name in names}) for p in one.parts]
            return PackedLinear(one.kernels, parts, None)
        assert isinstance(one, TorchLinear)
        return TorchLinear(one.weight.clone(), None)

    return replace(mlp, gate_up=linear(mlp.gate_up), down=linear(mlp.down))


def _num_bytes(mlp: GatedMlp) -> int:
    """Returns the bytes of an expert's weights."""
    total = 0
    for linear in (mlp.gate_up, mlp.down):
        if isinstance(linear, PackedLinear):
            total += sum(part.num_bytes for part in linear.parts)
        elif isinstance(linear, TorchLinear):
            total += linear.weight.nbytes
    return total
