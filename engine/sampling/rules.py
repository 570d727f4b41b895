"""Applies what a checkpoint's generation config forbids or forces, whatever the request says.

Encoder-decoder checkpoints rely on it: Marian bans its padding token, BART's summaries repeat no trigram and
end with the end-of-sequence token. The rules are those of transformers' ``generate``.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """Holds the rules. ``no_repeat_ngram_size`` 0 is off. ``forced_eos_token_id`` is forced as the last token
    that ``max_tokens`` allows."""

    banned_token_ids: tuple[int, ...] = ()
    no_repeat_ngram_size: int = 0
    forced_eos_token_id: int | None = None

    def __bool__(self) -> bool:
        return self != NO_RULES

    def apply(self, logits: torch.Tensor, text: list[int], is_last: bool) -> None:
        """Changes one position's ``logits`` [V] in place; ``text`` is all that the decoder has seen."""
        if is_last and self.forced_eos_token_id is not None:
            logits.fill_(-torch.inf)
            logits[self.forced_eos_token_id] = 0.0
            return
        banned = [*self.banned_token_ids, *self._completing(text)]
        if banned:
            logits[torch.tensor(banned, device=logits.device)] = -torch.inf

    def _completing(self, text: list[int]) -> list[int]:
        """Returns the tokens that would repeat an n-gram of the text."""
        size = self.no_repeat_ngram_size
        if size == 0 or len(text) < size:
            return []
        last = text[len(text) - size + 1 :]
        return [
            text[start + size - 1]
            for start in range(len(text) - size + 1)
            if text[start : start + size - 1] == last
        ]


NO_RULES = GenerationRules()
