"""An engine's CUDA graphs: how many there are, how often they were replayed, the same engine without them."""

from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.common import Run
from benchmarks.engine_runs import Variants
from engine.core.engine import EngineCore
from engine.models.captured_round import CapturedRound
from engine.models.draft_chain import DraftChain
from engine.models.step_graphs import StepGraphs
from engine.proposers.draft_model import DraftModelProposer

WITHOUT = ", without graphs"
BY_PHASE = ", phase by phase"  # with graphs, but without those that score and judge


def settings(arguments: Namespace) -> dict[str, Any]:
    """The engine's, from ``--graphs`` and ``--minutes``, most of which are for measuring."""
    return {"cuda_graphs": arguments.graphs != "off", "cuda_graph_seconds": 3 * arguments.minutes}


def graphs_of(core: EngineCore) -> dict[str, StepGraphs]:
    """By model; nothing for a model that has none."""
    models = {"target": core.target}
    draft = core.proposer.proposers.get("draft_model")
    if isinstance(draft, DraftModelProposer):
        models["draft"] = draft.model
    return {name: model.graphs for name, model in models.items() if isinstance(model.graphs, StepGraphs)}


def facts(core: EngineCore) -> list[dict[str, Any]]:
    """``misses`` are passes over a few tokens of a shape that was not captured; prompts count as neither. Of
    draft chains they are chains, of rounds those that could have been captured."""
    captured: dict[str, StepGraphs | DraftChain | CapturedRound] = dict(graphs_of(core))
    draft = core.proposer.proposers.get("draft_model")
    if isinstance(draft, DraftModelProposer) and isinstance(draft.model.draft_chain, DraftChain):
        captured["draft chains"] = draft.model.draft_chain
    if core.target.captured_round is not None:
        captured["rounds"] = core.target.captured_round
    return [
        {
            "model": name,
            "captured": len(graphs.replays),
            "replays": graphs.num_replays,
            "misses": graphs.num_misses,
        }
        for name, graphs in captured.items()
    ]


def without(core: EngineCore, variants: Variants) -> Variants:
    """The same variants, with the engine's graphs left out, and with captured rounds alone left out."""

    def by_phase(run: Callable[[], Run]) -> Callable[[], Run]:
        def run_by_phase() -> Run:
            rounds, core.target.captured_round = core.target.captured_round, None
            try:
                return run()
            finally:
                core.target.captured_round = rounds

        return run_by_phase

    def off(run: Callable[[], Run]) -> Callable[[], Run]:
        def run_without() -> Run:
            for graphs in graphs_of(core).values():
                graphs.enabled = False
            try:
                return run()
            finally:
                for graphs in graphs_of(core).values():
                    graphs.enabled = True

        return run_without

    return {
        **{f"{name}{BY_PHASE}": by_phase(run) for name, run in variants.items()},
        **{f"{name}{WITHOUT}": off(run) for name, run in variants.items()},
    }


def baseline(names: Iterable[str]) -> dict[str, str]:
    """Each variant's counterpart without graphs; what has none is compared with itself."""
    names = set(names)
    counterparts = {name: name.removesuffix(BY_PHASE) + WITHOUT for name in names}
    return {name: other if other in names else name for name, other in counterparts.items()}
