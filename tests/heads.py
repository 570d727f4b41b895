"""EAGLE-3 heads with random or fitted weights, and a naive one that computes whole texts anew."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Says what a head is like. ``inputs`` are the layers of the target whose inputs it reads; ``has_parts``
    says which layout it is saved in."""

    hidden: int
    vocab_size: int
    drafted: tuple[int, ...] | None = None  # ids of the target's that it drafts; None: all
    inputs: tuple[int, ...] = (2, 3, 4)
    has_parts: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    has_embeddings: bool = False
    kind: str = "llama"

    @property
    def num_drafted(self) -> int:
        return self.vocab_size if self.drafted is None else len(self.drafted)


@dataclass(frozen=True)
class NaiveHead:
    """Computes a head by its definition, in float32. Tensors are named as in the layout in parts."""

    shape: Shape
    tensors: dict[str, torch.Tensor]
    embeddings: torch.Tensor

    def draft(self, token_ids: Sequence[int], states: Sequence[torch.Tensor], num_tokens: int) -> list[int]:
        """Returns the most likely drafts after a text, whose target has given ``states`` [layers + 1]
        [tokens, hidden] of all tokens but the last: the embeddings, and each layer's output."""
        ids, drafts = list(token_ids[1:]), []
        features = self._features(torch.stack([states[layer] for layer in self.shape.inputs], 1))
        for _ in range(num_tokens):
            logits, output = self._step(ids, features)
            drafts.append(self.target_id(int(logits.argmax())))
            ids.append(drafts[-1])
            features = torch.cat((features, output[None]))
        return drafts

    def target_id(self, drafted: int) -> int:
        return drafted if self.shape.drafted is None else self.shape.drafted[drafted]

    def normed_output(self, token_ids: Sequence[int], states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns what the output layer gets, for each token but the first."""
        features = self._features(torch.stack([states[layer] for layer in self.shape.inputs], 1))
        return self._norm("norm", self._layer(list(token_ids[1:]), features))

    def _features(self, hidden: torch.Tensor) -> torch.Tensor:
        joined = hidden.flatten(1)
        if self.shape.norm_before_fc:
            joined = self._norm("input_norm", joined)
        if self.shape.fc_norm:
            parts = joined.chunk(hidden.shape[1], 1)
            joined = torch.cat([self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], 1)
        return joined @ self.tensors["fc.weight"].T

    def _step(self, ids: list[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self._layer(ids, features)[-1]
        normed = self._norm("norm", output)
        return self.tensors["lm_head.weight"] @ normed, normed if self.shape.norm_output else output

    def _layer(self, ids: list[int], features: torch.Tensor) -> torch.Tensor:
        embedded = self.embeddings[torch.tensor(ids)]
        normed = self._norm("layers.0.hidden_norm", features)
        x = torch.cat((self._norm("layers.0.input_layernorm", embedded), normed), 1)
        hidden = (normed if self.shape.norm_before_residual else features) + self._attend(x)
        y = self._norm("layers.0.post_attention_layernorm", hidden)
        gate, up, down = (self.tensors[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return hidden + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        size = self.shape.hidden // 4
        q, k, v = (
            (x @ self.tensors[f"layers.0.self_attn.{name}_proj.weight"].T)
            .view(len(x), -1, size)
            .transpose(0, 1)
            for name in "qkv"
        )
        if self.shape.kind == "qwen3":
            q, k = (
                self._norm(f"layers.0.self_attn.{name}_norm", each) for name, each in (("q", q), ("k", k))
            )
        q, k = self._turn(q), self._turn(k)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        return out.transpose(0, 1).reshape(len(x), -1) @ self.tensors["layers.0.self_attn.o_proj.weight"].T

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] / 10000 ** (torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.tensors[f"{name}.weight"], EPS)


def random_head(shape: Shape, target: str, seed: int = 5) -> NaiveHead:
    """Makes a head whose weights are large enough that its guesses depend on all of its inputs."""
    generator = torch.Generator().manual_seed(seed)
    size, features = shape.hidden, shape.hidden * len(shape.inputs)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(length: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(length, generator=generator)

    attention, layer = "layers.0.self_attn.", "layers.0."
    tensors = {
        "fc.weight": matrix(size, features),
        "norm.weight": norm(size),
        "lm_head.weight": 4 * matrix(shape.num_drafted, size),
        f"{attention}q_proj.weight": 2 * matrix(size, 2 * size),
        f"{attention}k_proj.weight": 2 * matrix(size // 2, 2 * size),
        f"{attention}v_proj.weight": matrix(size // 2, 2 * size),
        f"{attention}o_proj.weight": matrix(size, size),
        f"{layer}mlp.gate_proj.weight": matrix(2 * size, size),
        f"{layer}mlp.up_proj.weight": matrix(2 * size, size),
        f"{layer}mlp.down_proj.weight": matrix(size, 2 * size),
        **{
            f"{layer}{name}.weight": norm(size)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
    }
    if shape.kind == "qwen3":
        tensors |= {f"{attention}{name}_norm.weight": norm(size // 4) for name in "qk"}
    if shape.norm_before_fc:
        tensors["input_norm.weight"] = norm(features)
    if shape.fc_norm:
        tensors |= {f"fc_norm.{index}.weight": norm(size) for index in range(len(shape.inputs))}
    if shape.drafted is not None:
        ids, is_drafted = torch.tensor(shape.drafted), torch.zeros(shape.vocab_size, dtype=torch.bool)
        is_drafted[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}
    embeddings = _model(target).get_input_embeddings().weight.detach()
    if shape.has_embeddings:
        embeddings = tensors["embed_tokens.weight"] = matrix(shape.vocab_size, size)
    return NaiveHead(shape, tensors, embeddings)


@cache
def _model(target: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


def target_states(target: str, token_ids: Sequence[int]) -> list[torch.Tensor]:
    """Returns the embeddings and each layer's output, from transformers; the last one's is normed."""
    with torch.no_grad():
        found = _model(target)(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
    return [states[0] for states in found]


def fitted(head: NaiveHead, target: str, texts: Sequence[Sequence[int]]) -> NaiveHead:
    """Fits the output layer by least squares, so that the head guesses these texts' next tokens but one."""
    inputs, wanted = [], []
    ids = head.shape.drafted or tuple(range(head.shape.vocab_size))
    for text in texts:
        rows = head.normed_output(text[:-1], target_states(target, text[:-2]))
        inputs.append(rows)
        wanted += text[2:]
    x = torch.cat(inputs)
    y = torch.stack([torch.tensor(ids) == token for token in wanted]).float()
    kernel = x @ x.T + 1e-3 * torch.eye(len(x))
    weight = 20 * (x.T @ torch.linalg.solve(kernel, y)).T.contiguous()
    return replace(head, tensors=head.tensors | {"lm_head.weight": weight})


def save_head(folder: Path, head: NaiveHead, **changes: Any) -> str:
    """Saves it in its layout; ``changes`` are made to the config."""
    shape = head.shape
    folder.mkdir(parents=True)
    tensors = head.tensors
    if not shape.has_parts:
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head_config(shape) | changes))
    return str(folder)


def head_config(shape: Shape) -> dict[str, Any]:
    layer = {
        "model_type": shape.kind,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": shape.hidden // 4,
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
    }
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    options = {name: getattr(shape, name) for name in names}
    options["draft_vocab_size"] = shape.num_drafted
    if shape.has_parts:
        options["eagle_aux_hidden_state_layer_ids"] = list(shape.inputs)
        kinds = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        return {**kinds, **options, "transformer_layer_config": layer}
    # This layout counts outputs.
    ids = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in shape.inputs]}
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **options, "eagle_config": ids}
