"""Headers report what a request asks for and does not get, although it is answered.

A field that only asks for more than the answer's text, or is metadata, never costs the answer. With the
setting ``strict_fields`` it does.
"""

from truedraft.server.errors import UnsupportedParameterError

MAX_HEADER_LENGTH = 1000


class Leniency:
    """Collects notes on one request for headers. Field names come from the client, so the headers' length is
    limited."""

    def __init__(self, *, strict: bool) -> None:
        self.is_strict = strict
        self._ignored = _Notes()
        self._adjusted = _Notes()

    def ignore(self, name: object, code: str | None = None) -> None:
        """Reports that ``name`` is left out. A strict server refuses it."""
        if self.is_strict:
            shown = str(name)[:MAX_HEADER_LENGTH]
            raise UnsupportedParameterError(
                f"'{shown}' would be ignored, which this server refuses (strict_fields). Leave it out.",
                param=shown,
                code=code,
            )
        self._ignored.add(name)

    def adjust(self, name: str, value: int) -> None:
        """Reports the value that takes the place of the one that was asked for."""
        self._adjusted.add(f"{name}={value}")

    def headers(self) -> dict[str, str]:
        headers = {"x-truedraft-ignored": str(self._ignored), "x-truedraft-adjusted": str(self._adjusted)}
        return {name: value for name, value in headers.items() if value}


class _Notes:
    """Keeps notes in their order, each once, as printable ASCII within a length; later ones are dropped."""

    def __init__(self) -> None:
        self._notes: dict[str, None] = {}
        self._length = 0

    def add(self, note: object) -> None:
        if self._length >= MAX_HEADER_LENGTH:
            return
        text = str(note)[:MAX_HEADER_LENGTH].encode("unicode_escape").decode("ascii")
        if text not in self._notes:
            self._notes[text] = None
            self._length += len(text) + 2

    def __str__(self) -> str:
        return ", ".join(self._notes)[:MAX_HEADER_LENGTH]
