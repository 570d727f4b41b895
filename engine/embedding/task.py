"""Finds out from a checkpoint's files what it was made for: to write text, to embed it, or to score pairs."""

import json
from pathlib import Path
from typing import Any

from truedraft.engine.embedding.files import class_name, read_json
from truedraft.engine.families.encoders import ENCODERS
from truedraft.engine.formats.gguf_file import is_gguf, read_gguf
from truedraft.engine.formats.gguf_word_pieces import ENCODER_TYPES
from truedraft.engine.messages import Task

# GGUF files name the way of pooling by these numbers.
GGUF_POOLING = {1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}
CLASSIFIER = "ForSequenceClassification"


def task_of(path: str) -> Task:
    """Returns the task of the folder or file at ``path``."""
    if is_gguf(path):
        pooling = gguf_pooling(path)
        if pooling is None and read_gguf(path).architecture not in ENCODER_TYPES:
            return "generate"
        return "rerank" if pooling == "rank" else "embed"
    folder = Path(path).expanduser()
    config = read_json(folder / "config.json")
    architecture = str((config.get("architectures") or [""])[0])
    kinds = _modules(folder)
    if "LogitScore" in kinds or architecture.endswith(CLASSIFIER):
        return "rerank"
    is_encoder = config.get("model_type") in ENCODERS or config.get("use_bidirectional_attention") is True
    return "embed" if kinds or is_encoder else "generate"


def gguf_pooling(path: str) -> str | None:
    """Returns the way in which a GGUF file pools, by the name in ``files.MODES`` or ``rank``; None if it does
    not."""
    file = read_gguf(path)
    number = file.metadata.get(f"{file.architecture}.pooling_type")
    return None if number is None else GGUF_POOLING.get(int(number))


def _modules(folder: Path) -> list[str]:
    try:
        modules: Any = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        return [class_name(str(module["type"])) for module in modules]
    except (OSError, ValueError, TypeError, KeyError):
        return []
