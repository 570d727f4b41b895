"""Reads the files of Gemma 4's assistants: a folder, or a GGUF file as llama.cpp's converter writes it.

transformers has no layer that is made of queries alone: it refuses a model all of whose layers read others'
keys. So layers are described by way of a model that has a layer of each type before them.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig

from truedraft.engine.checkpoints.account import check_shape, shown
from truedraft.engine.checkpoints.checkpoint import EMBEDDINGS, HEAD, Checkpoint, locate
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.checkpoints.stacks import stored_tensors
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.families.ends import last_norm, make_last_norm, make_rotary
from truedraft.engine.families.layer import decoder_layer
from truedraft.engine.families.linear import Source, join
from truedraft.engine.formats.gguf_file import GgufError, is_gguf
from truedraft.engine.gguf.assistant import FULL, SLIDING, holds_assistant, open_gguf_assistant
from truedraft.engine.layers.decoder import Attention, DecoderLayer, DecoderWeights
from truedraft.engine.layers.linear import DenseEmbeddings, Linear
from truedraft.engine.layers.weight import Weight
from truedraft.engine.models.architecture import plain_skeleton
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.heads.assistant import Assistant, Clusters
from truedraft.engine.models.heads.head import check_target, linears_for
from truedraft.engine.models.load_errors import stage
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.reader import read_tensor, read_weight
from truedraft.engine.models.sizes import check_largest, check_sizes
from truedraft.engine.models.sources import requantised

MODEL_TYPE, UNIFIED = "gemma4_assistant", "gemma4_unified_assistant"
TARGET_TYPE = "gemma4_text"
BEFORE, AFTER = "pre_projection.weight", "post_projection.weight"
CENTROIDS, ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
# Published checkpoints have these tensors of layers that do not use them.
UNUSED = tuple(f".self_attn.{name}" for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"))
# The model of which layers are described has these settings, whatever the file says.
OWN = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "final_logit_softcapping": None}
# A layer's settings may differ from those of the others of a text.
BY_LAYER = ("head_dim", "num_key_value_heads")


class AssistantFile(NamedTuple):
    """Is an open assistant: ``text`` is the config of its layers, ``target_size`` the size of the target's
    states, and ``chosen`` the number of clusters whose tokens get logits; 0: all tokens do."""

    path: str
    checkpoint: Checkpoint
    text: Any
    target_size: int
    num_clusters: int = 0
    chosen: int = 0


def is_assistant(path: str) -> bool:
    """Tells whether a GGUF file or a folder has an assistant."""
    if is_gguf(path):
        return holds_assistant(path)
    return _config(path).get("model_type") in (MODEL_TYPE, UNIFIED)


def load_assistant(path: str, target: Model, options: LoadOptions) -> Assistant:
    """Loads the assistant at ``path``; raises ``ModelLoadError`` if it does not fit ``target``."""
    decoder = check_target(path, target)
    path = str(Path(path).expanduser())
    with stage(path, "config.json"):
        opened = _open(path, options)
    with stage(path, "weights"):
        return _Reader(opened, decoder, options).assistant()


def _config(path: str) -> dict[str, Any]:
    """Returns what a folder's config.json says; nothing if it cannot be read."""
    try:
        file = locate(path, "config.json")
        found = {} if file is None else json.loads(Path(file).read_text())
    except (OSError, ValueError):
        return {}  # Loading reports the fault.
    return found if isinstance(found, dict) else {}


def _open(path: str, options: LoadOptions) -> AssistantFile:
    if is_gguf(path):
        try:
            return AssistantFile(path, *open_gguf_assistant(path))
        except GgufError as error:
            raise ModelLoadError(str(error)) from error
    said = _config(path)
    if said["model_type"] == UNIFIED:
        raise ModelLoadError(
            f"{path} is an assistant of the type {UNIFIED}; those of {MODEL_TYPE} are served"
        )
    if said.get("quantization_config"):
        raise ModelLoadError(f"{path} is a quantised assistant: take the original, or a GGUF file")
    check_largest(path, said)
    checkpoint = Checkpoint.find(path, options.allow_pickle)
    if checkpoint is None:
        raise ModelLoadError(f"{path} has no model.safetensors")
    config = AutoConfig.from_pretrained(path)
    text = config.text_config
    check_sizes(path, text)
    if not config.tie_word_embeddings:
        raise ModelLoadError(f"{path} has tie_word_embeddings false in its config.json; only true is served")
    clusters = (config.num_centroids, config.centroid_intermediate_top_k)
    chosen = clusters if config.use_ordered_embeddings else ()
    return AssistantFile(path, checkpoint, text, config.backbone_hidden_size, *chosen)


class _Reader:
    """Reads each tensor once; tensors that are left over are refused."""

    def __init__(self, opened: AssistantFile, target: FusedDecoder, options: LoadOptions) -> None:
        self.path, self.text = opened.path, opened.text
        self.opened = opened
        self.target = target
        self.checkpoint = requantised(opened.checkpoint, options)
        self.unread = {name for name in opened.checkpoint.files if name != HEAD and not name.endswith(UNUSED)}
        self.types: list[str] = list(self.text.layer_types)
        # These come first in the model of which layers are described.
        self.storing = [kind for kind in (SLIDING, FULL) if kind in self.types]
        served = options.max_model_len or target.max_position or 0
        self.config = _with_storing(self.text, self.storing, self.types)
        self.config.max_position_embeddings = max(self.text.max_position_embeddings, served)
        self.facts = ModelFacts(
            self.config, None, 0, target.dtype, target.device, bf16_linears=target.bf16_linears
        )
        self.linears = linears_for(target, options)

    def assistant(self) -> Assistant:
        places = self._places()
        size, of_target = int(self.text.hidden_size), self.opened.target_size
        before, after = self._linear(BEFORE, (size, 2 * of_target)), self._linear(AFTER, (of_target, size))
        module = plain_skeleton(self.config, self.facts.dtype)
        layers = [
            self._layer(module.model.layers[len(self.storing) + index], index)
            for index in range(len(self.types))
        ]
        norm_name, norm = last_norm(module)
        self._fill(norm, norm_name)
        stored = self._weight(EMBEDDINGS, (self.target.vocab_size, size))
        files = self.opened.checkpoint
        if HEAD in files.files and not torch.equal(*files.read([EMBEDDINGS, HEAD]).values()):
            raise ModelLoadError(f"{self.path} has an {HEAD} that is not its embeddings, which is not served")
        clusters, head = None, stored
        if self.opened.chosen:
            head = self._weight(CENTROIDS, (self.opened.num_clusters, size))
            clusters = Clusters(self.linears.embeddings(stored), self._clusters(), self.opened.chosen)
        rotary = _OnePlaceOn(type(module.model.rotary_emb)(config=self.config).to(self.facts.device))
        like = torch.empty(0, dtype=self.facts.dtype, device=self.facts.device)
        weights = DecoderWeights(
            DenseEmbeddings(like.view(0, size)),
            layers,
            make_last_norm(self.config, norm),
            self.linears.make([head], None),
            make_rotary(rotary, self.config, like),
            embedding_scale=1.0,
            softcap=None,
        )
        if self.unread:
            raise ModelLoadError(
                f"{self.path} has tensors that an assistant with its config does not use, such as "
                f"{min(self.unread)!r}"
            )
        return Assistant(self.facts, weights, self.target, places, before, after, clusters)

    def _places(self) -> tuple[int, ...]:
        """Returns the target's layers whose keys and values the layers of each type read."""
        of_target, target = self.opened.target_size, self.target.config
        wanted = {
            "model_type": (TARGET_TYPE, target.model_type),
            "hidden_size": (of_target, target.hidden_size),
            "vocab_size": (self.text.vocab_size, self.target.vocab_size),
        }
        for name, (needed, found) in wanted.items():
            if needed != found:
                raise ModelLoadError(
                    f"{self.path} is an assistant for a target with {name} {needed}; this one has {found}"
                )
        found_places = []
        for kind in self.storing:
            own = self.config.per_layer_config[self.storing.index(kind)]
            window = int(self.text.sliding_window) if kind == SLIDING else None
            stored = [
                shape
                for shape in self.target.weights.attention
                if shape.source is None and (shape.sliding_window is None) == (window is None)
            ]
            needed_shape = own.head_dim, own.num_key_value_heads, window
            shapes = [(each.head_size, each.num_kv_heads, each.sliding_window) for each in stored[-1:]]
            if shapes != [needed_shape] or window == 1:
                raise ModelLoadError(
                    f"{self.path} reads keys of a target's layer of the type {kind} with the size of heads, "
                    f"their number and the window {shown(list(needed_shape))}; this target's last one has "
                    f"{shown(list(shapes[0]) if shapes else None)}"
                )
            found_places.append(stored[-1].layer)
        return tuple(found_places)

    def _layer(self, layer: Any, index: int) -> DecoderLayer:
        weights: dict[Source, list[Weight]] = self._fill(layer, f"model.layers.{index}")
        make: Callable[..., Linear] = partial(join, linears=self.linears, weights_of=weights.__getitem__)
        described = decoder_layer(layer, index, self.facts, make)
        mixer = described.mixer
        assert isinstance(mixer, Attention)
        if mixer.shape.sliding_window is None:
            return described
        # Seen from the last stored token the window of the next one has one token less.
        shape = replace(mixer.shape, sliding_window=mixer.shape.sliding_window - 1)
        return replace(described, mixer=replace(mixer, shape=shape))

    def _fill(self, module: nn.Module, prefix: str) -> dict[Source, list[Weight]]:
        """Gives a module its small tensors, and returns the weights of its linear layers."""
        weights: dict[Source, list[Weight]] = {}
        small: dict[str, torch.Tensor] = {}
        for name, parameter in stored_tensors(module).items():
            shape, full = tuple(parameter.shape), f"{prefix}.{name}"
            if len(shape) == 2:
                weights[module.get_submodule(name.removesuffix(".weight"))] = [self._weight(full, shape)]
            else:
                small[name] = self._tensor(full, shape)
        module.load_state_dict(small, strict=False, assign=True)
        return weights

    def _clusters(self) -> torch.Tensor:
        """Returns the ids of the tokens of each cluster."""
        size, number = self.target.vocab_size, self.opened.num_clusters
        ids = self._read(ORDER, (size,)).long()
        fits = number > 0 and size % number == 0 and 0 < self.opened.chosen <= number
        if not fits or not torch.equal(ids.sort().values.cpu(), torch.arange(size)):
            raise ModelLoadError(
                f"{ORDER} in {self.path} must have each of the target's {size} ids once, in {number} "
                f"clusters of equally many, of which {self.opened.chosen} are looked at"
            )
        return ids.view(number, -1)

    def _linear(self, name: str, shape: tuple[int, int]) -> Linear:
        return self.linears.make([self._weight(name, shape)], None)

    def _weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        self._check(name, shape)
        rows, columns = shape
        return read_weight(self.checkpoint, name, (rows, columns), self.linears, self.facts)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._check(name, shape)
        return read_tensor(self.checkpoint, name, self.linears, self.facts).to(self.facts.dtype)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._check(name, shape)
        return self.opened.checkpoint.read([name])[name].to(self.facts.device, copy=True)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.checkpoint.files:
            raise ModelLoadError(f"{self.path} lacks the tensor {name!r} of an assistant")
        (found,) = self.checkpoint.shapes([name]).values()
        check_shape(self.path, name, found, shape, "its config")
        self.unread.discard(name)


def _with_storing(text: Any, storing: list[str], types: list[str]) -> Any:
    """Returns the config of a model whose first layers are of the types ``storing``, and the last ones those
    of the config ``text``, which read what the first ones store."""
    settings, all_types = text.to_dict(), storing + types
    of_kind = {kind: text.per_layer_config[types.index(kind)] for kind in storing}
    settings |= OWN | {
        "layer_types": all_types,
        "num_hidden_layers": len(all_types),
        "num_kv_shared_layers": len(types),
        "per_layer_config": {
            layer: {name: getattr(of_kind[kind], name) for name in BY_LAYER}
            for layer, kind in enumerate(all_types)
            if kind == FULL
        },
    }
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


class _OnePlaceOn(nn.Module):
    """Has the angles of the position after each: the query of a token that is not stored is given the place
    of the last one that is."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary
        self.rope_type = rotary.rope_type

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *kind: str) -> Any:
        return self.rotary(x, position_ids + 1, *kind)
