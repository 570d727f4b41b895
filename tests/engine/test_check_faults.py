"""``truedraft check`` calls planted faults of verification NOT EXACT, and an honest engine exact.

The faults are planted in the C sources of rounds, and in what the block rule runs through. They concern what
only requests with some parameters meet, at some positions of a round.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.engine.test_native import plant
from tests.families import save_random
from tests.hybrids import HYBRIDS
from tests.models import save_perturbed
from truedraft.engine.build import build_engine
from truedraft.engine.commands import check
from truedraft.engine.commands.check import PROMPTS
from truedraft.engine.commands.check_exactness import EngineFailedError
from truedraft.engine.commands.check_law import check_law
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.state_slots import StateSlots
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import Verification
from truedraft.engine.native import compiler
from truedraft.engine.proposers.translated.pairing import load_tokenizer
from truedraft.engine.runtime.native.runner import NativeRunner
from truedraft.engine.sampling import adjust, verify
from truedraft.server.cli.settings_sources import read_options

Patch = pytest.MonkeyPatch
NUM_TEXTS = 500  # the default


class InC(NamedTuple):
    """A place in the C sources, what is planted there, and a rule that meets it."""

    right: str
    wrong: str
    rule: Verification = "rejection"


PROCESS = "process_adjusted(sequence, scratch, probs, logits);"
ADJUST = "adjust_logits(sequence, position, logits, vocab);"


def with_own(change: str, call: str, condition: str = "position > 0") -> str:
    """Makes ``call`` with a copy of the row that is changed at some positions."""
    own = call.replace("(sequence,", "(&own,")
    return f"{{ Row own = *sequence; if ({condition}) {{ {change} }} {own} }}"


def from_the_second_on(change: str, rule: Verification = "rejection") -> InC:
    return InC(PROCESS, with_own(change, PROCESS), rule)


def adjusted_from_the_second_on(change: str, rule: Verification = "rejection") -> InC:
    return InC(ADJUST, with_own(change, ADJUST), rule)


ACCEPT = "if (draft >= 0 && number"
IN_C = {
    "one draft in a hundred is accepted whatever the target says": InC(
        ACCEPT, "if (draft >= 0 && number < 0.01) return 1;\n    " + ACCEPT
    ),
    "every third draft and later ones are accepted": InC(
        ACCEPT, "if (draft >= 0 && position >= 2) return 1;\n    " + ACCEPT
    ),
    "penalties do not see the drafts of their round": InC(
        "        count_token(sequence, draft);\n    }\n"
        "    for (int64_t i = position - 1; i >= 0; i--) uncount_token(sequence, drafts[i]);",
        "    }",
    ),
    "top-p is ignored": from_the_second_on("own.top_p = 1.0f;"),
    "top-p is ignored by coupled rows": from_the_second_on("own.top_p = 1.0f;", "coupled"),
    "top-k is ignored": from_the_second_on("own.top_k = 0;"),
    "top-k keeps one more": from_the_second_on("own.top_k += own.top_k > 0;"),
    "top-k keeps one less": from_the_second_on("own.top_k -= own.top_k > 2;"),
    "min-p is ignored": from_the_second_on("own.min_p = 0.0f;", "coupled"),
    "the temperature is ignored": from_the_second_on("own.temperature = 1.0f;"),
    "biases are ignored": adjusted_from_the_second_on("own.num_biases = 0;"),
    "biases are lost at the bonus token": InC(
        ADJUST,
        with_own("own.num_biases = 0;", ADJUST, "position > 0 && position == scratch->num_drafted[row]"),
    ),
    "the presence penalty is ignored": adjusted_from_the_second_on("own.presence = 0.0f;"),
    "the frequency penalty is ignored": adjusted_from_the_second_on("own.frequency = 0.0f;", "coupled"),
    "the repetition penalty is ignored": adjusted_from_the_second_on("own.repetition = 1.0f;"),
    "the minimum does not count drafts": InC(
        "row->num_tokens + position < row->min", "row->num_tokens < row->min"
    ),
    "the minimum is ignored": adjusted_from_the_second_on("own.min_num_tokens = 0;", "coupled"),
    "masks come a token late": InC(
        "row->mask + position * row->mask_words", "row->mask + (position - (position > 0)) * row->mask_words"
    ),
    "noise comes again at the next position": InC(
        "gumbel_argmax(emitted, probs, &sequence->seed, &place",
        "const int64_t first = place - (position > 0);\n"
        "        gumbel_argmax(emitted, probs, &sequence->seed, &first",
        "coupled",
    ),
    "numbers that accept also recover": InC(
        "uniform(&number, &sequence->seed, &place, RECOVER_STREAM, 1);",
        "uniform(&number, &seed, &place, ACCEPT_STREAM, 1);",
    ),
    "rejected drafts are drawn again from the target": InC(
        "sample_residual(probs, draft_probs, 1.0,", "sample_residual(probs, NULL, 1.0,"
    ),
    "drafts are accepted at twice their chance": InC(
        ": 1.0f) < probs[draft]", ": 1.0f) < 2.0f * probs[draft]"
    ),
}


def penalties_ignore_the_drafted_prefix(patch: Patch) -> None:
    honest = adjust._counts

    def counts(base: torch.Tensor, drafted: torch.Tensor, offset: int, positions: int) -> torch.Tensor:
        return honest(base, drafted[:, :0], 0, 1).repeat(1, positions, 1)

    patch.setattr(adjust, "_counts", counts)


def lengths_stand_by_their_weight(patch: Patch) -> None:
    honest = verify.block_stand_probs

    def stand(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, _ = honest(*given)
        return weights, weights

    patch.setattr(verify, "block_stand_probs", stand)


BY_TORCH: dict[str, tuple[Callable[[Patch], None], Verification]] = {
    "the block rule's lengths stand by their weights": (lengths_stand_by_their_weight, "block"),
    "penalties of the block rule do not see drafts": (penalties_ignore_the_drafted_prefix, "block"),
}


def snapshots_are_not_copied(patch: Patch) -> None:
    """A prefix hit takes over a slot with the states of whoever had it."""
    take_over = StateSlots.take_over

    def taken(self: StateSlots, table: BlockTable, block_hash: bytes) -> None:
        copy, self.copy = self.copy, lambda source, target: None
        take_over(self, table, block_hash)
        self.copy = copy

    patch.setattr(StateSlots, "take_over", taken)


def engine(**config: Any) -> EngineCore:
    return build_engine(
        EngineConfig(device="cpu", method="draft_model", num_speculative_tokens=4, num_threads=1, **config)
    )


def prompts() -> list[list[int]]:
    target = EngineConfig().target
    assert target is not None
    tokenizer = load_tokenizer(target)
    assert tokenizer is not None
    return [list(tokenizer.encode(text)) for text in PROMPTS]


# These are in every run of the suite; the others are slow.
REPRESENTATIVE = {
    "every third draft and later ones are accepted",
    "penalties do not see the drafts of their round",
    "top-p is ignored",
    "penalties of the block rule do not see drafts",
}


def some_slow(names: Iterable[str]) -> list[Any]:
    return [
        pytest.param(name, id=name, marks=[] if name in REPRESENTATIVE else [pytest.mark.slow])
        for name in names
    ]


def failure(rule: Verification, seed: int = 0) -> str:
    """Returns what ``check`` would call the bundled pair, also for a grammar that gives up."""
    num_texts = NUM_TEXTS * (2 if rule == "block" else 1)
    try:
        return check_law(engine(), prompts(), rule, num_texts, 0.0, seed).failure
    except EngineFailedError as error:
        return str(error)


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("name", some_slow(IN_C))
def test_a_fault_in_c_is_called(name: str, fresh_library: Patch, tmp_path: Path) -> None:
    fault = IN_C[name]
    fresh_library.setattr(compiler, "SOURCES", plant(compiler.SOURCES, fault.right, fault.wrong, tmp_path))
    assert isinstance(engine().runner, NativeRunner)
    assert failure(fault.rule)


@pytest.mark.parametrize("name", some_slow(BY_TORCH))
def test_a_fault_of_the_block_rule_is_called(name: str, monkeypatch: Patch) -> None:
    plant_it, rule = BY_TORCH[name]
    plant_it(monkeypatch)
    assert failure(rule)


@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.slow), "coupled"])
def test_an_honest_engine_is_exact(rule: Verification) -> None:
    assert not failure(rule, seed=1)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("hybrid")
    target = save_random(folder / "target", *HYBRIDS["Qwen3.5, two value heads for each key head"])
    return target, save_perturbed(folder / "draft", target, seed=2, noise=0.02)


def verdict(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    quick = ["--samples", "100", "--seconds", "1e-9", "--repeats", "1", "--no-compare", "--json"]
    options = ["--device", "cpu", "--target", pair[0], "--draft", pair[1], *quick]
    check.main(read_options(check.CheckSettings, options))
    words: str = json.loads(capsys.readouterr().out)["verdict"]
    return words


@pytest.mark.usefixtures("needs_compiler")
def test_a_hybrid_is_exact(hybrid: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(hybrid, capsys).startswith("Exact.")


def test_a_wrong_snapshot_is_called(
    hybrid: tuple[str, str], monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshots_are_not_copied(monkeypatch)
    assert verdict(hybrid, capsys).startswith("NOT EXACT")


@pytest.mark.usefixtures("needs_compiler")
def test_a_state_with_rejected_drafts_is_called(
    hybrid: tuple[str, str], fresh_library: Patch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = "scratch->num_certain[i] = row->num_computed + 1;\n        copy_ids"
    planted = plant(compiler.SOURCES, right, right.replace("+ 1;", "+ 1 + num_drafted;"), tmp_path)
    fresh_library.setattr(compiler, "SOURCES", planted)
    assert verdict(hybrid, capsys).startswith("NOT EXACT")
