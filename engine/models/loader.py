"""Checkpoint folder or hub id to a transformers model that attends through our cache.

Chooses device and dtype, loads the weights, packs linears where that pays. What goes wrong with a user's
path or checkpoint becomes a ``ModelLoadError`` that says so in a sentence.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.models.attention import ATTENTION_NAME
from engine.models.decoder_only import DecoderModel
from engine.models.errors import ModelLoadError
from engine.models.packed_linear import can_pack, pack_linears

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(f"device is {name!r}, but torch finds no CUDA device")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def load_decoder(path: str, dtype: torch.dtype, device: torch.device) -> DecoderModel:
    """The decoder-only model at ``path``, on ``device``, its cache not yet allocated."""
    model = load_causal_model(path, dtype, device, ATTENTION_NAME)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if can_pack(dtype, device):
        pack_linears(model)
    return DecoderModel(model, num_parameters, dtype, device)


def load_causal_model(path: str, dtype: torch.dtype, device: torch.device, attention: str) -> Any:
    """The transformers model as it is, with the attention implementation of that name."""
    looks_local = path.startswith((".", "/", "~")) or Path(path).exists()
    if looks_local and not (Path(path).expanduser() / "config.json").is_file():
        raise ModelLoadError(f"{path} is not a model folder: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(path)
        if config.is_encoder_decoder:
            raise ModelLoadError(f"{path} is an encoder-decoder model, which is not served yet")
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=attention
        )
    except (OSError, ValueError, KeyError) as error:
        if error.args == (attention,):
            raise ModelLoadError(
                f"{config.model_type} models cannot be served: their layers have no attention that "
                "transformers lets us replace (AttentionInterface)"
            ) from error
        raise ModelLoadError(f"cannot load {path}: {error}") from error
    model.eval().requires_grad_(False).to(device)
    return model
