"""What must hold of captured passes, as functions that raise ``AssertionError``: on tapes and real graphs."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from tests.models import make_engine, run_engine
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.rounds.capture.graphs import DraftPass, RoundGraphs, ScorePass
from truedraft.engine.rounds.round import RoundRunner

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], list(range(16)) * 2, [2, 2]]
# Steps before which they come, so that most of them share a pass with rows.
LATE = [0, 2, 3, 5, 6]
BLOCK_SIZE = 4
NUM_SEQUENCES = 6
STEPS = 10
# Rows have a few new tokens mostly, now and then what no captured pass holds.
MAX_DRAFTS = 4
LENGTHS = [1, 1, 1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 12]
DRAFT_LENGTHS = [1, 2] * 9 + [3]


def table(block_ids: list[int], num_computed_tokens: int = 0) -> BlockTable:
    made = BlockTable()
    made.block_ids, made.num_computed_tokens = block_ids, num_computed_tokens
    return made


def graphs_of(core: EngineCore) -> RoundGraphs:
    assert isinstance(core.runner, RoundRunner)
    assert core.runner.graphs is not None
    return core.runner.graphs


def same_as_eager(folder: str, tolerance: float = 1e-4, is_draft: bool = False, **config: Any) -> None:
    """Runs a target's passes, or a draft model's: random ragged batches over scattered blocks. Logits are the
    usual pass's, and so is the whole cache after each; slots that were not to be written keep every bit. Two
    batches' logits are held at a time. In some batches of a draft model rows bring one token each, whose ids
    only the device knows."""
    cores = [
        make_engine(
            folder,
            folder if is_draft else None,
            max_num_sequences=NUM_SEQUENCES,
            num_speculative_tokens=MAX_DRAFTS,
            cuda_graphs=graphs,
            native_kernels=False,
            **config,
        )
        for graphs in (True, False)
    ]
    graphs = graphs_of(cores[0])
    model, eager = (core.draft if is_draft else core.target for core in cores)
    assert model is not None
    assert eager is not None
    assert isinstance(model.fast_pass, DraftPass if is_draft else ScorePass)
    assert eager.fast_pass is None
    # Others have been here: what they left must not matter, not even through a mask.
    for cache in (model.cache, eager.cache):
        for stored in (*cache.keys, *cache.values):
            stored.fill_(torch.nan)
    choose = random.Random(5)
    longest = min(100, model.model.max_position or 100)
    num_blocks = -(-longest // BLOCK_SIZE)
    blocks = list(range(NUM_SEQUENCES * num_blocks))
    choose.shuffle(blocks)
    tables = [table(blocks[i * num_blocks : (i + 1) * num_blocks]) for i in range(NUM_SEQUENCES)]
    for step in range(STEPS):
        lengths = [7, 19, 40] if step == 0 else DRAFT_LENGTHS if is_draft else LENGTHS
        spans = _random_spans(choose, tables, longest, model.vocab_size, lengths, is_draft)
        before = _stored(model)
        twins = [
            Span(table(s.table.block_ids, s.table.num_computed_tokens), s.token_ids, s.num_logits)
            for s in spans
        ]
        ids_on_device = None
        if step % 3 == 2 and is_draft:
            ids_on_device = torch.tensor([s.token_ids[0] for s in spans], device=model.device)
            twins = [Span(s.table, s.token_ids[:1], 1) for s in twins]
            spans = [Span(s.table, [0], 1) for s in spans]
        ours, theirs = model.forward(spans, ids_on_device).logits, eager.forward(twins).logits
        _assert_close(ours, theirs, tolerance)
        _assert_same_caches(model, before, _stored(eager), twins, tolerance)
    assert graphs.num_replays > STEPS // 2


def _random_spans(
    choose: random.Random,
    tables: list[BlockTable],
    longest: int,
    vocab_size: int,
    lengths: list[int],
    is_draft: bool,
) -> list[Span]:
    """Some of the sequences, all at first; some roll back before."""
    is_prompt = min(lengths) > 2
    spans = []
    for chosen in choose.sample(tables, len(tables) if is_prompt else choose.randint(1, len(tables))):
        if choose.random() < 0.3:
            chosen.num_computed_tokens -= min(chosen.num_computed_tokens, choose.randint(1, 4))
        length = choose.choice(lengths)
        if chosen.num_computed_tokens + length > longest:
            chosen.num_computed_tokens = 0
        ids = [choose.randrange(vocab_size) for _ in range(length)]
        spans.append(Span(chosen, ids, 1 if is_draft else choose.randint(1, length)))
    return spans


def _stored(model: ModelRunner) -> list[torch.Tensor]:
    return [stored.clone() for stored in (*model.cache.keys, *model.cache.values)]


def _assert_same_caches(
    model: ModelRunner,
    before: list[torch.Tensor],
    expected: list[torch.Tensor],
    spans: Sequence[Span],
    tolerance: float,
) -> None:
    written = [
        s.table.block_ids[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE
        for s in spans
        for i in range(s.table.num_computed_tokens - len(s.token_ids), s.table.num_computed_tokens)
    ]
    for ours, old, theirs in zip(_stored(model), before, expected, strict=True):
        _assert_close(ours[written], theirs[written], tolerance)
        untouched = torch.ones(len(old), dtype=torch.bool, device=old.device)
        untouched[written] = False
        untouched[-BLOCK_SIZE:] = False
        assert torch.equal(_bits(ours[: len(old)][untouched]), _bits(old[untouched]))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def _assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    assert bool(theirs.isfinite().all())
    scale = max(1.0, float(theirs.abs().max()))
    assert float((ours.float() - theirs.float()).abs().max()) <= tolerance * scale


def same_tokens(
    graphed: EngineCore,
    eager: EngineCore,
    params: list[SamplingParams],
    arrivals: Sequence[int] | None = None,
) -> None:
    before = graphs_of(graphed).num_replays
    assert run_engine(graphed, PROMPTS, params, arrivals) == run_engine(eager, PROMPTS, params, arrivals)
    assert graphs_of(graphed).num_replays > before
    assert vars(graphed.stats)["_verdicts"] == vars(eager.stats)["_verdicts"]


def still_says_the_same(folder: str, core: EngineCore) -> None:
    params = SamplingParams(max_tokens=20, temperature=0)
    device = str(core.target.device)
    eager = make_engine(folder, None, cuda_graphs=False, device=device, native_kernels=False)
    assert run_engine(core, PROMPTS, params) == run_engine(eager, PROMPTS, params)
