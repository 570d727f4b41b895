"""Weights, graphs, prompts and caches fit together on cards of 8 to 24 GB, by arithmetic, with room."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from truedraft.engine.config import EngineConfig
from truedraft.engine.memory import cache_memory
from truedraft.engine.models.cache_plan import plan_caches
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.working_memory import prompt_bytes
from truedraft.engine.rounds.capture import plan as plan_module
from truedraft.engine.rounds.capture.plan import plan_graphs

GIB, DEVICE = 1 << 30, torch.device("cuda")
# What the driver and the libraries take before anything is loaded, with some room.
CONTEXT = 600 << 20
MAX_MODEL_LEN = 32768


@dataclass(frozen=True)
class Shapes:
    """``embeddings`` are there once if the output layer has the same weights."""

    hidden: int
    layers: int
    kv: int
    mlp: int
    heads: int
    vocab_size: int
    is_tied: bool = False

    @property
    def weights(self) -> tuple[int, int]:
        """Returns how many there are in layers, and in embeddings and output layer."""
        of_layer = self.hidden * (2 * self.heads + 2 * self.kv + 3 * self.mlp)
        return self.layers * of_layer, self.hidden * self.vocab_size * (1 if self.is_tied else 2)


LLAMA_8B = Shapes(4096, 32, 1024, 14336, 4096, 128256)
LLAMA_3B = Shapes(3072, 28, 1024, 8192, 3072, 128256, is_tied=True)
LLAMA_1B = Shapes(2048, 16, 512, 8192, 2048, 128256, is_tied=True)
QWEN3_4B = Shapes(2560, 36, 1024, 9728, 4096, 151936, is_tied=True)
QWEN3_14B = Shapes(5120, 40, 1024, 17408, 5120, 151936)
# Bits of a weight on the device, in layers, and in embeddings and output layer together: files mix types.
Q3_K_M, IQ4_XS = (4.0, 5.1), (4.4, 5.5)
Q4_K_M, Q6_K, Q8_0, BF16 = (4.9, 6.6), (6.6, 6.6), (8.5, 8.5), (16.0, 16.0)

Loaded = tuple[Shapes, tuple[float, float]]
# Gigabytes of the card, target, draft, and tokens of texts that it has to hold.
CARDS: list[tuple[int, Loaded, Loaded | None, int]] = [
    (8, (LLAMA_8B, IQ4_XS), None, 8_000),
    (8, (LLAMA_8B, Q3_K_M), None, 8_000),
    (12, (QWEN3_14B, IQ4_XS), None, 8_000),
    (12, (LLAMA_8B, Q4_K_M), None, 20_000),
    (12, (LLAMA_8B, Q4_K_M), (LLAMA_1B, Q4_K_M), 12_000),
    (12, (LLAMA_3B, BF16), None, 20_000),
    (16, (LLAMA_8B, Q8_0), None, 20_000),
    (16, (LLAMA_8B, Q6_K), (LLAMA_1B, Q4_K_M), 20_000),
    (16, (QWEN3_4B, BF16), None, 16_000),
    (24, (LLAMA_8B, BF16), None, 20_000),
    (24, (LLAMA_8B, Q8_0), (LLAMA_1B, Q8_0), 50_000),
    (24, (QWEN3_14B, Q4_K_M), None, 50_000),
]


def model_of(loaded: Loaded | None) -> Any:
    if loaded is None:
        return None
    shapes, bits = loaded
    made: Any = FusedDecoder.__new__(FusedDecoder)
    made.dtype, made.device, made.vocab_size = torch.bfloat16, DEVICE, shapes.vocab_size
    made.reads_in_place, made.needs_host = True, False
    made.weights = SimpleNamespace(layers=[])
    made.is_quantised = bits != BF16
    made.config = SimpleNamespace(hidden_size=shapes.hidden, intermediate_size=shapes.mlp)
    made.config.get_text_config = lambda config=made.config: config
    # Keys and values in 16 bits.
    made.caches = [SimpleNamespace(device=DEVICE, bytes_per_token=4 * shapes.kv)] * shapes.layers
    return made


def bytes_of(loaded: Loaded | None) -> int:
    if loaded is None:
        return 0
    shapes, bits = loaded
    return int(sum(bit * number / 8 for bit, number in zip(bits, shapes.weights, strict=True)))


@pytest.mark.parametrize("card", CARDS, ids=lambda card: f"{card[0]} GB")
def test_everything_fits(
    card: tuple[int, Loaded, Loaded | None, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    size, target, draft, tokens = card
    free = size * GIB - CONTEXT - bytes_of(target) - bytes_of(draft)
    for module in (plan_module, cache_memory):
        monkeypatch.setattr(module, "free_memory", lambda device: free)
    monkeypatch.setattr(plan_module, "make_capture", lambda device: object())
    monkeypatch.setattr(plan_module, "find_sampling", lambda *_: object())  # the kernels
    config = EngineConfig(target="target")
    models = [model for model in (model_of(target), model_of(draft)) if model is not None]
    graphs = plan_graphs(config, models[0], models[1] if draft else None, MAX_MODEL_LEN)
    assert graphs is not None
    num_blocks = plan_caches(config, models, MAX_MODEL_LEN, graphs).num_blocks
    caches = num_blocks * config.block_size * sum(model.cache_bytes_per_token for model in models)
    num_logits = graphs.num_scored + config.num_sequences_on("cuda")
    prompts = prompt_bytes(models, config.max_num_batched_tokens, num_logits)
    assert caches + prompts + graphs.memory <= free
    largest = max(shape.num_tokens for shape in graphs.planned)
    assert num_blocks * config.block_size >= tokens
    assert largest >= 160  # 32 rows of four drafts are captured
