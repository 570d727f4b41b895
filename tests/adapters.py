"""LoRA adapters for tests, written by hand in PEFT's form, so that a test knows every number of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Adapter, Generate, SamplingParams, TokenLogprob

# Small models have this shape, whatever their family.
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

Written = tuple[list[int], list[TokenLogprob]]


def save_adapter(
    folder: Path,
    base: str,
    targets: Sequence[str],
    seed: int,
    rank: int = 4,
    size: float = 0.3,
    **config: Any,
) -> str:
    """Saves an adapter of those modules of ``base`` whose names end so; returns the folder."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            rows, columns = module.weight.shape
            for kind, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                key = f"base_model.model.{name}.lora_{kind}.weight"
                tensors[key] = torch.randn(shape, generator=generator) * size
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "base_model_name_or_path": base,
    }
    return write_adapter(folder, {**settings, **config}, tensors)


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return str(folder)


def written(
    core: EngineCore,
    asked: Sequence[tuple[list[int], Adapter | None]],
    params: SamplingParams,
    salts: Sequence[str] = (),
) -> list[Written]:
    """Returns the tokens and their log-probabilities of each prompt with its adapter, all asked together."""
    for number, (prompt, adapter) in enumerate(asked):
        salt = salts[number] if salts else ""
        core.add(
            Generate(f"{number}", prompt, params, adapter=adapter, cache_salt=salt, cache_prompt=bool(salts))
        )
    found: list[Written] = [([], []) for _ in asked]
    while core.has_work:
        for output in core.step():
            tokens, logprobs = found[int(output.request_id)]
            tokens += output.token_ids
            logprobs += output.logprobs or []
    return found


def named(core: EngineCore) -> list[Adapter]:
    """Returns the adapters of the settings."""
    assert core.admission.adapters is not None
    return core.admission.adapters.named
