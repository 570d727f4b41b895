"""Thousands of wrong tensors are tried: each is refused before C is called, or means the same as a right one.

AddressSanitizer watches the same test in ``make check-native``.
"""

import dataclasses
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.engine.native_pair import save_pair
from tests.engine.native_rounds import RowPlan, Side, make_sequence
from tests.engine.recurrences import delta_rule, mamba2, short_conv, state_cache, table_in
from tests.engine.test_llama import CONFIGS, save
from tests.gguf_blocks import random_blocks
from tests.models import make_engine
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import StepPlan
from truedraft.engine.layers.linear import DenseEmbeddings
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.quantised_blocks import QuantisedBlocks
from truedraft.engine.layers.recurrent import DeltaRule, Mamba2, ShortConv
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.memory.batch import ForwardBatch, Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache
from truedraft.engine.memory.pointers import PointerError, address, shape_of
from truedraft.engine.memory.recurrent_state import LayerState
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.fusion import NativeFusion
from truedraft.engine.native.library import load_library
from truedraft.engine.native.linear import NativeLinear
from truedraft.engine.native.native_run import NativeKernels
from truedraft.engine.native.ops import NativeOps
from truedraft.engine.native.quantised import QuantisedEmbeddings, QuantisedLinear, dequantise
from truedraft.engine.native.recurrence import NativeRecurrence, NativeStates
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.rows.table import RowTable
from truedraft.engine.sampling.step_rows import StepRows

pytestmark = pytest.mark.usefixtures("needs_compiler")

CPU = torch.device("cpu")
TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]
# Functions of the library that are given numbers alone.
WITHOUT_POINTERS = {
    *("panel_size", "packed_bytes", "row_bytes", "multiplies_bfloat16", "get_num_threads", "set_num_threads")
}
Tensors = dict[str, torch.Tensor]


class Watched:
    """The library, and how often it was given a pointer."""

    def __init__(self) -> None:
        self.library: Any = load_library()
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, name)

        def counted(*arguments: Any) -> Any:
            self.calls += name not in WITHOUT_POINTERS
            return function(*arguments)

        return counted


class Operation(NamedTuple):
    """``run`` gives ``tensors``, or wrong ones of these names, to C and returns what has come of it."""

    tensors: Tensors
    run: Callable[[Any, Tensors], list[torch.Tensor]]


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape)


def row_operations() -> dict[str, Operation]:
    """Returns those of a round, by each rule, with cuts and adjustments; rows draft up to two tokens."""
    vocab_size, lengths = 37, [2, 1, 0, 2]
    params = SamplingParams(
        max_tokens=9, temperature=0.7, top_k=9, top_p=0.9, presence_penalty=0.5, logit_bias={3: 1.0}
    )
    texts = [LoneText(params, rule, seed=7) for rule in Rule]
    rows = RowTable().rows_of(texts)

    def step() -> StepRows:
        return StepRows([*rows], vocab_size, CPU)

    def adjust(library: Any, given: Tensors) -> list[torch.Tensor]:
        counts = [length + 1 for length in lengths]
        assert len(texts) == len(rows)  # rows end with their texts
        return [NativeOps(library).adjust(step(), given["logits"], given["drafted"], 0, counts)]

    def draw(library: Any, given: Tensors) -> list[torch.Tensor]:
        drawn = NativeOps(library).draw(step(), _copy(given["logits"]), 1)
        assert drawn.probs is not None
        return [drawn.ids, drawn.probs]

    def judge(library: Any, given: Tensors) -> list[torch.Tensor]:
        drafts = Drafts(given["drafted"], given["probs"], lengths)
        verdicts = NativeOps(library).judge(step(), _copy(given["logits"]), drafts)
        return [torch.tensor(verdicts)]

    logits = {"logits": torch.randn(sum(lengths) + len(lengths), vocab_size)}
    drafted = {"drafted": integers(0, vocab_size, len(lengths), 2)}
    return {
        "adjust": Operation(logits | drafted, adjust),
        "draw": Operation({"logits": torch.randn(len(lengths), vocab_size)}, draw),
        "judge": Operation(
            logits | drafted | {"probs": torch.rand(len(lengths), 2, vocab_size).softmax(-1)}, judge
        ),
    }


def linear_operations() -> dict[str, Operation]:
    rows, out, size = 5, 45, 37
    inputs = {"x": torch.randn(rows, size), "residual": torch.randn(rows, out)}
    layer = {"first": torch.randn(40, size), "second": torch.randn(5, size), "bias": torch.randn(out)}

    def multiply(scale: float | None, bf16_linears: bool) -> Callable[[Any, Tensors], list[torch.Tensor]]:
        def run(library: Any, given: Tensors) -> list[torch.Tensor]:
            linear = NativeLinear(
                library, [given["first"], given["second"]], given["bias"], scale, bf16_linears
            )
            return [linear(given["x"]), linear.add_to(given["residual"], given["x"])]

        return run

    library = load_library()
    assert library is not None
    found = {
        "multiply": Operation(layer | inputs, multiply(None, False)),
        "multiply in float16": Operation(layer | inputs, multiply(0.5, False)),
    }
    if library.multiplies_bfloat16():
        found["multiply in bfloat16"] = Operation(layer | inputs, multiply(None, True))
    return found


def quantised_operations() -> dict[str, Operation]:
    size = 256
    first, second = random_blocks("Q4_K", 32, size, seed=1), random_blocks("Q8_0", 19, size, seed=2)
    blocks = {"first": torch.from_numpy(first.data), "second": torch.from_numpy(second.data)}
    inputs = {"x": torch.randn(3, size), "residual": torch.randn(3, 51), "bias": torch.randn(51)}

    def multiply(library: Any, given: Tensors) -> list[torch.Tensor]:
        parts = [
            QuantisedBlocks(first.type, given["first"].numpy(), size, given["order"].numpy()),
            QuantisedBlocks(second.type, given["second"].numpy(), size),
        ]
        linear = QuantisedLinear(library, parts, given["bias"])
        return [linear(given["x"]), linear.add_to(given["residual"], given["x"])]

    def look_up(library: Any, given: Tensors) -> list[torch.Tensor]:
        embeddings = QuantisedEmbeddings(library, QuantisedBlocks(first.type, given["first"].numpy(), size))
        return [embeddings.look_up(given["ids"])]

    return {
        "pack_panels": Operation(blocks | inputs | {"order": torch.randperm(32)}, multiply),
        "dequantise_rows": Operation({"first": blocks["first"], "ids": integers(0, 32, 5)}, look_up),
    }


def layer_operations() -> dict[str, Operation]:
    heads, kv_heads, size, block_size, num_blocks = 4, 2, 16, 4, 8
    table = BlockTable()
    table.block_ids, table.num_computed_tokens = [5, 2, 7], 6
    spans = [Span(table, [1, 2, 3], 3)]
    given = {
        "x": torch.randn(3, 24),
        "weight": torch.rand(24),
        "residual": torch.randn(3, 24),
        "gate_up": torch.randn(3, 24),
        "logits": torch.randn(3, 7),
    }
    attention = {
        "qkv": torch.randn(3, (heads + 2 * kv_heads) * size),
        "weight": torch.rand(heads + kv_heads, size),
        "keys": torch.randn(num_blocks * block_size, kv_heads, size),
        "values": torch.randn(num_blocks * block_size, kv_heads, size),
        "cos": torch.rand(1, 16, size),
        "sin": torch.rand(1, 16, size),
        "slots": torch.tensor([2 * 4 + 2, 2 * 4 + 3, 7 * 4]),
        "positions": torch.tensor([6, 7, 8]),
    }

    def parts(library: Any, given: Tensors, batch: ForwardBatch | None = None) -> Any:
        cache = KVCache(
            [AttentionCache((kv_heads, size), (kv_heads, size), torch.float32, CPU)], 8, block_size
        )
        if batch is not None:
            cache.keys, cache.values = [given["keys"]], [given["values"]]
        batch = batch or ForwardBatch.build(spans, block_size, CPU)
        rotary: Any = SimpleNamespace(table=(given["cos"], given["sin"]), reach=lambda _: 8)
        return NativeKernels(library)(batch, cache, rotary)

    def attend(library: Any, given: Tensors) -> list[torch.Tensor]:
        # C writes to these.
        given = given | {name: _copy(given[name]) for name in ("qkv", "keys", "values")}
        batch = ForwardBatch.build(spans, block_size, CPU)
        batch.slots, batch.positions = given["slots"], given["positions"][None]
        shape = AttentionShape(0, heads, kv_heads, size, 0.2, None, Norm(given["weight"], 1e-5))
        return [parts(library, given, batch).attend(shape, given["qkv"])]

    def pointwise(library: Any, given: Tensors) -> list[torch.Tensor]:
        own = parts(library, attention)
        norm = Norm(given["weight"], 1e-5)
        return [
            own.norm(norm, given["x"]),
            own.norm(norm, given["x"], given["residual"]),
            own.gate("silu", given["gate_up"]),
            own.cap(_copy(given["logits"]), 3.0),
        ]

    taps = {
        "tapped": torch.randn(3, 2, 24),
        "joint": torch.rand(48),
        "first": torch.rand(24),
        "second": torch.rand(24),
        "combine": torch.randn(16, 48),
    }

    def fuse(library: Any, given: Tensors) -> list[torch.Tensor]:
        norms = [Norm(given[name], 1e-5) for name in ("first", "second")]
        combine = NativeLinear(library, [given["combine"]], None, None)
        return [NativeFusion(library, 2, 24, combine, norms, Norm(given["joint"], 1e-5))(given["tapped"])]

    return {
        "attend": Operation(attention, attend),
        "norm, gate and cap": Operation(given, pointwise),
        "fuse": Operation(taps, fuse),
    }


def recurrent_operations() -> dict[str, Operation]:
    """Layers whose weights and states are wrong; their states are there already."""

    def operation(rule: DeltaRule | Mamba2 | ShortConv) -> Operation:
        of_rule = (
            {} if isinstance(rule, ShortConv) else {"decay_rate": rule.decay_rate, "dt_bias": rule.dt_bias}
        )
        if isinstance(rule, Mamba2):
            of_rule["skip"] = rule.skip
        norm = None if isinstance(rule, ShortConv) else rule.norm
        states = state_cache(rule, 2).states[0]
        fields = [field.name for field in dataclasses.fields(LayerState)]
        used = fields if rule.state is not None else ["inputs"]
        stored = {name: torch.rand_like(getattr(states, name)) for name in used}

        def recur(library: Any, given: Tensors) -> list[torch.Tensor]:
            weights = {name: given[name] for name in of_rule}
            changed = dataclasses.replace(rule.convolution, weight=given["weight"])
            if norm is not None:
                weights["norm"] = Norm(given["norm"], norm.eps)  # type: ignore[assignment]
            layer = dataclasses.replace(rule, convolution=changed, **weights)  # type: ignore[arg-type]
            state = dataclasses.replace(states, **{name: _copy(given[name]) for name in used})
            table = table_in(1)
            table.num_computed_tokens, table.num_folded_tokens = 30, 16
            spans = [Span(table, [0] * 4, 0)]
            return [NativeStates(library, spans).recur(NativeRecurrence(layer, state), _copy(given["x"]))]

        tensors = {
            "x": torch.randn(4, rule.input_size),
            "weight": rule.convolution.weight,
            **of_rule,
            **stored,
        }
        return Operation(tensors if norm is None else tensors | {"norm": norm.weight}, recur)

    rules = {"delta rule": delta_rule(2, 4), "Mamba 2": mamba2(2, 2), "short convolution": short_conv(3)}
    return {name: operation(rule) for name, rule in rules.items()}


def decode_operation(folder: Path) -> Operation:
    model = load_model(save(CONFIGS["qwen3"], folder), LoadOptions())
    assert isinstance(model, FusedDecoder)
    weights, kept = model.weights, model.caches[0]
    assert weights.rotary.table is not None
    table, other = BlockTable(), BlockTable()
    table.block_ids, table.num_computed_tokens = [1, 0], 4

    def decode(library: Any, given: Tensors) -> list[torch.Tensor]:
        cache = KVCache(model.caches, 3, 4)
        cache.keys[0], cache.values[1] = _copy(given["keys"]), _copy(given["values"])
        mixer = weights.layers[1].mixer
        shape = dataclasses.replace(mixer.shape, norm=Norm(given["heads"], 1e-6))
        layer = dataclasses.replace(
            weights.layers[1],
            mixer=dataclasses.replace(mixer, shape=shape),
            mlp_norm=Norm(given["mlp"], 1e-6),
        )
        rotary: Any = SimpleNamespace(table=(given["cos"], given["sin"]), reach=lambda _: 8)
        changed = dataclasses.replace(
            weights,
            embeddings=DenseEmbeddings(given["embeddings"]),
            layers=[weights.layers[0], layer],
            norm=Norm(given["norm"], 1e-6),
            rotary=rotary,
        )
        other.block_ids = given.get("blocks", torch.tensor([2])).tolist()
        num_logits = int(given.get("num_logits", torch.tensor(1)))
        beside = [Span(other, given["beside"].tolist(), num_logits)] if "beside" in given else []
        spans = [Span(table, [1, 2], 2), *beside]
        given_back = NativeDecoder(NativeKernels(library), changed, cache)(spans, taps=(1, 2, 0))
        assert given_back is not None
        logits, states = given_back
        assert states is not None
        return [logits, states]

    head_norm, mlp_norm = weights.layers[1].mixer.shape.norm, weights.layers[1].mlp_norm
    assert head_norm is not None
    assert mlp_norm is not None
    assert isinstance(weights.embeddings, DenseEmbeddings)
    cos, sin = weights.rotary.table
    weights.rotary.reach(8)
    stored = torch.randn(12, *kept.key)
    tensors = {
        "embeddings": weights.embeddings.weight,
        "norm": weights.norm.weight,
        "mlp": mlp_norm.weight,
        "heads": head_norm.weight,
        "cos": cos,
        "sin": sin,
        "keys": stored,
        "values": stored.flip(0),
    }
    return Operation(tensors, decode)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns one of the same kind, however wrong it is."""
    is_plain = tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous() and tensor.numel()
    if not is_plain or tensor.is_neg() or not tensor.data_ptr() or tensor.data_ptr() % tensor.itemsize:
        return tensor
    return tensor.clone()


def wrong_types(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from (tensor.to(dtype) for dtype in TYPES if dtype != tensor.dtype)


def wrong_shapes(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from (tensor[None].clone(), tensor[..., None].clone(), tensor.flatten()[0].clone())
    yield from (tensor.flatten(), tensor[:-1].clone(), tensor[..., :-1].contiguous(), tensor[:1].clone())
    yield from (tensor[:0], tensor[..., :0], torch.cat([tensor, tensor]), tensor.flatten()[:1].clone())
    yield torch.cat([tensor, tensor], dim=-1)
    yield torch.empty(0, dtype=tensor.dtype)
    if tensor.dim() > 1:
        yield tensor.transpose(0, 1).contiguous()
        yield tensor.reshape(-1, *tensor.shape[:-1])


def wrong_layouts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The first ones have the same numbers at the same places, to torch."""
    yield torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]]
    yield torch.stack([tensor, tensor], dim=-1)[..., 0]
    if tensor.dim() > 1:
        yield tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        yield tensor.transpose(0, 1)
    yield tensor[:1].expand(tensor.shape)
    size = tensor.nbytes
    shifted = torch.frombuffer(bytearray(size + 16), dtype=torch.uint8)[1 : size + 1]
    shifted.copy_(tensor.reshape(-1).view(torch.uint8))
    if tensor.itemsize > 1:
        yield _reinterpreted(shifted, tensor)
    yield tensor.to_sparse()
    if tensor.is_floating_point():
        yield torch._neg_view(tensor)


def _reinterpreted(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bytes at an odd address as numbers, which torch allows of foreign memory only."""
    dtype = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}[like.dtype]
    return torch.from_numpy(np.frombuffer(data.numpy().data, dtype=dtype).reshape(like.shape))


def wrong(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    for kind in (wrong_types, wrong_shapes, wrong_layouts):
        yield from kind(tensor)
    yield tensor.to("meta")


def as_it_should_be(given: Tensors, right: Tensors) -> Tensors | None:
    """The same numbers in fresh tensors of the right types; None if there are none to read."""
    try:
        return {name: tensor.to(right[name].dtype).clone().contiguous() for name, tensor in given.items()}
    except (RuntimeError, TypeError):
        return None


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Operation]:
    torch.manual_seed(11)
    groups = (
        *(row_operations, linear_operations, quantised_operations, layer_operations),
        recurrent_operations,
    )
    found = {name: operation for group in groups for name, operation in group().items()}
    return found | {"decode": decode_operation(tmp_path_factory.mktemp("model"))}


def try_wrong(operation: Operation, given: Tensors, num_calls: int) -> str:
    """What has become of it. If it was refused, C was called less often than with the right tensors."""
    watched = Watched()
    try:
        results = operation.run(watched, given)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        assert watched.calls < num_calls
        return "refused" if isinstance(error, PointerError) else "refused by torch or numpy"
    right = as_it_should_be(given, operation.tensors)
    assert right is not None
    for result, expected in zip(results, operation.run(Watched(), right), strict=True):
        assert torch.allclose(result, expected, rtol=0, atol=0, equal_nan=True)
    return "right"


def count_calls(operation: Operation) -> int:
    watched = Watched()
    operation.run(watched, operation.tensors)
    return watched.calls


def test_every_wrong_tensor_is_refused_or_means_the_same(operations: dict[str, Operation]) -> None:
    outcomes: Counter[str] = Counter()
    for operation in operations.values():
        num_calls = count_calls(operation)
        for name, tensor in operation.tensors.items():
            for each in wrong(tensor):
                outcomes[try_wrong(operation, operation.tensors | {name: each}, num_calls)] += 1
    assert outcomes["refused"] > 1000
    assert outcomes["right"] > 100
    assert outcomes["refused by torch or numpy"] < 0.3 * outcomes.total(), outcomes


def test_several_wrong_tensors_at_once(operations: dict[str, Operation]) -> None:
    draws = random.Random(5)
    for operation in operations.values():
        num_calls = count_calls(operation)
        kinds = {name: list(wrong(tensor)) for name, tensor in operation.tensors.items()}
        for _ in range(100):
            names = draws.sample(sorted(kinds), min(2, len(kinds)))
            given = operation.tensors | {name: draws.choice(kinds[name]) for name in names}
            try_wrong(operation, given, num_calls)


@pytest.mark.parametrize("number", [-1, 32, 1 << 40])
def test_rows_that_there_are_not_are_refused(number: int) -> None:
    library = load_library()
    assert library is not None
    blocks = random_blocks("Q8_0", 32, 64, seed=1)
    order = np.arange(32)
    order[3] = number
    ordered = dataclasses.replace(blocks, order=order)
    with pytest.raises(PointerError, match="there are 32 rows"):
        dequantise(library, ordered)
    with pytest.raises(PointerError, match="there are 32 rows"):
        QuantisedLinear(library, [ordered], None)


@pytest.mark.parametrize(
    "blocks",
    [
        QuantisedBlocks(8, np.zeros((3, 34), np.uint8), 31),
        QuantisedBlocks(8, np.zeros((3, 34), np.uint8), 64),
        QuantisedBlocks(12, np.zeros((3, 144), np.uint8), 128),
        QuantisedBlocks(9, np.zeros((3, 34), np.uint8), 32),
        QuantisedBlocks(8, np.zeros((3, 68), np.uint8)[:, ::2], 32),
    ],
    ids=["no whole block", "two blocks", "half a block", "an unknown type", "every second byte"],
)
def test_blocks_of_other_sizes_are_refused(blocks: QuantisedBlocks) -> None:
    library = load_library()
    assert library is not None
    with pytest.raises(PointerError):
        dequantise(library, blocks)
    with pytest.raises(PointerError):
        QuantisedLinear(library, [blocks], None)


def test_arrays_are_what_they_are_said_to_be() -> None:
    integers = array("q", [1, 2, 3])
    assert address(integers, torch.int64, (3,)) == integers.buffer_info()[0]
    wrong: Any
    for wrong in (array("q", [1, 2]), array("d", [1, 2, 3]), array("i", [1, 2, 3]), [1, 2, 3], None, b"abc"):
        with pytest.raises(PointerError, match=r"C reads torch.int64 \[3\]"):
            address(wrong, torch.int64, (3,))
    for wrong in (np.arange(6)[::2], np.arange(3, dtype=">i8"), np.arange(3, dtype=np.int32), np.arange(4)):
        with pytest.raises(PointerError):
            address(wrong, torch.int64, (3,))
    with pytest.raises(PointerError, match="bfloat16"):
        address(torch.zeros(2, 3, dtype=torch.bfloat16), torch.float32, (2, 3))
    gone = torch.zeros(2, 3)
    gone.untyped_storage().resize_(0)  # torch itself reads it, and dies
    for wrong in (gone, gone.numpy()):
        with pytest.raises(PointerError):
            address(wrong, torch.float32, (2, 3))
    assert address(torch.zeros(0, 3), torch.float32, (0, 3)) == 0
    assert shape_of(torch.zeros(2, 3), 2) == (2, 3)


def test_a_token_without_an_embedding_ends_its_own_sequence_alone(operations: dict[str, Operation]) -> None:
    """So does a position without angles: both are read past the end of a table otherwise."""
    decode = operations["decode"].run
    right = operations["decode"].tensors
    alone, _ = decode(load_library(), right | {"beside": torch.tensor([3])})
    for token in (-1, 1 << 20, 1 << 40):
        logits, _ = decode(load_library(), right | {"beside": torch.tensor([token])})
        assert logits[-1].isnan().all()
        assert torch.equal(logits[:-1], alone[:-1])
    few = {name: right[name][:, :5].contiguous() for name in ("cos", "sin")}
    logits, _ = decode(load_library(), right | few | {"beside": torch.tensor([3])})
    assert logits.isnan().any(-1).tolist() == [False, True, False]


def test_passes_stay_within_the_blocks_of_their_sequences(operations: dict[str, Operation]) -> None:
    """C sees neither where a table of blocks ends nor how many blocks a cache has."""
    right, decode = operations["decode"]
    for table, error in (([2], PointerError), ([2, 3], MemoryError), ([2, -1], MemoryError)):
        beside = {"beside": torch.arange(5), "blocks": torch.tensor(table)}
        with pytest.raises(error, match="blocks"):
            decode(load_library(), right | beside)
    with pytest.raises(PointerError, match="too few for the logits of 2"):
        decode(load_library(), right | {"beside": torch.tensor([3]), "num_logits": torch.tensor(2)})


def plan_of_a_row(folder: Path, **row: Any) -> tuple[Side, StepPlan, Sequence]:
    side = Side(make_engine(*save_pair(folder)), [RowPlan(prompt=[1, 2, 3, 4, 5], **row)])
    plan = side.plan(1)
    return side, plan, plan.rows[0].sequence


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("unknown", [40, -1, 1 << 40])
def test_drafts_from_outside_end_before_tokens_that_there_are_not(
    unknown: int, verification: str, tmp_path: Path
) -> None:
    params = SamplingParams(max_tokens=99, temperature=1.0, seed=5, verification=verification)
    side, plan, _ = plan_of_a_row(tmp_path, params=params, draft_ids={0: [7, unknown, 8]})
    side.runner.loop = side.loop
    (one,) = side.runner.run(plan).rounds
    assert one.num_drafted == [1]
    assert all(0 <= token < 40 for token in one.emitted[0])


@pytest.mark.parametrize("which", [0, 1], ids=["target", "draft"])
def test_a_row_without_blocks_for_its_drafts_is_not_run(which: int, tmp_path: Path) -> None:
    """The loop leaves it to the phases, whose passes have words for it."""
    params = SamplingParams(max_tokens=99, temperature=0)
    side, plan, sequence = plan_of_a_row(tmp_path, params=params, num_draft_tokens=6)
    table = side.tables(sequence)[which]
    table.block_ids = table.block_ids[:1]
    side.runner.loop = side.loop
    with pytest.raises((PointerError, IndexError)):
        side.runner.run(plan)


def test_adjustments_touch_tokens_alone() -> None:
    """Ids below 0 and from the vocabulary's size on would lie before and after the logits."""
    library = load_library()
    assert library is not None
    params = SamplingParams(
        max_tokens=9, logit_bias={-1: 5.0, 8: 5.0, 1: 1.0}, min_tokens=9, presence_penalty=1.0
    )
    sequence = make_sequence(0, RowPlan(params, [5], stop_token_ids=frozenset((-1, 3, 8))))
    sequence.token_ids += [-1, 2, 8]
    (row,) = RowTable().rows_of([sequence])
    row.copy_text()
    logits, count = torch.zeros(3, 8), array("q", [1])
    index = row.table.lines_of([row])
    numbers = row.table.numbers
    library.adjust(
        address(numbers, torch.int64, numbers.shape),
        address(index, torch.int64, (1,)),
        *(1, None, 0, 0),
        address(count, torch.int64, (1,)),
        address(logits[1], torch.float32, (8,)),
        8,
    )
    assert logits[0].tolist() == logits[2].tolist() == [0] * 8
    assert logits[1].tolist() == [0, 1, -1, -torch.inf, 0, 0, 0, 0]
