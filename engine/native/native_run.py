"""Has the operations of a forward in C (``layers.c``, ``attention.c``), for any number of float32 rows."""

import ctypes
from ctypes import byref
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from truedraft.engine.layers.linear import Linear
from truedraft.engine.layers.mlp import ACTIVATIONS, UNGATED, Activation, Experts, HeadLinears
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.recurrent import Recurrence
from truedraft.engine.layers.rotary import Rotary
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.memory.batch import ForwardBatch
from truedraft.engine.memory.kv_cache import KVCache, stored_size
from truedraft.engine.memory.pointers import PointerError, address, shape_of
from truedraft.engine.native.library import Heads, Spans
from truedraft.engine.native.mlp import NativeExperts
from truedraft.engine.native.recurrence import NativeRecurrence, NativeStates
from truedraft.engine.native.shared import WeightType

# A head fills whole vector registers, up to as many as the kernels keep.
HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE = 16, 576
FLOAT, INTEGER = torch.float32, torch.int64
# A cache has one of these types.
CACHE_TYPES = {
    torch.float32: WeightType.FLOAT32,
    torch.float16: WeightType.FLOAT16,
    torch.int8: WeightType.WHOLE8,
}


def serves(dtype: torch.dtype, device: torch.device, head_size: int) -> bool:
    """Tells whether the kernels can run a model like this."""
    fits = head_size % HEAD_SIZE_MULTIPLE == 0 and head_size <= MAX_HEAD_SIZE
    return device.type == "cpu" and dtype == torch.float32 and fits


class NativeKernels:
    """Begins each forward, and keeps what does not change from one to the next."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        # Heads keep addresses in this cache, which were checked when they were made.
        self._cache: KVCache | None = None
        self._heads: dict[int, Heads] = {}
        self._experts: dict[int, NativeExperts] = {}
        self._recurrences: dict[int, NativeRecurrence] = {}

    def __call__(self, batch: ForwardBatch, cache: KVCache, rotary: Rotary) -> "NativeRun":
        return NativeRun(self, batch, cache, rotary)

    def heads(self, shape: AttentionShape, cache: KVCache) -> Heads:
        self._begin(cache)
        if shape.layer not in self._heads:
            self._heads[shape.layer] = _heads(shape, cache)
        return self._heads[shape.layer]

    def experts(self, experts: Experts) -> NativeExperts:
        """Returns experts as structures of C. The experts are kept alive, so that no others get their id."""
        if id(experts) not in self._experts:
            self._experts[id(experts)] = NativeExperts(experts)
        return self._experts[id(experts)]

    def recurrence(self, rule: Recurrence, cache: KVCache) -> NativeRecurrence:
        self._begin(cache)
        if rule.layer not in self._recurrences:
            self._recurrences[rule.layer] = NativeRecurrence(rule, cache.states[rule.layer])
        return self._recurrences[rule.layer]

    def _begin(self, cache: KVCache) -> None:
        if cache is not self._cache:
            self._cache, self._heads, self._recurrences = cache, {}, {}


class NativeRun:
    """Is a ``LayerRun``."""

    def __init__(self, kernels: NativeKernels, batch: ForwardBatch, cache: KVCache, rotary: Rotary) -> None:
        self.kernels = kernels
        self.batch = batch
        self.cache = cache
        tables = [span.table.entries for span in batch.spans]
        first_block = accumulate(map(len, tables[:-1]), initial=0)
        # These are kept as long as the pointers into them are used.
        self.numbers = np.array(
            [
                *batch.offsets,
                *(span.table.num_computed_tokens for span in batch.spans),
                *first_block,
                *(block for table in tables for block in table),
            ],
            dtype=np.int64,
        )
        num_spans, num_tokens = len(batch.spans), batch.offsets[-1]
        start = address(self.numbers, INTEGER, (len(self.numbers),))
        end = max((span.end for span in batch.spans), default=0)
        if batch.axes is not None:
            self.angles = (*rotary.mixed(batch.axes), torch.arange(num_tokens))
        elif rotary.table is None:
            self.angles = (*rotary.compute(batch.positions[0]), torch.arange(num_tokens))
        else:
            rotary.reach(end)
            self.angles = (*rotary.table, batch.positions[0].contiguous())
        cos, sin, rows = self.angles
        kinds, num_angles, size = angles = shape_of(cos, 3)
        if rotary.table is not None and batch.axes is None and end > num_angles:
            raise PointerError(f"there are {num_angles} angles for {end} positions")
        self.rotary = kinds, size
        own = batch.window_slots
        num_own, num_kinds = cache.num_window_blocks, 1 if own is None else 2
        if num_tokens and num_kinds != (1 if num_own is None else 2):
            raise PointerError("a table has blocks for windows where the cache has none, or has none")
        self.slots = batch.slots if own is None else torch.cat((batch.slots, own))
        # Keys and values must reach as far as the last block and slot of their kind.
        blocks = self.numbers[3 * num_spans + 1 :].reshape(-1, num_kinds)
        slots = ([batch.slots] if own is None else [batch.slots, own]) if num_tokens else []
        ends = [int(each.max()) + 1 for each in slots] or [0] * num_kinds
        of_blocks = batch.block_size * (blocks.max(0, initial=-1) + 1)
        self.num_slots = np.maximum(of_blocks, ends).tolist()
        if min([int(each.min()) for each in slots] + [int(blocks.min(initial=0))]) < 0:
            raise PointerError("there are no slots and blocks below 0")
        if num_own and own is not None and int(own.max()) >= batch.block_size * (num_own - 1):
            raise PointerError("a token is stored in the block that belongs to nobody")
        self.spans = Spans(
            num_spans=num_spans,
            num_tokens=num_tokens,
            block_size=batch.block_size,
            num_kinds=num_kinds,
            slots=address(self.slots, INTEGER, (num_kinds * num_tokens,)),
            first_token=start,
            num_stored=start + 8 * (num_spans + 1),
            first_block=start + 8 * (2 * num_spans + 1),
            blocks=start + 8 * (3 * num_spans + 1),
            angle=address(rows, INTEGER, (num_tokens,)),
            num_angles=num_angles,
            rotary_size=size,
            cos=address(cos, FLOAT, angles),
            sin=address(sin, FLOAT, angles),
        )

    def linear(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x) if residual is None else linear.add_to(residual, x)

    def by_head(self, linears: HeadLinears, x: torch.Tensor) -> torch.Tensor:
        return linears.by_definition(x, self)

    def norm(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = x.contiguous()
        added = None if residual is None else residual.contiguous()
        out = torch.empty_like(x)
        shape = len(x), norm.size
        if norm.bias is not None:
            assert residual is None
            weight, bias = (address(each, FLOAT, (norm.size,)) for each in (norm.weight, norm.bias))
            self.kernels.library.layer_norm(
                address(out, FLOAT, shape), address(x, FLOAT, shape), weight, bias, *shape, norm.eps
            )
            return out
        if norm.centres:
            self.kernels.library.centre(address(out, FLOAT, shape), address(x, FLOAT, shape), *shape)
            x = out
        self.kernels.library.rms_norm(
            address(out, FLOAT, shape),
            address(x, FLOAT, shape),
            address(norm.weight, FLOAT, (norm.size,)),
            None if added is None else address(added, FLOAT, shape),
            *shape,
            norm.eps,
        )
        return out

    def attend(self, shape: AttentionShape, qkv: torch.Tensor) -> torch.Tensor:
        qkv = qkv.contiguous()
        tokens, size = self.spans.num_tokens, shape.head_size
        width, attended = qkv_width(shape), shape.num_heads * size
        out = torch.empty(tokens, attended, dtype=FLOAT)
        heads = self.kernels.heads(shape, self.cache)
        check_rotary(shape, *self.rotary)
        needed, stored = self.num_slots[heads.kind], len(self.cache.keys[shape.cached])
        if needed > stored:
            raise PointerError(f"the cache has {stored} slots, not {needed}")
        self.kernels.library.attend(
            byref(self.spans),
            byref(heads),
            address(qkv, FLOAT, (tokens, width)),
            address(out, FLOAT, (tokens, attended)),
        )
        return out

    def recur(self, recurrence: Recurrence, x: torch.Tensor) -> torch.Tensor:
        return self._states.recur(self.kernels.recurrence(recurrence, self.cache), x)

    @cached_property
    def _states(self) -> NativeStates:
        return NativeStates(self.kernels.library, self.batch.spans)

    def gate(self, activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, width = shape_of(gate_up, 2)
        each = 1 if activation in UNGATED else 2
        shape = rows, width // each
        out = torch.empty(shape, dtype=FLOAT)
        self.kernels.library.gate(
            address(out, FLOAT, shape),
            address(gate_up, FLOAT, (rows, each * shape[1])),
            ACTIVATIONS.index(activation),
            *shape,
        )
        return out

    def experts(
        self,
        experts: Experts,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        routed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = x.contiguous()
        routed = x if routed is None else routed.contiguous()
        added = None if residual is None else residual.contiguous()
        made = self.kernels.experts(experts)
        shape = len(x), made.hidden_size
        out = torch.empty(shape, dtype=FLOAT)
        is_done = self.kernels.library.mix_experts(
            byref(made.struct),
            address(out, FLOAT, shape),
            address(x, FLOAT, shape),
            address(routed, FLOAT, shape),
            None if added is None else address(added, FLOAT, shape),
            len(x),
        )
        if not is_done:
            raise MemoryError("no memory for the experts of a pass")
        return out

    def cap(self, logits: torch.Tensor, softcap: float) -> torch.Tensor:
        logits = logits.contiguous()
        shape = shape_of(logits, 2)
        self.kernels.library.cap(address(logits, FLOAT, shape), *shape, softcap)
        return logits


def qkv_width(shape: AttentionShape) -> int:
    """Returns the number of inputs of each token."""
    queries = (2 if shape.gated else 1) * shape.num_heads
    return (queries + shape.num_stored_heads + shape.num_value_heads) * shape.head_size


def check_rotary(shape: AttentionShape, kinds: int, size: int) -> None:
    """Raises ``PointerError`` unless a layer can use these angles [kinds, positions, size]."""
    if shape.rotary is None:
        return
    pairs, distance = shape.turned or (size // 2, size // 2)
    is_fit = 0 < 2 * pairs <= size and pairs <= distance and distance + pairs <= shape.head_size
    if shape.rotary >= kinds or size % 2 or not is_fit or (shape.turned and shape.interleaved):
        raise PointerError(f"{kinds} tables of angles for {size} numbers are none for {shape}")


def _heads(shape: AttentionShape, cache: KVCache) -> Heads:
    heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_size
    if size % HEAD_SIZE_MULTIPLE or not 0 < size <= MAX_HEAD_SIZE or heads % kv_heads:
        raise PointerError(f"C does not attend with {heads} heads, {kv_heads} of keys, of {size} numbers")
    keys, values, norm = cache.keys[shape.cached], cache.values[shape.cached], shape.norm
    normed = heads + shape.num_stored_heads
    pairs, distance = shape.turned or (0, 0)
    if keys.dtype not in CACHE_TYPES:
        raise PointerError(f"C has no cache in {keys.dtype}")
    if shape.values_are_keys != (values is keys) or (shape.values_are_keys and shape.value_norm):
        raise PointerError("C norms no values, and stores none, where keys are the values")
    query_norm, key_norm = shape.whole_norms or (None, None)
    if (value_norm := shape.value_norm) is not None and (norm is None or value_norm.eps != norm.eps):
        raise PointerError("C norms values where it norms queries and keys, with the same eps")
    stored = len(keys), kv_heads, stored_size(size, keys.dtype)
    return Heads(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        gated=shape.gated,
        kind=int(cache.has_own_blocks(shape.cached)),
        window=shape.sliding_window or 0,
        looks_ahead=shape.looks_ahead,
        rotary=-1 if shape.rotary is None else shape.rotary,
        interleaved=shape.interleaved,
        norm_after_rotary=shape.norm_after_rotary,
        scaling=shape.scaling,
        softcap=shape.softcap or 0.0,
        norm_eps=0.0 if (some := norm or query_norm) is None else some.eps,
        norm_weight=None if norm is None else address(norm.weight, FLOAT, (normed, size)),
        value_norm=None if value_norm is None else address(value_norm.weight, FLOAT, (size,)),
        turned_pairs=pairs,
        distance=distance,
        is_reader=shape.source is not None,
        values_are_keys=shape.values_are_keys,
        query_norm=None if query_norm is None else address(query_norm.weight, FLOAT, (heads * size,)),
        key_norm=None if key_norm is None else address(key_norm.weight, FLOAT, (kv_heads * size,)),
        sinks=None if shape.sinks is None else address(shape.sinks, FLOAT, (heads,)),
        cache_type=CACHE_TYPES[keys.dtype],
        keys=address(keys, keys.dtype, stored),
        values=address(values, keys.dtype, stored),
    )
