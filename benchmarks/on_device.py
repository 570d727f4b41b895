"""Models live on the device only: engines without checkpoints on a disk, memory bandwidth."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from benchmarks import synthetic_pair as synthetic
from benchmarks.synthetic_tokenizer import save_tokenizer
from truedraft.engine import build
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.layers.attention import ATTENTION_NAME
from truedraft.engine.models.base import Model
from truedraft.engine.models.fused import count, fuse_module
from truedraft.engine.models.hf.decoder_only import DecoderModel
from truedraft.engine.models.options import LoadOptions


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def engine_on_device(
    pair: synthetic.PairShape, acceptance: float, device: str, dtype: torch.dtype, **config: Any
) -> EngineCore:
    """The engine on a synthetic pair that is drawn on the device: its folders have no weights."""
    with tempfile.TemporaryDirectory() as folder:
        save_folders(pair, Path(folder))
        with mock.patch.object(build, "load_model", drawing(pair, acceptance)):
            return build.build_engine(
                EngineConfig(
                    target=str(Path(folder) / "target"),
                    draft=str(Path(folder) / "draft"),
                    device=device,
                    dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
                    prefix_caching=False,
                    method="draft_model",  # auto would ask the n-grams in every round
                    **config,
                )
            )


def save_folders(pair: synthetic.PairShape, folder: Path) -> None:
    """Writes configurations and tokenizers of ``target`` and ``draft``. Their weights are a lone number: a
    server starts with no folder that has none."""
    for name in ("target", "draft"):
        config_of(pair, name).save_pretrained(folder / name)
        save_tokenizer(folder / name, pair.vocab_size)
        save_file({"drawn": torch.zeros(1)}, folder / name / "model.safetensors")


def drawing(pair: synthetic.PairShape, acceptance: float) -> Callable[[str, LoadOptions], Model]:
    """Returns what draws a model of the pair, by its folder's name, in place of reading it."""

    def draw(path: str, options: LoadOptions) -> Model:
        module = drawn(pair, acceptance, Path(path).name, str(options.device), options.dtype, ATTENTION_NAME)
        facts = ModelFacts(
            module.config, module.generation_config, count(module), options.dtype, options.device
        )
        model = DecoderModel(module, facts)
        return fuse_module(model, options) or model

    return draw


def config_of(pair: synthetic.PairShape, name: str) -> Any:
    shape = pair.target if name == "target" else pair.draft
    return synthetic.config_of(shape, pair.vocab_size)


def drawn(
    pair: synthetic.PairShape,
    acceptance: float,
    name: str,
    device: str,
    dtype: torch.dtype,
    attention: str = "sdpa",
) -> PreTrainedModel:
    """Target or draft; the same arguments draw the same weights."""
    order = synthetic.cycle(pair.vocab_size, seed=0)
    if name == "target":
        return synthetic.build(pair.target, synthetic.successors(order), 0, device, dtype, attention)
    guesses = synthetic.mistaken(order, acceptance, seed=0)
    return synthetic.build(pair.draft, guesses, 1, device, dtype, attention)


def copy_bandwidth(device: str, num_bytes: int) -> float:
    """Bytes read and written per second by a large copy on the device: what its memory can do."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        synchronise(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        seconds.append(time.perf_counter() - started)
    return 2 * num_bytes / statistics.median(seconds[2:])


def weight_bytes(shape: synthetic.Shape, vocab_size: int, dtype: torch.dtype) -> int:
    """Weights that a pass over one token reads: all but the embeddings, of which it reads one row."""
    with torch.device("meta"):
        model = synthetic.LlamaForCausalLM(synthetic.config_of(shape, vocab_size))
    every = sum(parameter.numel() for parameter in model.parameters())
    return (every - model.model.embed_tokens.weight.numel()) * dtype.itemsize
