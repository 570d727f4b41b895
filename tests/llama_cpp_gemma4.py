"""What llama.cpp computes from a GGUF file of Gemma 4, in numpy, by the file's own names and keys alone."""

import math
from typing import Any

import numpy as np

from tests.llama_cpp_graph import Array, Graph, RefusedError


class Gemma4Graph(Graph):
    def logits(self, ids: list[int]) -> Array:
        vocab_size = len(self.all["token_embd.weight"])
        self.stored: dict[int, tuple[Array, Array]] = {}
        self.inputs = int(self.says("embedding_length_per_layer_input"))
        self.storing = self.num_layers - int(self.says("attention.shared_kv_layers", 0))
        pattern = self.says("attention.sliding_window_pattern")
        if self.storing < 2 or not isinstance(pattern, list) or len(pattern) != self.num_layers:
            raise RefusedError("attention.sliding_window_pattern")
        if self.says("attention.sliding_window") < 1:
            raise RefusedError("attention.sliding_window")
        for end in ("", "_swa"):
            if self.says(f"attention.key_length{end}") != self.says(f"attention.value_length{end}"):
                raise RefusedError(f"attention.value_length{end}")
        x = self.tensor("token_embd.weight", vocab_size, self.hidden_size)[ids] * math.sqrt(self.hidden_size)
        given = self.numbers(x, ids, vocab_size) if self.inputs else None
        for layer in range(self.num_layers):
            x = self.block(x, layer, None if given is None else given[:, layer])
        x = self.norm(x, "output_norm")
        head = "output.weight" if "output.weight" in self.all else "token_embd.weight"
        logits = x @ self.tensor(head, vocab_size, self.hidden_size).T
        if cap := float(self.says("final_logit_softcapping", 30.0)):
            logits = np.tanh(logits / cap) * cap
        self.unused()
        if self.left:
            raise RefusedError(f"wrong number of tensors: {min(self.left)}")
        return logits

    def numbers(self, x: Array, ids: list[int], vocab_size: int) -> Array:
        """Returns [token, layer, number]."""
        columns = self.inputs * self.num_layers
        table = self.tensor("per_layer_token_embd.weight", vocab_size, columns)
        projection = self.tensor("per_layer_model_proj.weight", columns, self.hidden_size)
        shape = len(ids), self.num_layers, self.inputs
        projected = (x @ projection.T / math.sqrt(self.hidden_size)).reshape(shape)
        normed = self.norm(projected, "per_layer_proj_norm")
        return (normed + table[ids].reshape(shape) * math.sqrt(self.inputs)) / math.sqrt(2)

    def block(self, x: Array, layer: int, given: Array | None) -> Array:
        name = f"blk.{layer}"
        attended = self.attend(self.norm(x, f"{name}.attn_norm"), layer)
        x = x + self.norm(attended, f"{name}.post_attention_norm")
        size = int(self.of_layer("feed_forward_length", layer))
        inner = self.norm(x, f"{name}.ffn_norm")
        gated = gelu(self.linear(inner, layer, "ffn_gate", size)) * self.linear(inner, layer, "ffn_up", size)
        out = self.linear(gated, layer, "ffn_down", self.hidden_size)
        if f"{name}.ffn_gate_inp.weight" in self.all:
            out = self.norm(out, f"{name}.post_ffw_norm_1")
            out = out + self.norm(self.mixture(x, layer), f"{name}.post_ffw_norm_2")
        x = x + self.norm(out, f"{name}.post_ffw_norm")
        if given is not None:
            gate = gelu(self.linear(x, layer, "inp_gate", self.inputs))
            x = x + self.norm(self.linear(gate * given, layer, "proj", self.hidden_size), f"{name}.post_norm")
        scale = f"{name}.layer_output_scale.weight"
        return x * self.tensor(scale, 1) if scale in self.all else x

    def mixture(self, x: Array, layer: int) -> Array:
        name, number = f"blk.{layer}", int(self.says("expert_count"))
        chosen, size = int(self.says("expert_used_count")), int(self.says("expert_feed_forward_length"))
        if not 0 < chosen <= number or self.says("expert_gating_func", 0) not in (0, 1):
            raise RefusedError("expert_used_count")
        routed = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.epsilon()) / math.sqrt(self.hidden_size)
        routed = routed * self.tensor(f"{name}.ffn_gate_inp.scale", self.hidden_size)
        scores = self.linear(routed, layer, "ffn_gate_inp", number)
        inner = self.norm(x, f"{name}.pre_ffw_norm_2")
        gate_up = self.tensor(f"{name}.ffn_gate_up_exps.weight", number, 2 * size, self.hidden_size)
        down = self.tensor(f"{name}.ffn_down_exps.weight", number, self.hidden_size, size)
        scale = f"{name}.ffn_down_exps.scale"
        factors = self.tensor(scale, number) if scale in self.all else np.ones(number)
        out = np.zeros_like(x)
        for token, row in enumerate(scores):
            best = np.argsort(-row, kind="stable")[:chosen]
            weights = np.exp(row[best] - row[best].max())
            for expert, weight in zip(best, weights / weights.sum(), strict=True):
                gate, up = np.split(gate_up[expert] @ inner[token], 2)
                out[token] += weight * factors[expert] * (down[expert] @ (gelu(gate) * up))
        return out

    def attend(self, x: Array, layer: int) -> Array:
        slides = bool(self.says("attention.sliding_window_pattern")[layer])
        size = int(self.says("attention.key_length_swa" if slides else "attention.key_length"))
        heads, kv_heads, name = self.heads(layer), self.kv_heads(layer), f"blk.{layer}"
        query = self.linear(x, layer, "attn_q", heads * size).reshape(len(x), heads, size)
        query = self.turned(self.norm(query, f"{name}.attn_q_norm"), slides)
        if layer < self.storing:
            key = self.linear(x, layer, "attn_k", kv_heads * size)
            has_values = f"{name}.attn_v.weight" in self.all
            value = self.linear(x, layer, "attn_v", kv_heads * size) if has_values else key
            key, value = (part.reshape(len(x), kv_heads, size) for part in (key, value))
            value = value / np.sqrt((value**2).mean(-1, keepdims=True) + self.epsilon())
            self.stored[layer] = self.turned(self.norm(key, f"{name}.attn_k_norm"), slides), value
        key, value = self.stored[layer if layer < self.storing else self.storing - (2 if slides else 1)]
        key, value = (np.repeat(part, heads // kv_heads, axis=1) for part in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key)
        places = np.arange(len(x))
        hidden = places[None] > places[:, None]
        if slides:
            hidden |= places[None] <= places[:, None] - int(self.says("attention.sliding_window"))
        weights = np.exp(np.where(hidden, -np.inf, scores) - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", weights, value).reshape(len(x), -1)
        return self.linear(attended, layer, "attn_output", self.hidden_size)

    def turned(self, x: Array, slides: bool) -> Array:
        """``x`` [tokens, heads, size], of which the first numbers are turned by angles."""
        full = int(self.says("rope.dimension_count", self.says("attention.key_length")))
        count = int(self.says("rope.dimension_count_swa", full)) if slides else full
        base = float(self.says("rope.freq_base", 10000.0))
        if slides:
            base = float(self.says("rope.freq_base_swa", base))
        frequencies = base ** (-np.arange(count // 2) / (count // 2))
        if (
            self.says("rope.scaling.factor", 1.0) != 1.0
            and self.says("rope.scaling.type", "linear") != "none"
        ):
            raise RefusedError("rope.scaling.factor")  # which is left out here
        if not slides:
            frequencies = frequencies / self.tensor("rope_freqs.weight", x.shape[-1] // 2)
        angles = np.arange(len(x))[:, None, None] * frequencies
        a, b = np.split(x[..., :count], 2, axis=-1)
        pairs = [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)]
        return np.concatenate([*pairs, x[..., count:]], axis=-1)

    def unused(self) -> None:
        """Takes what layers may have that read others' keys and values."""
        for layer in range(self.storing, self.num_layers):
            slides = bool(self.says("attention.sliding_window_pattern")[layer])
            size = int(self.says("attention.key_length_swa" if slides else "attention.key_length"))
            rows = self.kv_heads(layer) * size
            shapes: dict[str, Any] = {f"attn_{part}": (rows, self.hidden_size) for part in "kv"}
            for name, shape in (shapes | {"attn_k_norm": (size,)}).items():
                if (stored := f"blk.{layer}.{name}.weight") in self.all:
                    self.tensor(stored, *shape)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
