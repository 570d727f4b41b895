"""The short forward, linear layers: the same logits as transformers, and a way back if they differ."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizer_bitnet import BitNetHfQuantizer
from transformers.utils.quantization_config import BitNetQuantConfig

from tests.models import make_engine
from truedraft.engine.families.linear import LinearModule, ModuleLinear, Rows, join, replace_linears
from truedraft.engine.layers import linear as layers_linear
from truedraft.engine.layers import torch_run
from truedraft.engine.layers.linear import Linears, OneDnnLinear, TorchLinears
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.native.library import load_library
from truedraft.engine.native.linear import half_scale
from truedraft.engine.native.linears import NativeLinears

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
ROPE = {"rope_theta": 10000.0}
# Random embeddings, scaled, would repeat the last token for ever if they were the head too.
GEMMA: dict[str, Any] = {**SHAPE, "head_dim": 32, "tie_word_embeddings": False}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama with biases and tied embeddings": LlamaConfig(
        **SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama, rotary of llama 3": LlamaConfig(
        **SHAPE,
        rope_parameters=ROPE
        | {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama, rotary that follows the length": LlamaConfig(
        **SHAPE, rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 2.0}
    ),
    "mistral with a window": MistralConfig(**SHAPE, sliding_window=6, head_dim=32),
    "qwen2 with windows above": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "phi3 with a window": Phi3Config(
        **SHAPE, sliding_window=6, original_max_position_embeddings=128, pad_token_id=0, eos_token_id=3
    ),
    "phi3 that turns a part of each head": Phi3Config(
        **SHAPE,
        eos_token_id=3,
        rope_parameters=ROPE | {"rope_type": "default", "partial_rotary_factor": 0.75},
        original_max_position_embeddings=128,
        pad_token_id=0,
    ),
    "smollm3, whose second layer turns nothing": SmolLM3Config(
        **SHAPE, no_rope_layers=[1, 0, 1], pad_token_id=0, eos_token_id=3
    ),
    "smollm3 with windows": SmolLM3Config(
        **SHAPE,
        no_rope_layers=[0, 1, 1],
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        pad_token_id=0,
        eos_token_id=3,
    ),
    "olmo2": Olmo2Config(**SHAPE, pad_token_id=0, eos_token_id=3),
    "olmo3": Olmo3Config(
        **SHAPE,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        attention_bias=True,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        pad_token_id=0,
        eos_token_id=3,
    ),
    "exaone4": Exaone4Config(
        **SHAPE,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "exaone4 without windows": Exaone4Config(
        **SHAPE, sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "hunyuan": HunYuanDenseV1Config(
        **SHAPE,
        head_dim=32,
        attention_bias=True,
        rope_parameters=ROPE | {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
    ),
    "ernie4.5": Ernie4_5Config(**SHAPE, head_dim=32, use_bias=True, tie_word_embeddings=False),
    "glm": GlmConfig(
        **SHAPE,
        head_dim=32,
        rope_parameters=ROPE | {"rope_type": "default", "partial_rotary_factor": 0.25},
        pad_token_id=0,
        eos_token_id=3,
    ),
    "glm4": Glm4Config(
        **SHAPE,
        head_dim=32,
        rope_parameters=ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5},
        pad_token_id=0,
        eos_token_id=3,
    ),
    "cohere2": Cohere2Config(
        **SHAPE,
        pad_token_id=0,
        logit_scale=0.4,
        sliding_window=5,
        sliding_window_pattern=2,
        attention_bias=True,
    ),
    "granite": GraniteConfig(
        **SHAPE,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.4,
        logits_scaling=2.5,
        attention_bias=True,
        mlp_bias=True,
    ),
    "gemma": GemmaConfig(**GEMMA),
    "gemma2": Gemma2Config(
        **GEMMA,
        query_pre_attn_scalar=16,
        sliding_window=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3, tied embeddings": Gemma3TextConfig(
        **{**GEMMA, "tie_word_embeddings": True},
        query_pre_attn_scalar=16,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
PARTS = (19, 1, 5, 1, 3)


def save(config: PreTrainedConfig, folder: Path) -> str:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # ones and zeros would hide a mistake
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return str(folder)


def logits_in_parts(model: Model, ids: list[int], blocks: list[int]) -> torch.Tensor:
    """All of a text's logits through the cache, a few tokens at a time."""
    runner = ModelRunner.build(model, num_blocks=16, block_size=4)
    table = BlockTable()
    table.block_ids = blocks
    parts, start = [], 0
    for size in PARTS:
        parts.append(runner.forward([Span(table, ids[start : start + size], size)]).logits)
        start += size
    return torch.cat(parts)


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return save(CONFIGS[request.param], tmp_path)


@pytest.mark.parametrize("blocks", [list(range(2, 10)), [9, 3, 4, 1, 12, 7, 0, 5]], ids=["run", "scattered"])
@pytest.mark.parametrize("native", [True, False], ids=["C", "torch"])
def test_same_logits_as_transformers(folder: str, blocks: list[int], native: bool) -> None:
    ids = torch.randint(0, 96, (sum(PARTS),), generator=torch.Generator().manual_seed(1)).tolist()
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = module(input_ids=torch.tensor([ids])).logits[0]
    model = make_engine(folder, None, native_kernels=native).target.model
    assert isinstance(model, FusedDecoder)
    torch.testing.assert_close(logits_in_parts(model, ids, blocks), expected, rtol=1e-3, atol=1e-3)


def test_hidden_states_are_transformers(folder: str) -> None:
    """They come after the tapped layers, and after the last norm, of all tokens; a whole pass in C gives the
    very bits of its parts."""
    ids = list(range(20))
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        states = module(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    outputs = []
    for native in (True, False):
        model = make_engine(folder, None, native_kernels=native).target.model
        cache = KVCache(model.caches, 8, 4)
        for fast_pass in (model.fast_pass(cache), None):
            table = BlockTable()
            table.block_ids = list(range(8))
            runner = ModelRunner(model, cache, fast_pass)
            outputs.append(runner.forward([Span(table, ids, 1)], taps=(1, 3, 0, 2)))
    for output in outputs:
        assert output.logits.shape == (1, 96)
        assert output.hidden is not None
        for number, expected in enumerate((states[2], states[3], states[1])):
            torch.testing.assert_close(output.hidden[:, number], expected[0], rtol=1e-3, atol=1e-3)
    fast, in_parts = (output.hidden for output in outputs[:2])
    assert fast is not None
    assert in_parts is not None
    assert torch.equal(fast, in_parts)
    assert isinstance(model, FusedDecoder)
    with torch.inference_mode():  # the last norm's input and output
        normed = model.weights.norm(in_parts[:, 3])
    torch.testing.assert_close(normed, in_parts[:, 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3, tied embeddings"])
def test_a_wrong_forward_is_noticed_and_not_used(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(CONFIGS[name], tmp_path)
    ids = list(range(sum(PARTS)))
    model = make_engine(path, None, dtype=dtype).target.model
    assert isinstance(model, FusedDecoder)
    right = logits_in_parts(model, ids, list(range(8)))
    monkeypatch.setattr(torch_run, "_rotate", lambda x, cos, sin: x * cos)
    model = make_engine(path, None, dtype=dtype, native_kernels=False).target.model
    assert not isinstance(model, FusedDecoder)
    if dtype == "float32":
        torch.testing.assert_close(logits_in_parts(model, ids, list(range(8))), right, rtol=1e-3, atol=1e-3)


def layer_of(dtype: torch.dtype, rows: int, columns: int, bias: bool) -> nn.Linear:
    """Weights that ``dtype`` holds, in float32."""
    torch.manual_seed(5)
    made = nn.Linear(columns, rows, bias=bias)
    made.weight.data = (torch.randn(rows, columns) * 0.02).to(dtype).float()
    return made.requires_grad_(False)


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 9, 40])
def test_packed_layers_are_float32_layers(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_linear, "MIN_PADDED_WEIGHTS", 0)
    layer = layer_of(torch.float32, 200, 300, bias=True)
    packed = join([layer], 1.0, TorchLinears())
    assert type(packed) is OneDnnLinear
    x, residual = torch.randn(rows, 300), torch.randn(rows, 200)
    exact = x.double() @ layer.weight.T.double() + layer.bias.double()
    kept = residual.clone()
    torch.testing.assert_close(packed(x).double(), exact, rtol=0, atol=3e-6)
    torch.testing.assert_close(packed.add_to(residual, x).double(), exact + residual, rtol=0, atol=5e-6)
    assert torch.equal(residual, kept)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_quantised_layers_stay_in_the_fast_forward(tmp_path: Path) -> None:
    """BitNet's are computed anywhere by transformers: weights of -1, 0 and 1, packed."""
    config = LlamaConfig(**{**SHAPE, "intermediate_size": 128})
    config.quantization_config = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    BitNetHfQuantizer(BitNetQuantConfig(modules_to_not_convert=["lm_head"])).preprocess_model(skeleton)
    torch.manual_seed(3)
    tensors = {name: random_like(name, tensor) for name, tensor in skeleton.state_dict().items()}
    config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = [(5 * i * i + i) % 96 for i in range(sum(PARTS))]
    with torch.compiler.set_stance("force_eager"), torch.inference_mode():  # to compile takes a minute
        runner = make_engine(str(tmp_path), None).target
        assert isinstance(runner.model, FusedDecoder)
        assert all(isinstance(layer.mixer.qkv, ModuleLinear) for layer in runner.model.weights.layers)
        module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        expected = module(input_ids=torch.tensor([ids])).logits[0]
        ours = logits_in_parts(runner.model, ids, list(range(8)))
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


def random_like(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.uint8:  # four weights of 0, 1 or 2 (minus one) each
        digits = torch.randint(0, 3, (4, *tensor.shape), dtype=torch.uint8)
        return digits[0] | digits[1] << 2 | digits[2] << 4 | digits[3] << 6
    values = torch.randn(tensor.shape) * 0.2
    return values.abs() + 0.5 if "norm" in name or "scale" in name else values


def linears(native: bool) -> Linears:
    library = load_library() if native else None
    return TorchLinears() if library is None else NativeLinears(library, compact=True)


class Doubled(nn.Linear):
    """Is a linear layer by name only, like a quantiser's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("multiplier", [1.0, 0.3])
@pytest.mark.parametrize("native", [True, False], ids=["C", "torch"])
@pytest.mark.parametrize("kind", [nn.Linear, Doubled])
def test_joined_layers_lie_one_after_the_other(
    kind: type[nn.Linear], native: bool, multiplier: float
) -> None:
    layers = [kind(256, rows, bias=True).requires_grad_(False) for rows in (100, 160)]
    x, residual = torch.randn(3, 256), torch.randn(3, 260)
    order = np.random.default_rng(1).permutation(160)
    separate = torch.cat([layers[0](x), layers[1](x)[:, order]], dim=-1) * multiplier
    joined = join([layers[0], Rows(layers[1], order)], multiplier, linears(native))
    assert isinstance(joined, ModuleLinear) == (kind is Doubled)
    torch.testing.assert_close(joined(x), separate, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joined.add_to(residual, x), residual + separate, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("native", [True, False], ids=["C", "torch"])
def test_layers_of_any_module_are_replaced(native: bool) -> None:
    """Layers that are more than linear are left alone."""
    projection = Conv1D(300, 200)
    module = nn.Sequential(nn.Linear(100, 200), nn.Sequential(projection, nn.Tanh()), Doubled(300, 400))
    module.requires_grad_(False)
    x = torch.randn(2, 3, 100)
    expected = module(x)
    replace_linears(module, linears(native))
    assert isinstance(module[0], LinearModule) == native or load_library() is None  # small for oneDNN
    assert isinstance(module[1][0], LinearModule)
    assert type(module[2]) is Doubled
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


def test_half_holds_bfloat16_and_half_but_not_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.engine.native.linear.CHUNK_WEIGHTS", 1000)
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) * 0.02
    assert half_scale([weight]) is None
    assert half_scale([weight.half().float()]) == half_scale([weight.half()]) == 1
    scale = half_scale([weight.bfloat16().float()])
    assert scale is not None
    assert scale > 1
    assert half_scale([weight.bfloat16(), weight.bfloat16() / 1024]) == scale
    assert half_scale([torch.full((2, 2), torch.inf)]) is None
    assert half_scale([weight.half(), torch.full((2, 64), torch.nan)]) is None


def test_one_weight_that_half_cannot_hold_is_enough_to_keep_them_all() -> None:
    weight = (torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) * 0.02).bfloat16().float()
    weight[3, 5] = 0.0123456789
    assert half_scale([weight]) is None
