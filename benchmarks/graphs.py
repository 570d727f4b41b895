"""An engine's CUDA graphs: how many there are, how often they were replayed, the same engine without them."""

from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.common import Run
from benchmarks.engine_runs import Variants
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.runtime.cuda.graphs import RoundGraphs
from truedraft.engine.runtime.cuda.runner import CudaRunner

WITHOUT = ", without graphs"


def settings(arguments: Namespace) -> dict[str, Any]:
    """The engine's, from ``--graphs`` and ``--minutes``, most of which are for measuring."""
    return {"cuda_graphs": arguments.graphs != "off", "cuda_graph_seconds": 3 * arguments.minutes}


def graphs_of(core: EngineCore) -> RoundGraphs | None:
    return core.runner.graphs if isinstance(core.runner, CudaRunner) else None


def facts(core: EngineCore) -> list[dict[str, Any]]:
    """``misses`` are rounds and passes over a few tokens of a shape that was not captured; prompts count as
    neither. No row where nothing is captured."""
    graphs = graphs_of(core)
    if graphs is None:
        return []
    captured, replays, misses = len(graphs.replays), graphs.num_replays, graphs.num_misses
    return [{"captured": captured, "replays": replays, "misses": misses}]


def without(core: EngineCore, variants: Variants) -> Variants:
    """The same variants, with the engine's graphs left out."""

    def off(run: Callable[[], Run]) -> Callable[[], Run]:
        def run_without() -> Run:
            graphs = graphs_of(core)
            if graphs is None:
                return run()
            graphs.enabled = False
            try:
                return run()
            finally:
                graphs.enabled = True

        return run_without

    return {f"{name}{WITHOUT}": off(run) for name, run in variants.items()}


def baseline(names: Iterable[str]) -> dict[str, str]:
    """Each variant's counterpart without graphs; what has none is compared with itself."""
    names = set(names)
    return {name: name + WITHOUT if name + WITHOUT in names else name for name in names}
