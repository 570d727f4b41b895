"""What shows after many rounds only: a draft cache that never catches up."""

from pathlib import Path

import pytest

from tests.engine.native_pair import save_pair
from tests.engine.planners import draft_cache
from tests.models import make_engine, stepped
from truedraft.engine.core.needs import Need
from truedraft.engine.core.scheduler import Scheduler
from truedraft.engine.messages import Generate, SamplingParams

pytestmark = pytest.mark.usefixtures("needs_compiler")


def test_a_draft_cache_that_lags_by_more_than_a_step_catches_up(tmp_path: Path) -> None:
    """It takes several steps, and then the sequence drafts again."""
    target, draft = save_pair(tmp_path)
    core = make_engine(target, draft, num_speculative_tokens=3, max_num_batched_tokens=40)
    core.add(Generate("0", list(range(40)) * 3, SamplingParams(max_tokens=60, temperature=0)))
    while core.stats.num_draft_tokens == 0:
        stepped(core)
    (sequence,) = core.scheduler.running
    cache = draft_cache(core)
    cache.pool.truncate(cache.table(sequence), 0)
    before = core.stats.num_draft_tokens
    for _ in range(8):
        stepped(core)
    assert core.stats.num_draft_tokens > before + 6


def test_rounds_that_never_catch_up_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: C runs the step as if the row only wanted no draft."""
    honest = Scheduler._needs
    monkeypatch.setattr(
        Scheduler, "_needs", lambda self, scheduled: honest(self, scheduled) - {Need.CATCH_UP}
    )
    with pytest.raises(AssertionError):
        test_a_draft_cache_that_lags_by_more_than_a_step_catches_up(tmp_path)
