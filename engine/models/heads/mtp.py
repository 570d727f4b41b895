"""Loads MTP heads: the layers after a checkpoint's own that predict further tokens.

The head is one more layer of the target's kind. It is read as a model of that layer alone with a few of the
target's embeddings, so that it is compared with transformers' layer like any other model, and then gets the
target's embeddings and output layer. Its inputs are the target's states after the target's last norm, and
then its own states after its own norm: a trained head shows that acceptance is lower with states before the
norms.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from truedraft.engine.checkpoints.account import check_shape, has_all, shown
from truedraft.engine.checkpoints.checkpoint import EMBEDDINGS, HEAD, Checkpoint, RenamedCheckpoint
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.families.fit import with_stacks
from truedraft.engine.families.norms import norm_of
from truedraft.engine.families.table import FAMILIES
from truedraft.engine.formats.gguf_file import GgufError, is_gguf
from truedraft.engine.gguf.checkpoint import holds_further_layers, holds_head_alone, open_gguf_head
from truedraft.engine.layers.decoder import Joint, MakeOutput
from truedraft.engine.layers.linear import Embeddings, Linear
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.quantised_blocks import QuantisedBlocks
from truedraft.engine.layers.weight import ScaledBytes, ScaledRows, Weight
from truedraft.engine.messages import MTP
from truedraft.engine.models.architecture import plain_skeleton, read_architecture
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.fused import load_fused
from truedraft.engine.models.heads.head import Head, check_target, linears_for
from truedraft.engine.models.load_errors import stage
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.reader import read_tensor, read_weight
from truedraft.engine.models.sources import open_checkpoint, requantised

# A model of the head's layer alone has these names for its layer's tensors, and for its last norm.
LAYER, NORM = "model.layers.0.", "model.norm.weight"
# This many tokens of the vocabulary are enough to compare layers.
PROBED_TOKENS = 256
# These settings of a head's own config.json must be the target's.
OF_LAYERS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "vocab_size"),
    *("rope_parameters", "num_experts", "n_routed_experts", "num_experts_per_tok", "norm_topk_prob"),
    *("routed_scaling_factor", "n_group", "topk_group", "q_lora_rank", "kv_lora_rank"),
)
# A model of the head's layer alone gets these settings, where its config has such.
ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "mlp_layer_types": ["sparse"],
    "decoder_sparse_step": 1,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


class Parts(NamedTuple):
    """Names the tensors of a head that do not belong to a usual layer."""

    projection: str
    embedding_norm: str
    state_norm: str
    norm: str
    embeddings: str = ""
    output: str = ""

    def below(self, prefix: str) -> "Parts":
        """Returns the whole names."""
        return Parts(*(f"{prefix}{name}.weight" if name else "" for name in self))


QWEN = Parts("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
DEEPSEEK = Parts("eh_proj", "enorm", "hnorm", "shared_head.norm", "embed_tokens", "shared_head.head")
# Checkpoints of these families have heads in a layout of their own: the setting that counts them, and the
# places of the layer and the other parts. In others, and in GGUF files, the head is the layer after the last
# one.
OF_QWEN = ("mtp_num_hidden_layers", "mtp.layers.0.", QWEN.below("mtp."))
OWN_LAYOUTS = dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), OF_QWEN)


def holds_mtp_alone(path: str) -> bool:
    """Tells whether a GGUF file or a folder has a head, and no model before it."""
    if is_gguf(path):
        return holds_head_alone(path)
    names = _tensor_names(path)
    return _has_projection(names) and not any("layers.0." in name for name in names)


def has_mtp(path: str) -> bool:
    """Tells whether the checkpoint of a model has a head, too."""
    if is_gguf(path):
        return holds_further_layers(path)
    return _has_projection(_tensor_names(path))


def _has_projection(names: Iterable[str]) -> bool:
    last = f".{DEEPSEEK.projection}.weight"
    return any(name == OF_QWEN[2].projection or name.endswith(last) for name in names)


def _tensor_names(path: str) -> list[str]:
    """Returns the names of a folder's tensors, with those of a layer of Qwen's heads apart."""
    if not Path(path).is_dir():
        return []
    try:
        checkpoint = Checkpoint.find(path, allow_pickle=False)
    except (OSError, SafetensorError, ValueError):  # Loading reports the fault.
        return []
    names = [] if checkpoint is None else list(checkpoint.files)
    return [name for name in names if not name.startswith(OF_QWEN[1])]


def load_mtp(path: str, target: Model, options: LoadOptions) -> Head:
    """Loads the head of the checkpoint at ``path``, the target's own, or a GGUF file or folder of the head
    alone; raises ``ModelLoadError`` if there is none for ``target``."""
    decoder = check_target(path, target)
    options = replace(options, native_kernels=options.native_kernels and decoder.is_native)
    with stage(path, "weights"):
        return _read(open_mtp(path, decoder, options), decoder, options)


class MtpCheckpoint(NamedTuple):
    """Is an open head. ``source`` has its tensors, with the names of ``parts``. ``layer`` has the tensors of
    ``skeleton``, transformers' model of ``config``, which is the layer alone with few of the target's
    embeddings."""

    path: str
    config: Any
    source: Checkpoint
    parts: Parts
    layer: Checkpoint
    skeleton: Any


def open_mtp(path: str, target: FusedDecoder, options: LoadOptions) -> MtpCheckpoint:
    """Opens the head that ``load_mtp`` reads."""
    config = _one_layer(target)
    source, layer, parts = _open(path, target.config, config, options)
    if parts.projection not in source.files:
        raise ModelLoadError(f"{path} has no MTP head: there is no {parts.projection}")
    names = {
        f"{LAYER}{name.removeprefix(layer)}": name
        for name in source.files
        if name.startswith(layer) and name not in parts
    }
    embeddings = target.weights.embeddings.look_up(torch.arange(config.vocab_size, device=target.device))
    names |= {NORM: parts.norm} if parts.norm in source.files else {}
    skeleton = plain_skeleton(config, options.dtype)
    checkpoint = with_stacks(_Layer(source, names, embeddings), skeleton)
    if not has_all(skeleton, checkpoint):
        raise ModelLoadError(f"{path} lacks tensors of its MTP head, which is a layer like the target's")
    return MtpCheckpoint(path, config, source, parts, checkpoint, skeleton)


def layout_of(of_target: Any) -> tuple[str, str, Parts]:
    """Returns, for heads of such a target, the setting that counts them, the prefix of a head's layer in
    checkpoints, and the names of the head's other parts."""
    layer = f"model.layers.{of_target.num_hidden_layers}."
    default = ("num_nextn_predict_layers", layer, DEEPSEEK.below(layer))
    return OWN_LAYOUTS.get(of_target.model_type, default)


def _open(path: str, of_target: Any, config: Any, options: LoadOptions) -> tuple[Checkpoint, str, Parts]:
    """Returns a checkpoint with the head, the prefix of its layer's names, and its other parts' names."""
    if is_gguf(path):
        try:
            source, number = open_gguf_head(path, config)
        except GgufError as error:
            raise ModelLoadError(str(error)) from error
        layer = f"model.layers.{number}."
        return source, layer, DEEPSEEK.below(layer)
    found = open_checkpoint(path, options)
    if found is None:
        raise ModelLoadError(f"{path} is quantised or laid out in a way in which no MTP head can be read")
    count, layer, parts = layout_of(of_target)
    is_alone = holds_mtp_alone(path)
    own = read_architecture(path, options).config.get_text_config(decoder=True) if is_alone else of_target
    for each in (of_target, own):
        if (number := getattr(each, count, 1)) not in (0, 1, None):
            raise ModelLoadError(f"{path} has {number} MTP heads ({count}); 1 is served")
    for name in OF_LAYERS:
        said, needed = (getattr(each, name, None) for each in (own, of_target))
        if said is not None and said != needed:
            raise ModelLoadError(
                f"{path} has {name} = {shown(said)} in its config.json; the target, whose layers an MTP head "
                f"is like, has {shown(needed)}"
            )
    return found, layer, parts


def _one_layer(target: FusedDecoder) -> Any:
    """Returns the config of a model of the head's layer alone."""
    config = deepcopy(target.config)
    for name, value in {**ONE_LAYER, "vocab_size": min(target.vocab_size, PROBED_TOKENS)}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def _read(found: MtpCheckpoint, target: FusedDecoder, options: LoadOptions) -> Head:
    path, parts, config = found.path, found.parts, found.config
    model = load_fused(partial(plain_skeleton, config), requantised(found.layer, options), None, options)
    if model is None:
        raise ModelLoadError(f"{path} has an MTP head that does not compute what transformers' layer does")
    reader = _PartReader(path, requantised(found.source, options), model, target, options)
    head, make_output = reader.output(parts.output)
    rotary, of_target = model.weights.rotary, target.weights.rotary
    # Both are the same by one config, unless it has angles for some types of layers, or another type.
    if (rotary.kinds, rotary.like.dtype) == (of_target.kinds, of_target.like.dtype):
        rotary = of_target
    weights = replace(
        model.weights,
        rotary=rotary,
        embeddings=reader.embeddings(parts.embeddings),
        head=head,
        make_output=make_output,
        joint=Joint(
            reader.norm(parts.embedding_norm),
            reader.norm(parts.state_norm),
            projection=reader.projection(parts.projection),
        ),
    )
    config.vocab_size = target.vocab_size
    decoder = FusedDecoder(model.facts, weights, model.begin)
    decoder.keep_cache_in(model.cache_dtype)
    taps = (target.num_layers,)
    return Head(MTP, decoder, taps, None, (), None, token_ids=None, norm_output=True)


class _Layer(RenamedCheckpoint):
    """Is the layer of a model of one layer, with the given ``embeddings``."""

    def __init__(self, source: Checkpoint, names: dict[str, str], embeddings: torch.Tensor) -> None:
        super().__init__(source, names)
        self.files[EMBEDDINGS] = "the target"
        self.given = {EMBEDDINGS: embeddings}

    def blocks(self, name: str) -> QuantisedBlocks | None:
        return None if name in self.given else super().blocks(name)

    def scaled_rows(self, name: str) -> ScaledRows | None:
        return None if name in self.given else super().scaled_rows(name)

    def scaled_bytes(self, name: str) -> ScaledBytes | None:
        return None if name in self.given else super().scaled_bytes(name)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: self.given[name] if name in self.given else self._stored(name) for name in names}

    def _stored(self, name: str) -> torch.Tensor:
        return super().read([name])[name]

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        wanted = set(names)
        given = {name: tuple(self.given[name].shape) for name in wanted & self.given.keys()}
        return given | super().shapes(wanted - given.keys())


class _PartReader:
    """Reads the parts around the layer, for the backend and in the type of ``model``."""

    def __init__(
        self,
        path: str,
        checkpoint: Checkpoint,
        model: FusedDecoder,
        target: FusedDecoder,
        options: LoadOptions,
    ) -> None:
        self.path = path
        self.checkpoint = checkpoint
        self.facts = model.facts
        self.target = target
        self.size = int(model.config.hidden_size)
        self.linears = linears_for(model, options)

    def norm(self, name: str) -> Norm:
        self._check(name, (self.size,))
        config = self.facts.config
        weight = read_tensor(self.checkpoint, name, self.linears, self.facts).to(self.facts.dtype)
        return norm_of(FAMILIES[config.model_type].norms, weight, config.rms_norm_eps)

    def projection(self, name: str) -> Linear:
        return self.linears.make([self._weight(name, (self.size, 2 * self.size))], None)

    def embeddings(self, name: str) -> Embeddings:
        """Returns the target's embeddings, unless the head has its own."""
        if self._is_shared(name, EMBEDDINGS):
            return self.target.weights.embeddings
        return self.linears.embeddings(self._weight(name, (self.target.vocab_size, self.size)))

    def output(self, name: str) -> tuple[Linear, MakeOutput | None]:
        """Returns the target's output layer, with a function that makes variants of it, unless the head has
        its own."""
        weights = self.target.weights
        if self._is_shared(name, HEAD):
            return weights.whole_head, weights.make_output
        return self.linears.make([self._weight(name, (self.target.vocab_size, self.size))], None), None

    def _is_shared(self, name: str, of_target: str) -> bool:
        """Tells whether the head has the same tensor as the target, or none. Most checkpoints of these
        families have it twice."""
        files = self.checkpoint.files
        if name not in files or of_target not in files:
            return name not in files
        stored = self.checkpoint.read([name, of_target])
        return torch.equal(stored[name], stored[of_target])

    def _weight(self, name: str, shape: tuple[int, int]) -> Weight:
        self._check(name, shape)
        return read_weight(self.checkpoint, name, shape, self.linears, self.facts)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.checkpoint.files:
            raise ModelLoadError(f"{self.path} lacks the tensor {name} of its MTP head")
        (found,) = self.checkpoint.shapes([name]).values()
        check_shape(self.path, name, found, shape, "the target's config")
