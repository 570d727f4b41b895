"""Runs the parts of a layer between its matrix products on a GPU, in Triton (``kernels``).

A norm is one launch, rotary embedding and the write to the cache another, the gate of the MLP a third, and
attention reads keys where they lie; recurrences have some of their own. The kernels are used if triton, which
torch's CUDA builds bring, is installed, and if they pass checks at load: attention must compute what
gathering computes, and recurrences what torch's operations do, for every shape of program that will be
needed, which compiles them, too. Faults of the other kernels show in the model's logits, which are compared
as well.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch

from truedraft.engine.cuda import recurrent_check
from truedraft.engine.cuda.grouped_experts import ExpertKernels, GroupedExperts, TokenGroups, run_grouped
from truedraft.engine.cuda.grouped_heads import GroupedHeads, every_head, run_heads
from truedraft.engine.cuda.recurrent_check import RecurRows
from truedraft.engine.layers.attention import AttentionCall, PagedAttention, attend_group
from truedraft.engine.layers.mlp import Activation, Experts, HeadLinears
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.recurrent import Recurrence
from truedraft.engine.layers.rotary import Rotary
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.layers.torch_run import TorchPointwise
from truedraft.engine.memory.batch import (
    MAX_GROUPED_QUERIES,
    AttentionGroup,
    ForwardBatch,
    PagedRows,
    Span,
    table_slots,
)
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache

MAX_HEAD_SIZE = 256
# A key may have this many numbers before its latent vector, and a latent vector this many: as many as fit
# into registers.
MAX_TURNED, MAX_LATENT = 64, 512
# This is the first capability with matrix units for bfloat16 and with copies that run during the arithmetic.
MIN_CAPABILITY = (8, 0)
# An output may deviate from float64's by this share of the largest: rounded weights and results make up to
# half of it, a key too many or too few far more.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CHECK_BLOCK_SIZE = 16
# The rows of the check have these numbers of tokens in the cache: fewer than splits, some blocks, many.
CHECK_CONTEXTS = (2, 37, 180)
# Checks do not reach beyond windows longer than this: float64 copies of that many keys would need too much
# memory.
MAX_CHECKED_WINDOW = 8192

logger = logging.getLogger(__name__)


class AttendRows(Protocol):
    """Is the interface of ``kernels.attend_rows``."""

    def __call__(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: PagedRows,
        positions: torch.Tensor,
        block_size: int,
        scaling: float,
        sliding_window: int | None,
        num_splits: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None: ...


class AttendLatents(Protocol):
    """Is the interface of ``kernels.attend_latents``."""

    def __call__(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        rows: PagedRows,
        positions: torch.Tensor,
        block_size: int,
        scaling: float,
        num_splits: int | None = None,
    ) -> None: ...


class Kernels(ExpertKernels, Protocol):
    """Is the interface of the module ``kernels``, which tests replace."""

    attend_rows: AttendRows
    attend_latents: AttendLatents
    rotate_and_store: Callable[..., None]
    gated_silu: Callable[[torch.Tensor], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor | None], torch.Tensor]
    recur: RecurRows


class InPlaceAttention:
    """Attends over the cache: all short rows at once without gathering keys, long chunks by gathering."""

    def __init__(self, attend_rows: AttendRows, batch: ForwardBatch, cache: KVCache) -> None:
        self.attend_rows = attend_rows
        self.batch = batch
        self.cache = cache
        self._long_of: dict[int | None, list[tuple[int, int, AttentionGroup]]] = {}

    def _long(self, sliding_window: int | None) -> list[tuple[int, int, AttentionGroup]]:
        """Returns the first and last token of each long chunk, and what layers with such a window need to
        know of the chunk's keys."""
        if sliding_window not in self._long_of:
            batch = self.batch
            self._long_of[sliding_window] = [
                (batch.offsets[i], batch.offsets[i + 1], batch.lone_group(i, sliding_window))
                for i in batch.long_spans
            ]
        return self._long_of[sliding_window]

    def attend(self, call: AttentionCall, query: torch.Tensor) -> torch.Tensor:
        """Attends for ``query`` [tokens, heads, size], whose keys and values are stored; returns the same
        shape, contiguous."""
        assert call.scaling is not None
        batch, cache = self.batch, self.cache
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        rows = batch.short_rows
        if rows is not None:
            self.attend_rows(
                output,
                query,
                cache.keys[call.layer],
                cache.values[call.layer],
                rows,
                batch.positions[0],
                batch.block_size,
                call.scaling,
                call.sliding_window,
                sinks=call.sinks,
            )
        for first, end, group in self._long(call.sliding_window):
            output[first:end] = attend_group(group, cache, call, query[first:end])
        return output


def attend_latents_in_place(
    attend_latents: AttendLatents,
    shape: AttentionShape,
    batch: ForwardBatch,
    cache: KVCache,
    query: torch.Tensor,
) -> torch.Tensor:
    """Attends to latent vectors that are stored, prompts as well: gathered keys, and a mask for each query of
    each head, would take more memory than there is. Returns [tokens, heads, latent size]."""
    tokens, heads, size = query.shape
    output = torch.empty(tokens, heads, size - shape.value_start, dtype=query.dtype, device=query.device)
    for rows in (batch.short_rows, batch.long_rows):
        if rows is not None:
            attend_latents(
                output,
                query,
                cache.keys[shape.layer],
                rows,
                batch.positions[0],
                batch.block_size,
                shape.scaling,
            )
    return output


class TritonRun(TorchPointwise):
    """Is the ``LayerRun`` of one forward pass."""

    def __init__(self, kernels: Kernels, batch: ForwardBatch, cache: KVCache, rotary: Rotary) -> None:
        self.kernels = kernels
        self.batch = batch
        self.cache = cache
        self.slots = batch.slots
        self.angles = list(zip(*rotary.angles(batch.positions[0]), strict=True))
        self.no_angles = tuple(angles[:, :0] for angles in self.angles[0])
        self.attention = InPlaceAttention(kernels.attend_rows, batch, cache)
        self._every_head: dict[tuple[int, int], TokenGroups] = {}

    def norm(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if norm.centres:
            return super().norm(norm, x, residual)
        return self.kernels.rms_norm(x, norm.weight, norm.eps, residual)

    def attend(self, shape: AttentionShape, qkv: torch.Tensor) -> torch.Tensor:
        gate = None
        if shape.gated:
            qkv, gate = qkv.tensor_split((-shape.num_heads * shape.head_size,), dim=1)
            qkv = qkv.contiguous()
        query_key, value = self.split_heads(shape, qkv)
        keys, values = self.cache.keys[shape.layer], self.cache.values[shape.layer]
        angles = self.no_angles if shape.rotary is None else self.angles[shape.rotary]
        self.kernels.rotate_and_store(query_key, value, *angles, self.slots, keys, values)
        query = query_key[:, : shape.num_heads]
        if shape.values_are_keys:
            attend = self.kernels.attend_latents
            return attend_latents_in_place(attend, shape, self.batch, self.cache, query).flatten(1)
        attended = self.attention.attend(shape.call, query).view(len(qkv), -1)
        return attended if gate is None else attended * gate.sigmoid()

    def by_head(self, linears: HeadLinears, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(linears, GroupedHeads):
            return super().by_head(linears, x)
        tokens, heads, _ = x.shape
        if (tokens, heads) not in self._every_head:
            self._every_head[tokens, heads] = every_head(tokens, heads, x.device)
        return run_heads(self.kernels, linears, x, self._every_head[tokens, heads])

    def recur(self, recurrence: Recurrence, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.recur(recurrence, x, self.batch.state_rows, self.cache.states[recurrence.layer])

    def experts(
        self,
        experts: Experts,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        routed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if routed is not None or not isinstance(experts, GroupedExperts):
            return super().experts(experts, x, residual, routed)
        return run_grouped(self.kernels, experts, self, x, residual, self.batch.is_there)

    def gate(self, activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
        return self.kernels.gated_silu(gate_up) if activation == "silu" else super().gate(activation, gate_up)


def find_kernels(
    shapes: Iterable[AttentionShape],
    dtype: torch.dtype,
    device: torch.device,
    recurrences: Iterable[Recurrence] = (),
) -> Kernels | None:
    """Returns the kernels if they serve all of ``shapes`` on ``device`` and pass the checks of attention and
    ``recurrences``; otherwise None, with a warning if they were worth trying."""
    shapes = list(shapes)
    if not serves(shapes, dtype, device):
        return None
    try:
        kernels = import_module("truedraft.engine.cuda.kernels")  # This imports triton.
        checked = set()
        for shape in shapes:
            shared = shape.num_heads // shape.num_kv_heads
            tile_size = kernels.latent_tile_size if shape.values_are_keys else kernels.tile_size
            # Each is the largest number of new tokens for one size of program.
            queries = {tile_size(n * shared, dtype): n for n in range(1, MAX_GROUPED_QUERIES + 1)}
            heads = shape.num_heads, shape.num_kv_heads, shape.head_size, shape.norm is None
            look = *heads, shape.scaling, shape.sliding_window, shape.value_start, shape.sinks is None
            if look in checked:
                continue
            checked.add(look)
            for num_queries in queries.values():
                for num_splits in (1, 7):
                    attend = kernels.attend_latents if shape.values_are_keys else kernels.attend_rows
                    if not is_right(
                        partial(attend, num_splits=num_splits), shape, dtype, device, num_queries
                    ):
                        logger.warning("The attention kernel differs from torch's: it is disabled.")
                        return None
        for rule in recurrent_check.distinct(recurrences):
            if not recurrent_check.is_right(kernels.recur, rule, dtype, device, TOLERANCES[dtype]):
                logger.warning("The kernels for recurrences differ from torch's: they are disabled.")
                return None
    except Exception as error:  # compilers and drivers fail in many ways; gathering needs none of this
        logger.warning("The CUDA kernels cannot be used: %s", error, exc_info=True)
        return None
    return kernels


def serves(shapes: Iterable[AttentionShape], dtype: torch.dtype, device: torch.device) -> bool:
    """Tells whether the kernels are made for such layers on such a device, and triton is installed."""
    return (
        is_fit(device)
        and dtype in TOLERANCES
        and all(_is_served(shape) for shape in shapes)
        and find_spec("triton") is not None
    )


def _is_served(shape: AttentionShape) -> bool:
    return (
        not shape.interleaved
        and not shape.norm_after_rotary
        and shape.softcap is None
        and shape.whole_norms is None
        and (shape.sinks is None or not shape.values_are_keys)
        and shape.value_norm is None
        and shape.source is None
        and (_is_latent(shape) if shape.values_are_keys else shape.head_size <= MAX_HEAD_SIZE)
    )


def _is_latent(shape: AttentionShape) -> bool:
    """Tells whether values are latent vectors, which are the end of the one key that all heads share."""
    is_plain = shape.num_kv_heads == 1 and shape.sliding_window is None and not shape.gated
    latent = shape.head_size - shape.value_start
    return is_plain and 0 < shape.value_start <= MAX_TURNED and latent <= MAX_LATENT


def is_fit(device: torch.device) -> bool:
    # AMD's devices are called cuda as well; nothing was compiled or checked for them.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


@torch.inference_mode()
def is_right(
    kernel: AttendRows | AttendLatents,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    queries: int,
) -> bool:
    """Tells whether ``kernel`` attends like torch in float64, over rows of up to ``queries`` new tokens in
    scattered blocks of a cache that holds NaN wherever nothing was stored."""
    window, heads = shape.sliding_window, (shape.num_kv_heads, shape.head_size)
    longest = CHECK_CONTEXTS[-1] + (window if window is not None and window <= MAX_CHECKED_WINDOW else 0)
    spans, num_blocks = _check_spans([*CHECK_CONTEXTS[:-1], longest], [queries // 2 + 1, 1, queries])
    batch = ForwardBatch.build(spans, CHECK_BLOCK_SIZE, device)
    slots = [
        torch.from_numpy(table_slots(span.table, span.table.num_computed_tokens, CHECK_BLOCK_SIZE))
        for span in spans
    ]
    stored = torch.cat(slots).to(device)
    generator = torch.Generator().manual_seed(queries)
    context, new = (
        [torch.randn(tokens, *heads, generator=generator).to(device, dtype) for _ in range(2)]
        for tokens in (len(stored), len(batch.slots))
    )
    # Side by side with keys, as in a layer, and with values where no norm has made a copy: the kernel is
    # compiled for the distance from token to token.
    others = shape.num_kv_heads * (2 if shape.norm is None and not shape.values_are_keys else 1)
    query = torch.randn(len(batch.slots), shape.num_heads + others, shape.head_size, generator=generator)
    # Some keys matter much more than others, so that none can be missed.
    query = (query * (4 / (shape.scaling * shape.head_size**0.5))).to(device, dtype)[:, : shape.num_heads]
    if shape.sinks is not None:  # They matter as much as the largest scores, and differ from head to head.
        shape = replace(shape, sinks=torch.linspace(6, 14, shape.num_heads, device=device))
    outputs = []
    for used in (dtype, torch.float64):
        kept = AttentionCache(heads, None if shape.values_are_keys else heads, used, device)
        cache = KVCache([kept], num_blocks, CHECK_BLOCK_SIZE)
        cache.keys[0].fill_(torch.nan)
        cache.values[0].fill_(torch.nan)
        cache.write(0, stored, *(x.to(used) for x in context))
        call = replace(shape, layer=0, source=None).call
        q, k, v = (x.to(used) for x in (query, *new))  # This view stays as it is in its own dtype.
        if used == dtype:
            cache.write(0, batch.slots, k, v)
            outputs.append(attended_by(kernel, replace(shape, layer=0), batch, cache, q))
        else:
            outputs.append(PagedAttention(batch, cache).attend(call, q, k, v)[..., shape.value_start :])
    ours, theirs = outputs
    return bool(((ours - theirs).abs().max() <= TOLERANCES[dtype] * theirs.abs().max()).item())


def attended_by(
    kernel: AttendRows | AttendLatents,
    shape: AttentionShape,
    batch: ForwardBatch,
    cache: KVCache,
    query: torch.Tensor,
) -> torch.Tensor:
    """Returns the output of the layer's kernel, [tokens, heads, size of values]; keys are stored."""
    if shape.values_are_keys:
        return attend_latents_in_place(cast(AttendLatents, kernel), shape, batch, cache, query)
    return InPlaceAttention(cast(AttendRows, kernel), batch, cache).attend(shape.call, query)


def _check_spans(contexts: list[int], lengths: list[int]) -> tuple[list[Span], int]:
    """Returns rows of ``lengths`` new tokens after ``contexts``, in blocks that do not follow each other, and
    the number of blocks that they need."""
    needed = [
        -(-(context + length) // CHECK_BLOCK_SIZE) for context, length in zip(contexts, lengths, strict=True)
    ]
    num_blocks = sum(needed) + 2
    blocks = [*range(1, num_blocks, 2), *range(0, num_blocks, 2)]
    spans = []
    for context, length, number in zip(contexts, lengths, needed, strict=True):
        table = BlockTable()
        table.block_ids, blocks = blocks[:number], blocks[number:]
        table.num_computed_tokens = context
        spans.append(Span(table, [0] * length, length))
    return spans, num_blocks
