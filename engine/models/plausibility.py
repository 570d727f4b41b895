"""Warns of quantised weights that were misread: such a model predicts a plain text worse than chance does.

This needs no second reference. A trained model, however coarsely it is quantised, predicts a text of a
language that it knows much better than chance; a model whose weights are not those it was trained to predicts
it much worse.
"""

import logging
import math
from collections import Counter
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedConfig

from truedraft.engine.formats.gguf_file import is_gguf, read_gguf
from truedraft.engine.formats.pretrained_tokenizer import load_pretrained_tokenizer
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.models.base import Model
from truedraft.engine.models.model_runner import ModelRunner

# This text was written for the purpose, so that no model has learnt it by heart.
PLAIN_TEXT = """The baker opened her shop before the sun was up, and lit the oven first. By the time that \
the school bell rang, there was bread on every shelf, and a line of people at the door. An old man always \
came last. He bought one roll, and asked each morning whether it was still warm. She always said that it \
was, and put it near the fire until he had found his coin."""
MAX_TOKENS, FEWEST_TOKENS, BLOCK_SIZE = 64, 32, 16
# A model that was never trained may be this much worse than chance, in nats a token, as its logits are not
# quite equal. In smaller vocabularies than this, chance is not far from what a trained model does.
MARGIN, SMALLEST_VOCABULARY = 1.0, 512

logger = logging.getLogger(__name__)


def warn_if_misread(model: Model, path: str) -> None:
    """Logs a warning that names the quantisation of the checkpoint at ``path`` if its ``model`` predicts a
    plain text worse than chance."""
    if model.has_encoder or model.vocab_size < SMALLEST_VOCABULARY or (name := quantised_by(path)) is None:
        return
    longest = min(MAX_TOKENS, model.max_position or MAX_TOKENS)
    try:
        ids = load_pretrained_tokenizer(path)(PLAIN_TEXT)["input_ids"][:longest]
    except (OSError, ValueError):
        return  # A draft may have no tokenizer.
    if len(ids) < FEWEST_TOKENS or max(ids) >= model.vocab_size:
        return
    surprise, chance = mean_surprise(model, ids), math.log(model.vocab_size)
    if surprise > chance + MARGIN:
        logger.warning(
            "%s, quantised by %s, predicts a plain English text worse than chance: %.1f nats a token, where "
            "chance takes %.1f. Its weights may be read otherwise than they were made, or it is not for "
            "such texts; compare it with an unquantised checkpoint",
            path,
            name,
            surprise,
            chance,
        )


def quantised_by(path: str) -> str | None:
    """Returns how the weights at ``path`` are quantised, in a word; None if they are not."""
    if not is_gguf(path):
        path = str(Path(path).expanduser()) if path.startswith("~") else path
        found = PreTrainedConfig.get_config_dict(path)[0].get("quantization_config") or {}
        return str(found["quant_method"]) if found.get("quant_method") else None
    types = Counter(place.type for place in read_gguf(path).tensors.values())
    for kind, _ in types.most_common():
        if gguf.GGML_QUANT_SIZES[GGMLQuantizationType(kind)][0] > 1:
            return str(GGMLQuantizationType(kind).name)
    return None


@torch.inference_mode()
def mean_surprise(model: Model, token_ids: list[int]) -> float:
    """Returns the mean negative log-probability of each token but the first, in nats."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    runner = ModelRunner.build(model, num_blocks, BLOCK_SIZE, num_state_slots=1)
    table = BlockTable()
    table.block_ids, table.state_slot = list(range(num_blocks)), 0
    logits = runner.forward([Span(table, token_ids, len(token_ids))]).logits[:-1]
    following = torch.tensor(token_ids[1:], device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits.float(), following))
