"""Defines proposers, which draft during a step with a model or from the target's states, and own their
caches.

Drafts that are known before a step, from texts and grammars, come from look-ups instead (``planning``).
"""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from sys import maxsize
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.needs import Need
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import ScheduledSequence, StepPlan
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import DraftVocabulary, HeadOutput

if TYPE_CHECKING:
    import torch

    from truedraft.engine.rows.drafts import Drafts
    from truedraft.engine.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Observation:
    """Holds the results of the target's pass for one sequence; rejected drafts are left out.

    ``token_ids`` are those from index ``first`` of the sequence on: a piece of its prompt, or its pending
    token and the accepted drafts. ``next_token`` follows them. ``hidden`` [tokens, taps, hidden size] are the
    states of ``token_ids`` after the tapped layers, in the order of the proposer's ``taps``; None without
    taps.
    """

    sequence: Sequence
    first: int
    token_ids: list[int]
    next_token: int
    hidden: "torch.Tensor | None" = None


class Proposer:
    """Drafts during a step. Subclasses set ``name`` and write ``propose``; all else has a default.

    ``name`` is its method in requests, metrics and traces. ``taps`` are layers of the target whose states
    ``observe`` is given, negative ones counted from the last; their number stands for what the last norm
    makes of the last layer's states. ``can_lag``: it may stay behind while other sources draft or none does,
    and brings its cache up to date when it drafts. If it cannot, ``observe`` is called after every pass of
    the target, and every step goes by phases, or through a runner that does for it what ``observe`` does.
    ``max_len`` is the longest sequence that it can draft for. ``need`` is what a row that drafts with it asks
    of a runner. ``draws``: the sampler draws its drafts, greedily or at random as a request asks
    (``draft_sample_method``).

    One that cannot lag and has pools lets go of sequences while drafting does not pay: their blocks are
    freed, ``observe`` is no longer called for them, and they get no further drafts from it.
    """

    name: str
    taps: Sequences[int] = ()
    can_lag: bool = True
    max_len: int = maxsize
    need: Need = Need.PROPOSER
    draws: bool = False

    @property
    def trace_source(self) -> str:
        """Returns its name in traces."""
        return self.name

    @property
    def head_output(self) -> HeadOutput | None:
        """Returns the output layer with which it drafts now, if it is a head."""
        return None

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """Returns the tokens that it drafts now, if it is a head that drafts fewer than it could."""
        return None

    @property
    def runners(self) -> Sequences[Any]:
        """Returns the ``ModelRunner`` of each of its models, for a report of their memory."""
        return ()

    @property
    def lets_go(self) -> bool:
        """Tells whether following a sequence takes blocks, which are given back while following does not
        pay."""
        return not self.can_lag and bool(self.pools)

    def attach(self, target: Any) -> None:
        """Receives the target's ``ModelRunner``, before the first step."""

    @property
    def pools(self) -> Sequences[BlockPool]:
        """Returns its own pools whose blocks the scheduler hands out."""
        return ()

    def tables(self, sequence: Sequence) -> Sequences[tuple[BlockPool, BlockTable]]:
        """Returns its pools, each with the table that ``sequence`` has there.

        The scheduler reserves room in them for the sequence and its drafts, truncates them with the target's,
        shares beginnings and gives blocks back.
        """
        return ()

    def num_missing(self, sequence: Sequence) -> int:
        """Returns how many tokens its cache must compute before it drafts, the pending one apart."""
        return 0

    def prefill(self, prompts: Sequences[ScheduledSequence]) -> None:
        """Stores the tokens of ``prompts`` that the target stores, where no row drafts with it in the
        step."""

    def propose(self, plan: StepPlan, sampler: "Sampler") -> "Drafts":
        """Drafts up to ``num_drawn_by(name)`` tokens for each of ``plan.rows``; ``prefill`` is part of it.

        ``sampler`` has a row for each of ``plan.rows``. Lengths are decided before anything is drawn: a drawn
        token that is left out because of what it is would change what is emitted.
        """
        raise NotImplementedError

    def observe(self, observations: Sequences[Observation]) -> None:
        """Follows the target, after its pass and the verdicts; only called if it cannot lag."""

    def reset(self) -> None:
        """Forgets all sequences and the contents of its caches, whatever state a broken step has left."""


class ProposerCache:
    """Holds a pool of a proposer's own, and the table that each sequence has there."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._tables: WeakKeyDictionary[Sequence, BlockTable] = WeakKeyDictionary()

    def table(self, sequence: Sequence) -> BlockTable:
        table = self._tables.get(sequence)
        if table is None:
            table = self._tables[sequence] = BlockTable(sequence.num_encoder_tokens)
        return table

    def num_missing(self, sequence: Sequence) -> int:
        """Returns how many tokens the cache lacks, the pending one apart."""
        return max(0, len(sequence.token_ids) - 1 - self.table(sequence).num_computed_tokens)

    def reset(self) -> None:
        self.pool = self.pool.fresh()
        self._tables.clear()
