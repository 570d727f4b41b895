"""Reads Gemma 4's assistants in GGUF files: layers of Gemma 4 that compute queries alone.

As llama.cpp does, all tokens get logits: the clusters of tokens that some files have besides are not read.
"""

from dataclasses import replace
from typing import Any

from truedraft.engine.checkpoints.account import Account
from truedraft.engine.formats.gguf_file import GgufError, read_gguf
from truedraft.engine.gguf.checkpoint import GgufCheckpoint, named
from truedraft.engine.gguf.config import gguf_config
from truedraft.engine.gguf.gemma4 import FULL as FULL
from truedraft.engine.gguf.gemma4 import SLIDING as SLIDING
from truedraft.engine.gguf.places import check_place
from truedraft.engine.gguf.settings import ROTARY_FACTORS

ARCHITECTURE, OF_LAYERS = "gemma4-assistant", "gemma4"
# Tensors of an assistant that no model has, by their names in safetensors.
PARTS = {
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
}
CLUSTERS = ("masked_embd_centroids.weight", "masked_embd_ordering")
TARGET_SIZE, NUM_LAYERS = "embedding_length_out", "nextn_predict_layers"
NUM_READING = "attention.shared_kv_layers"
# llama.cpp does not cap an assistant's logits, whatever its file says.
CAP = "final_logit_softcapping"


def holds_assistant(path: str) -> bool:
    """Tells whether a GGUF file has an assistant."""
    try:
        return read_gguf(path).architecture == ARCHITECTURE
    except (GgufError, OSError):  # Loading reports what is wrong.
        return False


def open_gguf_assistant(path: str) -> tuple[GgufCheckpoint, Any, int]:
    """Opens an assistant; returns it with the config of its layers and the size of its target's states.
    Raises ``GgufError`` for files that cannot be served."""
    file = read_gguf(path)
    for name, place in file.tensors.items():
        check_place(name, place)
    account, prefix = Account(path, file.metadata), f"{ARCHITECTURE}."
    layers = account.take(f"{prefix}block_count")
    target_size = account.take(prefix + TARGET_SIZE)
    if not isinstance(target_size, int) or target_size < 1:
        raise GgufError(f"{path} does not say the size of its target's states, {prefix}{TARGET_SIZE}")
    account.expect(prefix + NUM_LAYERS, layers)
    account.expect(prefix + NUM_READING, 0, layers)
    account.take(prefix + CAP)
    # All else is as in files of models.
    keys = {key: value for key, value in account.left.items() if key.startswith(prefix)}
    metadata = {f"{OF_LAYERS}.{key.removeprefix(prefix)}": value for key, value in keys.items()}
    metadata |= {
        "general.architecture": OF_LAYERS,
        f"{OF_LAYERS}.block_count": layers,
        f"{OF_LAYERS}.{CAP}": 1.0,
    }
    known = {name: place for name, place in file.tensors.items() if name not in CLUSTERS}
    file = replace(file, metadata=metadata, tensors=known)
    config = gguf_config(file, None)
    file, names = named(file, config)
    names |= {ours: theirs for ours, theirs in PARTS.items() if theirs in file.tensors}
    unused = set(file.tensors) - {*names.values(), ROTARY_FACTORS}
    if unused:
        raise GgufError(f"{path} has the tensor {min(unused)}, which an assistant does not use")
    return GgufCheckpoint(file, config, names, None), config, target_size
