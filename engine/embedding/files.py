"""Reads what a checkpoint says of its vectors, in the files that sentence-transformers writes next to the
weights.

``modules.json`` names what comes after the model, one folder each. Whatever would change a vector and is not
known here is refused by its name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truedraft.engine.errors import ModelLoadError

# One of these ways makes a text's vector of its tokens' vectors; ``1_Pooling/config.json`` names them so.
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# These modules change nothing where nothing is trained.
WITHOUT_EFFECT = ("Dropout",)
ACTIVATIONS = ("Identity", "Tanh", "Sigmoid", "ReLU", "GELU")
IDENTITY = "Identity"


@dataclass(frozen=True, slots=True)
class DenseFile:
    """Names a linear layer of a text's vector; ``folder`` has its weights."""

    folder: Path
    activation: str
    is_added: bool = False


@dataclass(frozen=True, slots=True)
class LogitScore:
    """Makes a score of the logits after a text: the logit of one token less that of another."""

    true_token: int
    false_token: int | None


@dataclass(frozen=True, slots=True)
class VectorFiles:
    """Holds what the files say. ``pooling`` is empty where no file names it; ``dense`` has the linear layers
    in their order."""

    pooling: tuple[str, ...] = ()
    dense: tuple[DenseFile, ...] = ()
    normalizes: bool = True
    prompts: dict[str, str] | None = None
    default_prompt: str | None = None
    max_tokens: int | None = None
    lower_cases: bool = False
    logit_score: LogitScore | None = None
    has_modules: bool = False


def class_name(written: str) -> str:
    """Returns the last part of a Python class's path, which has changed between versions."""
    return written.rpartition(".")[2]


def read_json(path: Path) -> dict[str, Any]:
    """Returns the content of a file; nothing if there is none."""
    found = _read(path)
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} is no JSON object")
    return found


def read_vector_files(folder: Path) -> VectorFiles:
    """Reads the files of a checkpoint's folder; raises ``ModelLoadError``."""
    said = read_json(folder / "config_sentence_transformers.json")
    own = read_json(folder / "sentence_bert_config.json")
    prompts = {str(name): str(text) for name, text in (said.get("prompts") or {}).items() if text}
    default = said.get("default_prompt_name")
    common: dict[str, Any] = {
        "prompts": prompts,
        "default_prompt": default if default in prompts else None,
        "max_tokens": own.get("max_seq_length"),
        "lower_cases": bool(own.get("do_lower_case", False)),
    }
    modules = _read(folder / "modules.json")
    if not modules:
        return VectorFiles(**common)
    if not isinstance(modules, list):
        raise ModelLoadError(f"{folder / 'modules.json'} is no JSON array")
    pooling: tuple[str, ...] = ()
    dense: list[DenseFile] = []
    normalizes, score = False, None
    for module in modules:
        kind, at = class_name(str(module["type"])), folder / str(module["path"])
        config = read_json(at / "config.json") if module["path"] else {}
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                pooling = _pooling(at, config)
            case "Dense":
                dense.append(_dense(at, config))
            case "Normalize":
                normalizes = True
            case "LogitScore":
                if "true_token_id" not in config:
                    raise ModelLoadError(f"{at}/config.json names no true_token_id")
                score = LogitScore(int(config["true_token_id"]), config.get("false_token_id"))
            case _ if kind not in WITHOUT_EFFECT:
                raise ModelLoadError(f"{folder} has a module {kind} (modules.json), which is not known here")
    return VectorFiles(pooling, tuple(dense), normalizes, logit_score=score, has_modules=True, **common)


def _read(path: Path) -> Any:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def _pooling(folder: Path, config: dict[str, Any]) -> tuple[str, ...]:
    written = config.get("pooling_mode")
    if written is None:
        legacy = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean"}
        legacy |= {"weightedmean_tokens": "weightedmean"}
        said = [key.removeprefix("pooling_mode_") for key, value in config.items() if value is True]
        written = [legacy.get(mode, mode) for mode in said if mode not in ("include_prompt",)]
    modes = tuple([written] if isinstance(written, str) else written)
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ModelLoadError(
            f"{folder} pools by {unknown[0]!r}, which is not supported; {', '.join(MODES)} are"
        )
    if not modes:
        raise ModelLoadError(f"{folder}/config.json names no way of pooling")
    if config.get("include_prompt") is False:
        raise ModelLoadError(
            f"{folder} leaves prompts out of what it pools (include_prompt), which is not known here"
        )
    # A text with several modes gets their vectors one after the other, in this order.
    return tuple(mode for mode in MODES if mode in modes)


def _dense(folder: Path, config: dict[str, Any]) -> DenseFile:
    activation = class_name(str(config.get("activation_function") or IDENTITY))
    if activation not in ACTIVATIONS:
        raise ModelLoadError(
            f"{folder} has the activation {activation}, where {', '.join(ACTIVATIONS)} are known"
        )
    names = config.get("module_input_name", "sentence_embedding"), config.get("module_output_name")
    if names[0] != "sentence_embedding" or names[1] not in (None, "sentence_embedding"):
        raise ModelLoadError(f"{folder} is a layer of single tokens, which is not known here")
    return DenseFile(folder, activation, bool(config.get("use_residual", False)))
