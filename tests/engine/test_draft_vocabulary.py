"""A head's output layer over fewer tokens, and in four bits: its drafts, and which one is chosen."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.engine.head_runs import TRAINED, compare_with_definition, mtp_engine, story_prompts
from tests.models import make_engine, run_engine, save_random_llama
from tests.mtp import NaiveMtp, trained_head
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.base import Model
from truedraft.engine.models.heads.head import Head
from truedraft.engine.models.heads.mtp import load_mtp
from truedraft.engine.models.heads.vocabulary import count_tokens
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.quantised import QuantisedLinear
from truedraft.engine.rounds import draft_vocabulary
from truedraft.engine.rounds.draft_vocabulary import choose_output

pytestmark = pytest.mark.usefixtures("needs_compiler")

SIZE = 300
GREEDY = SamplingParams(max_tokens=24, temperature=0, method="mtp")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return story_prompts()


@pytest.fixture(scope="module")
def head() -> NaiveMtp:
    return trained_head(TRAINED)


@pytest.fixture(scope="module")
def stories(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of texts, whose tokens are to be counted."""
    path = tmp_path_factory.mktemp("stories") / "stories.txt"
    path.write_text(
        "Once upon a time a dog went to the park.\nThey saw a big red ball, and played with it.\n"
    )
    return str(path)


def test_drafts_are_the_most_likely_of_some(head: NaiveMtp, prompts: list[list[int]], stories: str) -> None:
    core = mtp_engine(draft_vocab_size=SIZE, draft_vocab_file=stories)
    counts = count_tokens(stories, TRAINED)
    ranked = [0, 2, *counts, *range(2048)]  # ends first; what was not counted in order
    drafted = sorted(list(dict.fromkeys(ranked))[:SIZE])
    assert compare_with_definition(head, core, prompts[:3], GREEDY, drafted) > 10


def takes(cost: Callable[[Any], float]) -> Callable[[Model, int], float]:
    """Returns what passes take if one of a head takes ``cost`` of its output layer."""

    def seconds(model: Model, num_tokens: int) -> float:
        weights = model.weights  # type: ignore[attr-defined]
        return cost(weights.head) if weights.joint is not None else 1.0 + 0.01 * num_tokens

    return seconds


def by_size(linear: Any) -> float:
    bits = 4.5 if isinstance(linear, QuantisedLinear) else 16
    return float(linear.out_features * bits / (2048 * 16))


def test_text_is_the_same_with_and_without(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in four bits draft other tokens, but what is emitted stays."""
    monkeypatch.setattr(draft_vocabulary, "_seconds", takes(by_size))
    core = mtp_engine(draft_vocab_size=SIZE, dtype="auto")
    chosen = core.scheduler.proposers[0].head  # type: ignore[attr-defined]
    assert isinstance(chosen.model.weights.head, QuantisedLinear)
    assert chosen.model.weights.head.out_features == SIZE
    seeded = SamplingParams(max_tokens=24, temperature=1.1, seed=3, method="mtp", verification="coupled")
    params = [GREEDY, seeded, GREEDY, seeded, seeded]
    plain = make_engine(TRAINED, None, max_model_len=64, dtype="auto")
    expected = run_engine(plain, prompts, [structs.replace(each, method="none") for each in params])
    assert run_engine(core, prompts, params) == expected
    assert core.stats.drafts["mtp"].num_accepted_tokens > 10


@pytest.fixture(scope="module")
def loaded() -> tuple[Model, Head]:
    target = load_model(TRAINED, LoadOptions())
    return target, load_mtp(TRAINED, target, LoadOptions())


# Half of a text's tokens are among the first 512 ids, and all of them among the first 1,024.
HALF = Counter({5: 50, 900: 50} | dict.fromkeys(range(6, 512), 1) | dict.fromkeys(range(512, 1024), 1))
RARE = Counter(dict.fromkeys(range(2048), 1))
CHOSEN: dict[str, tuple[Callable[[Any], float], Counter[int] | None, tuple[int, bool]]] = {
    "by size without counts": (by_size, None, (2048, True)),
    "all the same": (lambda linear: 0.2, None, (2048, False)),
    "hardly faster": (lambda linear: 0.2 - 0.001 * isinstance(linear, QuantisedLinear), None, (2048, False)),
    "all that texts have": (lambda linear: 0.01 + linear.out_features / 2048, HALF, (1024, False)),
    "texts have them all": (lambda linear: 0.1 + 1e-5 * linear.out_features, RARE, (2048, False)),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_makes_most_tokens_a_second_is_chosen(
    loaded: tuple[Model, Head], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cost, counts, expected = CHOSEN[name]
    monkeypatch.setattr(draft_vocabulary, "_seconds", takes(cost))
    target, head = loaded
    found = choose_output(head, target, "auto", counts)
    output: Any = found.model.weights.head  # type: ignore[attr-defined]
    assert (output.out_features, isinstance(output, QuantisedLinear)) == expected
    assert (found.token_ids is None) == (found.vocabulary is None) == (expected[0] == 2048)
    assert found.drafts_with == ("int4" if expected[1] else "own")


@pytest.mark.parametrize(("length", "num_tokens"), [(None, 512), (8, 2048)])
def test_speeds_are_those_at_the_draft_length(
    loaded: tuple[Model, Head], monkeypatch: pytest.MonkeyPatch, length: int | None, num_tokens: int
) -> None:
    """A quarter of the tokens is best for one draft, and too little for eight."""
    monkeypatch.setattr(draft_vocabulary, "_seconds", takes(lambda linear: 0.1 + linear.out_features / 2048))
    target, head = loaded
    found = choose_output(head, target, "auto", RARE, length)
    assert found.model.weights.head.out_features == num_tokens  # type: ignore[attr-defined]


def test_a_target_without_a_head_drafts_nothing_by_itself(tmp_path: Path) -> None:
    core = mtp_engine(save_random_llama(tmp_path / "target", 1), "auto")
    assert not core.scheduler.proposers


def test_full_is_the_layer_of_the_target(loaded: tuple[Model, Head]) -> None:
    target, head = loaded
    assert choose_output(head, target, "full", None) is head
    assert head.model.weights.head is target.weights.head  # type: ignore[attr-defined]


def test_what_cannot_be_is_refused(tmp_path: Path, loaded: tuple[Model, Head]) -> None:
    target, head = loaded
    own = head.drafting(None, head.model.weights.head, in_four_bits=False)
    own.model.weights = replace(own.model.weights, make_output=None)
    assert choose_output(own, target, "auto", None) is own
    with pytest.raises(ModelLoadError, match="draft_vocab_size is 9, but the head has an output layer of"):
        choose_output(own, target, 9, None)
    with pytest.raises(ModelLoadError, match="are of heads, and self:int4 is none"):
        make_engine(TRAINED, "self:int4", draft_vocab_size=9, dtype="auto")
    with pytest.raises(ModelLoadError, match="none.txt cannot be read: no such file"):
        count_tokens(str(tmp_path / "none.txt"), TRAINED)


def test_texts_and_conversations_are_counted(tmp_path: Path) -> None:
    plain, lines = tmp_path / "texts.txt", tmp_path / "texts.jsonl"
    plain.write_text("a dog\n\nand a cat\n")
    lines.write_text('{"prompt": "a dog"}\n{"messages": [{"role": "user", "content": "and a cat"}]}\n')
    counted = count_tokens(str(plain), TRAINED)
    assert counted == count_tokens(str(lines), TRAINED)
    assert counted.total() > 4
