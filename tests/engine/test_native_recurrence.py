"""Layers with a running state in C: a token's bits follow from its position and those before it alone."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.engine.recurrences import MAKERS, by_definition, delta_rule, state_cache, table_in
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.recurrent import Convolution, DeltaRule, Mamba2, Recurrence, ShortConv
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.memory.pointers import PointerError
from truedraft.engine.native.library import load_library
from truedraft.engine.native.recurrence import NativeRecurrence, NativeStates

pytestmark = pytest.mark.usefixtures("needs_compiler")

NUM_TOKENS = 200


def large_delta_rule(rows: int, columns: int, key_heads: int, heads: int, tiled: bool = False) -> DeltaRule:
    channels = 2 * key_heads * rows + heads * columns
    return replace(
        delta_rule(1, 4),
        convolution=Convolution(torch.randn(channels, 4) / 2, silu=True),
        key_heads=key_heads,
        heads=heads,
        key_size=rows,
        value_size=columns,
        decay_rate=-torch.rand(heads),
        dt_bias=torch.randn(heads),
        norm=Norm(torch.rand(columns), 1e-6),
        tiled=tiled,
    )


def large_mamba(rows: int, columns: int, groups: int, heads: int, norm_groups: int = 1) -> Mamba2:
    channels = heads * columns + 2 * groups * rows
    return Mamba2(
        layer=0,
        convolution=Convolution(torch.randn(channels, 4) / 2, torch.randn(channels), silu=True),
        heads=heads,
        head_size=columns,
        groups=groups,
        state_size=rows,
        decay_rate=-torch.rand(heads),
        skip=torch.randn(heads),
        dt_bias=torch.randn(heads),
        dt_limits=(0.0, torch.inf),
        norm=Norm(torch.rand(heads * columns), 1e-5),
        norm_groups=norm_groups,
    )


# Sizes are those of families; small ones fill no vector.
RULES: dict[str, Callable[[], Recurrence]] = {
    **MAKERS,
    "Qwen3.5": lambda: large_delta_rule(128, 128, 2, 4),
    "Qwen3.5 as a GGUF file": lambda: large_delta_rule(128, 128, 1, 3, tiled=True),
    "keys of 64": lambda: large_delta_rule(64, 128, 2, 2),
    "Granite 4": lambda: large_mamba(128, 64, 1, 3),
    "Nemotron-H": lambda: large_mamba(128, 80, 2, 4, norm_groups=2),
    "Falcon-H1": lambda: large_mamba(256, 64, 1, 2),
    "LFM2": lambda: ShortConv(0, Convolution(torch.randn(400, 3))),
}


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Recurrence:
    torch.manual_seed(3)
    return RULES[request.param]()


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    library = load_library()
    assert library is not None
    before = library.get_num_threads()
    library.set_num_threads(2)
    yield
    library.set_num_threads(before)


class Layer:
    """Has a recurrence's cache, full of what must not be read."""

    def __init__(self, rule: Recurrence) -> None:
        self.rule, self.library = rule, load_library()
        self.cache: KVCache = state_cache(rule, 4)
        self.native = NativeRecurrence(rule, self.cache.states[0])

    def run(self, news: list[tuple[BlockTable, torch.Tensor, int]]) -> list[torch.Tensor]:
        """Computes tokens after those of each table, as many as last may be taken back."""
        assert self.library is not None
        spans = [
            Span(table, [0] * len(x), 0, table.num_computed_tokens + len(x) - uncertain)
            for table, x, uncertain in news
        ]
        out = NativeStates(self.library, spans).recur(self.native, torch.cat([x for _, x, _ in news]))
        for span in spans:
            span.table.num_folded_tokens, span.table.num_computed_tokens = span.num_folded_after, span.end
        return list(out.split([len(x) for _, x, _ in news]))

    def memory(self, table: BlockTable) -> list[torch.Tensor]:
        """Returns all that later passes may read: state, records and inputs."""
        state, slot, end = self.cache.states[0], table.state_slot, table.num_computed_tokens
        inputs = torch.arange(end - self.rule.convolution.weight.shape[1] + 1, end) % state.inputs.shape[1]
        found = [state.inputs[slot, inputs]]
        if self.rule.state is not None:
            records = torch.arange(table.num_folded_tokens, end) % state.keys.shape[1]
            found += [state.state[slot]] if table.num_folded_tokens else []
            found += [each[slot, records] for each in (state.keys, state.values, state.decays)]
        return found


def inputs_of(rule: Recurrence, seed: int, tokens: int = NUM_TOKENS + 1) -> torch.Tensor:
    return torch.randn(tokens, rule.input_size, generator=torch.Generator().manual_seed(seed))


def one_by_one(layer: Layer, table: BlockTable, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([layer.run([(table, token[None], 0)])[0] for token in x])


def test_it_is_the_recurrence(rule: Recurrence) -> None:
    x = inputs_of(rule, 1, 50)
    expected = by_definition(rule, x)
    error = one_by_one(Layer(rule), table_in(1), x) - expected
    assert error.abs().max() < 2e-5 * expected.abs().max()


class Rounds:
    """Runs texts through random passes: prompt chunks, scored drafts, tokens drafted one by one; rejections.
    ``all_certain`` is a defect: drafts are folded, too."""

    def __init__(self, rule: Recurrence, seed: int, all_certain: bool = False) -> None:
        self.random = random.Random(seed)
        self.layer = Layer(rule)
        self.tables = [table_in(slot) for slot in (2, 0, 3)]
        self.texts = [inputs_of(rule, slot) for slot in range(3)]
        self.found: list[list[torch.Tensor]] = [[], [], []]
        self.all_certain = all_certain

    def run(self) -> None:
        while unfinished := [n for n in range(3) if self.tables[n].num_computed_tokens < NUM_TOKENS]:
            members = self.random.sample(unfinished, self.random.randint(1, len(unfinished)))
            kind = self.random.choices(("score", "draft", "prompt"), (6, 3, 1))[0]
            left = [NUM_TOKENS - self.tables[n].num_computed_tokens for n in members]
            counts = [min(n, 150 if kind == "prompt" else self.random.randint(1, 9)) for n in left]
            if kind == "prompt":
                self._pass(members, counts, counts)
                continue
            if kind == "draft":
                counts = [min(counts)] * len(members)
            accepted = [self.random.randint(1, count) for count in counts]
            starts = [self.tables[member].num_computed_tokens for member in members]
            if kind == "score":
                self._pass(members, counts, accepted, [count - 1 for count in counts])
            for drawn in range(counts[0] if kind == "draft" else 0):
                some = [max(0, min(1, count - drawn)) for count in accepted]
                self._pass(members, [1] * len(members), some, [drawn] * len(members))
            for member, start, count in zip(members, starts, accepted, strict=True):
                self.tables[member].num_computed_tokens = start + count

    def _pass(
        self, members: list[int], counts: list[int], accepted: list[int], uncertain: list[int] | None = None
    ) -> None:
        """Lets texts follow their inputs up to where tokens are rejected: those have others."""
        news = []
        for number, member in enumerate(members):
            table = self.tables[member]
            start = table.num_computed_tokens
            x = self.texts[member][start : start + counts[number]].clone()
            x[accepted[number] :] += 1
            is_certain = self.all_certain or uncertain is None
            news.append((table, x, 0 if is_certain else (uncertain or [])[number]))
        for member, count, out in zip(members, accepted, self.layer.run(news), strict=True):
            self.found[member].append(out[:count])


def rounds_are_one_by_one(rule: Recurrence, seed: int, all_certain: bool = False) -> bool:
    """Tells whether all outputs, and all that later passes would read, have the bits of single tokens."""
    rounds, alone = Rounds(rule, seed, all_certain), Layer(rule)
    rounds.run()
    for table, text, found in zip(rounds.tables, rounds.texts, rounds.found, strict=True):
        single = table_in(1)
        if not torch.equal(one_by_one(alone, single, text[:NUM_TOKENS]), torch.cat(found)):
            return False
        # Folding is behind where the last tokens were drafts; a last token catches up.
        for layer, each in ((rounds.layer, table), (alone, single)):
            layer.run([(each, text[NUM_TOKENS:], 0)])
        memory = zip(rounds.layer.memory(table), alone.memory(single), strict=True)
        if table.num_folded_tokens != single.num_folded_tokens or not all(
            torch.equal(*both) for both in memory
        ):
            return False
    return True


@pytest.mark.parametrize("seed", range(2))
def test_rounds_with_rejections_have_the_bits_of_single_tokens(rule: Recurrence, seed: int) -> None:
    assert rounds_are_one_by_one(rule, seed)


def test_folded_drafts_would_be_seen() -> None:
    """Tokens that are taken back although a state is folded over them are refused."""
    torch.manual_seed(3)
    with pytest.raises(PointerError, match="states folded over"):
        rounds_are_one_by_one(delta_rule(1, 4), 0, all_certain=True)


def test_the_order_of_value_heads_would_be_seen() -> None:
    torch.manual_seed(3)
    rule = delta_rule(3, 4, tiled=True)
    x = inputs_of(rule, 1, 20)
    others = by_definition(replace(rule, tiled=False), x)
    error = one_by_one(Layer(rule), table_in(0), x) - others
    assert error.abs().max() > 0.01 * others.abs().max()


@pytest.mark.parametrize(
    ("slot", "stored", "folded", "certain"),
    [
        (None, 0, 0, 1),
        (-1, 0, 0, 1),
        (4, 0, 0, 1),
        (0, 16, 8, 17),
        (0, 64, 0, 65),
        (0, 15, 16, 16),
        (0, 40, 32, 8),
    ],
)
def test_c_is_not_given_what_lies_elsewhere(slot: int | None, stored: int, folded: int, certain: int) -> None:
    """Slots that are not there, and logs that do not hold what is said of them, are refused before C."""
    layer, table = Layer(delta_rule(1, 4)), BlockTable()
    table.state_slot, table.num_computed_tokens, table.num_folded_tokens = slot, stored, folded
    x = inputs_of(layer.rule, 1, 1)
    assert layer.library is not None
    with pytest.raises(PointerError):
        NativeStates(layer.library, [Span(table, [0], 0, certain)]).recur(layer.native, x)
