"""Names what a model's tokens depend on, weights, arithmetic and kernels, and makes a fingerprint of it."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.config import EngineConfig
from truedraft.engine.cuda.blocks import PackedBlocks
from truedraft.engine.cuda.quantised import PackedEmbeddings, PackedLinear
from truedraft.engine.cuda.scaled import ScaledLinear
from truedraft.engine.families.linear import LinearModule, ModuleLinear
from truedraft.engine.formats.gguf_file import is_gguf, part_names
from truedraft.engine.hub.folders import WEIGHTS
from truedraft.engine.layers.linear import DenseEmbeddings, OneDnnLinear, TorchLinear
from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.native.linear import WEIGHT_TYPES, NativeLinear
from truedraft.engine.native.quantised import QuantisedEmbeddings, QuantisedLinear
from truedraft.engine.native.scaled_bytes import BYTE_TYPES, BytesLinear
from truedraft.engine.native.shared import COLUMNS

# Files up to this size are read whole, others at this many places: any tensor of more than a thousandth of
# its file is noticed if it changes. Loading has just read them.
WHOLE_BYTES, NUM_SAMPLES, SAMPLE_BYTES = 1 << 26, 1024, 1 << 12
TYPE_NAMES = {number: name for name, number in TYPES.items()}
FLOAT_NAMES = {
    number: str(dtype).removeprefix("torch.") for dtype, number in (WEIGHT_TYPES | BYTE_TYPES).items()
}


def weight_types(model: Model) -> list[str]:
    """Returns the types of linear layers and embeddings, the one with the most weights first."""
    counted: Counter[str] = Counter()
    for part in _parts(model):
        for name, number in _types(part):
            counted[name] += number
    names = [name for name, _ in counted.most_common()]
    # The quantiser's method says more about transformers' layers than the type that holds their numbers.
    method = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
    return list(
        dict.fromkeys(str(getattr(method, "value", method)) if "int" in name else name for name in names)
    )


def weight_bytes(model: Model) -> int:
    """Returns the bytes of linear layers and embeddings, once those of a file are read."""
    return sum(map(_num_bytes, _parts(model)))


def fingerprint(model: Model, config: EngineConfig) -> str:
    """Returns a text that changes with whatever may change the model's tokens, except versions of
    libraries."""
    # The config is described as it is served: of two sets of rotary factors it has the chosen one.
    described = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    has_native_linears = any(isinstance(part, NativeLinear) for part in _parts(model))
    named = [
        str(model.arithmetic),
        str(model.dtype),
        str(model.cache_dtype),
        *weight_types(model),
        model.way,
        str(has_native_linears),
    ]
    return fingerprint_of(named, described, model.device, config)


def fingerprint_of(
    named: list[str], described: dict[str, Any], device: torch.device, config: EngineConfig
) -> str:
    """Returns the fingerprint of a model whose config is ``described`` and whose way of computing is
    ``named``."""
    assert config.target is not None
    hardware = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    # Our kernels also draw the tokens.
    named = [
        *named,
        device.type,
        hardware,
        str(config.native_kernels),
        json.dumps(described, sort_keys=True, default=str),
    ]
    digest = hashlib.sha256("\n".join(named).encode())
    for file in weight_files(config.target, config.allow_pickle):
        digest.update(_file_digest(file))
    return digest.hexdigest()


def _file_digest(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            digest.update(file.read())
            return digest.digest()
        for number in range(NUM_SAMPLES):
            file.seek(number * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def weight_files(path: str, allow_pickle: bool) -> list[Path]:
    """Returns the files of weights at a path, which is one of them or their folder."""
    if is_gguf(path):
        return [Path(part).expanduser() for part in part_names(path)]
    if Path(path).expanduser().is_file():
        return [Path(path).expanduser()]
    checkpoint = Checkpoint.find(str(Path(path).expanduser()) if path.startswith("~") else path, allow_pickle)
    if checkpoint is not None:
        return sorted(map(Path, set(checkpoint.files.values())))
    return sorted(file for pattern in WEIGHTS for file in Path(path).expanduser().glob(pattern))


def _parts(model: Any) -> Iterator[Any]:
    """Yields the parts of a model that have weights, except norms."""
    if isinstance(model, FusedDecoder):
        yield from (model.weights.embeddings, *model.weights.linears)
        return
    for module in model.module.modules():
        if isinstance(module, LinearModule):
            yield module.linear
    yield from (tensor for tensor in _tensors(model.module) if tensor.dim() > 1)


def _types(part: Any) -> Iterator[tuple[str, int]]:
    """Yields names of types, and the number of weights of each."""
    match part:
        case QuantisedLinear():
            yield from ((TYPE_NAMES[panel.type], COLUMNS * part.struct.in_features) for panel in part.panels)
        case NativeLinear():
            yield FLOAT_NAMES[part.struct.type], part.struct.in_features * part.struct.out_features
        case QuantisedEmbeddings():
            yield TYPE_NAMES[part.blocks.type], len(part.blocks.data) * part.blocks.in_features
        case PackedLinear():
            yield from (found for blocks in part.parts for found in _types(blocks))
        case ScaledLinear():
            yield from _types(part.values)
        case PackedEmbeddings():
            yield from _types(part.packed)
        case PackedBlocks():
            yield TYPE_NAMES[part.type], part.rows * part.in_features
        case OneDnnLinear():
            yield "float32", part.packed_weight.numel()
        case ModuleLinear():
            yield from (
                found for module in part.modules for tensor in _tensors(module) for found in _types(tensor)
            )
        case TorchLinear() | DenseEmbeddings():
            yield from _types(part.weight)
        case torch.Tensor():
            yield str(part.dtype).removeprefix("torch."), part.numel()


def _num_bytes(part: Any) -> int:
    match part:
        case QuantisedLinear():
            return sum(packed.nbytes for packed in part.packed)
        case BytesLinear():
            return int(part.weights.nbytes) + int(part.scales.nbytes)
        case NativeLinear():
            return int(part.weights.nbytes)
        case QuantisedEmbeddings():
            return part.blocks.data.nbytes
        case PackedLinear():
            return sum(packed.num_bytes for packed in part.parts)
        case PackedEmbeddings():
            return part.packed.num_bytes
        case OneDnnLinear():
            return int(4 * part.packed_weight.numel())
        case ModuleLinear():
            return sum(int(tensor.nbytes) for module in part.modules for tensor in _tensors(module))
        case TorchLinear() | DenseEmbeddings():
            return part.weight.nbytes
        case torch.Tensor():
            return int(part.nbytes)
    return 0


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
