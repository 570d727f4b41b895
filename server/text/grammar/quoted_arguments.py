"""Arguments as Gemma's models write them: names and strings without JSON's quotes.

Names stand as they are, in alphabetical order; strings stand as they are between two marks, each a token;
other values are JSON.
"""

import re
from collections.abc import Iterable
from typing import Any

from truedraft.engine.text.schema.cleaning import NOT_ENFORCED, SchemaError
from truedraft.engine.text.schema.demands import Demands, Placed
from truedraft.engine.text.schema.notation import quoted
from truedraft.engine.text.schema.rules import Sequence
from truedraft.engine.text.schema.writer import Writer, Written

# What stands around a name; none can be part of it.
NOT_IN_NAMES = re.compile(r"[{}\[\],:\s]")
UNSUPPORTED = NOT_ENFORCED | {"pattern", "format", "patternProperties"}


class QuotedWriter(Writer):
    """``marks`` are the quote, its term, and the token after the arguments: no string spells a mark."""

    any_key = r"/[^{}\[\],:\s<>]+/"
    marks: tuple[str, str, str]

    def write_members(self) -> Written:
        """Writes what stands between the braces of the arguments."""
        root = self._meant(Placed(self._root, self._place))
        start = self._extra([], root.place)
        for demands in self._branches(root):
            start.alternatives += self._bodies(start, demands)
        return self._finish(start)

    def _in_order(self, names: Iterable[str]) -> Iterable[str]:
        return sorted(names)

    def _key(self, name: str) -> str:
        if NOT_IN_NAMES.search(name) or not name:
            raise SchemaError(f"{name[:100]!r} cannot be written as the name of a parameter", self._place)
        return name

    def _string(self, demands: Demands, choices: list[str] | None = None) -> Sequence:
        for limit in demands.texts:
            (keyword,) = limit
            raise SchemaError(f"'{keyword}' is not supported for this model", demands.place.at(keyword))
        least, most = demands.lengths
        if most is not None and least > most:
            return []
        quote, term, end = self.marks
        spelled = "|".join(re.escape(mark).replace("/", r"\/").replace('"', r"\"") for mark in (quote, end))
        count = f"{{{least},{'' if most is None else most}}}"
        text = self._term(rf"/(.|\n){count}/ & ~/(.|\n)*({spelled})(.|\n)*/")
        return [term, text, term]

    def _constant_text(self, value: str) -> Sequence:
        quote, term, end = self.marks
        if quote in value or end in value:
            raise ValueError(f"{value[:100]!r} cannot be written as an argument")
        return [term, quoted(value), term]

    def _pattern(self, pattern: str, placed: Placed) -> Any:
        raise SchemaError("patterns of names are not supported for this model", placed.place)
