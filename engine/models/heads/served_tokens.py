"""Counts the tokens of texts that are served: which are frequent, and how much of outputs these are."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

# Tokens that are read together: a look at all counts takes as long as hundreds of them.
READ_TOKENS = 1024
# Tokens after which what has been counted is worth half, and outputs after which shares are.
HALF_LIFE, SHARE_HALF_LIFE = 1 << 20, 1 << 13


def ranked(counts: npt.NDArray[np.float32], always: Iterable[int]) -> Ids:
    """Returns all ids, those of ``always`` first and then the most frequent ones. Among equally frequent ones
    the lowest come first, which tokenizers have learned first."""
    order = -counts
    order[[token for token in always if 0 <= token < len(counts)]] = -np.inf
    return order.argsort(kind="stable")


class ServedTokens:
    """Takes as much memory as a few numbers for each token of the vocabulary, however long it counts.

    ``sizes`` are those of vocabularies whose shares are asked for. A token of an output counts for a share
    before it is counted itself: a ranking that knows a text already would promise too much for the next one.
    At first the ranking is that of the ids. ``always`` are ids that any vocabulary has.
    """

    def __init__(self, vocab_size: int, sizes: Sequence[int], always: Iterable[int]) -> None:
        self.always = list(always)
        self.num_outputs = 0
        self._counts = np.zeros(vocab_size, np.float32)
        self._num_unranked = 0  # tokens that the ranking does not know
        self._num_counted = 0.0
        self._sizes = list(sizes)
        self._drafted: npt.NDArray[np.bool_] | None = None  # it has a place for each id; None: all are
        # Decayed sums over outputs: all of them, those in vocabularies of each size, and those drafted now.
        self._num_judged = 0.0
        self._num_within = [0.0] * len(self._sizes)
        self._num_drafted = 0.0
        self._unread: list[int] = []
        self._unread_outputs: list[int] = []
        self._rank()

    def read_prompt(self, token_ids: Sequence[int]) -> None:
        self._unread += token_ids
        self._read_if_many()

    def read_output(self, token_ids: Sequence[int]) -> None:
        self._unread_outputs += token_ids
        self.num_outputs += len(token_ids)
        self._read_if_many()

    def share(self, size: int) -> float:
        """Returns the share of late outputs that were among the ``size`` most frequent tokens until then."""
        if size >= len(self._counts):
            return 1.0
        return self._num_within[self._sizes.index(size)] / max(self._num_judged, 1e-9)

    @property
    def drafted_share(self) -> float:
        """Returns the share of late outputs that are drafted at all."""
        return 1.0 if self._drafted is None else self._num_drafted / max(self._num_judged, 1e-9)

    def most_frequent(self, size: int) -> Ids:
        """Returns the ids of that many tokens, in order."""
        self._read()
        self._rank()
        return np.sort(self._ranking[:size])

    def draft(self, token_ids: Ids | None) -> None:
        """Says which ids are drafted from now on; None: all are."""
        self._drafted = None
        if token_ids is not None:
            self._drafted = np.zeros(len(self._counts), np.bool_)
            self._drafted[token_ids] = True
            self._num_drafted = self._num_within[self._sizes.index(len(token_ids))]

    def _read_if_many(self) -> None:
        if len(self._unread) + len(self._unread_outputs) >= READ_TOKENS:
            self._read()

    def _read(self) -> None:
        outputs = np.array(self._unread_outputs, np.int64)
        if len(outputs):
            self._judge(outputs)
        ids = np.concatenate((outputs, np.array(self._unread, np.int64)))
        self._unread, self._unread_outputs = [], []
        kept = 0.5 ** (len(ids) / HALF_LIFE)
        self._counts *= kept
        self._num_counted = kept * self._num_counted + len(ids)
        np.add.at(self._counts, ids, 1)
        self._num_unranked += len(ids)
        if self._num_unranked > self._num_counted / 2:
            self._rank()

    def _judge(self, outputs: Ids) -> None:
        kept, places = 0.5 ** (len(outputs) / SHARE_HALF_LIFE), self._places[outputs]
        self._num_judged = kept * self._num_judged + len(outputs)
        self._num_within = [
            kept * before + int((places < size).sum())
            for before, size in zip(self._num_within, self._sizes, strict=True)
        ]
        if self._drafted is not None:
            self._num_drafted = kept * self._num_drafted + int(self._drafted[outputs].sum())

    def _rank(self) -> None:
        self._ranking = ranked(self._counts, self.always)
        self._places = np.empty(len(self._counts), np.int32)
        self._places[self._ranking] = np.arange(len(self._counts), dtype=np.int32)
        self._num_unranked = 0
