"""An engine's CUDA graphs: how many there are, how often they were replayed, the same engine without them."""

from collections.abc import Callable
from typing import Any

from benchmarks.common import Run
from benchmarks.engine_runs import Variants
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.rounds.capture.graphs import RoundGraphs
from truedraft.engine.rounds.round import RoundRunner

WITHOUT = ", without graphs"


def graphs_of(core: EngineCore) -> RoundGraphs | None:
    assert isinstance(core.runner, RoundRunner)
    return core.runner.graphs


def facts(core: EngineCore) -> list[dict[str, Any]]:
    """``misses`` are passes over a few tokens of a shape that was not captured; prompts count as
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
