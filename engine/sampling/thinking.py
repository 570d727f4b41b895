"""Closes a model's reasoning when its budget is spent: the tokens of the closing mark are forced then.

The tokens allowed at a place follow from the tokens before it alone, so drafts are verified under it as under
a grammar, and the forced tokens are drafts that cannot fail.
"""

from collections.abc import Sequence
from ctypes import c_uint32, memset
from typing import NamedTuple, Protocol

import torch

from truedraft.engine.memory.pointers import address

WORD_BITS, WORD_BYTES = 32, 4

Tokens = tuple[int, ...]


class Marks(NamedTuple):
    """Holds the tokens of ``thinking_marks``: ``open`` begins the reasoning, and is empty where the prompt
    has begun it; ``close`` ends it. ``answer`` follows where the budget has closed the reasoning; a model
    that has such a mark may reason several times, also after other messages. Others reason at the beginning,
    after ``space`` at most."""

    open: Tokens
    close: Tokens
    answer: Tokens
    space: Tokens

    @property
    def forced(self) -> Tokens:
        return self.close + self.answer


class Place(NamedTuple):
    """Says at which point of an output a token comes. ``num_tokens`` of reasoning came before. ``tail`` has
    the last tokens, as far as a mark could begin with them. ``num_forced`` counts the forced tokens so far;
    None where none is due."""

    is_reasoning: bool = False
    num_tokens: int = 0
    tail: Tokens = ()
    num_forced: int | None = None
    is_over: bool = False  # Nothing is counted or forced any more.


class Inner(Protocol):
    """Describes another restriction of the allowed tokens: ``grammar.Matcher``."""

    @property
    def error(self) -> str: ...

    def write_masks(self, place: int, draft_ids: list[int], first: int = 0) -> bool: ...

    def forced(self, limit: int) -> list[int]: ...

    def allowed(self, token_ids: list[int]) -> list[int]: ...

    def advance(self, token_ids: list[int]) -> None: ...


class ThinkingBudget:
    """Behaves as a ``Matcher``, together with ``inner``, the output's own if it has one."""

    def __init__(
        self, budget: int, marks: Sequence[Sequence[int]], vocab_size: int, inner: Inner | None
    ) -> None:
        self._budget = budget
        self._marks = Marks(*map(tuple, marks))
        self._inner = inner
        self.mask_words = -(-vocab_size // WORD_BITS)
        self.num_read = 0
        self._place = Place() if self._marks.open else self._due(Place(is_reasoning=True))
        self.budget_spent = self._place.num_forced is not None

    def masks(self, draft_ids: list[int], first: int = 0) -> torch.Tensor | None:
        """Returns what ``Matcher.masks`` does."""
        shape = len(draft_ids) + 1 - first, self.mask_words
        masks = torch.empty(shape, dtype=torch.int32)
        return masks if self.write_masks(address(masks, torch.int32, shape), draft_ids, first) else None

    def write_masks(self, place: int, draft_ids: list[int], first: int = 0) -> bool:
        """Does what ``Matcher.write_masks`` does: both must allow a token."""
        is_bound = self._inner is not None and self._inner.write_masks(place, draft_ids, first)
        forced = {
            number: token_id
            for number, token_id in enumerate(self._forced_after(draft_ids))
            if token_id is not None and number >= first
        }
        if not forced:
            return is_bound
        if not is_bound:
            memset(place, -1, WORD_BYTES * self.mask_words * (len(draft_ids) + 1 - first))
        for number, token_id in forced.items():
            words = (c_uint32 * self.mask_words).from_address(
                place + WORD_BYTES * self.mask_words * (number - first)
            )
            kept = words[token_id // WORD_BITS] & (1 << token_id % WORD_BITS)
            memset(words, 0, WORD_BYTES * self.mask_words)
            words[token_id // WORD_BITS] = kept
        return True

    def forced(self, limit: int) -> list[int]:
        """Returns what ``Matcher.forced`` does."""
        num_forced = self._place.num_forced
        if num_forced is not None:
            return [*self._marks.forced[num_forced : num_forced + limit]]
        return [] if self._inner is None else self._cut(self._inner.forced(limit))

    def allowed(self, token_ids: list[int]) -> list[int]:
        """Returns what ``Matcher.allowed`` does."""
        return self._cut(token_ids if self._inner is None else self._inner.allowed(token_ids))

    def advance(self, token_ids: list[int]) -> None:
        self.num_read += len(token_ids)
        if self._inner is not None:
            self._inner.advance(token_ids)
        for token_id in token_ids:
            self._place = self._after(self._place, token_id)
            self.budget_spent = self.budget_spent or self._place.num_forced is not None

    @property
    def error(self) -> str:
        return "" if self._inner is None else self._inner.error

    def _cut(self, token_ids: list[int]) -> list[int]:
        """Returns the first of these tokens, as many as the budget leaves."""
        for number, forced in enumerate(self._forced_after(token_ids[:-1]) if token_ids else ()):
            if forced not in (None, token_ids[number]):
                return token_ids[:number]
        return token_ids

    def _forced_after(self, draft_ids: Sequence[int]) -> list[int | None]:
        """Returns the token that is forced now, and after each of the drafts; None where any token may
        come."""
        places = [self._place]
        for token_id in draft_ids:
            places.append(self._after(places[-1], token_id))
        forced = self._marks.forced
        return [None if place.num_forced is None else forced[place.num_forced] for place in places]

    def _after(self, place: Place, token_id: int) -> Place:
        if place.is_over:
            return place
        if place.num_forced is not None:
            # A draft that is not the forced token is rejected: what follows it does not matter.
            num_forced = place.num_forced + 1
            return (
                Place(is_over=True) if num_forced == len(self._marks.forced) else Place(num_forced=num_forced)
            )
        if not place.is_reasoning:
            return self._before(place, token_id)
        tail = (*place.tail, token_id)[-len(self._marks.close) :]
        if tail == self._marks.close:
            # The message that follows may be reasoning again, and may begin with a part of the mark.
            again = bool(self._marks.answer)
            return Place(num_tokens=place.num_tokens) if again else Place(is_over=True)
        return self._due(place._replace(num_tokens=place.num_tokens + 1, tail=tail))

    def _before(self, place: Place, token_id: int) -> Place:
        mark, may_come_later = self._marks.open, bool(self._marks.answer)
        if not place.tail and token_id in self._marks.space:
            return place
        tail = (*place.tail, token_id)[-len(mark) :]
        if tail == mark:
            return self._due(place._replace(is_reasoning=True, tail=()))
        is_over = not may_come_later and tail != mark[: len(tail)]
        return place._replace(tail=tail, is_over=is_over)

    def _due(self, place: Place) -> Place:
        """Returns the place as it is, or with the closing mark due, continued from its part in the text."""
        if not place.is_reasoning or place.num_tokens < self._budget:
            return place
        close = self._marks.close
        length = next(
            n for n in range(len(close) - 1, -1, -1) if place.tail[len(place.tail) - n :] == close[:n]
        )
        return Place(num_forced=length)
