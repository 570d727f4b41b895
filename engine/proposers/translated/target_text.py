"""Turns a sequence's target tokens into text as they come; never half a character."""

from collections.abc import Mapping

from truedraft.engine.proposers.translated.tokenizer import BROKEN, TextTokenizer

# This many earlier tokens are decoded with new ones: spaces and characters depend on neighbours.
CONTEXT = 8
# A character has at most four bytes: with three tokens after it, a broken one stays broken.
MAX_BYTES_TO_COME = 3
# At most this many tokens wait for a character to become complete; then they are taken as they are.
MAX_PENDING = 12


class TargetText:
    """Keeps the end of a text. ``pending`` are the last tokens, without text yet; ``tail`` is the end of the
    text before them.

    ``special_text`` has the text for each special token: an empty one, unless the draft model knows the same
    token. Neither ``tail`` nor decoding reaches over a special token.
    """

    def __init__(self, tokenizer: TextTokenizer, special_text: Mapping[int, str]) -> None:
        self.tokenizer = tokenizer
        self.special_text = special_text
        self.num_tokens = 0
        self.pending: list[int] = []
        self.tail = ""
        self._context: list[int] = []

    def extend(self, token_ids: list[int]) -> str:
        """Takes the next tokens; returns the text that became complete."""
        self.num_tokens += len(token_ids)
        pieces = []
        for token_id in token_ids:
            if token_id not in self.special_text:
                self.pending.append(token_id)
                continue
            pieces += [self._release(is_last=True), self.special_text[token_id]]
            self._context, self.tail = [], ""
        pieces.append(self._release(is_last=False))
        return "".join(pieces)

    def _release(self, is_last: bool) -> str:
        """Returns the text of as many pending tokens as have one. ``is_last`` says that nothing can complete
        them."""
        num_pending = len(self.pending)
        if num_pending == 0:
            return ""
        everything = self._decode(num_pending)
        for count in range(num_pending, max(0, num_pending - MAX_PENDING), -1):
            text = everything if count == num_pending else self._decode(count)
            complete = not text.endswith(BROKEN) or (is_last and count == num_pending)
            # Some decoders break the characters before a broken one too: complete ones go first.
            hopeless = num_pending - count >= MAX_BYTES_TO_COME and everything.startswith(text)
            if text.startswith(self.tail) and (complete or hopeless):
                return self._take(count, text[len(self.tail) :])
        if is_last or num_pending > MAX_PENDING:
            return self._take(num_pending, self.tokenizer.decode(self.pending))
        return ""

    def _decode(self, num_pending: int) -> str:
        return self.tokenizer.decode(self._context + self.pending[:num_pending])

    def _take(self, count: int, text: str) -> str:
        recent = (self._context + self.pending[:count])[-CONTEXT:]
        del self.pending[:count]
        # Some decoders need the beginning of a character to make sense of anything after it.
        for start in range(len(recent)):
            tail = self.tokenizer.decode(recent[start:])
            if BROKEN not in tail:
                self._context, self.tail = recent[start:], tail
                return text
        self._context, self.tail = recent, self.tokenizer.decode(recent)
        return text
