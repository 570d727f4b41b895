"""Patterns of schemas: what llguidance lets through is what validators in Python and JavaScript match."""

import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from tests.server.schema_texts import accepts
from truedraft.engine.text.schema.pattern import exact_name, exact_pattern, exact_regex

BYTES = LLTokenizer("byte")
CHARACTERS = 'ab1_-"\\/]^ \n\r\t\x00\x01\x0b\x1c\x1f\x7f\x85\xa0éſ٣²\u0301\u2028\u200d\ufeff名😀'
# ECMA-262's own meaning of what its shorthands and its dot match.
ECMA = {
    "d": "[0-9]",
    "w": "[0-9A-Za-z_]",
    "s": "[\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]",
}
CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")
ECMA |= {name.upper(): f"[^{inside[1:]}" for name, inside in ECMA.items()}


def allows(schema: dict[str, Any], value: Any) -> bool:
    """Returns whether llguidance lets through any of the ways to write the value."""
    grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
    start = LLMatcher(BYTES, grammar, log_level=0)
    if start.is_error():
        return False
    compact = {"separators": (",", ":")}
    written = [
        json.dumps(value, ensure_ascii=True, **compact),
        json.dumps(value, ensure_ascii=False, **compact),
    ]  # type: ignore[arg-type]
    for text in written:
        matcher, ids = start.deep_copy(), [*text.encode()]
        if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
            return True
    return False


def string(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


single = st.sampled_from([*"ab1_-/ é名", r"\"", r"\\", r"\n", r"\t", r"\x01", r"\u001f", r"\]", r"\^", '"'])
shorthand = st.sampled_from([rf"\{name}" for name in "dDwWsS"])
ranges = st.sampled_from(
    [r"\x00-\x1f", r"\x00-\x0f", r"\x10-\x1f", r"\x00-\x7f", "!-~", "0-9", "a-z", "é-名"]
)
classes = st.builds(
    lambda start, members: f"[{start}{''.join(members)}]",
    st.sampled_from(["", "^"]),
    st.lists(st.one_of(single.filter(lambda each: each != "-"), shorthand, ranges), min_size=1, max_size=3),
)
pieces = st.one_of(single, shorthand, classes, st.just("."))
quantified = st.builds(str.__add__, pieces, st.sampled_from(["", "", "*", "+", "?", "{0,2}", "{2}", "*?"]))
bodies = st.recursive(
    quantified,
    lambda inner: st.one_of(
        st.builds(str.__add__, inner, inner), st.builds("(?:{}|{})".format, inner, inner)
    ),
    max_leaves=4,
)
patterns = st.builds("{}{}{}".format, st.sampled_from(["", "^"]), bodies, st.sampled_from(["", "$"]))
strings = st.lists(st.text(CHARACTERS, max_size=3), min_size=8, max_size=8)


@settings(max_examples=150, deadline=None)
@given(patterns, strings)
@example(r'^[^"\\]{1,5}$', ['"', "\\", '"a', "a"])
@example(r"^(?:[\x00-\x0f]|[\x10-\x1f])$", ['"', "\\"])
@example(r"^[\x00\x01-\x1f]$", ['"', "\\"])
@example(r"^.$", [*CHARACTERS])
@example(r"^\S$", [*CHARACTERS])
@example(r"^\W$", [*CHARACTERS])
@example(r"^\D$", [*CHARACTERS])
@example(r"^[^\s]$", [*CHARACTERS])
@example(r"^[^\w]$", [*CHARACTERS])
@example(r"^[^\d]$", [*CHARACTERS])
def test_nothing_else_is_allowed(pattern: str, texts: list[str]) -> None:
    written, in_javascript = string(exact_pattern(pattern).text), ecma(pattern)
    for text in texts:
        if allows(written, text):
            assert re.search(pattern, text)
            assert re.search(in_javascript, text)


def ecma(pattern: str) -> str:
    """Returns a pattern of ``re`` with JavaScript's shorthands and dots. Classes of ``re`` have no
    complements: with one of them in a class, the pattern matches everything."""
    if any(re.search(r"\\[DWS]", each) for each in CLASS.findall(pattern)):
        return ""

    def meaning(found: re.Match[str]) -> str:
        text = found[0]
        if text[0] == "[":
            return re.sub(r"\\([dws])", lambda inner: ECMA[inner[1]][1:-1], text)
        return "[^\n\r\u2028\u2029]" if text == "." else ECMA.get(text[1:], text)

    return re.sub(rf"{CLASS.pattern}|\\.|\.", meaning, pattern)


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        (r'^[^"\\]{1,5}$', ["a", "é😀\n", "\x7f"]),
        (r"^[A-Z]{2}[0-9]{1,3}$", ["AB1", "XY123"]),
        (r"^\d{4}-\d{2}$", ["2026-11"]),
        (r"^[\w.+-]+@[\w-]+\.[a-z]{2,}$", ["a.b+c@d-e.org"]),
        (r"^https?:\/\/[^\s/$.?#].[^\s]*$", ["https://example.org/ä?b=1"]),
        (r"^(yes|no)$|^\s*$", ["yes", "", " \n"]),
        (r"a", ["xax", "a\nb", '"a\\']),
        (r"^[\s\S]*$", ["", 'any\n"text"\\ é']),
        (r"^\{[[}\]]\}$", ["{[}", "{]}"]),
        (r"^{a}]$", ["{a}]"]),
        (r"^\p{Lu}[\p{L}']+$", ["Éa'"]),
        (r"^(?<year>[0-9]+)[\x00-\x20]$", ["1 ", "1\t"]),
        (r"^[\u00e0-\u{ff}\x41]\u0042$", ["éB", "AB"]),
        (r"^[^\W\d_]$", ["a"]),
        (r"^[a&&b~~-]+$", ["a&b-~"]),
    ],
)
def test_what_matches_is_allowed(pattern: str, matching: list[str]) -> None:
    for text in matching:
        assert allows(string(exact_pattern(pattern).text), text)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?i)a", "'(?i'"),
        ("(?=a)b", "'(?='"),
        ("(?<!a)b", "'(?<'"),
        ("a*+a", "quantifier after"),
        ("a{,2}", "'{,2'"),
        (r"\ba", r"'\\b'"),
        (r"a\Z", r"'\\Z'"),
        (r"(a)\1", r"'\\1'"),
        (r"\0", r"'\\0'"),
        (r"\x00", "U+0000"),
        ("[]a]", "begins with ']'"),
        ("[^]", "begins with ']'"),
        ("[a", "without an end"),
        (r"[\w-z]", r"'\\w'"),
        (r"[\p{L}-z]", "a range with"),
        (r"\ud800", "the character"),
        (r"\u{110000}", "the character"),
        ("a\\", "the escape"),
        ("(a", "a group without"),
        ("a)", "without its"),
        ("[z-a]", "end is before"),
        ("(*a)", "repeats nothing"),
        ("a{3,2}", "'{3,2}'"),
    ],
)
def test_other_patterns_are_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as raised:
        exact_pattern(pattern)
    assert repr(pattern) in str(raised.value)


NAMES = ["xa", 'x"', "x\\", "x\n", "a", "ab", "axb", "xé", "x/", "1", "x-1", ""]


@pytest.mark.parametrize(
    "pattern",
    [
        "^x",
        "^x.$",
        '^x[^"]$',
        '^x["\\\\]$',
        "a|b$",
        "^(a|x)",
        r"\n",
        "/",
        r"^x\W$",
        r"^x[\s\d]$",
        "^$",
        r"\d",
        "[^x]",
    ],
)
def test_patterns_of_names(pattern: str) -> None:
    """A name is written exactly if it matches as Python and as JavaScript read the pattern."""
    schema = {"type": "object", "patternProperties": {pattern: {"const": 1}}, "additionalProperties": False}
    for name in NAMES:
        is_matching = bool(re.search(pattern, name)) and bool(re.search(ecma(pattern), name))
        is_written = accepts(schema, json.dumps({name: 1}, ensure_ascii=False, separators=(",", ":")))
        assert is_written is is_matching, name


@pytest.mark.parametrize("pattern", ["(^a|b)", "a$b", "\x01"])
def test_patterns_that_are_of_no_name(pattern: str) -> None:
    with pytest.raises(ValueError, match="name"):
        exact_name(pattern)


def test_names_that_match_in_one_dialect_only() -> None:
    """The value of such a name is what the pattern asks for, and what is asked of other names."""
    schema = {"type": "object", "patternProperties": {r"^\w$": {"type": "integer"}}}
    open_to_all = schema | {"additionalProperties": {"minimum": 5}}
    assert accepts(schema, '{"é":1}')
    assert not accepts(schema, '{"é":"a"}')
    assert accepts(open_to_all, '{"a":1,"é":6}')
    assert not accepts(open_to_all, '{"é":1}')
    assert not accepts(schema | {"additionalProperties": False}, '{"é":1}')


def test_the_schema_that_was_not_kept() -> None:
    schema = string(r"^[^\"\\]{1,5}$")
    assert not Draft202012Validator(schema).is_valid('"')
    assert allows(schema, '"'), "llguidance reads it as it is meant: nothing here is needed any more"
    assert not accepts(schema, r'"\""')


def allows_text(regex: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_regex(exact_regex(regex)), log_level=0)
    ids = [*text.encode()]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("regex", "matching", "others"),
    [
        (r"\d{2}", ["12"], ["१२", "🯸🯸"]),
        (r"\w+", ["a_1"], ["é", "ſ"]),
        (r"[\d.]+", ["1.5"], ["٣"]),
        (r"(?i)ab|c", ["AB", "c", "C"], ["d"]),
        (r"(?i:a)b", ["Ab"], ["AB"]),
        (r"(?P<year>\d{4})-\d\d", ["2026-11"], ["202٣-11"]),
        (r"a\s?b", ["a b", "ab"], ["a\x85b"]),
    ],
)
def test_a_regular_expression_is_read_as_a_pattern_is(
    regex: str, matching: list[str], others: list[str]
) -> None:
    assert [allows_text(regex, text) for text in (*matching, *others)] == (
        [True] * len(matching) + [False] * len(others)
    )
