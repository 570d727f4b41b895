"""A target and a draft that the kernels in C can run, and engines that run them by other ways."""

from pathlib import Path
from typing import Any

from engine.core.engine import EngineCore
from engine.models.decoder_only import DecoderModel
from engine.proposers.draft_model import DraftModelProposer
from tests.models import make_engine, save_perturbed, save_random_llama

VOCAB_SIZE = 40


def save_pair(folder: Path, draft_vocab_size: int = VOCAB_SIZE) -> tuple[str, str]:
    """Heads of 16 numbers, and weights in float32."""
    target = save_random_llama(folder / "target", seed=1, vocab_size=VOCAB_SIZE, hidden=64, std=0.2)
    if draft_vocab_size == VOCAB_SIZE:
        return target, save_perturbed(folder / "draft", target, seed=2, noise=0.02)
    draft = save_random_llama(folder / "draft", 3, draft_vocab_size, layers=1, hidden=64, std=0.2)
    return target, draft


def draft_model(core: EngineCore) -> DecoderModel:
    proposer = core.proposer.proposers["draft_model"]
    assert isinstance(proposer, DraftModelProposer)
    return proposer.model


def make_twins(target: str, draft: str, **config: Any) -> tuple[EngineCore, EngineCore]:
    """An engine with passes and rounds of drafts in one call each, and one that makes them one by one."""
    whole, stepwise = (make_engine(target, draft, **config) for _ in range(2))
    whole.whole_rounds = stepwise.whole_rounds = None
    for model in (stepwise.target, draft_model(stepwise)):
        assert model.whole_pass is not None
        model.whole_pass = None
    return whole, stepwise
