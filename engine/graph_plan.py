"""Which passes of which models are to be captured as CUDA graphs, with how much time and memory.

Decided before the caches are sized, because the graphs need memory too; done when the caches are there,
because a graph knows their addresses.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.cache_memory import free_memory
from engine.config import EngineConfig
from engine.models.base import Model
from engine.models.graph_capture import Capture, make_capture
from engine.models.llama import Llama
from engine.models.model_runner import ModelRunner
from engine.models.step_buckets import Bucket, plan_buckets
from engine.models.step_graphs import capture_steps

# What the driver keeps for one graph of some thousand kernels: a guess, which has not been measured.
GRAPH_BYTES = 4 << 20
# What libraries set aside once for the stream of the captures (cuBLAS 32 MiB on an H100), and the common pool
# by rounding up: a guess as well.
FIXED_BYTES = 128 << 20
# The most that graphs may take of the memory that is free once the models are loaded.
MAX_SHARE = 0.25
# Tokens of a scored row where the draft length is not fixed, and of a drafting row after full acceptance.
USUAL_SCORED, USUAL_DRAFTED = 5, 2


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """``models`` with their buckets; the one that is captured first comes first."""

    capture: Capture
    models: list[tuple[Model, list[Bucket]]]
    seconds: float
    memory: int

    def carry_out(self, runners: Sequence[ModelRunner], num_blocks: int) -> list[ModelRunner]:
        """Capture: ``runners`` with the graphs of their models. Every cache must have one block behind the
        ``num_blocks`` that its pool knows."""
        started, free = time.monotonic(), self.capture.free_memory()
        captured = list(runners)
        for number, (model, buckets) in enumerate(self.models, start=1):
            # The first gets its share of time and memory, the last what is left of them.
            share = number / len(self.models)
            allowed = min(self.memory, FIXED_BYTES + int(self.memory * share))
            deadline = started + self.seconds * share
            (place,) = [place for place, runner in enumerate(runners) if runner.model is model]
            eager = runners[place]
            graphs = capture_steps(eager, buckets, num_blocks, self.capture, deadline, free - allowed)
            captured[place] = ModelRunner(model, eager.cache, graphs)
        return captured


def plan_graphs(
    config: EngineConfig, target: Model, draft: Model | None, max_model_len: int
) -> GraphPlan | None:
    """None where nothing can be captured: on a CPU, and for models whose layers are not ``Llama``'s."""
    k = config.num_speculative_tokens
    scored = USUAL_SCORED if k == "auto" else k + 1
    wishes = [(target, scored)] if draft is None else [(draft, USUAL_DRAFTED), (target, scored)]
    wishes = [(model, queries) for model, queries in wishes if _can_be_captured(model)]
    capture = make_capture(target.device) if config.cuda_graphs and wishes else None
    if capture is None:
        return None
    models = []
    for model, queries in wishes:
        gathers = not _reads_in_place(model)
        buckets = plan_buckets(config.max_num_sequences, max_model_len, config.block_size, queries, gathers)
        if buckets and model.device == target.device:
            models.append((model, buckets))
    needed = FIXED_BYTES + sum(_memory(model, buckets, config.block_size) for model, buckets in models)
    memory = min(needed, int(MAX_SHARE * free_memory(target.device)))
    return GraphPlan(capture, models, config.cuda_graph_seconds, memory)


def _can_be_captured(model: Model) -> bool:
    """Rotary angles that follow the longest text so far would be frozen at those of the capture."""
    return isinstance(model, Llama) and not model.is_native and model.rotary.is_static


def _reads_in_place(model: Model) -> bool:
    return isinstance(model, Llama) and model.reads_in_place


def _memory(model: Model, buckets: list[Bucket], block_size: int) -> int:
    """Bytes, from above: what lies beside the graphs, the largest layer's tensors in the common pool, and
    what the driver keeps for each graph."""
    item, config = model.dtype.itemsize, model.config
    num_tokens = max(bucket.num_tokens for bucket in buckets)
    num_keys = max(bucket.rows * bucket.blocks for bucket in buckets) * block_size
    scores = max(bucket.num_tokens * bucket.blocks for bucket in buckets) * block_size
    logits = num_tokens * model.vocab_size * (4 + 2 * item)
    gathered = 2 * num_keys * max(layer.num_elements for layer in model.layers) * item
    masks: int = 2 * scores * config.num_attention_heads * item
    # A kernel that reads keys in place has neither.
    keys_and_masks = 0 if _reads_in_place(model) else gathered + masks
    activations: int = 4 * num_tokens * config.intermediate_size * item
    return logits + keys_and_masks + activations + len(buckets) * GRAPH_BYTES
