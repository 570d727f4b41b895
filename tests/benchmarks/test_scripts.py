"""Each benchmark runs from its command line to its files, at a size that says nothing about speed."""

import json
import math
import sys
from pathlib import Path

import pytest

from benchmarks import chat_turns, null_device, result_file, threads
from benchmarks.contestants.transformers_generate import ASSISTED, GENERATE
from benchmarks.contestants.truedraft import DEFAULT, PLAIN, SPECULATIVE
from benchmarks.result_file import Figure
from benchmarks.synthetic_gguf import Shape, write
from benchmarks.synthetic_pair import cycle, successors
from tests.benchmarks.conftest import Benchmark

SMALL = ("--max-tokens", 12, "--repeats", 2)


def test_peers_on_a_tiny_pair(benchmark: Benchmark, capsys: pytest.CaptureFixture[str]) -> None:
    document = benchmark("peers", "--pair", "tiny", "--threads", 1, "--num-prompts", 2, *SMALL)
    rows = {row["variant"]: row for row in document["results"]}
    assert set(rows) == {PLAIN, SPECULATIVE, GENERATE, ASSISTED}
    assert {row["same_text"] for row in rows.values()} == {"2/2"}
    assert document["misses"] == []
    assert [len(speeds) for speeds in document["tokens_per_second"].values()] == [2] * 4
    assert rows[PLAIN]["acceptance_rate"] is None
    assert rows[SPECULATIVE]["acceptance_rate"] == pytest.approx(rows[ASSISTED]["acceptance_rate"], abs=0.25)
    assert f"{SPECULATIVE} / {ASSISTED}" in {row["ratio"] for row in document["ratios"]}
    shown = capsys.readouterr().out
    assert "Ratios within a repeat" in shown
    assert "achieved to predicted" in shown


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peers_on_prompts_alone(benchmark: Benchmark, dtype: str) -> None:
    document = benchmark(
        *("peers", "--pair", "tiny", "--threads", 1, "--prompt-length", 64, "--max-tokens", 1),
        *("--dtype", dtype),
        *("--repeats", 1, "--no-transformers"),
    )
    assert (document["formula"], document["phases"]) == (None, [])
    assert [row["ratio"] for row in document["ratios"]] == [f"{SPECULATIVE} / {PLAIN}"]


def test_chat_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved, sizes = tmp_path / "turns.json", "--turns 2 --turn-tokens 50 --max-tokens 2 --repeats 1"
    monkeypatch.setattr(sys, "argv", ["chat_turns", *sizes.split(), "--save", str(saved)])
    chat_turns.main()
    document = json.loads(saved.read_text())
    first, second = document["rows"]
    assert (first["prompt"], first["cached"], second["prompt"], second["cached"]) == (50, 0, 100, 48)
    assert document["facts"]["a state, MB"] == 0


def test_threads_of_a_drawn_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that fails costs its own line alone."""
    shape = Shape("llama", 256, 2, 4, 2, 64, 256, 512)
    file = write(tmp_path / "small.gguf", shape, "Q4_K", successors(cycle(512, 0)))
    saved = tmp_path / "threads.json"
    given = ["--file", str(file), "--drawn", "--threads", "1", "4096", "--seconds", "2", "--save", str(saved)]
    monkeypatch.setattr(sys, "argv", ["threads", *given])
    monkeypatch.setattr(threads, "LOADING", 900)  # however busy the machine is
    threads.main()
    (row,) = json.loads(saved.read_text())["rows"]
    assert (row["model"], row["threads"]) == ("small", 1)
    assert row["truedraft"] > 0
    monkeypatch.setattr(sys, "executable", "false")
    assert threads.measured("truedraft", str(file), 1, 1.0) == {"failed": "no word"}


def test_host_cost_over_a_device_that_takes_no_time() -> None:
    plain, drafted = null_device.measure([2], num_rounds=10, repeats=1)
    assert (plain["rows"], plain["drafts"], drafted["drafts"]) == (2, 0, 4)
    for row in (plain, drafted):
        assert row["sum"] >= max(row[part] for part in ("schedule", "run", "commit", "message")) > 0


def test_offline_on_the_bundled_pair(benchmark: Benchmark) -> None:
    document = benchmark(
        *("offline", "--concurrency", 1, 2, "--num-prompts", 2, "--temperature", 0, 1, "--no-transformers"),
        *SMALL,
    )
    greedy, sampled = document["results"]
    assert [row["same_text"] for row in greedy["rows"]] == ["2/2"] * 4
    assert "same_text" not in sampled["rows"][0]
    for row in greedy["phases"] + sampled["phases"]:
        parts = sum(row[f"{part}_ms"] for part in ("draft", "score", "verify", "host"))
        assert row["round_ms"] == pytest.approx(parts, rel=0.5)
    assert all(row["tokens_a_round"] == 1 for row in greedy["phases"] if row["variant"].startswith("plain"))


def test_offline_on_a_synthetic_pair_with_transformers(benchmark: Benchmark, tmp_path: Path) -> None:
    document = benchmark(
        *("offline", "--pair", "tiny", "--concurrency", 1, "--num-prompts", 1, "--temperature", 0, *SMALL),
        *("--work", tmp_path),
    )
    assert [row["same_text"] for row in document["results"][0]["rows"]] == ["1/1"] * 4
    assert (tmp_path / "tiny-0.88" / "draft" / "config.json").exists()


def test_online_serves_loads_and_compares_with_the_engine(benchmark: Benchmark) -> None:
    document = benchmark(
        *("online", "--serve", "--offline", "--ignore-eos", "--concurrency", 2, "--rate", 20),
        *("--requests", 3, "--wait", 300, *SMALL),
    )
    closed, open_ = document["results"]
    assert (closed["load"], open_["load"]) == ("2 clients", "20 requests/s")
    for row in (closed, open_):
        assert (row["requests"], row["errors"]) == (6, 0)
        assert 0 < row["first_p50"] <= row["first_p99"] <= row["all_p99"]
        assert 0 < row["acceptance"] < 1
        assert math.isfinite(row["lag_p99"])
    (comparison,) = document["offline"]
    assert comparison["http_to_engine"] > 0


def test_defaults_by_turns(benchmark: Benchmark, capsys: pytest.CaptureFixture[str]) -> None:
    """Two cycles of three variants; another checkout is this one again."""
    document = benchmark(
        *("defaults", "--pair", "tiny", "--clients", 2, "--lengths", 2, "--blocks", 2, "--seconds", 0.4),
        *("--ramp-up", 0.1, "--warm-up", 0.1, "--retries", 0, "--before", Path(__file__).parents[2]),
    )
    (row,) = document["results"]
    assert (row["pair"], row["clients"]) == ("tiny", 2)
    assert set(row["tokens/s"]) == {"default", "none", "k=2", "before default", "before none"}
    assert all(len(blocks) == 2 for blocks in row["blocks"].values())
    assert all(block["num_tokens"] > 0 for blocks in row["blocks"].values() for block in blocks)
    assert row["acceptance"]["none"] is None
    assert 0 <= row["acceptance"]["k=2"] <= 1  # a busy machine takes few rounds
    assert row["best"] in ("none", "k=2")
    assert "default/before default" in row["ratios"]
    assert "default/best" in capsys.readouterr().out


def test_peers_record_a_result_with_ratios(benchmark: Benchmark, results: Path) -> None:
    document = benchmark(
        *("peers", "--pair", "tiny", "--threads", 1, "--auto", "--no-transformers", *SMALL),
        *("--result", "one-stream"),
    )
    assert {row["variant"] for row in document["results"]} == {PLAIN, SPECULATIVE, DEFAULT}
    assert {row["same_text"] for row in document["results"]} == {"1/1"}
    assert [file.stem for file in results.iterdir()] == ["one-stream"]
    result = result_file.load("one-stream")
    assert (result.model, result.dtype, result.num_repeats) == ("TINY pair", "float32", 2)
    cell = result.cell(PLAIN, f"{DEFAULT}, times as fast")
    ours, plain = (document["tokens_per_second"][name] for name in (DEFAULT, PLAIN))
    assert cell == Figure.of_ratios(PLAIN, f"{DEFAULT}, times as fast", ours, plain)


def test_defaults_without_a_draft_model_draft_with_ngrams(benchmark: Benchmark, results: Path) -> None:
    document = benchmark(
        *("defaults", "--pair", "tiny", "--no-draft", "--clients", 2, "--blocks", 1, "--seconds", 0.4),
        *("--ramp-up", 0.1, "--warm-up", 0.1, "--retries", 0, "--result", "http"),
    )
    (row,) = document["results"]
    assert set(row["tokens/s"]) == {"default", "none", "k=4"}
    assert row["drafted per token"]["none"] == 0
    result = result_file.load("http")
    assert result.model == "tiny pair, n-grams, no draft model"
    cell = result.cell("2", "default, tokens/s")
    assert cell is not None
    assert cell.median == pytest.approx(row["tokens/s"]["default"], rel=1e-3)
