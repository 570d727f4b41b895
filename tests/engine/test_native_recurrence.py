"""Layers with a running state in C: a token's bits follow from its position and the tokens before it alone."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.engine.recurrent_layers import DELTA_RULE, MAMBA2, ROLLBACK, SHORT_CONV, Layer, Shape, Text
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
    "short-3": Shape(SHORT_CONV, channels=208, width=3),
    "short-7": Shape(SHORT_CONV, channels=64, width=7),
}
NUM_TOKENS = 230


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
    """Runs texts through random passes: prompt chunks, rounds with drafts, pauses, rejections."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.random = random.Random(seed)
        self.layer = Layer(shape)
        self.texts = [Text(slot, inputs_of(shape, slot)) for slot in (2, 0, 3)]
        self.found: list[list[torch.Tensor]] = [[] for _ in self.texts]

    def step(self) -> None:
        """Runs one pass. Rejected tokens had other inputs than those that come in their place."""
        some = self.random.sample(range(3), self.random.randint(1, 3))
        news, kept, real = [], [], []
        for member in some:
            text = self.texts[member]
            left = len(text.inputs) - text.stored
            if left <= 0:
                continue
            is_prompt = self.random.random() < 0.1
            count = min(left, self.random.choice((200, 50)) if is_prompt else self.random.randint(1, 9))
            uncertain = 0 if is_prompt else count - 1
            accepted = count - self.random.randint(0, uncertain)
            real.append((text, text.inputs))
            text.inputs = text.inputs.clone()
            text.inputs[text.stored + accepted :] += 1
            news.append((text, count, uncertain))
            kept.append((member, text.stored, accepted))
        if not news:
            return
        for (text, inputs), out, (member, stored, accepted) in zip(
            real, self.layer.run(news), kept, strict=True
        ):
            text.inputs, text.stored = inputs, stored + accepted
            self.found[member].append(out[:accepted])

    @property
    def is_done(self) -> bool:
        return all(text.stored == len(text.inputs) for text in self.texts)


def rounds_are_one_by_one(shape: Shape, seed: int) -> bool:
    """Tells whether all outputs, and all that later passes would read, have the bits of single tokens."""
    rounds, alone = Rounds(shape, seed), Layer(shape)
    while not rounds.is_done:
        rounds.step()
    for text, found in zip(rounds.texts, rounds.found, strict=True):
        single = Text(text.slot, text.inputs)
        if not torch.equal(one_by_one(alone, single), torch.cat(found)):
            return False
        # Folding may be behind where the last tokens were drafts; one more token catches up.
        for layer, each in ((rounds.layer, text), (alone, single)):
            each.inputs = torch.cat([each.inputs, inputs_of(shape, 9, 17)])
            layer.run([(each, 1, 0)])
        memory = zip(rounds.layer.memory(text), alone.memory(single), strict=True)
        if text.folded != single.folded or not all(torch.equal(a, b) for a, b in memory):
            return False
    return True


@pytest.mark.parametrize("seed", range(3))
def test_rounds_with_rejections_have_the_bits_of_single_tokens(shape: Shape, seed: int) -> None:
    assert rounds_are_one_by_one(shape, seed)
