"""Layers as they are described: of any size each, and their room in C is what the largest part needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.engine.test_native import plant
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.layers.decoder import Attention, DecoderLayer, DecoderWeights
from truedraft.engine.layers.latent import LatentProjection
from truedraft.engine.layers.linear import Linear, Linears, TorchLinears
from truedraft.engine.layers.mlp import GatedMlp, HeadLinears
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.rotary import Rotary
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.layers.weight import Weight
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import AttentionCache, KVCache
from truedraft.engine.memory.pointers import PointerError
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.native import compiler, library
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.linears import NativeLinears
from truedraft.engine.native.native_run import NativeKernels

pytestmark = pytest.mark.usefixtures("needs_compiler")

CPU = torch.device("cpu")
HIDDEN, VOCAB_SIZE = 48, 70
IDS = [3, 61, 17, 40, 8, 25, 33]


class Size(NamedTuple):
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    normed: str = "mixer_norm mlp_norm"


class Latent(NamedTuple):
    """Has heads that share a key of ``turned`` numbers and a latent vector."""

    heads: int
    latent: int
    turned: int
    others: int
    value: int
    mlp: int
    queries: int | None = None
    normed: str = "mixer_norm mlp_norm"


# The first layer is the smallest, which must not be the measure of the others.
UNEVEN: list[Size | Latent] = [
    Size(2, 1, 16, 24),
    Size(6, 2, 32, 40, "mixer_norm mixer_post_norm mlp_norm mlp_post_norm"),
    Size(4, 4, 16, 300, "mixer_post_norm mlp_post_norm"),
    Size(3, 1, 48, 16),
    Latent(5, 40, 8, 12, 20, 16),
    Latent(3, 24, 8, 4, 36, 16, queries=28),
]


def decoder(sizes: Sequence[Size | Latent], loaded: bool) -> FusedDecoder:
    """Draws weights; ``loaded``: for the kernels in C, else for torch."""
    generator = torch.Generator().manual_seed(7)
    kernels = library.load_library() if loaded else None
    linears: Linears = TorchLinears() if kernels is None else NativeLinears(kernels, compact=False)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    def linear(rows: int, columns: int) -> Linear:
        weight = drawn(rows, columns)
        return linears.make([Weight("drawn", (rows, columns), lambda: weight)], None)

    def attention(number: int, size: Size) -> Attention:
        attended, cached = size.heads * size.head_size, (size.kv_heads, size.head_size)
        return Attention(
            shape=AttentionShape(number, *size[:3], scaling=0.3, sliding_window=None, norm=None),
            qkv=linear(attended + 2 * size.kv_heads * size.head_size, HIDDEN),
            output=linear(HIDDEN, attended),
            cache=AttentionCache(cached, cached, torch.float32, CPU),
        )

    def to_latents(number: int, size: Latent) -> Attention:
        key, query = size.turned + size.latent, size.turned + size.others
        queries = size.heads * query
        return Attention(
            shape=AttentionShape(number, size.heads, 1, key, 0.3, None, None, values_are_keys=True),
            qkv=LatentProjection(
                down=linear((size.queries or queries) + key, HIDDEN),
                norm=Norm(1 + drawn(size.latent), 1e-5),
                key_up=HeadLinears(tuple(linear(size.latent, size.others) for _ in range(size.heads))),
                value_up=HeadLinears(tuple(linear(size.value, size.latent) for _ in range(size.heads))),
                query_size=query,
                num_turned=size.turned,
                value_size=size.value,
                query_norm=None if size.queries is None else Norm(1 + drawn(size.queries), 1e-5),
                query_up=None if size.queries is None else linear(queries, size.queries),
            ),
            output=linear(HIDDEN, size.heads * size.value),
            cache=AttentionCache((1, key), None, torch.float32, CPU),
        )

    def layer(number: int, size: Size | Latent) -> DecoderLayer:
        mixer = to_latents(number, size) if isinstance(size, Latent) else attention(number, size)
        names = ("mixer_norm", "mixer_post_norm", "mlp_norm", "mlp_post_norm")
        norms = {
            name: Norm(1 + drawn(HIDDEN), 1e-5) if name in size.normed.split() else None for name in names
        }
        return DecoderLayer(
            mixer=mixer,
            mlp=GatedMlp("silu", linear(2 * size.mlp, HIDDEN), linear(HIDDEN, size.mlp)),
            **norms,
        )

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_attention_heads=4, max_position_embeddings=64
    )
    vectors = drawn(VOCAB_SIZE, HIDDEN)
    weights = DecoderWeights(
        linears.embeddings(Weight("drawn", (VOCAB_SIZE, HIDDEN), lambda: vectors)),
        [layer(number, size) for number, size in enumerate(sizes)],
        Norm(1 + drawn(HIDDEN), 1e-5),
        linear(VOCAB_SIZE, HIDDEN),
        Rotary(LlamaRotaryEmbedding(config), config, torch.empty(0)),
        embedding_scale=1.0,
        softcap=None,
    )
    facts = ModelFacts(config, None, 0, torch.float32, CPU)
    return (
        FusedDecoder(facts, weights)
        if kernels is None
        else FusedDecoder(facts, weights, NativeKernels(kernels))
    )


def logits_of(model: FusedDecoder, is_whole: bool) -> torch.Tensor:
    """Computes the text in two passes, each of them in one call if it ``is_whole``."""
    cache = KVCache(model.caches, 4, 4)
    runner = ModelRunner(model, cache, model.fast_pass(cache) if is_whole else None)
    assert isinstance(runner.fast_pass, NativeDecoder) == is_whole
    table = BlockTable()
    table.block_ids = [2, 0, 3]
    return torch.cat([runner.forward([Span(table, ids, len(ids))]).logits for ids in (IDS[:5], IDS[5:])])


def test_layers_of_different_sizes() -> None:
    in_c = decoder(UNEVEN, loaded=True)
    whole, in_parts, by_torch = (
        logits_of(model, is_whole)
        for model, is_whole in ((in_c, True), (in_c, False), (decoder(UNEVEN, loaded=False), False))
    )
    assert torch.equal(whole, in_parts)
    torch.testing.assert_close(whole, by_torch, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("right", "wrong", "layer"),
    [
        (
            "part_bytes(&decoder->layers[i].mlp, rows)",
            "part_bytes(&decoder->layers[0].mlp, rows)",
            UNEVEN[1]._replace(mlp=300),
        ),
        ("+ arena_size(rows * part->output->in_features, sizeof(float))", "", UNEVEN[1]._replace(mlp=8)),
        (", of.heads * of.values,\n    };", ",\n    };", UNEVEN[5]),
    ],
    ids=["the first layer's MLP", "a mixer without what it attends", "latent vectors without values"],
)
def test_a_part_without_room_writes_nothing(
    right: str, wrong: str, layer: Size | Latent, fresh_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Room that is not reserved is not given out, although the memory after its end may be there."""
    fresh_library.setattr(compiler, "SOURCES", plant(compiler.SOURCES, right, wrong, tmp_path))
    sizes = [UNEVEN[0]._replace(mlp=8), layer]
    with pytest.raises(MemoryError):
        logits_of(decoder(sizes, loaded=True), is_whole=True)


def test_parts_of_no_known_kind_are_not_run() -> None:
    model = decoder(UNEVEN[:1], loaded=True)
    cache = KVCache(model.caches, 4, 4)
    whole = model.fast_pass(cache)
    assert isinstance(whole, NativeDecoder)
    table = BlockTable()
    table.block_ids = [1]
    assert whole([Span(table, IDS[:2], 1)]) is not None
    whole._kept[0][0].layer.mlp.kind = 9
    whole._kept[1][0].mlp.kind = 9
    with pytest.raises(MemoryError):
        whole([Span(table, IDS[:2], 1)])


@pytest.mark.parametrize("taps", [(-1,), (0, 2), (1 << 40,)])
def test_states_after_layers_that_there_are_not(taps: tuple[int, ...]) -> None:
    model = decoder(UNEVEN[:1], loaded=True)
    whole = model.fast_pass(KVCache(model.caches, 4, 4))
    assert whole is not None
    table = BlockTable()
    table.block_ids = [1]
    with pytest.raises(PointerError, match="there are 1 layers"):
        whole([Span(table, IDS[:2], 1)], None, taps)
