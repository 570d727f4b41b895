"""Tells where each token of a choice came from, together with the token's text.

The engine counts by rounds: how many drafts were accepted, and whether one more token follows.
``text.choice`` knows which tokens counted and whose text is out.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from truedraft.engine.messages import TokenOutput
from truedraft.server.schemas.answer import TokenOrigin


class OriginReader:
    """Reads the origins of one choice. The texts of all that it gives out, joined, are the choice's text."""

    def __init__(self) -> None:
        self._text = ""  # released, but not yet given out with a token
        self._start = 0  # its place in the choice's text
        self._waiting: deque[tuple[TokenOrigin, int]] = deque()  # with the offset of the token

    def read(
        self, output: TokenOutput, text: str, offsets: Sequence[int], num_shown: int
    ) -> list[TokenOrigin]:
        """``offsets``: of the tokens that counted; ``num_shown`` tokens, of this output or earlier ones, have
        all of their text out now."""
        text, place, taken = self._text + text, 0, []
        self._waiting += zip(_origins(output), offsets, strict=False)
        for _ in range(min(num_shown, len(self._waiting))):
            token, _ = self._waiting.popleft()
            end = self._waiting[0][1] - self._start if self._waiting else len(text)
            token.text = text[place:end]
            place += len(token.text)
            taken.append(token)
        self._text = text[place:]
        self._start += place
        return taken


def _origins(output: TokenOutput) -> Iterator[TokenOrigin]:
    """Yields one for each token, whose text is to come. A trace has the probabilities of its only round."""
    token_ids = iter(output.token_ids)
    trace = output.trace
    for one in output.origins or ():
        rejected = one.num_accepted < one.num_drafted
        last = "plain" if not one.num_drafted else "recovered" if rejected else "bonus"
        for place in range(one.num_tokens):
            if place < one.num_accepted:
                yield TokenOrigin(
                    token_id=next(token_ids),
                    origin="accepted",
                    source=one.source,
                    target_prob=None if trace is None else trace.target_probs[place],
                    draft_prob=None if trace is None else trace.draft_probs[place],
                )
            else:
                target_prob = None if trace is None else trace.next_target_prob
                yield TokenOrigin(token_id=next(token_ids), origin=last, target_prob=target_prob)
