"""Finds the text part of a multimodal checkpoint: decoder and output layer, without encoders of images or
sound.

transformers' class of such a checkpoint wraps a decoder, and its forward of a text without images is that
decoder's. ``text_only`` makes the class without its other parts: the forward, the names of tensors and the
conversions of old layouts stay transformers' own, and the other parts' tensors are never read. Where the
decoder is known to be an ordinary one, ``ordinary_decoder`` and ``TextCheckpoint`` make a plain text model of
it.
"""

import re
from collections.abc import Iterator
from copy import deepcopy
from os.path import commonprefix
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from truedraft.engine.checkpoints.checkpoint import Checkpoint, RenamedCheckpoint
from truedraft.engine.errors import ModelLoadError

# These decoders have a name of their own only because their positions may be those of an image, in three
# dimensions: for text all three are equal, which is the plain rotary embedding.
ORDINARY = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
# The logits of these wrappers for a text have been compared with those of the plain text model inside
# (``tools/family_table.py``).
PLAIN_INSIDE = (
    *("cosmos3_omni", "deepseek_vl", "deepseek_vl_hybrid", "fast_vlm", "fun_asr_nano", "gemma3", "gemma4"),
    *("glmasr", "got_ocr2", "idefics2", "idefics3", "internvl", "janus", "lighton_ocr", "llava"),
    *("llava_next", "llava_next_video", "llava_onevision", "mistral3", "moss_transcribe_diarize", "ovis2"),
    *("perception_lm", "pp_chart2table", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl"),
    *("qwen2_audio", "qwen2_vl", "lfm2_vl", "lfm3_vl", "qwen3_5", "qwen3_5_moe", "qwen3_asr", "qwen3_vl"),
    *("smolvlm", "vibevoice_asr", "video_llama_3", "video_llava", "vipllava", "voxtral"),
)
# The rotary parameters of such decoders have these settings for images.
OF_IMAGES = ("mrope_section", "mrope_interleaved")


def is_multimodal(config: Any) -> bool:
    return type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING


def text_only(config: Any) -> type:
    """Returns transformers' class for a multimodal ``config``, whose objects have the text part only."""
    whole: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]

    def init(self: Any, config: Any, *others: Any, **more: Any) -> None:
        whole.__init__(self, config, *others, **more)
        decoder, head = self.get_decoder(), self.get_output_embeddings()
        if head is None:
            raise ModelLoadError(
                f"{config.model_type} models cannot be served: their text has no output layer in transformers"
            )
        if decoder is self:
            return
        removed = sorted(_remove_others(self, {decoder, head}, ""))
        self._keys_to_ignore_on_load_unexpected |= set(removed)
        left = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        self.all_tied_weights_keys = {
            tied: to for tied, to in self.all_tied_weights_keys.items() if {tied, to} <= left
        }

    # transformers finds a class's conversions by its name.
    return type(whole.__name__, (whole,), {"__init__": init, "__module__": whole.__module__})


def _remove_others(module: nn.Module, kept: set[nn.Module], prefix: str) -> Iterator[str]:
    """Removes modules below ``module`` that are not in ``kept``; yields patterns of their tensors' names."""
    for name, child in list(module.named_children()):
        if child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            delattr(module, name)
            yield rf"^{prefix}{name}\."
        else:
            yield from _remove_others(child, kept, rf"{prefix}{name}\.")


def ordinary_decoder(config: Any) -> Any:
    """Returns the config of the plain text model that a multimodal ``config`` wraps."""
    text = config.get_text_config()
    model_type = ORDINARY.get(text.model_type)
    if model_type is None:
        return deepcopy(text)
    values = {name: value for name, value in text.to_dict().items() if name != "model_type"}
    rotary = values.get("rope_parameters") or {}
    values["rope_parameters"] = {name: rotary[name] for name in rotary if name not in OF_IMAGES}
    return CONFIG_MAPPING[model_type](**values)


def renames_tensors(module: Any) -> bool:
    """Tells whether checkpoints of transformers' ``module`` have names of their own for its tensors."""
    found = get_model_conversion_mapping(module, add_legacy=False)
    return any(isinstance(each, WeightRenaming) for each in found)


class TextCheckpoint(RenamedCheckpoint):
    """Gives tensors of a checkpoint that has names of its own, or of a multimodal model's text part, the
    names of a plain text model."""

    @classmethod
    def of(cls, source: Checkpoint, part: Any) -> "TextCheckpoint":
        """Wraps ``source``; ``part`` is the checkpoint's ``text_only`` module, without weights."""
        conversions = get_model_conversion_mapping(part)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if not isinstance(each, WeightRenaming)]
        own, ordinary = part.state_dict(), dict(_ordinary_names(part))
        unread = re.compile("|".join(part._keys_to_ignore_on_load_unexpected) or "$^")
        names = {}
        for stored in source.files:
            name, converted = rename_source_key(stored, renamings, converters, part.base_model_prefix, own)
            if name in ordinary and converted is not None:
                # Tensors that transformers joins or stacks have the names of a plain text model's checkpoint.
                apart, _ = rename_source_key(stored, renamings, [], part.base_model_prefix, own)
                name = _exchanged(apart, name, ordinary[name])
            if name in ordinary or not (name in own or unread.search(name)):
                names[ordinary.get(name, name)] = stored
        return cls(source, names)


def _exchanged(name: str, inside: str, plain: str) -> str:
    """Returns ``name`` with its beginning replaced in the way that leads from ``inside`` to ``plain``."""
    end = len(commonprefix([inside[::-1], plain[::-1]]))
    return plain[: len(plain) - end] + name[len(inside) - end :]


def _ordinary_names(part: Any) -> Iterator[tuple[str, str]]:
    """Yields each name in ``part``, and a plain text model's name for it."""
    decoder, head = part.get_decoder(), part.get_output_embeddings()
    for name, module in part.named_modules():
        for kept, prefix in ((decoder, "model"), (head, "lm_head")):
            if module is kept:
                yield from ((f"{name}.{key}", f"{prefix}.{key}") for key in module.state_dict())
