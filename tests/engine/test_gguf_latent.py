"""Files of latent attention with one thing changed: what llama.cpp computes from them, or a refusal."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.test_gguf_mutations import (
    CONTEXT,
    EXPERT,
    HIDDEN,
    IDS,
    INNER,
    LAYERS,
    NUMBER,
    VOCAB_SIZE,
    Content,
    changed_keys,
    logits_unless_refused,
    outcome,
)
from tests.llama_cpp_latent import LatentGraph

HEADS, TURNED, OTHERS, VALUE, RANK, QUERIES = 4, 8, 12, 10, 24, 16
# These keys are changed together, or added.
MORE: list[dict[str, Any]] = [
    {"expert_group_count": 2, "expert_group_used_count": 1},
    {"expert_group_count": 3, "expert_group_used_count": 1},
    {"expert_group_count": 2, "expert_group_used_count": 3},
    {"attention.temperature_scale": 0.1},
    {"attention.scale": 0.5},
    {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    {"rope.scaling.attn_factor": 1.5},
    {"rope.scaling.yarn_log_multiplier": 0.1, "rope.scaling.type": "none"},
    {"expert_gating_func": 1},
    {"nextn_predict_layers": 1},
    {"rope.dimension_count": TURNED + 2, "attention.key_length": RANK + TURNED + 2},
    {"attention.sliding_window": 4},
]


def base() -> Content:
    draws = np.random.default_rng(1)

    def drawn(*shape: int, mean: float = 0.0) -> Any:
        return (mean + draws.normal(0, 0.25, shape)).astype(np.float32)

    shapes: dict[str, tuple[int, ...]] = {
        "attn_q_a": (QUERIES, HIDDEN),
        "attn_q_b": (HEADS * (TURNED + OTHERS), QUERIES),
        "attn_kv_a_mqa": (RANK + TURNED, HIDDEN),
        "attn_k_b": (HEADS, RANK, OTHERS),
        "attn_v_b": (HEADS, VALUE, RANK),
        "attn_output": (HIDDEN, HEADS * VALUE),
    }
    dense = {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    mixed = {"ffn_gate_inp": (NUMBER, HIDDEN), "ffn_down_shexp": (HIDDEN, EXPERT)}
    mixed |= {f"ffn_{part}_shexp": (EXPERT, HIDDEN) for part in ("gate", "up")}
    stacks = {f"ffn_{part}_exps": (NUMBER, EXPERT, HIDDEN) for part in ("gate", "up")}
    stacks |= {"ffn_down_exps": (NUMBER, HIDDEN, EXPERT)}
    norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_q_a_norm": QUERIES, "attn_kv_a_norm": RANK}
    tensors = {"token_embd.weight": drawn(VOCAB_SIZE, HIDDEN), "output.weight": drawn(VOCAB_SIZE, HIDDEN)}
    tensors["output_norm.weight"] = drawn(HIDDEN, mean=1)
    for layer in range(LAYERS):
        own = shapes | (mixed | stacks if layer else dense)
        tensors |= {f"blk.{layer}.{name}.weight": drawn(*shape) for name, shape in own.items()}
        tensors |= {f"blk.{layer}.{name}.weight": drawn(size, mean=1) for name, size in norms.items()}
    tensors["blk.1.exp_probs_b.bias"] = drawn(NUMBER)
    metadata = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": RANK + TURNED,
        "attention.value_length": RANK,
        "attention.key_length_mla": TURNED + OTHERS,
        "attention.value_length_mla": VALUE,
        # Latent vectors have one that is fixed in transformers' modules.
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.kv_lora_rank": RANK,
        "attention.q_lora_rank": QUERIES,
        "rope.freq_base": 1e4,
        "rope.dimension_count": TURNED,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_log_multiplier": 0.08,
        "vocab_size": VOCAB_SIZE,
        "leading_dense_block_count": 1,
        "expert_count": NUMBER,
        "expert_used_count": 2,
        "expert_feed_forward_length": EXPERT,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_gating_func": 2,
    }
    return Content("deepseek2", metadata, tensors)


def reference(content: Content) -> Any:
    """Returns logits, or None where llama.cpp refuses or does what the graph leaves out."""
    kind = content.metadata.get("rope.scaling.type")
    left_out = ("attention.temperature_scale", "attention.scale", "rope.scaling.attn_factor")
    if kind == "linear" or any(key in content.metadata for key in left_out):
        return None
    return logits_unless_refused(lambda: LatentGraph(content.keys, content.tensors), IDS)


def test_keys(tmp_path: Path) -> None:
    """Each is left out, and has another value."""
    content = base()
    assert outcome(content, tmp_path / "whole.gguf", reference) == "equal"
    changes: list[dict[str, Any]] = [{key: None} for key in content.metadata]
    for key, value in content.metadata.items():
        if isinstance(value, bool):
            changes.append({key: not value})
        elif isinstance(value, int | float) and key not in ("context_length", "attention.head_count_kv"):
            changes.append({key: 2 * value})
    found: Counter[str] = Counter()
    for number, changed in enumerate(changed_keys(content, changes + MORE)):
        result = outcome(changed, tmp_path / f"{number}.gguf", reference)
        differs = {key: changed.metadata.get(key) for key in {*content.metadata, *changed.metadata}}
        assert result in ("equal", "refused"), differs.items() - content.metadata.items()
        found[result] += 1
    assert found["equal"] > 8
    assert found["refused"] > 20


def test_tensors(tmp_path: Path) -> None:
    """Each of a layer's is left out, and loses some rows; some are there that are not used."""
    content = base()
    for number, name in enumerate(content.tensors):
        if "blk.1.attn" in name or "exp_probs" in name:
            for kept in (slice(0), slice(-2)):
                changed = content.copy()
                changed.tensors[name] = content.tensors[name][kept]
                if kept == slice(0):
                    del changed.tensors[name]
                result = outcome(changed, tmp_path / f"{number}.gguf", reference)
                assert result == "refused", name
    ones = np.ones((HEADS * (OTHERS + VALUE), RANK), dtype=np.float32)
    for name in ("blk.1.attn_kv_b.weight", "blk.1.attn_q.weight", "blk.1.attn_v_b.bias"):
        changed = content.copy()
        changed.tensors[name] = ones
        assert outcome(changed, tmp_path / "more.gguf", reference) == "refused"
