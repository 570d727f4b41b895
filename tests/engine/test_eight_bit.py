"""Checkpoints of 8-bit weights and scales are made here by the formats' definitions; others are refused."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Dots1Config,
    GptOssConfig,
    OlmoConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from tests.engine.test_packed_table import InMemory
from tests.models import make_engine, run_engine
from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.checkpoints.eight_bit import PRECISION, EightBitCheckpoint
from truedraft.engine.checkpoints.mxfp4 import Mxfp4Checkpoint
from truedraft.engine.checkpoints.quantization import DEQUANTISED, open_quantised
from truedraft.engine.config import EngineConfig
from truedraft.engine.errors import ModelLoadError, QuantizationError
from truedraft.engine.families.linear import MIN_NATIVE_WEIGHTS, LinearModule
from truedraft.engine.layers.mlp import Experts
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.hf.module import load_causal_model
from truedraft.engine.models.load import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions, load_options
from truedraft.engine.native.linear import NativeLinear
from truedraft.engine.native.scaled_bytes import BytesLinear

VOCAB_SIZE = 48
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
Spread = Callable[[torch.Tensor, tuple[int, int]], torch.Tensor]


class Format(NamedTuple):
    """``shape`` of the scales of a weight of [rows, inputs]; ``block``: the rows and inputs of one."""

    config: dict[str, Any]
    block: Callable[[int, int], tuple[int, int]]
    shape: Callable[[int, int], tuple[int, ...]]
    name: str = "weight_scale"
    stored: torch.dtype = torch.float8_e4m3fn
    scales: torch.dtype = torch.float32
    beside: tuple[str, ...] = ()  # scales of what is not a weight


def compressed(strategy: str, kind: str = "float", **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, **weights},
                "input_activations": {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True},
            }
        },
    }


def fp8(*block: int) -> dict[str, Any]:
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return config | ({"weight_block_size": list(block)} if block else {})


def blocks_of(height: int, width: int) -> dict[str, Any]:
    return {
        "block": lambda rows, inputs: (height, width),
        "shape": lambda rows, inputs: (-(-rows // height), -(-inputs // width)),
    }


BY_TENSOR: dict[str, Any] = {"block": lambda rows, inputs: (rows, inputs), "shape": lambda rows, inputs: ()}
BY_ROW: dict[str, Any] = {"block": lambda rows, inputs: (1, inputs), "shape": lambda rows, inputs: (rows, 1)}
OF_ONE: dict[str, Any] = BY_TENSOR | {"shape": lambda rows, inputs: (1,)}
FORMATS = {
    "fp8, blocks": Format(fp8(16, 16), **blocks_of(16, 16), name="weight_scale_inv"),
    "fp8, blocks that are cut off": Format(fp8(40, 28), **blocks_of(40, 28), name="weight_scale_inv"),
    "fp8, one block of the usual size": Format(fp8(), **blocks_of(128, 128), name="weight_scale_inv"),
    "fp8, bfloat16 scales": Format(
        fp8(32, 16), **blocks_of(32, 16), name="weight_scale_inv", scales=torch.bfloat16
    ),
    "fp8, powers of two": Format(
        {**fp8(32, 32), "scale_fmt": "ue8m0"}, **blocks_of(32, 32), name="scale", scales=torch.float8_e8m0fnu
    ),
    "fp8, a scale of the tensor": Format(
        {**fp8(), "activation_scheme": "static"}, **BY_TENSOR, beside=("input_scale",)
    ),
    "mxfp8": Format(
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        **blocks_of(1, 32),
        name="weight_scale_inv",
        scales=torch.uint8,
    ),
    "e5m2": Format(fp8(16, 16), **blocks_of(16, 16), name="weight_scale_inv", stored=torch.float8_e5m2),
    "fbgemm": Format({"quant_method": "fbgemm_fp8"}, **BY_ROW),
    "compressed-tensors, rows": Format(compressed("channel"), **BY_ROW, scales=torch.bfloat16),
    "compressed-tensors, tensor": Format(compressed("tensor"), **OF_ONE, beside=("input_scale",)),
    "compressed-tensors, groups": Format(compressed("group", group_size=16), **blocks_of(1, 16)),
    "compressed-tensors, blocks": Format(compressed("block", block_structure=[32, 16]), **blocks_of(32, 16)),
    "compressed-tensors, int8": Format(compressed("channel", "int"), **BY_ROW, stored=torch.int8),
}

# There are no kernels for bytes of this format.
NOT_IN_BYTES = "e5m2"


def quantised(weight: torch.Tensor, of: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """8 bits, scales as they are stored, and the weights that both stand for; block by block."""
    rows, inputs = weight.shape
    height, width = of.block(rows, inputs)
    largest = 127.0 if of.stored == torch.int8 else torch.finfo(of.stored).max
    stored = torch.empty(weight.shape, dtype=of.stored)
    exact = torch.empty(weight.shape)
    scales = torch.empty(-(-rows // height), -(-inputs // width))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scale = weight[place].abs().max() / largest
            if of.scales in (torch.uint8, torch.float8_e8m0fnu):
                scale = 2.0 ** torch.ceil(torch.log2(scale))
            elif of.scales == torch.bfloat16:
                scale = (scale * 1.01).bfloat16().float()
            numbers = weight[place] / scale
            numbers = numbers.round() if of.stored == torch.int8 else numbers
            stored[place] = numbers.to(of.stored)
            exact[place] = stored[place].float() * scale
            scales[i, j] = scale
    scales = scales.reshape(of.shape(rows, inputs))
    as_stored = (
        (torch.log2(scales) + 127).to(torch.uint8) if of.scales == torch.uint8 else scales.to(of.scales)
    )
    return stored, as_stored, exact


def make(folder: Path, of: Format, config: Any = None) -> Any:
    """Writes the checkpoint; returns transformers' module with its weights in float32."""
    torch.manual_seed(1)
    module = AutoModelForCausalLM.from_config(config or Qwen3Config(**SIZES), dtype=torch.bfloat16)
    module.save_pretrained(folder)
    module = module.float()
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        base = name.removesuffix(".weight")
        stored, scales, exact = quantised(tensors[name].float(), of)
        tensors |= {name: stored, f"{base}.{of.name}": scales}
        tensors |= {f"{base}.{each}": torch.tensor(0.5) for each in of.beside}
        if ".experts." not in name:
            module.get_submodule(base).weight.data = exact
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, of.config)
    return module.eval().requires_grad_(False)


def edit(folder: Path, quantization: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": quantization}))


@torch.inference_mode()
def logits_of(module: Any) -> torch.Tensor:
    logits: torch.Tensor = module(input_ids=torch.tensor([IDS])).logits[0]
    return logits


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    """Compares to the bit; what cannot be kept in bytes is rounded to the bits that float16 always holds."""
    module = make(tmp_path, FORMATS[name])
    source = Checkpoint.find(str(tmp_path), allow_pickle=False)
    assert source is not None
    for compact in (False, True):
        checkpoint = open_quantised(source, FORMATS[name].config, compact)
        assert isinstance(checkpoint, EightBitCheckpoint)
        for weight_name, weight in module.named_parameters():
            read = checkpoint.read([weight_name])[weight_name].float()
            difference = (read - weight).abs()
            if compact and "_proj" in weight_name and name == NOT_IN_BYTES:
                assert (difference <= weight.abs() * 2.0**-PRECISION).all()
            else:
                assert not difference.any()
    exact = LoadOptions(compact_weights=False)
    assert checkpoint.files.keys() - checkpoint.parts == {name for name, _ in module.named_parameters()}, (
        "all tensors but the scales are weights"
    )
    served = FreshModel(str(tmp_path), exact)
    torch.testing.assert_close(served.logits(IDS, VOCAB_SIZE), logits_of(module), rtol=0, atol=1e-4)
    loaded = load_causal_model(str(tmp_path), exact, "sdpa")
    torch.testing.assert_close(logits_of(loaded), logits_of(module), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("name", FORMATS)
def test_layers_keep_eight_bits_and_speculation_changes_no_token(name: str, tmp_path: Path) -> None:
    module = make(tmp_path, FORMATS[name])
    model = load_model(str(tmp_path), LoadOptions(cache_dtype="float32"))
    assert isinstance(model, FusedDecoder)
    expected = logits_of(module)
    head, *others = model.weights.linears
    assert isinstance(head, NativeLinear)
    assert head.dtype == torch.float16
    if name == NOT_IN_BYTES:
        assert {each.dtype for each in others if isinstance(each, NativeLinear)} == {torch.float16}
    else:
        assert {each.dtype for each in others if isinstance(each, BytesLinear)} == {FORMATS[name].stored}
        runner = ModelRunner.build(model, 4, 4)
        table = BlockTable()
        table.block_ids = [2, 0]
        logits = runner.forward([Span(table, IDS, len(IDS))]).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    logits = FreshModel(str(tmp_path), LoadOptions()).logits(IDS, VOCAB_SIZE)
    assert (logits - expected).abs().max() < 5e-3 * expected.abs().max()
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    plain = run_engine(make_engine(str(tmp_path), None, dtype="auto"), [IDS], params)
    assert run_engine(make_engine(str(tmp_path), "self:int4", dtype="auto"), [IDS], params) == plain


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("name", ["fp8, blocks", "compressed-tensors, rows"])
def test_float32_by_name_is_float32_in_caches_too(name: str, tmp_path: Path) -> None:
    """Weights in bytes are exact in any case, so that caches alone would round."""
    module = make(tmp_path, FORMATS[name])
    model = load_model(str(tmp_path), load_options(EngineConfig(target=str(tmp_path), dtype="float32")))
    assert model.cache_dtype == torch.float32
    exact = FreshModel(str(tmp_path), load_options(EngineConfig(target=str(tmp_path), dtype="float32")))
    torch.testing.assert_close(exact.logits(IDS, VOCAB_SIZE), logits_of(module), rtol=0, atol=1e-4)
    said = EngineConfig(target=str(tmp_path), dtype="float32", cache_dtype="float16")
    assert load_model(str(tmp_path), load_options(said)).cache_dtype == torch.float16


@pytest.mark.parametrize("name", ["fp8, blocks", "fp8, bfloat16 scales"])
def test_transformers_reads_the_same_weights(name: str, tmp_path: Path) -> None:
    make(tmp_path, FORMATS[name])
    edit(tmp_path, FORMATS[name].config | {"dequantize": True})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).float()
    source = Checkpoint.find(str(tmp_path), allow_pickle=False)
    assert source is not None
    checkpoint = open_quantised(source, FORMATS[name].config, compact_weights=False)
    assert checkpoint is not None
    for weight_name, weight in theirs.named_parameters():
        assert torch.equal(checkpoint.read([weight_name])[weight_name].float(), weight)


@pytest.mark.usefixtures("needs_compiler")
def test_experts_in_four_bits_are_dequantised_at_load(tmp_path: Path) -> None:
    config = GptOssConfig(**SIZES | {"intermediate_size": 64}, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, rows = tensors.pop(name).shape
        groups = experts, rows, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, groups, dtype=torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    kept = ["self_attn", "mlp.router", "embed_tokens", "lm_head"]
    edit(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).float().eval()
    options = LoadOptions(cache_dtype="float32")
    logits = FreshModel(str(tmp_path), options).logits(IDS, VOCAB_SIZE)
    torch.testing.assert_close(logits, logits_of(theirs), rtol=0, atol=1e-4)
    model = load_model(str(tmp_path), options)
    assert isinstance(model, FusedDecoder)
    experts = model.weights.layers[1].mlp
    assert isinstance(experts, Experts)
    assert all(getattr(each.down, "dtype", None) == torch.float16 for each in experts.experts)
    parameter = theirs.model.layers[1].mlp.experts.down_proj
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    expected = x @ parameter[2] + theirs.model.layers[1].mlp.experts.down_proj_bias[2]
    torch.testing.assert_close(experts.experts[2].down(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("needs_compiler")
def test_experts_of_a_family_of_ours_are_kept_in_8_bits(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    make(tmp_path, FORMATS["fp8, blocks"], config)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).float().eval()
    model = load_model(str(tmp_path), LoadOptions())
    assert isinstance(model, FusedDecoder)
    experts = [part for layer in model.weights.layers for part in getattr(layer.mlp, "experts", ())]
    assert len(experts) == 8
    kept = [linear for part in experts for linear in part.linears]
    assert all(isinstance(linear, BytesLinear) for linear in kept)
    expected = logits_of(theirs)
    logits = FreshModel(str(tmp_path), LoadOptions()).logits(IDS, VOCAB_SIZE)
    assert (logits - expected).abs().max() < 5e-3 * expected.abs().max()


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize(
    "config",
    [
        OlmoConfig(**SIZES),
        Dots1Config(
            **SIZES,
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        ),
    ],
    ids=["olmo", "dots1"],
)
def test_other_families_are_dequantised_by_transformers(
    config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their linear layers have 16 bits, too; experts in one tensor do not, and the log says so."""
    make(tmp_path, FORMATS["fp8, blocks"], config)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).float().eval()
    with caplog.at_level(logging.WARNING):
        model: Any = load_model(str(tmp_path), LoadOptions())
    layers = [each for each in model.module.modules() if isinstance(each, LinearModule)]
    assert len(layers) >= 4
    for layer in layers:
        assert isinstance(layer.linear, NativeLinear)
        assert layer.linear.dtype == torch.float16
    small = [each.weight.numel() for each in model.module.modules() if type(each) is nn.Linear]
    assert max(small) < MIN_NATIVE_WEIGHTS
    assert ("kept in float32" in caplog.text) == (config.model_type == "dots1")
    expected = logits_of(theirs)
    logits = FreshModel(str(tmp_path), LoadOptions()).logits(IDS, VOCAB_SIZE)
    assert (logits - expected).abs().max() < 5e-3 * expected.abs().max()


def test_blocks_that_transformers_reads_otherwise_are_refused(tmp_path: Path) -> None:
    """It divides 64 rows with two scales into halves, where they are blocks of 40 and 24."""
    make(tmp_path, FORMATS["fp8, blocks that are cut off"], OlmoConfig(**SIZES))
    with pytest.raises(ModelLoadError, match="is not made of whole blocks"):
        load_model(str(tmp_path), LoadOptions())


def test_scales_of_other_weights_are_left_over(tmp_path: Path) -> None:
    make(tmp_path, FORMATS["fp8, blocks"])
    file = tmp_path / "model.safetensors"
    extra = {
        "model.layers.0.input_layernorm.weight_scale": torch.ones(1),
        "lm_head.weight_scale": torch.ones(1),
    }
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    source = Checkpoint.find(str(tmp_path), allow_pickle=False)
    assert source is not None
    checkpoint = open_quantised(source, FORMATS["fp8, blocks"].config, compact_weights=True)
    assert checkpoint is not None
    assert checkpoint.parts.isdisjoint(extra)


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    make(tmp_path, FORMATS["fp8, blocks"])
    file, base = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj"
    stored = load_file(file)
    name = f"{base}.weight_scale_inv"
    scales = stored.pop(name)
    for tensors, words in (
        ({}, f"{base}.weight has 8 bits, but not one tensor of scales"),
        ({name: scales, f"{base}.weight_scale": scales.clone()}, "but not one tensor of scales"),
        (
            {name: scales, f"{base}.weight_zero_point": scales.clone()},
            "has a tensor model.layers.1.mlp.down_proj.weight_zero_point",
        ),
        ({name: scales[:-1].clone()}, f"it is damaged: {base}.weight [64, 96] has scales [3, 6]"),
        ({name: scales.flatten()}, "has scales [24]"),
        ({name: scales[:0].clone()}, "has scales [0, 6]"),
    ):
        save_file(stored | tensors, file, metadata={"format": "pt"})
        with pytest.raises(ModelLoadError) as caught:
            load_model(str(tmp_path), LoadOptions())
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said", "words"),
    [
        ("fp8, blocks", fp8(16, 16) | {"fmt": "e5m2"}, "is stored in float8_e4m3fn, but .* says float8_e5m2"),
        ("fp8, blocks", fp8(16, 16) | {"fmt": "e3m4"}, "has the fmt e3m4"),
        ("fp8, blocks", fp8(16, 16) | {"scale_fmt": "ue8m0"}, "has other scales than powers of two"),
        ("compressed-tensors, rows", compressed("channel", "int"), "but .* says int8: one of the two is"),
    ],
)
def test_types_must_be_what_the_config_says(
    name: str, said: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make(tmp_path, FORMATS[name])
    edit(tmp_path, said)
    with pytest.raises(ModelLoadError, match=words):
        load_model(str(tmp_path), LoadOptions())


def test_what_is_said_rightly_changes_nothing(tmp_path: Path) -> None:
    """Zero points of zeros take nothing off."""
    module = make(tmp_path, FORMATS["compressed-tensors, rows"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale")}
    zeros = {name.replace("_scale", "_zero_point"): torch.zeros_like(scale) for name, scale in scales.items()}
    save_file(tensors | zeros, file, metadata={"format": "pt"})
    logits = FreshModel(str(tmp_path), LoadOptions(cache_dtype="float32")).logits(IDS, VOCAB_SIZE)
    torch.testing.assert_close(logits, logits_of(module), rtol=0, atol=1e-4)
    make(tmp_path, FORMATS["fp8, blocks"])
    expected = FreshModel(str(tmp_path), LoadOptions()).logits(IDS, VOCAB_SIZE)
    edit(tmp_path, fp8(16, 16) | {"fmt": "e4m3"})
    assert torch.equal(FreshModel(str(tmp_path), LoadOptions()).logits(IDS, VOCAB_SIZE), expected)


@pytest.mark.parametrize("damage", ["scales of another shape", "scales of another type"])
def test_blocks_and_scales_of_mxfp4_must_fit(damage: str) -> None:
    shapes = {"blocks": (2, 4, 3, 16), "scales": (2, 4, 2) if "shape" in damage else (2, 4, 3)}
    tensors = {f"w_{name}": torch.zeros(shape, dtype=torch.uint8) for name, shape in shapes.items()}
    if "type" in damage:
        tensors["w_scales"] = tensors["w_scales"].float()
    with pytest.raises(QuantizationError, match=r"w has blocks \[2, 4, 3, 16\] of torch.uint8 and scales"):
        Mxfp4Checkpoint(InMemory(tensors)).read(["w"])


# transformers loads these on a CPU without a package, or they concern no folders.
LOADED = (*DEQUANTISED, "bitnet", "gguf", "metal", "sinq", "gemma")


@pytest.mark.parametrize("method", sorted({*AUTO_QUANTIZATION_CONFIG_MAPPING, "modelopt"} - {*LOADED}))
def test_methods_that_do_not_run_here_are_refused_by_name(method: str, tmp_path: Path) -> None:
    """config.json alone decides: there is nothing to read in the file of weights."""
    make(tmp_path, FORMATS["fp8, blocks"])
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    name, _, bits = method.partition("_4bit" if method.endswith("_4bit") else "_8bit")
    config: dict[str, Any] = {"quant_method": name, "bits": 8}
    if name == "bitsandbytes":
        config = {"quant_method": name, f"load_in_{'4' if method.endswith('_4bit') else '8'}bit": True}
    edit(tmp_path, config)
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(tmp_path), LoadOptions())
    message = str(caught.value)
    assert f"it is quantised by {name}, which transformers cannot run here" in message
    assert "a GGUF file of it" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (
            compressed("channel") | {"kv_cache_scheme": {"num_bits": 8}},
            "with a quantised cache, not supported",
        ),
        (compressed("channel") | {"transform_config": {"a": 1}}, "with transformed inputs"),
        (
            compressed("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse weights (sparse-24",
        ),
        (compressed("channel") | {"config_groups": [1]}, "has another form than any that is known"),
        (fp8(0, 16), "blocks of weights are [0, 16], not two numbers"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "blocks of weights are 128, not two numbers"),
        ({"bits": 4}, "does not say its quant_method"),
        (
            compressed("channel", symmetric=False),
            "quantised by compressed-tensors, which transformers cannot run",
        ),
        (
            compressed("group", actorder="group"),
            "quantised by compressed-tensors, which transformers cannot run",
        ),
        (compressed("channel", num_bits=6), "quantised by compressed-tensors, which transformers cannot run"),
    ],
)
def test_variants_that_are_not_supported_are_named(quantization: Any, words: str, tmp_path: Path) -> None:
    make(tmp_path, FORMATS["compressed-tensors, rows"])
    edit(tmp_path, quantization)
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(tmp_path), LoadOptions())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
