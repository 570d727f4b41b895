"""Checks the proposers of an engine, and which of them the settings name."""

from collections.abc import Sequence

from truedraft.engine.config import EngineConfig
from truedraft.engine.core.proposer import Proposer
from truedraft.engine.core.step import AUTO_LIMITS
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.messages import ASSISTANT, DRAFT_MODEL, EAGLE, MTP, Method
from truedraft.engine.models.base import Model


def check_proposers(proposers: Sequence[Proposer], target: Model) -> None:
    """Refuses proposers with the same name, and those that need what this engine does not have."""
    taken = {"auto", "none", *AUTO_LIMITS}
    for proposer in proposers:
        name, num_layers = proposer.name, target.num_layers
        if name in taken:
            raise ModelLoadError(
                f"two proposers are named {name!r}, or another source has that name: rename one"
            )
        taken.add(name)
        if proposer.taps and proposer.can_lag:
            raise ModelLoadError(f"proposer {name!r} taps layers, so it cannot lag: set can_lag to False")
        if proposer.taps and not target.has_taps:
            kind = target.config.model_type
            raise ModelLoadError(
                f"proposer {name!r} taps layers, but {kind} models are not fused: none can be"
            )
        if not all(-num_layers <= tap <= num_layers for tap in proposer.taps):
            raise ModelLoadError(
                f"proposer {name!r} taps {list(proposer.taps)}; the target has {num_layers} layers"
            )


def default_method(config: EngineConfig, proposers: Sequence[Proposer]) -> Method:
    if config.method == "auto" and not proposers and config.num_speculative_tokens != "auto":
        return "none"  # N-grams alone can cost more than they save, and a fixed length could not adapt.
    names = {proposer.name for proposer in proposers}
    wanted = {
        DRAFT_MODEL: "no draft model",
        EAGLE: "the draft is no EAGLE-3 head, or none",
        MTP: "the draft is no MTP head, or none",
        ASSISTANT: "the draft is no assistant of Gemma 4, or none",
    }
    for name, what in wanted.items():
        if config.method == name and name not in names:
            raise ModelLoadError(f"method is {name}, but {what} is given")
    return config.method
