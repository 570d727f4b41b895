"""The target's own weights in fewer bits as its draft: the target's text, under every rule."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import LlamaConfig

from tests.engine.planners import loops_in_c
from tests.engine.test_replay import traced
from tests.gguf_models import save_gguf
from tests.models import make_engine, run_engine, save_random_llama
from truedraft.engine.checkpoints.quantise import LAYER_TYPES, QuantisedCheckpoint
from truedraft.engine.commands import check, verify_trace
from truedraft.engine.commands.check_law import check_law
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.gguf.checkpoint import open_gguf
from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.messages import SamplingParams, Verification
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.native.quantised import QuantisedLinear
from truedraft.server.cli.settings_sources import read_options

pytestmark = pytest.mark.usefixtures("needs_compiler")

PROMPTS = [[1, 2, 3], [4, 5], list(range(6, 40))]
RULES: tuple[Verification, ...] = ("rejection", "block", "coupled")
# Target's settings, by what the target computes with.
TARGETS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "16 bits where they are enough": {"dtype": "auto"},
    "int8": {"dtype": "auto", "quantize": "int8"},
    "Q8_0": {"dtype": "auto"},
    "F16": {"dtype": "auto"},
    "Q8_0 in float32": {"dtype": "float32"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_random_llama(tmp_path_factory.mktemp("float"), seed=1, vocab_size=48, hidden=64, std=0.15)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    for kind in ("Q8_0", "F16"):
        save_gguf(root / f"{kind}.gguf", config, kind)
    return root


def layers_of(core: EngineCore, name: str) -> set[int]:
    """The types of the layers' panels."""
    runner = getattr(core, name)
    assert isinstance(runner.model, FusedDecoder)
    down = [layer.mlp.down for layer in runner.model.weights.layers]
    return {linear.panels[0].type if isinstance(linear, QuantisedLinear) else -1 for linear in down}


@pytest.mark.parametrize("seconds", [0, 0.05], ids=["a round a step", "rounds in C"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_text_is_the_targets(name: str, seconds: float, folder: str, files: Path) -> None:
    kind = name.split(" ")[0]
    target = str(files / f"{kind}.gguf") if kind in ("Q8_0", "F16") else folder
    settings = {**TARGETS[name], "step_seconds": seconds}
    plain, pair = make_engine(target, None, **settings), make_engine(target, "self:int4", **settings)
    assert loops_in_c(pair)
    assert layers_of(plain, "target") == layers_of(pair, "target") != layers_of(pair, "draft")
    assert layers_of(pair, "draft") == {TYPES["Q4_0"]}
    for params in (
        SamplingParams(max_tokens=30, temperature=0),
        SamplingParams(max_tokens=30, temperature=0.8, seed=7),
        SamplingParams(max_tokens=30, temperature=1.2, seed=8, top_p=0.9, presence_penalty=0.5),
    ):
        alone = [run_engine(plain, [prompt], params)[0] for prompt in PROMPTS]
        assert run_engine(pair, PROMPTS, params) == alone
    assert pair.stats.num_accepted_tokens > pair.stats.num_draft_tokens / 3


@pytest.mark.parametrize("rule", RULES)
def test_samples_have_the_targets_distribution(rule: Verification, folder: str) -> None:
    core = make_engine(folder, "self:int4", max_num_sequences=32)
    result = check_law(core, PROMPTS, rule, 100, 0.0)
    assert not result.failure
    assert 0 < result.acceptance_rate < 1


def test_what_has_fewer_bits_stays_as_it_is(files: Path) -> None:
    file = open_gguf(str(files / "Q8_0.gguf"))
    name = "model.layers.0.mlp.down_proj.weight"
    for quantize, kind in (("int4", "Q4_0"), ("int8", "Q8_0")):
        checkpoint = QuantisedCheckpoint(file, LAYER_TYPES[quantize])
        blocks, stored = checkpoint.blocks(name), file.blocks(name)
        assert blocks is not None
        assert stored is not None
        assert blocks.type == TYPES[kind]
        assert (blocks.data.tobytes() == stored.data.tobytes()) == (quantize == "int8")


def test_what_cannot_draft_for_itself_is_refused(folder: str) -> None:
    with pytest.raises(ValidationError, match="draft is self:int3"):
        EngineConfig(target=folder, draft="self:int3")
    with pytest.raises(ModelLoadError, match="cannot be quantised"):
        make_engine(folder, "self:int4", native_kernels=False)


def test_a_trace_of_quantised_models_verifies(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(files / "Q8_0.gguf")
    answer = traced(target, "self:int4", dtype="auto")
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answer))
    arguments = [str(file), "--target", target, "--device", "cpu", "--draft"]
    assert verify_trace.main(read_options(verify_trace.ReplaySettings, [*arguments, "self:int4"])) == 0
    assert "confirmed" in capsys.readouterr().out
    assert (
        verify_trace.main(read_options(verify_trace.ReplaySettings, [*arguments, target])) == 1
    )  # it did not draft that


CHECK = ["--device", "cpu", "--samples", "400", "--seconds", "1e-9", "--repeats", "1", "--json"]


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = check.main(read_options(check.CheckSettings, [*arguments, *CHECK]))
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("draft", ["none", "self:int4"])
def test_check_certifies_a_quantised_target(
    draft: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = checked(capsys, "--target", str(files / "Q8_0.gguf"), "--draft", draft)
    assert code == 0
    assert report["dtype"] == "float32"
    assert (report["greedy"]["differences"], report["greedy"]["near_ties"]) == ([], 0)
    weights = report["weights"]
    assert weights["served"] != weights["reference"]
    assert weights["served"] == pytest.approx(weights["reference"], abs=0.1)
    assert {"self:int4", "self:int8"} <= {each["draft"] for each in report["drafts"]}


def test_check_of_a_float_target_compares_no_weights(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = checked(capsys, "--target", folder, "--draft", "none")
    assert code == 0
    assert report["weights"] is None
    found = {each["draft"]: each["speeds"][0] for each in report["drafts"] if each["speeds"]}
    rates = [found[draft]["acceptance_rate"] for draft in ("self:int4", "self:int8")]
    assert 0.4 < rates[0] < rates[1] <= 1  # four bits, eight bits
