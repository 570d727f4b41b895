"""``truedraft check`` on tiny pairs: exact ones pass, broken engines do not, and the words fit."""

import io
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.engine.conftest import Models
from tests.engine.other_tokenizers import TOKENIZERS, save_tokenizer
from tests.models import save_random_llama
from truedraft.engine import build
from truedraft.engine.build import build_engine
from truedraft.engine.commands import (
    check,
    check_drafts,
    check_grammar,
    check_law,
    check_report,
    check_speed,
)
from truedraft.engine.commands.check_drafts import DraftResult
from truedraft.engine.commands.check_exactness import Resolution
from truedraft.engine.commands.check_speed import Costs, Speed
from truedraft.engine.config import EngineConfig
from truedraft.engine.messages import RoundOrigin, SamplingParams
from truedraft.engine.proposers.translated.pairing import compare_tokenizers
from truedraft.engine.sampling import torch_ops
from truedraft.engine.sampling.verify import RowVerdict, Verdict
from truedraft.server.cli.settings_sources import read_options

# No time at all for speed: then as few tokens as possible are timed, on every machine the same ones.
QUICK = [
    *("--device", "cpu", "--samples", "250", "--seconds", "1e-9", "--repeats", "1", "--no-compare", "--json"),
]


@pytest.fixture(autouse=True)
def two_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "PROMPTS", check.PROMPTS[:2])


def run_check(target: str, draft: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = check.main(read_options(check.CheckSettings, ["--target", target, "--draft", draft, *QUICK]))
    return code, json.loads(capsys.readouterr().out)


def test_an_exact_pair_passes(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_check(models.target, models.close_draft, capsys)
    assert code == 0
    assert report["exact"]
    assert report["verdict"].startswith("Exact. ")
    assert report["greedy"]["differences"] == []
    assert "end-of-sequence" in report["grammar"]["reason"]
    assert [result["verification"] for result in report["sampling"]] == ["rejection", "block", "coupled"]
    assert {speed["temperature"] for speed in report["speeds"]} == {0, 1}
    for speed in report["speeds"]:
        assert 0 < speed["acceptance_rate"] < 1
        assert 1 < speed["acceptance_length"] <= speed["num_speculative_tokens"] + 1
        assert all(0 <= share <= 1 for share in speed["acceptance_by_position"])
        assert len(speed["acceptance_by_position"]) == speed["num_speculative_tokens"]
    assert "no tokenizer" in report["tokenizers"]["verdict"]
    # N-grams are measured next to the draft.
    assert all(speed["acceptance_length"] > 1 for speed in report["ngrams"])
    assert "on a text that repeats itself" in report["verdict"]


def test_all_rounds_of_a_step_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One output may stand for several rounds. A draft of three tokens emits four in a round at most."""

    def in_one_step(_: object, prompts: list[list[int]], params: SamplingParams) -> list[SimpleNamespace]:
        length = params.num_speculative_tokens or 0
        return [SimpleNamespace(num_rounds=-(-params.max_tokens // (length + 1))) for _ in prompts]

    monkeypatch.setattr(check_speed, "outputs", in_one_step)
    clock = count()

    def snapshot() -> SimpleNamespace:
        seconds = {"draft": next(clock), "score": next(clock)}
        return SimpleNamespace(
            draft_tokens_per_position=[], accepted_tokens_per_position=[], phase_seconds=seconds
        )

    core: Any = SimpleNamespace(snapshot=snapshot, admission=SimpleNamespace(room=lambda _: 96))
    (speed,) = check_speed.measure(core, [[1]], [3], 0.0, repeats=1, seconds=1.0)
    assert speed.acceptance_length == 4


def test_the_report_for_people(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        check.main(
            read_options(
                check.CheckSettings, ["--target", models.target, "--draft", models.padded_draft, *QUICK[:-1]]
            )
        )
        == 0
    )
    output = capsys.readouterr().out
    for words in ("padded sizes 16 and 24", "identical to plain decoding", "p = ", "speed-up", "Exact. "):
        assert words in output


def test_without_a_draft(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_check(models.target, "none", capsys)
    assert code == 0
    assert report["speeds"] == []
    assert report["method"] == "ngram"
    assert report["greedy"]["num_tokens"] > 0
    assert [speed["num_speculative_tokens"] for speed in report["ngrams"]] == [2, 4, 8]
    assert all(0 <= speed["acceptance_rate"] <= 1 < speed["tokens_per_second"] for speed in report["ngrams"])
    assert report["verdict"].startswith("Exact. No draft model drafts. N-grams alone, on a text that")


def test_nothing_is_measured_where_speculation_is_off(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--target", models.target, "--draft", "none", "--num-speculative-tokens", "0", *QUICK]
    assert check.main(read_options(check.CheckSettings, options)) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["speeds"], report["ngrams"], report["drafts"]) == ([], [], [])
    assert report["verdict"] == "Exact. No draft model drafts."


def test_what_cannot_be_loaded(models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        check.main(
            read_options(
                check.CheckSettings, ["--target", str(tmp_path), "--draft", models.close_draft, *QUICK]
            )
        )
        == 2
    )
    assert "has no model" in capsys.readouterr().err


def accept_everything(*arguments: Any, **keywords: Any) -> Verdict:
    """What a lenient verifier would do: keep every draft and draw the bonus from the last row."""
    scores, num_draft = arguments[0], arguments[2] if len(arguments) == 3 else arguments[3]
    rows = torch.arange(len(num_draft))
    return Verdict(num_draft, scores[rows, num_draft].argmax(-1))


def accept_every_greedy_draft(logits: torch.Tensor, drafted: list[list[int]]) -> list[RowVerdict]:
    rows = logits.split([len(ids) + 1 for ids in drafted])
    return [RowVerdict(len(row) - 1, int(row[-1].argmax()), False) for row in rows]


@pytest.mark.parametrize(
    ("name", "broken", "words"),
    [
        ("verify_rejection", accept_everything, "another distribution under rejection"),
        ("verify_block", accept_everything, "another distribution under block"),
        ("verify_greedy", accept_every_greedy_draft, "greedy text differs"),
    ],
)
def test_a_broken_engine_is_not_exact(
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    broken: Callable[..., Any],
    words: str,
) -> None:
    monkeypatch.setattr(build, "native_ops", lambda rules: None)
    monkeypatch.setattr(torch_ops, name, broken)
    code, report = run_check(models.target, models.random_draft, capsys)
    assert code == 1
    assert not report["exact"]
    assert words in report["verdict"]


def test_uniformity_agrees_with_simulation() -> None:
    """The share of uniform samples with a p-value below a limit is about the limit."""
    generator = np.random.default_rng(3)
    p_values = np.array([check_law.uniformity(generator.random(60)) for _ in range(20_000)])
    for limit in (0.05, 0.01):
        assert 0.8 * limit < (p_values < limit).mean() < 1.2 * limit
    assert check_law.uniformity(generator.random(400) ** 1.3) < 1e-3
    assert check_law.uniformity(0.5 + 0.4 * (generator.random(400) - 0.5)) < 1e-9


def test_a_shift_that_would_show_does() -> None:
    """The shift that the report names is found in 9 of 10 samples."""
    generator = np.random.default_rng(5)
    number, num_tests = 1000, 30
    slope = 4 * check_law.detectable(number, num_tests)
    found = 0
    for _ in range(100):
        candidates = generator.random((2, 4 * number))
        numbers = candidates[0, candidates[1] * (1 + slope) < 1 + slope * (1 - 2 * candidates[0])][:number]
        found += check_law.uniformity(numbers) * num_tests < check_law.SIGNIFICANCE
    assert found >= 85


def test_positions_are_those_that_rounds_reach() -> None:
    """Three drafts of which one is accepted, then two that both are, after a token of the prompt's pass."""
    origins = [
        RoundOrigin("none", 0, 0, 1),
        RoundOrigin("draft_model", 3, 1, 2),
        RoundOrigin("draft_model", 2, 2, 3),
    ]

    def places(is_block: bool) -> list[set[str]]:
        return [each - {"all", "2 and later"} for each in check_law.positions_of(origins, is_block)]

    assert places(False) == [{"undrafted"}, {"1"}, {"2"}, {"1"}, {"2"}, {"bonus"}]
    assert places(True) == [{"undrafted"}, {"1"}, {"2"}, {"3", "1"}, {"2"}, {"bonus"}]


class FakeTokenizer:
    bos_token_id, unk_token_id = 1, 0

    def __init__(self, vocab: dict[str, int], eos_token_id: int = 2) -> None:
        self.vocab, self.eos_token_id = vocab, eos_token_id

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def test_tokenizers_are_compared_by_string() -> None:
    words = {f"w{i}": i for i in range(500)}
    same = compare_tokenizers(FakeTokenizer(words), FakeTokenizer(dict(words)), 512, 512)
    assert same.compatible
    assert same.verdict == "the same 500 tokens"

    added = compare_tokenizers(FakeTokenizer({**words, "<tool>": 500}), FakeTokenizer(words, 3), 512, 500)
    assert added.compatible
    assert added.num_different == 1
    assert added.special_tokens == ["eos_token: target 2, draft 3"]
    assert "padded sizes 512 and 500" in added.verdict

    shifted = {word: i + 1 for word, i in words.items()}
    other = compare_tokenizers(FakeTokenizer(words), FakeTokenizer(shifted), 512, 512)
    assert not other.compatible
    assert "different tokenizers" in other.verdict


@pytest.mark.parametrize(
    ("draft_tokenizer", "draft_vocab_size", "words"),
    [
        ("fine", 290, ["the same 290 tokens\n", "drafts      as token ids: the tokenizers are the same\n"]),
        ("fine", 320, ["padded sizes 290 and 320", "as token ids", "ids that only one model has are never"]),
        ("characters", 81, ["different tokenizers: ", "of 3", "as text, encoded again with the target's"]),
    ],
)
def test_it_says_how_drafts_reach_the_target(
    draft_tokenizer: str,
    draft_vocab_size: int,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = save_random_llama(tmp_path / "target", seed=1, vocab_size=290)
    save_tokenizer(TOKENIZERS["fine"](), target)
    draft = save_random_llama(tmp_path / "draft", seed=2, vocab_size=draft_vocab_size, layers=1)
    save_tokenizer(TOKENIZERS[draft_tokenizer](), draft)
    assert (
        check.main(read_options(check.CheckSettings, ["--target", target, "--draft", draft, *QUICK[:-1]]))
        == 0
    )
    output = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    for word in words:
        assert word in output


def speed(length: int, ratio: float) -> Speed:
    return Speed(0, length, 0.5, 2, [0.5], 10, 10, ratio, ratio, Costs(0.1, 1, 0.1))


@pytest.mark.parametrize(
    ("ratios", "setting", "words"),
    [
        ({2: 1.2, 4: 1.4}, 4, "Exact. The draft model makes it 1.40 times as fast (4 tokens)."),
        (
            {2: 1.5, 4: 0.9},
            "auto",
            "Exact. The draft model makes it 1.50 times as fast (2 tokens). Keep the length at auto.",
        ),
        (
            {2: 1.5, 4: 0.9},
            4,
            "Exact. The draft model makes it 1.50 times as fast (2 tokens). With 4 tokens it is 0.90 times: "
            "set the length to auto.",
        ),
        (
            {2: 0.9, 4: 0.8},
            "auto",
            "Exact. The draft model makes it slower: 0.90 times at best. Leave it out (--draft none).",
        ),
    ],
)
def test_the_verdict_says_what_to_do(
    ratios: dict[int, float], setting: int | Literal["auto"], words: str
) -> None:
    speeds = [speed(length, ratio) for length, ratio in ratios.items()]
    assert check_report.verdict_of([], speeds, [], setting, "draft_model") == words


def test_a_grammar_whose_text_differs_is_not_exact() -> None:
    greedy = check_report.GreedyResult(1)
    differs = check_report.GreedyResult(1, 0, ["token 1 differs"], name="greedy text of a grammar")
    grammar = check_report.GrammarResult(differs, (1.0, 1.0))
    positions = check_report.PositionsResult(greedy, [], [])
    compared = check_report.Comparisons(None, greedy, positions, grammar, [])
    assert compared.failures == ["greedy text of a grammar differs: token 1 differs"]
    verdict = check_report.verdict_of(compared.failures, [], [], "auto", "draft_model")
    assert verdict == "NOT EXACT: greedy text of a grammar differs: token 1 differs."


def test_text_of_a_grammar() -> None:
    """Forced tokens are drafted; without a tokenizer the report says why nothing is compared."""
    core = build_engine(EngineConfig(device="cpu"))
    prompt = list(range(5))
    result = check_grammar.check_grammar(core, [prompt], (0, 4), 16, Resolution(0.0, 0.0))
    assert (result.greedy.num_tokens, result.greedy.differences, result.reason) == (32, [], "")
    assert 0 < result.mask_microseconds[0] <= result.mask_microseconds[1]
    assert sum(core.snapshot().accepted_tokens_per_position) > 0


def result(draft: str, ratio: float, length: int = 4) -> DraftResult:
    memory = 0 if draft == "ngram" else len(draft) << 20
    return DraftResult(draft, [speed(length, ratio), speed(2, 0.5 * ratio)], memory)


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ({"d": 1.4, "ngram": 1.1}, "nothing that was tried is clearly faster than --draft d: use that"),
        ({"d": 1.4, "mtp": 1.41}, "nothing that was tried is clearly faster than --draft d: use that"),
        ({"d": 1.4, "mtp": 1.6}, "use --draft mtp: 1.60 times as fast at 4 tokens; leave the length to auto"),
        ({"d": 1.4, "mtp": 1.6, "self:int4": 1.61}, "use --draft mtp: 1.60 times as fast at 4 tokens"),
        ({"d": 0.9, "ngram": 1.2}, "use --draft none (n-grams): 1.20 times as fast at 4 tokens"),
        ({"d": 0.9, "self:int4": 1.0}, "nothing that was tried pays (self:int4: 1.00 times as fast"),
        ({}, ""),
    ],
)
def test_the_advice_says_which_draft_to_use(ratios: dict[str, float], words: str) -> None:
    said = check_drafts.advice([result(draft, ratio) for draft, ratio in ratios.items()], "d")
    assert said.startswith(words)
    assert bool(said) == bool(words)


def test_all_that_a_target_could_draft_with_is_compared(
    models: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be loaded is left out; that is said of what a user has named."""
    monkeypatch.setattr(check, "RULES", ())
    named = ["--compare-with", models.random_draft, "--compare-with", "./missing"]
    options = ["--target", models.target, "--draft", models.close_draft, *QUICK, "--compare", *named]
    assert check.main(read_options(check.CheckSettings, options)) == 0
    report = json.loads(capsys.readouterr().out)
    results = {each["draft"]: each for each in report["drafts"]}
    assert set(results) - {"self:int8", "self:int4"} == {
        models.close_draft,
        "ngram",
        models.random_draft,
        "./missing",
    }
    assert "./missing" in results["./missing"]["reason"]
    for draft in (models.close_draft, models.random_draft):
        assert results[draft]["memory"] > 0
        assert {each["temperature"] for each in results[draft]["speeds"]} == {0, 1}
    assert report["advice"]


def test_a_head_of_the_targets_own_checkpoint_is_tried(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(target=models.target, draft="none", device="cpu")
    core: Any = SimpleNamespace(target=SimpleNamespace(model=None))
    monkeypatch.setattr(check_drafts, "load_head", lambda *_: object())
    assert check_drafts.others_to_try(config, core, ["d"]) == ["d", "mtp", "self:int4", "self:int8"]


def test_the_table_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console(file=io.StringIO(), width=80, highlight=False)
    monkeypatch.setattr(check_report, "console", lambda: out)
    check_report._print_drafts([result("/a/long/path" * 6, 1.4), result("mtp", 1.6), result("ngram", 1.1)])
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.rstrip().endswith(("MiB", "none"))] == [
        "mtp",
        "...ath/a/long/path/a/long/path",
        "n-grams",
    ]


def test_prompts_of_a_file_are_a_users_messages(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Tell me of a fox.\n\nWho are you?\n")
    options = ["--prompts", str(file)]
    settings = read_options(check.CheckSettings, options)
    raw = read_options(check.CheckSettings, [*options, "--no-chat"])
    tokenizer = check.load_tokenizer(str(settings.target))
    assert tokenizer is not None
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    for each, text in ((settings, "user: Tell me of a fox."), (raw, "Tell me of a fox.")):
        first, second = check._Prompts(tokenizer, each).token_ids(2048)
        assert tokenizer.decode(first, skip_special_tokens=True).strip() == text
        assert second
