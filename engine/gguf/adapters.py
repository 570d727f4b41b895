"""Reads LoRA adapters in GGUF files, as llama.cpp's ``convert_lora_to_gguf`` writes them."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from truedraft.engine.formats.gguf_file import read_gguf
from truedraft.engine.gguf.config import MODEL_TYPES
from truedraft.engine.gguf.hybrids import is_paired, rows_of_halves
from truedraft.engine.gguf.places import check_place, num_bytes
from truedraft.engine.layers.adapters import Place

TENSOR = re.compile(r"(?P<module>.+)\.weight\.lora_(?P<kind>[ab])")
# The rows of other modules may lie in another order in files.
AS_THEY_ARE = re.compile(r"(.+\.(self_attn|mlp|feed_forward|shared_mlp)\..+|lm_head)")
LAYER = re.compile(r"model\.layers\.(\d+)\.")


class RefusedError(Exception):
    """Says why an adapter cannot be loaded: goes on from its name."""


def read_gguf_adapter(
    path: str, model: Any, places: Mapping[str, Sequence[Place]], most_bytes: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
    """Returns what PEFT's config would say, the tensors by PEFT's names, and the digest of the file, which is
    not read if it is longer than ``most_bytes``. ``model`` is the config of the model with these modules."""
    where = Path(path).expanduser()
    if not where.is_file():
        raise RefusedError(f"there is no file {where}")
    if where.stat().st_size > most_bytes:
        raise RefusedError(f"{where} is longer than an adapter of this model can be: {most_bytes} bytes")
    file = read_gguf(str(where))
    if len(file.parts) > 1:
        raise RefusedError(f"{where} is a file in parts, as no converter writes adapters")
    alpha = _alpha(file.metadata)
    if (made_for := MODEL_TYPES.get(file.architecture)) != model.model_type:
        words = "an unknown architecture" if made_for is None else f"models of the type {made_for}"
        raise RefusedError(
            f"it is for {words} ({file.architecture}), and this model is of the type {model.model_type}"
        )
    names = _names(file.architecture, places)
    tensors, ranks, alphas = {}, {}, {}
    for name, place in file.tensors.items():
        found = TENSOR.fullmatch(name)
        if found is None or (module := names.get(found["module"])) is None:
            raise RefusedError(f"it adapts {name}, and only attention, MLPs and the output layer are served")
        check_place(name, place)
        data = np.frombuffer(place.data, np.uint8, num_bytes(place), place.offset)
        rows = data.reshape(math.prod(place.shape[:-1]), -1)
        matrix = torch.from_numpy(gguf.dequantize(rows, GGMLQuantizationType(place.type)).astype(np.float32))
        matrix = matrix.reshape(place.shape)
        if found["kind"] == "b":
            # llama.cpp scales by the rank of each pair, and not at all where alpha is 0.
            ranks[module], alphas[module] = matrix.shape[-1], alpha or float(matrix.shape[-1])
            # A matrix of another size is refused by whoever compares all sizes.
            if is_paired(file.architecture, module) and len(matrix) == places[module][0].out_features:
                matrix = matrix[torch.from_numpy(rows_of_halves(module, len(matrix), model))]
        tensors[f"{module}.lora_{found['kind'].upper()}.weight"] = matrix
    config = {
        "peft_type": "LORA",
        "r": max(ranks.values(), default=1),
        "lora_alpha": 1.0,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "base_model_name_or_path": file.metadata.get("general.base_model.0.name"),
    }
    return config, tensors, hashlib.sha256(file.parts[0]).hexdigest()


def _alpha(metadata: Mapping[str, Any]) -> float:
    """Returns the adapter's alpha, once its kind has been checked."""
    kinds = metadata.get("general.type", "model"), metadata.get("adapter.type")
    if kinds != ("adapter", "lora"):
        raise RefusedError(f"its file is of the type {kinds[0]} ({kinds[1]}), and no LoRA adapter")
    if any(key.startswith("adapter.alora.") for key in metadata):
        raise RefusedError("it begins at a text of its own (aLoRA), which is not served")
    alpha = metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise RefusedError(f"its adapter.lora.alpha is {alpha!r}, where a finite number is needed")
    return float(alpha)


def _names(architecture: str, places: Mapping[str, Sequence[Place]]) -> dict[str, str]:
    """Returns transformers' names of the modules that files of this architecture name."""
    (kind,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    numbers = [int(found[1]) for module in places if (found := LAYER.match(module))]
    table = gguf.get_tensor_name_map(kind, max(numbers, default=0) + 1)
    modules = [module for module in places if AS_THEY_ARE.fullmatch(module)]
    return {theirs: module for module in modules if (theirs := table.get_name(module)) is not None}
