"""GGUF files as targets and drafts: transformers' logits, bits that depend on nothing, clear refusals."""

import math
import struct
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeSharedConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    YoutuConfig,
)

from tests import gguf_models
from tests.engine.planners import loops_in_c
from tests.gguf_models import join, save_gguf
from tests.models import make_engine, run_engine
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.families.fit import has_experts
from truedraft.engine.formats.gguf_file import ARRAY, STRING, GgufError, read_gguf
from truedraft.engine.gguf import config as gguf_config
from truedraft.engine.gguf import experts as gguf_experts
from truedraft.engine.gguf.checkpoint import open_gguf
from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.memory.batch import MAX_GROUPED_QUERIES, Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.hf.module import load_causal_model
from truedraft.engine.models.load import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.quantised import QuantisedEmbeddings, QuantisedLinear

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LONG: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 128,
        "long_factor": [1.0 + i / 8 for i in range(32)],
        "short_factor": [1.0 + i / 32 for i in range(32)],
    }
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama with biases and tied embeddings": LlamaConfig(
        **SHAPE, attention_bias=True, tie_word_embeddings=True
    ),
    "mistral with a window": MistralConfig(**SHAPE, sliding_window=6, head_dim=32),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "phi3": Phi3Config(**SHAPE, sliding_window=6),
    "phi3 with long texts": Phi3Config(**SHAPE, **LONG, original_max_position_embeddings=128),
    "phi3 that turns a part of each head": Phi3Config(
        **SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "gemma2": Gemma2Config(
        **SHAPE,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 6}, head_dim=32, query_pre_attn_scalar=32, sliding_window=6
    ),
}
MULTIPLIERS: dict[str, Any] = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
CONFIGS["granite"] = GraniteConfig(**SHAPE, **MULTIPLIERS)
# The fourth layer of these is another.
FOUR_LAYERS: dict[str, Any] = SHAPE | {"num_hidden_layers": 4}
HALF_TURNED: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
}
CONFIGS |= {
    "smollm3": SmolLM3Config(**FOUR_LAYERS),
    "olmo2": Olmo2Config(**SHAPE),
    "olmo2 with windows": Olmo3Config(**FOUR_LAYERS, sliding_window=6),
    "exaone4 with windows": Exaone4Config(**FOUR_LAYERS, sliding_window=6),
    "gemma": GemmaConfig(**SHAPE, head_dim=32),
    "hunyuan-dense": HunYuanDenseV1Config(**SHAPE, head_dim=32),
    "ernie4_5": Ernie4_5Config(**SHAPE, head_dim=32),
    "glm4": Glm4Config(**SHAPE, head_dim=32, attention_bias=True, **HALF_TURNED),
    "chatglm": GlmConfig(**SHAPE, head_dim=64, attention_bias=True, **HALF_TURNED),
    "seed_oss": SeedOssConfig(**SHAPE, head_dim=32, attention_bias=True, attention_out_bias=False),
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
CONFIGS |= {
    "llama with experts": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2moe": Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=256),
    "qwen3moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=32, norm_topk_prob=True),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2),
    "gpt-oss": GptOssConfig(
        **SHAPE,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
        sliding_window=6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "glm4moe": Glm4MoeConfig(
        **SHAPE,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        routed_scaling_factor=1.7,
        head_dim=32,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "granitemoe": GraniteMoeSharedConfig(
        **SHAPE, **MULTIPLIERS, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=256
    ),
}
LATENT: dict[str, Any] = SHAPE | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "routed_scaling_factor": 1.7,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 256,
    "v_head_dim": 128,
}
LATENT_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
CONFIGS |= {
    "deepseek2, V2": DeepseekV2Config(
        **LATENT | {"q_lora_rank": None},
        first_k_dense_replace=1,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        rope_parameters=LATENT_YARN,
    ),
    "deepseek2, V3": DeepseekV3Config(**LATENT, first_k_dense_replace=1, n_group=2, topk_group=1),
    "deepseek2, GLM": Glm4MoeLiteConfig(**LATENT),
    "deepseek2, Youtu": YoutuConfig(
        **{
            name: value
            for name, value in LATENT.items()
            if not any(word in name for word in ("expert", "moe", "routed"))
        }
    ),
}
IDS = torch.randint(0, 96, (70,), generator=torch.Generator().manual_seed(1)).tolist()
NUM_TOKENS = 40


def load(path: Path, compact: bool = True) -> FusedDecoder:
    model = load_model(str(path), LoadOptions(compact_weights=compact))
    assert isinstance(model, FusedDecoder)
    return model


def logits_in(model: Model, sizes: list[int]) -> torch.Tensor:
    runner = ModelRunner.build(model, num_blocks=20, block_size=4)
    table = BlockTable()
    table.block_ids = list(range(20))[::-1]
    found, start = [], 0
    for size in sizes:
        found.append(runner.forward([Span(table, IDS[start : start + size], size)]).logits)
        start += size
    return torch.cat(found)


@torch.inference_mode()
def expected_logits(module: Any) -> torch.Tensor:
    logits: torch.Tensor = module(input_ids=torch.tensor([IDS])).logits[0]
    return logits


Saved = Callable[[str], tuple[Path, torch.Tensor]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Returns the file of a config, which is written once, and transformers' logits."""
    folder = tmp_path_factory.mktemp("saved")

    @cache
    def save(name: str) -> tuple[Path, torch.Tensor]:
        path = folder / f"{name}.gguf"
        return path, expected_logits(save_gguf(path, CONFIGS[name]))

    return save


@pytest.mark.parametrize("name", CONFIGS)
def test_dequantised_files_are_the_model_they_were_made_from(name: str, saved: Saved) -> None:
    path, expected = saved(name)
    model = load(path, compact=False)
    assert not isinstance(model.weights.head, QuantisedLinear)
    assert torch.allclose(logits_in(model, [len(IDS)]), expected, atol=2e-4, rtol=1e-4)
    reference = load_causal_model(str(path), LoadOptions(), "eager")
    assert torch.allclose(expected_logits(reference), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_layers_deviate_by_the_rounding_of_their_inputs(name: str, saved: Saved) -> None:
    path, expected = saved(name)
    model = load(path)
    weights = model.weights
    assert isinstance(weights.embeddings, QuantisedEmbeddings)
    mixers = [layer.mixer for layer in weights.layers]
    assert all(isinstance(linear, QuantisedLinear) for mixer in mixers for linear in mixer.linears)
    assert isinstance(ModelRunner.build(model, 20, 4).fast_pass, NativeDecoder)
    deviations = (logits_in(model, [len(IDS)]) - expected).square().mean(-1)
    # A token that rounding gives other experts has other logits altogether, which later ones look back at.
    is_mixed = has_experts(CONFIGS[name])
    deviation = (deviations.median() if is_mixed else deviations.mean()).sqrt() / expected.std()
    assert 0 < deviation < (0.1 if is_mixed else 0.05)


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize(
    ("name", "kind"), [("llama", kind) for kind in TYPES] + [(name, "Q5_1") for name in list(CONFIGS)[1:]]
)
def test_bits_do_not_depend_on_how_a_text_is_cut(name: str, kind: str, tmp_path: Path) -> None:
    """Not even in prompts that are longer than what is attended at once."""
    path = tmp_path / "model.gguf"
    save_gguf(path, CONFIGS[name], kind, value_kind="Q6_K")
    model = load(path)
    alone = logits_in(model, [1] * len(IDS))
    assert len(IDS) > 2 * MAX_GROUPED_QUERIES
    for sizes in ([len(IDS)], [5] * 14, [50, 1, 12, 7]):
        assert torch.equal(logits_in(model, sizes), alone)


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("seconds", [0, 0.05], ids=["a round a step", "rounds in C"])
def test_speculation_changes_no_token(seconds: float, tmp_path: Path) -> None:
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    save_gguf(target, CONFIGS["qwen3"], "Q8_0")
    save_gguf(draft, CONFIGS["qwen3"], "Q4_0")  # the same weights in fewer bits
    prompts = [IDS[:length] for length in (1, 9, 41)]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    settings = {"dtype": "auto", "step_seconds": seconds}
    plain = make_engine(str(target), None, **settings)
    alone = [run_engine(plain, [prompt], params)[0] for prompt in prompts]
    pair = make_engine(str(target), str(draft), **settings)
    assert loops_in_c(pair)
    assert run_engine(pair, prompts, params) == alone
    assert pair.stats.num_accepted_tokens > pair.stats.num_draft_tokens / 5


def test_phi3_serves_the_texts_for_which_its_frequencies_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(path, CONFIGS["phi3 with long texts"])
    assert load(path).max_position == 128


@pytest.mark.parametrize("name", ["llama", "exaone4 with windows"])
def test_rotary_frequencies_are_divided(name: str, tmp_path: Path) -> None:
    path, factors = tmp_path / "model.gguf", np.linspace(1, 8, 32, dtype=np.float32)
    module = save_gguf(path, CONFIGS[name], rope_freqs=factors)
    without = expected_logits(module)
    module.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    expected = expected_logits(module)
    assert not torch.allclose(without, expected, atol=1e-2)
    assert torch.allclose(logits_in(load(path, compact=False), [len(IDS)]), expected, atol=2e-4, rtol=1e-4)
    reference = load_causal_model(str(path), LoadOptions(), "eager")
    assert torch.allclose(expected_logits(reference), expected, atol=2e-4, rtol=1e-4)


def test_positions_are_scaled_in_layers_without_windows(tmp_path: Path) -> None:
    """OLMo 3 is the only one with both."""
    path, config = tmp_path / "model.gguf", deepcopy(CONFIGS["olmo2 with windows"])
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
    config.rope_parameters["full_attention"] = yarn
    more = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    # Converters write the whole factor, which llama.cpp knows.
    more["yarn_attn_factor"] = 1 + 0.1 * math.log(4)
    module = save_gguf(path, config, **{f"olmo2.rope.scaling.{key}": value for key, value in more.items()})
    found = logits_in(load(path, compact=False), [len(IDS)])
    assert torch.allclose(found, expected_logits(module), atol=2e-4, rtol=1e-4)
    more["yarn_attn_factor"] = 1.3
    save_gguf(path, config, **{f"olmo2.rope.scaling.{key}": value for key, value in more.items()})
    assert "has olmo2.rope.scaling.yarn_attn_factor = 1.3; only 1 or 1.13863 is served" in refusal(path)


def test_windows_of_exaone_that_files_do_not_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The large model has them; in models of other sizes all layers see all, and turn."""
    path, config = tmp_path / "model.gguf", CONFIGS["exaone4 with windows"]
    monkeypatch.setattr(gguf_models, "WITH_WINDOWS", ())
    module = save_gguf(path, config)
    windowed = expected_logits(module)
    found = logits_in(load(path, compact=False), [len(IDS)])
    assert not torch.allclose(found, windowed, atol=1e-2)
    monkeypatch.setattr(gguf_config, "EXAONE_LAYERS", config.num_hidden_layers)
    monkeypatch.setattr(gguf_config, "EXAONE_WINDOW", 6)
    found = logits_in(load(path, compact=False), [len(IDS)])
    assert torch.allclose(found, windowed, atol=2e-4, rtol=1e-4)


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3moe", "seed_oss"])
def test_joined_matrices_are_those_they_are_made_of(name: str, saved: Saved, tmp_path: Path) -> None:
    """Queries, keys and values in one tensor, gates of experts with what they gate: blocks stay blocks."""
    source, path = saved(name)[0], tmp_path / "joined.gguf"
    join(source, path)
    apart, joined = read_gguf(str(source)).tensors, read_gguf(str(path)).tensors
    assert "blk.1.attn_qkv.weight" in joined
    assert ("blk.1.ffn_gate_up_exps.weight" in joined) == ("blk.1.ffn_up_exps.weight" in apart)
    assert not any(part in stored for stored in joined for part in (".attn_q.", ".attn_v.", "_up_exps.b"))
    model = load(path)
    assert all(isinstance(each, QuantisedLinear) for each in model.weights.layers[1].mixer.linears)
    assert torch.equal(logits_in(model, [len(IDS)]), logits_in(load(source), [len(IDS)]))


def test_latent_vectors_in_files_of_before(tmp_path: Path) -> None:
    """What makes keys and values was one tensor."""
    path = tmp_path / "model.gguf"
    expected = expected_logits(save_gguf(path, CONFIGS["deepseek2, V2"], is_split=False))
    assert "blk.0.attn_kv_b.weight" in read_gguf(str(path)).tensors
    assert torch.allclose(logits_in(load(path, compact=False), [len(IDS)]), expected, atol=2e-4, rtol=1e-4)


def test_experts_of_latent_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that does not say how they are scored means softmax, but in one model."""
    path = tmp_path / "model.gguf"
    unsaid = {"deepseek2.expert_gating_func": 0}
    expected = expected_logits(save_gguf(path, CONFIGS["deepseek2, V2"], **unsaid))
    assert torch.allclose(logits_in(load(path, compact=False), [len(IDS)]), expected, atol=2e-4, rtol=1e-4)
    expected = expected_logits(save_gguf(path, CONFIGS["deepseek2, GLM"], **unsaid))
    assert "renormalises weights of experts that softmax scores" in refusal(path)
    monkeypatch.setattr(gguf_experts, "GLM_LAYERS", (2, 3))
    monkeypatch.setattr(gguf_experts, "GLM_TOKENS", 96)
    assert torch.allclose(logits_in(load(path, compact=False), [len(IDS)]), expected, atol=2e-4, rtol=1e-4)
    save_gguf(path, CONFIGS["deepseek2, GLM"], **{"deepseek2.attention.kv_lora_rank": 128})
    assert "which are no latent vectors of 128 and 32 numbers that are turned" in refusal(path)
    save_gguf(path, CONFIGS["deepseek2, V2"], **{"deepseek2.expert_weights_norm": True})
    assert "renormalises weights of experts that softmax scores" in refusal(path)
    unknown = {"deepseek2.rope.scaling.type": "yarn", "deepseek2.rope.scaling.factor": 2.0}
    save_gguf(path, CONFIGS["deepseek2, GLM"], **unknown)
    assert "scales its positions by yarn without deepseek2.rope.scaling.yarn_log_multiplier" in refusal(path)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    path, ones = tmp_path / "model.gguf", np.ones(256, dtype=np.float32)
    further = {"nextn.enorm.weight": ones, "attn_norm.weight": ones}
    module = save_gguf(path, CONFIGS["glm4moe"], further=further, **{"glm4moe.nextn_predict_layers": 1})
    found = logits_in(load(path, compact=False), [len(IDS)])
    assert torch.allclose(found, expected_logits(module), atol=2e-4, rtol=1e-4)
    save_gguf(path, CONFIGS["glm4moe"], further=further)
    assert "lacks weights of the model" in refusal(path)


def test_defaults_of_requests_and_ends_of_turns(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tokens = [f"t{i}" for i in range(96)]
    tokens[7] = "<|im_end|>"
    kinds = [1] * 96  # whatever type it has
    more: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    more |= {"tokenizer.ggml.token_type": kinds}
    more |= {"tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eot_token_id": 5}
    more |= {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    save_gguf(path, CONFIGS["llama"], **more)
    model = load(path)
    assert model.eos_token_ids == {4, 5, 7}
    assert (model.generation_config.temperature, model.generation_config.top_k) == (0.5, 20)


def test_vocabularies_of_another_size_than_the_embeddings(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for count in (95, 97):
        tokens = [f"t{i}" for i in range(count)]
        save_gguf(path, CONFIGS["llama"], **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens})
        assert f"has {count} tokens in its vocabulary, but 96 rows of embeddings" in refusal(path)


def test_files_that_are_no_whole_models(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(path, CONFIGS["llama"], **{"general.type": "adapter"})
    assert "is of the type adapter, not a whole model" in refusal(path)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    save_gguf(path, CONFIGS["llama"])
    return path.read_bytes()


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_are_cut_off(intact: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for length in (0, 3, 4, 20, 100, 700, 2000, len(intact) // 2, len(intact) - 4096):
        path.write_bytes(intact[:length])
        message = refusal(path)
        assert any(words in message for words in ("cut off", "is empty", "does not begin")), message


def test_damaged_headers_are_refused_or_read(intact: bytes, tmp_path: Path) -> None:
    """Nothing but ``GgufError`` comes out of reading, whatever 4 bytes say."""
    path, header = tmp_path / "model.gguf", 3000
    draws = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        at, value = int(draws.integers(0, header)), draws.integers(0, 256, 4, dtype=np.uint8).tobytes()
        path.write_bytes(intact[:at] + value + intact[at + 4 : header] + intact[header:])
        try:
            read_gguf(str(path))
        except GgufError:
            refused += 1
    assert 30 < refused < 300


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ((STRING, 1 << 33), "does not end where it should"),
        ((ARRAY, STRING, 1 << 33), "does not end where it should"),
        ((ARRAY, 0, 1 << 33), "does not end where it should"),
        ((ARRAY, ARRAY, 1), "lists of lists"),
    ],
)
def test_headers_that_would_take_all_memory(tmp_path: Path, value: tuple[int, ...], said: str) -> None:
    """What is asked for is in the file, whose end takes no place on the disk."""
    path, (*kinds, count) = tmp_path / "model.gguf", value
    name = struct.pack("<Q1s", 1, b"x")
    kind_and_count = struct.pack(f"<{len(kinds)}IQ", *kinds, count)
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + name + kind_and_count)
        file.truncate(1 << 34)
    with pytest.raises(GgufError, match=said):
        read_gguf(str(path))


def test_more_tensors_than_models_have(intact: bytes, tmp_path: Path) -> None:
    path, header = tmp_path / "model.gguf", struct.pack("<IQ", 3, 1 << 18)
    path.write_bytes(intact[:4] + header + intact[16:24] + intact[24:])
    with pytest.raises(GgufError, match="does not end where it should"):
        read_gguf(str(path))


def test_damaged_models_are_refused_or_served(intact: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    draws = np.random.default_rng(2)
    for _ in range(30):
        at = int(draws.integers(0, 2200))
        path.write_bytes(intact[:at] + b"\xff" + intact[at + 1 :])
        with suppress(ModelLoadError):
            load(path)


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(path, CONFIGS["llama"])
    content = path.read_bytes()
    path.write_bytes(content.replace(b"llama", b"mamba"))
    assert "has the architecture mamba; of GGUF files llama, seed_oss, smollm3, qwen2" in refusal(path)
    save_gguf(path, CONFIGS["llama"], **{"llama.rope.scaling.type": "su"})
    assert "scales its positions by su" in refusal(path)
    name = b"blk.0.attn_v.weight"
    at = content.index(name) + len(name) + 4 + 16
    refused = {number: f"has weights of type {kind}" for number, kind in ((16, "IQ2_XXS"), (21, "IQ3_S"))}
    refused |= {40: "has weights of type NVFP4", 77: "of the unknown type 77"}
    for number in [*TYPES.values(), *refused]:  # blocks of 8 bits have enough bytes for any of them
        path.write_bytes(content[:at] + number.to_bytes(4, "little") + content[at + 4 :])
        if number in refused:
            assert refused[number] in refusal(path)
        else:
            open_gguf(str(path))
    path.write_bytes(content)
    load(path)
    path.write_bytes(content.replace(b"blk.1.attn_k.weight", b"blk.9.attn_k.weight"))
    assert "lacks weights of the model: model.layers.1.self_attn.k_proj.weight" in refusal(path)


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize(("quantize", "kind"), [("int8", "Q8_0"), ("int4", "Q4_0")])
def test_checkpoints_quantised_at_load_are_the_file_of_that_type(
    quantize: str, kind: str, tmp_path: Path
) -> None:
    config = LlamaConfig(**SHAPE, tie_word_embeddings=True)
    path, folder = tmp_path / "model.gguf", tmp_path / "folder"
    torch.manual_seed(3)
    save_gguf(path, config, kind)  # draws the same weights
    torch.manual_seed(3)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    module.save_pretrained(folder)
    model = load_model(str(folder), LoadOptions(quantize=quantize))
    assert isinstance(model, FusedDecoder)
    assert model.is_quantised
    assert torch.equal(logits_in(model, [len(IDS)]), logits_in(load(path), [len(IDS)]))


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    path, folder = tmp_path / "model.gguf", tmp_path / "folder"
    save_gguf(path, CONFIGS["llama"]).save_pretrained(folder)
    for place in (path, folder):
        for settings in ({"compact_weights": False}, {"native_kernels": False}):
            with pytest.raises(ModelLoadError, match="cannot be quantised"):
                load_model(str(place), LoadOptions(quantize="int8", **settings))
    with pytest.raises(ModelLoadError, match="needs a model of a fused family .*, in float32 .* on a CPU"):
        load_model(str(folder), LoadOptions(torch.float16, quantize="int8"))
