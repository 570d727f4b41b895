"""Computes the vectors of texts, pass by pass, each of as many texts as fit into it.

Requests share passes, text by text: one with a single text is in the next pass, however many texts another
one has.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from truedraft.engine.embedding.load import Loaded
from truedraft.engine.embedding.vectors import to_bytes
from truedraft.engine.messages import Embed, Embedded, Failed, Text

NOT_FINITE = "the model computed no finite numbers for a text"


@dataclass
class _Open:
    """Is a request that still has texts to compute: the first ``num_taken`` are done."""

    request: Embed
    arrival: int
    num_taken: int = 0
    vectors: list[bytes] = field(default_factory=list)

    @property
    def next(self) -> Text | None:
        texts = self.request.texts
        return texts[self.num_taken] if self.num_taken < len(texts) else None


class EmbedCore:
    """Schedules texts. A pass has at most ``most_tokens`` tokens, unless one text alone has more."""

    def __init__(self, loaded: Loaded, most_tokens: int) -> None:
        self.loaded = loaded
        self.most_tokens = most_tokens
        self._open: dict[str, _Open] = {}
        # Counts each tenant's tokens that were computed while it had work.
        self._tokens_of: Counter[str] = Counter()
        self._arrivals = count()

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def add(self, request: Embed) -> None:
        tenants = {each.request.tenant for each in self._open.values()}
        # A tenant that comes back joins at the others' count, not at its old one.
        if request.tenant not in tenants:
            self._tokens_of[request.tenant] = min((self._tokens_of[name] for name in tenants), default=0)
        self._open[request.request_id] = _Open(request, next(self._arrivals))

    def abort(self, request_id: str) -> None:
        """Forgets a request; an unknown one is ignored."""
        self._open.pop(request_id, None)

    def step(self) -> list[Embedded | Failed]:
        """Computes the next texts together. Returns the answers of requests that are complete now."""
        taken = self._take()
        vectors = [
            self.loaded.vectors(states, each.request.dimensions, each.request.normalizes)
            for (each, _), states in zip(
                taken, self.loaded.model.states([text for _, text in taken]), strict=True
            )
        ]
        answers: list[Embedded | Failed] = []
        for (each, _), vector in zip(taken, to_bytes(vectors), strict=True):
            name = each.request.request_id
            if self._open.get(name) is not each:
                continue  # The request has failed in this pass.
            if vector is None:
                answers.append(Failed(name, "invalid_logits", NOT_FINITE))
                del self._open[name]
                continue
            each.vectors.append(vector)
            if len(each.vectors) == len(each.request.texts):
                answers.append(Embedded(name, each.vectors))
                del self._open[name]
        return answers

    def _take(self) -> list[tuple[_Open, Text]]:
        """Returns the texts of the next pass: lower ``priority`` goes first, then the tenant that has had the
        fewest tokens, then the request that has had the fewest texts."""
        taken: list[tuple[_Open, Text]] = []
        left = self.most_tokens
        while waiting := [each for each in self._open.values() if each.next is not None]:
            first = min(waiting, key=self._order)
            text = first.next
            assert text is not None
            if taken and len(text.token_ids) > left:
                break
            taken.append((first, text))
            first.num_taken += 1
            left -= len(text.token_ids)
            self._tokens_of[first.request.tenant] += len(text.token_ids)
        return taken

    def _order(self, each: _Open) -> tuple[int, int, int, int]:
        request = each.request
        return request.priority, self._tokens_of[request.tenant], each.num_taken, each.arrival
