"""Token ids that were looked up, as the drafts of a step."""

from collections.abc import Callable

from engine.core.scheduler import Scheduled
from engine.core.sequence import Sequence
from engine.host_to_device import on_device
from engine.messages import Source
from engine.sampling.sampler import Drafts, Sampler


def look_up_drafts(
    name: Source,
    scheduled: list[Scheduled],
    sampler: Sampler,
    find: Callable[[Sequence, int], list[int]],
) -> Drafts:
    """``find`` gives up to so many tokens for a sequence; asked only where source ``name`` drafts."""
    drafted = [
        find(part.sequence, part.num_draft_tokens) if part.source == name and part.num_draft_tokens else []
        for part in scheduled
        if part.completes
    ]
    width = max(map(len, drafted), default=0)
    if width == 0:
        return Drafts.empty(len(drafted), sampler.device)
    token_ids = on_device([ids + [0] * (width - len(ids)) for ids in drafted], sampler.device)
    return Drafts(token_ids, None, [len(ids) for ids in drafted])
