"""Finds the usable rules of a context-free grammar: a rule that no text satisfies is left out.

A parser would look for such a text until it gives up. The module knows nothing of schemas.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from truedraft.engine.text.schema.place import Place


@dataclass(eq=False, slots=True)
class Rule:
    """Is a rule whose ``alternatives`` are sequences. ``why`` says what leaves it without any, ``place`` what
    it is for."""

    name: str
    place: Place
    alternatives: list["Sequence"] = field(default_factory=list)
    why: str = ""
    is_usable: bool = False


@dataclass(frozen=True, slots=True)
class Repeat:
    """Repeats ``items`` as often as that; ``most`` is None where there is no limit."""

    items: "Sequence"
    least: int = 0
    most: int | None = None


# A text is a term of llguidance's Lark.
Item = str | Rule | Repeat
Sequence = list[Item]


def find_usable(rules: Iterable[Rule]) -> None:
    """Marks each rule that some text satisfies, in one pass over all items."""
    waiting: dict[int, list[tuple[Rule, list[int]]]] = {}
    found: list[Rule] = []
    for rule in rules:
        rule.is_usable = False
        for sequence in rule.alternatives:
            needed = {id(each) for each in _needed(sequence)}
            missing = [len(needed)]
            for each in needed:
                waiting.setdefault(each, []).append((rule, missing))
            if not needed and not rule.is_usable:
                rule.is_usable = True
                found.append(rule)
    while found:
        for rule, missing in waiting.get(id(found.pop()), ()):
            missing[0] -= 1
            if not missing[0] and not rule.is_usable:
                rule.is_usable = True
                found.append(rule)


def _needed(sequence: Sequence) -> Iterator[Rule]:
    """Yields the rules that a text of the sequence contains at least once."""
    for item in sequence:
        if isinstance(item, Rule):
            yield item
        elif isinstance(item, Repeat) and item.least:
            yield from _needed(item.items)


def cause_of(rule: Rule) -> Rule:
    """Returns the rule at fault where ``rule`` is not usable: one without alternatives, or one that needs
    itself."""
    seen: set[int] = set()
    while id(rule) not in seen:
        seen.add(id(rule))
        unusable = (
            each for sequence in rule.alternatives for each in _needed(sequence) if not each.is_usable
        )
        rule = next(unusable, rule)
    return rule


def used_from(start: Rule) -> Iterator[Rule]:
    """Yields the rules that a text may need, ``start`` first. All are usable."""
    seen, pending = {id(start)}, [start]
    while pending:
        yield (rule := pending.pop())
        for sequence in rule.alternatives:
            if _is_usable(sequence):
                for each in _all_in(sequence):
                    if each.is_usable and id(each) not in seen:
                        seen.add(id(each))
                        pending.append(each)


def _all_in(sequence: Sequence) -> Iterator[Rule]:
    for item in sequence:
        if isinstance(item, Rule):
            yield item
        elif isinstance(item, Repeat):
            yield from _all_in(item.items)


def _is_usable(sequence: Sequence) -> bool:
    return all(each.is_usable for each in _needed(sequence))


def line_of(rule: Rule) -> str:
    """Returns the rule in Lark's notation."""
    written = [_written(sequence) for sequence in rule.alternatives if _is_usable(sequence)]
    return f"{rule.name}: {' | '.join(dict.fromkeys(written))}"


def _written(sequence: Sequence) -> str:
    terms = []
    for item in sequence:
        if isinstance(item, str):
            terms.append(item)
        elif isinstance(item, Rule):
            terms.append(item.name)
        elif _is_usable(item.items) and item.most != 0:
            most = "" if item.most is None else item.most
            count = {(0, ""): "*", (0, 1): "?"}.get((item.least, most), f"{{{item.least},{most}}}")
            terms.append(f"({_written(item.items)}){count}")
    return " ".join(terms) or '""'
