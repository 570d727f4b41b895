"""What llama.cpp computes from a GGUF file, in numpy, from the file's own names and keys alone.

Written from the architectures' definitions and sharing nothing with the product: a text at once, no cache.
``RefusedError`` is what llama.cpp says to tensors that are missing, left over or of another shape. Windows of
``llama``, ``phi3`` and ``exaone4`` are their makers', which llama.cpp leaves out.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

GEMMA = ("gemma2", "gemma3")
PATTERNS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "olmo2": 4, "exaone4": 4}
# Layers of these norm nothing but queries, keys and what they add.
NORMED_AFTER = ("olmo2", "exaone4")
# Linear layers whose biases are optional, by architecture.
OPTIONAL_BIASES = {
    "llama": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    "qwen2": ("attn_output",),
    "granite": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    "granitemoe": ("attn_q", "attn_k", "attn_v", "attn_output"),
    **dict.fromkeys(("glm4moe", "glm4", "chatglm", "seed_oss"), ("attn_q", "attn_k", "attn_v")),
}
NEEDED_BIASES = {
    "qwen2": ("attn_q", "attn_k", "attn_v"),
    "qwen2moe": ("attn_q", "attn_k", "attn_v"),
    "gpt-oss": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp"),
}
WITH_EXPERTS = ("qwen2moe", "qwen3moe", "olmoe", "gpt-oss", "glm4moe", "granitemoe")
GRANITE = ("granite", "granitemoe")
# The second norm of a layer is called after attention here.
NORMED_AFTER_ATTENTION = ("gpt-oss", "glm4moe", "seed_oss")
# These have gates and what they gate in one tensor, and turn pairs of neighbours.
GATES_FIRST = ("phi3", "glm4", "chatglm")
NEIGHBOURS = ("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "ernie4_5", "glm4", "chatglm")


class RefusedError(Exception):
    pass


class Graph:
    def __init__(self, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        self.architecture = architecture
        self.metadata = metadata
        self.left = dict(tensors)
        self.all = tensors
        self.hidden_size, self.num_layers = self.says("embedding_length"), self.says("block_count")
        # Layers that predict further tokens come last.
        self.further = int(self.says("nextn_predict_layers", 0)) if architecture == "glm4moe" else 0
        self.head_size = self.says("attention.key_length", self.hidden_size // self.heads(0))
        self.rotated = self.says("rope.dimension_count", self.head_size)
        # Others turn whole heads, or nothing.
        is_free = architecture.startswith(("phi3", "qwen35", "qwen3next", "glm4", "chatglm", "nemotron_h"))
        if not is_free and self.rotated != self.head_size:
            raise RefusedError("rope.dimension_count")
        if self.says("attention.value_length", self.head_size) != self.head_size:
            raise RefusedError("attention.value_length")

    def says(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise RefusedError(key)
        return value

    def of_layer(self, key: str, layer: int, default: Any = None) -> Any:
        value = self.says(key, default)
        if isinstance(value, list) and len(value) != self.says("block_count"):
            raise RefusedError(f"wrong array length: {key}")
        return value[layer] if isinstance(value, list) else value

    def heads(self, layer: int) -> int:
        return int(self.of_layer("attention.head_count", layer))

    def kv_heads(self, layer: int) -> int:
        return int(self.of_layer("attention.head_count_kv", layer, self.heads(layer)))

    def tensor(self, name: str, *shape: int) -> Array:
        if name not in self.all or self.all[name].shape != shape:
            raise RefusedError(name)
        self.left.pop(name, None)
        return np.asarray(self.all[name], dtype=np.float64)

    def linear(self, x: Array, layer: int, name: str, size: int) -> Array:
        y: Array = x @ self.tensor(f"blk.{layer}.{name}.weight", size, x.shape[-1]).T
        needed = name in NEEDED_BIASES.get(self.architecture, ())
        bias = f"blk.{layer}.{name}.bias"
        if needed or (bias in self.all and name in OPTIONAL_BIASES.get(self.architecture, ())):
            y = y + self.tensor(bias, size)
        return y

    def epsilon(self) -> float:
        if not self.architecture.startswith("nemotron_h"):
            return float(self.says("attention.layer_norm_rms_epsilon"))
        other = self.says("attention.layer_norm_epsilon")
        return float(self.says("attention.layer_norm_rms_epsilon", other))

    def norm(self, x: Array, name: str, end: str = ".weight") -> Array:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.epsilon())
        return x / scale * self.tensor(f"{name}{end}", x.shape[-1])

    def logits(self, ids: list[int]) -> Array:
        if "token_embd.weight" not in self.all:
            raise RefusedError("token_embd.weight")
        x = self.tensor("token_embd.weight", len(self.all["token_embd.weight"]), self.hidden_size)[ids]
        if self.architecture in ("gemma", *GEMMA):
            x = x * math.sqrt(self.hidden_size)
        if self.architecture in GRANITE:
            x = x * self.factor("embedding_scale")
        for layer in range(self.num_layers - self.further):
            x = self.layer(x, layer)
        x = self.norm(x, "output_norm")
        has_head = "output.weight" in self.all and self.architecture not in ("gemma", "gemma2")
        if not has_head and self.architecture in ("qwen2moe", "olmo2", "olmoe", "gpt-oss"):
            raise RefusedError("output.weight")
        head = "output.weight" if has_head else "token_embd.weight"
        logits: Array = x @ self.tensor(head, *self.all["token_embd.weight"].shape).T
        cap = self.says("final_logit_softcapping", {"gemma2": 30.0}.get(self.architecture, 0.0))
        if self.architecture in GEMMA and cap:
            logits = np.tanh(logits / cap) * cap
        if self.architecture in GRANITE:
            logits = logits / self.says("logit_scale")
        self.factors()
        further = range(self.num_layers - self.further, self.num_layers)
        if left := [name for name in self.left if not name.startswith(tuple(f"blk.{i}." for i in further))]:
            raise RefusedError(f"wrong number of tensors: {min(left)}")
        return logits

    def factor(self, key: str) -> float:
        return float(self.says(key, 0.0)) or 1.0

    def layer(self, x: Array, layer: int) -> Array:
        name = f"blk.{layer}"
        is_after = self.architecture in NORMED_AFTER
        attended = self.attention(x if is_after else self.norm(x, f"{name}.attn_norm"), layer)
        if self.architecture in (*GEMMA, *NORMED_AFTER, "glm4"):
            attended = self.norm(attended, f"{name}.post_attention_norm")
        residual = self.factor("residual_scale") if self.architecture in GRANITE else 1.0
        x = x + attended * residual
        size = int(self.of_layer("feed_forward_length", layer))
        own = "post_attention_norm" if self.architecture in NORMED_AFTER_ATTENTION else "ffn_norm"
        inputs = x if is_after else self.norm(x, f"{name}.{own}")
        if self.architecture in WITH_EXPERTS or self.says("expert_count", 0):
            return x + self.experts(inputs, layer, size) * residual
        if self.says("expert_used_count", 0):
            raise RefusedError("expert_used_count")
        if self.architecture in GATES_FIRST:
            gate, up = np.split(self.linear(inputs, layer, "ffn_up", 2 * size), 2, axis=-1)
        else:
            gate, up = (self.linear(inputs, layer, part, size) for part in ("ffn_gate", "ffn_up"))
        if self.architecture in ("gemma", *GEMMA):
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            gate = 0.5 * gate * (1 + np.tanh(inner))
        else:
            gate = gate / (1 + np.exp(-gate))
        out = self.linear(gate * up, layer, "ffn_down", self.hidden_size)
        if self.architecture in (*GEMMA, *NORMED_AFTER, "glm4"):
            out = self.norm(out, f"{name}.post_ffw_norm")
        return x + out * residual

    def experts(self, x: Array, layer: int, size: int) -> Array:
        number, chosen = int(self.says("expert_count")), int(self.says("expert_used_count"))
        if not 0 < chosen <= number or self.says("expert_gating_func", 0) not in (0, self.own_gating()):
            raise RefusedError("expert_used_count")
        if self.architecture in ("qwen2moe", "qwen3moe"):
            size_of_expert = int(self.says("expert_feed_forward_length", 0)) or size // chosen
        else:
            needed = self.architecture == "glm4moe"
            size_of_expert = int(self.says("expert_feed_forward_length", None if needed else size))
            if self.architecture not in ("gpt-oss", "glm4moe") and size_of_expert != size:
                raise RefusedError("expert_feed_forward_length")
        numbers = self.linear(x, layer, "ffn_gate_inp", number)
        if self.architecture == "glm4moe":
            weights = 1 / (1 + np.exp(-numbers))
            scores = weights + self.tensor(f"blk.{layer}.exp_probs_b.bias", number)
        else:
            weights = np.exp(numbers - numbers.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            scores = weights
        wanted = np.argsort(-scores, axis=-1, kind="stable")[:, :chosen]
        weights = np.take_along_axis(weights, wanted, axis=-1)
        normed = self.architecture == "glm4moe" and self.says("expert_weights_norm", False)
        if normed or self.architecture in ("llama", "qwen3moe", "gpt-oss", "granitemoe"):
            weights /= weights.sum(-1, keepdims=True)
        if self.architecture == "glm4moe":
            weights = weights * self.factor("expert_weights_scale")
        out = np.zeros_like(x)
        for token, experts in enumerate(wanted):
            for expert, weight in zip(experts, weights[token], strict=True):
                row, sizes = x[token], (number, size_of_expert)
                gate, up = (self.expert(row, layer, part, expert, *sizes) for part in ("gate", "up"))
                if self.architecture == "gpt-oss":
                    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
                    gate = gate / (1 + np.exp(-1.702 * gate))
                else:
                    gate = gate / (1 + np.exp(-gate))
                down = self.expert(gate * up, layer, "down", expert, number, self.hidden_size)
                out[token] += weight * down
        if self.architecture == "glm4moe":
            return out + self.shared_expert(x, layer, size_of_expert * int(self.says("expert_shared_count")))
        if self.architecture == "granitemoe":
            size = int(self.says("expert_shared_feed_forward_length", 0))
            return out + self.shared_expert(x, layer, size) if size else out
        return out + self.shared_expert(x, layer, size) if self.architecture == "qwen2moe" else out

    def own_gating(self) -> int:
        return {"gpt-oss": 3, "glm4moe": 2}.get(self.architecture, 1)

    def expert(self, x: Array, layer: int, part: str, expert: int, number: int, size: int) -> Array:
        name = f"blk.{layer}.ffn_{part}_exps"
        y: Array = self.tensor(f"{name}.weight", number, size, len(x))[expert] @ x
        return y + self.tensor(f"{name}.bias", number, size)[expert] if self.architecture == "gpt-oss" else y

    def shared_expert(self, x: Array, layer: int, size: int) -> Array:
        if self.architecture == "qwen2moe":
            size = int(self.says("expert_shared_feed_forward_length", size))
        gate, up = (self.linear(x, layer, f"ffn_{part}_shexp", size) for part in ("gate", "up"))
        out = self.linear(gate / (1 + np.exp(-gate)) * up, layer, "ffn_down_shexp", self.hidden_size)
        if self.architecture != "qwen2moe":
            return out
        share = x @ self.tensor(f"blk.{layer}.ffn_gate_inp_shexp.weight", self.hidden_size)
        shared: Array = out / (1 + np.exp(-share))[:, None]
        return shared

    def attention(self, x: Array, layer: int) -> Array:
        heads, kv_heads, size, name = self.heads(layer), self.kv_heads(layer), self.head_size, f"blk.{layer}"
        sizes = [heads * size, kv_heads * size, kv_heads * size]
        if self.architecture == "phi3":
            parts = np.split(self.linear(x, layer, "attn_qkv", sum(sizes)), np.cumsum(sizes)[:2], axis=-1)
        else:
            parts = [self.linear(x, layer, f"attn_{p}", n) for p, n in zip("qkv", sizes, strict=True)]
        if self.architecture in ("olmo2", "olmoe"):
            parts[:2] = [
                self.norm(part, f"{name}.attn_{p}_norm") for part, p in zip(parts, "qk", strict=False)
            ]
        query, key, value = (part.reshape(len(x), -1, size) for part in parts)
        if self.architecture in ("qwen3", "gemma3", "qwen3moe", "exaone4"):
            query, key = self.norm(query, f"{name}.attn_q_norm"), self.norm(key, f"{name}.attn_k_norm")
        if self.architecture == "glm4moe" and f"{name}.attn_q_norm.weight" in self.all:
            query = self.norm(query, f"{name}.attn_q_norm")
        if self.architecture == "glm4moe" and f"{name}.attn_k_norm.weight" in self.all:
            key = self.norm(key, f"{name}.attn_k_norm")
        query, key = self.rotate(query, layer), self.rotate(key, layer)
        if self.architecture == "hunyuan-dense":
            query, key = self.norm(query, f"{name}.attn_q_norm"), self.norm(key, f"{name}.attn_k_norm")
        key, value = (np.repeat(part, heads // kv_heads, axis=1) for part in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) * self.scale()
        if self.architecture == "gemma2":
            cap = self.says("attn_logit_softcapping", 50.0)
            scores = np.tanh(scores / cap) * cap
        places = np.arange(len(x))
        hidden = places[None] > places[:, None]
        if window := self.window(layer):
            hidden |= places[None] <= places[:, None] - window
        scores = np.where(hidden, -np.inf, scores)
        highest, sinks = scores.max(-1, keepdims=True), 0.0
        if self.architecture == "gpt-oss":
            sink = self.tensor(f"{name}.attn_sinks.weight", heads)[:, None, None]
            sinks = np.exp(sink - highest)
        weights = np.exp(scores - highest)
        weights /= weights.sum(-1, keepdims=True) + sinks
        attended = np.einsum("hqk,khd->qhd", weights, value).reshape(len(x), -1)
        return self.linear(attended, layer, "attn_output", self.hidden_size)

    def scale(self) -> float:
        if (self.architecture, self.num_layers) in (("gemma2", 46), ("gemma3", 62)):
            return float((self.hidden_size // self.heads(0)) ** -0.5)
        if self.architecture in GRANITE and (scale := self.says("attention.scale", 0.0)):
            return float(scale)
        return float(self.head_size**-0.5)

    def window(self, layer: int) -> int:
        window = int(self.says("attention.sliding_window", 4096 if self.architecture == "gemma2" else 0))
        if self.architecture in PATTERNS and window:
            return window if self.slides(layer) else 0
        return window if self.architecture in ("llama", "phi3") else 0

    def slides(self, layer: int) -> bool:
        pattern = self.says("attention.sliding_window_pattern", PATTERNS[self.architecture])
        if isinstance(pattern, list):
            return bool(pattern[layer])
        return bool(pattern == 0 or layer % pattern < pattern - 1)

    def factors(self) -> Array:
        """Divisors of the frequencies."""
        count = self.rotated // 2
        if self.architecture in ("llama", "exaone4") and "rope_freqs.weight" in self.all:
            return self.tensor("rope_freqs.weight", count)
        if self.architecture == "phi3" and "rope_factors_short.weight" in self.all:
            if "rope_factors_long.weight" in self.all:
                self.tensor("rope_factors_long.weight", count)
            return self.tensor("rope_factors_short.weight", count)  # texts are short here
        return np.ones(count)

    def rotate(self, x: Array, layer: int) -> Array:
        """``x`` [tokens, heads, size]."""
        if self.architecture in GRANITE and not self.says("rope.scaling.finetuned", True):
            return x
        if self.architecture == "smollm3" and (layer + 1) % 4 == 0:
            return x
        windows = self.says("attention.sliding_window", 0) if self.architecture in NORMED_AFTER else 0
        slides = windows and self.slides(layer)
        if self.architecture == "exaone4" and windows and not slides:
            return x
        base, count = float(self.says("rope.freq_base", 10000.0)), self.rotated // 2
        kind = self.says("rope.scaling.type", "linear")
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise RefusedError(kind)
        factor = self.says("rope.scaling.factor", self.says("rope.scale_linear", 0.0)) or 1.0
        factor = 1.0 if kind == "none" else factor
        size = float(self.says("rope.scaling.attn_factor", 1.0))
        if self.architecture == "gemma3" and self.slides(layer):
            base, factor = float(self.says("rope.freq_base_swa", 10000.0)), 1.0
        elif self.architecture == "olmo2" and slides:
            kind, factor, size = "none", 1.0, 1.0
        elif self.architecture == "gemma2" and self.slides(layer):
            base = float(self.says("rope.freq_base_swa", base))
        frequencies = base ** (-np.arange(count) / count) / self.factors()
        if kind == "yarn":
            original = self.says("rope.scaling.original_context_length", self.says("context_length"))
            ends = [
                2 * count * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base))
                for beta in (32.0, 1.0)
            ]
            low, high = max(0, math.floor(ends[0])), min(2 * count - 1, math.ceil(ends[1]))
            ramp = 1 - np.clip((np.arange(count) - low) / max(0.001, high - low), 0, 1)
            frequencies = frequencies / factor * (1 - ramp) + frequencies * ramp
            size *= 1 + 0.1 * math.log(factor)
        else:
            frequencies = frequencies / factor
        angles = np.arange(len(x))[:, None, None] * frequencies
        cos, sin = np.cos(angles) * size, np.sin(angles) * size
        turned, rest = x[..., : 2 * count], x[..., 2 * count :]
        if self.architecture in NEIGHBOURS:
            a, b = turned[..., 0::2], turned[..., 1::2]
            pairs = np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(turned.shape)
        else:
            a, b = np.split(turned, 2, axis=-1)
            pairs = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
        return np.concatenate([pairs, rest], axis=-1)
