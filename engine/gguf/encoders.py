"""Reads encoders in GGUF files: their keys as transformers' config, and their tensors in transformers'
module.

The meaning of keys is llama.cpp's. Two exceptions follow the models' makers: GELU is not approximated, and
the second text of a pair has an embedding of its own, where the file has one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from truedraft.engine.checkpoints.account import Account
from truedraft.engine.families.encoders import ENCODERS, Head
from truedraft.engine.formats.gguf_file import GgufError, GgufFile, read_gguf
from truedraft.engine.formats.gguf_tokenizer import read_vocabulary
from truedraft.engine.formats.gguf_word_pieces import ENCODER_TYPES
from truedraft.engine.gguf.checkpoint import GgufCheckpoint
from truedraft.engine.gguf.config import INFORMATION, ROPE_BASE
from truedraft.engine.gguf.keys import GgufKeys
from truedraft.engine.gguf.places import check_place, taken_apart

# A file must have these keys, which begin with the architecture's name.
NEEDED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "context_length": "max_position_embeddings",
}
# Norms have the order of ``EncoderFamily``.
NORMS = "attn_norm", "attn_output_norm", "ffn_norm", "layer_output_norm"
MLP_IN = {1: ("ffn_up",), 2: ("ffn_gate", "ffn_up")}
# A classifier has a layer before its score, as transformers' BERT and RoBERTa have.
CLASSIFIER, SCORE = "cls", "cls.output"
# Vectors do not depend on these tensors of transformers' module, and files do not have them.
UNUSED = "pooler."


@dataclass(frozen=True)
class GgufEncoder:
    """Holds what a file says. ``names`` maps transformers' names to the file's tensors."""

    checkpoint: GgufCheckpoint
    config: Any
    names: dict[str, str]

    def module(self, dtype: torch.dtype) -> Any:
        """Returns transformers' base model with the file's weights, dequantised."""
        module = AutoModel.from_config(self.config, dtype=dtype, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if not name.startswith(UNUSED):
                    parameter.copy_(self.checkpoint.stored(self.names[name]).view(parameter.shape))
        return module

    def head(self, device: torch.device) -> Head | None:
        """Returns the classifier of one score, if the file has one."""
        stored = self.checkpoint.file.tensors
        if not {f"{CLASSIFIER}.weight", f"{SCORE}.weight"} <= stored.keys():
            return None
        size, path = int(self.config.hidden_size), self.checkpoint.file.path
        account = Account(path, {name: stored[name].shape for name in stored if name.startswith(CLASSIFIER)})
        layers = []
        for name, rows in ((CLASSIFIER, size), (SCORE, 1)):
            account.expect_shape(f"{name}.weight", (rows, size), "its one score")
            weight = self._number(f"{name}.weight", device).view(rows, size)
            bias = torch.zeros(rows, device=device)
            if f"{name}.bias" in stored:
                account.expect_shape(f"{name}.bias", (rows,), "its one score")
                bias = self._number(f"{name}.bias", device)
            layers.append((weight, bias))
        account.close("has the tensor {name} of the shape {value}, which a classifier here does not use")
        (first, first_bias), (score, score_bias) = layers
        return lambda states: (torch.tanh(states[:1] @ first.T + first_bias) @ score.T + score_bias)[0]

    def _number(self, name: str, device: torch.device) -> torch.Tensor:
        return self.checkpoint.stored(name).float().to(device)


def holds_encoder(path: str) -> bool:
    """Tells whether a GGUF file has an encoder of a known architecture."""
    return read_gguf(path).architecture in ENCODER_TYPES


def open_encoder(path: str) -> GgufEncoder:
    """Opens a file's encoder; raises ``GgufError`` or ``ModelLoadError`` for files that cannot be served."""
    file = read_gguf(path)
    for name, place in file.tensors.items():
        check_place(name, place)
    config = _config(file)
    with torch.device("meta"):
        module = AutoModel.from_config(config)
    names = _names(config)
    needed = {
        name: tuple(parameter.shape)
        for name, parameter in module.named_parameters()
        if not name.startswith(UNUSED)
    }
    file = taken_apart(file, {names[name]: shape for name, shape in needed.items()})
    account = Account(path, {name: place.shape for name, place in file.tensors.items()})
    for name, shape in needed.items():
        account.expect_shape(names[name], shape, "its metadata")
    for name in [name for name in account.left if name.startswith(f"{CLASSIFIER}.")]:
        account.take(name)
    account.close(
        f"has the tensor {{name}} of the shape {{value}}, which {file.architecture} models do not use"
    )
    return GgufEncoder(GgufCheckpoint(file, config, {}, None), config, names)


def _config(file: GgufFile) -> Any:
    keys, path = GgufKeys(file), file.path
    found: dict[str, Any] = {
        name: keys.needed(key, float if key.endswith("epsilon") else int) for key, name in NEEDED.items()
    }
    size, heads = found["hidden_size"], found["num_attention_heads"]
    if size % heads or found["num_hidden_layers"] > len(file.tensors):
        raise GgufError(
            f"{path} is damaged: {found['num_hidden_layers']} layers of {heads} heads are not {size}"
        )
    vocabulary = read_vocabulary(file)
    for table, name in (("token_embd", "vocab_size"), ("token_types", "type_vocab_size")):
        if (place := file.tensors.get(f"{table}.weight")) is None:
            raise GgufError(f"{path} lacks weights of the model: {table}.weight")
        found[name] = place.shape[0]
    if vocabulary is not None and len(vocabulary.tokens) != found["vocab_size"]:
        tokens, rows = len(vocabulary.tokens), found["vocab_size"]
        raise GgufError(f"{path} has {tokens} tokens in its vocabulary, but {rows} rows of embeddings")
    if keys.says("attention.causal") is not False:
        raise GgufError(
            f"{path} does not say {keys.prefix}attention.causal = False, so that its tokens might not see "
            "later ones"
        )
    keys.expect("vocab_size", found["vocab_size"])
    keys.expect("attention.head_count_kv", heads)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        keys.expect(key, size // heads)
    keys.expect("attention.max_alibi_bias", 0.0)
    keys.expect("pooling_type", 0, 1, 2, 3, 4)
    model_type = ENCODER_TYPES[file.architecture]
    if ENCODERS[model_type].rotary is not None:
        theta = keys.number("rope.freq_base", float, ROPE_BASE)
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        keys.expect("rope.scaling.type", "none")
        keys.expect("rope.scaling.factor", 0.0, 1.0)
    keys.listed("classifier.output_labels")
    for key in INFORMATION:
        keys.says(key)
    keys.account.close("has {name} = {value}, which is not known for this architecture")
    return AutoConfig.for_model(model_type, **found)


def _names(config: Any) -> dict[str, str]:
    """Returns the file's name of each tensor that a module may have."""
    family = ENCODERS[config.model_type]
    found = {
        f"{name}.weight": f"{theirs}.weight"
        for name, theirs in (
            (family.words, "token_embd"),
            (family.positions, "position_embd"),
            (family.types, "token_types"),
        )
    }
    parts = [
        *zip(family.qkv, ("attn_q", "attn_k", "attn_v"), strict=True),
        (family.output, "attn_output"),
        *zip(family.mlp_in, MLP_IN[len(family.mlp_in)], strict=True),
        (family.mlp_out, "ffn_down"),
        *zip(family.norms, NORMS, strict=True),
    ]
    pairs = [(family.embedding_norm, "token_embd_norm")]
    for layer in range(config.num_hidden_layers):
        pairs += [
            (f"{family.layers}.{layer}.{name}", f"blk.{layer}.{theirs}") for name, theirs in parts if name
        ]
    return found | {
        f"{name}.{suffix}": f"{theirs}.{suffix}" for name, theirs in pairs for suffix in ("weight", "bias")
    }
