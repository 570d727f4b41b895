"""Stories as token streams for the bundled pair: tokenizer training, chat wrapping, packed windows.

A corpus file holds one story between ``<|endoftext|>`` lines. Part of the stories is wrapped as a chat
turn, so that the pair also answers ``/v1/chat/completions``. Knows nothing about models.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from truedraft.engine.config import BUNDLED_PAIR

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (BUNDLED_PAIR / "target" / "chat_template.jinja").read_text(encoding="utf-8")


def read_stories(path: Path) -> list[str]:
    stories = (story.strip() for story in path.read_text(encoding="utf-8").split(END_OF_TEXT))
    return [story for story in stories if story]


def train_tokenizer(stories: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: every byte is a token, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stories, trainer)
    return tokenizer


def wrap_as_chat(story: str, rng: random.Random) -> str:
    """One user turn that asks for ``story``, and the story as the assistant's answer."""
    sentences = re.split(r"(?<=[.!?]) ", story, maxsplit=2)
    words = re.findall(r"\b[a-z]{4,}\b", story)
    choices = ["Tell me a story.", "Please write a short story for children."]
    if words:
        choices.append(f"Tell me a story about a {rng.choice(words)}.")
        choices.append(f"Write a story with the words {rng.choice(words)} and {rng.choice(words)}.")
    choices.append(f"Write a story that begins like this: {sentences[0]}")
    question = rng.choice(choices)
    return f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n{story}{IM_END}\n"


class StoryStream:
    """Endless batches of packed windows; each epoch shuffles anew and re-wraps its chats."""

    def __init__(self, tokenizer: Tokenizer, stories: list[str], chat_share: float, seed: int):
        self.tokenizer, self.stories, self.chat_share = tokenizer, stories, chat_share
        self.rng = random.Random(seed)
        self.buffer = np.zeros(0, dtype=np.int64)

    def _epoch(self) -> np.ndarray:
        order = self.rng.sample(self.stories, len(self.stories))
        texts = [
            wrap_as_chat(story, self.rng) if self.rng.random() < self.chat_share else story for story in order
        ]
        encoded = self.tokenizer.encode_batch([text + END_OF_TEXT for text in texts])
        return np.concatenate([np.asarray(e.ids, dtype=np.int64) for e in encoded])

    def batch(self, num_tokens: int, window: int) -> torch.Tensor:
        """Token ids [num_tokens // window, window + 1]; the last column is a target only."""
        rows = max(1, num_tokens // window)
        need = rows * window + 1
        while len(self.buffer) < need:
            self.buffer = np.concatenate([self.buffer, self._epoch()])
        chunk, self.buffer = self.buffer[:need], self.buffer[need - 1 :]
        return torch.from_numpy(np.lib.stride_tricks.sliding_window_view(chunk, window + 1)[::window].copy())


def validation_windows(tokenizer: Tokenizer, stories: list[str], window: int) -> Iterator[torch.Tensor]:
    """The validation stories, plain, packed, in order: batches [8, window + 1]."""
    ids = [i for story in stories for i in tokenizer.encode(story + END_OF_TEXT).ids]
    rows = [ids[i : i + window + 1] for i in range(0, len(ids) - window, window)]
    for start in range(0, len(rows) - 7, 8):
        yield torch.tensor(rows[start : start + 8])
