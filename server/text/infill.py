"""Writes what stands on both sides of a gap with the model's own tokens, so that it fills in the middle.

Which tokens these are is said by a GGUF file, or by their texts. Called in a thread.
"""

from collections.abc import Sequence
from typing import NamedTuple

from truedraft.server.errors import UnsupportedParameterError
from truedraft.server.text.tokenizer import Tokenizer

# llama.cpp's name of a project that has none.
PROJECT = "myproject"


class Extra(NamedTuple):
    """Holds another file that the model is to see."""

    filename: str
    text: str


def infill_tokens(
    tokenizer: Tokenizer,
    before: Sequence[int] | str,
    after: str,
    *,
    param: str,
    extra: Sequence[Extra] = (),
    begun: str = "",
) -> list[int]:
    """Returns a prompt of what is ``before`` the gap, ``after`` it, and what has ``begun`` to fill it.

    ``UnsupportedParameterError`` names ``param`` where the model has no tokens for it.
    """
    ids = tokenizer.fill_ids
    if not ids.keys() >= {"fim_pre", "fim_suf", "fim_mid"}:
        raise UnsupportedParameterError(
            f"'{param}' is not supported: this model's tokenizer has no tokens that fill in the middle, such "
            "as <|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>. Put what matters into the 'prompt'.",
            param=param,
        )

    def written(text: Sequence[int] | str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else [*text]

    files: list[int] = []
    if extra and ids.keys() >= {"fim_rep", "fim_sep"}:
        files += [ids["fim_rep"], *written(f"{PROJECT}\n")]
        for each in extra:
            files += [ids["fim_sep"], *written(f"{each.filename}\n{each.text}\n")]
        files += [ids["fim_sep"], *written("filename\n")]
    elif extra:
        files = written("".join(f"{each.text}\n" for each in extra))
    return [
        *tokenizer.beginning,
        *files,
        ids["fim_pre"],
        *written(before),
        ids["fim_suf"],
        *written(after),
        ids["fim_mid"],
        *written(begun),
    ]
