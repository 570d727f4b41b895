"""Reads files of prompts, from which a target is to write texts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from truedraft.engine.errors import ModelLoadError

# A prompt is a text, or the messages of a conversation.
Prompt = str | Sequence[Mapping[str, Any]]


def read_prompts(path: Path) -> list[Prompt]:
    """Returns the prompts of a file: texts, one a line, or objects in JSON, one a line, with ``messages`` or
    ``prompt``."""
    try:
        prompts = list(_prompts(path))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ModelLoadError(f"the file of prompts {path} cannot be read: {reason}") from error
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"the file of prompts {path} is no text in UTF-8") from error
    if not prompts:
        raise ModelLoadError(f"{path} has no prompts: it must have one a line")
    return prompts


def _prompts(path: Path) -> Iterator[Prompt]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield line
            continue
        try:
            found: Any = json.loads(line)
        except ValueError as error:
            raise ModelLoadError(f"line {number} of {path} is no JSON: {error}") from error
        if isinstance(found, dict) and isinstance(found.get("messages"), list):
            yield found["messages"]
        elif isinstance(found, dict) and isinstance(found.get("prompt"), str):
            yield found["prompt"]
        else:
            raise ModelLoadError(f"line {number} of {path} has neither 'messages' nor a 'prompt'")
