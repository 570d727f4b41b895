"""Builds the tokenizer of encoders in GGUF files: words in pieces, as BERT has them.

It does without torch. In these files a piece that begins a word has a mark before it, and one that goes on
has none. llama.cpp puts texts into lower case in any case, so that a vocabulary that tells cases apart is
refused.
"""

import re
from typing import Any

from truedraft.engine.formats.gguf_file import GgufError, GgufFile

# Each encoder has one name in GGUF files and one in transformers.
ENCODER_TYPES = {"bert": "bert", "nomic-bert": "nomic_bert"}
KIND, BEGINS_WORD, GOES_ON = "bert", "\u2581", "##"
# Words longer than this are not cut into pieces.
LONGEST_WORD = 100
UPPER_CASE = re.compile(f"{BEGINS_WORD}?[^\\[]*[A-Z]")


def word_pieces(file: GgufFile, tokens: list[str], shown_whole: set[int], ids: dict[str, int]) -> Any:
    """Returns the tokenizer. ``shown_whole`` are tokens that are no pieces, ``ids`` are those of named
    tokens."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
    from tokenizers.models import WordPiece

    first = (
        ids.get("bos") if "tokenizer.ggml.bos_token_id" in file.metadata else ids.get("cls", ids.get("bos"))
    )
    last, unknown = ids.get("seperator"), ids.get("unknown")
    if first is None or last is None or unknown is None:
        raise GgufError(f"{file.path} does not name the tokens before and after a text, and of unknown words")
    special = {first, last, unknown, *shown_whole}
    pieces = [token for index, token in enumerate(tokens) if index not in special]
    if (cased := next(filter(UPPER_CASE.match, pieces), None)) is not None:
        raise GgufError(
            f"{file.path} has the piece {cased} in its vocabulary, and does not say whether texts are put "
            "into lower case: take the folder of safetensors"
        )
    spelt = [
        token if index in special else token[1:] if token.startswith(BEGINS_WORD) else GOES_ON + token
        for index, token in enumerate(tokens)
    ]
    vocab = {token: index for index, token in enumerate(spelt)}
    fast = Tokenizer(WordPiece(vocab, unk_token=tokens[unknown], max_input_chars_per_word=LONGEST_WORD))
    fast.normalizer = normalizers.BertNormalizer(lowercase=True)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece(prefix=GOES_ON)
    before, after = tokens[first], tokens[last]
    fast.post_processor = processors.TemplateProcessing(
        single=f"{before}:0 $A:0 {after}:0",
        pair=f"{before}:0 $A:0 {after}:0 $B:1 {after}:1",
        special_tokens=[(before, first), (after, last)],
    )
    return fast
