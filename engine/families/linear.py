"""Uses the linear layers of transformers' modules: joined, replaced by faster ones, or as they are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from truedraft.engine.checkpoints.stacks import Matrix
from truedraft.engine.layers import linear as torch_linear
from truedraft.engine.layers.adapters import Place
from truedraft.engine.layers.linear import Linear, Linears, TorchLinears, is_packed
from truedraft.engine.layers.weight import Weight


@dataclass(frozen=True, slots=True)
class Rows:
    """Selects outputs of transformers' linear layer by their numbers, in any order."""

    module: nn.Linear
    numbers: npt.NDArray[np.int64]

    def take(self, weight: Weight) -> Weight:
        return weight.take(self.numbers)


@dataclass(frozen=True, slots=True)
class HeadRows(Rows):
    """Selects the outputs of one head. ``is_turned`` transposes: these outputs become the inputs of our
    layer, and the inputs its outputs."""

    head: int
    is_turned: bool

    def take(self, weight: Weight) -> Weight:
        return weight.of_head(self.head, self.numbers, self.is_turned)


# These objects have the weights of a linear layer in transformers.
Whole: TypeAlias = nn.Module | Matrix
Source: TypeAlias = Whole | Rows
# A function of this type joins linear layers of the same input, and multiplies their outputs.
Make: TypeAlias = Callable[[Sequence[Source], float], Linear]

# Below this many weights a module's own overhead outweighs what packing saves.
MIN_NATIVE_WEIGHTS = 1 << 12


class ModuleLinear:
    """Keeps transformers' modules that know best how to use their weights, such as quantised ones. Their
    outputs, or some rows of them, lie one after the other."""

    def __init__(self, sources: Sequence["Source"], multiplier: float = 1.0) -> None:
        self.modules: list[nn.Module] = []
        self.rows: list[torch.Tensor | None] = []
        for source in sources:
            # Loading does not choose this class for families with such layers.
            assert not isinstance(source, HeadRows | Matrix)
            self.modules.append(source.module if isinstance(source, Rows) else source)
            self.rows.append(torch.from_numpy(source.numbers) if isinstance(source, Rows) else None)
        self.multiplier = multiplier

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [
            module(x) if rows is None else module(x)[..., rows.to(x.device)]
            for module, rows in zip(self.modules, self.rows, strict=True)
        ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return joined if self.multiplier == 1 else joined * self.multiplier

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual + self(x)


class LinearModule(nn.Module):
    """Stands in for a module of transformers' without keeping the original weight."""

    weight: None = None  # T5 looks at the type of its weight.

    def __init__(self, module: nn.Module, linears: Linears) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_of(module).shape
        self.linear = join([module], 1.0, linears)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.linear(x.reshape(-1, self.in_features))
        return rows.view(*x.shape[:-1], self.out_features)


def weight_of(module: nn.Module) -> Weight:
    """Returns the weight that a module has."""
    assert isinstance(module.weight, torch.Tensor)
    weight = module.weight.detach()
    weight = weight.T if type(module) is Conv1D else weight
    return Weight(type(module).__name__, (weight.shape[0], weight.shape[1]), lambda: weight)


def weights_of(source: Whole) -> list[Weight]:
    """Returns the weights of a module or of a matrix elsewhere."""
    return source.weights() if isinstance(source, Matrix) else [weight_of(source)]


def join(
    sources: Sequence[Source],
    multiplier: float,
    linears: Linears,
    weights_of: Callable[[Whole], list[Weight]] = weights_of,
) -> Linear:
    """Makes one layer in place of several of the same input; their outputs lie one after the other, all
    multiplied by ``multiplier``."""
    wholes = [source.module if isinstance(source, Rows) else source for source in sources]
    if not all(type(whole) in (nn.Linear, Conv1D, Matrix) for whole in wholes):
        return ModuleLinear(sources, multiplier)
    weights: list[Weight] = []
    biases: list[torch.Tensor | int] = []
    for source, whole in zip(sources, wholes, strict=True):
        found, bias = weights_of(whole), whole.bias
        rows = source if isinstance(source, Rows) else None
        taken = found if rows is None else [rows.take(weight) for weight in found]
        weights += taken
        if isinstance(bias, torch.Tensor):
            biases.append(bias.detach() if rows is None else bias.detach()[torch.from_numpy(rows.numbers)])
        else:
            biases.append(sum(weight.shape[0] for weight in taken))
    return linears.make(weights, _joined(biases), multiplier)


def places_of(
    sources: Sequence[Source], multiplier: float, linear: Linear, names: Mapping[nn.Module, str]
) -> Iterator[tuple[str, Place]]:
    """Yields where each module of ``sources``, which were joined, has its outputs in ``linear``. Adapters are
    not applied to experts and to layers of one head each: there is nothing to yield of these."""
    begin, found = 0, list[tuple[nn.Module, int, npt.NDArray[np.int64] | None]]()
    for source in sources:
        module = source.module if isinstance(source, Rows) else source
        if isinstance(source, HeadRows) or not isinstance(module, nn.Linear | Conv1D) or module not in names:
            return
        rows = source.numbers if isinstance(source, Rows) else None
        found.append((module, begin, rows))
        begin += weight_of(module).shape[0] if rows is None else len(rows)
    for module, first, rows in found:
        outputs, inputs = weight_of(module).shape
        yield names[module], Place(linear, first, inputs, outputs, rows, multiplier)


def _joined(biases: Sequence[torch.Tensor | int]) -> torch.Tensor | None:
    """Returns one bias for all; a layer without a bias, given by its number of outputs, gets zeros."""
    like = next((bias for bias in biases if isinstance(bias, torch.Tensor)), None)
    if like is None:
        return None
    return torch.cat([like.new_zeros(bias) if isinstance(bias, int) else bias for bias in biases])


def replace_linears(model: nn.Module, linears: Linears) -> None:
    """Replaces every large linear layer below ``model``, one at a time, so that memory never doubles."""
    is_torch = isinstance(linears, TorchLinears)
    smallest = torch_linear.MIN_ONE_DNN_WEIGHTS if is_torch else MIN_NATIVE_WEIGHTS
    for name, child in list(model.named_children()):
        if type(child) in (nn.Linear, Conv1D):
            weight = weight_of(child).dense()
            if is_packed(weight) and weight.numel() >= smallest:
                setattr(model, name, LinearModule(child, linears))
        else:
            replace_linears(child, linears)
