"""Reads the checkpoint of an EAGLE-3 head (arXiv 2503.01840).

One layer gets a token's embedding and the state before it, side by side. The first states are made of a
token's states in three layers of the target.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.families.ends import make_rotary
from truedraft.engine.families.fit import has_family
from truedraft.engine.families.layer import decoder_layer
from truedraft.engine.families.linear import Source, join
from truedraft.engine.layers.decoder import Attention, DecoderLayer, DecoderWeights, Joint
from truedraft.engine.layers.linear import Embeddings, Linear, Linears, TorchLinears
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.weight import Weight
from truedraft.engine.messages import EAGLE
from truedraft.engine.models.agreement import with_cuda_kernels
from truedraft.engine.models.architecture import plain_skeleton
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.heads.eagle_config import EagleConfig
from truedraft.engine.models.heads.head import Head, check_target, linears_for
from truedraft.engine.models.load_errors import stage
from truedraft.engine.models.options import CACHE_DTYPES, LoadOptions
from truedraft.engine.models.positions import choose_rotary_factors
from truedraft.engine.models.reader import HALVES
from truedraft.engine.native.native_run import NativeKernels, serves

# Tensors of the layer have one of these prefixes, by the layout.
LAYER, MIDLAYER = "layers.0.", "midlayer."
# Some files contain these buffers, but angles follow from the config.
IGNORED = "rotary_emb.inv_freq"


def load_eagle(config: EagleConfig, target: Model, options: LoadOptions) -> Head:
    """Loads the head that ``config`` describes; raises ``ModelLoadError`` if it does not fit ``target``."""
    decoder = check_target(config.path, target)
    with stage(config.path, "weights"):
        checkpoint = Checkpoint.find(config.path, options.allow_pickle)
        if checkpoint is None:
            raise ModelLoadError(f"{config.path} has no model.safetensors")
        return _Reader(config, checkpoint, decoder, options).head()


class _Reader:
    """Reads each tensor of a head once; tensors that are left over are refused."""

    def __init__(
        self, config: EagleConfig, checkpoint: Checkpoint, target: FusedDecoder, options: LoadOptions
    ) -> None:
        self.config = config
        self.target = target
        self.checkpoint = checkpoint
        self.names = {
            name.removeprefix("model.").replace(MIDLAYER, LAYER): name
            for name in checkpoint.files
            if not name.endswith(IGNORED)
        }
        self.unread = set(self.names)
        self.layer_config = config.layer
        served = options.max_model_len or target.max_position or 0
        # Heads are trained on shorter texts than their targets are for.
        longest = max(self.layer_config.max_position_embeddings, served)
        self.layer_config.max_position_embeddings = longest
        choose_rotary_factors(self.layer_config, options.max_model_len)
        self.facts = ModelFacts(
            self.layer_config, None, 0, target.dtype, target.device, bf16_linears=target.bf16_linears
        )
        self.begin, self.linears = self._backend(options)
        self.cache_dtype = CACHE_DTYPES.get(options.cache_dtype, target.dtype)

    def _backend(self, options: LoadOptions) -> tuple[NativeKernels | None, Linears]:
        """Returns the backend of the head: the target's kernels if they are in C, otherwise the GPU's."""
        begin, size = self.target.begin, self.layer_config.head_dim
        if not isinstance(begin, NativeKernels) or not serves(self.facts.dtype, self.facts.device, size):
            return None, TorchLinears()
        return NativeKernels(begin.library), linears_for(self.target, options)

    def head(self) -> Head:
        config, size = self.config, self.layer_config.hidden_size
        taps = config.taps(self.target.num_layers)
        if config.target_hidden_size not in (None, of_target := self.target.config.hidden_size):
            raise ModelLoadError(
                f"{config.path} is for a target with target_hidden_size {config.target_hidden_size}, by its "
                f"config.json; this one's states have {of_target} numbers"
            )
        features = len(taps) * self.target.config.hidden_size
        combine = self._linear("fc.weight", (size, features), self._optional("fc.bias", (size,)))
        one, count = (self.target.config.hidden_size,), len(taps) if config.fc_norm else 0
        tap_norms = tuple(self._norm(f"fc_norm.{index}.weight", one) for index in range(count))
        joint_norm = self._norm("input_norm.weight", (features,)) if config.norm_before_fc else None
        token_ids = self._token_ids()
        model = self._model()
        model.keep_cache_in(self.cache_dtype)
        if self.unread:
            raise ModelLoadError(
                f"{config.path} has tensors that an EAGLE-3 head with its config.json does not use, "
                f"such as {min(self.unread)!r}"
            )
        return Head(EAGLE, model, taps, combine, tap_norms, joint_norm, token_ids, config.norm_output)

    def _model(self) -> FusedDecoder:
        config, size = self.layer_config, self.layer_config.hidden_size
        layer, rotary, num_parameters = self._layer()
        joint = Joint(
            self._required(layer.mixer_norm),
            self._norm(f"{LAYER}hidden_norm.weight", (size,)),
            self.config.norm_before_residual,
        )
        like = torch.empty(0, dtype=self.facts.dtype, device=self.facts.device)
        weights = DecoderWeights(
            self._embeddings(),
            [replace(layer, mixer_norm=None)],
            self._norm("norm.weight", (size,)),
            self._output(),
            make_rotary(rotary, config, like),
            embedding_scale=1.0,
            softcap=None,
            joint=joint,
            make_output=None if "lm_head.weight" in self.names else self.target.weights.make_output,
        )
        facts = replace(self.facts, num_parameters=num_parameters)
        if self.begin is not None:
            return FusedDecoder(facts, weights, self.begin)
        return with_cuda_kernels(FusedDecoder(facts, weights))

    def _layer(self) -> tuple[DecoderLayer, nn.Module, int]:
        """Describes the layer by way of transformers' own, whose queries, keys and values have twice the
        inputs here. Also returns its angles and its number of parameters."""
        module: Any = plain_skeleton(self.layer_config, self.facts.dtype)
        if not has_family(module):
            raise ModelLoadError(
                f"{self.config.path} cannot be served: layers of heads with hidden_act "
                f"{self.layer_config.hidden_act!r} are not known"
            )
        layer, size = module.model.layers[0], self.layer_config.hidden_size
        weights: dict[Source, list[Weight]] = {}
        small: dict[str, torch.Tensor] = {}
        for name, parameter in layer.named_parameters():
            shape = tuple(parameter.shape)
            if len(shape) == 1:
                small[name] = self._tensor(LAYER + name, shape).to(self.facts.dtype)
                continue
            owner = name.removesuffix(".weight")
            is_wide = owner.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj")
            wide = shape[0], 2 * size if is_wide else shape[1]
            weights[layer.get_submodule(owner)] = [self._weight(LAYER + name, wide)]
        layer.load_state_dict(small, strict=False, assign=True)
        make: Callable[..., Linear] = partial(join, linears=self.linears, weights_of=weights.__getitem__)
        described = decoder_layer(layer, 0, self.facts, make)
        if (getattr(self.layer_config, "layer_types", None) or [""])[0] == "sliding_attention":
            assert isinstance(described.mixer, Attention)
            window = int(self.layer_config.sliding_window)
            mixer = replace(described.mixer, shape=replace(described.mixer.shape, sliding_window=window))
            described = replace(described, mixer=mixer)
        rotary = type(module.model.rotary_emb)(config=self.layer_config).to(self.facts.device)
        count = sum(weight.shape[0] * weight.shape[1] for (weight,) in weights.values())
        return described, rotary, count

    def _embeddings(self) -> Embeddings:
        """Returns the file's embeddings, or the target's."""
        vocab_size, size = self.target.vocab_size, self.layer_config.hidden_size
        if "embed_tokens.weight" in self.names:
            return self.linears.embeddings(self._weight("embed_tokens.weight", (vocab_size, size)))
        if self.target.config.hidden_size != size:
            raise ModelLoadError(
                f"{self.config.path} has no embed_tokens, and the target's have "
                f"{self.target.config.hidden_size} numbers instead of {size}"
            )
        return self.target.weights.embeddings

    def _output(self) -> Linear:
        """Returns the file's output layer, or the target's."""
        size, num_drafted = self.layer_config.hidden_size, self.config.draft_vocab_size
        if "lm_head.weight" in self.names:
            return self._linear("lm_head.weight", (num_drafted, size), None)
        if num_drafted != self.target.vocab_size or self.target.config.hidden_size != size:
            raise ModelLoadError(f"{self.config.path} has no lm_head, and the target's has another shape")
        return self.target.weights.whole_head

    def _token_ids(self) -> torch.Tensor | None:
        """Returns the target's ids of the drafted tokens, which the file has as offsets; None: all ids in
        order."""
        size, vocab_size, path = self.config.draft_vocab_size, self.target.vocab_size, self.config.path
        if "d2t" not in self.names:
            if size != vocab_size:
                raise ModelLoadError(
                    f"{path} drafts {size} of the target's {vocab_size} tokens, and has no d2t to say which"
                )
            self._optional("t2d", (vocab_size,))
            return None
        token_ids = torch.arange(size) + self._tensor("d2t", (size,)).cpu().long()
        is_known = (token_ids >= 0) & (token_ids < vocab_size)
        if not is_known.all() or len(set(token_ids.tolist())) < size:
            raise ModelLoadError(
                f"d2t in {path} must give each drafted token its distance to another one of the target's "
                f"{vocab_size} ids"
            )
        drafted = self._optional("t2d", (vocab_size,))
        if drafted is not None and not torch.equal(drafted.cpu().nonzero()[:, 0], token_ids.sort().values):
            raise ModelLoadError(f"d2t and t2d in {path} do not name the same tokens")
        return token_ids.to(self.facts.device)

    def _norm(self, name: str, shape: tuple[int]) -> Norm:
        weight = self._tensor(name, shape).to(self.facts.dtype)
        return Norm(weight, self.layer_config.rms_norm_eps)

    def _linear(self, name: str, shape: tuple[int, int], bias: torch.Tensor | None) -> Linear:
        bias = None if bias is None else bias.to(self.facts.dtype)
        return self.linears.make([self._weight(name, shape)], bias)

    def _weight(self, name: str, shape: tuple[int, int]) -> Weight:
        self._check(name, shape)

        def stored() -> torch.Tensor:
            tensor = self._read(name)
            is_kept = self.linears.takes_halves and tensor.dtype in HALVES
            return tensor.to(tensor.dtype if is_kept else self.facts.dtype)

        return Weight(name, shape, cache(stored))

    def _optional(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        return self._tensor(name, shape) if name in self.names else None

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._check(name, shape)
        return self._read(name)

    def _read(self, name: str) -> torch.Tensor:
        stored = self.names[name]
        return self.checkpoint.read([stored])[stored].to(self.facts.device, copy=True)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self.names.get(name)
        if stored is None:
            raise ModelLoadError(f"{self.config.path} lacks the tensor {name!r} of an EAGLE-3 head")
        found = self.checkpoint.shapes([stored])[stored]
        if found != shape:
            raise ModelLoadError(
                f"{stored} in {self.config.path} has the shape {list(found)}; for this target and its "
                f"config.json it must be {list(shape)}"
            )
        self.unread.discard(name)

    @staticmethod
    def _required(norm: Norm | None) -> Norm:
        assert norm is not None  # Both kinds of layers have one.
        return norm
