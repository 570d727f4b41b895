"""AWQ, GPTQ and compressed-tensors checkpoints of 4-bit weights, made here from the formats' definitions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engine.test_packed_table import in_words
from tests.gguf_blocks import dequantised
from tests.models import make_engine, run_engine, save_random_llama
from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.packed import open_packed
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.hf.module import load_causal_model
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.quantised import QuantisedLinear
from truedraft.engine.native.scaled_bytes import BytesLinear

GROUP, VOCAB_SIZE = 32, 48
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
        }
    },
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
# Checkpoints have these configs; the flag says whether their zero points are all 8.
CHECKPOINTS: dict[str, tuple[dict[str, Any], bool]] = {
    "gptq": (GPTQ, True),
    "gptq with zero points": (GPTQ, False),
    "gptq, second format": ({**GPTQ, "checkpoint_format": "gptq_v2"}, False),
    "awq": (AWQ, False),
    "compressed-tensors": (COMPRESSED, True),
    "compressed-tensors with zero points": (COMPRESSED, False),
}
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def words_along_rows(codes: npt.NDArray[np.uint8], order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 [rows, columns / 8]: code ``order[i]`` of eight neighbours in bits 4 i to 4 i + 3."""
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // 8) * 8), dtype=np.uint32)
    padded[:, :columns] = codes
    words = np.zeros((rows, padded.shape[1] // 8), dtype=np.uint32)
    for place, column in enumerate(order):
        words |= padded[:, column::8] << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def packed(
    config: dict[str, Any], codes: Any, zeros: Any, scales: Any
) -> tuple[dict[str, torch.Tensor], npt.NDArray[np.float32]]:
    """A layer's tensors by their last names, and its weights. ``codes`` [out, in], others [out, groups]."""
    weights = codes.astype(np.float32) - zeros.repeat(GROUP, 1)
    weights *= scales.repeat(GROUP, 1).astype(np.float32)
    factors = torch.from_numpy(scales)
    match config["quant_method"]:
        case "compressed-tensors":
            tensors = {
                "weight_packed": words_along_rows(codes),
                "weight_scale": factors,
                "weight_shape": torch.tensor(codes.shape),
            }
            if (zeros != 8).any():
                tensors["weight_zero_point"] = words_along_rows(zeros.T).T
        case "gptq":
            stored = zeros if config.get("checkpoint_format") == "gptq_v2" else (zeros - 1) & 15
            tensors = {"qweight": words_along_rows(codes).T, "qzeros": words_along_rows(stored.T)}
            tensors |= {
                "scales": factors.T,
                "g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // GROUP,
            }
        case _:
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            tensors = {
                "qweight": words_along_rows(codes.T, order),
                "qzeros": words_along_rows(zeros.T, order),
                "scales": factors.T,
            }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, weights


def make(folder: Path, config: dict[str, Any], is_symmetric: bool) -> Any:
    """Writes the checkpoint; returns transformers' module with its weights."""
    save_random_llama(folder, seed=1, vocab_size=VOCAB_SIZE, hidden=64, std=0.15)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    stored = load_file(folder / "model.safetensors")
    draws = np.random.default_rng(1)
    for name in [name for name in stored if "_proj" in name]:
        rows, columns = stored.pop(name).shape
        groups = rows, columns // GROUP
        codes = draws.integers(0, 16, (rows, columns), dtype=np.uint8)
        zeros = (
            np.full(groups, 8, dtype=np.uint8) if is_symmetric else draws.integers(0, 16, groups, np.uint8)
        )
        scales = draws.uniform(0.01, 0.05, groups).astype(np.float16)
        tensors, weights = packed(config, codes, zeros, scales)
        base = name.removesuffix(".weight")
        stored |= {f"{base}.{last}": tensor for last, tensor in tensors.items()}
        module.get_submodule(base).weight.data = torch.from_numpy(weights)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, config)
    return module.eval().requires_grad_(False)


def edit(folder: Path, config: dict[str, Any]) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))


@torch.inference_mode()
def logits_of(module: Any) -> torch.Tensor:
    logits: torch.Tensor = module(input_ids=torch.tensor([IDS])).logits[0]
    return logits


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    config, is_symmetric = CHECKPOINTS[name]
    module = make(tmp_path, config, is_symmetric)
    source = Checkpoint.find(str(tmp_path), allow_pickle=False)
    assert source is not None
    checkpoint = open_packed(source, config, compact=True)
    assert checkpoint is not None
    for weight_name, weight in module.named_parameters():
        assert torch.equal(checkpoint.read([weight_name])[weight_name], weight)
        blocks = checkpoint.blocks(weight_name)
        assert (blocks is None) == ("_proj" not in weight_name)
        if blocks is not None:
            assert blocks.type == TYPES["Q4_0" if is_symmetric else "Q5_0"]
            assert np.array_equal(dequantised(blocks), weight.numpy())
    for options in (LoadOptions(compact_weights=False), LoadOptions(native_kernels=False)):
        served = FreshModel(str(tmp_path), options)
        assert served.served is None
        assert torch.allclose(served.logits(IDS, VOCAB_SIZE), logits_of(module), atol=1e-4)
    assert checkpoint.files.keys() - checkpoint.parts == {name for name, _ in module.named_parameters()}
    assert torch.equal(logits_of(load_causal_model(str(tmp_path), LoadOptions(), "eager")), logits_of(module))


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_layers_stay_packed_and_speculation_changes_no_token(name: str, tmp_path: Path) -> None:
    module = make(tmp_path, *CHECKPOINTS[name])
    model = load_model(str(tmp_path), LoadOptions())
    assert isinstance(model, FusedDecoder)
    assert all(isinstance(layer.mlp.gate_up, QuantisedLinear) for layer in model.weights.layers)
    expected = logits_of(module)
    logits = FreshModel(str(tmp_path), LoadOptions()).logits(IDS, VOCAB_SIZE)
    assert 0 < (logits - expected).square().mean().sqrt() < 0.05 * expected.std()
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    plain = run_engine(make_engine(str(tmp_path), None, dtype="auto"), [IDS], params)
    assert run_engine(make_engine(str(tmp_path), "self:int4", dtype="auto"), [IDS], params) == plain


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    make(tmp_path, GPTQ, is_symmetric=True)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.down_proj.scales"
    stored = load_file(file)
    scales = stored.pop(name)
    for tensor, words in (
        (None, "it lacks model.layers.0.mlp.down_proj.scales"),
        (scales[0], "scales has the shape"),
        (scales[:, :5].contiguous(), "has words of the shape"),
        (scales[:1].repeat(8, 1), "has 8 groups for 128 inputs, but 32 inputs are one"),
        (scales * torch.inf, "or some that are no numbers"),
    ):
        save_file(stored if tensor is None else stored | {name: tensor}, file, metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=words):
            load_model(str(tmp_path), LoadOptions())


def test_inputs_in_another_order_are_refused_where_the_config_denies_it(tmp_path: Path) -> None:
    make(tmp_path, GPTQ, is_symmetric=True)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.g_idx"
    stored = load_file(file)
    save_file(stored | {name: stored[name].flip(0).contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="up_proj has its inputs in another order"):
        load_model(str(tmp_path), LoadOptions())


@pytest.mark.parametrize("label", [{}, {"checkpoint_format": "gptq"}])
def test_zero_points_of_the_second_format_are_known_where_sym_leaves_one_reading(
    label: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GPTQModel has published files whose zero points are stored as 8, and whose format is said to be the
    first one."""
    module = make(tmp_path, {**GPTQ, "checkpoint_format": "gptq_v2"}, is_symmetric=True)
    edit(tmp_path, GPTQ | label | {"sym": True})
    logits = FreshModel(str(tmp_path), LoadOptions(compact_weights=False)).logits(IDS, VOCAB_SIZE)
    assert torch.allclose(logits, logits_of(module), atol=1e-4)
    assert "all 8 by the checkpoint format gptq_v2" in caplog.text
    edit(tmp_path, GPTQ | label | {"sym": False})
    with pytest.raises(ModelLoadError, match="all 9 by its checkpoint_format, gptq, but all 8 by gptq_v2"):
        load_model(str(tmp_path), LoadOptions())


def compressed(bits: int = 4, form: str | None = None, **weights: Any) -> dict[str, Any]:
    said = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    group = {"targets": ["Linear"], "weights": said | weights}
    return {**COMPRESSED, "config_groups": {"group_0": group | ({"format": form} if form else {})}}


def edit_tensors(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    stored = load_file(file)
    changed = {name: change(name, tensor) for name, tensor in stored.items()}
    save_file(changed, file, metadata={"format": "pt"})


@pytest.mark.usefixtures("needs_compiler")
def test_scales_that_float16_does_not_hold_are_kept_in_float32(tmp_path: Path) -> None:
    """One layer has them, and is kept in bytes; others stay in blocks, which hold a group of zeros, too."""
    make(tmp_path, compressed(), is_symmetric=True)
    odd, dead = "model.layers.0.mlp.up_proj.weight_scale", "model.layers.1.mlp.up_proj.weight_"

    def changed(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == odd:
            return tensor.float() * 1.0001
        if name == f"{dead}scale":
            tensor = tensor.clone().bfloat16()
            tensor[0, 0] = 1e-8
        elif name == f"{dead}packed":
            tensor = tensor.clone()
            tensor[0, : GROUP // 8] = 0x88888888 - (1 << 32)
        return tensor

    edit_tensors(tmp_path, changed)
    exact = load_causal_model(str(tmp_path), LoadOptions(), "eager")
    assert exact.model.layers[0].mlp.up_proj.weight.abs().max() > 0
    assert not exact.model.layers[1].mlp.up_proj.weight[0, :GROUP].any()
    model = load_model(str(tmp_path), LoadOptions(cache_dtype="float32"))
    assert isinstance(model, FusedDecoder)
    first, second = model.weights.layers
    assert isinstance(first.mlp.gate_up, BytesLinear)
    assert isinstance(second.mlp.gate_up, QuantisedLinear)
    logits = FreshModel(str(tmp_path), LoadOptions()).logits(IDS, VOCAB_SIZE)
    expected = logits_of(exact)
    assert 0 < (logits - expected).square().mean().sqrt() < 0.05 * expected.std()


def in_eight_bits(folder: Path, form: str | None = None) -> Any:
    """Packs 8 bits; returns transformers' module with the weights."""
    module = make(folder, COMPRESSED, is_symmetric=True)
    file = folder / "model.safetensors"
    stored = load_file(file)
    draws = np.random.default_rng(2)
    for name in [name for name in stored if name.endswith(".weight_packed")]:
        base = name.removesuffix(".weight_packed")
        rows, inputs = stored[f"{base}.weight_shape"].tolist()
        codes = draws.integers(0, 256, (rows, inputs), dtype=np.uint8)
        stored[name] = in_words(codes, 8)
        stored[f"{base}.weight_scale"] /= 16
        scales = stored[f"{base}.weight_scale"].float().numpy().repeat(GROUP, 1)
        module.get_submodule(base).weight.data = torch.from_numpy((codes.astype(np.float32) - 128) * scales)
    save_file(stored, file, metadata={"format": "pt"})
    edit(folder, compressed(8, form))
    return module


@pytest.mark.usefixtures("needs_compiler")
def test_eight_bits_are_packed_too(tmp_path: Path) -> None:
    module = in_eight_bits(tmp_path)
    model = load_model(str(tmp_path), LoadOptions())
    assert isinstance(model, FusedDecoder)
    assert all(isinstance(layer.mlp.gate_up, BytesLinear) for layer in model.weights.layers)
    logits = FreshModel(str(tmp_path), LoadOptions(cache_dtype="float32")).logits(IDS, VOCAB_SIZE)
    torch.testing.assert_close(logits, logits_of(module), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("needs_compiler")
def test_formats_are_mixed(tmp_path: Path) -> None:
    """Some layers are packed, and others are int8."""
    module = in_eight_bits(tmp_path, "pack-quantized")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in [name for name in stored if "down_proj" in name and name.endswith("_packed")]:
        base = name.removesuffix(".weight_packed")
        rows, inputs = stored.pop(f"{base}.weight_shape").tolist()
        codes = stored.pop(name).numpy().view(np.uint8)[:, :inputs]
        stored[f"{base}.weight"] = torch.from_numpy((codes.astype(np.int16) - 128).astype(np.int8))
    save_file(stored, file, metadata={"format": "pt"})
    config = compressed(8, "pack-quantized")
    config["config_groups"]["group_1"] = compressed(8, "int-quantized")["config_groups"]["group_0"]
    edit(tmp_path, config | {"format": "mixed-precision"})
    logits = FreshModel(str(tmp_path), LoadOptions(cache_dtype="float32")).logits(IDS, VOCAB_SIZE)
    torch.testing.assert_close(logits, logits_of(module), rtol=0, atol=1e-4)
    config["config_groups"]["group_1"]["weights"]["num_bits"] = 6
    edit(tmp_path, config | {"format": "mixed-precision"})
    with pytest.raises(ModelLoadError, match="compressed-tensors, which transformers cannot run here"):
        load_model(str(tmp_path), LoadOptions())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (GPTQ, {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "sym": True}),
        (AWQ, {"quant_method": "intel/auto-round", "packing_format": "auto_round:auto_awq", "sym": True}),
        (AWQ, {"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP, "version": "GEMM"}),
        (GPTQ, {"quant_method": "gptq", "bits": "4", "group_size": str(GROUP), "desc_act": True}),
        (GPTQ, {"quant_method": "gptq", "group_size": GROUP, "desc_act": True, "static_groups": True}),
        (GPTQ, {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"group_size": 16}, "-:lm_head": {}}}),
    ],
)
def test_other_names_of_the_same_settings_are_read(
    made: dict[str, Any], said: dict[str, Any], tmp_path: Path
) -> None:
    module = make(tmp_path, made, is_symmetric=True)
    edit(tmp_path, said)
    if "dynamic" in said:
        said["group_size"] = GROUP
        edit(tmp_path, said)
    logits = FreshModel(str(tmp_path), LoadOptions(compact_weights=False)).logits(IDS, VOCAB_SIZE)
    assert torch.allclose(logits, logits_of(module), atol=1e-4)


def test_inputs_in_another_order_are_kept_in_16_bits(tmp_path: Path) -> None:
    """Their weights are rounded for that, as those in E5M2 are."""
    make(tmp_path, GPTQ, is_symmetric=False)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    edit_tensors(
        tmp_path,
        lambda name, tensor: tensor[order] if name.endswith("g_idx") and len(tensor) == 64 else tensor,
    )
    edit(tmp_path, {**GPTQ, "desc_act": True})
    exact = logits_of(load_causal_model(str(tmp_path), LoadOptions(compact_weights=False), "eager"))
    served = FreshModel(str(tmp_path), LoadOptions(compact_weights=False)).logits(IDS, VOCAB_SIZE)
    assert torch.allclose(served, exact, atol=1e-4)
    rounded = logits_of(load_causal_model(str(tmp_path), LoadOptions(), "eager"))
    assert 0 < (rounded - exact).abs().max() < 1e-2 * exact.abs().max()


def test_packed_tensors_of_another_shape_or_left_over_are_refused(tmp_path: Path) -> None:
    make(tmp_path, GPTQ, is_symmetric=True)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.down_proj.qweight"
    stored = load_file(file)
    words = stored[name]
    save_file(stored | {name: words[:, :-8].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"down_proj\.weight of the shape \(56, \d+\), but by config"):
        load_model(str(tmp_path), LoadOptions())
    save_file(stored | {f"{name}_more": words.clone()}, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="has a tensor .*qweight_more"):
        load_model(str(tmp_path), LoadOptions())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GPTQ, "bits": 3}, "by gptq with 3 bits, which is not supported"),
        ({**GPTQ, "bits": 8}, "has 4 bits by its shapes, but its quantization_config says 8"),
        ({**GPTQ, "bits": "four"}, "has 'four' in place of a number"),
        ({**GPTQ, "bits": 4, "w_bit": 8}, "says both bits 4 and w_bit 8"),
        ({**GPTQ, "group_size": 128}, "has 2 groups for 64 inputs, but 128 inputs are one"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "the checkpoint format marlin"),
        ({**GPTQ, "pack_dtype": "int16"}, "with words of int16"),
        ({**AWQ, "version": "GEMV"}, "by awq with the layout gemv"),
        ({**AWQ, "bits": 8}, "by awq with 8 bits"),
        (
            {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round"},
            "packing_format auto_round;",
        ),
        (COMPRESSED, "no .weight_packed"),
        (compressed(8, strategy="tensor_group"), "with the strategy tensor_group"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    make(tmp_path, GPTQ, is_symmetric=True)
    edit(tmp_path, config)
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(tmp_path), LoadOptions())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("made", "said", "words"),
    [
        (GPTQ, {**GPTQ, "sym": True}, "by sym true in its quantization_config all zero points are 8"),
        (AWQ, {**AWQ, "zero_point": False}, "by zero_point false"),
        (COMPRESSED, compressed(), "by symmetric true"),
    ],
)
def test_zero_points_must_be_what_the_config_says(
    made: dict[str, Any], said: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make(tmp_path, made, is_symmetric=False)
    edit(tmp_path, said)
    with pytest.raises(ModelLoadError, match=words):
        load_model(str(tmp_path), LoadOptions())
