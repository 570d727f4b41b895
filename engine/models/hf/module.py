"""Lets transformers load its own module: where our layers do not serve, and as the reference of checks."""

from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from truedraft.engine.checkpoints.account import check_loaded, untie
from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.eight_bit import compact_linears
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.checkpoints.quantization import (
    check_method,
    dequantise_for_cpu,
)
from truedraft.engine.checkpoints.stacks import stored_in, stored_tensors
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.families.fit import (
    corrected,
    with_stacks,
)
from truedraft.engine.families.head_order import to_grouped
from truedraft.engine.families.linear import replace_linears
from truedraft.engine.formats.gguf_file import is_gguf
from truedraft.engine.gguf.checkpoint import check_complete, generation_config
from truedraft.engine.layers.attention import ATTENTION_NAME
from truedraft.engine.layers.linear import TorchLinears
from truedraft.engine.models.architecture import (
    Architecture,
    plain_skeleton,
)
from truedraft.engine.models.fused import count
from truedraft.engine.models.hf.decoder_only import DecoderModel
from truedraft.engine.models.hf.encoder_decoder import EncoderDecoderModel
from truedraft.engine.models.load_errors import stage
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.sources import find, find_quantised, open_gguf_file
from truedraft.engine.native.linear import linear_library
from truedraft.engine.native.linears import NativeLinears


def load_decoder(found: Architecture | str, options: LoadOptions) -> DecoderModel | EncoderDecoderModel:
    """Loads the model by transformers' module, with our linear layers on a CPU."""
    found = find(found, options) if isinstance(found, str) else found
    module = load_module(found, options, ATTENTION_NAME)
    device = module.get_input_embeddings().weight.device
    facts = ModelFacts(module.config, module.generation_config, count(module), options.dtype, device)
    if device.type == "cpu" and options.dtype == torch.float32 and options.device_map is None:
        library = linear_library() if options.native_kernels else None
        compact = options.compact_weights
        replace_linears(module, TorchLinears() if library is None else NativeLinears(library, compact))
    served = EncoderDecoderModel if found.is_encoder_decoder else DecoderModel
    return served(module, facts)


def load_causal_model(path: str, options: LoadOptions, attention: str) -> Any:
    """Loads the transformers model as it is, with the attention implementation of that name."""
    if is_gguf(path):
        with stage(path, ""):
            file = open_gguf_file(path, options)
            check_complete(plain_skeleton(file.config, options.dtype), file)
            return _module_of(file, file.config, generation_config(file), options, attention)
    found = find(path, options)
    if (quantised := find_quantised(found, options)) is not None:
        checkpoint, config = quantised
        return _module_of(checkpoint, config, found.generation_config(), options, attention)
    return load_module(found, options, attention)


def _module_of(
    checkpoint: Checkpoint, config: Any, generation: Any, options: LoadOptions, attention: str
) -> Any:
    """Returns transformers' module with the weights that ``checkpoint`` stands for."""
    with init_empty_weights(include_buffers=False):
        module: Any = AutoModelForCausalLM.from_config(
            config, dtype=options.dtype, attn_implementation=attention
        )
    untie(module, checkpoint)
    checkpoint = with_stacks(checkpoint, module)
    for name in [name for name in stored_tensors(module) if name in checkpoint.files]:
        (tensor,) = checkpoint.read([name]).values()
        tensor = to_grouped(config, name, tensor) if checkpoint.is_tiled else tensor
        tensor = tensor.to(stored_in(name, options.dtype))
        module.load_state_dict({name: tensor}, strict=False, assign=True)
    module.tie_weights()
    if (factors := checkpoint.rotary_factors()) is not None:
        module.model.rotary_emb.inv_freq /= factors
    module.generation_config = generation
    return corrected(module.eval().requires_grad_(False).to(options.device))


def load_module(found: Architecture, options: LoadOptions, attention: str) -> Any:
    path = found.path
    own_code = {"trust_remote_code": True} if found.has_own_code else {}
    quantization = getattr(found.config, "quantization_config", None)
    with stage(path, "weights"):
        if quantization and options.is_on_cpu:
            check_method(quantization)
            dequantise_for_cpu(quantization, Checkpoint.find(path, options.allow_pickle))
        model, loaded = found.module_class.from_pretrained(
            path,
            config=found.config,
            dtype=options.dtype,
            attn_implementation=found.attention(attention),
            use_safetensors=None if options.allow_pickle else True,
            device_map=options.device_map,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # The check below refuses them, with both sizes.
            **own_code,
        )
        check_loaded(path, loaded, options.allow_pickle)
    model.generation_config = found.generation_config()
    corrected(model.eval().requires_grad_(False))
    if options.device_map is not None:
        _refuse_offload(path, getattr(model, "hf_device_map", {}))
        return model
    if hasattr(model, "hf_quantizer"):
        return model
    if quantization:  # These were dequantised; the other weights have the checkpoint's type.
        model.to(options.dtype)
        if options.compact_weights and options.is_on_cpu:
            compact_linears(model, Checkpoint.find(path, options.allow_pickle))
    return model.to(options.device)


def _refuse_offload(path: str, placement: dict[str, Any]) -> None:
    """Refuses offloaded layers, which would be copied to the device in every step."""
    places = {str(place) for place in placement.values()}
    if "disk" in places or ("cpu" in places and len(places) > 1):
        raise ModelLoadError(
            f"{path} does not fit on the devices at hand: accelerate would leave a part of it on "
            f"{'disk' if 'disk' in places else 'the CPU'}; use a smaller dtype or model, or more devices"
        )
