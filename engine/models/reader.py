"""Reads a checkpoint once, layer by layer, and has transformers compute with it on the way.

Loading and checking are one thing here: ``read`` runs transformers' own forward of some short texts over a
module without weights. Before one of its layers computes, a hook fills it from the checkpoint; after that,
another makes our layer of the same tensors, and empties it. So each tensor is read once, no more than one
layer is in memory twice, and in the end there are our weights and the logits that they must give.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from truedraft.engine.checkpoints.checkpoint import HEAD, Checkpoint
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.checkpoints.quantise import can_be_in_four_bits, quantised_to_four_bits
from truedraft.engine.checkpoints.stacks import Matrix, Quantised, stored_in, stored_tensors
from truedraft.engine.families.ends import (
    embedding_scale,
    embeddings_of,
    last_norm,
    logit_multiplier,
    logit_softcap,
    make_last_norm,
    make_rotary,
    rotary_module,
    rotary_name,
    table_scale,
)
from truedraft.engine.families.fit import correct_layer
from truedraft.engine.families.gemma4 import (
    PROJECTION,
    PROJECTION_NORM,
    TABLE,
    has_layer_inputs,
    layer_inputs,
    layer_table_scale,
)
from truedraft.engine.families.head_order import MODULE, to_grouped
from truedraft.engine.families.layer import decoder_layer
from truedraft.engine.families.linear import Source, Whole, join, places_of
from truedraft.engine.layers.adapters import Place
from truedraft.engine.layers.decoder import DecoderLayer, DecoderWeights, LayerInputs, MakeOutput
from truedraft.engine.layers.linear import Embeddings, Linear, Linears
from truedraft.engine.layers.rotary import NoAngles
from truedraft.engine.layers.sharding import PendingLinears, Sharding
from truedraft.engine.layers.weight import Weight
from truedraft.engine.machine.heap import trim_heap
from truedraft.engine.models.probe_texts import ProbeText, probe_texts
from truedraft.engine.parallel.group import Group

# The output layer is converted this many rows at a time.
HEAD_ROWS = 1 << 13
HALVES = (torch.float16, torch.bfloat16)

# transformers warns that its layers with states lack fast kernels; they compute only some short texts here.
logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


class Reader:
    """Reads a model. ``skeleton`` is transformers' module on the meta device; ``checkpoint`` has all of its
    tensors; ``linears`` makes our layers, or a rank's share of them if there is a ``group``."""

    def __init__(
        self,
        skeleton: Any,
        checkpoint: Checkpoint,
        facts: ModelFacts,
        linears: Linears,
        group: Group | None = None,
    ) -> None:
        self.skeleton = skeleton
        self.checkpoint = checkpoint
        self.facts = facts
        self.linears = linears
        self.group = group
        self.layers: list[DecoderLayer] = []
        self.places: dict[str, list[Place]] = {}

    @torch.inference_mode()
    def read(self) -> tuple[DecoderWeights, list[torch.Tensor]]:
        """Returns the weights, and the probe texts' logits as ``packed_logits`` gives them."""
        module, facts = self.skeleton, self.facts
        stored = self._weight(embeddings_of(module)[0])
        embeddings = self.linears.embeddings(stored)
        rotary = self._rotary_module()
        norm_name, norm = last_norm(module)
        self._fill(norm, norm_name)
        texts = [text for group in probe_texts(facts) for text in group]
        inputs = self._layer_inputs() if has_layer_inputs(module) else None
        states = self._compute_while_reading(texts, embeddings, rotary, inputs)
        head = stored if module.config.tie_word_embeddings else self._weight(HEAD)
        logits = self._logits(torch.cat(states), head)
        multiplier = logit_multiplier(module.config)
        rows, columns = head.shape
        if self.group is None:
            output = self.linears.make([head], None, multiplier)
            place = Place(output, 0, columns, rows, None, multiplier)
            self.places[HEAD.removesuffix(".weight")] = [place]
        else:
            whole = PendingLinears(self.linears).make([head], None, multiplier)
            output = Sharding(self.group, self.linears).output(whole)
        weights = DecoderWeights(
            embeddings,
            self.layers,
            make_last_norm(module.config, norm),
            output,
            make_rotary(rotary, module.config, torch.empty(0, dtype=facts.dtype, device=facts.device)),
            embedding_scale(module, facts.dtype),
            logit_softcap(module.config),
            make_output=self._make_output(head.name, head.shape),
            layer_inputs=inputs,
            places=self.places,
            group=self.group,
        )
        trim_heap()
        return weights, [*torch.split(logits.float(), [*map(len, states)])]

    def _compute_while_reading(
        self, texts: list[ProbeText], embeddings: Embeddings, rotary: nn.Module, inputs: LayerInputs | None
    ) -> list[torch.Tensor]:
        """Runs transformers' layers, whose hooks read the checkpoint's. Returns the last hidden states of
        each text that are compared."""
        decoder, facts = self.skeleton.model, self.facts
        ids = pad_sequence([torch.tensor(text.token_ids) for text in texts], batch_first=True)
        # A shorter text is filled up with tokens at its last position.
        positions = [text.positions(facts.device) for text in texts]
        positions = [F.pad(each, (0, ids.shape[1] - len(each)), value=int(each[-1])) for each in positions]
        embedded = embeddings.look_up(ids.flatten().to(facts.device)).to(facts.dtype)
        embedded = embedded * table_scale(self.skeleton, facts.dtype)
        if getattr(decoder, name := rotary_name(self.skeleton.config), None) is not None:
            setattr(decoder, name, _EachAlone(rotary))
        hooks = [hook for index, layer in enumerate(decoder.layers) for hook in self._follow(layer, index)]
        given = {}
        if inputs is not None:
            rows = inputs.embeddings.look_up(ids.flatten().to(facts.device)).to(facts.dtype)
            rows = rows * layer_table_scale(self.skeleton, facts.dtype)
            given["per_layer_inputs"] = rows.view(*ids.shape, len(decoder.layers), -1)
        states = decoder(
            **given,
            inputs_embeds=embedded.view(*ids.shape, -1),
            position_ids=torch.stack(positions),
            use_cache=False,
        ).last_hidden_state
        for hook in hooks:
            hook.remove()
        return [text.compared(rows) for text, rows in zip(texts, states, strict=True)]

    def _layer_inputs(self) -> LayerInputs:
        """Reads the table that gives each layer further inputs of a token."""
        weights: dict[tuple[Any, str], Any] = {}
        for name in (PROJECTION, PROJECTION_NORM):
            weights |= self._fill(getattr(self.skeleton.model, name), f"model.{name}")
        make = partial(join, linears=self.linears, weights_of=lambda source: [weights[source, "weight"]])
        table = self.linears.embeddings(self._weight(TABLE))
        return layer_inputs(self.skeleton, table, make, self.facts.dtype)

    def _rotary_module(self) -> nn.Module:
        """Makes transformers' module anew: on the meta device the skeleton's has no angles."""
        found = rotary_module(self.skeleton)
        if isinstance(found, NoAngles):
            return found
        rotary: Any = type(found)(config=self.skeleton.config).to(self.facts.device)
        if (factors := self.checkpoint.rotary_factors()) is not None:
            rotary.inv_freq /= factors.to(self.facts.device)
        made: nn.Module = rotary
        return made

    def _logits(self, states: torch.Tensor, head: Weight) -> torch.Tensor:
        """Multiplies by some rows of the output layer at a time: a large vocabulary's rows are never
        dequantised together."""
        parts = [F.linear(states, rows.to(states.dtype)) for rows in self._rows(head)]
        logits = torch.cat(parts, dim=-1) * logit_multiplier(self.skeleton.config)
        softcap = logit_softcap(self.skeleton.config)
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def _rows(self, head: Weight) -> Iterator[torch.Tensor]:
        if head.blocks is None:
            yield from torch.split(head.dense(), HEAD_ROWS)
            return
        by_id = self.linears.embeddings(head)
        for ids in torch.split(torch.arange(head.shape[0]), HEAD_ROWS):
            yield by_id.look_up(ids)

    def _follow(self, layer: nn.Module, index: int) -> tuple[Any, Any]:
        """Adds the two hooks of a layer."""
        weights: dict[tuple[nn.Module, str], Weight | _Stack] = {}

        def weights_of(source: Whole) -> list[Weight]:
            if isinstance(source, nn.Module):
                source = Matrix(source)
            found = weights[source.module, source.name]
            if isinstance(found, Weight):
                return [found]
            assert source.number is not None
            return source.weights(found.read, found.parts(source.number))

        def before(*_: Any) -> None:
            weights.update(self._fill(layer, f"model.layers.{index}"))
            correct_layer(layer, self.facts)

        def after(*_: Any) -> None:
            names = {module: f"model.layers.{index}.{name}" for name, module in layer.named_modules()}

            def make(sources: Sequence[Source], multiplier: float) -> Linear:
                if self.group is not None:
                    return join(sources, multiplier, PendingLinears(self.linears), weights_of)
                linear = join(sources, multiplier, self.linears, weights_of)
                for name, place in places_of(sources, multiplier, linear, names):
                    # Heads that are tiled are not in the order that adapters know.
                    if not (self.checkpoint.is_tiled and MODULE in name):
                        self.places.setdefault(name, []).append(place)
                return linear

            first = sum(len(each.mixers) for each in self.layers)
            described = decoder_layer(layer, first, self.facts, make, self.checkpoint.is_tiled)
            if self.group is not None:
                described = Sharding(self.group, self.linears).layer(described)
            self.layers.append(described)
            weights.clear()
            layer.to("meta")
            trim_heap()

        return layer.register_forward_pre_hook(before), layer.register_forward_hook(after)

    def _fill(self, module: nn.Module, prefix: str) -> dict[tuple[nn.Module, str], "Weight | _Stack"]:
        """Gives a module its tensors, and returns the weights of its linear layers and experts."""
        found: dict[tuple[nn.Module, str], Weight | _Stack] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in stored_tensors(module).items():
            path, _, own = name.rpartition(".")
            full = f"{prefix}.{name}"
            if tensor.dim() == 2:
                found[module.get_submodule(path), own] = weight = self._weight(full)
                tensors[name] = self._of_module(full, weight.dense(self.facts.dtype))
            elif tensor.dim() == 3:
                found[module.get_submodule(path), own] = stack = self._stack(full)
                tensors[name] = self._of_module(full, stack.read().to(self.facts.dtype))
            else:
                kept = self._tensor(full).to(stored_in(name, self.facts.dtype))
                tensors[name] = self._of_module(full, kept)
        module.load_state_dict(tensors, strict=False, assign=True)
        return found

    def _of_module(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Orders a tensor as it is in transformers' module."""
        return to_grouped(self.skeleton.config, name, tensor) if self.checkpoint.is_tiled else tensor

    def _stack(self, name: str) -> "_Stack":
        def parts(number: int) -> Sequence[Quantised]:
            blocks = self.checkpoint.expert_blocks(name, number) if self.linears.takes_blocks else []
            if blocks or not self.linears.takes_scaled_bytes:
                return blocks
            return self.checkpoint.expert_bytes(name, number)

        return _Stack(cache(partial(self._tensor, name)), parts)

    def _weight(self, name: str) -> Weight:
        rows, columns = self.skeleton.get_parameter(name).shape
        return read_weight(self.checkpoint, name, (rows, columns), self.linears, self.facts)

    def _make_output(self, name: str, shape: tuple[int, int]) -> MakeOutput:
        """Makes the output layer again without keeping anything of the layers that are read here."""
        checkpoint, facts, linears = self.checkpoint, self.facts, self.linears
        multiplier = logit_multiplier(facts.config)

        def make(rows: npt.NDArray[np.int64] | None, in_four_bits: bool) -> Linear | None:
            weight = read_weight(checkpoint, name, shape, linears, facts, rows)
            has_kernels = linears.takes_blocks and facts.device.type == "cpu"
            if in_four_bits and not (has_kernels and can_be_in_four_bits(weight)):
                return None
            made = quantised_to_four_bits(weight) if in_four_bits else weight
            return linears.make([made], None, multiplier)

        return make

    def _tensor(self, name: str) -> torch.Tensor:
        return read_tensor(self.checkpoint, name, self.linears, self.facts)


def read_weight(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, int],
    linears: Linears,
    facts: ModelFacts,
    rows: npt.NDArray[np.int64] | None = None,
) -> Weight:
    """Returns a matrix for ``linears``, or some ``rows`` of it in any order. It is read when it is first
    used, and kept as long as the weight is."""
    blocks = checkpoint.blocks(name) if linears.takes_blocks else None
    scaled_rows = checkpoint.scaled_rows(name) if linears.takes_scaled_rows else None
    scaled_bytes = checkpoint.scaled_bytes(name) if linears.takes_scaled_bytes else None
    read = cache(partial(read_tensor, checkpoint, name, linears, facts, rows))
    weight = Weight(name, shape, read, blocks, scaled_rows, scaled_bytes)
    if rows is not None:
        return replace(weight.take(rows), stored=read)
    if not linears.takes_blocks:
        return weight
    return replace(weight, head_blocks=partial(checkpoint.head_blocks, name))


def read_tensor(
    checkpoint: Checkpoint,
    name: str,
    linears: Linears,
    facts: ModelFacts,
    rows: npt.NDArray[np.int64] | None = None,
) -> torch.Tensor:
    """Returns a copy, on the device, of all ``rows`` or some: in the checkpoint's 16 bits if ``linears`` take
    them."""
    tensor = checkpoint.read([name])[name]
    if rows is not None:
        tensor = tensor[torch.from_numpy(rows)]
    is_kept = linears.takes_halves and tensor.dtype in HALVES
    dtype = tensor.dtype if is_kept else stored_in(name, facts.dtype)
    return tensor.to(facts.device, dtype, copy=rows is None)


class _Stack(NamedTuple):
    """Holds experts' matrices: ``read`` returns all together, ``parts`` the quantised ones of each."""

    read: Callable[[], torch.Tensor]
    parts: Callable[[int], Sequence[Quantised]]


class _EachAlone(nn.Module):
    """Computes the angles of each text as if it were alone."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self.layer_types = getattr(rotary, "layer_types", ())

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        kind = () if layer_type is None else (layer_type,)
        # Positions of a text are the same in all three dimensions that images need.
        rows = position_ids if position_ids.dim() == 2 else position_ids[0]
        found = [self.rotary(x, row[None], *kind) for row in rows]
        if isinstance(found[0], torch.Tensor):
            return torch.cat(found)  # These angles are complex numbers.
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
