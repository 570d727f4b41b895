"""Whether target and draft speak the same token ids: vocabularies by string, special tokens, sizes.

Different tokenizers never make the output wrong, since ids are all that is compared; they make drafts
useless. Used by ``check``.
"""

from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoTokenizer

# More differing strings than this share, and it is another tokenizer rather than a few added tokens.
DIFFERENT_SHARE = 0.01
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "unk_token_id")


@dataclass(frozen=True)
class TokenizerResult:
    """``num_different``: strings that have different ids or are known to one only; None: not compared."""

    target_vocab_size: int
    draft_vocab_size: int
    num_strings: int
    num_different: int | None
    special_tokens: list[str]
    verdict: str

    @property
    def compatible(self) -> bool:
        return self.num_different is None or self.num_different <= DIFFERENT_SHARE * self.num_strings


def load_tokenizer(path: str) -> Any | None:
    """None where there is none: models without text can be checked with token ids."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError):
        return None


def compare_tokenizers(
    target: Any | None, draft: Any | None, target_vocab_size: int, draft_vocab_size: int
) -> TokenizerResult:
    """``*_vocab_size``: the models' own, padding included."""
    padded = ""
    if target_vocab_size != draft_vocab_size:
        padded = f"; padded sizes {target_vocab_size} and {draft_vocab_size}"
    if target is None or draft is None:
        lacking = " and ".join(name for name, t in (("target", target), ("draft", draft)) if t is None)
        verdict = f"not compared: no tokenizer with the {lacking}{padded}"
        return TokenizerResult(target_vocab_size, draft_vocab_size, 0, None, [], verdict)
    ours, theirs = target.get_vocab(), draft.get_vocab()
    strings = ours.keys() | theirs.keys()
    different = sum(ours.get(string) != theirs.get(string) for string in strings)
    special = [
        f"{name[:-3]}: target {getattr(target, name, None)}, draft {getattr(draft, name, None)}"
        for name in SPECIAL_TOKENS
        if getattr(target, name, None) != getattr(draft, name, None)
    ]
    result = TokenizerResult(target_vocab_size, draft_vocab_size, len(strings), different, special, "")
    return replace(result, verdict=_verdict(result) + padded)


def _verdict(result: TokenizerResult) -> str:
    if result.num_different == 0:
        return f"the same {result.num_strings} tokens"
    if result.compatible:
        return (
            f"{result.num_different} of {result.num_strings} tokens differ; drafts of those will be rejected"
        )
    return (
        f"different tokenizers: {result.num_different} of {result.num_strings} tokens differ. "
        "The output stays exact, but such a draft cannot pay"
    )
