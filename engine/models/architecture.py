"""Decides what a checkpoint is and whether it can be served, from its config, before weights are read.

The module is built without weights, on torch's meta device, and its layers are probed there: attention that
cannot be replaced, recurrent states and masks that are not causal are refused within a second.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
)

from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.families.fit import corrected, experts_of
from truedraft.engine.layers.attention import ATTENTION_NAME
from truedraft.engine.memory.cache_memory import total_memory
from truedraft.engine.models.hf import cross_attention
from truedraft.engine.models.hf.decoder_only import DecoderModel
from truedraft.engine.models.hf.encoder_decoder import check_served
from truedraft.engine.models.hf.layer_probe import NOT_REPLACEABLE
from truedraft.engine.models.load_errors import stage
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.positions import choose_rotary_factors
from truedraft.engine.models.sizes import check_largest, check_sizes
from truedraft.engine.models.text_part import (
    PLAIN_INSIDE,
    TextCheckpoint,
    is_multimodal,
    ordinary_decoder,
    renames_tensors,
    text_only,
)

GENERATION_CONFIG = "generation_config.json"
# A weight takes at least this many bytes in memory, by the setting ``quantize``.
SMALLEST = {"fp8": 1.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True)
class Architecture:
    """Describes a checkpoint. ``module_class`` is transformers' class, or an auto class where the checkpoint
    brings its own code. ``own_checkpoint`` has the tensors under the model's names, where the path itself has
    others."""

    path: str
    config: Any
    module_class: Any
    has_own_code: bool = False
    own_checkpoint: Checkpoint | None = None

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.config.is_encoder_decoder)

    def attention(self, name: str) -> str | dict[str, str]:
        """Returns the attention implementation ``name`` for this model's text."""
        if self.is_encoder_decoder and name == ATTENTION_NAME:
            return cross_attention.ATTENTION_NAME
        if self.has_own_code or not is_multimodal(self.config):
            return name
        others = (part for part in self.config.sub_configs if part != "text_config")
        return {"": name, "text_config": name} | dict.fromkeys(others, "eager")

    @cached_property
    def fused_config(self) -> Any:
        """Returns the config of the plain text model that our layers may compute in this one's place; None if
        it is not known to be the same."""
        if self.has_own_code or self.is_encoder_decoder:
            return None
        if not is_multimodal(self.config):
            return self.config
        if self.config.model_type not in PLAIN_INSIDE:
            return None
        config = ordinary_decoder(self.config)
        config.tie_word_embeddings = bool(self._text_part.all_tied_weights_keys)
        return config

    @cached_property
    def _text_part(self) -> Any:
        return self.skeleton(torch.float32)

    def checkpoint(self, allow_pickle: bool) -> Checkpoint | None:
        """Returns the tensors under the names of the model of ``fused_config``; None if transformers has to
        find or convert them."""
        if self.own_checkpoint is not None:
            return self.own_checkpoint
        found = Checkpoint.find(self.path, allow_pickle)
        if found is None or experts_of(self.config) is not None:
            return found  # Names of experts are known (``with_stacks``).
        if not (is_multimodal(self.config) or renames_tensors(self._text_part)):
            return found
        return TextCheckpoint.of(found, self._text_part)

    def skeleton(self, dtype: torch.dtype, attention: str = "eager") -> Any:
        """Returns the module on the meta device."""
        return skeleton(self.module_class, self.config, dtype, self.attention(attention))

    def generation_config(self) -> Any:
        """Returns the checkpoint's generation config; without such a file, the settings of config.json that
        concern generation."""
        with stage(self.path, GENERATION_CONFIG):
            if (Path(self.path) / GENERATION_CONFIG).is_file():
                return GenerationConfig.from_pretrained(self.path)
            return GenerationConfig.from_model_config(self.config)


def plain_skeleton(config: Any, dtype: torch.dtype) -> Any:
    """Returns transformers' plain text model of ``config``, without weights, on the meta device."""
    return skeleton(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, dtype)


def skeleton(
    module_class: Any, config: Any, dtype: torch.dtype, attention: str | dict[str, str] = "eager"
) -> Any:
    """Returns a module without weights, on the meta device."""
    try:
        with torch.device("meta"):
            module = module_class._from_config(config, dtype=dtype, attn_implementation=attention)
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        raise ModelLoadError(NOT_REPLACEABLE.format(config.model_type)) from error
    return corrected(module.eval().requires_grad_(False))


def read_architecture(path: str, options: LoadOptions) -> Architecture:
    """Reads the config; raises ``ModelLoadError`` if it is none, or of a model that does not write text."""
    with stage(path, "config.json"):
        check_largest(path, PreTrainedConfig.get_config_dict(path)[0])
        config = AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code)
        choose_rotary_factors(config, options.max_model_len)
        has_own_code = options.trust_remote_code and bool(getattr(config, "auto_map", None))
        if has_own_code:
            auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
            return Architecture(path, config, auto_class, has_own_code)
        check_sizes(path, config.get_text_config(decoder=True))
        return Architecture(path, config, _module_class(path, config))


def _module_class(path: str, config: Any) -> Any:
    if config.is_encoder_decoder:
        check_served(config)
        return MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)]
    if is_multimodal(config):
        return text_only(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(f"{path} cannot be served: {config.model_type} models do not write text")
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def check_memory(path: str, module: Any, options: LoadOptions) -> None:
    """Raises ``ModelLoadError`` if the weights alone are more than the device can ever hold; ``module`` may
    be on the meta device."""
    if options.device_map is not None:
        return
    size = SMALLEST.get(options.quantize, 2.0 if options.compact_weights else float(options.dtype.itemsize))
    if options.device.type != "cpu" and options.quantize == "none":
        size = float(options.dtype.itemsize)
    if getattr(module.config, "quantization_config", None):
        size = min(size, 0.5)
    needed = int(size * sum(parameter.numel() for parameter in module.parameters()))
    total = total_memory(options.device)
    if needed > total:
        raise ModelLoadError(
            f"{path} needs at least {needed / 1e9:.1f} GB for its weights, and {options.device} has "
            f"{total / 1e9:.1f} GB: take a smaller model or fewer bits (quantize, a GGUF file)"
        )


def check_layers(module: Any) -> None:
    """Raises ``ModelLoadError`` if a ``module`` on the meta device has layers that cannot be served. A later
    check with weights decides the rest."""
    facts = ModelFacts(module.config, None, 0, module.dtype, torch.device("meta"))
    try:
        DecoderModel(module, facts)
    except ModelLoadError as error:
        # torch raises this where it would have to look at values.
        if not isinstance(error.__cause__, NotImplementedError | RuntimeError):
            raise
