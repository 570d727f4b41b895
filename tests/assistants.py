"""Random pairs of a Gemma 4 and an assistant, and what transformers drafts with them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from tests.engine.test_gguf_gemma4 import stored_name
from tests.families import GEMMA4, GEMMA4_E, GEMMA4_MOE, SHAPE, STD, save_random
from tests.gguf_models import add_key, finish

SLIDING, FULL = KINDS = "sliding_attention", "full_attention"
HIDDEN = 64


@dataclass(frozen=True)
class Shape:
    """Says what a pair is like. ``clusters`` are their number, and how many of them are looked at."""

    target: dict[str, Any]
    layer_types: tuple[str, ...] = (SLIDING, SLIDING, FULL)
    clusters: tuple[int, int] | None = None
    hidden: int = HIDDEN


SHAPES = {
    "two sizes of heads": Shape(GEMMA4 | {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2}),
    "layers that read, and clusters": Shape(GEMMA4_E, (SLIDING, FULL, FULL), (12, 3)),
    "experts, and keys that are values": Shape(GEMMA4_MOE, (FULL, SLIDING, FULL), hidden=32),
    "layers without a window, and one cluster": Shape(
        GEMMA4 | {"num_key_value_heads": 1}, (FULL,), (6, 1), hidden=32
    ),
}


@contextmanager
def modules_of_assistants() -> Iterator[None]:
    """Lets transformers make modules of assistants, and of their targets.

    transformers 5.23 says that a model all of whose layers read keys is none, and lets no target whose layers
    all store keys give them away; what its modules then compute is right.
    """

    def modes(config: Any) -> list[str | None]:
        reading = config.num_kv_shared_layers
        storing = config.layer_types[: config.num_hidden_layers - reading]
        found: list[str | None] = [None] * len(storing) + ["reuse"] * reading
        for kind in set(storing):
            found[max(layer for layer, each in enumerate(storing) if each == kind)] = "store"
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))
        yield


@dataclass(frozen=True)
class Pair:
    """Is saved in two folders."""

    target: str
    path: str

    @cached_property
    def modules(self) -> tuple[Any, Any]:
        with modules_of_assistants():
            target, assistant = (
                AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32),
                Gemma4AssistantForCausalLM.from_pretrained(self.path, dtype=torch.float32),
            )
        return target.eval(), assistant.eval()

    @torch.no_grad()
    def draft(self, text: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
        """Returns transformers' drafts after ``text``, whose last token is pending, and their logits
        [drafts, vocab].

        Of layers with a window it is given what the target would see at the pending token's position, which
        is two tokens less than transformers' mask lets it see where there are more.
        """
        target, assistant = self.modules
        output = target(torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        window = target.config.sliding_window
        shared = {
            kind: tuple(each[:, :, 1 - window :] if kind == SLIDING else each for each in states)
            for kind, states in output.shared_kv_states.items()
        }
        assistant.generation_config.num_assistant_tokens = num_tokens
        generator = SinglePositionMultiTokenCandidateGenerator(
            assistant, target.get_input_embeddings(), GenerationConfig(max_length=1 << 16)
        )
        ids, logits = generator.get_candidates(
            torch.tensor([list(text)]),
            {},
            SimpleNamespace(hidden_states=output.hidden_states, shared_kv_states=shared),
            is_first_iteration=False,
            n_last_matches=0,
        )
        assert logits is not None
        return ids[0, len(text) :].tolist(), logits[0]


def save_pair(root: Path, shape: Shape, seed: int = 1, **changes: Any) -> Pair:
    """Saves a random pair; ``changes`` are made to the target's config."""
    target = save_target(root / "target", shape, seed, **changes)
    save_assistant(root / "assistant", target, shape, seed)
    return Pair(target, str(root / "assistant"))


def save_target(folder: Path, shape: Shape, seed: int = 1, **changes: Any) -> str:
    return save_random(folder, "gemma4_text", SHAPE | shape.target | changes, seed)


def save_assistant(folder: Path, target: str, shape: Shape, seed: int = 1, inner: int = 48) -> None:
    of_target = Gemma4TextConfig.from_pretrained(target)
    sliding, full = (
        of_target.per_layer_config[of_target.layer_types.index(kind)] for kind in (SLIDING, FULL)
    )
    text = Gemma4TextConfig(
        vocab_size=of_target.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=inner,
        num_hidden_layers=len(shape.layer_types),
        layer_types=list(shape.layer_types),
        num_attention_heads=4,
        num_key_value_heads=sliding.num_key_value_heads,
        head_dim=sliding.head_dim,
        per_layer_config={
            layer: {"head_dim": full.head_dim, "num_key_value_heads": full.num_key_value_heads}
            for layer, kind in enumerate(shape.layer_types)
            if kind == FULL
        },
        sliding_window=of_target.sliding_window,
        max_position_embeddings=of_target.max_position_embeddings,
        rope_parameters=of_target.rope_parameters,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        initializer_range=STD,
    )
    num_clusters, chosen = shape.clusters or (1, 1)
    torch.manual_seed(seed + 100)
    with modules_of_assistants():
        module = Gemma4AssistantForCausalLM(
            Gemma4AssistantConfig(
                text_config=text,
                backbone_hidden_size=of_target.hidden_size,
                use_ordered_embeddings=shape.clusters is not None,
                num_centroids=num_clusters,
                centroid_intermediate_top_k=chosen,
            )
        )
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * STD)
        for name, buffer in module.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.add_(torch.randn_like(buffer) * STD)
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer)))
    module.save_pretrained(folder)


@torch.no_grad()
def fit(pair: Pair, texts: Sequence[Sequence[int]]) -> None:
    """Fits the embeddings of an assistant without clusters by least squares, so that it guesses these texts'
    tokens, and saves it again."""
    assistant = pair.modules[1]
    found: list[torch.Tensor] = []
    hook = assistant.model.norm.register_forward_hook(lambda module, given, made: found.append(made[0, 0]))
    wanted = []
    for text in texts:
        for end in range(2, len(text)):
            pair.draft(text[:end], 1)
            wanted.append(text[end])
    hook.remove()
    x = torch.stack(found)
    y = torch.stack([torch.arange(assistant.vocab_size) == token for token in wanted]).float()
    kernel = x.T @ x + 1e-2 * torch.eye(x.shape[1])
    assistant.lm_head.weight.copy_((20 * torch.linalg.solve(kernel, x.T @ y)).T)
    assistant.save_pretrained(pair.path)


def save_gguf(
    path: Path,
    pair: Pair,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    kind: str = "F32",
) -> Any:
    """Saves the assistant as llama.cpp's converter writes it; ``keys`` and ``tensors`` are changed, and left
    out where they are None. ``kind``: of matrices. Returns a copy of the module with the weights for which
    the file stands."""
    module = deepcopy(pair.modules[1])
    text = module.config.text_config
    sliding, full = (
        {kind: text.per_layer_config[kind] for kind in text.layer_types}.get(kind) for kind in KINDS
    )
    full, sliding = full or sliding, sliding or full
    layers, rope = text.num_hidden_layers, text.rope_parameters
    slides = [kind == SLIDING for kind in text.layer_types]
    metadata = {
        "block_count": layers,
        "context_length": text.max_position_embeddings,
        "embedding_length": text.hidden_size,
        "embedding_length_out": module.config.backbone_hidden_size,
        "embedding_length_per_layer_input": 0,
        "feed_forward_length": text.intermediate_size,
        "attention.head_count": text.num_attention_heads,
        "attention.head_count_kv": [(sliding if each else full).num_key_value_heads for each in slides],
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.layer_norm_rms_epsilon": text.rms_norm_eps,
        "attention.shared_kv_layers": layers,
        "attention.sliding_window": text.sliding_window,
        "attention.sliding_window_pattern": slides,
        "nextn_predict_layers": layers,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": sliding.head_dim,
        "rope.freq_base": rope[FULL]["rope_theta"],
        "rope.freq_base_swa": rope[SLIDING]["rope_theta"],
    }
    turned = int(full.head_dim * rope[FULL]["partial_rotary_factor"] / 2)
    stored = {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (full.head_dim // 2 - turned))}
    for name, tensor in module.state_dict().items():
        if name.startswith("masked_embedding") or name == "lm_head.weight":
            continue
        number = GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
        data = gguf.quantize(np.ascontiguousarray(tensor.numpy()), number)
        tensor.copy_(torch.from_numpy(gguf.dequantize(data, number)).view(tensor.shape))
        inside = name.startswith("model.")
        stored[stored_name(name) if inside else f"nextn.{name}"] = data, number
    writer = GGUFWriter(path, "gemma4-assistant")
    for key, value in (metadata | dict(keys or {})).items():
        if value is not None:
            add_key(writer, f"gemma4-assistant.{key}", value)
    for name, given in (stored | dict(tensors or {})).items():
        if isinstance(given, tuple):
            writer.add_tensor(name, given[0], raw_dtype=given[1])
        elif given is not None:
            writer.add_tensor(name, given.astype(np.float32))
    finish(writer)
    return module
