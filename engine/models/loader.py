"""Checkpoint folder or hub id to a transformers model that attends through our cache.

Chooses device and dtype, loads the weights, packs linears where that pays. What goes wrong with a user's
path or checkpoint becomes a ``ModelLoadError`` that says so in a sentence.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from engine.models import cross_attention
from engine.models.attention import ATTENTION_NAME
from engine.models.checkpoint import check_folder, explain
from engine.models.decoder_only import DecoderModel
from engine.models.encoder_decoder import EncoderDecoderModel
from engine.models.errors import ModelLoadError
from engine.models.lean_decoder import is_lean
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


def load_decoder(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    device_map: str | dict[str, str | int] | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    may_be_lean: bool = True,
    narrow: bool = True,
) -> DecoderModel:
    """The model at ``path``, decoder-only or encoder-decoder, on ``device``, its cache not yet allocated.

    With a ``device_map`` it is accelerate that places the layers, and ``device`` has no say. Linears are
    packed (``narrow`` as in ``make_product``) unless the model ``may_be_lean``: then its weights stay as they
    are for ``run_lean`` to take.
    """
    model = load_causal_model(
        path,
        dtype,
        device,
        ATTENTION_NAME,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    device = model.get_input_embeddings().weight.device
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if can_pack(dtype, device) and device_map is None and not (may_be_lean and is_lean(model)):
        pack_linears(model, narrow)
    served = EncoderDecoderModel if model.config.is_encoder_decoder else DecoderModel
    return served(model, num_parameters, dtype, device)


def load_causal_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    *,
    device_map: str | dict[str, str | int] | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Any:
    """The transformers model as it is, with the attention implementation of that name."""
    check_folder(path, allow_pickle=allow_pickle)
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        auto_model: Any = AutoModelForCausalLM
        if config.is_encoder_decoder:
            auto_model = AutoModelForSeq2SeqLM
            attention = cross_attention.ATTENTION_NAME if attention == ATTENTION_NAME else attention
        model, found = auto_model.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            use_safetensors=None if allow_pickle else True,
            device_map=device_map,
            output_loading_info=True,
        )
    except ModelLoadError:
        raise
    except Exception as error:  # formats, quantisers and hubs fail in many ways; the user needs one line
        if error.args == (attention,):
            raise ModelLoadError(
                f"{config.model_type} models cannot be served: their layers have no attention that "
                "transformers lets us replace (AttentionInterface)"
            ) from error
        raise ModelLoadError(explain(path, error)) from error
    # transformers fills what is missing with random numbers.
    if missing := sorted(found["missing_keys"]):
        raise ModelLoadError(f"{path} lacks weights of the model: {', '.join(missing[:3])}")
    model.eval().requires_grad_(False)
    if device_map is not None:
        _refuse_offload(path, getattr(model, "hf_device_map", {}))
        return model
    return model if hasattr(model, "hf_quantizer") else model.to(device)


def _refuse_offload(path: str, placement: dict[str, Any]) -> None:
    """Offloaded layers would be copied to the device in every step."""
    places = {str(place) for place in placement.values()}
    if "disk" in places or ("cpu" in places and len(places) > 1):
        raise ModelLoadError(
            f"{path} does not fit on the devices at hand: accelerate would leave a part of it on "
            f"{'disk' if 'disk' in places else 'the CPU'}; use a smaller dtype or model, or more devices"
        )
