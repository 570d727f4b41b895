"""``truedraft check`` calls planted faults of verification NOT EXACT, and an honest engine exact.

The faults are planted in the C sources of rounds, and in what the block rule runs through. They concern what
only requests with some parameters meet, at some positions of a round.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.engine.planners import loops_in_c
from tests.engine.test_native import plant
from tests.families import save_random
from tests.hybrids import HYBRIDS
from tests.models import save_perturbed
from truedraft.engine import build
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
from truedraft.engine.native import compiler, ops
from truedraft.engine.proposers.translated.pairing import load_tokenizer
from truedraft.engine.sampling import adjust
from truedraft.server.cli.settings_sources import read_options

Patch = pytest.MonkeyPatch
NUM_TEXTS = 500  # the default


class InC(NamedTuple):
    """A place in the C sources, what is planted there, and a rule that meets it."""

    right: str
    wrong: str
    rule: Verification = "rejection"


PROCESS = "process_row(work->probs, logits, row, work->cut, vocab);"
ADJUST = "adjust_position(row, offset + i, i, logits + i * vocab, vocab);"


def with_own(change: str, call: str, condition: str = "i > 0") -> str:
    """Makes ``call`` with a copy of the row that is changed at some positions."""
    own = call.replace("(row,", "(&own,").replace("logits, row,", "logits, &own,")
    return f"{{ Row own = *row; if ({condition}) {{ {change} }} {own} }}"


def from_the_second_on(change: str, rule: Verification = "rejection") -> InC:
    return InC(PROCESS, with_own(change, PROCESS), rule)


def adjusted_from_the_second_on(change: str, rule: Verification = "rejection") -> InC:
    return InC(ADJUST, with_own(change, ADJUST), rule)


NUMBER = "number_of(row, i, ACCEPT_STREAM)"
ACCEPT = f"if (draft >= 0 && {NUMBER}"
IN_C = {
    "one draft in a hundred is accepted whatever the target says": InC(
        ACCEPT, f"if (draft >= 0 && {NUMBER} < 0.01) continue;\n            {ACCEPT}"
    ),
    "every third draft and later ones are accepted": InC(
        ACCEPT, f"if (draft >= 0 && i >= 2) continue;\n            {ACCEPT}"
    ),
    "penalties do not see the drafts of their round": InC(
        f"if (i) count_token(row, drafts[offset + i - 1]);\n        {ADJUST}\n    }}\n"
        "    for (int64_t i = offset + positions - 2; i >= 0; i--)",
        f"{ADJUST}\n    }}\n    for (int64_t i = offset - 1; i >= 0; i--)",
    ),
    "top-p is ignored": from_the_second_on("own.top_p = 1.0;"),
    "top-p is ignored by coupled rows": from_the_second_on("own.top_p = 1.0;", "coupled"),
    "top-k is ignored": from_the_second_on("own.top_k = 0;"),
    "top-k keeps one more": from_the_second_on("own.top_k += own.top_k > 0;"),
    "min-p is ignored": from_the_second_on("own.min_p = 0.0;", "coupled"),
    "the temperature is ignored": from_the_second_on("own.temperature = 1.0;"),
    "biases are ignored": adjusted_from_the_second_on("own.num_biases = 0;"),
    "biases are lost at the bonus token": InC(
        ADJUST, with_own("own.num_biases = 0;", ADJUST, "i > 0 && i == positions - 1")
    ),
    "the presence penalty is ignored": adjusted_from_the_second_on("own.presence = 0.0;"),
    "the frequency penalty is ignored": adjusted_from_the_second_on("own.frequency = 0.0;", "coupled"),
    "the repetition penalty is ignored": adjusted_from_the_second_on("own.repetition = 1.0;"),
    "the minimum does not count drafts": InC(
        "row->num_stored + 1 + num_drafts < row->min", "row->num_stored + 1 < row->min"
    ),
    "the minimum is ignored": adjusted_from_the_second_on("own.min_num_tokens = 0;", "coupled"),
    "masks come a token late": InC(
        "row->mask + position * row->mask_words", "row->mask + (position - (position > 0)) * row->mask_words"
    ),
    "noise comes again at the next position": InC(
        "draw_coupled(row, i, work->probs, vocab)",
        "draw_coupled(row, i - (i > 0), work->probs, vocab)",
        "coupled",
    ),
    "rejected drafts are drawn again from the target": InC(
        "sample_residual(target, draft, weight,", "sample_residual(target, NULL, weight,"
    ),
    "drafts are accepted at twice their chance": InC(
        "* of_draft < work->probs[draft]", "* of_draft < 2.0f * work->probs[draft]"
    ),
}


def penalties_ignore_the_drafted_prefix(patch: Patch) -> None:
    honest = adjust._counts

    def counts(base: torch.Tensor, drafted: torch.Tensor, offset: int, positions: int) -> torch.Tensor:
        return honest(base, drafted[:, :0], 0, 1).repeat(1, positions, 1)

    patch.setattr(adjust, "_counts", counts)


BY_TORCH: dict[str, tuple[Callable[[Patch], None], Verification]] = {
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


# These are in every run of the suite; of the others a commit runs a tenth.
REPRESENTATIVE = (
    "every third draft and later ones are accepted",
    "penalties do not see the drafts of their round",
    "top-p is ignored",
)


def failure(rule: Verification, seed: int = 0) -> str:
    """Returns what ``check`` would call the bundled pair, also for a grammar that gives up."""
    num_texts = NUM_TEXTS * (2 if rule == "block" else 1)
    try:
        return check_law(engine(), prompts(), rule, num_texts, 0.0, seed).failure
    except EngineFailedError as error:
        return str(error)


def is_called(name: str, library: Patch, folder: Path) -> bool:
    fault = IN_C[name]
    library.setattr(compiler, "SOURCES", plant(compiler.SOURCES, fault.right, fault.wrong, folder))
    library.setattr(ops, "agrees", lambda own: True)  # at load the operations are compared with torch's
    assert loops_in_c(engine())
    return bool(failure(fault.rule))


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_common_fault_is_called(name: str, fresh_library: Patch, tmp_path: Path) -> None:
    assert is_called(name, fresh_library, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("name", [name for name in IN_C if name not in REPRESENTATIVE])
def test_a_fault_in_c_is_caught(name: str, fresh_library: Patch, tmp_path: Path) -> None:
    assert is_called(name, fresh_library, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_TORCH)
def test_a_fault_of_the_block_rule_is_caught(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(build, "native_ops", lambda rules: None)
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
    output = capsys.readouterr()
    # An engine that has failed has no report.
    return str(json.loads(output.out)["verdict"]) if output.out else output.err


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
    right = "scratch->num_certain[i] = row->num_computed + 1;"
    planted = plant(compiler.SOURCES, right, right.replace("+ 1;", "+ 1 + row->num_drafts;"), tmp_path)
    fresh_library.setattr(compiler, "SOURCES", planted)
    assert verdict(hybrid, capsys).startswith("NOT EXACT")
