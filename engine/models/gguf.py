"""GGUF files as checkpoints: transformers' config and names for what llama.cpp's have in them."""

import ctypes
import math
import mmap
from collections.abc import Iterable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from truedraft.engine.gguf_file import GgufError, GgufFile, TensorPlace, read_gguf
from truedraft.engine.models.weights import Checkpoint
from truedraft.engine.native.library import load_library
from truedraft.engine.native.quantised import TYPES, Blocks

# Architectures, by their names in both worlds.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
GEMMA = ("gemma2", "gemma3")
# The layers of those Gemmas whose scores are scaled by hidden size / heads; in the others by the head size.
SCALED_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}
# Gemma 3's distance between layers without a window, and the others' rotary base, where a file has none.
GEMMA3_PATTERN, GEMMA3_LOCAL_BASE = 6, 10000.0
# Keys that a file must have, and others; without the architecture in front.
NEEDED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
OPTIONAL = {"attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim"}
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Tokens that end a turn wherever they are control tokens, as in llama.cpp.
END_OF_TURN = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"}
CONTROL = 3
# Tensors that are no parameters: divisors of the rotary frequencies.
ROTARY_FACTORS = "rope_freqs.weight"
PLAIN_TYPES = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 30: np.dtype("<u2")}


class GgufCheckpoint(Checkpoint):
    """``files`` has the names that transformers' module has."""

    def __init__(self, file: GgufFile, config: Any, names: dict[str, str]) -> None:
        super().__init__(dict.fromkeys(names, file.path))
        self.file = file
        self.config = config
        self.names = names
        self._library: ctypes.CDLL | None = load_library()

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: self._read(name) for name in names}

    def blocks(self, name: str) -> Blocks | None:
        place = self.file.tensors[self.names[name]]
        if place.type not in TYPES.values():
            return None
        return Blocks(place.type, self._data(place), place.shape[-1], self._order(name))

    def release(self) -> None:
        """Gives back the pages that were read; embeddings are read again as they are looked up."""
        self.file.data.madvise(mmap.MADV_DONTNEED)

    def rotary_factors(self) -> torch.Tensor | None:
        place = self.file.tensors.get(ROTARY_FACTORS)
        return None if place is None else self._plain(place)

    def _read(self, name: str) -> torch.Tensor:
        blocks = self.blocks(name)
        if blocks is not None and self._library is not None:
            return blocks.dequantise(self._library)
        place = self.file.tensors[self.names[name]]
        tensor = self._plain(place)
        order = self._order(name)
        if self.file.architecture in GEMMA and name.endswith("norm.weight"):
            tensor = tensor - 1  # llama.cpp multiplies by what is stored, transformers by one more
        return tensor if order is None else tensor[torch.from_numpy(order)]

    def _plain(self, place: TensorPlace) -> torch.Tensor:
        data = self._data(place)
        if place.type == GGMLQuantizationType.BF16:
            # torch has no numpy of this type.
            return torch.from_numpy(data.copy()).view(torch.bfloat16).view(place.shape)
        if place.type in PLAIN_TYPES:
            return torch.from_numpy(data.copy().view(PLAIN_TYPES[place.type])).view(place.shape)
        return torch.from_numpy(gguf.dequantize(data, GGMLQuantizationType(place.type))).view(place.shape)

    def _data(self, place: TensorPlace) -> npt.NDArray[np.uint8]:
        """[rows, bytes of a row] of the mapped file."""
        size = _num_bytes(place)
        data = np.frombuffer(self.file.data, np.uint8, size, place.offset)
        return data.reshape(-1, size // math.prod(place.shape[:-1]))

    def _order(self, name: str) -> npt.NDArray[np.int64] | None:
        """llama.cpp turns pairs of neighbours where transformers turns halves; it moves the rows of its files
        for that, but only of this architecture."""
        if self.file.architecture != "llama" or not (".q_proj." in name or ".k_proj." in name):
            return None
        config = self.config
        is_query = ".q_proj." in name
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        rows = self.file.tensors[self.names[name]].shape[0]
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def open_gguf(path: str) -> GgufCheckpoint:
    """``GgufError`` for what cannot be served."""
    file = read_gguf(path)
    if file.architecture not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise GgufError(
            f"{path} has the architecture {file.architecture}; of GGUF files {known} are supported"
        )
    for name, place in file.tensors.items():
        _check_place(file, name, place)
    config = _config(file)
    return GgufCheckpoint(file, config, _names(file, config))


def generation_config(checkpoint: GgufCheckpoint) -> Any:
    metadata = checkpoint.file.metadata
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ids = {int(token_id) for token_id in named if token_id is not None}
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    kinds_of = enumerate(zip(tokens, kinds, strict=False))
    ids |= {index for index, (token, kind) in kinds_of if kind == CONTROL and token in END_OF_TURN}
    sampling = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in SAMPLING.items()}
    given = {name: value for name, value in sampling.items() if value is not None}
    return GenerationConfig(eos_token_id=sorted(ids) or None, **given)


def check_complete(module: Any, checkpoint: GgufCheckpoint) -> None:
    """Every parameter is there, and of the shape that it must have."""
    path, tied = checkpoint.file.path, checkpoint.config.tie_word_embeddings
    for name, parameter in module.named_parameters():
        if name not in checkpoint.names:
            if tied and name == "lm_head.weight":
                continue
            raise GgufError(f"{path} lacks weights of the model: {name}")
        shape = checkpoint.file.tensors[checkpoint.names[name]].shape
        if shape != tuple(parameter.shape):
            raise GgufError(f"{path} is damaged: {name} has the shape {shape}, not {tuple(parameter.shape)}")


def _num_bytes(place: TensorPlace) -> int:
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType(place.type)]
    return math.prod(place.shape) // int(block) * int(size)


def _check_place(file: GgufFile, name: str, place: TensorPlace) -> None:
    try:
        kind = GGMLQuantizationType(place.type)
    except ValueError as error:
        raise GgufError(f"{file.path} has weights of the unknown type {place.type} ({name})") from error
    if kind.name not in TYPES and place.type not in PLAIN_TYPES:
        supported = ", ".join([*TYPES, "F32", "F16", "BF16"])
        raise GgufError(f"{file.path} has weights of type {kind.name} ({name}); supported are {supported}")
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if place.shape[-1] % block:
        raise GgufError(f"{file.path} is damaged: rows of {name} are no whole blocks")
    if place.offset + _num_bytes(place) > len(file.data):
        raise GgufError(f"{file.path} is cut off: {name} lies past its end")


def _config(file: GgufFile) -> Any:
    architecture = file.architecture
    found: dict[str, Any] = {}
    for key, name in (NEEDED | OPTIONAL).items():
        value = file.metadata.get(f"{architecture}.{key}")
        if value is None and key in NEEDED:
            raise GgufError(f"{file.path} does not say its model's {architecture}.{key}")
        if value is not None:
            if not isinstance(value, int | float) or value <= 0:
                raise GgufError(f"{file.path} has {architecture}.{key} {value}, which is not supported")
            found[name] = value
    if "token_embd.weight" not in file.tensors:
        raise GgufError(f"{file.path} lacks weights of the model: token_embd.weight")
    heads, kv_heads = found["num_attention_heads"], found.get("num_key_value_heads")
    embeddings = file.tensors["token_embd.weight"].shape
    if found["num_hidden_layers"] > len(file.tensors) or embeddings[1:] != (found["hidden_size"],):
        raise GgufError(f"{file.path} is damaged: its sizes are not those of its weights")
    found.setdefault("head_dim", found["hidden_size"] // heads)
    if heads % (kv_heads or heads) or found["head_dim"] < 2:
        raise GgufError(f"{file.path} is damaged: {heads} heads cannot share {kv_heads}")
    found["vocab_size"] = embeddings[0]
    found["tie_word_embeddings"] = "output.weight" not in file.tensors
    found["rope_parameters"] = _rope(file)
    for name in ("bos", "eos"):
        found[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    found["pad_token_id"] = None  # nothing is padded
    model_type = MODEL_TYPES[architecture]
    if architecture == "phi3":
        found |= _phi3(file, found)
    if architecture in GEMMA:
        found |= _gemma(file, found)
    if model_type == "llama":
        found["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        window = file.metadata.get("llama.attention.sliding_window")
        if window:
            model_type, found["sliding_window"] = "mistral", window
    return AutoConfig.for_model(model_type, **found)


def _phi3(file: GgufFile, found: dict[str, Any]) -> dict[str, Any]:
    metadata, rope = file.metadata, dict(found["rope_parameters"])
    more = {"rope_parameters": rope, "sliding_window": metadata.get("phi3.attention.sliding_window") or None}
    size = metadata.get("phi3.rope.dimension_count", found["head_dim"])
    rope["partial_rotary_factor"] = size / found["head_dim"]
    factors = {length: file.tensors.get(f"rope_factors_{length}.weight") for length in ("long", "short")}
    if all(factors.values()):
        original = metadata.get("phi3.rope.scaling.original_context_length")
        if not isinstance(original, int) or original < 2:
            raise GgufError(f"{file.path} does not say its phi3.rope.scaling.original_context_length")
        stretch = max(1.0, found["max_position_embeddings"] / original)
        rope |= {f"{length}_factor": _floats(file, place) for length, place in factors.items() if place}
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        rope["attention_factor"] = math.sqrt(1 + math.log(stretch) / math.log(original))
        # Beyond it every position rotates by other angles, those in the cache included.
        more["max_position_embeddings"] = min(original, found["max_position_embeddings"])
    return more


def _gemma(file: GgufFile, found: dict[str, Any]) -> dict[str, Any]:
    architecture, layers = file.architecture, found["num_hidden_layers"]

    def says(key: str) -> Any:
        return file.metadata.get(f"{architecture}.{key}")

    window = says("attention.sliding_window")
    if not window:
        raise GgufError(f"{file.path} does not say its model's {architecture}.attention.sliding_window")
    scalar = found["head_dim"]
    if layers == SCALED_BY_HIDDEN_SIZE[architecture]:
        scalar = found["hidden_size"] // found["num_attention_heads"]
    more = {"sliding_window": window, "query_pre_attn_scalar": scalar}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := says(name)) is not None:
            more[name] = cap
    if architecture == "gemma3":
        pattern = says("attention.sliding_window_pattern") or GEMMA3_PATTERN
        more["layer_types"] = [
            "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)
        ]
        local = {"rope_type": "default", "rope_theta": says("rope.freq_base_swa") or GEMMA3_LOCAL_BASE}
        more["rope_parameters"] = {
            "full_attention": found["rope_parameters"],
            "sliding_attention": local,
        }
    return more


def _floats(file: GgufFile, place: TensorPlace) -> list[float]:
    if PLAIN_TYPES.get(place.type) != np.dtype("<f4"):
        raise GgufError(f"{file.path} has rotary factors of another type than F32")
    numbers: list[float] = np.frombuffer(file.data, "<f4", math.prod(place.shape), place.offset).tolist()
    return numbers


def _rope(file: GgufFile) -> dict[str, Any]:
    metadata, prefix = file.metadata, f"{file.architecture}.rope"
    rope: dict[str, Any] = {
        "rope_theta": metadata.get(f"{prefix}.freq_base", 10000.0),
        "rope_type": "default",
    }
    kind = metadata.get(f"{prefix}.scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise GgufError(f"{file.path} scales its positions by {kind}, which is not supported")
    rope |= {"rope_type": kind, "factor": metadata.get(f"{prefix}.scaling.factor", 1.0)}
    if kind == "yarn":
        original = metadata.get(f"{prefix}.scaling.original_context_length")
        if original is None:
            raise GgufError(f"{file.path} does not say its {prefix}.scaling.original_context_length")
        rope["original_max_position_embeddings"] = original
    return rope


def _names(file: GgufFile, config: Any) -> dict[str, str]:
    """The file's name of each of transformers'."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    (architecture,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    table = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    found = {}
    for name, _ in module.named_parameters():
        base, _, suffix = name.rpartition(".")
        theirs = table.get_name(base)
        if theirs is not None and f"{theirs}.{suffix}" in file.tensors:
            found[name] = f"{theirs}.{suffix}"
    return found
