"""Patterns of a JSON schema, written so that llguidance allows no string which they do not match.

JSON Schema means ECMA-262, validators in Python use ``re``, and llguidance reads Rust's syntax. Where they
differ a pattern is narrowed to what all of them match, or refused. llguidance 1.9 also takes a class that
has all control characters for one that has the quote and the backslash: no class here has U+0000.
"""

import re
from typing import Any, NamedTuple

from pydantic_core import from_json

from truedraft.engine.text.schema.one_of import NAMED_SCHEMAS, VALUES, as_any_of

SPACE = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
# What every dialect has in a class, and what any has: the inside of a class each.
SHORTHANDS = {
    "d": ("0-9", r"\p{Nd}"),
    "w": ("0-9A-Z_a-z", r"_\p{L}\p{M}\p{N}\p{Pc}\p{Join_Control}\p{Alphabetic}"),
    "s": (SPACE, SPACE + r"\x{1c}-\x{1f}\x{85}\x{feff}"),
}
SHORTHANDS |= {name.upper(): (f"[^{some}]", f"[^{every}]") for name, (every, some) in SHORTHANDS.items()}
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
TOKEN = re.compile(
    r"""\\(?: x(?P<two>[0-9a-fA-F]{2}) | u(?P<four>[0-9a-fA-F]{4}) | u\{(?P<long>[0-9a-fA-F]{1,6})\}
            | (?P<control>[tnvfr]) | (?P<shorthand>[dDwWsS]) | (?P<property>[pP]\{[A-Za-z_=]+\})
            | (?P<itself>[!-/:-@\[-`{-~]) | (?P<bad>[\s\S]?) )
      | (?P<plain>[\s\S])""",
    re.VERBOSE,
)
QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")
GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_][A-Za-z_0-9]*>|(?!\?))")
FLAGS = re.compile(r"\(\?(?:[ims]+(?:-[ims]+)?|-[ims]+)[:)]")
# Flags, conditions and look-arounds; a bound that is one in Python only.
UNSUPPORTED = re.compile(r"\(|\{,[0-9]*\}")
SPECIAL = r"\.+*?()|[]{}^$#&-~"


class Exact(NamedTuple):
    """``is_narrowed``: some strings that match the pattern may not match ``text``."""

    text: str
    is_narrowed: bool


def exact_schema(schema: Any) -> Any:
    """``schema`` with patterns that llguidance reads as they are meant. ``ValueError`` names one that cannot
    be written so."""
    if isinstance(schema, list):
        return [exact_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    written: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "patternProperties" and isinstance(value, dict):
            written |= _exact_names(value, schema)
        else:
            written[keyword] = _exact_value(keyword, value)
    return written


def _exact_value(keyword: str, value: Any) -> Any:
    if keyword == "pattern" and isinstance(value, str):
        return exact_pattern(value).text
    if keyword in NAMED_SCHEMAS and isinstance(value, dict):
        return {name: exact_schema(each) for name, each in value.items()}
    return value if keyword in VALUES else exact_schema(value)


def _exact_names(by_pattern: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Returns what is written for the ``patternProperties`` of a schema."""
    names = {name: exact_pattern(name) for name in by_pattern}
    written: dict[str, Any] = {
        "patternProperties": {names[name].text: exact_schema(each) for name, each in by_pattern.items()}
    }
    # Names that only the wider pattern matches would count as additional ones, and have any value.
    narrowed = [name for name, exact in names.items() if exact.is_narrowed]
    if narrowed and schema.get("additionalProperties", False) is not False:
        raise ValueError(f"additionalProperties is not supported together with the pattern {narrowed[0]!r}")
    if narrowed:
        written["additionalProperties"] = False
    return written


def read_schema(source: Any) -> Any:
    """A schema that is given as an object, or written out."""
    return exact_schema(as_any_of(from_json(source) if isinstance(source, str) else source))


def exact_pattern(pattern: str) -> Exact:
    return _Writer(pattern).write()


def exact_regex(pattern: str) -> str:
    """Returns the regular expression of a whole text, read as a schema's pattern is; it may have flags."""
    return _Writer(pattern, may_have_flags=True).write().text


class _Writer:
    def __init__(self, pattern: str, *, may_have_flags: bool = False) -> None:
        self._pattern = pattern
        self._may_have_flags = may_have_flags
        self._place = 0
        self._is_narrowed = False

    def write(self) -> Exact:
        written = []
        while self._place < len(self._pattern):
            written.append(self._piece())
        return Exact("".join(written), self._is_narrowed)

    def _piece(self) -> str:
        if found := QUANTIFIER.match(self._pattern, self._place) or GROUP.match(self._pattern, self._place):
            self._place = found.end()
            if found[0][0] != "(" and self._pattern.startswith((*"*+?{",), self._place):
                raise self._error("a quantifier after another one")
            return found[0]
        if self._may_have_flags and (found := FLAGS.match(self._pattern, self._place)):
            self._place = found.end()
            return found[0]
        token = self._token()
        if token["shorthand"] or token["property"]:
            return _class_of([self._member(token, is_negated=False)])
        match token["plain"]:
            case "[":
                return self._class()
            case ".":
                self._is_narrowed = True
                return r"[^\x{0}\n\r\x{2028}\x{2029}]"
            case "^" | "$" | "|" | ")":
                return token[0]
            case "(" | "{" if UNSUPPORTED.match(self._pattern, token.start()):
                raise self._error(f"{self._pattern[token.start() : token.start() + 3]!r}")
        code = self._code(token)
        if code == 0:
            raise self._error("U+0000")
        return _character(code)

    def _class(self) -> str:
        is_negated = self._pattern.startswith("^", self._place)
        self._place += is_negated
        members = []
        if self._pattern.startswith("]", self._place):
            raise self._error("an empty class or one that begins with ']'")
        while (token := self._token())["plain"] != "]":
            following = self._pattern[self._place : self._place + 2]
            if following[:1] != "-" or following[1:] == "]":
                members.append(self._member(token, is_negated=is_negated))
                continue
            self._place += 1
            first, last = self._code(token), self._code(self._token())
            members.append(f"{_character(first)}-{_character(last)}")
            self._is_narrowed |= first == 0
        if is_negated:
            self._is_narrowed = True
            return rf"[^{''.join(members)}\x{{0}}]"
        return _class_of(members)

    def _member(self, token: re.Match[str], *, is_negated: bool) -> str:
        """What a negated class leaves out is more than what another one has, where dialects differ."""
        if token["shorthand"]:
            self._is_narrowed = True
            return SHORTHANDS[token["shorthand"]][is_negated]
        if token["property"]:
            self._is_narrowed = True
            return rf"\{token['property']}"
        return _character(self._code(token))

    def _token(self) -> re.Match[str]:
        found = TOKEN.match(self._pattern, self._place)
        if found is None:
            raise self._error("a class without an end")
        if found["bad"] is not None:
            raise self._error(f"the escape {found[0]!r}")
        self._place = found.end()
        return found

    def _code(self, token: re.Match[str]) -> int:
        """Returns the code point of a token that is a single character."""
        digits = token["two"] or token["four"] or token["long"]
        if digits:
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self._error(f"the character {token[0]}")
            return code
        if token["control"]:
            return CONTROLS[token["control"]]
        if token["shorthand"] or token["property"]:
            raise self._error(f"a range with {token[0]!r}")
        return ord(token["itself"] or token["plain"])

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{what} is not supported in the pattern {self._pattern!r}")


def _class_of(members: list[str]) -> str:
    """Without U+0000, which only a range from there, a complement or a property can have."""
    inside = "".join(members)
    may_have_null = any(member.startswith((r"\x{0}", "[^", r"\p", r"\P")) for member in members)
    return rf"[[{inside}]--\x{{0}}]" if may_have_null else f"[{inside}]"


def _character(code: int) -> str:
    character = chr(code)
    return character if character.isprintable() and character not in SPECIAL else f"\\x{{{code:x}}}"
