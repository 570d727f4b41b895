"""Estimates how many experts a pass reads: for few tokens each one that is read costs about as much as a
token.

Calibration measures passes over tokens that have nothing in common, and counts the experts that they read. In
a real text, later tokens use some of the experts that earlier ones use. So a pass counts as one over fewer
such tokens, as many as read the same number of experts. The number for which a further row counts, and for
which a drafted token counts, is learned from the counts of the passes themselves.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate

# Estimates move by this share of a difference; a token counts for at most this much.
RATE, MOST = 0.1, 1.5


class Routing:
    """``counted`` returns the sums of experts that passes have read in their layers, and of these layers.
    ``calibrated``: the experts that a layer reads for some numbers of tokens that have nothing in common."""

    def __init__(self, counted: Callable[[], tuple[int, int]], calibrated: Mapping[int, float]) -> None:
        self._counted = counted
        self._before = counted()
        self._tokens = sorted(calibrated)
        self._experts = list(accumulate([calibrated[number] for number in self._tokens], max))
        # These are the unlike tokens that a row after the first one, and a drafted token, count for.
        self.of_row = self.of_draft = 1.0

    def take(self) -> float | None:
        """Returns how many experts a layer has read on average in the passes since the last call; None if
        there were none."""
        before, self._before = self._before, self._counted()
        experts, layers = (now - then for now, then in zip(self._before, before, strict=True))
        return experts / layers if layers else None

    def tokens(self, num_rows: float, num_drafted: float) -> float:
        """Returns how many tokens that have nothing in common read this many experts."""
        return 1 + self.of_row * (num_rows - 1) + self.of_draft * num_drafted

    def experts(self, num_rows: float, num_drafted: float = 0.0) -> float:
        """Returns how many experts a layer is expected to read."""
        return _between(self._tokens, self._experts, self.tokens(num_rows, num_drafted))

    def observe(self, num_rows: float, num_drafted: float, experts: float) -> None:
        """Learns that layers read this many experts in passes over this many rows and drafted tokens."""
        if experts >= self._experts[-1]:
            return  # about all of them, which more tokens read as well as fewer
        measured = _between(self._experts, self._tokens, experts)
        further = num_rows - 1
        weight = further * further + num_drafted * num_drafted
        if not weight:
            return
        step = RATE * (measured - self.tokens(num_rows, num_drafted)) / weight
        self.of_row = min(max(self.of_row + step * further, 0.0), MOST)
        self.of_draft = min(max(self.of_draft + step * num_drafted, 0.0), MOST)

    def state(self) -> dict[str, object]:
        return {
            "calibrated_by_tokens": {
                str(number): round(experts, 2)
                for number, experts in zip(self._tokens, self._experts, strict=True)
            },
            "a_row_counts_for": round(self.of_row, 3),
            "a_draft_counts_for": round(self.of_draft, 3),
        }


def _between(places: list[int] | list[float], values: list[int] | list[float], place: float) -> float:
    """Returns the value at a place, linear between those that are known; the first and the last one go on."""
    right = bisect_left(places, place)
    if right == 0 or right == len(places):
        return float(values[min(right, len(values) - 1)])
    left = right - 1
    share = (place - places[left]) / (places[right] - places[left])
    return values[left] + share * (values[right] - values[left])
