"""Files of LoRA adapters: what changes the output is honoured, or refused in a sentence that names it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.adapters import write_adapter
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers.adapters import Place
from truedraft.engine.models.adapter_file import AdapterFile, read_adapter

LINEAR: Any = None
MODULES = [
    *(f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ("q_proj", "o_proj")),
    "lm_head",
]
PLACES = {name: [Place(LINEAR, 0, 6, 8, None, 1.0)] for name in MODULES}
PREFIX = "base_model.model."
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "o_proj"],
    "base_model_name_or_path": "owner/base",
    # PEFT writes many fields of this kind.
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "lora_dropout": 0.1,
    "init_lora_weights": "gaussian",
    "inference_mode": True,
}


def tensors_of(modules: list[str], rank: int = 2) -> dict[str, torch.Tensor]:
    found = {}
    for number, module in enumerate(modules):
        found[f"{PREFIX}{module}.lora_A.weight"] = torch.full((rank, 6), 1.0 + number)
        found[f"{PREFIX}{module}.lora_B.weight"] = torch.full((8, rank), 2.0 + number)
    return found


def read(folder: Path, max_rank: int = 4) -> AdapterFile:
    return read_adapter("a", str(folder), PLACES, max_rank)


def saved(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> AdapterFile:
    write_adapter(folder, CONFIG | config, tensors_of(MODULES[:4]) if tensors is None else tensors)
    return read(folder)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, [3.0] * 4),
        ({"use_rslora": True}, [6 / 2**0.5] * 4),
        ({"alpha_pattern": {"q_proj": 4}}, [2.0, 3.0, 2.0, 3.0]),
        ({"alpha_pattern": {"0.self_attn.q_proj": 4, "q_proj": 8}}, [2.0, 3.0, 4.0, 3.0]),
        ({"alpha_pattern": {"_proj": 4, "model.layers.1.self_attn.o_proj": 1}}, [3.0, 3.0, 3.0, 0.5]),
    ],
)
def test_scales(config: dict[str, Any], scales: list[float], tmp_path: Path) -> None:
    found = saved(tmp_path, **config)
    lows = [found.modules[name] for name in MODULES[:4]]
    for number, (low, scale) in enumerate(zip(lows, scales, strict=True)):
        assert torch.equal(low.down, torch.full((2, 6), 1.0 + number))
        assert torch.allclose(low.up, torch.full((8, 2), (2.0 + number) * scale))


def test_ranks_of_patterns(tmp_path: Path) -> None:
    tensors = tensors_of(MODULES[:4]) | tensors_of(MODULES[1:2], rank=4)
    found = saved(tmp_path, tensors, rank_pattern={"layers.0.self_attn.o_proj": 4})
    assert found.rank == 4
    assert float(found.modules[MODULES[1]].up[0, 0]) == 2.0 * 6 / 4


def test_some_layers_and_modules(tmp_path: Path) -> None:
    found = saved(tmp_path, tensors_of(MODULES[2:4]), layers_to_transform=[1])
    assert {*found.modules} == {*MODULES[2:4]}
    found = saved(tmp_path, tensors_of([MODULES[0], MODULES[2]]), exclude_modules=["o_proj"])
    assert {*found.modules} == {MODULES[0], MODULES[2]}
    found = saved(tmp_path, tensors_of(MODULES[:1]), target_modules=".*0.*q_proj")
    assert {*found.modules} == {*MODULES[:1]}


def test_names_of_models_with_pictures(tmp_path: Path) -> None:
    tensors = tensors_of([name.replace("model.", "model.language_model.", 1) for name in MODULES[:4]])
    assert {*saved(tmp_path, tensors).modules} == {*MODULES[:4]}
    full = "model.language_model.layers.0.self_attn.q_proj"
    found = saved(
        tmp_path, tensors, alpha_pattern={full: 4}, target_modules=[full, "o_proj", "1.self_attn.q_proj"]
    )
    assert [float(found.modules[name].up[0, 0]) for name in MODULES[:2]] == [2.0 * 2, 3.0 * 3]


def test_an_empty_list_of_layers_is_all(tmp_path: Path) -> None:
    assert {*saved(tmp_path, layers_to_transform=[]).modules} == {*MODULES[:4]}


def test_digests_are_of_both_files(tmp_path: Path) -> None:
    digests = {
        saved(tmp_path / "a").digest,
        saved(tmp_path / "b", lora_alpha=7).digest,
        saved(tmp_path / "c", {name: 2 * each for name, each in tensors_of(MODULES[:4]).items()}).digest,
    }
    assert len(digests) == 3
    assert saved(tmp_path / "d").digest in digests


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "'IA3', and only 'LORA'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"bias": "all"}, "trained biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"kasa_config": {"a": 1}}, "kasa_config"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "has changed its base"),
        ({"init_lora_weights": ["x"]}, "has changed its base"),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"layers_pattern": "h"}, "layers_pattern is 'h'"),
        ({"what_comes_next_year": 1}, "what_comes_next_year"),
        ({"r": 5}, "r is 5, above max_lora_rank, which is 4"),
        ({"r": 0}, "its r is 0"),
        ({"r": True}, "its r is True"),
        ({"r": "2"}, "its r is '2'"),
        ({"r": 1}, "the rank 1 ask for"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"lora_alpha": 1e39}, "not finite"),
        ({"lora_alpha": 10**400}, "where a finite number is needed"),
        ({"rank_pattern": {"q_proj": 9}}, "above max_lora_rank"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern of q_proj is 2.5"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern of q_proj is 'x'"),
        ({"alpha_pattern": {"(a+)+": 2}}, "only names of modules"),
        ({"alpha_pattern": [1]}, "alpha_pattern is no object"),
        (
            {"alpha_pattern": {"model.language_model.layers.0.a": 1, "model.layers.0.a": 2}},
            "names a module twice",
        ),
        ({"layers_to_transform": [2]}, "layers_to_transform has 2, and this model has 2 layers"),
        ({"layers_to_transform": -1}, "layers_to_transform has -1"),
        ({"layers_to_transform": 0}, "layers.1.self_attn.o_proj, which layers_to_transform leaves out"),
        ({"target_modules": ["q_proj", "o_proj", "lm_head"]}, "no tensors of lm_head"),
        ({"target_modules": ["q_proj"]}, "o_proj, which target_modules does not name"),
        ({"target_modules": [1]}, "not a list of names"),
        ({"exclude_modules": ["q_proj"]}, "which target_modules does not name"),
        ({"exclude_modules": "x"}, "exclude_modules are not a list"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="the LoRA adapter a cannot be loaded") as error:
        saved(tmp_path, **config)
    assert words in str(error.value)


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> dict[str, torch.Tensor]:
    tensors = tensors_of(MODULES[:4])
    change(tensors)
    return tensors


Q = f"{PREFIX}{MODULES[0]}"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "no tensors"),
        (changed(lambda t: t.pop(f"{Q}.lora_A.weight")), "lora_B of model.layers.0.self_attn.q_proj alone"),
        (changed(lambda t: [t.pop(f"{Q}.lora_{kind}.weight") for kind in "AB"]), "target_modules names"),
        (changed(lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(2, 7)})), "are [2, 7] and [8, 2]"),
        (changed(lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(9, 2)})), "made for owner/base"),
        (changed(lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(8)})), "are [2, 6] and [8],"),
        (changed(lambda t: t[f"{Q}.lora_B.weight"].fill_(torch.nan)), "not finite"),
        (changed(lambda t: t[f"{Q}.lora_A.weight"].fill_(torch.inf)), "not finite"),
        (changed(lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(2, 6).int()})), "no floating types"),
        (changed(lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(8)})), "lora_magnitude_vector"),
        (changed(lambda t: t.update({f"{Q}.bias": torch.ones(8)})), "q_proj.bias"),
        (changed(lambda t: t.update({f"{PREFIX}model.embed_tokens.weight": torch.ones(2)})), "embed_tokens"),
        (
            changed(lambda t: t.update({f"{PREFIX}lm_head.base_layer.weight": torch.ones(2)})),
            "save_embedding",
        ),
        (tensors_of([name.replace("layers.1", "layers.5") for name in MODULES[:4]]), "has 2 layers"),
        (
            tensors_of([*MODULES[:4], "model.layers.0.mlp.experts.0.up_proj"]),
            "only lm_head, o_proj, q_proj can",
        ),
        (
            changed(lambda t: t.update({f"{Q}.lora_A.default.weight": torch.ones(2, 6)})),
            "two tensors of model.layers.0.self_attn.q_proj",
        ),
    ],
)
def test_tensors_that_are_refused(tensors: dict[str, torch.Tensor], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="the LoRA adapter a cannot be loaded") as error:
        saved(tmp_path, tensors)
    assert words in str(error.value)


def test_places_that_are_refused(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(ModelLoadError) as error:
            read(path)
        return str(error.value)

    assert "there is no folder" in refusal(tmp_path / "nothing")
    assert "GGUF adapters are not served" in refusal(tmp_path / "a.gguf")
    assert "no adapter_config.json" in refusal(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(CONFIG))
    assert "a pickle is not read" in refusal(tmp_path)
    saved(tmp_path)
    for text, words in (
        ("[]", "no object"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("\xff", "no JSON"),
    ):
        config.write_bytes(text.encode("latin1"))
        assert words in refusal(tmp_path)
    config.write_bytes(b" " * (1 << 21))
    assert "longer than" in refusal(tmp_path)
    for path in ("~nobody-has-this-name/x", "x" * 300, "/dev/null/x"):
        assert "the LoRA adapter a cannot be loaded" in refusal(Path(path))


def test_a_file_that_no_adapter_fills_is_not_read(tmp_path: Path) -> None:
    saved(tmp_path)
    with (tmp_path / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(ModelLoadError, match="longer than an adapter of this model can be"):
        read(tmp_path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    """What is read is finite, and of the shapes that the model has."""
    write_adapter(tmp_path, CONFIG, tensors_of(MODULES[:4]))
    file = tmp_path / data.draw(st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) or len(content) :]
    file.write_bytes(content)
    try:
        found = read(tmp_path)
    except ModelLoadError as error:
        message = str(error)
    else:
        assert {*found.modules} == {*MODULES[:4]}
        for low in found.modules.values():
            assert (low.down.shape[1], len(low.up)) == (6, 8)
            assert all(bool(each.isfinite().all()) for each in low)
        return
    assert message.startswith("the LoRA adapter a cannot be loaded: ")
