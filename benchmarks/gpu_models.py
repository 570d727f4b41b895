"""Small models of the kinds that a device has never run, and engines of them: ``gpu_minutes`` asks whether
their captured rounds say what phases say."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from benchmarks.synthetic_gguf import SHAPES, Shape, write
from benchmarks.synthetic_pair import cycle, successors
from benchmarks.synthetic_tokenizer import save_tokenizer
from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore

VOCAB_SIZE, ACCEPTANCE = 512, 0.8
HYBRID = Shape("qwen35", 256, 4, 4, 1, 64, 256, VOCAB_SIZE, interval=4, value_heads=16)
EXPERTS = Shape("qwen3moe", 256, 2, 4, 2, 64, 256, VOCAB_SIZE, experts=(8, 2))
LATENTS = DeepseekV3Config(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    kv_lora_rank=32,
    q_lora_rank=None,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


class Tiny(NamedTuple):
    """Writes a model to a folder and returns its path. Its blocks stay as they are in 16 bits, and are
    checked in these; ``draft`` is as in ``EngineConfig``."""

    write: Callable[[Path], Path]
    dtype: torch.dtype
    draft: str | None = None


def of_file(shape: Shape, kind: str, has_head: bool = False) -> Callable[[Path], Path]:
    def written(folder: Path) -> Path:
        following = successors(cycle(shape.vocab_size, 0))
        head = ACCEPTANCE if has_head else None
        return write(folder / "tiny.gguf", shape, kind, following, mtp_acceptance=head)

    return written


def of_latents(folder: Path) -> Path:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(LATENTS).save_pretrained(folder)
    save_tokenizer(folder, VOCAB_SIZE)
    return folder


TINY = {
    "hybrid, its blocks and its MTP head": Tiny(
        of_file(HYBRID, "Q4_K", has_head=True), torch.bfloat16, "mtp"
    ),
    "experts in blocks": Tiny(of_file(EXPERTS, "Q4_K"), torch.bfloat16),
    "hybrid in float32": Tiny(of_file(HYBRID, "Q8_0"), torch.float32),
    "experts in float32": Tiny(of_file(EXPERTS, "Q8_0"), torch.float32),
    "latents in float32": Tiny(of_latents, torch.float32),
}


@contextmanager
def tiny_engine(tiny: Tiny, device: str) -> Iterator[EngineCore]:
    with TemporaryDirectory() as folder:
        yield engine_of(tiny.write(Path(folder)), tiny.draft, device, tiny.dtype)


def engine_of(target: Path, draft: str | None, device: str, dtype: torch.dtype, **more: Any) -> EngineCore:
    settings: dict[str, Any] = {"num_speculative_tokens": 3, "max_num_sequences": 8, "cache_memory": "64MiB"}
    return build_engine(
        EngineConfig(
            target=str(target),
            draft=draft,
            device=device,
            dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
            prefix_caching=False,
            **(settings | more),
        )
    )


def hybrid_with_head(folder: Path, is_small: bool) -> Path:
    """Writes the shape of Qwen3.5 0.8B with an MTP head, or a small one."""
    shape = HYBRID if is_small else SHAPES["qwen3.5-0.8b"]
    return of_file(shape, "Q4_K" if is_small else "Q4_0", has_head=True)(folder)
