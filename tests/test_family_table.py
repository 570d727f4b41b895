"""The families in docs/models.md are those of the last full run, and some are tried again here."""

from pathlib import Path

import pytest

from tools.family_table import PAGE, RECORD, Outcome, model_types, outcome, page, recorded

# One of each kind of fate, quick ones.
AGAIN = ("llama", "qwen3_vl", "gpt_neox", "glm4v", "mamba", "falcon", "llama4", "stablelm", "whisper", "bart")


def test_the_page_says_so() -> None:
    """Written anew by ``python -m tools.family_table``."""
    assert PAGE.read_text() == page(PAGE.read_text(), recorded())


def test_every_type_was_tried_and_none_failed() -> None:
    outcomes = recorded()
    assert sorted(outcomes) == model_types(), f"{RECORD} is of another release of transformers"
    assert not [name for name, each in outcomes.items() if each.how == "failed"]
    for name, each in outcomes.items():
        assert bool(each.why) == (each.how in ("refused", "untried")), name
        assert "Traceback" not in each.why
        assert "\n" not in each.why


@pytest.mark.filterwarnings("ignore")  # transformers warns of some of its own defaults
@pytest.mark.parametrize("model_type", AGAIN)
def test_some_again(model_type: str) -> None:
    assert outcome(model_type) == recorded()[model_type]


def test_a_deviation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: positions of later chunks are counted from nought."""
    from truedraft.engine.models.hf.decoder_only import DecoderModel

    honest = DecoderModel._call

    def shifted(self: DecoderModel, ids, positions, *others):  # type: ignore[no-untyped-def]
        return honest(self, ids, positions - positions.min(), *others)

    monkeypatch.setattr(DecoderModel, "_call", shifted)
    monkeypatch.setattr("truedraft.engine.models.load.self_check", lambda _: None)
    assert outcome("gpt2").how == "failed"


def test_words_of_the_page(tmp_path: Path) -> None:
    outcomes = {
        "one": Outcome("fused", "", "inner"),
        "two": Outcome("refused", "two models cannot be served: they sleep"),
        "three": Outcome("refused", "three models cannot be served: they sleep"),
    }
    text = page(
        f"before {'<!-- families: python -m tools.family_table -->'} old <!-- end of families --> after",
        outcomes,
    )
    assert "| 1 | `one` (`inner`) |" in text
    assert "| ... models cannot be served: they sleep | 2 | `two`, `three` |" in text
    assert text.startswith("before ")
    assert text.endswith(" after")
