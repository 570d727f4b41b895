"""Chooses the tokens that a head drafts: its output layer is most of what a draft of a small model costs."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.formats.pretrained_tokenizer import load_pretrained_tokenizer
from truedraft.engine.models.prompt_file import read_prompts


def most_frequent(counts: Counter[int], size: int, vocab_size: int, always: Iterable[int]) -> torch.Tensor:
    """Returns ``size`` ids in order: those of ``always``, then the most frequent ones. Among equally frequent
    ones the lowest come first, which tokenizers have learned first."""
    order = np.zeros(vocab_size, np.float32)
    for token, count in counts.items():
        if token < vocab_size:
            order[token] = -count
    order[[token for token in always if 0 <= token < vocab_size]] = -np.inf
    return torch.from_numpy(np.sort(order.argsort(kind="stable")[:size]))


def count_tokens(file: str, target: str) -> Counter[int]:
    """Counts the tokens of a file of texts or conversations, by the tokenizer of the model at ``target``."""
    try:
        prompts = read_prompts(Path(file).expanduser())
        tokenizer = load_pretrained_tokenizer(target)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"the tokens of {file} (draft_vocab_file) cannot be counted: {error}") from error
    counts: Counter[int] = Counter()
    for prompt in prompts:
        texts = [prompt] if isinstance(prompt, str) else [str(each.get("content", "")) for each in prompt]
        for text in texts:
            counts.update(tokenizer.encode(text, add_special_tokens=False))
    return counts
