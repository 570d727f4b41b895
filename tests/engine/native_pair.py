"""A target and a draft that the kernels in C can run, and engines that run them by other ways."""

from pathlib import Path
from typing import Any

from tests.engine.planners import FixedPlanner, loops_in_c, phases_of, use_planner, without_loop
from tests.models import make_engine, save_perturbed, save_random_llama
from truedraft.engine.core.engine import EngineCore

VOCAB_SIZE = 40
# More seconds than any of these takes.
LONG = 1000.0


def save_pair(folder: Path, draft_vocab_size: int = VOCAB_SIZE) -> tuple[str, str]:
    """Heads of 16 numbers, and weights in float32."""
    target = save_random_llama(folder / "target", seed=1, vocab_size=VOCAB_SIZE, hidden=64, std=0.2)
    if draft_vocab_size == VOCAB_SIZE:
        return target, save_perturbed(folder / "draft", target, seed=2, noise=0.02)
    draft = save_random_llama(folder / "draft", 3, draft_vocab_size, layers=1, hidden=64, std=0.2)
    return target, draft


def make_twins(
    target: str,
    draft: str,
    max_rounds: int = 5,
    max_draft_len: int = 1000,
    **config: Any,
) -> tuple[EngineCore, EngineCore]:
    """An engine whose rounds run in C, several a step, and one that takes them phase by phase."""
    native, phased = (make_engine(target, draft, **config) for _ in range(2))
    assert loops_in_c(native)
    phases_of(native).loop.seconds = LONG  # type: ignore[union-attr]
    phases_of(native).loop.max_draft_len = max_draft_len  # type: ignore[union-attr]
    phases_of(native).step_seconds = LONG
    phased.runner = without_loop(phased)
    for core, rounds in ((native, max_rounds), (phased, 1)):
        planner = FixedPlanner(max_draft_len=max_draft_len, max_rounds=rounds)
        use_planner(core, planner)
    return native, phased
