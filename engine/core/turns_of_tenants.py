"""Says in which order sequences go, and who gives way to whom, so that no tenant shuts another out.

A tenant is whoever a front end keeps apart from others, such as an API key; the name means nothing here. All
of it is plain functions over sequences: ``scheduler`` does what they say.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Sequences

from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.memory.block_table import BlockTable

Share = tuple[BlockPool, BlockTable]


def order(sequence: Sequence) -> tuple[int, int, int]:
    """Returns the place in the order: lower goes first."""
    return sequence.priority, sequence.place, sequence.arrival


def firsts_first(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Returns sequences in order, but each tenant's first one before all others of the same priority."""
    found = sorted(sequences, key=order)
    firsts: dict[str, Sequence] = {}
    for sequence in found:
        firsts.setdefault(sequence.tenant, sequence)
    if len(firsts) < 2:
        return found
    return sorted(
        found,
        key=lambda sequence: (sequence.priority, firsts[sequence.tenant] is not sequence),
    )


def shut_out(waiting: Sequences[Sequence], running: Iterable[Sequence]) -> list[Sequence]:
    """Returns the first of ``waiting``, which is in order, of each tenant that has nothing running, unless
    one with a better priority waits."""
    if not waiting:
        return []
    seen = {sequence.tenant for sequence in running}
    found = []
    for sequence in waiting:
        if sequence.priority > waiting[0].priority:
            break
        if sequence.tenant not in seen:
            seen.add(sequence.tenant)
            found.append(sequence)
    return found


def next_to_give_way(sequence: Sequence, running: Sequences[Sequence]) -> Sequence | None:
    """Returns who gives its place to a shut out ``sequence``: the last of the tenant that has most running.
    A tenant keeps one, and a better priority is kept, too."""
    counts = Counter(other.tenant for other in running)
    may = [other for other in running if counts[other.tenant] > 1 and other.priority >= sequence.priority]
    return max(may, key=lambda other: (counts[other.tenant], order(other)), default=None)


def all_that_may_give_way(sequence: Sequence, running: Sequences[Sequence]) -> list[Sequence]:
    """Returns whom ``next_to_give_way`` would name one after the other."""
    left, found = list(running), []
    while (other := next_to_give_way(sequence, left)) is not None:
        left.remove(other)
        found.append(other)
    return found
