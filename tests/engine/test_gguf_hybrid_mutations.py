"""GGUF files of hybrid models with one thing changed: what llama.cpp computes from them, or a refusal."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_gguf_mutations import (
    CONTEXT,
    HEAD_SIZE,
    HIDDEN,
    IDS,
    INNER,
    KEYS_OF_EXPERTS,
    OF_EXPERTS,
    VOCAB_SIZE,
    Content,
    changed_keys,
    equal_and_refused,
    logits_unless_refused,
    outcome,
    removed_tensors,
    reshaped_tensors,
)
from tests.llama_cpp_hybrids import HybridGraph

# The first layer has a state, the second one attention; Falcon-H1's only layer has both.
LAYERS, HEADS, KV_HEADS = 2, 4, 2
KEY_HEADS, VALUE_HEADS, SIZE, WIDTH = 2, 4, 8, 4
NUMBER, EXPERT = 4, 24
EXPERTS = {"expert_count": NUMBER, "expert_used_count": 2}
DELTA_NET = {
    "ssm.conv_kernel": WIDTH,
    "ssm.state_size": SIZE,
    "ssm.group_count": KEY_HEADS,
    "ssm.time_step_rank": VALUE_HEADS,
    "ssm.inner_size": VALUE_HEADS * SIZE,
    "full_attention_interval": 2,
    "rope.dimension_count": 4,
}
MAMBA = {
    "ssm.conv_kernel": WIDTH,
    "ssm.state_size": SIZE,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 2 * HIDDEN,
}
GRANITE = {
    **MAMBA,
    "rope.scaling.finetuned": False,
    "attention.scale": 0.3,
    "embedding_scale": 3.0,
    "residual_scale": 0.5,
    "logit_scale": 2.0,
    "expert_shared_feed_forward_length": INNER,
}
# Each of its layers is only one thing.
NEMOTRON = {
    "block_count": 3,
    "feed_forward_length": [0, 0, INNER],
    "attention.head_count_kv": [0, KV_HEADS, 0],
    "attention.layer_norm_epsilon": 1e-5,
    "rope.scaling.finetuned": False,
    **MAMBA,
}
OF_STATE: dict[str, dict[str, Any]] = {
    "lfm2": {"shortconv.l_cache": 3},
    "qwen35": {**DELTA_NET, "rope.dimension_sections": [1, 1, 0, 0]},
    "granitehybrid": GRANITE,
    "lfm2moe": {
        **EXPERTS,
        "shortconv.l_cache": 3,
        "expert_feed_forward_length": EXPERT,
        "expert_gating_func": 2,
        "leading_dense_block_count": 0,
    },
    "qwen3next": {
        **DELTA_NET,
        **EXPERTS,
        "expert_feed_forward_length": EXPERT,
        "expert_shared_feed_forward_length": INNER,
    },
    "falcon-h1": {"block_count": 1, **MAMBA},
    "nemotron_h": NEMOTRON,
    "nemotron_h_moe": {
        **NEMOTRON,
        **EXPERTS,
        "feed_forward_length": [0, 0, EXPERT],
        "expert_feed_forward_length": EXPERT,
        "expert_shared_feed_forward_length": INNER,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_group_count": 1,
    },
    "granitehybrid with experts": {**GRANITE, **EXPERTS, "feed_forward_length": EXPERT},
}


def base(architecture: str) -> Content:
    """A file as converters write it."""
    draws, settings = np.random.default_rng(1), OF_STATE[architecture]
    architecture = architecture.removesuffix(" with experts")

    def drawn(*shape: int, mean: float = 0.0) -> Any:
        return (mean + draws.normal(0, 0.25, shape)).astype(np.float32)

    queries, keys = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    is_delta_net = architecture in ("qwen35", "qwen3next")
    doubled = 2 if is_delta_net else 1
    attention = {
        "attn_q.weight": drawn(doubled * queries, HIDDEN),
        "attn_k.weight": drawn(keys, HIDDEN),
        "attn_v.weight": drawn(keys, HIDDEN),
        "attn_output.weight": drawn(HIDDEN, queries),
    }
    if architecture not in ("granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1"):
        attention |= {f"attn_{part}_norm.weight": drawn(HEAD_SIZE, mean=1) for part in "qk"}
    norm = "post_attention_norm" if is_delta_net else "ffn_norm"
    last = "token_embd_norm" if architecture.startswith("lfm2") else "output_norm"
    tensors = {"token_embd.weight": drawn(VOCAB_SIZE, HIDDEN), f"{last}.weight": drawn(HIDDEN, mean=1)}
    if architecture.startswith("nemotron_h"):
        mlp = _experts if architecture == "nemotron_h_moe" else _squared
        parts = _recurrence(architecture, drawn), attention, mlp(architecture, drawn)
        for layer, part in enumerate(parts):
            part["attn_norm.weight"] = drawn(HIDDEN, mean=1)
            tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in part.items()}
        return Content(architecture, _sizes(architecture) | settings, tensors)
    mixers = [_recurrence(architecture, drawn), attention]
    if architecture == "falcon-h1":
        mixers = [attention | _recurrence(architecture, drawn)]
    for layer, parts in enumerate(mixers):
        of_layer = parts | {
            "attn_norm.weight": drawn(HIDDEN, mean=1),
            f"{norm}.weight": drawn(HIDDEN, mean=1),
            **(_experts(architecture, drawn) if "expert_count" in settings else _gated(drawn, "")),
        }
        if architecture == "falcon-h1":
            of_layer["ffn_norm"] = of_layer.pop("ffn_norm.weight")
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in of_layer.items()}
    return Content(architecture, _sizes(architecture) | settings, tensors)


def _sizes(architecture: str) -> dict[str, Any]:
    is_uniform = architecture in ("qwen35", "qwen3next", "falcon-h1")
    found: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS if is_uniform else [0, KV_HEADS],
        "attention.key_length": HEAD_SIZE,
        "attention.value_length": HEAD_SIZE,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e4,
        "rope.dimension_count": HEAD_SIZE,
        "vocab_size": VOCAB_SIZE,
    }
    if architecture.startswith("nemotron_h"):
        del found["attention.layer_norm_rms_epsilon"]
        # Converters write this of models that turn nothing, whose heads may have another size.
        found["rope.dimension_count"] = HIDDEN // HEADS
    return found


def _squared(architecture: str, drawn: Callable[..., Any], end: str = "") -> dict[str, Any]:
    return {
        f"ffn_up{end}.weight": drawn(INNER, HIDDEN),
        f"ffn_down{end}.weight": drawn(HIDDEN, INNER),
    }


def _gated(drawn: Callable[..., Any], end: str) -> dict[str, Any]:
    return {
        f"ffn_gate{end}.weight": drawn(INNER, HIDDEN),
        f"ffn_up{end}.weight": drawn(INNER, HIDDEN),
        f"ffn_down{end}.weight": drawn(HIDDEN, INNER),
    }


def _experts(architecture: str, drawn: Callable[..., Any]) -> dict[str, Any]:
    found = {
        "ffn_gate_inp.weight": drawn(NUMBER, HIDDEN),
        "ffn_gate_exps.weight": drawn(NUMBER, EXPERT, HIDDEN),
        "ffn_up_exps.weight": drawn(NUMBER, EXPERT, HIDDEN),
        "ffn_down_exps.weight": drawn(NUMBER, HIDDEN, EXPERT),
    }
    if architecture == "lfm2moe":
        return found | {"exp_probs_b.bias": drawn(NUMBER)}
    if architecture == "nemotron_h_moe":
        del found["ffn_gate_exps.weight"]
        return found | {"exp_probs_b.bias": drawn(NUMBER)} | _squared(architecture, drawn, "_shexp")
    found |= _gated(drawn, "_shexp")
    return found | ({"ffn_gate_inp_shexp.weight": drawn(HIDDEN)} if architecture == "qwen3next" else {})


def _recurrence(architecture: str, drawn: Callable[..., Any]) -> dict[str, Any]:
    if architecture.startswith("lfm2"):
        return {
            "shortconv.in_proj.weight": drawn(3 * HIDDEN, HIDDEN),
            "shortconv.conv.weight": drawn(HIDDEN, 3),
            "shortconv.out_proj.weight": drawn(HIDDEN, HIDDEN),
        }
    if architecture in ("qwen35", "qwen3next"):
        keys, values = 2 * KEY_HEADS * SIZE, VALUE_HEADS * SIZE
        names = ("ssm_beta", "ssm_alpha") if architecture == "qwen35" else ("ssm_ba",)
        return {
            **{f"{name}.weight": drawn(2 * VALUE_HEADS // len(names), HIDDEN) for name in names},
            "attn_qkv.weight": drawn(keys + values, HIDDEN),
            "attn_gate.weight": drawn(values, HIDDEN),
            "ssm_conv1d.weight": drawn(keys + values, WIDTH),
            "ssm_dt.bias": drawn(VALUE_HEADS),
            "ssm_a": -np.exp(drawn(VALUE_HEADS)),
            "ssm_norm.weight": drawn(SIZE, mean=1),
            "ssm_out.weight": drawn(HIDDEN, values),
        }
    inner, channels = 2 * HIDDEN, 2 * HIDDEN + 2 * 2 * SIZE
    return {
        "ssm_in.weight": drawn(inner + channels + 4, HIDDEN),
        "ssm_conv1d.weight": drawn(channels, WIDTH),
        "ssm_conv1d.bias": drawn(channels),
        "ssm_dt.bias": drawn(4),
        "ssm_a": -np.exp(drawn(4, 1)),
        "ssm_d": drawn(4, 1),
        "ssm_norm.weight": drawn(2, inner // 2, mean=1),
        "ssm_out.weight": drawn(HIDDEN, inner),
    }


# Other values of keys than those that the file has; None removes it.
VALUES: dict[str, list[Any]] = {
    "block_count": [1],
    "feed_forward_length": [
        INNER // 2,
        [INNER, INNER],
        [INNER] * 3,
        [0, INNER, 0],
        [INNER, 0, INNER],
        [0, 0, 0],
    ],
    "attention.head_count_kv": [[KV_HEADS, 0], [0, 1], [0, 0], [0, 2, 2], [0], KV_HEADS, None],
    "attention.key_length": [8],
    "attention.layer_norm_rms_epsilon": [0.5],
    "attention.layer_norm_epsilon": [0.5, None],
    "attention.recurrent_layers": [[True, False], [False, True], [True]],
    "attention.scale": [0.7, 0.0],
    "embedding_scale": [12.0, 0.0],
    "expert_count": [2],
    "expert_shared_feed_forward_length": [8],
    "full_attention_interval": [1, 4],
    "logit_scale": [8.0],
    "nextn_predict_layers": [1, 2],
    "residual_scale": [0.2],
    "rope.dimension_count": [8, None],
    "rope.dimension_sections": [[11, 11, 10, 0], [1, 0, 0, 1], [2], None],
    "rope.freq_base": [100.0],
    "rope.scaling.finetuned": [True, False, None],
    "rope.scaling.type": ["su"],
    "rope.scaling.factor": [4.0],
    "shortconv.l_cache": [2, None],
    "ssm.conv_kernel": [3, None],
    "ssm.dt_b_c_rms": [True],
    "ssm.group_count": [1, 4, 3],
    "ssm.inner_size": [16, None],
    "ssm.state_size": [4, None],
    "ssm.time_step_rank": [2, 8],
    "a_key_of_tomorrow": [1],
}


def key_mutations(content: Content) -> Iterator[Content]:
    """Changes of architectures with experts only what tells of them: the rest goes the same ways."""
    values = VALUES
    if "expert_count" in content.metadata:
        values = {key: some for key, some in VALUES.items() if key.startswith(KEYS_OF_EXPERTS)} | OF_EXPERTS
    return changed_keys(content, [{key: value} for key, some in values.items() for value in some])


def added_tensors(content: Content) -> Iterator[Content]:
    ones = np.ones(HIDDEN, dtype=np.float32)
    names = ["shortconv.conv.bias", "ssm_conv1d.bias", "ssm_dt.weight", "ssm_a.weight", "ssm_in.bias"]
    names += ["ssm_out.bias", "ssm_norm.bias", "attn_q.weight", "ffn_gate_inp.weight"]
    changes = [{f"blk.0.{name}": ones} for name in names]
    changes += [{f"blk.1.{name}.bias": ones} for name in ("attn_output", "ffn_down")]
    changes += [
        {"output.weight": np.flip(content.tensors["token_embd.weight"]).copy()},
        {f"blk.{LAYERS}.nextn.enorm.weight": ones},
        {"dense_2.weight": ones},
    ]
    for change in changes:
        changed = content.copy()
        changed.tensors = change | changed.tensors
        if changed.tensors.keys() != content.tensors.keys():
            yield changed
    if content.architecture in ("qwen35", "qwen3next"):
        changed.tensors |= {f"blk.{LAYERS}.nextn.enorm.weight": ones}
        changed.metadata |= {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
        del changed.tensors["dense_2.weight"]
        yield changed


MUTATIONS: dict[str, Callable[[Content], Iterator[Content]]] = {
    "key changed": key_mutations,
    "tensor removed": removed_tensors,
    "tensor reshaped": reshaped_tensors,
    "tensor added": added_tensors,
}
# Files served as by llama.cpp, and refused, by kind of mutation.
COUNTS: dict[str, list[tuple[int, int]]] = {
    "lfm2": [(9, 45), (0, 10), (0, 16), (1, 13)],
    "qwen35": [(11, 45), (0, 16), (0, 24), (2, 13)],
    "granitehybrid": [(13, 43), (1, 14), (0, 25), (1, 12)],
    "lfm2moe": [(5, 26), (0, 5), (0, 9), (0, 13)],
    "qwen3next": [(9, 23), (0, 12), (0, 21), (2, 12)],
    "falcon-h1": [(8, 46), (2, 17), (0, 31), (1, 11)],
    "nemotron_h": [(11, 45), (1, 13), (0, 23), (1, 12)],
    "nemotron_h_moe": [(5, 24), (0, 6), (0, 11), (1, 12)],
    "granitehybrid with experts": [(4, 27), (0, 9), (0, 16), (1, 11)],
}


def reference(content: Content) -> Any:
    """Logits, or None where llama.cpp refuses."""

    def make() -> HybridGraph:
        return HybridGraph(content.architecture, content.keys, content.tensors)

    return logits_unless_refused(make, IDS, KeyError, TypeError)


@pytest.mark.parametrize("kind", MUTATIONS)
@pytest.mark.parametrize("architecture", OF_STATE)
def test_mutated_files_are_the_reference_or_refused(architecture: str, kind: str, tmp_path: Path) -> None:
    content = base(architecture)
    if kind == "key changed":
        assert outcome(content, tmp_path / "whole.gguf", reference) == "equal"
    expected = COUNTS[architecture][list(MUTATIONS).index(kind)]
    assert equal_and_refused(content, MUTATIONS[kind], tmp_path, reference) == expected


def test_the_table_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for architecture, counts in COUNTS.items():
        cells = " | ".join(f"{equal}, {refused}" for equal, refused in counts)
        assert f"| {architecture} | {cells} |" in page
