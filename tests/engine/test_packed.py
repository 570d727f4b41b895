"""AWQ, GPTQ and compressed-tensors checkpoints of 4-bit weights, made here from the formats' definitions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

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
    checkpoint = open_packed(source, config)
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
        (scales[0], "has scales of the shape"),
        (scales[:, :5].contiguous(), "has scales of the shape"),
        (scales[:1].repeat(8, 1), "has groups of 16 inputs"),
        (scales.float() * 1.0001, "are no float16 numbers"),
    ):
        save_file(stored if tensor is None else stored | {name: tensor}, file, metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=words):
            load_model(str(tmp_path), LoadOptions())


def test_inputs_in_another_order_are_refused_whatever_the_config_says(tmp_path: Path) -> None:
    make(tmp_path, GPTQ, is_symmetric=True)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.g_idx"
    stored = load_file(file)
    save_file(stored | {name: stored[name].flip(0).contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="up_proj has its inputs in another order"):
        load_model(str(tmp_path), LoadOptions())


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
        ({**GPTQ, "desc_act": True}, "by gptq with act-order (desc_act), which is not supported"),
        ({**GPTQ, "bits": 8}, "by gptq with 8 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "the checkpoint format marlin"),
        ({**AWQ, "version": "GEMV"}, "by awq with the layout gemv"),
        ({**AWQ, "quant_method": "compressed-tensors", "format": "pack-quantized"}, "no .weight_packed"),
        ({**COMPRESSED, "config_groups": {"g": {"weights": {"num_bits": 8}}}}, "with 8 bits"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    make(tmp_path, GPTQ, is_symmetric=True)
    edit(tmp_path, config)
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(tmp_path), LoadOptions())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
