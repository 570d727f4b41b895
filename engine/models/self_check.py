"""Does a model say over our cache what it says by itself? Asked once after loading, with a few tokens.

Two short texts go through the cache in two chunks, packed side by side, as in serving; transformers' own
eager attention computes each of them at once. Whatever an architecture does behind our back then shows:
positions counted from somewhere else, biases that are not announced, states and convolutions that reach
from one token to the next. Windows and caps need longer texts to show; ``layer_probe`` and ``attention``
look for those by name.
"""

from typing import Any

import torch

from truedraft.engine.batch import Span
from truedraft.engine.core.block_pool import BlockTable
from truedraft.engine.models.attention import ATTENTION_NAME
from truedraft.engine.models.decoder_only import DecoderModel
from truedraft.engine.models.errors import ModelLoadError
from truedraft.engine.models.model_runner import ModelRunner

TEXT_LENGTHS, FIRST_CHUNKS = (9, 6), (5, 2)
BLOCK_SIZE = 4

# Largest deviation of a row of logits, as a share of that row's spread. Rounding makes some 1e-5 in float32
# and 1e-2 in bfloat16; a wrong mask or position makes 0.1 to 1.
TOLERANCES = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.3}


@torch.inference_mode()
def self_check(model: DecoderModel) -> None:
    """``ModelLoadError`` if ``model`` over our cache deviates from itself."""
    model_type = model.config.model_type
    texts = [
        [(7919 * (i + 1) + 104729 * which) % model.vocab_size for i in range(length)]
        for which, length in enumerate(TEXT_LENGTHS)
    ]
    expected = torch.cat([_alone(model, text) for text in texts])
    if not expected.isfinite().all():
        raise ModelLoadError(
            f"the model's own logits are not finite in {str(model.dtype).removeprefix('torch.')}: "
            "its weights are broken, or it needs another dtype"
        )
    got = torch.cat(_over_cache(model, texts))
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    deviation = float(((got - expected).norm(dim=-1) / spread.clamp(min=1e-6)).max())
    if not deviation <= TOLERANCES[model.dtype]:
        raise ModelLoadError(
            f"{model_type} models of this kind cannot be served: over our cache the logits deviate by "
            f"{deviation:.1%} from the model's own, so something in it does not go through its attention"
        )


def _alone(model: DecoderModel, text: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab], float32, by transformers alone."""
    hf_model: Any = model.module
    hf_model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([text], device=model.device)
        return hf_model(input_ids=ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]
    except Exception as error:
        raise ModelLoadError(
            f"the model cannot be run by transformers alone ({type(error).__name__}: {error})"
        ) from error
    finally:
        hf_model.set_attn_implementation(ATTENTION_NAME)


def _over_cache(model: DecoderModel, texts: list[list[int]]) -> list[torch.Tensor]:
    """The same logits, text by text, in two packed passes over a cache of our own."""
    num_blocks = -(-max(TEXT_LENGTHS) // BLOCK_SIZE)
    runner = ModelRunner.build(model, num_blocks * len(texts), BLOCK_SIZE)
    tables = []
    for which in range(len(texts)):
        tables.append(table := BlockTable())
        # Not the first block first: a slot must come from the table, not from the position.
        table.block_ids = [num_blocks * (which + 1) - 1 - i for i in range(num_blocks)]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    for number in range(2):
        chunks = [
            text[:first] if number == 0 else text[first:]
            for text, first in zip(texts, FIRST_CHUNKS, strict=True)
        ]
        spans = [
            Span(table, chunk, num_logits=len(chunk)) for table, chunk in zip(tables, chunks, strict=True)
        ]
        parts = torch.split(runner.forward(spans).logits, [len(chunk) for chunk in chunks])
        for row, part in zip(rows, parts, strict=True):
            row.append(part)
    return [torch.cat(parts) for parts in rows]
