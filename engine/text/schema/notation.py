"""Writes layouts of JSON: terms of llguidance's Lark, rules, and properties in a row.

It knows no schemas; ``engine.text.schema.writer`` expresses their meaning with it.
"""

import json
import re
from collections.abc import Set
from typing import Any, NamedTuple

from truedraft.engine.text.schema import rules
from truedraft.engine.text.schema.cleaning import SchemaError
from truedraft.engine.text.schema.place import Place
from truedraft.engine.text.schema.rules import Repeat, Rule

# This is far more than the parser takes: it ends work that would take minutes before that.
MOST_RULES = 20_000
MOST_COUNTED = 5000
SPACE = r"/[ \t\r\n]+/"
PLAIN_SEPARATOR = re.compile(r"[ \t\r\n,:]*")
BACKSLASH = "\\"
SLASH = re.compile(r"\\.|/", re.DOTALL)


class Layout(NamedTuple):
    """Says how JSON is laid out. ``space`` is an expression of what may stand between its parts."""

    comma: str = ","
    colon: str = ":"
    space: str = ""


def layout_of(schema: Any, default: Layout) -> Layout:
    """Returns the layout that the schema itself asks for, under llguidance's name for it."""
    asked = schema.get("x-guidance") if isinstance(schema, dict) else None
    if asked is None:
        return default
    place = Place("x-guidance")
    known = ("item_separator", "key_separator", "whitespace_pattern")
    if not isinstance(asked, dict):
        raise SchemaError("it is not an object", place)
    for name, value in asked.items():
        kind = str if name in known else bool if name == "whitespace_flexible" else None
        if kind is None:
            raise SchemaError(f"it may have {', '.join(known)} and whitespace_flexible only", place.at(name))
        if value is not None and not isinstance(value, kind):
            raise SchemaError(f"it is not a {'text' if kind is str else 'boolean'}", place.at(name))
    space = SPACE if asked.get("whitespace_flexible", bool(default.space)) else ""
    if pattern := asked.get("whitespace_pattern"):
        space = expression_of(pattern)
    return Layout(asked.get(known[0], default.comma), asked.get(known[1], default.colon), space)


class Notation:
    """Keeps the rules of one grammar and their terms, whose names begin with ``prefix``.

    Terms that are ``empty`` match no text.
    """

    def __init__(self, layout: Layout, prefix: str, empty: Set[str]) -> None:
        self._empty = empty
        self._layout = layout
        self._prefix = prefix
        self._rules: dict[tuple[object, ...], Rule] = {}
        self._terms: dict[str, str] = {}

    def _new(self, key: tuple[object, ...], place: Place) -> Rule:
        if len(self._rules) >= MOST_RULES:
            raise SchemaError(f"it takes more than {MOST_RULES} rules", place)
        rule = self._rules[key] = Rule(f"{self._prefix}{len(self._rules)}", place)
        return rule

    def _extra(self, alternatives: list[rules.Sequence], place: Place) -> Rule:
        """Returns a new rule that belongs to no schema."""
        rule = self._new(("extra", len(self._rules)), place)
        rule.alternatives = alternatives
        return rule

    def _leaf(self, term: str, place: Place) -> Rule:
        key = ("leaf", term)
        if key not in self._rules:
            rule = self._new(key, place)
            rule.alternatives = [] if term in self._empty else [[term]]
        return self._rules[key]

    def _term(self, expression: str) -> str:
        if expression not in self._terms:
            self._terms[expression] = f"{self._prefix.upper()}T{len(self._terms)}"
        return self._terms[expression]

    def _comma(self) -> rules.Sequence:
        return self._separator(self._layout.comma)

    def _colon(self) -> rules.Sequence:
        return self._separator(self._layout.colon)

    def _separator(self, text: str) -> rules.Sequence:
        written = quoted(text) if PLAIN_SEPARATOR.fullmatch(text) else self._term(expression_of(text))
        return [*self._space(), written, *self._space()]

    def _space(self) -> rules.Sequence:
        return [Repeat([self._term(self._layout.space)], 0, 1)] if self._layout.space else []

    def _any_number(
        self, members: list[tuple[rules.Sequence, bool]], pairs: list[rules.Sequence], place: Place
    ) -> rules.Sequence:
        """Returns the properties in their order, each of which may be missing unless it is required."""
        pair: rules.Sequence = [self._extra(pairs, place)] if pairs else []
        first: rules.Sequence = [Repeat([*pair, Repeat([*self._comma(), *pair])], 0, 1)] if pair else []
        # Properties are added from the end on.
        later: rules.Sequence = [Repeat([*self._comma(), *pair])] if pair else []
        for number in reversed(range(len(members))):
            member, is_required = members[number]
            begins_choice = number > 0 and not members[number - 1][1]
            if not is_required or begins_choice:
                later = [self._extra([later[::-1]], place)] if later else []
            if not is_required:
                first = [self._extra([[*member, *later], first], place)]
                later.append(Repeat([*self._comma(), *member], 0, 1))
                continue
            if number == 0 or begins_choice:
                first = [*member, *reversed(later)]
            later += [*reversed(member), *reversed(self._comma())]
        return first

    def _counted(
        self,
        members: list[tuple[rules.Sequence, bool]],
        pairs: list[rules.Sequence],
        limits: tuple[int, int | None],
        place: Place,
    ) -> rules.Sequence:
        """Returns the properties where their number has limits: a rule for each number so far."""
        least, most = limits
        pair: rules.Sequence = [self._extra(pairs, place)] if pairs else []
        states: dict[tuple[int, int], Rule] = {}

        def state(number: int, count: int) -> Rule:
            if (number, count) not in states:
                if len(states) >= MOST_COUNTED:
                    raise SchemaError("it counts too many properties", place)
                states[number, count] = self._extra([], place)
                pending.append((number, count))
            return states[number, count]

        pending: list[tuple[int, int]] = []
        start = state(0, 0)
        while pending:
            number, count = pending.pop()
            comma = self._comma() if count else []
            alternatives = states[number, count].alternatives
            if number == len(members):
                room = None if most is None else most - count
                alternatives += self._more(pair, max(least - count, 0), room, is_first=not count)
                continue
            member, is_required = members[number]
            if most is None or count < most:
                following = count + 1 if most is not None or count < least else count
                alternatives.append([*comma, *member, state(number + 1, max(following, 1))])
            if not is_required:
                alternatives.append([state(number + 1, count)])
        return [start]

    def _more(
        self, pair: rules.Sequence, least: int, most: int | None, *, is_first: bool
    ) -> list[rules.Sequence]:
        """Returns the ways in which further properties may follow; an empty one if none need to."""
        if not pair or most == 0:
            return [] if least else [[]]
        if not is_first:
            return [[Repeat([*self._comma(), *pair], least, most)]]
        rest = Repeat([*self._comma(), *pair], max(least - 1, 0), None if most is None else most - 1)
        return [[*pair, rest]] + ([] if least else [[]])


def json_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def quoted(text: str) -> str:
    """Returns a text as a term of Lark."""
    return json_of(text)


def expression_of(pattern: str) -> str:
    return f"/{SLASH.sub(lambda found: found[0] if len(found[0]) > 1 else BACKSLASH + found[0], pattern)}/"
