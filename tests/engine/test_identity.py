"""What a worker adds to ``system_fingerprint``; types of weights as banner and ``/version`` name them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.families import ORIGINAL, save_family
from tests.gguf_models import save_gguf
from tests.models import make_engine, save_random_llama
from truedraft.engine.config import EngineConfig
from truedraft.engine.messages import Ready
from truedraft.engine.models import identity
from truedraft.engine.process.worker import describe

pytestmark = pytest.mark.usefixtures("needs_compiler")
DEFAULT: dict[str, Any] = {"dtype": "auto", "device": "cpu"}


def ready(target: str | Path, **config: Any) -> Ready:
    config = DEFAULT | config
    return describe(make_engine(str(target), None, **config), EngineConfig(target=str(target), **config))


def types(described: Ready) -> tuple[list[str], str]:
    return described.weights, described.forward


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are in bfloat16."""
    path = tmp_path_factory.mktemp("folder")
    save_random_llama(path, seed=1, vocab_size=48, hidden=64, std=0.15)
    file = path / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None}
    save_gguf(path, LlamaConfig(vocab_size=48, num_hidden_layers=2, **sizes, **more), "Q4_1")
    return path


WAYS: list[dict[str, Any]] = [{}, {"quantize": "int4"}, {"dtype": "float32"}, {"native_kernels": False}]


def test_another_arithmetic_is_another_fingerprint(folder: Path, gguf: Path) -> None:
    found = [[ready(target, **way) for way in WAYS] for target in (folder, gguf)]
    assert [types(each) for each in found[0]] == [
        (["float16", "bfloat16"], "fused layers in C"),
        (["Q4_0", "Q8_0"], "fused layers in C"),
        (["float32"], "fused layers in C"),
        (["float32"], "fused layers in torch"),
    ]
    assert [types(each) for each in found[1]] == [
        (["Q4_1", "Q8_0"], "fused layers in C"),
        (["Q4_0", "Q4_1", "Q8_0"], "fused layers in C"),
        (["float32"], "fused layers in C"),
        (["float32"], "fused layers in torch"),
    ]
    assert {each.dtype for each in [*found[0], *found[1]]} == {"float32"}
    assert len({each.fingerprint for each in [*found[0], *found[1]]}) == 2 * len(WAYS)


def test_the_same_weights_elsewhere_have_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert (
        ready(tmp_path / "copy").fingerprint == ready(folder, max_num_sequences=3, num_threads=1).fingerprint
    )


@pytest.mark.parametrize("is_whole", [True, False])
def test_another_weight_is_another_fingerprint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    if not is_whole:
        monkeypatch.setattr(identity, "WHOLE_BYTES", 0)
        monkeypatch.setattr(identity, "SAMPLE_BYTES", 4)
    prints = {ready(folder).fingerprint}
    file = folder / "model.safetensors"
    tensors, smallest = load_file(file), 0 if is_whole else file.stat().st_size / 1000
    changed = [name for name, tensor in tensors.items() if tensor.nbytes > smallest]
    for name in changed:
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        other = {**tensors, name: tensors[name] + 0.125}
        save_file(other, copy / "model.safetensors", metadata={"format": "pt"})
        prints.add(ready(copy).fingerprint)
    assert len(prints) == 1 + len(changed) > 10


def test_another_setting_of_the_config_is_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert (copy / "config.json").read_text() != text
    assert ready(copy).fingerprint != ready(folder).fingerprint


def test_the_chosen_rotary_factors_are_part_of_it(tmp_path: Path) -> None:
    path = save_family(tmp_path, "Phi-3, longrope in C")
    served = [
        ready(path, max_model_len=length).fingerprint for length in (ORIGINAL, ORIGINAL + 1, ORIGINAL + 2)
    ]
    assert served[0] != served[1] == served[2]


@pytest.mark.parametrize(
    ("way", "weights"),
    [
        ({}, ["float32"]),
        ({"native_kernels": False}, ["float32"]),
        ({"dtype": "bfloat16"}, ["bfloat16"]),
    ],
)
def test_transformers_layers_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any], weights: list[str]
) -> None:
    monkeypatch.setattr("truedraft.engine.families.linear.MIN_NATIVE_WEIGHTS", 0)
    monkeypatch.setattr("truedraft.engine.layers.linear.MIN_ONE_DNN_WEIGHTS", 0)
    assert types(ready(save_family(tmp_path, "OLMo"), **way)) == (weights, "transformers' layers")


def test_a_file_in_parts_is_all_of_them(tmp_path: Path) -> None:
    """Only the second part has weights that differ."""
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    for number, part in enumerate((first, second)):
        part.write_bytes(b"GGUF" + bytes([number]))
    assert identity.weight_files(str(first), allow_pickle=False) == [first, second]
    assert identity.weight_files(str(second), allow_pickle=False) == [first, second]
