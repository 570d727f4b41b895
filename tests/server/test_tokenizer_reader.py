"""A tokenizer that another process has read is the same one, and errors come back in words."""

import subprocess
import sys
from pathlib import Path

import pytest

from truedraft.server.text.tokenizer import Tokenizer, load_tokenizer, read_apart
from truedraft.server.text.tokenizer_reader import told


def test_it_is_the_same_tokenizer(model_folder: Path, tokenizer: Tokenizer) -> None:
    found = read_apart(str(model_folder))
    assert found == told(str(model_folder))
    apart = load_tokenizer(str(model_folder), None, lambda _: found)
    for text in ("one two", "<|im_start|>user\nhi<|im_end|>", "naïve 猫\n\n"):
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert apart.encode(text, add_special_tokens=special) == ids
            assert apart.decode(ids, skip_special_tokens=special) == tokenizer.decode(
                ids, skip_special_tokens=special
            )
    assert apart.for_grammars() == tokenizer.for_grammars()
    assert apart.templates.source == tokenizer.templates.source


def test_why_there_is_none_comes_back(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"model\.gguf is cut off or damaged"):
        read_apart(str(tmp_path / "model.gguf"))


def test_what_reads_it_is_not_imported_by_the_server() -> None:
    """transformers' models import torch, which would be most of the server's memory."""
    code = "import sys, truedraft.server.app; sys.exit(len({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
