"""An engine's CUDA graphs: how many there are, how often they were replayed, the same engine without them."""

from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.common import Run
from benchmarks.engine_runs import Variants
from engine.core.engine import EngineCore
from engine.models.step_graphs import StepGraphs

WITHOUT = ", without graphs"


def settings(arguments: Namespace) -> dict[str, Any]:
    """The engine's, from ``--graphs`` and ``--minutes``, most of which are for measuring."""
    return {"cuda_graphs": arguments.graphs != "off", "cuda_graph_seconds": 3 * arguments.minutes}


def graphs_of(core: EngineCore) -> dict[str, StepGraphs]:
    """By model; nothing for a model that has none."""
    models = {"target": core.target, "draft": core.draft}
    return {
        name: model.fast_pass
        for name, model in models.items()
        if model is not None and isinstance(model.fast_pass, StepGraphs)
    }


def facts(core: EngineCore) -> list[dict[str, Any]]:
    """``misses`` are passes over a few tokens of a shape that was not captured; prompts count as neither."""
    return [
        {
            "model": name,
            "captured": len(graphs.replays),
            "replays": graphs.num_replays,
            "misses": graphs.num_misses,
        }
        for name, graphs in graphs_of(core).items()
    ]


def without(core: EngineCore, variants: Variants) -> Variants:
    """The same variants, with the engine's graphs left out."""

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

    return {f"{name}{WITHOUT}": off(run) for name, run in variants.items()}


def baseline(names: Iterable[str]) -> dict[str, str]:
    """Each variant's counterpart without graphs; what has none is compared with itself."""
    names = set(names)
    return {name: name + WITHOUT if name + WITHOUT in names else name for name in names}
