"""What llama.cpp computes from GGUF files of hybrid models, in numpy, token by token.

Like ``llama_cpp_graph``, it is written from definitions of architectures and shares nothing with the engine.
"""

from typing import Any

import numpy as np

from tests.llama_cpp_graph import Array, Graph, RefusedError

DELTA_NET = ("qwen35", "qwen3next")
NEMOTRON = ("nemotron_h", "nemotron_h_moe")
WITH_SIGMOID, SIGMOID = ("lfm2moe", "nemotron_h_moe"), 2


def silu(x: Array) -> Array:
    y: Array = x / (1 + np.exp(-x))
    return y


def sigmoid(x: Array) -> Array:
    y: Array = 1 / (1 + np.exp(-x))
    return y


class HybridGraph(Graph):
    def says_positive(self, key: str) -> int:
        value = int(self.says(key))
        if value < 1:
            raise RefusedError(key)
        return value

    def scale_of(self, key: str) -> float:
        return float(self.says(key, 0.0)) or 1.0

    def is_recurrent(self, layer: int) -> bool:
        if self.architecture not in DELTA_NET:
            return self.kv_heads(layer) == 0
        said = self.metadata.get(f"{self.architecture}.attention.recurrent_layers")
        if said is None:
            return bool((layer + 1) % self.says("full_attention_interval", 4))
        if len(said) != self.says("block_count"):
            raise RefusedError("attention.recurrent_layers")
        return bool(said[layer])

    def logits(self, ids: list[int]) -> Array:
        has_further = self.architecture in (*DELTA_NET, *NEMOTRON)
        further = int(self.says("nextn_predict_layers", 0)) if has_further else 0
        layers = self.num_layers - further
        if not 0 <= further < self.num_layers:
            raise RefusedError("nextn_predict_layers")
        table = self.all["token_embd.weight"].shape
        x = self.tensor("token_embd.weight", table[0], self.hidden_size)[ids]
        if self.architecture == "granitehybrid":
            x = x * self.scale_of("embedding_scale")
        for layer in range(layers):
            x = self.layer(x, layer)
        x = self.norm(x, "token_embd_norm" if self.architecture.startswith("lfm2") else "output_norm")
        head = "output.weight" if "output.weight" in self.all else "token_embd.weight"
        logits: Array = x @ self.tensor(head, *table).T
        if self.architecture == "granitehybrid":
            logits = logits / self.scale_of("logit_scale")
        if left := [name for name in self.left if not name.startswith(f"blk.{layers}.") or not further]:
            raise RefusedError(f"wrong number of tensors: {min(left)}")
        return logits

    def layer(self, x: Array, layer: int) -> Array:
        if self.architecture in NEMOTRON:
            return x + self.only_branch(self.norm(x, f"blk.{layer}.attn_norm"), layer)
        if self.architecture == "falcon-h1":
            inputs = self.norm(x, f"blk.{layer}.attn_norm")
            x = x + self.attention(inputs, layer) + self.mamba(inputs, layer)
            size = int(self.of_layer("feed_forward_length", layer))
            normed = self.norm(x, f"blk.{layer}.ffn_norm", "")
            return x + self.gated(normed, layer, "", size, ("gate", "up", "down"))
        name, is_granite = f"blk.{layer}", self.architecture == "granitehybrid"
        factor = self.scale_of("residual_scale") if is_granite else 1.0
        inputs = self.norm(x, f"{name}.attn_norm")
        x = x + factor * (self.recur if self.is_recurrent(layer) else self.attention)(inputs, layer)
        norm = "post_attention_norm" if self.architecture in DELTA_NET else "ffn_norm"
        return x + factor * self.mlp(self.norm(x, f"{name}.{norm}"), layer)

    def only_branch(self, x: Array, layer: int) -> Array:
        size = int(self.of_layer("feed_forward_length", layer))
        if not size:
            return (self.mamba if self.kv_heads(layer) == 0 else self.attention)(x, layer)
        if self.architecture == "nemotron_h_moe":
            return self.mixture(x, layer)
        return self.squared(x, layer, "", size, ("up", "down"))

    def squared(self, x: Array, layer: int, end: str, size: int, biases: tuple[str, ...] = ()) -> Array:
        """The squares of what is above zero; biases are optional."""
        for part, width in (("up", size), ("down", self.hidden_size)):
            x = self.linear(x, layer, f"ffn_{part}{end}", width) + self.bias(layer, part, width, biases)
            x = np.maximum(x, 0) ** 2 if part == "up" else x
        return x

    def mlp(self, x: Array, layer: int) -> Array:
        dense = self.says("leading_dense_block_count", 0) if self.architecture == "lfm2moe" else 0
        is_granite_dense = self.architecture == "granitehybrid" and not self.says("expert_count", 0)
        if self.architecture in ("lfm2", "qwen35") or is_granite_dense or layer < dense:
            return self.gated(x, layer, "", int(self.of_layer("feed_forward_length", layer)))
        return self.mixture(x, layer)

    def gated(self, x: Array, layer: int, end: str, size: int, biases: tuple[str, ...] = ()) -> Array:
        gate, up = (
            self.linear(x, layer, f"ffn_{part}{end}", size) + self.bias(layer, part, size, biases)
            for part in ("gate", "up")
        )
        down = self.linear(silu(gate) * up, layer, f"ffn_down{end}", self.hidden_size)
        return down + self.bias(layer, "down", self.hidden_size, biases)

    def bias(self, layer: int, part: str, size: int, optional: tuple[str, ...]) -> Array | float:
        name = f"blk.{layer}.ffn_{part}.bias"
        return self.tensor(name, size) if part in optional and name in self.all else 0.0

    def mixture(self, x: Array, layer: int) -> Array:
        """Experts, and one for all tokens."""
        number, chosen = self.says_positive("expert_count"), self.says_positive("expert_used_count")
        is_nemotron = self.architecture in NEMOTRON
        of_dense = int(self.of_layer("feed_forward_length", layer, 0))
        size = of_dense
        if self.architecture != "granitehybrid":
            size = int(self.says("expert_feed_forward_length", 0)) or of_dense // chosen
        is_sigmoid = self.architecture in WITH_SIGMOID
        # A file may say another way to score, and only the models' own is served.
        scoring = self.says("expert_gating_func", SIGMOID if is_sigmoid else 1)
        if chosen > number or scoring != (SIGMOID if is_sigmoid else 1):
            raise RefusedError("expert_gating_func")
        if self.architecture == "lfm2moe":
            self.says("expert_gating_func")
        scale = float(self.says("expert_weights_scale", 0.0)) or 1.0
        if (scale != 1 and not is_nemotron) or self.says("expert_group_count", 0) > 1:
            raise RefusedError("expert_weights_scale")
        scores = self.linear(x, layer, "ffn_gate_inp", number)
        scores = sigmoid(scores) if is_sigmoid else np.exp(scores - scores.max(-1, keepdims=True))
        wanted = scores + self.tensor(f"blk.{layer}.exp_probs_b.bias", number) if is_sigmoid else scores
        order = np.argsort(-wanted, axis=-1, kind="stable")[:, :chosen]
        out = np.zeros_like(x)
        for token, experts in enumerate(order):
            weights = scores[token, experts]
            if not is_nemotron or self.says("expert_weights_norm", False):
                weights = weights / weights.sum()
            for expert, weight in zip(experts, weights, strict=True):
                row, sizes = x[token], (number, size)
                inner = self.expert(row, layer, "up", expert, *sizes)
                if is_nemotron:
                    inner = np.maximum(inner, 0) ** 2
                else:
                    inner = silu(self.expert(row, layer, "gate", expert, *sizes)) * inner
                down = self.expert(inner, layer, "down", expert, number, self.hidden_size)
                out[token] += scale * weight * down
        if self.architecture == "lfm2moe":
            return out
        if is_nemotron:
            return out + self.squared(x, layer, "_shexp", int(self.says("expert_shared_feed_forward_length")))
        of_shared = int(self.says("expert_shared_feed_forward_length", of_dense))
        shared = self.gated(x, layer, "_shexp", of_shared)
        if self.architecture == "granitehybrid":
            return out + shared
        share = x @ self.tensor(f"blk.{layer}.ffn_gate_inp_shexp.weight", self.hidden_size)
        return out + shared * sigmoid(share)[:, None]

    def recur(self, x: Array, layer: int) -> Array:
        if self.architecture.startswith("lfm2"):
            return self.short_conv(x, layer)
        return self.delta_net(x, layer) if self.architecture in DELTA_NET else self.mamba(x, layer)

    def convolved(self, x: Array, name: str, width: int) -> Array:
        weight = self.tensor(name, x.shape[1], width)
        padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
        return np.stack([(padded[at : at + width].T * weight).sum(1) for at in range(len(x))])

    def short_conv(self, x: Array, layer: int) -> Array:
        size, name = self.hidden_size, f"blk.{layer}.shortconv"
        b, c, inner = np.split(self.linear(x, layer, "shortconv.in_proj", 3 * size), 3, axis=-1)
        width = self.says_positive("shortconv.l_cache")
        mixed = c * self.convolved(b * inner, f"{name}.conv.weight", width)
        return self.linear(mixed, layer, "shortconv.out_proj", size)

    def delta_net(self, x: Array, layer: int) -> Array:
        size, keys, heads = (
            self.says_positive(f"ssm.{key}") for key in ("state_size", "group_count", "time_step_rank")
        )
        if heads * size != self.says("ssm.inner_size") or heads % keys:
            raise RefusedError("ssm.inner_size")
        name, wide = f"blk.{layer}", (2 * keys + heads) * size
        mixed = self.linear(x, layer, "attn_qkv", wide)
        mixed = silu(
            self.convolved(mixed, f"{name}.ssm_conv1d.weight", self.says_positive("ssm.conv_kernel"))
        )
        query, key, value = (
            part.reshape(len(x), -1, size) for part in np.split(mixed, [keys * size, 2 * keys * size], axis=1)
        )
        query, key = (each / np.sqrt((each**2).sum(-1, keepdims=True) + 1e-6) for each in (query, key))
        z = self.linear(x, layer, "attn_gate", heads * size)
        is_tiled = self.architecture == "qwen35"
        if is_tiled:
            b, a = (self.linear(x, layer, f"ssm_{part}", heads) for part in ("beta", "alpha"))
        else:
            both = self.linear(x, layer, "ssm_ba", 2 * heads).reshape(len(x), keys, 2, -1)
            b, a = (both[:, :, part].reshape(len(x), heads) for part in (0, 1))
        beta = sigmoid(b)
        step = np.log1p(np.exp(a + self.tensor(f"{name}.ssm_dt.bias", heads)))
        decay = np.exp(step * self.tensor(f"{name}.ssm_a", heads))
        state, out = np.zeros((heads, size, size)), np.zeros((len(x), heads, size))
        for token in range(len(x)):
            for head in range(heads):
                own = head % keys if is_tiled else head // (heads // keys)
                k, q = key[token, own], query[token, own] * size**-0.5
                state[head] *= decay[token, head]
                state[head] += np.outer(k, beta[token, head] * (value[token, head] - k @ state[head]))
                out[token, head] = q @ state[head]
        out = self.norm(out, f"{name}.ssm_norm").reshape(len(x), -1)
        return self.linear(out * silu(z), layer, "ssm_out", self.hidden_size)

    def mamba(self, x: Array, layer: int) -> Array:
        size, groups, heads, inner = (
            self.says_positive(f"ssm.{key}")
            for key in ("state_size", "group_count", "time_step_rank", "inner_size")
        )
        is_other = self.architecture == "granitehybrid" and inner != 2 * self.hidden_size
        if is_other or inner % heads or heads % groups:
            raise RefusedError("ssm.inner_size")
        name, of_groups = f"blk.{layer}", groups * size
        mixed = self.linear(x, layer, "ssm_in", 2 * inner + 2 * of_groups + heads)
        z, mixed, step = np.split(mixed, [inner, 2 * inner + 2 * of_groups], axis=1)
        width = self.says_positive("ssm.conv_kernel")
        mixed = self.convolved(mixed, f"{name}.ssm_conv1d.weight", width)
        if f"{name}.ssm_conv1d.bias" in self.all:
            mixed = mixed + self.tensor(f"{name}.ssm_conv1d.bias", inner + 2 * of_groups)
        mixed = silu(mixed)
        value, b, c = np.split(mixed, [inner, inner + of_groups], axis=1)
        value = value.reshape(len(x), heads, -1)
        b, c = (np.repeat(each.reshape(len(x), groups, size), heads // groups, axis=1) for each in (b, c))
        step = np.log1p(np.exp(step + self.tensor(f"{name}.ssm_dt.bias", heads)))
        decay = np.exp(step * self.tensor(f"{name}.ssm_a", heads, 1)[:, 0])
        skip = self.tensor(f"{name}.ssm_d", heads, 1)
        state, out = np.zeros((heads, inner // heads, size)), np.zeros_like(value)
        for token in range(len(x)):
            added = step[token][:, None, None] * value[token][:, :, None] * b[token][:, None]
            state = decay[token][:, None, None] * state + added
            out[token] = (state * c[token][:, None]).sum(-1) + skip * value[token]
        gated = (out.reshape(len(x), -1) * silu(z)).reshape(len(x), groups, -1)
        if self.architecture == "falcon-h1" and f"{name}.ssm_norm.weight" not in self.all:
            return self.linear(gated.reshape(len(x), -1), layer, "ssm_out", self.hidden_size)
        gated = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + self.epsilon())
        normed = gated * self.tensor(f"{name}.ssm_norm.weight", groups, inner // groups)
        return self.linear(normed.reshape(len(x), -1), layer, "ssm_out", self.hidden_size)

    def attention(self, x: Array, layer: int) -> Array:
        heads, kv_heads, size, name = self.heads(layer), self.kv_heads(layer), self.head_size, f"blk.{layer}"
        is_gated, gate = self.architecture in DELTA_NET, None
        query = self.linear(x, layer, "attn_q", heads * size * (1 + is_gated)).reshape(len(x), heads, -1)
        key, value = (
            self.linear(x, layer, f"attn_{part}", kv_heads * size).reshape(len(x), -1, size) for part in "kv"
        )
        if is_gated:
            query, gate = query[..., :size], query[..., size:].reshape(len(x), -1)
        if self.architecture in (*DELTA_NET, "lfm2", "lfm2moe"):
            query, key = self.norm(query, f"{name}.attn_q_norm"), self.norm(key, f"{name}.attn_k_norm")
        is_turned = self.architecture != "granitehybrid" or self.says("rope.scaling.finetuned", True)
        if is_turned and self.architecture not in NEMOTRON:
            query, key = self.rotate(query, layer), self.rotate(key, layer)
        key, value = (np.repeat(part, heads // kv_heads, axis=1) for part in (key, value))
        scale = self.says("attention.scale", 0.0) if self.architecture == "granitehybrid" else 0.0
        scores = np.einsum("qhd,khd->hqk", query, key) * (scale or size**-0.5)
        places = np.arange(len(x))
        scores = np.where(places[None] > places[:, None], -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", weights, value).reshape(len(x), -1)
        if gate is not None:
            attended = attended * sigmoid(gate)
        return self.linear(attended, layer, "attn_output", self.hidden_size)

    def rotate(self, x: Array, layer: int) -> Array:
        if self.architecture == "qwen35":
            sections: Any = self.says("rope.dimension_sections")
            if any(pair >= 3 * sections[pair % 3] for pair in range(self.rotated // 2)):
                raise RefusedError("rope.dimension_sections")  # the fourth one's positions are no text's
        return super().rotate(x, layer)
