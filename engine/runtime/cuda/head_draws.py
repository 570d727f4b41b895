"""A head's drafts within a captured round: its small passes are launched one by one, its draws are captured.

Tokens that are drawn stay on the device, where the head's next pass and the target's read them: the host does
not wait. What the target's pass says of a round's tokens waits for the head until its next draft.
"""

from collections.abc import Sequence as Sequences

from truedraft.engine.core.sequence import Sequence
from truedraft.engine.cuda.fields import DRAFTS
from truedraft.engine.memory.host_to_device import on_device
from truedraft.engine.proposers.heads.proposer import HeadProposer
from truedraft.engine.runtime.cuda.graphs import RoundGraphs
from truedraft.engine.runtime.cuda.shapes import Stage


def draw_with_head(
    graphs: RoundGraphs,
    draws: Stage,
    head: HeadProposer,
    sequences: Sequences[Sequence],
    rows: list[int],
    num_drawn: list[int],
) -> None:
    """Draws ``num_drawn`` tokens of each of the ``sequences``, which are told, into their ``rows``."""
    next_logits, device = head.passes(sequences), graphs.logits.device
    for number in range(max(num_drawn)):
        drafting = [i for i, length in enumerate(num_drawn) if length > number]
        places = on_device([rows[i] for i in drafting], device)
        last_ids = graphs.rows.numbers[:, DRAFTS + number - 1].index_select(0, places) if number else None
        graphs.draft_logits.index_copy_(0, places, next_logits(drafting, last_ids))
        graphs.replay(draws)
    head.take_back([sequence for sequence, length in zip(sequences, num_drawn, strict=True) if length])
