"""Loads a model's tokenizer as its makers saved it: from a folder, a GGUF file or a hub id."""

from typing import Any

from truedraft.engine.formats.gguf_file import is_gguf, read_gguf
from truedraft.engine.formats.gguf_tokenizer import gguf_tokenizer


def load_pretrained_tokenizer(path: str) -> Any:
    """Loads transformers' tokenizer. Slow: imports transformers.

    It neither cuts nor pads a text, whatever its file says: training writes both into tokenizer.json.
    Raises ``ValueError`` in one line if there is none that can be loaded.
    """
    tokenizer = gguf_tokenizer(read_gguf(path)) if is_gguf(path) else _auto_tokenizer(path)
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        fast.no_truncation()
        fast.no_padding()
    return tokenizer


def _auto_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    # Classes rely on files that may be missing, and the Rust core has no more specific error.
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or "no reason is given"
        raise ValueError(
            f"{path} has no tokenizer that can be loaded: {type(error).__name__}: {reason}"
        ) from error
