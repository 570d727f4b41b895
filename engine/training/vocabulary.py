"""Chooses the tokens that a head drafts: its output layer is most of what a draft of a small model costs."""

from collections import Counter
from collections.abc import Iterable

import torch


def most_frequent(counts: Counter[int], size: int, vocab_size: int, always: Iterable[int]) -> torch.Tensor:
    """Returns ``size`` ids in order: those of ``always``, then the most frequent ones. Where too few have
    been counted the lowest ids follow, which tokenizers have learned first."""
    ranked = dict.fromkeys(token for token in always if 0 <= token < vocab_size)
    ranked |= dict.fromkeys(token for token, _ in counts.most_common())
    ranked |= dict.fromkeys(range(vocab_size))
    return torch.tensor(sorted(list(ranked)[:size]))
