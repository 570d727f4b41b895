"""What llama.cpp computes from a file of ``deepseek2``: keys and values of each head, as in the paper."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.llama_cpp_graph import Array, Graph, RefusedError

SIGMOID = 2


class LatentGraph(Graph):
    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        self.architecture = "deepseek2"
        self.metadata, self.left, self.all = metadata, dict(tensors), tensors
        self.hidden_size, self.num_layers = self.says("embedding_length"), self.says("block_count")
        self.further = int(self.says("nextn_predict_layers", 0))
        self.rotated = int(self.says("rope.dimension_count"))
        self.rank = int(self.says("attention.kv_lora_rank"))
        self.key_size = int(self.says("attention.key_length_mla"))
        self.value_size = int(self.says("attention.value_length_mla"))
        latents = self.says("attention.key_length"), self.says("attention.value_length")
        if latents != (self.rank + self.rotated, self.rank) or self.rotated % 2:
            raise RefusedError("attention.key_length")

    def layer(self, x: Array, layer: int) -> Array:
        x = x + self.attention(self.norm(x, f"blk.{layer}.attn_norm"), layer)
        inputs = self.norm(x, f"blk.{layer}.ffn_norm")
        if layer >= self.says("leading_dense_block_count", 0):
            return x + self.experts(inputs, layer, 0)
        size = int(self.says("feed_forward_length"))
        gate, up = (self.linear(inputs, layer, part, size) for part in ("ffn_gate", "ffn_up"))
        return x + self.linear(gate / (1 + np.exp(-gate)) * up, layer, "ffn_down", self.hidden_size)

    def attention(self, x: Array, layer: int) -> Array:
        heads, others, name = self.heads(layer), self.key_size - self.rotated, f"blk.{layer}"
        low = self.linear(x, layer, "attn_q_a", int(self.says("attention.q_lora_rank")))
        low = self.norm(low, f"{name}.attn_q_a_norm")
        query = self.linear(low, layer, "attn_q_b", heads * self.key_size).reshape(len(x), heads, -1)
        low = self.linear(x, layer, "attn_kv_a_mqa", self.rank + self.rotated)
        latent, turned = self.norm(low[:, : self.rank], f"{name}.attn_kv_a_norm"), low[:, None, self.rank :]
        of_keys = self.tensor(f"{name}.attn_k_b.weight", heads, self.rank, others)
        of_values = self.tensor(f"{name}.attn_v_b.weight", heads, self.value_size, self.rank)
        key = np.einsum("kr,hrn->khn", latent, of_keys)
        value = np.einsum("kr,hvr->khv", latent, of_values)
        scores = np.einsum("qhn,khn->hqk", query[..., :others], key)
        own, shared = self.rotate(query[..., others:], layer), self.rotate(turned, layer)[:, 0]
        scores = (scores + np.einsum("qht,kt->hqk", own, shared)) * self.scale()
        places = np.arange(len(x))
        scores = np.where(places[None] > places[:, None], -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khv->qhv", weights, value).reshape(len(x), -1)
        return self.linear(attended, layer, "attn_output", self.hidden_size)

    def stretch(self) -> float:
        is_yarn = self.says("rope.scaling.type", "none") == "yarn"
        return float(self.says("rope.scaling.factor", 1.0)) if is_yarn else 1.0

    def scale(self) -> float:
        share = float(self.says("rope.scaling.yarn_log_multiplier", 0.0))
        return float((1 + share * math.log(self.stretch())) ** 2 * self.key_size**-0.5)

    def rotate(self, x: Array, layer: int) -> Array:
        """Turns neighbours; the size of YaRN's angles is one with the logarithm's multiplier."""
        base, count = float(self.says("rope.freq_base", 10000.0)), self.rotated // 2
        frequencies = base ** (-np.arange(count) / count)
        if (factor := self.stretch()) != 1:
            original = self.says("rope.scaling.original_context_length", self.says("context_length"))
            ends = [count * math.log(original / (beta * 2 * math.pi)) / math.log(base) for beta in (32, 1)]
            low, high = max(0, math.floor(ends[0])), min(2 * count - 1, math.ceil(ends[1]))
            ramp = 1 - np.clip((np.arange(count) - low) / max(0.001, high - low), 0, 1)
            frequencies = frequencies / factor * (1 - ramp) + frequencies * ramp
        angles = np.arange(len(x))[:, None, None] * frequencies
        a, b = x[..., 0::2], x[..., 1::2]
        pairs = a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)
        return np.stack(pairs, axis=-1).reshape(x.shape)

    def experts(self, x: Array, layer: int, size: int) -> Array:
        number, chosen = int(self.says("expert_count")), int(self.says("expert_used_count"))
        size = int(self.says("expert_feed_forward_length"))
        groups, used = int(self.says("expert_group_count", 1)), int(self.says("expert_group_used_count", 1))
        if not 0 < chosen <= number or self.says("expert_gating_func", 0) != SIGMOID or number % groups:
            raise RefusedError("expert_used_count")
        weights = 1 / (1 + np.exp(-self.linear(x, layer, "ffn_gate_inp", number)))
        scores = weights + self.tensor(f"blk.{layer}.exp_probs_b.bias", number)
        if groups > 1:
            parts = scores.reshape(len(x), groups, -1)
            order = np.argsort(-np.sort(parts, axis=-1)[..., -2:].sum(-1), axis=-1, kind="stable")
            for token in range(len(x)):
                parts[token, order[token, used:]] = -np.inf
        wanted = np.argsort(-scores, axis=-1, kind="stable")[:, :chosen]
        weights = np.take_along_axis(weights, wanted, axis=-1)
        if self.says("expert_weights_norm", False):
            weights /= weights.sum(-1, keepdims=True)
        weights = weights * self.factor("expert_weights_scale")
        out = np.zeros_like(x)
        for token, experts in enumerate(wanted):
            for expert, weight in zip(experts, weights[token], strict=True):
                row, sizes = x[token], (number, size)
                gate, up = (self.expert(row, layer, part, expert, *sizes) for part in ("gate", "up"))
                gated = gate / (1 + np.exp(-gate)) * up
                out[token] += weight * self.expert(gated, layer, "down", expert, number, self.hidden_size)
        return out + self.shared_expert(x, layer, size * int(self.says("expert_shared_count")))
