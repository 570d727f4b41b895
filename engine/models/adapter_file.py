"""Reads a LoRA adapter: PEFT's ``adapter_config.json`` and ``adapter_model.safetensors`` in a folder, or a
GGUF file that llama.cpp's converter has made of these.

Whatever of it changes the output is honoured, or refused in a sentence that names it.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.formats.gguf_file import GgufError
from truedraft.engine.gguf.adapters import RefusedError, read_gguf_adapter
from truedraft.engine.layers.adapters import LowRank, Place

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# No config is longer.
MOST_CONFIG_BYTES = 1 << 20
# Neither are the names and shapes of an adapter's tensors.
MOST_HEADER_BYTES = 8 << 20
# A number in the config that is larger than a float can be is refused, as one that is not finite is.
LARGEST = sys.float_info.max
# What PEFT calls a model inside its own wrapper, and families with pictures their text part.
WRAPPER = "base_model.model."
TEXT_PART = re.compile(r"^(model\.)?language_model\.(?!lm_head)(model\.)?")
TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>[AB])(\.default)?\.weight")
LAYER = re.compile(r"\.layers\.(\d+)\.")
# Names of modules that patterns may have: other regular expressions are refused.
PLAIN_NAME = re.compile(r"[\w.]+")

HONOURED = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("layers_to_transform", "layers_pattern", "exclude_modules", "base_model_name_or_path", "bias"),
    "init_lora_weights",
}
# It says nothing of what an adapter computes how that was trained or begun.
WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out"),
    *("megatron_core", "eva_config", "corda_config", "lora_ga_config", "peft_version", "qalora_group_size"),
    "runtime_config",
}
# Other ways to begin, such as PiSSA and LoftQ, change the weights of the base as well.
BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
# Words for what is refused, where its name does not say enough.
WORDS = {
    "use_dora": "use_dora (DoRA)",
    "modules_to_save": "modules_to_save (whole modules in place of the model's)",
    "lora_bias": "lora_bias (biases)",
    "target_parameters": "target_parameters (parameters of experts)",
    "trainable_token_indices": "trainable_token_indices (embeddings)",
}


@dataclass(frozen=True)
class AdapterFile:
    """Is a checked adapter: ``modules`` has what it adds to the outputs of each module, by its name."""

    digest: str
    rank: int
    base: str
    modules: dict[str, LowRank]


def read_adapter(
    name: str, path: str, model: Any, places: Mapping[str, Sequence[Place]], max_rank: int
) -> AdapterFile:
    """Reads the adapter at ``path`` for a model that has these modules, and ``model`` as its config; raises
    ``ModelLoadError``."""
    most = _most_bytes(places, max_rank)
    try:
        if path.endswith(".gguf"):
            config, tensors, digest = read_gguf_adapter(path, model, places, most)
            reader = _Reader(config, places, max_rank)
        else:
            folder = Path(path).expanduser()
            config_bytes = _read_config(folder)
            reader = _Reader(_config_of(config_bytes), places, max_rank)
            weights = _read_weights(folder, most)
            tensors = _tensors_of(weights)
            digest = hashlib.sha256(b"%d/" % len(config_bytes) + config_bytes + weights).hexdigest()
        modules = reader.modules(tensors)
    except (RefusedError, GgufError) as error:
        raise ModelLoadError(f"the LoRA adapter {name} cannot be loaded: {error}") from None
    except (OSError, RuntimeError) as error:  # a folder that nobody may look into, or no such home
        said = getattr(error, "strerror", None) or error
        raise ModelLoadError(f"the LoRA adapter {name} cannot be loaded: {said}") from None
    except MemoryError:
        raise ModelLoadError(f"the LoRA adapter {name} cannot be loaded: no memory is left") from None
    rank = max(len(low.down) for low in modules.values())
    return AdapterFile(digest, rank, reader.base, modules)


def _read_config(folder: Path) -> bytes:
    if not folder.is_dir():
        raise RefusedError(f"there is no folder {folder}")
    if not (folder / CONFIG).is_file():
        raise RefusedError(f"{folder} has no {CONFIG}, so it is no adapter of PEFT's")
    if not (folder / WEIGHTS).is_file():
        raise RefusedError(f"{folder} has no {WEIGHTS}; a pickle is not read: save it as safetensors")
    with (folder / CONFIG).open("rb") as file:
        config = file.read(MOST_CONFIG_BYTES + 1)
    if len(config) > MOST_CONFIG_BYTES:
        raise RefusedError(f"its {CONFIG} is longer than {MOST_CONFIG_BYTES} bytes")
    return config


def _read_weights(folder: Path, most: int) -> bytes:
    """Reads the tensors, unless there are more than ``most`` bytes, which no adapter of this model has."""
    with (folder / WEIGHTS).open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise RefusedError(f"its {WEIGHTS} is longer than an adapter of this model can be: {most} bytes")
    return data


def _most_bytes(places: Mapping[str, Sequence[Place]], max_rank: int) -> int:
    """Returns the most bytes that matrices of 64 bits for all modules take, with their header."""
    sizes = sum(place.in_features + place.out_features for own in places.values() for place in own)
    return 8 * max_rank * sizes + MOST_HEADER_BYTES


def _config_of(data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        raise RefusedError(f"its {CONFIG} is no JSON") from None
    if not isinstance(config, dict):
        raise RefusedError(f"its {CONFIG} is no object")
    return config


def _tensors_of(data: bytes) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise RefusedError(f"its {WEIGHTS} is damaged or cut off: {error}") from None


class _Reader:
    """Checks what a config says, and then what the tensors are."""

    def __init__(self, config: dict[str, Any], places: Mapping[str, Sequence[Place]], max_rank: int) -> None:
        self.config, self.places, self.max_rank = config, places, max_rank
        if config.get("peft_type") != "LORA":
            raise RefusedError(f"its peft_type is {config.get('peft_type')!r}, and only 'LORA' is served")
        if config.get("bias", "none") != "none":
            raise RefusedError(f"it has trained biases (bias: {config['bias']!r}), which are not served")
        begun = config.get("init_lora_weights")
        if begun not in BEGINNINGS:
            raise RefusedError(
                f"init_lora_weights is {begun!r}, which has changed its base, too: save it with "
                "path_initial_model_for_weight_conversion"
            )
        if config.get("layers_pattern") not in (None, "layers", [], ["layers"]):
            raise RefusedError(f"its layers_pattern is {config['layers_pattern']!r}, not 'layers'")
        for key, value in config.items():
            if key not in HONOURED | WITHOUT_EFFECT and value:
                raise RefusedError(
                    f"it uses {WORDS.get(key, key)}, which is not served: merge it into its base"
                )
        self.base = str(config.get("base_model_name_or_path") or "")
        self.rank, self.alpha = self._rank("r", config.get("r")), self._number("lora_alpha", "lora_alpha")
        self.ranks, self.alphas = self._pattern("rank_pattern"), self._pattern("alpha_pattern")
        for key, rank in self.ranks.items():
            self._rank(f"rank_pattern of {key}", rank)
        self.layers = self._layers()

    def modules(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, LowRank]:
        """Returns what is added to each module, its scale in the second matrix."""
        pairs: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in sorted(tensors.items()):
            found = TENSOR.fullmatch(name.removeprefix(WRAPPER))
            if name.endswith((".base_layer.weight", "embed_tokens.weight")):
                words = "where only lora_A and lora_B are served: save it with save_embedding_layers=False"
                raise RefusedError(
                    f"it has {name}, the model's own weights or others in their place, {words}"
                )
            if found is None:
                raise RefusedError(
                    f"it has the tensor {name}, and only lora_A and lora_B of modules are served"
                )
            module = _own_name(found["module"])
            self._check_module(module)
            if pairs.setdefault(module, {}).setdefault(found["kind"], tensor) is not tensor:
                raise RefusedError(f"it has two tensors of {module}")
        if not pairs:
            raise RefusedError("it has no tensors")
        made = {module: self._low_rank(module, pair) for module, pair in pairs.items()}
        self._check_targets(made)
        return made

    def _check_module(self, module: str) -> None:
        if module in self.places:
            return
        layer = LAYER.search(module)
        numbers = [int(found[1]) for each in self.places if (found := LAYER.search(each))]
        if layer is not None and int(layer[1]) > max(numbers, default=-1):
            raise RefusedError(
                f"it adapts {module}, but this model has {max(numbers) + 1} layers{self._made_for}"
            )
        kinds = sorted({each.rpartition(".")[2] for each in self.places})
        known = f"only {', '.join(kinds)} can be adapted here" if kinds else "no layer can be adapted here"
        raise RefusedError(f"it adapts {module}, and {known}{self._made_for}")

    @property
    def _made_for(self) -> str:
        return f"; it was made for {self.base}" if self.base else ""

    def _low_rank(self, module: str, pair: Mapping[str, torch.Tensor]) -> LowRank:
        if len(pair) < 2:
            raise RefusedError(f"it has lora_{next(iter(pair))} of {module} alone: the file is not whole")
        down, up, place = pair["A"], pair["B"], self.places[module][0]
        rank = self._of_pattern(self.ranks, module, self.rank)
        wanted = (rank, place.in_features), (place.out_features, rank)
        if (tuple(down.shape), tuple(up.shape)) != wanted:
            raise RefusedError(
                f"its matrices of {module} are {[*down.shape]} and {[*up.shape]}, where this model and the "
                f"rank {rank} ask for {[*wanted[0]]} and {[*wanted[1]]}{self._made_for}"
            )
        if not (down.is_floating_point() and up.is_floating_point()):
            raise RefusedError(f"its matrices of {module} are {down.dtype} and {up.dtype}, no floating types")
        alpha = self._of_pattern(self.alphas, module, self.alpha)
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        low = LowRank(down.float(), up.float() * scale)
        if not all(bool(each.isfinite().all()) for each in (down.float(), up.float(), *low)):
            raise RefusedError(f"its matrices of {module} have numbers that are not finite")
        return low

    def _check_targets(self, made: Mapping[str, LowRank]) -> None:
        """Refuses tensors that the config leaves out, and a file that lacks some that it names."""
        for module in made:
            layer = LAYER.search(module)
            if self.layers is not None and (layer is None or int(layer[1]) not in self.layers):
                raise RefusedError(f"it has tensors of {module}, which layers_to_transform leaves out")
        targets = self.config.get("target_modules")
        if not isinstance(targets, list):
            return  # PEFT makes a list of them when it saves; a regular expression names what the file has
        if not all(isinstance(target, str) for target in targets):
            raise RefusedError("its target_modules are not a list of names")
        wanted = set(self._wanted([*map(_own_name, targets)]))
        if missing := sorted(wanted - made.keys()):
            raise RefusedError(f"it has no tensors of {missing[0]}, which target_modules names")
        if others := sorted(made.keys() - wanted):
            raise RefusedError(f"it has tensors of {others[0]}, which target_modules does not name")

    def _wanted(self, targets: Sequence[str]) -> Iterator[str]:
        excluded = self.config.get("exclude_modules") or []
        if not isinstance(excluded, list) or not all(isinstance(each, str) for each in excluded):
            raise RefusedError("its exclude_modules are not a list of names")
        excluded = [*map(_own_name, excluded)]
        for module in self.places:
            layer = LAYER.search(module)
            is_left_out = self.layers is not None and (layer is None or int(layer[1]) not in self.layers)
            if not is_left_out and _is_named(module, targets) and not _is_named(module, excluded):
                yield module

    def _layers(self) -> set[int] | None:
        given = self.config.get("layers_to_transform")
        if given is None or given == []:  # PEFT takes both for all layers
            return None
        numbers = given if isinstance(given, list) else [given]
        most = max((int(found[1]) for each in self.places if (found := LAYER.search(each))), default=-1)
        for number in numbers:
            if type(number) is not int or not 0 <= number <= most:
                raise RefusedError(
                    f"its layers_to_transform has {number!r}, and this model has {most + 1} layers"
                )
        return set(numbers)

    def _rank(self, name: str, rank: object) -> int:
        if type(rank) is not int or rank < 1:
            raise RefusedError(f"its {name} is {rank!r}, where a rank of 1 or more is needed")
        if rank > self.max_rank:
            raise RefusedError(f"its {name} is {rank}, above max_lora_rank, which is {self.max_rank}")
        return rank

    def _number(self, name: str, key: str) -> float:
        return _checked_number(name, self.config.get(key))

    def _pattern(self, key: str) -> dict[str, Any]:
        given = self.config.get(key) or {}
        if not isinstance(given, dict):
            raise RefusedError(f"its {key} is no object")
        for name, value in given.items():
            if not PLAIN_NAME.fullmatch(name):
                raise RefusedError(f"its {key} has {name!r}, and only names of modules are served there")
            _checked_number(f"{key} of {name}", value)
        own = {_own_name(name): value for name, value in given.items()}
        if len(own) < len(given):
            raise RefusedError(f"its {key} names a module twice, with its text part and without")
        return own

    @staticmethod
    def _of_pattern(pattern: Mapping[str, Any], module: str, otherwise: Any) -> Any:
        """Returns what the first name that fits says, as PEFT takes it."""
        return next((value for name, value in pattern.items() if _is_named(module, [name])), otherwise)


def _checked_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise RefusedError(f"its {name} is {value!r}, where a finite number is needed")
    return float(value)


def _own_name(module: str) -> str:
    """Returns our name of a module, or of the end of one: that of a family with pictures has a text part."""
    return TEXT_PART.sub("model.", module).replace("language_model.lm_head", "lm_head")


def _is_named(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)
