"""Llama-shaped decoders: the same weights and arithmetic as transformers', a tenth of the framework.

transformers spends about half a millisecond per layer and forward outside the products: module calls,
decorators, six small operations for a norm, three products where one would do. For families whose layer is
known exactly (``FAMILIES``) this module runs the layers itself: query, key and value as one linear layer,
gate and up as another, residuals added inside them, and in between as few calls as possible
(``layer_parts``; in C where there is a compiler, ``engine.native``).

A checkpoint is read once, by the names of its tensors. While its layers pass by, transformers' own layers
compute a short text with them, one after the other; the loaded model's logits must be theirs.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from truedraft.engine.cuda.triton_run import TritonRun, find_kernels
from truedraft.engine.layers.parts import (
    ACTIVATIONS,
    Activation,
    AttentionShape,
    LayerRun,
    Norm,
    Rotary,
    TorchRun,
    rotary_kinds,
)
from truedraft.engine.memory.batch import ForwardBatch
from truedraft.engine.memory.huge_pages import trim_heap
from truedraft.engine.memory.kv_cache import KVCache, LayerShape
from truedraft.engine.models.base import FastPass, ForwardOutput, Model, ModelFacts
from truedraft.engine.models.checkpoint import EMBEDDINGS, HEAD, Checkpoint
from truedraft.engine.models.linear import Linear, ModuleLinear, make_linear
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.probe_texts import packed_logits, probe_texts
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.library import load_library
from truedraft.engine.native.linear import NativeLinear
from truedraft.engine.native.native_run import NativeKernels, serves
from truedraft.engine.native.quantised import Blocks, QuantisedEmbeddings, QuantisedLinear

# Model types with exactly this layer: rotary halves, RMSNorm before both branches (and behind them in Gemma 2
# and 3), gated MLP.
FAMILIES = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "seed_oss")
# Families whose configs name an activation and a cap of logits by words that say nothing in other configs.
CAPPED = ("gemma2", "gemma3_text")
# Largest deviation of a logit, as a share of the largest logit. Tiny random models round to 2e-6, 5e-3 and
# 4e-2 of it; a wrong mask or position makes 0.3 and more.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.15}
# Largest deviation of quantised layers' logits, in the mean of a text's tokens, as a share of their spread.
# Rounding inputs to 8 bits makes 0.05 of it in a real model, a wrong mask or position 0.5 and more.
QUANTISED_TOLERANCE = 0.25
# Rows of the output layer that are converted at a time.
HEAD_ROWS = 1 << 13

logger = logging.getLogger(__name__)

Make = Callable[[Sequence[nn.Module]], Linear]


def is_llama(module: Any) -> bool:
    """Whether ``module``, with or without weights, is of a family that ``FusedDecoder`` computes."""
    config = module.config
    return (
        config.model_type in FAMILIES
        and type(module).__module__.startswith("transformers.models.")
        and _activation(config) in ACTIVATIONS
        and not getattr(config, "use_bidirectional_attention", None)
    )


def _activation(config: Any) -> Activation:
    name: Activation = config.hidden_activation if config.model_type in CAPPED else config.hidden_act
    return name


class DecoderLayer:
    def __init__(self, layer: Any, index: int, make: Make) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention = _attention_shape(attention, index)
        self.input_norm = Norm.of(layer.input_layernorm)
        self.qkv = make(_joined(attention, "qkv_proj", "q_proj", "k_proj", "v_proj"))
        self.output = make([attention.o_proj])
        self.gate_up = make(_joined(mlp, "gate_up_proj", "gate_proj", "up_proj"))
        self.activation = _activation(attention.config)
        self.down = make([mlp.down_proj])
        # Gemma 2 and 3 norm what they add to the residual.
        self.output_norm = self.down_norm = None
        if hasattr(layer, "pre_feedforward_layernorm"):
            self.output_norm = Norm.of(layer.post_attention_layernorm)
            self.mlp_norm = Norm.of(layer.pre_feedforward_layernorm)
            self.down_norm = Norm.of(layer.post_feedforward_layernorm)
        else:
            self.mlp_norm = Norm.of(layer.post_attention_layernorm)

    def __call__(self, hidden: torch.Tensor, parts: LayerRun) -> torch.Tensor:
        """``hidden`` [tokens, hidden size]."""
        qkv = self.qkv(parts.norm(self.input_norm, hidden))
        hidden = _add(hidden, self.output, self.output_norm, parts.attend(self.attention, qkv), parts)
        gate_up = self.gate_up(parts.norm(self.mlp_norm, hidden))
        return _add(hidden, self.down, self.down_norm, parts.gate(self.activation, gate_up), parts)


def _add(
    hidden: torch.Tensor, linear: Linear, norm: Norm | None, x: torch.Tensor, parts: LayerRun
) -> torch.Tensor:
    return linear.add_to(hidden, x) if norm is None else parts.norm(norm, linear(x), hidden)


@dataclass(frozen=True)
class DecoderWeights:
    """``embeddings`` [vocab, hidden size], in the checkpoint's type where its 16 bits are kept; ``softcap``
    of the logits, as in ``AttentionCall``."""

    embeddings: torch.Tensor | QuantisedEmbeddings
    layers: list[DecoderLayer]
    norm: Norm
    head: Linear
    rotary: Rotary
    embedding_scale: float
    softcap: float | None

    @property
    def is_quantised(self) -> bool:
        linears = (self.head, *(layer.down for layer in self.layers))
        return any(isinstance(linear, QuantisedLinear) for linear in linears)

    def embed(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[tokens, hidden size]."""
        return _embed(self.embeddings, token_ids, self.embedding_scale, dtype)


def _embed(
    embeddings: torch.Tensor | QuantisedEmbeddings, token_ids: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    if isinstance(embeddings, QuantisedEmbeddings):
        rows = embeddings.look_up(token_ids)
    else:
        rows = F.embedding(token_ids, embeddings)
    return rows.to(dtype) if scale == 1 else rows.to(dtype) * scale


class FusedDecoder(Model):
    """``parts`` run what lies between the linear layers: torch's operations, kernels in C or Triton."""

    has_taps = True

    def __init__(
        self,
        facts: ModelFacts,
        weights: DecoderWeights,
        parts: Callable[[ForwardBatch, KVCache, Rotary], LayerRun] = TorchRun,
    ) -> None:
        shapes = [layer.attention for layer in weights.layers]
        heads = [(shape.num_kv_heads, shape.head_size) for shape in shapes]
        super().__init__(facts, [LayerShape(each, each, facts.device) for each in heads])
        self.weights = weights
        self.rotary = weights.rotary
        self.parts = parts
        self.is_native = isinstance(parts, NativeKernels)
        self.is_quantised = weights.is_quantised
        where = "C" if self.is_native else "torch" if parts is TorchRun else "Triton"
        self.way = f"fused layers in {where}"

    @property
    def reads_in_place(self) -> bool:
        """Whether attention asks a batch for ``short_rows`` instead of gathering the keys of ``groups``."""
        return not self.is_native and self.parts is not TorchRun

    def compute(self, batch: ForwardBatch, cache: KVCache, taps: Sequence[int] = ()) -> ForwardOutput:
        """No Python decision here or below depends on the values of the batch's tensors."""
        weights = self.weights
        parts = self.parts(batch, cache, self.rotary)
        hidden = weights.embed(batch.token_ids[0], self.dtype)
        tapped = {}
        for index, layer in enumerate(weights.layers):
            hidden = layer(hidden, parts)
            if index in taps:
                tapped[index] = hidden.clone()  # layers may add to it in place
        # All tokens' logits are in order, but for a captured batch, which has no spans.
        if not batch.spans or len(batch.logits_index) != len(hidden):
            hidden = hidden.index_select(0, batch.logits_index)
        logits = weights.head(parts.norm(weights.norm, hidden))
        if weights.softcap is not None:
            logits = parts.cap(logits, weights.softcap)
        return ForwardOutput(logits.float(), torch.stack([tapped[tap] for tap in taps], 1) if taps else None)

    def fast_pass(self, cache: KVCache) -> FastPass | None:
        """Passes over a few tokens as one call of C; None without the kernels, or angles in a table."""
        weights = self.weights
        linears = [weights.head]
        for layer in weights.layers:
            linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
        if not isinstance(self.parts, NativeKernels) or self.rotary.table is None:
            return None
        if not all(isinstance(linear, NativeLinear) for linear in linears):
            return None
        return NativeDecoder(self.parts, weights, cache)


def load_llama(
    skeleton: Any, checkpoint: Checkpoint, facts: ModelFacts, options: LoadOptions
) -> FusedDecoder | None:
    """``skeleton`` is transformers' module on the meta device, all of whose tensors ``checkpoint`` has. None
    if the logits are not those of transformers' layers, or only the kernels could round and cannot be had."""
    kernels = _kernels(skeleton, facts) if options.native_kernels else None
    ways = (kernels, None) if kernels is not None else (None,)
    for library in ways[:-1] if facts.bf16_linears else ways:
        reader = _Reader(skeleton, checkpoint, facts, library, options.compact_weights)
        weights, expected = reader.read()
        if not all(logits.isfinite().all() for logits in expected):
            return None  # transformers' own module fails with words for it
        if (model := checked(facts, weights, library, expected)) is not None:
            return model
    return None


def take_llama(
    module: Any, facts: ModelFacts, native_kernels: bool, expected: list[torch.Tensor]
) -> FusedDecoder | None:
    """A loaded ``module``, whose linear layers know best how to use their weights: it stays as it is.
    ``expected`` as in ``checked``."""
    weights = read_module(module, facts)
    kernels = _kernels(module, facts) if native_kernels else None
    ways = (kernels, None) if kernels is not None else (None,)
    models = (checked(facts, weights, library, expected) for library in ways)
    return next((model for model in models if model is not None), None)


def read_module(module: Any, facts: ModelFacts) -> DecoderWeights:
    embeddings = module.model.embed_tokens.weight.detach()
    return DecoderWeights(
        embeddings,
        [DecoderLayer(layer, index, make_linear) for index, layer in enumerate(module.model.layers)],
        Norm.of(module.model.norm),
        make_linear([module.lm_head]),
        Rotary(module.model.rotary_emb, module.config, embeddings.to(facts.dtype)),
        _embedding_scale(module, facts.dtype),
        _logit_softcap(module.config),
    )


@torch.inference_mode()
def checked(
    facts: ModelFacts, weights: DecoderWeights, library: ctypes.CDLL | None, expected: list[torch.Tensor]
) -> FusedDecoder | None:
    """The fastest model whose logits of the probe texts are the ``expected`` ones; None if none's are."""
    agrees = (
        roughly_same_logits
        if weights.is_quantised or any(isinstance(layer.down, ModuleLinear) for layer in weights.layers)
        else partial(same_logits, tolerance=TOLERANCES[torch.bfloat16 if facts.bf16_linears else facts.dtype])
    )
    ways: list[tuple[str, FusedDecoder]] = []
    if library is not None:
        kernels = NativeKernels(library)
        ways = [("The native kernels", FusedDecoder(facts, weights, kernels))]
    else:
        shapes = [layer.attention for layer in weights.layers]
        rotates_all = all(shape.head_size == weights.rotary.size for shape in shapes)
        cuda = find_kernels(shapes, facts.dtype, facts.device) if rotates_all else None
        if cuda is not None:
            ways = [("The CUDA kernels", FusedDecoder(facts, weights, partial(TritonRun, cuda)))]
        ways.append(("The short forward", FusedDecoder(facts, weights)))
    for name, model in ways:
        if all(map(agrees, packed_logits(model, probe_texts(facts)), expected)):
            return model
        logger.warning("%s: the logits differ from those of transformers' layers; it is not used", name)
    return None


def same_logits(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    """Equal but for rounding; the logits themselves are float32."""
    scale = theirs.abs().max().clamp(min=1e-6)
    return bool(((ours - theirs).abs().max() <= tolerance * scale).item())


def roughly_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compares logits where our kernels or another quantiser's layers round inputs to 8 bits: sums in another
    order may be rounded to other numbers, which at times changes a token's logits altogether."""
    deviations = (ours - theirs).square().mean(-1).sqrt() / theirs.std()
    return bool((deviations.clamp(max=1).mean() <= QUANTISED_TOLERANCE).item())


class _Reader:
    """Reads a checkpoint layer by layer: transformers' layer computes with it, then ``make`` packs it, and
    its tensors are gone before the next one's come. ``compact_weights`` as in ``make_linear``."""

    def __init__(
        self,
        skeleton: Any,
        checkpoint: Checkpoint,
        facts: ModelFacts,
        library: ctypes.CDLL | None,
        compact_weights: bool,
    ) -> None:
        self.skeleton = skeleton
        self.checkpoint = checkpoint
        self.facts = facts
        self.make = partial(
            make_linear, library=library, compact_weights=compact_weights, bf16_linears=facts.bf16_linears
        )
        # The kernels take 16 bits and quantised blocks as they are.
        self.library = library if compact_weights else None
        self.keep_type = self.library is not None or facts.bf16_linears
        self.layers: list[DecoderLayer] = []

    @torch.inference_mode()
    def read(self) -> tuple[DecoderWeights, list[torch.Tensor]]:
        """The weights, and the probe texts' logits as ``packed_logits`` gives them."""
        module, facts = self.skeleton, self.facts
        embeddings, blocks = self._embeddings()
        like = torch.empty(0, dtype=facts.dtype, device=facts.device)
        # On the meta device the skeleton's has no angles.
        rotary = type(module.model.rotary_emb)(config=module.config).to(facts.device)
        if (factors := self.checkpoint.rotary_factors()) is not None:
            rotary.inv_freq /= factors.to(facts.device)
        module.model.rotary_emb = _EachAlone(rotary)
        hooks = [self._follow(layer, index) for index, layer in enumerate(module.model.layers)]
        self._fill(module.model.norm, "model.norm")
        texts = [text for group in probe_texts(facts) for text in group]
        ids = pad_sequence([torch.tensor(text.token_ids) for text in texts], batch_first=True)
        # What fills up a shorter text stays at its last position.
        positions = [text.positions(facts.device) for text in texts]
        positions = [F.pad(each, (0, ids.shape[1] - len(each)), value=int(each[-1])) for each in positions]
        scale = _embedding_scale(module, facts.dtype)
        embedded = _embed(embeddings, ids.flatten().to(facts.device), scale, facts.dtype)
        hidden = module.model(
            inputs_embeds=embedded.view(*ids.shape, -1),
            position_ids=torch.stack(positions),
            use_cache=False,
        ).last_hidden_state
        module.model.rotary_emb = rotary
        for hook in (hook for pair in hooks for hook in pair):
            hook.remove()
        head = module.lm_head
        if not module.config.tie_word_embeddings:
            blocks = self._blocks(HEAD)
        if blocks is not None:
            head.blocks = blocks
        elif isinstance(embeddings, torch.Tensor) and module.config.tie_word_embeddings:
            head.weight = _frozen(embeddings)
        else:
            head.weight = _frozen(self._tensor(HEAD, self.keep_type))
        hidden = [text.compared(states) for text, states in zip(texts, hidden, strict=True)]
        parts = [F.linear(torch.cat(hidden), part.to(facts.dtype)) for part in self._parts(head)]
        logits = torch.cat(parts, dim=-1)
        if (softcap := _logit_softcap(module.config)) is not None:
            logits = torch.tanh(logits / softcap) * softcap
        weights = DecoderWeights(
            embeddings,
            self.layers,
            Norm.of(module.model.norm),
            self.make([head]),
            Rotary(rotary, module.config, like),
            scale,
            softcap,
        )
        trim_heap()
        return weights, [*torch.split(logits.float(), [*map(len, hidden)])]

    def _embeddings(self) -> tuple[torch.Tensor | QuantisedEmbeddings, Blocks | None]:
        blocks = self._blocks(EMBEDDINGS)
        if self.library is None or blocks is None:
            embeddings = self._tensor(EMBEDDINGS, self.keep_type)
            return embeddings.bfloat16() if self.facts.bf16_linears else embeddings, None
        return QuantisedEmbeddings(self.library, blocks), blocks

    def _parts(self, head: Any) -> Iterator[torch.Tensor]:
        """The output layer's rows, some at a time: a large vocabulary's are never dequantised together."""
        if self.library is None or not hasattr(head, "blocks"):
            yield from torch.split(head.weight, HEAD_ROWS)
            return
        numbers = np.arange(len(head.blocks.rows))
        for start in range(0, len(numbers), HEAD_ROWS):
            yield head.blocks.dequantise(self.library, numbers[start : start + HEAD_ROWS])

    def _follow(self, layer: nn.Module, index: int) -> tuple[Any, Any]:
        def before(*_: Any) -> None:
            self._fill(layer, f"model.layers.{index}")

        def after(*_: Any) -> None:
            if self.keep_type:
                self._restore(layer, f"model.layers.{index}")
            self.layers.append(DecoderLayer(layer, index, self.make))
            layer.to("meta")
            trim_heap()

        return layer.register_forward_pre_hook(before), layer.register_forward_hook(after)

    def _fill(self, module: nn.Module, prefix: str) -> None:
        names = [name for name, _ in module.named_parameters()]
        tensors = {name: self._tensor(f"{prefix}.{name}") for name in names}
        module.load_state_dict(tensors, strict=False, assign=True)

    def _restore(self, module: nn.Module, prefix: str) -> None:
        """Linear layers are packed straight from the checkpoint's 16 bits."""
        for name, child in module.named_modules():
            if isinstance(child, nn.Linear):
                self._keep_blocks(child, f"{prefix}.{name}.weight")
                if not hasattr(child, "blocks"):
                    child.weight = _frozen(self._tensor(f"{prefix}.{name}.weight", keep_type=True))

    def _keep_blocks(self, module: Any, name: str) -> None:
        """For ``make``, where the checkpoint's weights are quantised."""
        if (blocks := self._blocks(name)) is not None:
            module.blocks = blocks

    def _blocks(self, name: str) -> Blocks | None:
        return None if self.library is None else self.checkpoint.blocks(name)

    def _tensor(self, name: str, keep_type: bool = False) -> torch.Tensor:
        """A copy, on the device; ``keep_type``: in the checkpoint's 16 bits, if it has no more."""
        tensor = self.checkpoint.read([name])[name]
        is_kept = keep_type and tensor.dtype in (torch.float16, torch.bfloat16)
        return tensor.to(self.facts.device, tensor.dtype if is_kept else self.facts.dtype, copy=True)


class _EachAlone(nn.Module):
    """Computes the angles of each text as of a text by itself."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *kind: str) -> tuple[torch.Tensor, ...]:
        found = [self.rotary(x, row[None], *kind) for row in position_ids]
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _kernels(module: Any, facts: ModelFacts) -> ctypes.CDLL | None:
    """The native kernels, if they serve this model and can be had."""
    if not serves(facts.dtype, facts.device, module.model.layers[0].self_attn.head_dim):
        return None
    return load_library()


def _embedding_scale(module: Any, dtype: torch.dtype) -> float:
    """Gemma's, rounded as transformers rounds it."""
    scale = getattr(module.model.embed_tokens, "scalar_embed_scale", 1.0)
    return torch.tensor(scale).to(dtype).item()


def _logit_softcap(config: Any) -> float | None:
    softcap: float | None = config.final_logit_softcapping if config.model_type in CAPPED else None
    return softcap


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _joined(module: Any, whole: str, *parts: str) -> list[nn.Module]:
    """Phi-3 stores as one layer what others have apart."""
    return [getattr(module, whole)] if hasattr(module, whole) else [getattr(module, part) for part in parts]


def _attention_shape(attention: Any, index: int) -> AttentionShape:
    size, config = attention.head_dim, attention.config
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    # Mistral and Phi-3 keep their window in the config, the others with the layer; None sees everything.
    window_home = config if config.model_type in ("mistral", "phi3") else attention
    norm = None
    if hasattr(attention, "q_norm"):
        query, key = Norm.of(attention.q_norm), Norm.of(attention.k_norm)
        weight = torch.cat([query.weight.expand(num_heads, -1), key.weight.expand(num_kv_heads, -1)])
        norm = Norm(weight, query.eps)
    kinds = rotary_kinds(config)
    return AttentionShape(
        layer=index,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=size,
        scaling=attention.scaling,
        sliding_window=getattr(window_home, "sliding_window", None),
        norm=norm,
        rotary=0 if kinds == [None] else kinds.index(attention.layer_type),
        # Gemma 3's layers keep the setting, too, but do not use it.
        softcap=attention.attn_logit_softcapping if config.model_type == "gemma2" else None,
    )
