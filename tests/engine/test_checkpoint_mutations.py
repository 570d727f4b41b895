"""Checkpoints with one thing changed: transformers' logits of the same files, or a refusal in one sentence.

Each tensor is removed, reshaped or joined by another; each field of config.json gets other values.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.families import save_random
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.families.table import FAMILIES
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.models import load, sources
from truedraft.engine.models.hf import module
from truedraft.engine.models.load import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions

VOCAB_SIZE, HIDDEN, HEAD_SIZE, INNER, WINDOW = 24, 32, 16, 40, 6
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
DEEPSEEK: dict[str, Any] = {
    "head_dim": 8,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": DEEPSEEK,
    "falcon_h1": {
        "num_hidden_layers": 1,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "attention_in_multiplier": 1.3,
        "ssm_in_multiplier": 0.8,
        "ssm_multipliers": [0.9, 1.2, 0.5, 1.4, 0.7],
        "mlp_multipliers": [0.6, 1.3],
    },
    "exaone4": {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "sliding_window": WINDOW,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    "granitemoehybrid": {
        "num_local_experts": 0,
        "shared_intermediate_size": INNER,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"sliding_window": WINDOW, "layer_types": ["conv", "sliding_attention"]},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "time_step_min": 1e-9,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo3": {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
    "phi3": {"sliding_window": WINDOW},
    "qwen3_5_text": DELTA_NET,
    "qwen3_next": DELTA_NET | QWEN_EXPERTS,
}
BOTH = ("sliding_attention", "full_attention")
ROTARY = {"rope_type": "default", "rope_theta": 1e4}
# Fields that tell of experts. Of families with experts only these and some others are changed.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OF_EXPERTS: dict[str, list[Any]] = {
    "num_local_experts": [2, 5],
    "n_routed_experts": [2, 5],
    "num_experts_per_tok": [1, 4, 5],
    "moe_intermediate_size": [16],
    "n_shared_experts": [2],
    "norm_topk_prob": [True, False],
    "routed_scaling_factor": [2.5],
    "n_group": [2],
    "topk_group": [2],
    "first_k_dense_replace": [0, 2],
    "swiglu_alpha": [1.0],
    "swiglu_limit": [1.0],
    "intermediate_size": [INNER // 2],
    "attention_bias": [True, False],
    "sliding_window": [3, None],
    "hidden_act": ["relu"],
    "hidden_activation": ["silu", "relu"],
    "final_logit_softcapping": [0.5],
    "vocab_size_per_layer_input": [VOCAB_SIZE - 2, VOCAB_SIZE + 2],
    "hidden_size_per_layer_input": [0, 4],
    "num_kv_shared_layers": [0, 1],
    "attention_k_eq_v": [True],
    "enable_moe_block": [True],
    "use_double_wide_mlp": [True],
    "use_bidirectional_attention": ["vision", "all"],
    "kv_lora_rank": [4],
    "q_lora_rank": [None, 8],
    "qk_rope_head_dim": [4],
    "qk_nope_head_dim": [4],
    "v_head_dim": [8, 24],
    "rope_interleave": [False],
    "rope_parameters": [
        ROTARY | {"rope_type": "linear", "factor": 4.0},
        ROTARY | YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        ROTARY | YARN,
    ],
}
# Values of each field that a family's config may have.
VALUES: dict[str, list[Any]] = {
    "vocab_size": [VOCAB_SIZE + 2, VOCAB_SIZE - 2],
    "hidden_size": [64],
    "intermediate_size": [INNER // 2],
    "num_hidden_layers": [1, 3],
    "num_attention_heads": [4],
    "num_key_value_heads": [2],
    "head_dim": [8],
    "hidden_act": ["relu", "no_such_thing"],
    "hidden_activation": ["silu"],
    "max_position_embeddings": [32, -1],
    "rms_norm_eps": [0.5],
    "pad_token_id": [VOCAB_SIZE, -1],
    "bos_token_id": [VOCAB_SIZE],
    "eos_token_id": [VOCAB_SIZE, [2, -1], "2"],
    "tie_word_embeddings": [True],
    "rope_parameters": [
        ROTARY | {"rope_theta": 100.0},
        ROTARY | {"rope_type": "linear", "factor": 4.0},
        ROTARY | YARN,
        ROTARY | {"partial_rotary_factor": 0.5},
        ROTARY | {"rope_type": "no_such_thing"},
    ],
    "attention_bias": [True],
    "use_bias": [True],
    "attention_out_bias": [True],
    "mlp_bias": [True],
    "sliding_window": [3, None],
    "use_sliding_window": [True],
    "layer_types": [["full_attention", "sliding_attention"], ["full_attention"], ["no_such_thing"] * 2],
    "query_pre_attn_scalar": [3],
    "attn_logit_softcapping": [0.5, None],
    "final_logit_softcapping": [0.5, None],
    "use_bidirectional_attention": [True],
    "original_max_position_embeddings": [8],
    "pretraining_tp": [2],
    "attention_multiplier": [0.1],
    "embedding_multiplier": [1.0],
    "logits_scaling": [0.5],
    "logit_scale": [0.5],
    "layer_norm_eps": [0.5],
    "no_rope_layers": [[0, 1], [1, 1]],
    "residual_multiplier": [1.0],
    "norm_eps": [0.5],
    "conv_L_cache": [2],
    "conv_bias": [True],
    "block_auto_adjust_ff_dim": [False],
    "use_sandwich_norm": [False],
    "use_attention_gate": [False],
    "linear_num_key_heads": [1, 4],
    "linear_num_value_heads": [6],
    "linear_key_head_dim": [4],
    "linear_value_head_dim": [4],
    "linear_conv_kernel_dim": [3],
    "mamba_n_heads": [2],
    "mamba_n_groups": [1],
    "mamba_d_state": [16],
    "mamba_d_conv": [3],
    "mamba_expand": [1],
    "mamba_conv_bias": [False],
    "mamba_proj_bias": [True],
    "time_step_limit": [[0.5, 1.0]],
    "position_embedding_type": ["rope"],
    "num_local_experts": [2],
    "shared_intermediate_size": [INNER // 2],
    "mamba_d_ssm": [64],
    "mamba_rms_norm": [True],
    "projectors_bias": [True],
    "lm_head_multiplier": [2.0],
    "key_multiplier": [0.3],
    "attention_out_multiplier": [0.5],
    "attention_in_multiplier": [1.0],
    "ssm_in_multiplier": [1.0],
    "ssm_out_multiplier": [0.5],
    "ssm_multipliers": [[1.0, 1.0, 1.0, 2.0, 1.0], [1.0]],
    "mlp_multipliers": [[0.3, 1.0]],
    "layers_block_type": [["linear_attention", "mlp", "full_attention"], ["linear_attention"] * 3],
    "mamba_num_heads": [2],
    "mamba_head_dim": [4],
    "mamba_hidden_act": ["gelu"],
    "mlp_hidden_act": ["silu"],
    "n_groups": [1],
    "ssm_state_size": [16],
    "conv_kernel": [3],
    "use_conv_bias": [False],
    "layer_norm_epsilon": [0.5],
}
# In these families everything is changed.
WHOLE = ("cohere2", "gemma2", "llama", "phi3")
# These are read alike for every family, so others do without them.
READ_ALIKE = {"vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
READ_ALIKE |= {"max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "rms_norm_eps"}
# What other families' configs say, and this one's class does not read.
STRAY: dict[str, Any] = {
    "final_logit_softcapping": 0.5,
    "attn_logit_softcapping": 0.5,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 3,
    "mlp_bias": True,
    "attention_out_bias": True,
    "residual_multiplier": 0.5,
    "logit_scale": 3.0,
    "attention_chunk_size": 4,
    "no_rope_layers": [1, 0],
    "output_gate_type": "sigmoid",
}

Weights = dict[str, torch.Tensor]
Changed = tuple[dict[str, Any], Weights]


def config_mutations(config: dict[str, Any], weights: Weights) -> Iterator[Changed]:
    family = FAMILIES[config["model_type"]]
    is_dense = family.experts is None or config.get("num_local_experts") == 0
    values_of = VALUES if is_dense or config["model_type"] == "nemotron_h" else OF_EXPERTS
    if config["model_type"] == "nemotron_h":  # transformers does not read it
        values_of = {key: values for key, values in values_of.items() if key != "time_step_limit"}
    is_other = values_of is VALUES and config["model_type"] not in WHOLE
    left_out = READ_ALIKE if is_other or family.recurrence else ()
    for key, values in values_of.items():
        if key in config and key not in left_out:
            yield from ((config | {key: value}, weights) for value in values if config[key] != value)
    yield {key: value for key, value in STRAY.items() if key not in config} | config, weights
    yield config | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}, weights


def changed_tensors(config: dict[str, Any], weights: Weights, turn: int) -> Iterator[str]:
    """Yields those of one of several layers, and what is another's own. Outside of ``WHOLE`` every other one
    has its turn: each is removed, or reshaped."""
    names = [
        name for name in weights if not re.search(r"layers\.[1-9]", name) or "layers.2.self_attn" in name
    ]
    yield from names if config["model_type"] in WHOLE else names[turn::2]


def removed_tensors(config: dict[str, Any], weights: Weights) -> Iterator[Changed]:
    for name in changed_tensors(config, weights, 0):
        yield config, {other: tensor for other, tensor in weights.items() if other != name}
    tied = config | {"tie_word_embeddings": True}
    for name in ("lm_head.weight", _embeddings(weights)):
        yield tied, {other: tensor for other, tensor in weights.items() if other != name}


def reshaped_tensors(config: dict[str, Any], weights: Weights) -> Iterator[Changed]:
    for name in changed_tensors(config, weights, 1):
        yield config, weights | {name: weights[name][:-4].contiguous()}


def added_tensors(config: dict[str, Any], weights: Weights) -> Iterator[Changed]:
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    layer = "model.layers.0"
    added: dict[str, torch.Tensor] = {
        f"{layer}.self_attn.o_proj.bias": drawn(HIDDEN),
        f"{layer}.mlp.down_proj.bias": drawn(HIDDEN),
        f"{layer}.self_attn.q_norm.weight": drawn(HEAD_SIZE),
        f"{layer}.self_attn.sinks": drawn(2),
        f"{layer}.mlp.down_proj.weight_scale_inv": drawn(1, 1),
        "model.layers.2.input_layernorm.weight": drawn(HIDDEN),
        "lm_head.bias": drawn(VOCAB_SIZE),
        "a_tensor_of_tomorrow": drawn(2),
    }
    for name, tensor in added.items():
        if name not in weights:
            yield config, weights | {name: tensor}
    # These change nothing.
    yield config, weights | {f"{layer}.mlp.down_proj.bias": torch.zeros(HIDDEN)}
    yield config, weights | {f"{layer}.self_attn.rotary_emb.inv_freq": drawn(HEAD_SIZE // 2)}
    # The output layer is its own, and has the embeddings' values.
    tied = config | {"tie_word_embeddings": True}
    yield tied, weights
    yield tied, weights | {"lm_head.weight": weights[_embeddings(weights)].clone()}


def _embeddings(weights: Weights) -> str:
    return next(name for name in weights if name.endswith(("embed_tokens.weight", "embeddings.weight")))


MUTATIONS: dict[str, Callable[[dict[str, Any], Weights], Iterator[Changed]]] = {
    "config changed": config_mutations,
    "tensor removed": removed_tensors,
    "tensor reshaped": reshaped_tensors,
    "tensor added": added_tensors,
}


# Checkpoints served as by transformers, and refused, by kind of mutation.
COUNTS: dict[str, list[tuple[int, int]]] = {
    "cohere2": [(17, 18), (2, 11), (0, 11), (4, 8)],
    "deepseek_v3": [(11, 17), (2, 8), (0, 7), (5, 7)],
    "ernie4_5": [(8, 6), (2, 6), (0, 6), (4, 8)],
    "exaone4": [(9, 8), (2, 7), (0, 7), (4, 7)],
    "falcon_h1": [(18, 18), (1, 11), (0, 9), (4, 8)],
    "gemma": [(9, 6), (2, 6), (0, 6), (4, 8)],
    "gemma2": [(22, 17), (2, 14), (0, 14), (4, 8)],
    "gemma3_text": [(14, 8), (2, 8), (0, 8), (4, 7)],
    "gemma4_text": [(7, 17), (2, 13), (0, 13), (4, 6)],
    "glm": [(7, 5), (2, 7), (0, 7), (4, 8)],
    "glm4": [(7, 5), (2, 8), (0, 8), (4, 8)],
    "gpt_oss": [(11, 6), (2, 10), (0, 10), (4, 6)],
    "granite": [(12, 7), (2, 6), (0, 6), (4, 8)],
    "granitemoehybrid": [(14, 18), (1, 9), (0, 7), (4, 8)],
    "hunyuan_v1_dense": [(9, 6), (2, 7), (0, 7), (4, 8)],
    "lfm2": [(8, 10), (1, 7), (0, 5), (4, 8)],
    "lfm3": [(5, 17), (1, 8), (0, 6), (4, 8)],
    "llama": [(15, 16), (2, 12), (0, 12), (4, 8)],
    "mistral": [(10, 5), (2, 6), (0, 6), (4, 8)],
    "mixtral": [(9, 4), (2, 11), (0, 11), (4, 8)],
    "nemotron_h": [(6, 16), (0, 8), (0, 6), (2, 10)],
    "olmo2": [(8, 6), (2, 7), (0, 7), (4, 7)],
    "olmo3": [(10, 8), (2, 7), (0, 7), (4, 7)],
    "phi3": [(15, 16), (2, 9), (0, 9), (4, 8)],
    "qwen2": [(10, 8), (2, 8), (0, 7), (4, 8)],
    "qwen3": [(10, 9), (2, 7), (0, 7), (4, 7)],
    "qwen3_5_text": [(6, 17), (1, 10), (0, 8), (4, 8)],
    "qwen3_next": [(7, 5), (1, 16), (0, 14), (4, 8)],
    "seed_oss": [(9, 7), (2, 8), (0, 7), (4, 8)],
    "smollm3": [(12, 10), (2, 6), (0, 6), (4, 8)],
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family, made once."""
    root = tmp_path_factory.mktemp("families")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            save_random(root / family, family, SHAPE | MORE.get(family, {}))
            (root / family / "generation_config.json").unlink(missing_ok=True)
        return root / family

    return folder


def served(folder: Path) -> Any:
    """Logits, or the sentence of the refusal."""
    try:
        model = load_model(str(folder), LoadOptions(compact_weights=False))
    except ModelLoadError as error:
        return str(error)
    runner = ModelRunner.build(model, num_blocks=4, block_size=4, num_state_slots=1)
    table = BlockTable()
    table.block_ids, table.state_slot = [2, 0, 3, 1], 0
    return runner.forward([Span(table, IDS, len(IDS))]).logits


@torch.inference_mode()
def reference(folder: Path) -> Any:
    """transformers' logits; None where it fails or makes weights up."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        return None if info["missing_keys"] else model(input_ids=torch.tensor([IDS])).logits[0]
    except Exception:  # whatever a config makes it do
        return None


def outcome(folder: Path, changed: Changed) -> str:
    config, weights = changed
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ours = served(folder)
    if isinstance(ours, str):
        assert "\n" not in ours
        assert str(folder) in ours or config["model_type"] in ours
        return "refused"
    expected = reference(folder)
    if expected is None:
        return "served, though transformers fails"
    return "equal" if torch.allclose(ours, expected, atol=2e-3, rtol=1e-3) else "another text"


@pytest.mark.parametrize("kind", MUTATIONS)
@pytest.mark.parametrize("family", COUNTS)
def test_mutated_checkpoints_are_transformers_or_refused(
    family: str, kind: str, original: Callable[[str], Path], tmp_path: Path
) -> None:
    logging.disable_progress_bar()
    folder = tmp_path / "changed"
    shutil.copytree(original(family), folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    if kind == "config changed":
        assert outcome(folder, (config, weights)) == "equal"
    found: Counter[str] = Counter()
    for changed in MUTATIONS[kind](config, weights):
        result = outcome(folder, changed)
        fields = {key: value for key, value in changed[0].items() if config.get(key) != value}
        names = [
            name
            for name in weights.keys() | changed[1].keys()
            if weights.get(name) is not changed[1].get(name)
        ]
        assert result in ("equal", "refused"), (fields, names)
        found[result] += 1
    assert (found["equal"], found["refused"]) == COUNTS[family][list(MUTATIONS).index(kind)]


def test_every_family_is_tried_but_for_some_with_experts() -> None:
    """Each way in which checkpoints have experts, or latent vectors, is in the table."""
    others = [FAMILIES[name] for name in FAMILIES.keys() - COUNTS.keys()]
    assert all(family.experts or family.attention.has_latents for family in others)


def test_the_table_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for family, counts in COUNTS.items():
        cells = " | ".join(f"{equal}, {refused}" for equal, refused in counts)
        assert f"| {family} | {cells} |" in page


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_without_the_account_others_would_be_served(
    family: str, original: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(original(family), folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    for place in (sources, load, module):
        monkeypatch.setattr(place, "untie", lambda skeleton, checkpoint: None)
    monkeypatch.setattr(sources, "has_all", lambda module, checkpoint: True)
    assert outcome(folder, (config | {"tie_word_embeddings": True}, weights)) == "another text"
    # One that is too large may be noticed, by probe texts with tokens that the embeddings lack.
    assert (
        outcome(folder, (config | {"vocab_size": VOCAB_SIZE - 2}, weights))
        == "served, though transformers fails"
    )
