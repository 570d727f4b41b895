"""What lies next to a target is tried, and what is fastest by measured passes is taken."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.head_runs import TRAINED
from tests.heads import Shape, fitted, random_head, save_head
from tests.models import make_engine, run_engine, save_random_llama
from truedraft.engine import build
from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.hub.siblings import MOST, most_likely, siblings
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.heads.mtp import has_mtp
from truedraft.engine.rounds import draft_trial
from truedraft.engine.rounds.draft_trial import NUM_TOKENS, beginnings, trial_of
from truedraft.engine.speculation.costs import Costs, PassCosts

VOCAB_SIZE, HIDDEN, LAYERS = 64, 64, 4
# A pass of the target takes ten times as long as one of a draft, and further tokens in it are nearly free.
CHEAP = PassCosts({1: 0.010, 5: 0.011}), PassCosts({1: 0.001, 5: 0.002})
DEAR = PassCosts({1: 0.010, 5: 0.011}), PassCosts({1: 0.020, 5: 0.021})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Makes a target with a head that has learned what it writes, and one with random weights."""
    target = save_random_llama(
        tmp_path / "Tiny-1B", 1, vocab_size=VOCAB_SIZE, layers=LAYERS, hidden=HIDDEN, std=0.2
    )
    prompts = beginnings(target, VOCAB_SIZE)
    plain = make_engine(target, None)
    outputs = run_engine(plain, prompts, SamplingParams(max_tokens=NUM_TOKENS, temperature=0))
    texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    random = random_head(Shape(HIDDEN, VOCAB_SIZE), target)
    save_head(tmp_path / "Tiny-1B-eagle3-good", fitted(random, target, texts))
    save_head(tmp_path / "Tiny-1B-eagle3-bad", random)
    return tmp_path


def takes(patch: pytest.MonkeyPatch, costs: tuple[PassCosts, PassCosts]) -> None:
    """Replaces what is measured, so that no time decides a test."""

    def calibrate(target: Any, pool: Any, drafts: dict[str, Any], *args: Any, **kwargs: Any) -> Costs:
        return Costs(costs[0], dict.fromkeys(drafts, costs[1]))

    patch.setattr(build, "calibrate", calibrate)


def engine(folder: Path, **config: Any) -> EngineCore:
    fields = {"device": "cpu", "dtype": "float32", "cache_memory": "16MiB", "draft_vocab_size": "full"}
    return build_engine(EngineConfig(target=str(folder / "Tiny-1B"), **fields, **config))


def test_the_better_of_two_heads_is_taken_and_both_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes(monkeypatch, CHEAP)
    core = engine(folder)
    good, bad = (str(folder / f"Tiny-1B-eagle3-{name}") for name in ("good", "bad"))
    assert core.drafter == good
    assert [proposer.name for proposer in core.scheduler.proposers] == ["eagle"]
    told = {line.partition(":")[0]: line for line in core.tried}
    assert float(told[good].split()[1]) > 1.4
    assert float(told[bad].split()[1]) < 1.1
    assert core.tried[-1] == f"{good} is taken; otherwise: --draft {bad} or --draft none"


def test_nothing_is_taken_that_does_not_pay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, DEAR)
    core = engine(folder)
    assert core.drafter is None
    assert not core.scheduler.proposers
    assert core.tried[-1].startswith("none is taken; otherwise: --draft ")


@pytest.mark.parametrize(
    "config", [{"draft": None}, {"draft": "none"}, {"method": "ngram"}, {"num_speculative_tokens": 0}]
)
def test_nothing_is_tried_where_no_model_is_to_draft(folder: Path, config: dict[str, Any]) -> None:
    assert not engine(folder, **config).tried


def test_what_cannot_be_loaded_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, CHEAP)
    bad = folder / "Tiny-1B-eagle3-bad"
    (bad / "model.safetensors").write_bytes(b"\x08" + bytes(15))
    core = engine(folder)
    assert core.drafter == str(folder / "Tiny-1B-eagle3-good")
    line = next(line for line in core.tried if line.startswith(str(bad)))
    assert "is not tried: " in line
    assert "\n" not in line


def test_what_does_not_fit_into_memory_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "free_memory", lambda device: 1000)
    core = engine(folder)
    assert core.drafter is None
    assert len(core.tried) == 2
    assert all("is not tried: it takes " in line and line.endswith("are free") for line in core.tried)


def test_a_draft_that_fails_is_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, CHEAP)

    def fails(*args: Any) -> list[float]:
        raise ModelLoadError("a round has failed")

    monkeypatch.setattr(build, "accepted_by_place", fails)
    core = engine(folder)
    assert core.drafter is None
    assert all("is not tried: a round has failed" in line for line in core.tried)


def test_a_head_of_the_checkpoint_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, CHEAP)
    assert has_mtp(TRAINED)
    core = build_engine(EngineConfig(target=TRAINED, device="cpu", cache_memory="16MiB"))
    assert core.drafter == "mtp"
    assert core.tried[-1] == "mtp is taken; otherwise: --draft none"


@pytest.mark.parametrize(
    ("accepted", "lengths", "length", "gain"),
    [
        ([1.0, 1.0, 1.0, 1.0], range(1, 5), 4, 5 * 10 / (11 + 4)),
        ([0.5, 0.0, 0.0, 0.0], range(1, 5), 1, 1.5 * 10 / (10.25 + 1)),
        ([0.0, 0.0, 0.0, 0.0], range(1, 5), 1, 10 / (10.25 + 1)),
        # A later place is never reached more often than an earlier one, whatever few rounds say.
        ([0.5, 0.5, 1.0, 1.0], [4], 4, 3 * 10 / (11 + 4)),
    ],
)
def test_gain_is_what_is_accepted_over_what_it_takes(
    accepted: list[float], lengths: Sequence[int], length: int, gain: float
) -> None:
    found = trial_of(accepted, *CHEAP, lengths)
    assert found.length == length
    assert found.gain == pytest.approx(gain)


def test_a_trial_ends_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow a target is, one text is written."""
    takes(monkeypatch, CHEAP)
    monkeypatch.setattr(draft_trial, "SECONDS", 0.0)
    assert engine(folder).drafter == str(folder / "Tiny-1B-eagle3-good")


NAMES = [
    "mmproj-Qwen3-8B-F16.gguf",
    "Qwen3-0.6B-Q8_0.gguf",
    "Qwen3-1.7B-Q8_0.gguf",
    "Qwen3-8B-Q8_0.gguf",
    "Llama-3.2-1B-Q8_0.gguf",
    "eagle3-Qwen3-8B-F16.gguf",
    "mtp-gemma-4-12b-Q8_0.gguf",
    "Qwen3-8B-dflash.gguf",
    "draft.gguf",
    "Qwen3-32B-eagle3.gguf",
]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "Qwen3-8B-Q4_K_M.gguf",
            [
                *("eagle3-Qwen3-8B-F16.gguf", "Qwen3-8B-dflash.gguf", "draft.gguf"),
                *("Qwen3-0.6B-Q8_0.gguf", "Qwen3-1.7B-Q8_0.gguf"),
            ],
        ),
        ("gemma-4-12b-it-Q4_K_M.gguf", ["mtp-gemma-4-12b-Q8_0.gguf", "draft.gguf"]),
        ("Qwen3-1.7B-Q4_K_M.gguf", ["draft.gguf", "Qwen3-0.6B-Q8_0.gguf"]),
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", ["draft.gguf"]),
    ],
)
def test_names_say_what_may_draft(target: str, expected: list[str]) -> None:
    assert most_likely(target, NAMES) == expected


def test_files_beside_a_file_and_folders_beside_a_folder(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_bytes(b"x" * 10)
    for name in ("Qwen3-8B", "Qwen3-8B-eagle3", "draft", "Qwen3-8B/eagle3", "Qwen3-8B/original"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "Qwen3-8B-medusa").mkdir()  # no model
    target = tmp_path / "Qwen3-8B-Q4_K_M-00001-of-00002.gguf"
    for number in (1, 2):
        (tmp_path / f"Qwen3-8B-Q4_K_M-0000{number}-of-00002.gguf").write_bytes(b"x" * 50)
        (tmp_path / f"Qwen3-8B-mtp-0000{number}-of-00002.gguf").write_bytes(b"x" * 7)
    found = {Path(each.path).name: each.num_bytes for each in siblings(str(target))}
    assert {name for name in found if name in NAMES} == {
        *("eagle3-Qwen3-8B-F16.gguf", "Qwen3-8B-dflash.gguf", "draft.gguf"),
        *("Qwen3-0.6B-Q8_0.gguf", "Qwen3-1.7B-Q8_0.gguf"),
    }
    assert found["Qwen3-8B-mtp-00001-of-00002.gguf"] == 14
    inside = siblings(str(tmp_path / "Qwen3-8B"))
    beside = [Path(each.path).relative_to(tmp_path).as_posix() for each in inside]
    assert beside[0] == "Qwen3-8B/eagle3"
    assert "Qwen3-8B-eagle3" in beside
    assert "Qwen3-8B/original" not in beside
    assert "Qwen3-8B-medusa" not in beside
    assert "draft" not in beside  # it may be any model's
    assert "draft.gguf" not in beside


def test_revisions_of_a_cached_folder_are_no_drafts(tmp_path: Path) -> None:
    for revision in ("a-mtp", "a"):
        (tmp_path / "snapshots" / revision).mkdir(parents=True)
        (tmp_path / "snapshots" / revision / "config.json").write_text("{}")
    assert siblings(str(tmp_path / "snapshots" / "a")) == []


def test_few_are_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, CHEAP)
    for number in range(MOST + 2):
        other = folder / f"Tiny-1B-draft-{number}"
        other.mkdir()
        (other / "config.json").write_text("{}")
    assert len(engine(folder).tried) <= MOST + 1
