"""Decides how a draft model's guesses reach the target: as token ids, or as text in another tokenizer's
tokens.

The meaning of the token ids decides (vocabularies by string), not their number: models that share a tokenizer
often pad their vocabularies to different sizes, and different tokenizers may have equal ones. ``build`` uses
it, so that the server does what ``check`` says.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.formats.gguf_file import GgufError, is_gguf, read_gguf
from truedraft.engine.formats.gguf_tokenizer import KEY
from truedraft.engine.formats.pretrained_tokenizer import load_pretrained_tokenizer
from truedraft.engine.proposers.translated.tokenizer import TextTokenizer, fast_form

# More differing strings than this share, and it is another tokenizer rather than a few added tokens.
DIFFERENT_SHARE = 0.01
# Without tokenizers to compare, this difference of sizes is more than any padding.
MAX_PADDING = 1024
# A folder with one of these files has a tokenizer.
VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "source.spm"),
)
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "unk_token_id")


@dataclass(frozen=True)
class TokenizerResult:
    """Holds a comparison. ``num_different`` is the number of strings that have different ids or that only one
    tokenizer knows; None: not compared."""

    target_vocab_size: int
    draft_vocab_size: int
    num_strings: int
    num_different: int | None
    special_tokens: list[str]
    verdict: str
    drafts: str = ""

    @property
    def compatible(self) -> bool:
        return self.num_different is None or self.num_different <= DIFFERENT_SHARE * self.num_strings


@dataclass(frozen=True)
class Pairing:
    """Holds the way from draft to target. ``translators`` are the target's and the draft's tokenizer if
    drafts go through text, else None."""

    result: TokenizerResult
    translators: tuple[TextTokenizer, TextTokenizer] | None
    eos_token_id: int | None  # This is the target's end token, used where the draft ends its text.


def pair_models(target: str, draft: str, target_vocab_size: int, draft_vocab_size: int) -> Pairing:
    """Pairs two models, given by folders or hub ids and their own vocabulary sizes; raises ``ModelLoadError``
    if there is no way."""
    tokenizer = load_tokenizer(target)
    tokenizers = tokenizer, tokenizer if draft == target else load_tokenizer(draft)
    result = compare_tokenizers(*tokenizers, target_vocab_size, draft_vocab_size)
    difference = abs(target_vocab_size - draft_vocab_size)
    if result.num_different is None and difference > MAX_PADDING:
        lacking = " and ".join(path for path, t in zip((target, draft), tokenizers, strict=True) if t is None)
        raise ModelLoadError(
            f"the draft's vocabulary has {draft_vocab_size} tokens, the target's {target_vocab_size}: they "
            f"do not share a tokenizer, and there is none in {lacking} to translate with"
        )
    if result.compatible:
        return Pairing(result, None, None)
    translators = _translator(tokenizers[0], target), _translator(tokenizers[1], draft)
    return Pairing(result, translators, getattr(tokenizers[0], "eos_token_id", None))


def _translator(tokenizer: Any, path: str) -> TextTokenizer:
    fast = fast_form(tokenizer)
    if fast is None:
        raise ModelLoadError(
            f"the draft has another tokenizer than the target, and the one in {path} has no fast form "
            "(tokenizer.json) to translate with"
        )
    return TextTokenizer(fast)


def load_tokenizer(path: str) -> Any | None:
    """Loads a tokenizer. Returns None where there is none: models without text can be checked with token ids.
    Raises ``ModelLoadError`` for a damaged one, which would otherwise be taken for none."""
    if not _has_vocabulary(path):
        return None  # transformers would make up an empty one for some types of models.
    try:
        return load_pretrained_tokenizer(path)
    except (OSError, ValueError) as error:
        raise ModelLoadError(str(error)) from error


def _has_vocabulary(path: str) -> bool:
    if is_gguf(path):
        try:
            return f"{KEY}.tokens" in read_gguf(path).metadata
        except (OSError, GgufError):  # Reading the model reports this.
            return False
    return any(Path(path).expanduser().joinpath(name).is_file() for name in VOCABULARIES)


def compare_tokenizers(
    target: Any | None, draft: Any | None, target_vocab_size: int, draft_vocab_size: int
) -> TokenizerResult:
    """Compares two tokenizers; ``*_vocab_size`` are the models' own sizes, padding included."""
    padded = ""
    if target_vocab_size != draft_vocab_size:
        padded = f"; padded sizes {target_vocab_size} and {draft_vocab_size}"
    if target is None or draft is None:
        lacking = " and ".join(name for name, t in (("target", target), ("draft", draft)) if t is None)
        verdict = f"not compared: no tokenizer with the {lacking}{padded}"
        drafts = "as token ids, taken to mean the same: the vocabularies are about as large"
        return TokenizerResult(target_vocab_size, draft_vocab_size, 0, None, [], verdict, drafts)
    ours, theirs = target.get_vocab(), draft.get_vocab()
    strings = ours.keys() | theirs.keys()
    different = sum(ours.get(string) != theirs.get(string) for string in strings)
    special = [
        f"{name[:-3]}: target {getattr(target, name, None)}, draft {getattr(draft, name, None)}"
        for name in SPECIAL_TOKENS
        if getattr(target, name, None) != getattr(draft, name, None)
    ]
    result = TokenizerResult(target_vocab_size, draft_vocab_size, len(strings), different, special, "")
    if not result.compatible:
        verdict = f"different tokenizers: {different} of {len(strings)} tokens differ"
        drafts = "as text, encoded again with the target's tokenizer (greedy, verified as deterministic)"
        return replace(result, verdict=verdict, drafts=drafts)
    verdict = f"the same {len(strings)} tokens"
    if different:
        verdict = f"{different} of {len(strings)} tokens differ; drafts of those will be rejected"
    drafts = "as token ids: the tokenizers are the same"
    if padded:
        drafts += "; ids that only one model has are never drafted or accepted"
    return replace(result, verdict=verdict + padded, drafts=drafts)
