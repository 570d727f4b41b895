"""Loads the tokenizer with which grammars are compiled, when the first grammar is needed."""

from collections.abc import Iterable

from llguidance import LLTokenizer, TokenizerWrapper
from llguidance.hf import from_tokenizer

from truedraft.engine.formats.pretrained_tokenizer import load_pretrained_tokenizer
from truedraft.engine.sampling.grammar_compiler import GrammarError


def load_tokenizer(path: str, vocab_size: int, eos_token_ids: Iterable[int]) -> LLTokenizer:
    """Loads a model's tokenizer, with the width of its logits; raises ``GrammarError`` if it has none that
    fits."""
    eos = sorted(eos_token_ids)
    if not eos:
        raise GrammarError("the model has no end-of-sequence token to end a match with")
    try:
        tokenizer = load_pretrained_tokenizer(path)
        # It makes no masks, so it needs no slices, which are tries of most tokens.
        plain = from_tokenizer(tokenizer, max(vocab_size, len(tokenizer)), eos, slices=[])
    except (OSError, ValueError) as error:
        raise GrammarError(f"the model's tokenizer cannot be used for grammars: {error}") from error
    return LLTokenizer(TokenizerWrapper(_TextTokenizer(plain)), n_vocab=plain.vocab_size, eos_token=eos)


class _TextTokenizer:
    """Tokenizes the text that a grammar forces as text alone, with the attributes that ``TokenizerWrapper``
    wants.

    llguidance's own takes the name of a special token for that token, also inside a string, where no grammar
    allows it.
    """

    def __init__(self, plain: LLTokenizer) -> None:
        self._plain = plain
        self.tokens = [plain.decode_bytes([token_id]) for token_id in range(plain.vocab_size)]
        self.special_token_ids = [
            token_id for token_id in range(plain.vocab_size) if plain.is_special_token(token_id)
        ]
        self.eos_token_id, self.bos_token_id = plain.eos_token, None
        self._names = [name for token_id in self.special_token_ids if (name := self.tokens[token_id])]

    def __call__(self, text: bytes) -> list[int]:
        written = text.decode()
        if any(name in text for name in self._names):
            return self._plain.greedy_tokenize(written)  # These are the bytes of ordinary tokens.
        return self._plain.tokenize_str(written)
