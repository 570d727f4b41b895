"""Headers report what a request asks for and does not get, although it is answered.

A field that only asks for more than the answer's text, or is metadata, never costs the answer. With the
setting ``strict_fields`` it does.
"""

from collections.abc import Iterable

from truedraft.server.errors import UnsupportedParameterError

MAX_HEADER_LENGTH = 1000


class Leniency:
    """It keeps the notes of one request, whose field names come from the client."""

    def __init__(self, *, strict: bool) -> None:
        self.is_strict = strict
        self._ignored: dict[str, None] = {}  # in order, each once
        self._adjusted: dict[str, int] = {}

    def ignore(self, name: str, code: str | None = None) -> None:
        """Reports that ``name`` is left out. A strict server refuses it."""
        if self.is_strict:
            raise UnsupportedParameterError(
                f"'{name}' would be ignored, which this server refuses (strict_fields). Leave it out.",
                param=name,
                code=code,
            )
        self._ignored[name] = None

    def adjust(self, name: str, value: int) -> None:
        """Reports the value that takes the place of the one that was asked for."""
        self._adjusted[name] = value

    def headers(self) -> dict[str, str]:
        headers = {}
        if self._ignored:
            headers["x-truedraft-ignored"] = _header(self._ignored)
        if self._adjusted:
            headers["x-truedraft-adjusted"] = _header(f"{name}={n}" for name, n in self._adjusted.items())
        return headers


def _header(entries: Iterable[str]) -> str:
    """Returns them as ASCII, printable and short."""
    escaped = (entry.encode("unicode_escape").decode("ascii") for entry in entries)
    return ", ".join(escaped)[:MAX_HEADER_LENGTH]
