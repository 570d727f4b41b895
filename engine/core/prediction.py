"""Follows an output through the text that the client expects: OpenAI's predicted outputs.

A *cursor* says where in the prediction one sequence's output is. It starts at the first token and moves along
while the output agrees. After a divergence it looks for the end of the output elsewhere in the prediction: a
run of at least two tokens anywhere, the longest one and among equals the next one after the old place, or one
token shortly after the old place. Every output token costs constant time; the index is built once per
request, when it is first needed.
"""

from bisect import bisect_left

# A run is compared up to this length, and this many of its places are examined: next ones and last ones.
MAX_RUN, PLACES_AFTER, PLACES_BEFORE = 32, 8, 4
# A search indexes at most this many tokens at a time, which takes about two milliseconds: other rows wait for
# the step.
INDEXED_PER_SEARCH = 4096
# A single token is looked for up to this far after the old place.
WINDOW = 16
# The client says that the output starts like the prediction, which counts as a run of this many tokens. A
# place after a shorter run may be a coincidence; the next search does not start from it.
TRUSTED_RUN = 4


class Prediction:
    """Holds the tokens, and the places of each pair of neighbours; a request's choices share it."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self._ends: dict[tuple[int, int], list[int]] = {}
        self._num_indexed = 1

    def ends_of(self, first: int, second: int) -> list[int]:
        """Returns the places where this pair of tokens ends (exclusive), in rising order, as far as the index
        is built."""
        start = self._num_indexed
        if start < len(self.token_ids):
            self._num_indexed = min(len(self.token_ids), start + INDEXED_PER_SEARCH)
            ids = self.token_ids[start - 1 : self._num_indexed]
            for end, pair in enumerate(zip(ids, ids[1:], strict=False), start=start + 1):
                self._ends.setdefault(pair, []).append(end)
        return self._ends.get((first, second), [])


class PredictionCursor:
    """Is a place in the prediction. ``place`` is the index of the prediction's token that is expected next;
    at its end nothing is expected.

    ``run`` tokens before it are known to agree with the output's last ones; 0 after a token that was not
    found: the next guess is then that it replaced the expected token.
    """

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction
        self.place = 0
        self.run = TRUSTED_RUN
        self._left = 0  # the last place at which the output was known to follow
        self._recent: list[int] = []  # the output's last tokens

    def expected(self, num_tokens: int) -> list[int]:
        """Returns the continuation of the prediction."""
        return self.prediction.token_ids[self.place : self.place + num_tokens]

    def follow(self, token_ids: list[int]) -> list[int]:
        """Moves over new output; returns each token's index in the prediction, -1 where it is not from
        there."""
        return [self._step(token_id) for token_id in token_ids]

    def _step(self, token_id: int) -> int:
        text = self.prediction.token_ids
        self._recent.append(token_id)
        if len(self._recent) > 2 * MAX_RUN:
            del self._recent[:-MAX_RUN]
        if self.place < len(text) and text[self.place] == token_id:
            self.place += 1
            self.run += 1
        elif found := self._find():
            self.place, self.run = found
        else:
            if self.run:
                # Perhaps one token was replaced by another. After a coincidence the cursor goes back to the
                # old place.
                is_trusted = self.run >= TRUSTED_RUN
                self.place = min(self.place + 1, len(text)) if is_trusted else self._left
            self.run = 0
            return -1
        if self.run >= TRUSTED_RUN:
            self._left = self.place
        return self.place - 1

    def _find(self) -> tuple[int, int] | None:
        """Returns the place after the best match of the output's end, and the match's length."""
        text, last = self.prediction.token_ids, self._recent[-1]
        best: tuple[int, bool, int] | None = None
        if len(self._recent) > 1:
            ends = self.prediction.ends_of(self._recent[-2], last)
            middle = bisect_left(ends, self._left + 1)
            for end in ends[max(0, middle - PLACES_BEFORE) : middle + PLACES_AFTER]:
                distance = end - self._left
                candidate = self._common(end), distance > 0, -abs(distance)
                best = candidate if best is None else max(best, candidate)
        if best is not None:
            run, is_after, distance = best
            return self._left + (-distance if is_after else distance), run
        for place in range(self._left, min(self._left + WINDOW, len(text))):
            if text[place] == last:
                return place + 1, 1
        return None

    def _common(self, end: int) -> int:
        """Counts how many of the output's last tokens are those before ``end``."""
        text, recent = self.prediction.token_ids, self._recent
        limit = min(MAX_RUN, end, len(recent))
        for length in range(limit):
            if text[end - 1 - length] != recent[-1 - length]:
                return length
        return limit
