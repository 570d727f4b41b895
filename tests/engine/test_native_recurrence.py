"""Layers with a running state in C: a token's bits follow from its position and those before it alone."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.engine.recurrent_layers import DELTA_RULE, MAMBA2, SHORT_CONV, Layer, Shape, Text
from truedraft.engine.native.library import load_library

pytestmark = pytest.mark.usefixtures("needs_compiler")

SHAPES = {
    "delta-1:1": Shape(DELTA_RULE, heads=4, key_heads=4, rows=16, columns=16),
    "delta-1:2": Shape(DELTA_RULE, heads=4, key_heads=2, rows=128, columns=128),
    "delta-1:3-tiled": Shape(DELTA_RULE, heads=6, key_heads=2, rows=64, columns=128, tiled=True),
    "delta-1:3-width-7": Shape(DELTA_RULE, heads=3, key_heads=1, rows=32, columns=48, width=7),
    "mamba": Shape(MAMBA2, heads=4, key_heads=1, rows=128, columns=64),
    "mamba-8-groups": Shape(MAMBA2, heads=16, key_heads=8, rows=16, columns=80, width=3, norm_groups=8),
    "mamba-no-norm": Shape(MAMBA2, heads=2, key_heads=1, rows=256, columns=64, norm_groups=0),
    "delta-no-vectors": Shape(DELTA_RULE, heads=2, key_heads=1, rows=24, columns=20),
    "short-3": Shape(SHORT_CONV, channels=208, width=3),
    "short-7": Shape(SHORT_CONV, channels=61, width=7),
}
NUM_TOKENS = 200


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    library = load_library()
    assert library is not None
    before = library.get_num_threads()
    library.set_num_threads(2)
    yield
    library.set_num_threads(before)


def inputs_of(shape: Shape, seed: int, tokens: int = NUM_TOKENS) -> torch.Tensor:
    return torch.randn(tokens, shape.inputs, generator=torch.Generator().manual_seed(seed))


def one_by_one(layer: Layer, text: Text) -> torch.Tensor:
    return torch.cat([layer.run([(text, 1, 0)])[0] for _ in range(len(text.inputs))])


def test_it_is_the_recurrence(shape: Shape) -> None:
    layer = Layer(shape)
    text = Text(1, inputs_of(shape, 1))
    expected = layer.by_definition(text.inputs)
    found = one_by_one(layer, text).double()
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


class Rounds:
    """Runs texts through random passes: prompt chunks, scored drafts, tokens drafted one by one; rejections.
    ``all_certain`` is a defect: drafts are folded, too."""

    def __init__(self, shape: Shape, seed: int, all_certain: bool = False) -> None:
        self.random = random.Random(seed)
        self.layer = Layer(shape)
        self.texts = [Text(slot, inputs_of(shape, slot)) for slot in (2, 0, 3)]
        self.found: list[list[torch.Tensor]] = [[] for _ in self.texts]
        self.all_certain = all_certain

    def run(self) -> None:
        while unfinished := [n for n in range(3) if self.texts[n].stored < NUM_TOKENS]:
            members = self.random.sample(unfinished, self.random.randint(1, len(unfinished)))
            kind = self.random.choices(("score", "draft", "prompt"), (6, 3, 1))[0]
            counts = [200 if kind == "prompt" else self.random.randint(1, 9) for _ in members]
            if kind == "draft":
                counts = [min(counts)] * len(members)
            self._round(members, counts, is_prompt=kind == "prompt", one_by_one=kind == "draft")

    def _round(self, members: list[int], counts: list[int], is_prompt: bool, one_by_one: bool) -> None:
        """Lets texts follow their inputs up to where drafts are rejected: those have others."""
        plans = []
        for member, count in zip(members, counts, strict=True):
            text = self.texts[member]
            count = min(count, NUM_TOKENS - text.stored)
            accepted = count if is_prompt else self.random.randint(1, count)
            wrong = text.inputs.clone()
            wrong[text.stored + accepted :] += 1
            plans.append((member, Text(text.slot, wrong, text.stored, text.folded), count, accepted))
        num_passes = min(count for _, _, count, _ in plans) if one_by_one else 1
        outs: list[list[torch.Tensor]] = [[] for _ in plans]
        for number in range(num_passes):
            news = []
            for _, drafted, count, _ in plans:
                tokens = 1 if one_by_one else count
                uncertain = number if one_by_one else 0 if is_prompt else count - 1
                news.append((drafted, tokens, 0 if self.all_certain else uncertain))
            for out, new in zip(outs, self.layer.run(news), strict=True):
                out.append(new)
        for (member, drafted, _, accepted), out in zip(plans, outs, strict=True):
            text, tokens = self.texts[member], torch.cat(out)[:accepted]
            text.stored, text.folded = text.stored + len(tokens), drafted.folded
            self.found[member].append(tokens)


def rounds_are_one_by_one(shape: Shape, seed: int, all_certain: bool = False) -> bool:
    """Tells whether all outputs, and all that later passes would read, have the bits of single tokens."""
    rounds, alone = Rounds(shape, seed, all_certain), Layer(shape)
    rounds.run()
    for text, found in zip(rounds.texts, rounds.found, strict=True):
        single = Text(text.slot, text.inputs)
        if not torch.equal(one_by_one(alone, single), torch.cat(found)):
            return False
        # Folding is behind where the last tokens were drafts; a last token catches up.
        for layer, each in ((rounds.layer, text), (alone, single)):
            each.inputs = torch.cat([each.inputs, inputs_of(shape, 9, 1)])
            layer.run([(each, 1, 0)])
        memory = zip(rounds.layer.memory(text), alone.memory(single), strict=True)
        if text.folded != single.folded or not all(torch.equal(a, b) for a, b in memory):
            return False
    return True


@pytest.mark.parametrize("seed", range(2))
def test_rounds_with_rejections_have_the_bits_of_single_tokens(shape: Shape, seed: int) -> None:
    assert rounds_are_one_by_one(shape, seed)


def test_folded_drafts_would_be_seen() -> None:
    assert not rounds_are_one_by_one(SHAPES["delta-1:1"], 0, all_certain=True)


def test_the_order_of_value_heads_would_be_seen() -> None:
    shape = SHAPES["delta-1:3-tiled"]
    inputs = inputs_of(shape, 1, 20)
    found = one_by_one(Layer(shape), Text(0, inputs))
    others = Layer(replace(shape, tiled=False)).by_definition(inputs)
    assert (found - others).abs().max() > 0.01 * others.abs().max()
