"""A target and a draft that the kernels in C can run, and engines that run them by other ways."""

from pathlib import Path
from typing import Any

from tests.engine.planners import FixedPlanner, phases_of, use_planner
from tests.models import make_engine, save_perturbed, save_random_llama
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.proposers.draft_model import DraftModelProposer
from truedraft.engine.proposers.heads.proposer import HeadProposer
from truedraft.engine.runtime.native.drafter import NativeDrafter
from truedraft.engine.runtime.native.runner import NativeRunner

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


def native_runner(core: EngineCore, step_seconds: float = LONG, max_draft_len: int = 1000) -> NativeRunner:
    """Makes a runner of the engine's models, with phases as a fallback."""
    target, phases = core.target.fast_pass, phases_of(core)
    assert isinstance(target, NativeDecoder)
    drafter = next(
        (
            NativeDrafter(proposer, target)
            for proposer in phases.proposers
            if isinstance(proposer, DraftModelProposer | HeadProposer)
        ),
        None,
    )
    runner = NativeRunner(target, drafter, phases.proposers, phases, True, step_seconds)
    runner.max_draft_len = max_draft_len
    return runner


def make_twins(
    target: str,
    draft: str,
    max_rounds: int = 5,
    max_draft_len: int = 1000,
    **config: Any,
) -> tuple[EngineCore, EngineCore]:
    """An engine whose rounds run in C, several a step, and one that takes them phase by phase."""
    native, phased = (make_engine(target, draft, **config) for _ in range(2))
    native.runner = native_runner(native, max_draft_len=max_draft_len)
    phased.runner = phases_of(phased)
    for core, rounds in ((native, max_rounds), (phased, 1)):
        planner = FixedPlanner(max_draft_len=max_draft_len, max_rounds=rounds)
        use_planner(core, planner)
    return native, phased
