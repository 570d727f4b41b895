"""OpenVINO and vLLM against stand-ins for their packages: what is asked of them, what is made of it."""

import sys
from pathlib import Path

import pytest

from benchmarks.contestants import vllm_cpu
from benchmarks.contestants.openvino_pipeline import PLAIN, SPECULATIVE, export, process
from benchmarks.synthetic_pair import PAIRS, save_pair
from tests.benchmarks.conftest import Benchmark

# Says token 7 over and over; at temperature 0, for exactly as long as it is asked to, or it fails.
PACKAGE = """\
import json, os
from types import SimpleNamespace

__version__ = "1"
SchedulerConfig = SimpleNamespace

def GenerationConfig(**options):
    assert options["ignore_eos"] and not options["do_sample"]
    return SimpleNamespace(**options)

def draft_model(path, device, **properties):
    return path

class ContinuousBatchingPipeline:
    def __init__(self, path, scheduler, device, properties):
        assert os.path.exists(path + "/model") and not scheduler.enable_prefix_caching
        name = "speculative" if "draft_model" in properties else "plain"
        with open(os.path.dirname(__file__) + "/" + name, "w") as file:
            json.dump([scheduler.max_num_seqs, properties], file)

    def generate(self, prompts, configs):
        return [SimpleNamespace(m_generation_ids=[[7] * config.max_new_tokens]) for config in configs]
"""
VLLM = """\
import os
from types import SimpleNamespace

SamplingParams = SimpleNamespace

class LLM:
    def __init__(self, **options):
        print("a line of log")
        assert options["dtype"] == "float32" and not options["enable_prefix_caching"]
        assert options["max_num_seqs"] == 2 and options["max_model_len"] == 16 + 8
        assert os.environ["OMP_NUM_THREADS"] == "1"

    def generate(self, prompts, params, use_tqdm):
        assert params.ignore_eos and params.temperature == 0
        said = SimpleNamespace(token_ids=[7] * params.max_tokens)
        return [SimpleNamespace(outputs=[said]) for prompt in prompts]
"""
EXPORTER = '#!/bin/sh\nfor last; do :; done\nmkdir "$last"; echo "$*" >"$last/model"\n'


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With an interpreter, an exporter and the packages."""
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "openvino_genai.py").write_text(PACKAGE)
    (folder / "openvino.py").write_text("Tensor = list")
    (folder / "vllm.py").write_text(VLLM)
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "optimum-cli").write_text(EXPORTER)
    for name in ("python", "optimum-cli"):
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def test_peers_with_openvino(benchmark: Benchmark, environment: Path, tmp_path: Path) -> None:
    document = benchmark(
        *("peers", "--pair", "tiny", "--threads", 1, "--max-tokens", 8, "--repeats", 1, "--num-prompts", 3),
        *("--concurrency", 3, "--openvino-python", environment / "python", "--work", tmp_path),
    )
    rows = {row["variant"]: row for row in document["results"]}
    assert rows[PLAIN]["same_text"] == rows[SPECULATIVE]["same_text"] == "0/3"
    ratios = {row["ratio"] for row in document["ratios"]}
    assert "Truedraft plain / OpenVINO plain" in ratios
    for name in ("plain", "speculative"):
        options = (environment / name).read_text()
        assert options.startswith("[3, ")
        assert '"INFERENCE_PRECISION_HINT": "f32"' in options
    assert '"draft_model": ' in (environment / "speculative").read_text()


def test_a_checkpoint_is_exported_once(environment: Path, tmp_path: Path) -> None:
    python = environment / "python"
    target, _ = save_pair(tmp_path / "pair", 0.8, PAIRS["tiny"])
    (environment / "optimum-cli").write_text(EXPORTER + 'cp "$4/tokenizer.json" "$last"\n')
    folder = export(target, python, "int4", tmp_path / "exported" / "target-int4")
    assert "--weight-format int4 --group-size 32 --sym --ratio 1.0" in (folder / "model").read_text()
    exported, own = ((path / "tokenizer.json").read_text() for path in (folder, Path(target)))
    assert "Regex" not in exported  # which OpenVINO cannot decode with
    assert "Regex" in own
    (environment / "optimum-cli").write_text("#!/bin/sh\necho no such architecture >&2; exit 1\n")
    assert export(target, python, "int4", folder) == folder
    with pytest.raises(RuntimeError, match="no such architecture"):
        export(target, python, None, tmp_path / "exported" / "target")
    assert not (tmp_path / "exported" / "target").exists()


def test_peers_with_vllm(benchmark: Benchmark, environment: Path) -> None:
    options = ["peers", "--pair", "tiny", "--threads", 1, "--vllm-python", environment / "python"]
    document = benchmark(
        *(*options, "--max-tokens", 8, "--repeats", 1, "--num-prompts", 2, "--concurrency", 2)
    )
    rows = {row["variant"]: row for row in document["results"]}
    assert rows[vllm_cpu.PLAIN]["same_text"] == "0/2"
    with pytest.raises(SystemExit, match="float32 only"):
        benchmark(*options, "--quantize", "int8")


def test_failures_say_what_the_process_said(environment: Path, tmp_path: Path) -> None:
    (environment / "openvino_genai.py").write_text("raise SystemExit('no such processor')")
    with pytest.raises(RuntimeError, match="no such processor"):
        process(environment / "python", tmp_path, None, 5, 1, 1)
