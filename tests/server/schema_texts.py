"""Texts that a schema's grammar lets through, drawn byte by byte, and whether they are valid, exactly."""

import json
import random
from decimal import Context, Decimal, localcontext
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import extend
from llguidance import LLMatcher, LLTokenizer

from truedraft.engine.text.schema.formats import grammar_of
from truedraft.engine.text.schema.numbers import WrittenFloat, read_json

CLOSING = b'"]}'


@cache
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def matcher_of(schema: Any) -> LLMatcher:
    matcher = LLMatcher(byte_tokenizer(), grammar_of("json", schema), log_level=0)
    assert not matcher.is_error(), (schema, matcher.get_error())
    return matcher


def allows(matcher: LLMatcher, text: str) -> bool:
    matcher, ids = matcher.deep_copy(), [*text.encode()]
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def accepts(schema: Any, text: str) -> bool:
    return allows(matcher_of(schema), text)


def drawn(matcher: LLMatcher, rng: random.Random, longest: int = 400) -> str | None:
    """Returns a text that the grammar lets through; None if it has no end within ``longest`` bytes."""
    matcher, text = matcher.deep_copy(), bytearray()
    while len(text) < longest:
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if matcher.is_accepting() and (not allowed or rng.random() < 0.5):
            return text.decode()
        closing = [byte for byte in allowed if byte in CLOSING]
        readable = [byte for byte in allowed if 0x20 <= byte < 0x7F] or allowed
        byte = rng.choice(closing if closing and rng.random() < 0.4 else readable)
        assert matcher.consume_token(byte)
        text.append(byte)
    return None


def _as_decimals(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_decimals(each) for each in value]
    if isinstance(value, dict):
        return {name: _as_decimals(each) for name, each in value.items()}
    if isinstance(value, float):
        return Decimal(value.text if isinstance(value, WrittenFloat) else repr(value))
    return value


def _is_integer(_: Any, value: Any) -> bool:
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


ExactValidator = extend(
    Draft202012Validator, type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer)
)


def is_valid(schema: Any, text: str) -> bool:
    """Tells whether JSON that is written out is valid, with every number as its digits say."""
    exact = _as_decimals(read_json(schema) if isinstance(schema, str) else schema)
    with localcontext(Context(prec=800)):
        return bool(ExactValidator(exact).is_valid(json.loads(text, parse_float=Decimal)))
