"""Layers with a sliding window give back the blocks at which no later token looks, and no text changes."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ByteSize

from tests.families import FAMILIES, SHAPE, save_random
from tests.models import make_engine, run_engine, save_perturbed, stepped
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.window_blocks import WindowBlocks, WindowedPool, blocks_held
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import AttentionCache
from truedraft.engine.memory.pointers import PointerError
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models import cache_plan
from truedraft.engine.models.cache_plan import plan_caches, windows_of
from truedraft.engine.rounds.calibrate import pass_seconds

VOCAB_SIZE = 16
CPU = torch.device("cpu")


def text(number: int, length: int) -> list[int]:
    return [(5 * i * i + i + 7 * number) % VOCAB_SIZE for i in range(length)]


# Conversations begin alike, go on from one another, and are as long as whole blocks, or not.
PROMPTS = [
    *(text(1, length) for length in (64, 97, 130)),
    [*text(1, 64), *text(2, 33)],
    text(3, 81),
    text(4, 5),
    text(1, 130),
]
PARAMS = [
    SamplingParams(max_tokens=30, temperature=temperature, seed=seed)
    for seed, temperature in enumerate((0.0, 0.9, 1.2, 0.0, 0.8, 1.0, 1.1))
]
ARRIVALS = [0, 3, 9, 14, 20, 60, 70]
# A text of as many tokens gives blocks back, and blocks are few.
FEW: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_sequences": 4}


class Pair:
    """A target with windows, and a draft model that agrees with it often."""

    def __init__(self, folder: Path, family: str) -> None:
        model_type, config = FAMILIES[family]
        self.target = save_random(folder / "target", model_type, SHAPE | config)
        self.draft = save_perturbed(folder / "draft", self.target, 2, 0.02)

    def engine(self, draft: str | None = None, **config: Any) -> EngineCore:
        return make_engine(self.target, draft, **config)

    def one_pool(self, draft: str | None = None, **config: Any) -> EngineCore:
        """An engine whose layers with a window have the blocks of the others."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache_plan, "windows_of", lambda *_: None)
            core = self.engine(draft, **config)
        assert not isinstance(core.scheduler.target_pool, WindowedPool)
        return core


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("gemma"), "Gemma 3 in C")


def windows_in(core: EngineCore) -> WindowBlocks:
    pool = core.scheduler.target_pool
    assert isinstance(pool, WindowedPool)
    return pool.windows


# Torch and C; layers that read other layers' keys, experts, sinks; windows in all layers or in some.
FAMILIES_WITH_WINDOWS = (
    "Gemma 3",
    "Gemma 2 in C",
    "Gemma 4 E in C",
    "Mistral, sliding window",
    "Mixtral in C",
    "OLMo 3 in C",
    "Cohere 2 in C",
    "EXAONE 4",
)


@pytest.mark.parametrize("family", FAMILIES_WITH_WINDOWS)
def test_texts_are_those_of_one_pool(family: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, family)
    core = pair.engine(pair.draft, **FEW)
    windows = windows_in(core)
    (draft_pool,) = core.scheduler.draft_pools
    assert isinstance(draft_pool, WindowedPool)
    found = run_engine(core, PROMPTS, PARAMS, ARRIVALS)
    assert found == run_engine(pair.one_pool(pair.draft, **FEW), PROMPTS, PARAMS, ARRIVALS)
    for each in (windows, draft_pool.windows):
        assert each.num_free == each.num_blocks
        assert each.num_promised == 0


WAYS: dict[str, dict[str, Any]] = {
    "no drafts": {"num_speculative_tokens": 0},
    "many drafts": {"num_speculative_tokens": 12},
    "n-grams": {"method": "ngram"},
    "several rounds a step": {"step_seconds": 0.5},
    "phases in Python": {"native_kernels": False},
    "small pieces": {"max_num_batched_tokens": 7},
    "no prefixes": {"prefix_caching": False},
    "large blocks": {"block_size": 16},
    "blocks of one token": {"block_size": 1},
}


def test_texts_of_eight_bits_are_those_of_one_pool(gemma: Pair) -> None:
    config = {**FEW, "cache_dtype": "int8"}
    found = run_engine(gemma.engine(gemma.draft, **config), PROMPTS, PARAMS, ARRIVALS)
    assert found == run_engine(gemma.one_pool(gemma.draft, **config), PROMPTS, PARAMS, ARRIVALS)


@pytest.fixture(scope="module")
def expected(gemma: Pair) -> list[list[int]]:
    return run_engine(gemma.one_pool(), PROMPTS, PARAMS, ARRIVALS)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_the_same_texts(gemma: Pair, expected: list[list[int]], way: str) -> None:
    core = gemma.engine(gemma.draft, **FEW | WAYS[way])
    windows_in(core)
    assert run_engine(core, PROMPTS, PARAMS, ARRIVALS) == expected


def test_sequences_that_give_way_are_computed_anew(gemma: Pair, expected: list[list[int]]) -> None:
    core = gemma.engine(gemma.draft, **FEW, cache_memory="160KiB")
    assert run_engine(core, PROMPTS, PARAMS, ARRIVALS) == expected
    assert core.scheduler.num_preemptions > 0
    assert windows_in(core).num_promised == 0


def test_a_prefix_is_found_where_its_window_is(gemma: Pair) -> None:
    """A text can go on from the end of a prompt or of an answer; in between the windows are used again."""
    core = gemma.engine(**FEW)
    windows = windows_in(core)
    params = SamplingParams(max_tokens=60, temperature=1, seed=5)

    def cached(prompt: list[int]) -> int:
        core.add(Generate("0", prompt, params))
        return [output for _ in range(200) for output in (stepped(core) if core.has_work else [])][
            0
        ].num_cached_tokens

    prompt = text(1, 130)
    (answer,) = run_engine(core, [prompt], params)
    assert cached([*prompt, *text(2, 20)]) == 128
    assert cached([*prompt, *answer, *text(2, 20)]) == 188
    # Others take the blocks that were let go, and leave those that are kept.
    for number in range(3, 6):
        run_engine(core, [text(number, 150)], SamplingParams(max_tokens=2))
    assert windows.num_free == windows.num_blocks
    assert cached([*prompt, *text(3, 20)]) == 128
    assert cached([*text(1, 90), *text(2, 20)]) < 88


def let_go_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is given back one token early."""
    original = WindowBlocks.let_go

    def let_go(self: WindowBlocks, table: BlockTable) -> None:
        self.window -= 1
        try:
            original(self, table)
        finally:
            self.window += 1

    monkeypatch.setattr(WindowBlocks, "let_go", let_go)


def cut_at_the_wrong_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit is as long as that of the layers without a window."""
    take_over = WindowBlocks.take_over

    def take(self: WindowBlocks, table: BlockTable, hashes: list[bytes]) -> None:
        found = [each for each in hashes if self.has(each)]
        take_over(self, table, [each if self.has(each) else found[-1] for each in hashes] if found else [])

    monkeypatch.setattr(WindowBlocks, "usable", lambda self, hashes: len(hashes))
    monkeypatch.setattr(WindowBlocks, "take_over", take)


def let_go_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are given back before rejected drafts are taken back."""
    original = WindowedPool.truncate

    def truncate(self: WindowedPool, table: BlockTable, num_tokens: int) -> None:
        if num_tokens:
            self.let_go(table)
        original(self, table, num_tokens)

    monkeypatch.setattr(WindowedPool, "truncate", truncate)


BUGS = [let_go_early, cut_at_the_wrong_kind, let_go_of_drafts]


@pytest.mark.parametrize("plant", BUGS)
def test_planted_bugs_change_texts(
    gemma: Pair,
    expected: list[list[int]],
    plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Texts part from earlier ones where these have let go of their windows, which others have taken.
    prompts = [
        *PROMPTS,
        *(text(number, 200) for number in (5, 6)),
        *([*text(1, 90), *text(n, 9)] for n in (7, 8)),
    ]
    params, arrivals = [*PARAMS, *PARAMS[:4]], [*ARRIVALS, 80, 90, 200, 210]
    config = {**FEW, "num_speculative_tokens": 12, "block_size": 1}
    right = run_engine(gemma.engine(gemma.draft, **config), prompts, params, arrivals)
    assert right[: len(expected)] == expected
    plant(monkeypatch)
    core = gemma.engine(gemma.draft, **config)
    with pytest.raises(AssertionError):
        assert run_engine(core, prompts, params, arrivals) == right


class Histories:
    """Random texts over a pool whose memory is a dictionary: each place knows which beginning of a text ends
    there. Every token looks at its window, and must find its own text."""

    def __init__(self, seed: int, window: int, block_size: int) -> None:
        self.numbers = random.Random(seed)
        self.step_tokens = 12
        held, step = blocks_held(window, block_size), -(-self.step_tokens // block_size)
        self.windows = WindowBlocks(
            3 * held + step + self.numbers.randrange(3 * held), block_size, window, 12
        )
        self.pool = WindowedPool(400, block_size, self.windows)
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.texts: dict[BlockTable, tuple[list[int], int]] = {}
        self.num_hits = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.numbers.random() < 0.3:
                self.begin()
            self.step()
            if self.texts and self.numbers.random() < 0.1:
                table = self.numbers.choice(list(self.texts))
                del self.texts[table]
                self.pool.release(table)
        for table in self.texts:
            self.pool.release(table)
        assert self.pool.num_free == self.pool.num_blocks
        assert self.windows.num_free == self.windows.num_blocks
        assert self.windows.num_promised == 0

    def begin(self) -> None:
        numbers, pool = self.numbers, self.pool
        # Texts begin alike, and part anywhere.
        length, part = numbers.randrange(1, 60), numbers.randrange(60)
        ids = [1 if place < part else numbers.randrange(2, 4) for place in range(length)]
        found = pool.find(ids[:-1], "")
        hashes = pool.usable(found)
        if not pool.can_begin(hashes, length):
            return
        table = BlockTable()
        pool.expect_shared(table, found, hashes)
        pool.take_over(table, hashes)
        pool.reserve(table, length)
        self.num_hits += len(hashes) > 0
        self.texts[table] = ids, length

    def step(self) -> None:
        numbers, pool, budget = self.numbers, self.pool, self.step_tokens
        for table, (ids, num_prompt) in list(self.texts.items()):
            start, num_new = table.num_computed_tokens, 0
            num_left = len(ids) - start
            num_new = min(num_left, numbers.randrange(1, budget + 1)) if budget else 0
            if not num_new:
                continue
            drafts = []
            if num_new == num_left:
                drafts = [9] * numbers.randrange(min(4, budget - num_new) + 1)
                if not pool.can_reserve(table, len(ids) + len(drafts)):
                    continue
                pool.reserve(table, len(ids) + len(drafts))
            budget -= num_new + len(drafts)
            end = start + num_new + len(drafts)
            pool.extend(table, end)
            self.compute(table, [*ids[: start + num_new], *drafts], start)
            table.num_computed_tokens = end
            if num_new == num_left:
                num_accepted = numbers.randrange(len(drafts) + 1)
                ids += [*drafts[:num_accepted], numbers.randrange(2, 4)]
                pool.truncate(table, len(ids) - 1)
            pool.publish(table, ids[: table.num_computed_tokens], "")
            pool.keep_beginning(table, num_prompt)
            pool.let_go(table)
            assert len(table.window_ids or ()) == len(table.block_ids)
            assert table.end_window_block - table.first_window_block <= table.num_promised

    def compute(self, table: BlockTable, ids: list[int], start: int) -> None:
        size, places = self.pool.block_size, table.window_ids
        assert places is not None
        for place in range(start, len(ids)):
            block = places[place // size]
            assert block != self.windows.nobody
            self.memory[block, place % size] = tuple(ids[: place + 1])
            for seen in range(max(0, place + 1 - self.windows.window), place + 1):
                found = self.memory.get((places[seen // size], seen % size))
                assert found == tuple(ids[: seen + 1]), "another text's token, or none"


KINDS = [(window, size) for window in (1, 2, 5, 8, 17) for size in (1, 4, 16)]


@pytest.mark.parametrize(("window", "block_size"), KINDS)
def test_every_token_finds_its_window(window: int, block_size: int) -> None:
    num_hits = 0
    for seed in range(12):
        histories = Histories(seed, window, block_size)
        histories.run(150)
        num_hits += histories.num_hits
    assert num_hits > 20


@pytest.mark.parametrize("plant", BUGS)
def test_planted_bugs_are_found_in_histories(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    def run() -> None:
        for seed in range(40):
            Histories(seed, 8, 1).run(150)

    with pytest.raises(AssertionError):
        run()


def test_no_text_goes_back_over_a_border() -> None:
    pool = WindowedPool(20, 4, WindowBlocks(20, 4, 8, 4))
    table = BlockTable()
    pool.reserve(table, 40)
    pool.extend(table, 40)
    table.num_computed_tokens = 39
    pool.let_go(table)
    # A text that begins with the 36 tokens of full blocks looks at block 7, though token 39 does not.
    assert (table.first_window_block, table.end_window_block) == (7, 10)
    assert pool.windows.num_free == 17
    pool.truncate(table, 35)
    with pytest.raises(AssertionError, match="have been let go"):
        pool.truncate(table, 34)
    pool.release(table)
    assert pool.windows.num_free == 20


def test_nobodys_block_is_not_written_to(gemma: Pair) -> None:
    """A table whose blocks were not taken before a pass is refused, in C and in Python."""
    core = gemma.engine(**FEW)
    table = BlockTable()
    core.scheduler.target_pool.reserve(table, 8)
    for num_tokens in (5, 60):
        core.scheduler.target_pool.reserve(table, num_tokens)
        with pytest.raises((MemoryError, PointerError)):
            core.target.forward([Span(table, [1] * num_tokens, 1)])
    # A table without blocks for windows would read and write others' memory.
    bare = BlockTable()
    bare.block_ids = table.block_ids
    for num_tokens in (5, 60):
        with pytest.raises(PointerError):
            core.target.forward([Span(bare, [1] * num_tokens, 1)])


def test_passes_are_measured_as_far_as_there_are_blocks(gemma: Pair) -> None:
    core = gemma.engine(**FEW)
    pool, windows = core.scheduler.target_pool, windows_in(core)
    assert pass_seconds(core.target, pool, [1] * 4, windows.num_blocks // 2)
    assert pass_seconds(core.target, pool, [1] * 4, windows.num_blocks) is None
    assert windows.num_free == windows.num_blocks
    assert windows.num_promised == 0


def planned(budget: int, window: int, **config: Any) -> tuple[int, int]:
    """Blocks of a model like Gemma 3 1B, of 26 layers whose tokens take 1 KiB each, and those of the 22 that
    have a window."""
    kept = (1, 256), (1, 256)
    layers = [
        AttentionCache(*kept, torch.float16, CPU, window if place % 6 < 5 else None) for place in range(26)
    ]
    model: Any = SimpleNamespace(
        caches=layers,
        has_encoder=False,
        cache_bytes_per_token=26 << 10,
        state_bytes_per_sequence=0,
        device=CPU,
    )
    settings = EngineConfig(target="target", cache_memory=ByteSize(budget), **config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_plan, "prompt_bytes", lambda *_: 0)
        plan = plan_caches(settings, [model], 32768, None)
    (own,) = plan.windows
    return plan.num_blocks, 0 if own is None else own.num_blocks


def test_how_many_blocks_layers_with_a_window_have() -> None:
    """With all memory that one text of 32,768 tokens can use it takes a fifth of what it took."""
    whole, own, alone = 16 * 4 << 10, 16 * 22 << 10, {"max_num_sequences": 1, "max_num_batched_tokens": 512}
    num_blocks, number = planned(64 << 30, 512, **alone)
    assert num_blocks == 2048
    assert 0.19 < (num_blocks * whole + (number + 1) * own) / (2048 * (whole + own)) < 0.24
    fewest = blocks_held(512, 16) + EngineConfig().max_num_batched_tokens // 16
    for budget in (1 << 27, 1 << 28, 1 << 30, 4 << 30):
        num_blocks, number = planned(budget, 512)
        assert fewest <= number
        # No fewer tokens than before can be stored, and half of the memory remains for the other layers.
        assert num_blocks >= budget // (whole + own)
        assert num_blocks * whole + (number + 1) * own <= budget
        assert number == fewest or number * own <= budget // 2
    # Nothing is gained where no text that fits is longer than its window and a step, or where a window is as
    # long as the context.
    assert planned(1 << 25, 512) == ((1 << 25) // (whole + own), 0)
    assert planned(4 << 30, 32768)[1] == 0
    assert planned(4 << 30, 512, kv_events_endpoint="tcp://127.0.0.1:*")[1] == 0


def test_who_has_blocks_of_its_own(gemma: Pair) -> None:
    core = gemma.engine(**FEW)
    model, cache = core.target.model, core.target.cache
    found = windows_of(model, EngineConfig(target="target"))
    assert found is not None
    assert found.width == 8
    assert [cache.has_own_blocks(layer) for layer in range(2)] == [True, False]
    assert cache.num_window_blocks == windows_in(core).num_blocks + 1
