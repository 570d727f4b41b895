"""Keeps the same text in the draft's tokens, up to date at its end.

More text changes how the end before it is best cut into tokens, so each time a window of the last tokens is
encoded anew with the new text after them. The window's own beginning lacks its context; its tokens count
from the first place on where both ways of cutting agree.
"""

from truedraft.engine.proposers.translated.tokenizer import NO_CUT, TextTokenizer

# Each addition encodes this many tokens again; this many of them are only context.
WINDOW, MARGIN = 16, 4


class DraftText:
    """Holds the ``ids`` [tokens] of the text so far. The cost of an addition does not depend on their
    number."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        # This much of the text has tokens, counted in characters from its beginning.
        self._cuts: list[int] = []
        self._num_characters = 0
        self._window_start = 0  # counts ids
        self._window_text = ""

    def append(self, text: str) -> int:
        """Adds text; returns the number of ids at the beginning that stayed the same."""
        if not text:
            return len(self.ids)
        old_ids = self.ids[self._window_start :]
        kept, offset, ids, cuts = self._encode(text)
        self._num_characters += len(text)
        num_same = kept - self._window_start
        for old, new in zip(old_ids[num_same:], ids, strict=False):
            if old != new:
                break
            num_same += 1
        num_same += self._window_start
        self.ids[kept:] = ids
        self._cuts[kept:] = [cut if cut == NO_CUT else cut + offset for cut in cuts]
        self._move_window(self._window_text + text)
        return num_same

    def _encode(self, text: str) -> tuple[int, int, list[int], list[int]]:
        """Returns how many ids stay, and the ids after them, with their cuts counted from a place in the
        text."""
        offset = self._num_characters - len(self._window_text)
        encoded = self.tokenizer.encode(self._window_text + text)
        if self._window_start == 0:
            leading = [i for i in self.tokenizer.leading_ids if encoded.ids[:1] != [i]]
            return 0, 0, leading + encoded.ids, [0] * len(leading) + encoded.cuts
        first_at = {cut: index for index, cut in reversed(list(enumerate(encoded.cuts))) if cut != NO_CUT}
        for index in range(self._window_start + MARGIN, len(self.ids)):
            cut = self._cuts[index]
            if cut != NO_CUT and cut - offset in first_at:
                start = first_at[cut - offset] + 1
                return index + 1, offset, encoded.ids[start:], encoded.cuts[start:]
        # The two ways never meet, so the new text alone is encoded and appended.
        alone = self.tokenizer.encode_after(self._window_text, text)
        if alone is None:
            alone = self.tokenizer.encode(text).ids
        return len(self.ids), self._num_characters, alone, [NO_CUT] * (len(alone) - 1) + [len(text)]

    def _move_window(self, recent: str) -> None:
        """Moves the window; ``recent`` is the end of the text, with all that the window may need of it."""
        start = max(self._window_start, len(self.ids) - WINDOW)
        while start > self._window_start and self._cuts[start - 1] == NO_CUT:
            start -= 1
        self._window_start = start
        first = self._cuts[start - 1] if start else 0
        self._window_text = recent[len(recent) - (self._num_characters - first) :]
