"""Reads the keys of a GGUF file's architecture, and keeps an account of those that were read."""

import math
from collections.abc import Collection
from typing import Any

from truedraft.engine.checkpoints.account import Account
from truedraft.engine.formats.gguf_file import GgufError, GgufFile


class GgufKeys:
    """Takes the keys of the architecture off the account. Lists of keys in ``with_zeros`` have zeros for
    layers without such a part; values of those in ``by_layer`` may differ from layer to layer, and have
    readers of their own."""

    def __init__(
        self, file: GgufFile, with_zeros: Collection[str] = (), by_layer: Collection[str] = ()
    ) -> None:
        self.prefix = f"{file.architecture}."
        self.path = file.path
        self.with_zeros = with_zeros
        self.by_layer = by_layer
        said = {key: value for key, value in file.metadata.items() if key.startswith(self.prefix)}
        self.account = Account(file.path, said)

    def says(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key; a list with one value for every layer counts as that value."""
        value = self.account.take(self.prefix + key, default)
        layers = self.account.entries.get(f"{self.prefix}block_count")
        if isinstance(value, list) and len(value) != layers:
            raise GgufError(f"{self.path} has {self.prefix}{key} for {len(value)} layers, not for {layers}")
        if isinstance(value, list) and key in self.with_zeros:
            value = [each for each in value if each != 0] or [0]
        if isinstance(value, list) and key in self.by_layer:
            return value[0] if value else None
        if isinstance(value, list) and key != "attention.sliding_window_pattern":
            if not value or any(other != value[0] for other in value):
                raise GgufError(
                    f"{self.path} has {self.prefix}{key} that differ from layer to layer, which is not served"
                )
            return value[0]
        return value

    def listed(self, key: str) -> list[Any] | None:
        """Returns a value for each layer, or for each of several parts; None if the file has none."""
        value = self.account.take(self.prefix + key)
        return value if isinstance(value, list) else None

    def number(self, key: str, kind: type, default: Any = None) -> Any:
        """Returns a number above zero; ``default`` if the file has none."""
        value = self.says(key)
        if value is None:
            return default
        fits = isinstance(value, kind) and not isinstance(value, bool)
        if not fits or not 0 < value < math.inf:
            raise GgufError(f"{self.path} has {self.prefix}{key} {value}, which is not supported")
        return value

    def needed(self, key: str, kind: type) -> Any:
        value = self.number(key, kind)
        if value is None:
            raise GgufError(f"{self.path} does not say its model's {self.prefix}{key}")
        return value

    def expect(self, key: str, *neutral: Any) -> None:
        self.account.expect(self.prefix + key, *neutral)
