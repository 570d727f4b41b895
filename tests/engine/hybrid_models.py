"""Tiny random decoders of every mixer there is, made without a checkpoint, and engines of them."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.engine import recurrences
from tests.models import make_engine
from truedraft.engine import build
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.cuda.triton_run import Kernels, TritonRun
from truedraft.engine.layers.decoder import (
    Attention,
    DecoderLayer,
    DecoderWeights,
    GatedMlp,
    Joint,
    Parallel,
    Recurrent,
)
from truedraft.engine.layers.linear import DenseEmbeddings, Linear, Linears, TorchLinears
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.recurrent import DeltaRule, Mamba2, Recurrence, ShortConv
from truedraft.engine.layers.rotary import Rotary
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.layers.torch_run import TorchRun
from truedraft.engine.layers.weight import Weight
from truedraft.engine.memory.kv_cache import AttentionCache
from truedraft.engine.memory.recurrent_state import RecurrentCache
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.heads.head import Head
from truedraft.engine.native.library import load_library
from truedraft.engine.native.linears import NativeLinears
from truedraft.engine.native.native_run import NativeKernels
from truedraft.engine.proposers.translated import pairing

VOCAB_SIZE, HIDDEN, CONTEXT = 24, 48, 256
HEADS, HEAD_SIZE = 2, 16
CPU = torch.device("cpu")
SIDE_BY_SIDE = "attention beside Mamba 2"
KINDS = ("delta rule", "attention", SIDE_BY_SIDE, "MLP", "short convolution")


def hybrid(
    seed: int = 1,
    noise: float = 0.0,
    kinds: tuple[str, ...] = KINDS,
    vocab_size: int = VOCAB_SIZE,
    eos_token_id: int | None = None,
    in_c: bool = False,
    kernels: Kernels | None = None,
) -> FusedDecoder:
    """Makes a decoder with a layer of each of ``kinds``; with ``noise`` on its weights it is a draft that
    agrees with the one without it often, not always. ``kernels`` are those of a GPU, or stand in for them."""
    library = load_library() if in_c else None
    make = _Weights(seed, noise, TorchLinears() if library is None else NativeLinears(library, compact=False))
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        num_attention_heads=HIDDEN // HEAD_SIZE,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    layers: list[DecoderLayer] = []
    for kind in kinds:
        layers.append(_layer(make, kind, sum(len(layer.mixers) for layer in layers)))
    facts = ModelFacts(config, None, 1, torch.float32, CPU)
    weights = DecoderWeights(
        DenseEmbeddings(make(vocab_size, HIDDEN)),
        layers,
        make.norm(HIDDEN),
        make.linear(HIDDEN, vocab_size),
        Rotary(LlamaRotaryEmbedding(config), config, torch.empty(0)),
        1.0,
        None,
    )
    if kernels is not None:
        return FusedDecoder(facts, weights, partial(TritonRun, kernels))
    return FusedDecoder(facts, weights, TorchRun if library is None else NativeKernels(library))


class _Weights:
    """Draws weights, and noise apart from them."""

    def __init__(self, seed: int, noise: float, linears: Linears) -> None:
        self.linears = linears
        self.drawn = torch.Generator().manual_seed(seed)
        self.noise = noise
        self.noises = torch.Generator().manual_seed(1000 + seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        weights = torch.randn(shape, generator=self.drawn)
        return weights + self.noise * torch.randn(shape, generator=self.noises)

    def linear(self, in_features: int, out_features: int) -> Linear:
        weight = self(out_features, in_features) * in_features**-0.5
        return self.linears.make([Weight("drawn", (out_features, in_features), lambda: weight)], None)

    def norm(self, *size: int) -> Norm:
        return Norm(1 + 0.2 * self(*size), 1e-5)


def _layer(make: _Weights, kind: str, number: int, inputs: int = HIDDEN) -> DecoderLayer:
    # Some families have layers without an MLP, or without anything else.
    if kind == "MLP":
        mlp = GatedMlp("relu2", make.linear(HIDDEN, 64), make.linear(64, HIDDEN), 1 + 0.2 * make(64))
        return DecoderLayer(None, mlp, None, make.norm(HIDDEN))
    if kind == SIDE_BY_SIDE:
        mixers = _attention(make, number, inputs), _recurrent(make, "Mamba 2", number + 1)
        return DecoderLayer(Parallel(mixers), None, make.norm(HIDDEN), None)
    mixer = _attention(make, number, inputs) if kind == "attention" else _recurrent(make, kind, number)
    mlp = GatedMlp("silu", make.linear(HIDDEN, 128), make.linear(64, HIDDEN))
    return DecoderLayer(mixer, mlp, make.norm(HIDDEN), make.norm(HIDDEN))


def _attention(make: _Weights, number: int, inputs: int) -> Attention:
    shape = AttentionShape(
        number, HEADS, 1, HEAD_SIZE, HEAD_SIZE**-0.5, None, make.norm(HEADS + 1, HEAD_SIZE), gated=True
    )
    heads = 1, HEAD_SIZE
    return Attention(
        shape,
        make.linear(inputs, (2 * HEADS + 2) * HEAD_SIZE),
        make.linear(HEADS * HEAD_SIZE, HIDDEN),
        AttentionCache(heads, heads, torch.float32, CPU),
    )


def _recurrent(make: _Weights, kind: str, number: int) -> Recurrent:
    rule = _recurrence(kind, number, int(torch.randint(1 << 30, (), generator=make.drawn)))
    channels, width = rule.convolution.weight.shape
    out = {ShortConv: channels, DeltaRule: 0, Mamba2: 0}[type(rule)]
    if not isinstance(rule, ShortConv):
        out = rule.state.heads * rule.state.columns
    inputs = rule.input_size
    return Recurrent(
        rule,
        make.linear(HIDDEN, inputs),
        make.linear(out, HIDDEN),
        RecurrentCache(channels, width, rule.state, CPU),
        1 + 0.2 * make(inputs) if isinstance(rule, Mamba2) else None,
    )


def _recurrence(kind: str, number: int, seed: int) -> Recurrence:
    """Draws it the same for a target and its draft."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        match kind:
            case "delta rule":
                return recurrences.delta_rule(2, 4, layer=number)
            case "Mamba 2":
                return recurrences.mamba2(2, 2, layer=number)
        return recurrences.short_conv(3, layer=number)


def hybrid_head(target: FusedDecoder, kind: str) -> Head:
    """Makes a head in C on what the target's last norm gives (``mtp``) or on states between its layers."""
    library = load_library()
    assert library is not None
    make = _Weights(9, 0.0, NativeLinears(library, compact=False))
    if is_mtp := kind == "mtp":
        layer, projection = _layer(make, "attention", 0), make.linear(2 * HIDDEN, HIDDEN)
    else:
        layer = replace(_layer(make, "attention", 0, inputs=2 * HIDDEN), mixer_norm=None)
        projection = None
    joint = Joint(make.norm(HIDDEN), make.norm(HIDDEN), projection=projection)
    weights = replace(target.weights, layers=[layer], joint=joint)
    facts = ModelFacts(target.config, None, 1, torch.float32, CPU)
    model = FusedDecoder(facts, weights, NativeKernels(library))
    tap = target.num_layers if is_mtp else 2
    return Head(kind, model, (tap,), None, (), None, None, norm_output=is_mtp)


def hybrid_engine(
    target: FusedDecoder, draft: FusedDecoder | Head | None = None, **config: Any
) -> EngineCore:
    """Is ``make_engine`` for models that are in memory."""
    models = {"target": target, "draft": draft}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_model", lambda path, _: models[path])
        patch.setattr(build, "load_head", lambda *_: draft if isinstance(draft, Head) else None)
        patch.setattr(build, "pair_models", lambda *_: pairing.Pairing(None, None, None))
        return make_engine("target", None if draft is None else "draft", **config)
