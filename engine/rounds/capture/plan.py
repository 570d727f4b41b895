"""Plans which passes to capture, with how much time and memory.

This is decided before the caches are sized, because the graphs need memory too; the capture itself follows
when the caches exist, because a graph knows their addresses.
"""

import logging
import time
from dataclasses import dataclass

from truedraft.engine.config import EngineConfig
from truedraft.engine.cuda import torch_sampling
from truedraft.engine.cuda.triton_sampling import Sampling, find_sampling
from truedraft.engine.memory.cache_memory import free_memory
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.heads.head import Head
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.working_memory import bytes_of_parts
from truedraft.engine.rounds.capture.capture import Capture, make_capture
from truedraft.engine.rounds.capture.graphs import DraftPass, HeadPass, RoundGraphs, ScorePass, capture_rounds
from truedraft.engine.rounds.capture.head_passes import HeadPasses
from truedraft.engine.rounds.capture.rows import DeviceRows
from truedraft.engine.rounds.capture.shapes import Shape, max_drafts, plan_shapes, with_head

# The driver keeps this much for one pass of some thousand kernels: a guess, which has not been measured.
GRAPH_BYTES = 8 << 20
# Libraries set this much aside once for the stream of the captures (cuBLAS 32 MiB on an H100), and the common
# pool by rounding up: a guess as well.
FIXED_BYTES = 128 << 20
# Graphs may take at most this share of the memory that is free once the models are loaded.
MAX_SHARE = 0.25
# Verdicts need this many bytes at once for each position and token of the vocabulary: two copies of the
# logits and, by a kernel, their distributions, or the temporary tensors of torch's operations.
KERNEL_BYTES, TORCH_BYTES = 12, 84

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphPlan:
    capture: Capture
    planned: list[Shape]
    max_drafts: int
    max_blocks: int
    sampling: Sampling
    seconds: float
    memory: int
    has_draft: bool
    taps: list[int]
    head: Head | None

    @property
    def num_scored(self) -> int:
        """Returns the most tokens whose logits a captured pass makes."""
        return max(shape.num_tokens for shape in self.planned)

    def captured(
        self, target: ModelRunner, draft: ModelRunner | None, head: ModelRunner | None, num_blocks: int
    ) -> tuple[ModelRunner, ModelRunner | None, ModelRunner | None, RoundGraphs | None]:
        """Captures the graphs and returns the models with them. All caches must have one block after the
        ``num_blocks`` that their pools know."""
        started, free = time.monotonic(), self.capture.free_memory()
        block_size = target.cache.block_size
        rows = DeviceRows(
            max(shape.rows for shape in self.planned),
            self.max_drafts,
            self.max_blocks,
            block_size,
            num_blocks * block_size,
            target.device,
            self.capture,
        )
        captured = draft if self.has_draft else None
        passes = None
        if self.head is not None and head is not None:
            max_fed = max((shape.fed for shape in self.planned if shape.queries is None), default=1)
            passes = HeadPasses(self.head, head, rows, max_fed, self.capture)
        graphs = RoundGraphs(target, captured, rows, self.planned, self.capture, self.taps, passes)
        deadline, min_free = started + self.seconds, free - self.memory
        if not capture_rounds(graphs, self.planned, num_blocks, deadline, min_free):
            return target, draft, head, None
        if captured is not None:
            draft = ModelRunner(captured.model, captured.cache, DraftPass(graphs))
        if passes is not None:
            head = ModelRunner(passes.runner.model, passes.runner.cache, HeadPass(graphs))
        return ModelRunner(target.model, target.cache, ScorePass(graphs)), draft, head, graphs


def plan_graphs(
    config: EngineConfig, target: Model, draft: Model | None, max_model_len: int, head: Head | None = None
) -> GraphPlan | None:
    """Plans the graphs. Returns None where nothing can be captured: on a CPU, and for models without the
    kernels of this package. The states that a ``head`` reads are captured even if its own passes cannot
    be."""
    capture = make_capture(target.device) if config.cuda_graphs and _can_be_captured(target) else None
    if capture is None:
        return None
    if draft is not None and not (_can_be_captured(draft) and draft.device == target.device):
        draft = None
    k, num_rows = config.num_speculative_tokens, config.num_sequences_on(target.device.type)
    taps = [] if head is None else sorted(set(head.taps))
    if head is not None and not (_can_be_captured(head.model) and head.model.device == target.device):
        head = None
    draws = draft is not None or head is not None
    planned = plan_shapes(num_rows, k, draws)
    longest, drawn = max_drafts(k, draws)
    sampling = find_sampling(target.vocab_size, longest, target.device)
    judged_bytes = TORCH_BYTES if sampling is torch_sampling else KERNEL_BYTES
    if head is not None:
        planned = with_head(planned, drawn)
    max_blocks = -(-max_model_len // config.block_size)
    tables = 4 * 8 * num_rows * max_blocks  # Both models have them twice: on the device, and as sent.
    limit = int(MAX_SHARE * free_memory(target.device)) - tables - _tapped_bytes(target, planned, taps)
    planned = _affordable(target, planned, drawn, judged_bytes, limit)
    if not planned:
        logger.warning("CUDA graphs need more memory than there is, and are not used")
        return None
    memory = _memory(target, planned, drawn, judged_bytes) + tables + _tapped_bytes(target, planned, taps)
    seconds = config.cuda_graph_seconds
    has_draft = draft is not None
    return GraphPlan(capture, planned, longest, max_blocks, sampling, seconds, memory, has_draft, taps, head)


def _can_be_captured(model: Model) -> bool:
    """Tells whether a pass makes no decision on the host, which the capture would freeze."""
    return isinstance(model, FusedDecoder) and model.reads_in_place and not model.needs_host


def _tapped_bytes(target: Model, planned: list[Shape], taps: list[int]) -> int:
    """Returns the bytes of tapped states: in place, as one pass has them twice, and as a round keeps them.
    The inputs and outputs of a head are fewer than one of these."""
    if not taps:
        return 0
    num_tokens = max(shape.num_tokens for shape in planned)
    return int(5 * num_tokens * len(taps) * target.config.hidden_size * target.dtype.itemsize)


def _affordable(
    model: Model, planned: list[Shape], max_drawn: int, judged_bytes: int, limit: int
) -> list[Shape]:
    """Leaves out the most expensive items, until the rest needs no more than ``limit`` bytes."""
    while planned and _memory(model, planned, max_drawn, judged_bytes) > limit:
        largest = max(planned, key=lambda shape: _own_bytes(model, shape, judged_bytes))
        planned = [shape for shape in planned if shape != largest]
    return planned


def _own_bytes(model: Model, shape: Shape, judged_bytes: int) -> int:
    """Returns the bytes of the tensors that live while the pass runs, or while what it scored is judged."""
    judged = shape.num_tokens * judged_bytes * model.vocab_size
    logits = 2 * shape.num_tokens * model.vocab_size * model.dtype.itemsize
    if isinstance(model, FusedDecoder) and model.is_quantised:
        logits += 4 * shape.num_tokens * model.vocab_size  # These are products before they are joined.
    activations = 4 * shape.num_tokens * model.config.intermediate_size * model.dtype.itemsize
    return max(judged, int(logits + activations + shape.num_tokens * bytes_of_parts(model)))


def _memory(model: Model, planned: list[Shape], max_drawn: int, judged_bytes: int) -> int:
    """Returns an upper bound in bytes: memory next to the graphs, the drafts' distributions, the largest
    pass's tensors in the common pool, and what the driver keeps for each pass."""
    if not planned:
        return 0
    num_tokens, max_rows = max(shape.num_tokens for shape in planned), max(shape.rows for shape in planned)
    drawn = max_rows * (2 + max_drawn) if max_drawn else 0
    static = (num_tokens + drawn) * model.vocab_size * 4
    largest = max(_own_bytes(model, shape, judged_bytes) for shape in planned)
    return FIXED_BYTES + static + largest + len(planned) * GRAPH_BYTES
