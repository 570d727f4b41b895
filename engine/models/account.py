"""An account of what a checkpoint says: every tensor and every setting is used, or refused in a sentence.

Both readers keep one, of safetensors and of GGUF files. What a model takes from a checkpoint is taken off the
account; whatever is left at the end would have changed the text of another reader, so that it is refused,
unless it is listed here with the reason why it changes nothing.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from truedraft.engine.models.errors import ModelLoadError

Shape = tuple[int, ...]

# Names of tensors that change nothing, with the reason.
WITHOUT_EFFECT = {
    r"rotary_emb\.inv_freq$": "frequencies that follow from the config",
    r"\.(masked_bias|attn\.bias)$": "masks that GPT-2 once stored",
    r"position_ids$": "numbers from 0 on",
    r"^(model\.)?(mtp|nextn)\.": "layers that predict further tokens, which are not used",
    r"^(vision|visual|vision_tower|vision_model|multi_modal_projector|audio_tower)\.": "not of the text part",
    r"^model\.(vision|visual|vision_tower|vision_model|multi_modal_projector|audio_tower)\.": "nor these",
}
LISTED = re.compile("|".join(f"({pattern})" for pattern in WITHOUT_EFFECT))
# Values of a setting are shown up to so many letters.
MAX_SHOWN = 60


class Account:
    """``entries`` of ``source``, a file or folder: shapes of tensors or values of settings, by name."""

    def __init__(self, source: str, entries: Mapping[str, Any]) -> None:
        self.source = source
        self.entries = dict(entries)
        self.left = dict(entries)

    def take(self, name: str, default: Any = None) -> Any:
        """What the entry says; ``default`` if there is none."""
        self.left.pop(name, None)
        return self.entries.get(name, default)

    def expect(self, name: str, *neutral: Any) -> None:
        """Takes a setting that is served only where it changes nothing, unless it is taken already."""
        if name not in self.left:
            return
        value = self.take(name)
        if not any(_is_same(value, other) for other in neutral):
            served = " or ".join(map(shown, neutral))
            raise ModelLoadError(f"{self.source} has {name} = {shown(value)}; only {served} is served")

    def expect_shape(self, name: str, shape: Shape, said_by: str, name_there: str | None = None) -> None:
        """Takes a tensor, which is ``name_there`` in the checkpoint."""
        found = self.take(name_there or name)
        if found is None:
            raise ModelLoadError(f"{self.source} lacks weights of the model: {name}")
        if tuple(found) != shape:
            raise ModelLoadError(
                f"{self.source} has {name_there or name} of the shape {tuple(found)}, but by {said_by} it is "
                f"{shape}"
            )

    def close(self, sentence: str) -> None:
        """``ModelLoadError`` if something is left: ``sentence`` with its ``{name}`` and ``{value}``."""
        for name, value in self.left.items():
            raise ModelLoadError(f"{self.source} {sentence.format(name=name, value=shown(value))}")


def check_leftovers(
    source: str, names: Iterable[str], is_zero: Callable[[str], bool] = lambda name: False
) -> None:
    """``ModelLoadError`` for the first tensor that a model has no use for and that might change its text.

    ``is_zero`` tells of a bias whether it adds nothing.
    """
    for name in sorted(names):
        if LISTED.search(name) or (name.endswith(".bias") and is_zero(name)):
            continue
        raise ModelLoadError(
            f"{source} has a tensor {name}, which the model that its config names does not use: the config "
            "or the tensor is wrong"
        )


def check_token_ids(source: str, vocab_size: int, named: Mapping[str, Any]) -> None:
    """``ModelLoadError`` for a token that no request could name. Values are ids, lists of ids, or None."""
    for name, value in named.items():
        for token_id in _flat(value):
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
                raise ModelLoadError(
                    f"{source} has {name} {shown(value)}, but the model's {vocab_size} tokens are 0 to "
                    f"{vocab_size - 1}"
                )


def is_zero(tensor: torch.Tensor) -> bool:
    return not bool(tensor.count_nonzero())


def shown(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, float) or isinstance(other, float):
        return isinstance(value, int | float) and abs(value - other) <= 1e-6 * max(1.0, abs(other))
    return type(value) is type(other) and bool(value == other)


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple | set):
        for part in value:
            yield from _flat(part)
    elif value is not None:
        yield value
