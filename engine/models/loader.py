"""Checkpoint folder or hub id to a model that attends through our cache.

Chooses device and dtype, and the way: Llama-shaped models by name (``llama``), others by a module.
What goes wrong with a user's path or checkpoint becomes a ``ModelLoadError`` that says so in a sentence.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig

from engine.gguf_file import GgufError, is_gguf
from engine.models import cross_attention
from engine.models.attention import ATTENTION_NAME
from engine.models.base import Model, ModelFacts
from engine.models.checkpoint import check_folder, explain
from engine.models.decoder_only import DecoderModel
from engine.models.encoder_decoder import EncoderDecoderModel
from engine.models.errors import ModelLoadError
from engine.models.gguf import check_complete, generation_config, load_module, open_gguf
from engine.models.linear import replace_linears
from engine.models.llama import FAMILIES, Llama, is_llama, load_llama, probe_logits, take_llama
from engine.models.quantise import LAYER_TYPES, QuantisedCheckpoint
from engine.models.self_check import self_check
from engine.models.weights import Checkpoint
from engine.native.linear import linear_library

logger = logging.getLogger(__name__)

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


def load_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    device_map: str | dict[str, str | int] | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    native_kernels: bool = True,
    narrow: bool = True,
    check: bool = True,
    quantize: str = "none",
) -> Model:
    """The model at ``path`` by the fastest way that computes what transformers' own module does.

    With a ``device_map`` it is accelerate that places the layers, and ``device`` has no say. ``narrow``: on a
    CPU keep weights in 16 bits where that loses nothing. ``check``: refuse a model that over our cache
    deviates from itself. ``quantize``: to int8 or int4, or ``none``.
    """
    if quantize != "none" and (is_gguf(path) or device_map is not None or not narrow or not native_kernels):
        raise ModelLoadError(
            f"quantize {quantize} needs a float checkpoint, dtype auto, native_kernels and no device_map: "
            f"{path} cannot be quantised"
        )
    if is_gguf(path):
        return _load_gguf(path, dtype, device, device_map is None, native_kernels, narrow)
    check_folder(path, allow_pickle=allow_pickle)
    path = _expanded(path)
    if device_map is None and not trust_remote_code:
        llama = _by_name(path, dtype, device, allow_pickle, native_kernels, narrow, quantize)
        if llama is not None and (quantize == "none" or llama.is_quantised):
            return llama
    if quantize != "none":
        raise ModelLoadError(
            f"{path} cannot be quantised: that needs a Llama-shaped model on a CPU, in float32, and a C "
            "compiler"
        )
    model = load_decoder(
        path,
        dtype,
        device,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        native_kernels=native_kernels,
        narrow=narrow,
    )
    # Families of encoder-decoder models are known by name; what they share with generate() is tested.
    if not isinstance(model, DecoderModel):
        return model
    if check:
        self_check(model)
    if model.is_quantised and device_map is None and is_llama(model.module):
        return take_llama(model.module, model.facts, native_kernels, probe_logits(model)) or model
    return model


def _load_gguf(
    path: str, dtype: torch.dtype, device: torch.device, is_whole: bool, native_kernels: bool, narrow: bool
) -> Model:
    """``narrow``: on a CPU weights stay quantised; else they are dequantised to ``dtype``."""
    if not is_whole:
        raise ModelLoadError(f"{path} is a GGUF file, which is not spread over devices: leave out device_map")
    try:
        checkpoint = open_gguf(path)
        skeleton = _skeleton(checkpoint.config, dtype)
        check_complete(skeleton, checkpoint)
        facts = ModelFacts(checkpoint.config, generation_config(checkpoint), count(skeleton), dtype, device)
        llama = load_llama(skeleton, checkpoint, facts, native_kernels, narrow)
    except ModelLoadError:
        raise
    except GgufError as error:
        raise ModelLoadError(str(error)) from error
    except Exception as error:  # transformers refuses sizes in many ways
        raise ModelLoadError(explain(path, error)) from error
    if llama is None:
        raise ModelLoadError(f"{path} cannot be served: its logits are not those of transformers' model")
    checkpoint.release()
    return llama


def _skeleton(config: Any, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return module.eval().requires_grad_(False)


def _by_name(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    allow_pickle: bool,
    native_kernels: bool,
    narrow: bool,
    quantize: str,
) -> Llama | None:
    """A Llama-shaped model straight from its files; None for any other, and for what has to be explained."""
    try:
        config = AutoConfig.from_pretrained(path)
        if config.model_type not in FAMILIES or getattr(config, "quantization_config", None):
            return None
        skeleton = _skeleton(config, dtype)
        checkpoint = Checkpoint.find(path, allow_pickle)
        if checkpoint is None or not is_llama(skeleton):
            return None
        if quantize != "none":
            checkpoint = QuantisedCheckpoint(checkpoint, LAYER_TYPES[quantize])
        facts = ModelFacts(config, _generation_config(path, skeleton), count(skeleton), dtype, device)
        return load_llama(skeleton, checkpoint, facts, native_kernels, narrow)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        logger.info("%s is left to transformers to load: %s", path, error)
        return None


def _generation_config(path: str, skeleton: Any) -> Any:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return skeleton.generation_config


def load_decoder(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    device_map: str | dict[str, str | int] | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    native_kernels: bool = True,
    narrow: bool = True,
) -> DecoderModel | EncoderDecoderModel:
    """The model at ``path`` by transformers' module, with linear layers of our own on a CPU."""
    module = load_causal_model(
        path,
        dtype,
        device,
        ATTENTION_NAME,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    device = module.get_input_embeddings().weight.device
    facts = ModelFacts(module.config, module.generation_config, count(module), dtype, device)
    if device.type == "cpu" and dtype == torch.float32 and device_map is None:
        replace_linears(module, linear_library() if native_kernels else None, narrow)
    served = EncoderDecoderModel if module.config.is_encoder_decoder else DecoderModel
    return served(module, facts)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _expanded(path: str) -> str:
    return str(Path(path).expanduser()) if path.startswith("~") else path


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
    if is_gguf(path):
        try:
            return load_module(open_gguf(path), dtype, device, attention)
        except GgufError as error:
            raise ModelLoadError(str(error)) from error
    check_folder(path, allow_pickle=allow_pickle)
    path = _expanded(path)
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
