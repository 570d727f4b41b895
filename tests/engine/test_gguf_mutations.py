"""GGUF files with one thing changed: what llama.cpp computes from them, or a refusal in one sentence.

Each tensor is removed, reshaped or joined by another; each key of the architecture gets other values.
``tests/llama_cpp_graph.py`` says what is right. Nothing may be served that it refuses or computes otherwise.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from tests.llama_cpp_graph import Graph, RefusedError
from truedraft.engine.checkpoints.account import Account
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.gguf.config import MODEL_TYPES
from truedraft.engine.gguf.hybrids import SETTINGS
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.models.loader import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions

VOCAB_SIZE, HIDDEN, HEAD_SIZE, INNER, LAYERS, CONTEXT = 24, 32, 16, 40, 2, 64
NUMBER, EXPERT = 4, 24
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


@dataclass
class Content:
    """``metadata`` without the architecture in front of its keys."""

    architecture: str
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> "Content":
        return Content(self.architecture, dict(self.metadata), dict(self.tensors))

    @property
    def keys(self) -> dict[str, Any]:
        return {f"{self.architecture}.{key}": value for key, value in self.metadata.items()}

    def write(self, path: Path) -> None:
        writer = GGUFWriter(path, self.architecture)
        for key, value in self.keys.items():
            _add(writer, key, value)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[..., None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def base(architecture: str) -> Content:
    """A file as converters write it."""
    draws = np.random.default_rng(1)

    def matrix(*shape: int) -> Any:
        return draws.normal(0, 0.25, shape).astype(np.float32)

    def vector(size: int | tuple[int, ...], mean: float) -> Any:
        return (mean + draws.normal(0, 0.3, size)).astype(np.float32)

    with_experts = architecture in EXPERTS
    architecture = architecture.removesuffix(" with experts")
    # Heads of these make up the hidden size, and OLMoE's are all the same.
    is_whole = architecture in ("phi3", "qwen2moe", "olmo2", "exaone4", "chatglm")
    heads, kv_heads = (2, 1) if is_whole else (4, 2)
    if architecture == "olmoe":
        heads = kv_heads = 2
    shapes = _matrices(architecture, with_experts, heads * HEAD_SIZE, kv_heads * HEAD_SIZE)
    norms, biases = _norms(architecture, heads), _biases(architecture, shapes)
    tensors = {"token_embd.weight": matrix(VOCAB_SIZE, HIDDEN), "output_norm.weight": vector(HIDDEN, 1)}
    if architecture not in ("gemma", "gemma2"):
        tensors["output.weight"] = matrix(VOCAB_SIZE, HIDDEN)
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {f"blk.{layer}.{name}.weight": vector(size, 1) for name, size in norms.items()}
        tensors |= {f"blk.{layer}.{name}.bias": vector(size, 0) for name, size in biases.items()}
    return Content(architecture, _metadata(architecture, with_experts, heads, kv_heads), tensors)


def _matrices(architecture: str, with_experts: bool, queries: int, keys: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's matrices."""
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (queries, HIDDEN),
        "attn_k": (keys, HIDDEN),
        "attn_v": (keys, HIDDEN),
        "attn_output": (HIDDEN, queries),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    if architecture == "phi3":
        shapes = {name: shapes[name] for name in ("attn_output", "ffn_down")}
        shapes |= {"attn_qkv": (queries + 2 * keys, HIDDEN), "ffn_up": (2 * INNER, HIDDEN)}
    if architecture in ("glm4", "chatglm"):
        shapes.pop("ffn_gate")
        shapes["ffn_up"] = (2 * INNER, HIDDEN)
    if with_experts:
        shapes = {name: shape for name, shape in shapes.items() if name.startswith("attn")}
        shapes |= {"ffn_gate_inp": (NUMBER, HIDDEN)}
        shapes |= {f"ffn_{part}_exps": (NUMBER, EXPERT, HIDDEN) for part in ("gate", "up")}
        shapes |= {"ffn_down_exps": (NUMBER, HIDDEN, EXPERT)}
    if architecture in SHARED:
        size = SHARED[architecture]
        shapes |= {f"ffn_{part}_shexp": (size, HIDDEN) for part in ("gate", "up")}
        shapes |= {"ffn_down_shexp": (HIDDEN, size)}
    return shapes


def _norms(architecture: str, heads: int) -> dict[str, int]:
    """Returns the sizes of a layer's norms, and of what else multiplies or adds."""
    norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    if architecture in ("olmo2", "exaone4"):
        norms = {}
    if architecture in ("gemma2", "gemma3", "glm4", "olmo2", "exaone4"):
        norms |= {"post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN}
    if architecture == "qwen2moe":
        norms |= {"ffn_gate_inp_shexp": HIDDEN}
    if architecture == "olmoe":
        norms |= {"attn_q_norm": HIDDEN, "attn_k_norm": HIDDEN}
    if architecture == "gpt-oss":
        norms = {"attn_norm": HIDDEN, "post_attention_norm": HIDDEN, "attn_sinks": heads}
    if architecture in ("glm4moe", "seed_oss"):
        norms = {"attn_norm": HIDDEN, "post_attention_norm": HIDDEN}
    if architecture == "olmo2":
        norms |= {"attn_q_norm": heads * HEAD_SIZE, "attn_k_norm": heads // 2 * HEAD_SIZE}
    if architecture in ("qwen3", "gemma3", "qwen3moe", "glm4moe", "exaone4", "hunyuan-dense"):
        norms |= {"attn_q_norm": HEAD_SIZE, "attn_k_norm": HEAD_SIZE}
    return norms


def _biases(architecture: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's biases."""
    if architecture in ("qwen2", "qwen2moe", "glm4", "chatglm", "seed_oss"):
        return {name: shapes[name][:1] for name in ("attn_q", "attn_k", "attn_v")}
    if architecture == "gpt-oss":
        return {name: shape[:-1] for name, shape in shapes.items()}
    return {"exp_probs_b": (NUMBER,)} if architecture == "glm4moe" else {}


def _metadata(architecture: str, with_experts: bool, heads: int, kv_heads: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": HEAD_SIZE,
        "attention.value_length": HEAD_SIZE,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e4,
        "rope.dimension_count": HEAD_SIZE,
        "vocab_size": VOCAB_SIZE,
    }
    if architecture in ("gemma2", "gemma3", "phi3", "olmo2", "exaone4"):
        metadata["attention.sliding_window"] = 6
    if architecture == "gemma2":
        metadata |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    if architecture in ("gemma3", "olmo2", "exaone4"):
        metadata["attention.sliding_window_pattern"] = 2
    if architecture in ("glm4", "chatglm"):
        metadata["rope.dimension_count"] = HEAD_SIZE // 2
    if with_experts:
        metadata |= {"expert_count": NUMBER, "expert_used_count": 2}
        if architecture in ("qwen2moe", "qwen3moe", "gpt-oss", "glm4moe"):
            metadata["expert_feed_forward_length"] = EXPERT
        else:
            metadata["feed_forward_length"] = EXPERT
    if architecture == "qwen2moe":
        metadata["expert_shared_feed_forward_length"] = INNER
    if architecture == "gpt-oss":
        metadata["attention.sliding_window"] = 6
    if architecture in ("granite", "granitemoe"):
        metadata |= {
            "attention.scale": 0.2,
            "embedding_scale": 3.0,
            "residual_scale": 0.5,
            "logit_scale": 2.0,
            # Granite 4 without a running state has the keys of one.
            "expert_shared_feed_forward_length": INNER,
            "rope.scaling.finetuned": True,
            "ssm.conv_kernel": 4,
            "ssm.group_count": 1,
            "ssm.inner_size": 2 * HIDDEN,
            "ssm.state_size": 16,
            "ssm.time_step_rank": 4,
        }
    if architecture == "glm4moe":
        metadata |= {"expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1.5}
        metadata["rope.dimension_count"] = HEAD_SIZE // 2
    return metadata


# Architectures with experts, of which only these keys are changed: the others go the same ways as elsewhere.
EXPERTS = ("qwen2moe", "qwen3moe", "olmoe", "gpt-oss", "llama with experts", "glm4moe", "granitemoe")
# These share what reads most keys with others: only keys are changed that say something else of them.
SHARING = (
    *("qwen2", "qwen3", "smollm3", "olmo2", "seed_oss", "glm4", "exaone4", "hunyuan-dense", "ernie4_5"),
    *("gemma", "chatglm"),
)
OWN_KEYS = (
    *("attention.head_count", "attention.key_length", "attention.scale", "attention.sliding"),
    *("rope.dimension", "rope.freq_base", "rope.scaling.alpha"),
)
# In some of them all tokens take an expert of this size.
SHARED = {"qwen2moe": INNER, "granitemoe": INNER, "glm4moe": EXPERT}
KEYS_OF_EXPERTS = (
    "expert",
    "feed_forward_length",
    "attention.sliding",
    "leading",
    "nextn",
    "rope.dimension_count",
)
OF_EXPERTS: dict[str, list[Any]] = {
    "expert_count": [0, 2, 8, None],
    "expert_used_count": [0, 1, 4, 5, None],
    "expert_feed_forward_length": [8, 40, 48, None],
    "expert_shared_feed_forward_length": [8, INNER, None],
    "expert_gating_func": [1, 2, 3, 4],
    "expert_weights_norm": [True],
    "expert_group_count": [2],
    "expert_shared_count": [1],
}
# Files that have these keys get other values of them, too.
IF_THERE: dict[str, list[Any]] = {
    "attention.scale": [0.7, None],
    "embedding_scale": [12.0, None],
    "residual_scale": [0.2, None],
    "logit_scale": [8.0, None],
    "expert_weights_norm": [False],
    "expert_weights_scale": [2.0, None],
    "expert_shared_count": [2, None],
    "rope.scaling.finetuned": [False],
}
# Other values of keys than those that the file has; None removes it.
VALUES: dict[str, list[Any]] = {
    "block_count": [1, 3, 1 << 30],
    "context_length": [32, None],
    "embedding_length": [16, 64],
    "feed_forward_length": [INNER // 2, [INNER, INNER // 2]],
    "attention.head_count": [1, 3, [4, 2]],
    "attention.head_count_kv": [4, None, [2, 1]],
    "attention.key_length": [8, None],
    "attention.value_length": [8],
    "attention.layer_norm_rms_epsilon": [0.5, None, 0.0],
    "attention.layer_norm_epsilon": [0.5],
    "attention.sliding_window": [3, 0, None],
    "attention.sliding_window_pattern": [0, 1, 3, [False, True], [True]],
    "attention.causal": [False],
    "attention.clamp_kqv": [0.1],
    "attention.max_alibi_bias": [8.0],
    "attention.scale": [0.7],
    "attention.output_scale": [0.3],
    "attention.temperature_length": [4],
    "attention.temperature_scale": [0.1],
    "attention.shared_kv_layers": [1],
    "attention.q_lora_rank": [8],
    "attention.key_length_swa": [8],
    "attn_logit_softcapping": [0.5, None],
    "final_logit_softcapping": [0.5, None],
    "router_logit_softcapping": [3.0],
    "embedding_scale": [12.0],
    "residual_scale": [0.2],
    "logit_scale": [8.0],
    "expert_count": [2],
    "expert_used_count": [2],
    "expert_weights_scale": [2.0],
    "expert_feed_forward_length": [8],
    "nextn_predict_layers": [1],
    "leading_dense_block_count": [1],
    "pooling_type": [1],
    "rope.freq_base": [100.0, None],
    "rope.freq_base_swa": [50.0],
    "rope.dimension_count": [8, 7, None],
    "rope.dimension_count_swa": [8],
    "rope.dimension_sections": [[2, 3, 3, 0]],
    "rope.scaling.finetuned": [False],
    "rope.scaling.type": ["su"],
    "rope.scaling.factor": [4.0],
    "rope.scale_linear": [4.0],
    "rope.scaling.attn_factor": [1.5],
    "rope.scaling.alpha": [50.0],
    "rope.scaling.yarn_ext_factor": [0.5],
    "rope.scaling.yarn_attn_factor": [0.5],
    "rope.scaling.yarn_beta_fast": [2.0],
    "rope.scaling.yarn_beta_slow": [2.0],
    "rope.scaling.yarn_log_multiplier": [0.1],
    "ssm.state_size": [8],
    "use_parallel_residual": [True],
    "vocab_size": [VOCAB_SIZE + 2, None],
    "a_key_of_tomorrow": [1],
}
# Values that ask for nothing, and keys that tell of nothing that is computed.
NEUTRAL: dict[str, Any] = {
    "feed_forward_length": [INNER, INNER],
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": HEAD_SIZE**-0.5,
    "attention.shared_kv_layers": 0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "nextn_predict_layers": 0,
    "pooling_type": 0,
    "rope.freq_base_swa": 1e4,
    "rope.dimension_sections": [0, 0, 0, 0],
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.finetuned": True,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "tensor_data_layout": "reference",
    "use_parallel_residual": False,
}
# Values that mean something to llama.cpp which its graph here leaves out: never served.
MEANINGFUL = {
    "attention.causal": [False],
    "nextn_predict_layers": [1],
    "pooling_type": [1],
    "rope.dimension_sections": [[2, 3, 3, 0]],
    "vocab_size": [VOCAB_SIZE + 2],
}
TOGETHER: list[dict[str, Any]] = [
    NEUTRAL,
    {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
    {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.attn_factor": 1.3,
        "rope.scaling.original_context_length": 16,
    },
]


def key_mutations(content: Content) -> Iterator[Content]:
    if "expert_count" in content.metadata:
        kept = {key: values for key, values in VALUES.items() if key.startswith(KEYS_OF_EXPERTS)} | OF_EXPERTS
        changes = [{key: value} for key, values in kept.items() for value in values]
        changes += [{key: value} for key in IF_THERE if key in content.metadata for value in IF_THERE[key]]
        yield from changed_keys(content, changes)
        return
    is_sharing = content.architecture in SHARING
    kept = {key: values for key, values in VALUES.items() if not is_sharing or key.startswith(OWN_KEYS)}
    changes = [{key: value} for key, values in kept.items() for value in values]
    if is_sharing:
        yield from changed_keys(content, [*changes, TOGETHER[0], TOGETHER[-1]])
        return
    for key in ("attention.head_count", "attention.head_count_kv"):
        changes.append({key: [content.metadata[key]] * LAYERS})
    yield from changed_keys(content, changes + TOGETHER)


def changed_keys(content: Content, changes: list[dict[str, Any]]) -> Iterator[Content]:
    for change in changes:
        changed = content.copy()
        for key, value in change.items():
            if value is None:
                changed.metadata.pop(key, None)
            else:
                changed.metadata[key] = value
        if changed.metadata != content.metadata:
            yield changed


def is_changed(content: Content, name: str) -> bool:
    """Tells whether a tensor is: of two layers that of one, and only what is their own among experts, and
    among architectures that share the rest with others."""
    if name.startswith("blk.1"):
        return False
    own: tuple[str, ...] = ("",)
    if "expert_count" in content.metadata:
        own = ("ffn", "sinks", "attn_qkv", "attn_gate", "ssm_ba")
    elif content.architecture in SHARING:
        own = ("norm", "ffn_up", "attn_k.bias")
    return name.startswith("output") or any(part in name for part in own)


def removed_tensors(content: Content) -> Iterator[Content]:
    for name in content.tensors:
        if is_changed(content, name):
            changed = content.copy()
            del changed.tensors[name]
            yield changed


def reshaped_tensors(content: Content) -> Iterator[Content]:
    for name, tensor in content.tensors.items():
        if not is_changed(content, name):
            continue
        for other in (tensor[:-4], tensor.T):
            if other.shape != tensor.shape:
                changed = content.copy()
                changed.tensors[name] = np.ascontiguousarray(other)
                yield changed


def added_tensors(content: Content) -> Iterator[Content]:
    draws = np.random.default_rng(2)

    def drawn(*shape: int) -> Any:
        return (1.5 + draws.normal(0, 0.4, shape)).astype(np.float32)

    half = HEAD_SIZE // 2
    linears = [name for name, tensor in content.tensors.items() if tensor.ndim == 2 and name[:4] == "blk."]
    changes: list[dict[str, Any]] = [
        {"output.bias": drawn(VOCAB_SIZE)},
        {"output.weight": drawn(VOCAB_SIZE, HIDDEN)},
        {"cls.output.weight": drawn(2, HIDDEN)},
        {"rope_freqs.weight": drawn(half)},
        {"rope_freqs.weight": drawn(half - 1)},
        {"rope_factors_long.weight": drawn(half)},
        {"rope_factors_short.weight": drawn(half)},
        {"blk.0.attn_q_norm.weight": drawn(HEAD_SIZE), "blk.0.attn_k_norm.weight": drawn(HEAD_SIZE)},
        {"blk.0.attn_sinks.weight": drawn(4)},
        {"blk.0.attn_norm.bias": drawn(HIDDEN)},
        {f"blk.{LAYERS}.attn_norm.weight": drawn(HIDDEN)},
        {"v.patch_embd.weight": drawn(4, 4)},
        {"a_tensor_of_tomorrow.weight": drawn(4)},
    ]
    for name in linears:
        if name.startswith("blk.0") and is_changed(content, name):
            stem = name.removesuffix(".weight")
            changes += [
                {f"{stem}.bias": drawn(len(content.tensors[name]))},
                {f"{stem}.scale": drawn(1)},
            ]
    for parts in (("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")):
        chosen = [name for name in linears if name.split(".")[2] in parts]
        biases = {
            f"{name.removesuffix('.weight')}.bias": drawn(len(content.tensors[name])) for name in chosen
        }
        changes += [biases, {name: bias for name, bias in biases.items() if name.startswith("blk.0")}]
    for change in changes:
        changed = content.copy()
        changed.tensors |= change
        yield changed
    if content.architecture == "phi3":
        changed = content.copy()
        changed.tensors |= {f"rope_factors_{length}.weight": drawn(half) for length in ("long", "short")}
        for more in ({}, {"rope.scaling.attn_factor": 1.2}, {"rope.scaling.type": "longrope"}):
            scaled = changed.copy()
            scaled.metadata |= {"rope.scaling.original_context_length": 32} | more
            yield scaled
        yield changed


MUTATIONS: dict[str, Callable[[Content], Iterator[Content]]] = {
    "key changed": key_mutations,
    "tensor removed": removed_tensors,
    "tensor reshaped": reshaped_tensors,
    "tensor added": added_tensors,
}


# Files served as by llama.cpp, and refused, by kind of mutation.
COUNTS = {
    "llama": [(19, 66), (1, 11), (0, 19), (4, 27)],
    "qwen2": [(6, 22), (1, 5), (0, 8), (1, 18)],
    "qwen3": [(6, 22), (1, 6), (0, 9), (2, 17)],
    "phi3": [(16, 70), (1, 8), (0, 14), (4, 25)],
    "gemma2": [(27, 61), (0, 13), (0, 19), (0, 31)],
    "gemma3": [(21, 65), (1, 15), (0, 23), (2, 29)],
    "qwen2moe": [(7, 31), (0, 11), (0, 19), (3, 22)],
    "qwen3moe": [(6, 32), (1, 6), (0, 12), (4, 15)],
    "olmoe": [(5, 32), (0, 7), (0, 12), (3, 16)],
    "gpt-oss": [(10, 29), (0, 11), (0, 19), (7, 18)],
    "llama with experts": [(6, 31), (1, 6), (0, 12), (4, 15)],
    "granite": [(22, 63), (1, 11), (0, 19), (2, 29)],
    "glm4moe": [(10, 30), (1, 8), (0, 17), (4, 21)],
    "granitemoe": [(12, 34), (1, 9), (0, 18), (4, 21)],
    "smollm3": [(6, 22), (1, 4), (0, 7), (1, 18)],
    "olmo2": [(11, 18), (0, 7), (0, 9), (1, 18)],
    "seed_oss": [(6, 22), (1, 5), (0, 8), (1, 18)],
    "glm4": [(5, 22), (1, 7), (0, 10), (1, 18)],
    "exaone4": [(11, 18), (1, 6), (0, 9), (3, 16)],
    "hunyuan-dense": [(6, 22), (1, 6), (0, 9), (2, 17)],
    "ernie4_5": [(6, 22), (1, 4), (0, 7), (1, 18)],
    "gemma": [(6, 22), (0, 4), (0, 5), (0, 19)],
    "chatglm": [(6, 21), (1, 5), (0, 8), (1, 18)],
}


def served(content: Content, path: Path) -> Any:
    """Logits, or the sentence of the refusal."""
    content.write(path)
    try:
        model = load_model(str(path), LoadOptions(compact_weights=False))
    except ModelLoadError as error:
        return str(error)
    runner = ModelRunner.build(model, num_blocks=4, block_size=4, num_state_slots=1)
    table = BlockTable()
    table.block_ids, table.state_slot = [2, 0, 3, 1], 0
    return runner.forward([Span(table, IDS, len(IDS))]).logits.numpy()


def logits_unless_refused(make: Callable[[], Any], ids: list[int], *also: type[Exception]) -> Any:
    """Returns the logits of a graph, or None where it refuses the file, or fails by sizes that do not fit;
    ``also`` are errors that a graph raises for keys that are missing or of another type."""
    try:
        return make().logits(ids)
    except (RefusedError, ValueError, IndexError, ZeroDivisionError, *also):
        return None


def reference(content: Content) -> Any:
    """Logits, or None where llama.cpp refuses or does what the graph leaves out."""
    meaningful = {
        key: values
        for key, values in MEANINGFUL.items()
        if (content.architecture, key) != ("glm4moe", "nextn_predict_layers")
    }
    if any(content.metadata.get(key) in values for key, values in meaningful.items()):
        return None
    return logits_unless_refused(lambda: Graph(content.architecture, content.keys, content.tensors), IDS)


def outcome(content: Content, path: Path, reference: Callable[[Content], Any] = reference) -> str:
    ours, expected = served(content, path), reference(content)
    if isinstance(ours, str):
        assert "\n" not in ours
        assert ours.startswith((str(path), f"cannot load {path}"))
        return "refused"
    if expected is None:
        return "served, though llama.cpp refuses"
    return "equal" if np.allclose(ours, expected, atol=2e-3, rtol=1e-3) else "another text"


def equal_and_refused(
    content: Content,
    mutate: Callable[[Content], Iterator[Content]],
    folder: Path,
    reference: Callable[[Content], Any] = reference,
) -> tuple[int, int]:
    """Counts the mutated files that are served as by llama.cpp, and those that are refused: no other thing
    may happen."""
    found: Counter[str] = Counter()
    for number, changed in enumerate(mutate(content)):
        result = outcome(changed, folder / f"{number}.gguf", reference)
        keys = changed.metadata.keys() | content.metadata.keys()
        values = {key: changed.metadata.get(key) for key in keys}
        change = {key: value for key, value in values.items() if value != content.metadata.get(key)}
        names = [name for name in changed.tensors if changed.tensors[name] is not content.tensors.get(name)]
        assert result in ("equal", "refused"), (change, names)
        found[result] += 1
    return found["equal"], found["refused"]


@pytest.mark.parametrize("kind", MUTATIONS)
@pytest.mark.parametrize(
    "architecture",
    [*(name for name in MODEL_TYPES if name not in (*SETTINGS, "gemma4", "deepseek2")), "llama with experts"],
)
def test_mutated_files_are_the_reference_or_refused(architecture: str, kind: str, tmp_path: Path) -> None:
    content = base(architecture)
    if kind == "key changed":
        assert outcome(content, tmp_path / "whole.gguf") == "equal"
    expected = COUNTS[architecture][list(MUTATIONS).index(kind)]
    assert equal_and_refused(content, MUTATIONS[kind], tmp_path) == expected


def test_without_the_account_other_texts_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Account, "close", lambda account, sentence: None)
    content = base("llama")
    changed = content.copy()
    changed.tensors["blk.0.attn_output.bias"] = np.ones(HIDDEN, dtype=np.float32)
    assert outcome(changed, tmp_path / "a.gguf") == "another text"
    changed = content.copy()
    changed.tensors["output.bias"] = np.ones(VOCAB_SIZE, dtype=np.float32)
    assert outcome(changed, tmp_path / "b.gguf") == "served, though llama.cpp refuses"


def test_the_table_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for architecture, counts in COUNTS.items():
        cells = " | ".join(f"{equal}, {refused}" for equal, refused in counts)
        assert f"| {architecture} | {cells} |" in page
