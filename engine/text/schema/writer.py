"""Turns a JSON schema into rules of a grammar in llguidance's Lark, so that every text that matches is valid.

llguidance has a compiler of schemas of its own. It reads numbers as doubles, lets them have thousands of
digits, and says of a schema that nothing satisfies only that the parser gave up. Here llguidance gets strings
alone as schemas. Schemas that cannot be written are refused by the place of the fault.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from truedraft.engine.text.schema import rules, times
from truedraft.engine.text.schema.cleaning import ENFORCED, ENFORCED_FORMATS, NOT_ENFORCED, SchemaError
from truedraft.engine.text.schema.demands import (
    Demands,
    KeywordError,
    Members,
    Placed,
    demands_of,
    joined,
    same_value,
)
from truedraft.engine.text.schema.notation import Layout, Notation, expression_of, json_of, quoted
from truedraft.engine.text.schema.numbers import is_number, text_of
from truedraft.engine.text.schema.one_of import exclusive
from truedraft.engine.text.schema.pattern import NAME_CHARACTER, exact_name, exact_pattern
from truedraft.engine.text.schema.place import Place
from truedraft.engine.text.schema.references import Resources
from truedraft.engine.text.schema.rules import Repeat, Rule

MOST_STEPS = 1_000_000
# Each pattern of names doubles the kinds of names.
MOST_PATTERNS = 4
STRING = {"x-guidance": {"whitespace_flexible": False}}
SPEAKING = (ENFORCED | NOT_ENFORCED) - {"$defs", "definitions"}


@dataclass(frozen=True, slots=True)
class Options:
    """Holds options. ``leave_out`` is told the places of keywords that make no sense; without it they are
    errors. ``go_on`` is called now and then, and may raise an exception to end work that nobody waits for.
    ``empty`` has terms of strings that are known to match no text."""

    leave_out: Callable[[Place], object] | None = None
    go_on: Callable[[], None] = lambda: None
    empty: Set[str] = frozenset()


class Written(NamedTuple):
    """Holds the written rules. ``start`` is the rule of the whole. ``places`` says what each rule is for, by
    its name."""

    lines: list[str]
    start: str
    places: Mapping[str, Place]


class Writer(Notation):
    """Writes the rules of one schema; ``root`` has the definitions. Names begin with ``prefix``."""

    any_key = f'/"{NAME_CHARACTER}*"/'

    def __init__(self, root: Any, place: Place, layout: Layout, prefix: str, options: Options) -> None:
        super().__init__(layout, prefix, options.empty)
        self._root = root
        self._place = place
        self._options = options
        self._pending: list[tuple[Rule, tuple[Placed, ...]]] = []
        self._kept: list[Any] = []  # Schemas made here are kept, as their rules are found by ``id``.
        self._one_of: dict[int, list[Any]] = {}
        self._names: dict[str, _Name] = {}
        self._resources = Resources(root, place)
        self._indexes: dict[int, _Index] = {}
        self._judged: dict[int, list[tuple[Demands, set[object]]]] = {}
        self._spent = 0

    def write(self) -> Written:
        return self._finish(self._rule((Placed(self._root, self._place),)))

    def _finish(self, start: Rule) -> Written:
        while self._pending:
            self._options.go_on()
            rule, placed = self._pending.pop()
            rule.alternatives = self._alternatives(rule, placed)
        rules.find_usable(self._rules.values())
        if not start.is_usable:
            cause = rules.cause_of(start)
            why = "it needs itself without an end" if cause.alternatives else cause.why
            raise SchemaError(f"nothing satisfies it{': ' if why else ''}{why}", cause.place)
        used = [*rules.used_from(start)]
        lines = [f"{name}: {term}" for term, name in self._terms.items()]
        return Written(
            [*map(rules.line_of, used), *lines], start.name, {each.name: each.place for each in used}
        )

    # The functions below write schemas.

    def _rule(self, placed: Iterable[Placed]) -> Rule:
        """Returns the rule of a value that all of them allow; it is written later."""
        found = [self._meant(each) for each in placed]
        found = [each for each in found if each.schema is not True and each.schema != {}]
        key = tuple(dict.fromkeys(id(each.schema) for each in found))
        if key not in self._rules:
            rule = self._new(key, found[0].place if found else self._place)
            self._pending.append((rule, tuple(found)))
        return self._rules[key]

    def _meant(self, placed: Placed) -> Placed:
        """Follows a reference if no other keyword stands next to it."""
        seen: set[int] = set()
        while isinstance(placed.schema, dict) and placed.schema.keys() & SPEAKING == {"$ref"}:
            if id(placed.schema) in seen:
                raise SchemaError("it refers to itself", placed.place.at("$ref"))
            seen.add(id(placed.schema))
            placed = self._target(placed)
        return placed

    def _target(self, placed: Placed) -> Placed:
        reference, at = placed.schema["$ref"], placed.place.at("$ref")
        found = self._resources.find(reference, placed.schema) if isinstance(reference, str) else None
        if found is None:
            self._fault("it does not exist in the schema itself, as '#/$defs/name' would", at)
            return Placed(True, at)
        return found

    def _branches(self, placed: Placed, seen: tuple[int, ...] = ()) -> list[Demands]:
        """Returns the demands of a schema, as alternatives."""
        schema, place = placed
        if schema is True:
            return [Demands(place)]
        if schema is False:
            return []
        if not isinstance(schema, dict):
            raise SchemaError("it is neither an object nor a boolean", place)
        if id(schema) in seen:
            raise SchemaError("it refers to itself", place)
        seen = (*seen, id(schema))
        unsupported = next((keyword for keyword in schema if keyword in NOT_ENFORCED), None)
        if unsupported is not None:
            raise SchemaError(f"'{unsupported}' is not supported", place.at(unsupported))
        found = [self._demands(schema, place)]
        if "$ref" in schema:
            found = self._joined(found, self._branches(self._target(placed), seen), place)
        parts = [self._meant(each) for each in self._schemas(placed, "allOf")] if "allOf" in schema else []
        for part in {id(each.schema): each for each in parts}.values():
            found = self._joined(found, self._branches(part, seen), place)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = [
                    each for one in self._schemas(placed, keyword) for each in self._branches(one, seen)
                ]
                found = self._joined(found, options, place)
        return found

    def _demands(self, schema: Mapping[str, Any], place: Place) -> Demands:
        while True:
            try:
                return demands_of(schema, place)
            except KeywordError as error:
                self._fault(str(error), place.at(error.keyword))
                schema = {name: value for name, value in schema.items() if name != error.keyword}

    def _fault(self, why: str, place: Place) -> None:
        """Reports a keyword that is left out, or refuses it."""
        if self._options.leave_out is None:
            raise SchemaError(why, place)
        self._options.leave_out(place)

    def _joined(self, first: list[Demands], other: list[Demands], place: Place) -> list[Demands]:
        sizes = [sum(each.size for each in side) for side in (first, other)]
        self._spend(len(first) * sizes[1] + len(other) * sizes[0], place)
        return [joined(one, another) for one, another in product(first, other)]

    def _spend(self, steps: int, place: Place) -> None:
        """Bounds rules that grow faster than the schema."""
        self._spent += steps
        if self._spent > MOST_STEPS:
            raise SchemaError("it combines too many schemas", place)

    def _schemas(self, placed: Placed, keyword: str) -> list[Placed]:
        schemas, place = placed.schema[keyword], placed.place.at(keyword)
        if not isinstance(schemas, list) or not schemas:
            raise SchemaError("it is not a list of schemas", place)
        if keyword == "oneOf":
            schemas = self._exclusive(schemas, place)
        return [Placed(schema, place.at(number)) for number, schema in enumerate(schemas)]

    def _exclusive(self, schemas: list[Any], place: Place) -> list[Any]:
        found = self._one_of.get(id(schemas))
        if found is None:
            found = exclusive(schemas, self._root)
            if found is None:
                raise SchemaError(
                    "its schemas do not exclude each other by a type or a value; use anyOf", place
                )
            self._one_of[id(schemas)] = found
            self._kept.append(schemas)
        return found

    # The functions below write values.

    def _alternatives(self, rule: Rule, placed: tuple[Placed, ...]) -> list[rules.Sequence]:
        if len(placed) == 1 and isinstance(placed[0].schema, dict):
            only = [*(placed[0].schema.keys() & SPEAKING)]
            if only in (["anyOf"], ["oneOf"]):
                return [[self._rule((each,))] for each in self._schemas(placed[0], only[0])]
        found = [Demands(rule.place)]
        for each in placed:
            found = self._joined(found, self._branches(each), rule.place)
        try:
            written = [each for demands in found for each in self._values(rule, demands)]
        except ValueError as error:
            if isinstance(error, SchemaError):
                raise
            raise SchemaError(str(error), rule.place) from None
        if any(each.schema is False for each in placed):
            rule.why = "it is false"
        return written

    def _values(self, rule: Rule, demands: Demands) -> list[rules.Sequence]:
        if demands.choices is not None:
            return self._choices(rule, demands)
        scalars, written = [], list[rules.Sequence]()
        if "null" in demands.types:
            scalars.append('"null"')
        if "boolean" in demands.types:
            scalars.append('"true" | "false"')
        if demands.types & {"integer", "number"}:
            term = self._number(demands)
            if term.startswith("%json"):
                written.append([self._leaf(term, demands.place)])
            elif term:
                scalars.append(term)
            else:
                rule.why = "no number lies between its bounds"
        if scalars:
            written.append([self._term(" | ".join(scalars))])
        if "string" in demands.types and (string := self._string(demands)):
            written.append(string)
        if "array" in demands.types:
            written += self._array(demands)
        if "object" in demands.types:
            written += self._object(rule, demands)
        return written

    def _number(self, demands: Demands) -> str:
        try:
            return demands.numbers().expression()
        except ValueError as error:
            self._fault(str(error), demands.place.at("multipleOf"))
            return replace(demands, multiples=()).numbers().expression()

    def _choices(self, rule: Rule, demands: Demands) -> list[rules.Sequence]:
        assert demands.choices is not None
        if not demands.choices:
            rule.why = "it has no choices"
        scalars, limited, written = [], list[str](), list[rules.Sequence]()
        for value in demands.choices:
            if not demands.allow(value) or not self._is_valid_inside(demands, value):
                continue
            if isinstance(value, str) and demands.texts:
                limited.append(value)
                continue
            constant = self._constant(value)
            if len(constant) == 1 and isinstance(constant[0], str):
                scalars.append(constant[0])
            else:
                written.append(constant)
        if limited and (string := self._string(demands, limited)):
            written.append(string)
        return [*written, [self._term(" | ".join(dict.fromkeys(scalars)))]] if scalars else written

    def _constant(self, value: Any) -> rules.Sequence:
        """Returns JSON in the same pieces as any other value: a parser reads each to its end."""
        match value:
            case str():
                return self._constant_text(value)
            case list():
                items = [self._constant(each) for each in value]
                return [quoted("["), *self._space(), *self._listed(items), *self._space(), quoted("]")]
            case dict():
                names = self._in_order(value)
                members = [[*self._name(name), *self._constant(value[name])] for name in names]
                return [quoted("{"), *self._space(), *self._listed(members), *self._space(), quoted("}")]
        return [quoted(text_of(value) if is_number(value) else json_of(value))]

    def _constant_text(self, value: str) -> rules.Sequence:
        return [quoted(json_of(value))]

    def _listed(self, sequences: list[rules.Sequence]) -> rules.Sequence:
        comma = self._comma()
        return [item for sequence in sequences for item in (*comma, *sequence)][len(comma) :]

    def _is_valid_inside(self, demands: Demands, value: Any) -> bool:
        """Tells whether the items or the properties of a choice are valid."""
        if isinstance(value, list):
            return all(
                self._is_valid(placed, each)
                for items in demands.items
                for number, each in enumerate(value)
                for placed in [items.first[number] if number < len(items.first) else items.rest]
                if placed is not None
            )
        if isinstance(value, dict):
            return all(
                self._is_valid(placed, each)
                for name, each in value.items()
                for placed in self._about(demands.members, name)
            )
        return True

    def _is_valid(self, placed: Placed, value: Any) -> bool:
        if id(placed.schema) not in self._judged:
            branches = [(each, {*map(same_value, each.choices or ())}) for each in self._branches(placed)]
            self._judged[id(placed.schema)] = branches
        self._spend(1, placed.place)
        for demands, choices in self._judged[id(placed.schema)]:
            if demands.choices is not None and same_value(value) not in choices:
                continue
            if isinstance(value, str) and demands.texts:
                raise SchemaError(
                    "patterns and formats are not supported in what a choice has to match", placed.place
                )
            if demands.allow(value) and self._is_valid_inside(demands, value):
                return True
        return False

    def _string(self, demands: Demands, choices: list[str] | None = None) -> rules.Sequence:
        """Returns a string, which is left to llguidance."""
        (least, most), written = demands.lengths, dict[str, Any]()
        if most is not None and least > most:
            return []
        limits = [dict[str, Any](self._limit(each, demands.place)) for each in demands.texts]
        if choices is not None:
            limits.append({"enum": choices})
        if len(limits) == 1:
            written = limits.pop()
        elif limits:
            written = {"allOf": limits}
        if choices is None:
            written |= {"minLength": least} if least else {}
            written |= {"maxLength": most} if most is not None else {}
        return [self._leaf(f"%json {json_of({'type': 'string'} | written | STRING)}", demands.place)]

    def _limit(self, limit: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        ((keyword, value),) = limit.items()
        if not isinstance(value, str):
            raise SchemaError("it is not a text", place.at(keyword))
        if keyword == "format":
            if value not in ENFORCED_FORMATS:
                raise SchemaError(f"the format {value[:50]!r} is not supported", place.at(keyword))
            return {"pattern": times.PATTERNS[value]} if value in times.PATTERNS else limit
        try:
            return {"pattern": exact_pattern(value).text}
        except ValueError as error:
            raise SchemaError(str(error), place.at(keyword)) from None

    # The functions below write arrays.

    def _array(self, demands: Demands) -> list[rules.Sequence]:
        least, most = demands.counts
        if most is not None and least > most:
            return []
        num_first = max((len(items.first) for items in demands.items), default=0)
        rest = self._rule(each.rest for each in demands.items if each.rest is not None)
        num_more = None if most is None else max(most - num_first, 0)
        more = Repeat([*self._comma(), rest], max(least - num_first, 0), num_more)
        if not num_first:
            return self._items_of_one_kind(rest, least, most)
        later: rules.Sequence = [more]
        for number in reversed(range(num_first if most is None else min(num_first, most))):
            item = self._rule(
                placed
                for items in demands.items
                for placed in [items.first[number] if number < len(items.first) else items.rest]
                if placed is not None
            )
            comma = self._comma() if number else []
            if number >= least:
                later = [self._extra([[*comma, item, *later], []], demands.place)]
            else:
                later = [*comma, item, *later]
        return [[quoted("["), *self._space(), *later, *self._space(), quoted("]")]]

    def _items_of_one_kind(self, item: Rule, least: int, most: int | None) -> list[rules.Sequence]:
        more = Repeat([*self._comma(), item], max(least - 1, 0), None if most is None else max(most - 1, 0))
        first, last = [quoted("["), *self._space()], [*self._space(), quoted("]")]
        some = [] if most == 0 else [[*first, item, more, *last]]
        return some if least else [[*first, *last[-1:]], *some]

    # The functions below write objects.

    def _object(self, rule: Rule, demands: Demands) -> list[rules.Sequence]:
        first, last = [quoted("{"), *self._space()], [*self._space(), quoted("}")]
        return [[*first, *body, *last] for body in self._bodies(rule, demands)]

    def _bodies(self, rule: Rule, demands: Demands) -> list[rules.Sequence]:
        """Returns the alternatives between the braces of an object."""
        least, most = demands.names
        names = dict.fromkeys(name for each in demands.members for name in each.properties)
        names |= dict.fromkeys(demands.required)
        members = []
        for name in self._in_order(names):
            about = self._about(demands.members, name)
            value = self._rule(about)
            is_required = name in demands.required
            if is_required and any(each.schema is False for each in about):
                rule.why = f"the property {name[:100]!r} is required, and is not allowed"
                return []
            members.append(([*self._name(name), value], is_required))
        pairs = self._pairs(demands.members, [*names])
        most = None if most is None or (not pairs and most >= len(members)) else most
        if most is not None and least > most:
            return []
        if least <= len(demands.required) and most is None:
            return [self._any_number(members, pairs, rule.place)]
        return [self._counted(members, pairs, (least, most), rule.place)]

    def _in_order(self, names: Iterable[str]) -> Iterable[str]:
        return names

    def _about(self, members: tuple[Members, ...], name: str) -> list[Placed]:
        """Returns the schemas of a property."""
        by_name, speaking, _ = self._indexed(members)
        self._spend(len(speaking) + 1, self._place)
        found = [*by_name.get(name, ())]
        for each in speaking:
            own = [placed for text, placed in each.patterns.items() if self._pattern(text, placed).has(name)]
            found += own
            if not own and name not in each.properties and each.others is not None:
                found.append(each.others)
        return found

    def _indexed(self, members: tuple[Members, ...]) -> "_Index":
        """Returns the schemas that mention a name: some by that name, and those that mention all."""
        if id(members) not in self._indexes:
            by_name: dict[str, list[Placed]] = {}
            for each in members:
                for name, placed in each.properties.items():
                    by_name.setdefault(name, []).append(placed)
            patterns = {text: placed for each in members for text, placed in each.patterns.items()}
            for placed in [*patterns.values()][MOST_PATTERNS:]:
                raise SchemaError(
                    f"more than {MOST_PATTERNS} patterns of names for one object are not supported",
                    placed.place,
                )
            speaking = [each for each in members if each.patterns or each.others is not None]
            self._indexes[id(members)] = _Index(by_name, speaking, members)
        return self._indexes[id(members)]

    def _pattern(self, pattern: str, placed: Placed) -> "_Name":
        if pattern not in self._names:
            try:
                self._names[pattern] = _Name(pattern)
            except ValueError as error:
                raise SchemaError(str(error), placed.place) from None
        return self._names[pattern]

    def _pairs(self, members: Sequence[Members], names: Sequence[str]) -> list[rules.Sequence]:
        """Returns how a property with none of the ``names`` may be written."""
        patterns = {name: placed for each in members for name, placed in each.patterns.items()}
        taken = f" & ~({' | '.join(quoted(self._key(name)) for name in names)})" if names else ""
        pairs = []
        for matched in product((True, False), repeat=len(patterns)):
            chosen = dict(zip(patterns, matched, strict=True))
            about = [placed for each in members for placed in self._about_matched(each, chosen)]
            if any(placed.schema is False for placed in about):
                continue
            terms = [self._term(self.any_key)]
            for pattern, is_matched in chosen.items():
                term = self._term(self._pattern(pattern, patterns[pattern]).term)
                terms.append(term if is_matched else f"~{term}")
            key = self._term(" & ".join(terms) + taken)
            pairs.append([key, *self._colon(), self._rule(about)])
        return pairs

    def _about_matched(self, members: Members, matched: Mapping[str, bool]) -> list[Placed]:
        """Returns the schemas for a matched name. It may match a pattern in one dialect only, so the
        pattern's demands hold in any case."""
        patterns = members.patterns.items()
        found = [placed for pattern, placed in patterns if matched[pattern]]
        if not found and members.others is not None:
            found = [members.others]
        return found + [
            placed
            for pattern, placed in patterns
            if not matched[pattern] and self._pattern(pattern, placed).is_narrowed
        ]

    def _key(self, name: str) -> str:
        return json_of(name)

    def _name(self, name: str) -> rules.Sequence:
        return [quoted(self._key(name)), *self._colon()]


class _Index(NamedTuple):
    by_name: Mapping[str, list[Placed]]
    speaking: list[Members]
    members: tuple[Members, ...]  # It is kept, as it is found by ``id``.


class _Name:
    """Is a pattern of names."""

    def __init__(self, pattern: str) -> None:
        exact = exact_name(pattern)
        self.term = expression_of(exact.text)
        self.is_narrowed = exact.is_narrowed
        self._start: LLMatcher | None = None
        self._known: dict[str, bool] = {}

    def has(self, name: str) -> bool:
        if name not in self._known:
            self._known[name] = self._matches(name)
        return self._known[name]

    def _matches(self, name: str) -> bool:
        if self._start is None:
            self._start = LLMatcher(_bytes(), f"start: {self.term}", log_level=0)
            if self._start.is_error():
                raise ValueError("the pattern of names cannot be read")
        matcher, ids = self._start.deep_copy(), [*json_of(name).encode()]
        num_read = matcher.try_consume_tokens(ids)
        if matcher.is_error():
            raise ValueError("the pattern of names is too complex")
        return bool(num_read == len(ids) and matcher.is_accepting())


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")
