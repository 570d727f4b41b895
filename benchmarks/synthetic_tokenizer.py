"""A tokenizer for models that know no language: ``t300 t301`` are the ids 300 and 301.

Any other text becomes bytes, so every prompt can be encoded, and ids that come out can be read back: words
and ASCII as they are, other bytes as ``?``, since random ones are no UTF-8, which decoding by increments
refuses. It is a byte-fallback BPE without merges, which the libraries that convert checkpoints read as any
Llama's.
"""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

UNKNOWN = "<unk>"
SPACE = "▁"
# The unknown token, the 256 bytes and the space.
MIN_VOCAB_SIZE = 258


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """``ValueError`` below ``MIN_VOCAB_SIZE``: the bytes would not fit."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"a vocabulary needs {MIN_VOCAB_SIZE} tokens or more, not {vocab_size}")
    vocabulary = {UNKNOWN: 0}
    vocabulary |= {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocabulary[SPACE] = 257
    vocabulary |= {f"{SPACE}t{token}": token for token in range(MIN_VOCAB_SIZE, vocab_size)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [], unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True, ignore_merges=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.Replace(Regex("^<0x[89A-F].>$"), "?"),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    make_tokenizer(vocab_size).save_pretrained(folder)
