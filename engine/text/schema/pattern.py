"""Writes patterns of a JSON schema so that llguidance allows only strings that match them in every dialect.

JSON Schema means ECMA-262, validators in Python use ``re``, and llguidance reads Rust's syntax. Where they
differ, a pattern is narrowed to the strings that match in all of them, or refused. llguidance 1.9 also takes
a class that has all control characters for one that has the quote and the backslash: no class here has
U+0000.
"""

import re
from typing import NamedTuple

from truedraft.engine.text.schema.place import shortened

SPACE = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
# The first has the characters that a class has in every dialect, the second those that it has in any: the
# inside of a class each.
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
# These are flags, conditions and look-arounds, and a bound that only Python knows.
UNSUPPORTED = re.compile(r"\(|\{,[0-9]*\}")
SPECIAL = r"\.+*?()|[]{}^$#&-~"
# These characters stand for themselves in every dialect, in a class and outside.
PLAIN = re.compile(r"[A-Za-z0-9 _,:;<>=!@%'\"]+")
PLAIN_IN_CLASS = re.compile(r"[A-Za-z0-9 _,:;<>=!@%'\"]+(?!-)")
MOST_SHOWN = 100

# Names are written with these escapes only, so that no name has two texts.
ESCAPES = {
    ord(character): rf"\\{written}" for character, written in zip('"\\\b\f\n\r\t', '"\\bfnrt', strict=True)
}
ESCAPES[ord("\\")] = r"\\\\"
UNWRITTEN = r'["\\\x{0}-\x{1f}\x{7f}]'
NAME_CHARACTER = rf'(?:[^{UNWRITTEN[1:]}|\\["\\bfnrt])'
SPACES = frozenset(range(9, 14))
ALL_ESCAPED = frozenset(ESCAPES)
ESCAPED_BY_SHORTHAND = {"d": frozenset[int](), "w": frozenset[int](), "s": SPACES & ALL_ESCAPED}
ESCAPED_BY_SHORTHAND |= {name.upper(): ALL_ESCAPED - some for name, some in ESCAPED_BY_SHORTHAND.items()}


class Exact(NamedTuple):
    """Is a pattern in exact form. ``is_narrowed`` says that some strings that match the pattern may not match
    ``text``."""

    text: str
    is_narrowed: bool


def exact_pattern(pattern: str) -> Exact:
    """Returns the pattern in exact form; raises ``ValueError`` for parts that cannot be written with the same
    meaning everywhere."""
    return _Writer(pattern).write()


def exact_name(pattern: str) -> Exact:
    """Returns the expression of a property's name that matches, as it stands in JSON, with its quotes."""
    return _NameWriter(pattern).write()


def exact_regex(pattern: str) -> str:
    """Returns the regular expression of a whole text, read as a schema's pattern is; it may have flags."""
    return _Writer(pattern, may_have_flags=True).write().text


class _Member(NamedTuple):
    """Is a part of a class. ``escaped`` are those of its characters that JSON writes with a backslash."""

    text: str
    escaped: frozenset[int] = frozenset()


class _Writer:
    """Goes through a pattern once, from piece to piece."""

    def __init__(self, pattern: str, *, may_have_flags: bool = False) -> None:
        self._pattern = pattern
        self._may_have_flags = may_have_flags
        self._place = 0
        self._depth = 0
        self._can_repeat = False
        self._is_narrowed = False

    def write(self) -> Exact:
        written = []
        while self._place < len(self._pattern):
            written.append(self._piece())
        if self._depth:
            raise self._error("a group without an end")
        return Exact(self._whole(written), self._is_narrowed)

    def _whole(self, pieces: list[str]) -> str:
        return "".join(pieces)

    def _piece(self) -> str:
        if found := QUANTIFIER.match(self._pattern, self._place):
            return self._quantifier(found)
        self._can_repeat = True
        if found := PLAIN.match(self._pattern, self._place):
            self._place = found.end()
            return self._run(found[0])
        if found := self._group():
            self._can_repeat = False
            return found[0]
        token = self._token()
        if token["shorthand"] or token["property"]:
            return self._class_of([self._member(token, is_negated=False)])
        match token["plain"]:
            case "[":
                return self._class()
            case ".":
                self._is_narrowed = True
                return self._negated([_Member(r"\n\r\x{2028}\x{2029}", frozenset({10, 13}))])
            case "^" | "$" | "|":
                self._can_repeat = False
                return token[0]
            case ")":
                self._depth -= 1
                if self._depth < 0:
                    raise self._error("a ')' without its '('")
                return token[0]
            case "(" | "{" if UNSUPPORTED.match(self._pattern, token.start()):
                raise self._error(f"{self._pattern[token.start() : token.start() + 3]!r}")
        code = self._code(token)
        if code == 0:
            raise self._error("U+0000")
        return self._single(code)

    def _quantifier(self, found: re.Match[str]) -> str:
        self._place = found.end()
        if self._pattern.startswith((*"*+?{",), self._place):
            raise self._error("a quantifier after another one")
        if not self._can_repeat:
            raise self._error(f"{found[0]!r}, which repeats nothing,")
        least, _, most = found[0].strip("{}?").partition(",")
        if most and int(least) > int(most):
            raise self._error(f"{found[0]!r}")
        self._can_repeat = False
        return found[0]

    def _group(self) -> re.Match[str] | None:
        found = GROUP.match(self._pattern, self._place)
        if found is None and self._may_have_flags:
            found = FLAGS.match(self._pattern, self._place)
        if found is not None:
            self._place = found.end()
            self._depth += not found[0].endswith(")")
        return found

    def _run(self, text: str) -> str:
        return text

    def _single(self, code: int) -> str:
        return _character(code)

    def _class(self) -> str:
        is_negated = self._pattern.startswith("^", self._place)
        self._place += is_negated
        members = []
        if self._pattern.startswith("]", self._place):
            raise self._error("an empty class or one that begins with ']'")
        while True:
            if found := PLAIN_IN_CLASS.match(self._pattern, self._place):
                self._place = found.end()
                members.append(_Member(found[0], ALL_ESCAPED & {*map(ord, {*found[0]} & {'"'})}))
                continue
            if (token := self._token())["plain"] == "]":
                break
            following = self._pattern[self._place : self._place + 2]
            if following[:1] != "-" or following[1:] == "]":
                members.append(self._member(token, is_negated=is_negated))
                continue
            self._place += 1
            members.append(self._range(self._code(token), self._code(self._token())))
        if is_negated:
            self._is_narrowed = True
            return self._negated(members)
        return self._class_of(members)

    def _range(self, first: int, last: int) -> _Member:
        if first > last:
            raise self._error("a range whose end is before its beginning")
        self._is_narrowed |= first == 0
        escaped = frozenset(code for code in ALL_ESCAPED if first <= code <= last)
        return _Member(f"{_character(first)}-{_character(last)}", escaped)

    def _negated(self, members: list[_Member]) -> str:
        return rf"[^{''.join(member.text for member in members)}\x{{0}}]"

    def _class_of(self, members: list[_Member]) -> str:
        """Returns a class without U+0000, which a range that starts there, a complement or a property may
        have."""
        inside = "".join(member.text for member in members)
        may_have_null = any(member.text.startswith((r"\x{0}", "[^", r"\p", r"\P")) for member in members)
        return rf"[[{inside}]--\x{{0}}]" if may_have_null else f"[{inside}]"

    def _member(self, token: re.Match[str], *, is_negated: bool) -> _Member:
        """Returns a member; in a negated class a shorthand leaves out all characters that any dialect gives
        it."""
        if name := token["shorthand"]:
            self._is_narrowed = True
            return _Member(SHORTHANDS[name][is_negated], ESCAPED_BY_SHORTHAND[name])
        if token["property"]:
            self._is_narrowed = True
            return _Member(rf"\{token['property']}", ALL_ESCAPED if is_negated else frozenset())
        code = self._code(token)
        return _Member(_character(code), ALL_ESCAPED & {code})

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
        shown = shortened(self._pattern, MOST_SHOWN)
        return ValueError(f"{what} is not supported in the pattern {shown!r}")


class _NameWriter(_Writer):
    """Writes a pattern of names, as ``json.dumps`` writes them in JSON; it may match anywhere in a name."""

    def _whole(self, pieces: list[str]) -> str:
        branches, depth = [list[str]()], 0
        for piece in pieces:
            depth += GROUP.fullmatch(piece) is not None
            depth -= piece == ")"
            if depth and piece in ("^", "$"):
                raise self._error(f"{piece!r} within a group of a name")
            if piece == "|" and not depth:
                branches.append([])
            else:
                branches[-1].append(piece)
        return f'"(?:{"|".join(map(self._branch, branches))})"'

    def _branch(self, pieces: list[str]) -> str:
        start, end = 0, len(pieces)
        while start < end and pieces[start] == "^":
            start += 1
        while end > start and pieces[end - 1] == "$":
            end -= 1
        if "^" in pieces[start:end] or "$" in pieces[start:end]:
            raise self._error("'^' or '$' within a name")
        anything = f"{NAME_CHARACTER}*"
        before, after = "" if start else anything, "" if end < len(pieces) else anything
        return f"{before}{''.join(pieces[start:end])}{after}"

    def _run(self, text: str) -> str:
        return text.replace('"', rf"(?:{ESCAPES[ord(chr(34))]})")

    def _single(self, code: int) -> str:
        if code in ESCAPES:
            return f"(?:{ESCAPES[code]})"
        if code < 0x20 or code == 0x7F:
            raise self._error("a control character in a name")
        return _character(code)

    def _negated(self, members: list[_Member]) -> str:
        inside = "".join(member.text for member in members)
        escaped = ALL_ESCAPED.difference(*(member.escaped for member in members))
        return _or_escaped(rf"[^{inside}{UNWRITTEN}]", escaped)

    def _class_of(self, members: list[_Member]) -> str:
        inside = "".join(member.text for member in members)
        escaped = frozenset[int]().union(*(member.escaped for member in members))
        return _or_escaped(f"[[{inside}]--{UNWRITTEN}]", escaped)


def _or_escaped(inside: str, escaped: frozenset[int]) -> str:
    written = "|".join(ESCAPES[code] for code in sorted(escaped))
    return f"(?:{inside}|{written})" if written else inside


def _character(code: int) -> str:
    character = chr(code)
    return character if character.isprintable() and character not in SPECIAL else f"\\x{{{code:x}}}"
