"""One call of C runs a whole pass: bit for bit what its parts say, and another way where it does not fit."""

from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, PreTrainedConfig

from tests.engine.test_llama import CONFIGS, SHAPE, save
from tests.engine.test_native import plant
from tests.models import make_engine
from truedraft.engine.layers import rotary
from truedraft.engine.memory.batch import MAX_GROUPED_QUERIES, Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.native import compiler
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.threads import set_num_threads

pytestmark = pytest.mark.usefixtures("needs_compiler")

BLOCK_SIZE = 4
# Rounds of a batch: new tokens of each sequence, and how many of the last ones want logits.
ROUNDS = [
    [(7, 1), (1, 1), (MAX_GROUPED_QUERIES, 0)],
    [(1, 1), (5, 5), (2, 2)],
    [(3, 0), (1, 1), (1, 0)],
    [(1, 1), (1, 1), (1, 1)],
]


def rounds_of(runner: ModelRunner) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The logits of every round, and what the cache holds at the end. Blocks lie in no order."""
    blocks = torch.randperm(40, generator=torch.Generator().manual_seed(5)).tolist()
    tables = [BlockTable() for _ in ROUNDS[0]]
    for table in tables:
        table.block_ids = [blocks.pop() for _ in range(12)]
    logits = []
    for number, spans in enumerate(ROUNDS):
        ids = [[(7 * number + 3 * row + i) % 96 for i in range(size)] for row, (size, _) in enumerate(spans)]
        logits.append(
            runner.forward(
                [
                    Span(table, token_ids, wanted)
                    for table, token_ids, (_, wanted) in zip(tables, ids, spans, strict=True)
                ]
            ).logits
        )
    return logits, [*runner.cache.keys, *runner.cache.values]


@pytest.mark.usefixtures("one_thread_afterwards")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_whole_passes_are_their_parts(name: str, threads: int, tmp_path: Path) -> None:
    model = make_engine(save(CONFIGS[name], tmp_path), None).target.model
    runner = ModelRunner.build(model, 40, BLOCK_SIZE)
    set_num_threads(threads)
    assert isinstance(runner.fast_pass, NativeDecoder)
    whole = rounds_of(runner)
    parts = rounds_of(ModelRunner(model, KVCache(model.caches, 40, BLOCK_SIZE)))
    for ours, theirs in zip(whole, parts, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_long_spans_go_the_other_way(tmp_path: Path) -> None:
    model = make_engine(save(CONFIGS["llama"], tmp_path), None).target.model
    runner = ModelRunner.build(model, 20, BLOCK_SIZE)
    table = BlockTable()
    table.block_ids = list(range(20))
    ids = list(range(MAX_GROUPED_QUERIES + 1))
    assert isinstance(runner.fast_pass, NativeDecoder)
    assert runner.fast_pass([Span(table, ids, 1)]) is None
    assert runner.fast_pass([Span(table, ids[:-1], 1)]) is not None
    assert runner.forward([Span(table, ids, len(ids))]).logits.isfinite().all()


def test_angles_that_no_table_holds_have_no_whole_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotary, "MAX_TABLE_POSITIONS", SHAPE["max_position_embeddings"] - 1)
    monkeypatch.setattr(rotary, "MAX_TABLE_NUMBERS", 0)
    runner = make_engine(save(CONFIGS["llama"], tmp_path), None).target
    assert runner.model.is_native
    assert runner.fast_pass is None


def test_without_the_kernels_there_is_none(tmp_path: Path) -> None:
    path = save(CONFIGS["llama"], tmp_path)
    assert make_engine(path, None, native_kernels=False).target.fast_pass is None


WINDOWS: dict[str, PreTrainedConfig] = {
    **{f"a window of {n}": MistralConfig(**SHAPE, sliding_window=n, head_dim=32) for n in (5, 40)},
    **{name: config for name, config in CONFIGS.items() if name.startswith("gemma")},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_row_does_not_depend_on_the_length_of_its_span(name: str, tmp_path: Path) -> None:
    """Greedy text is the same with and without drafts only if the bits are: a window may begin anywhere."""
    path = save(WINDOWS[name], tmp_path)
    model = make_engine(path, None).target.model
    ids = [(5 * i * i + i) % 96 for i in range(100)]
    said = []
    for size in (1, 5, 9):
        runner = ModelRunner.build(model, 30, BLOCK_SIZE)
        table = BlockTable()
        table.block_ids = list(range(30))
        spans = [ids[start : start + size] for start in range(0, 90, size)]
        said.append(torch.cat([runner.forward([Span(table, part, len(part))]).logits for part in spans]))
    assert torch.equal(said[1], said[0])
    assert torch.equal(said[2], said[0])


# Planted bugs: (the model that shows them, what is right, what is wrong).
GEMMA3 = "gemma3, tied embeddings"
BUGS = {
    "stores in the wrong block": ("llama", "blocks[at / block_size * kinds + kind]", "blocks[kind]"),
    "stands a token too far": ("llama", "num_angles ? at + shift : 0;", "num_angles ? at + shift + 1 : 0;"),
    "takes the rows before": (
        "llama",
        "hidden + (end - num_rows) * size",
        "hidden + (end - num_rows - 1) * size",
    ),
    "forgets the residual": ("llama", "post_norm ? NULL : hidden", "NULL"),
    "norms with another branch's weights": (
        "llama",
        "layer->mlp_norm, layer->mlp_norm_eps",
        "layer->mixer_norm, layer->mlp_norm_eps",
    ),
    "forgets the residual behind a norm": (GEMMA3, "normed, post_norm, hidden,", "normed, post_norm, NULL,"),
    "takes embeddings as they are": (GEMMA3, "size, decoder->embedding_scale)", "size, 1.0f)"),
    "turns all layers alike": (GEMMA3, "layer->rotary * spans->num_angles + ", ""),
    "gates with a SiLU": (GEMMA3, "activation == SILU", "activation >= SILU"),
    "caps no scores": ("gemma2", "layer->softcap > 0", "0"),
    "norms no keys": ("olmo2", "if (layer->key_norm)", "if (0)"),
    "turns no head": ("smollm3 with windows", "layer->rotary >= 0", "layer->rotary > 0"),
    "turns halves": ("glm4", "if (layer->interleaved)", "if (0)"),
    "norms before it turns": ("hunyuan", "weight && !layer->norm_after_rotary", "weight"),
    "takes no mean off": ("cohere2", "if (pass->centres) centre(out", "if (0) centre(out"),
    "runs one branch after the other": ("cohere2", "if (layer->is_parallel)", "if (0)"),
    "multiplies no output": ("granite", "vec value = sum[i] * linear->scale", "vec value = sum[i]"),
    "caps no logits": ("gemma2", "decoder->softcap > 0", "0"),
}


@pytest.mark.parametrize(("name", "right", "wrong"), BUGS.values(), ids=BUGS)
def test_wrong_passes_are_noticed_and_not_used(
    name: str, right: str, wrong: str, fresh_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_library.setattr(compiler, "SOURCES", plant(compiler.SOURCES, right, wrong, tmp_path))
    runner = make_engine(save(CONFIGS[name], tmp_path / "model"), None).target
    assert isinstance(runner.model, FusedDecoder)
    assert not runner.model.is_native
    assert runner.fast_pass is None
