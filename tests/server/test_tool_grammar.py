"""What a tool grammar lets through is read back as valid calls, whatever the model draws."""

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from server.schemas.tools import FunctionDefinition
from server.text.chat_message import whole_message
from server.text.families import CALL_FORMATS, REASONING_MARKS, CallFormat, ReasoningMarks
from server.text.message_reader import MessageFormat, MessageReader
from server.text.tokenizer import ChatTemplates
from server.text.tokenizer import Tokenizer as ServerTokenizer
from server.text.tool_grammar import after_reasoning, arguments_schema, call_grammar
from tests.server.tiny_tokenizer import byte_characters

FORMATS = {each.name: each for each in CALL_FORMATS}
EOS = "<|endoftext|>"
FUNCTIONS = [
    FunctionDefinition(
        name="get-weather",
        strict=True,
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 3},
                "unit": {"type": "string", "enum": ["C", '"F"']},
                "days": {"$ref": "#/$defs/days"},
                "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    ),
    FunctionDefinition(name="now"),
]


def tokenizer(form: CallFormat, *, special: bool) -> Tokenizer:
    """Bytes, and the family's marks as tokens of their own."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(EOS, special=True)])
    if not form.at_start:
        marks = {form.trigger, *(["[ARGS]"] if "[ARGS]" in form.before_arguments else [])}
        made.add_tokens([AddedToken(mark, special=special) for mark in sorted(marks)])
    return made


def token_ids(form: CallFormat, made: Tokenizer) -> dict[str, int]:
    return ServerTokenizer(made, ChatTemplates(None)).grammar_ids(form.literals)


def drawn(grammar: str, made: Tokenizer, seed: int, start: str = "") -> str:
    """A random text of the grammar, as the engine draws it: from masks, token by token."""
    eos = made.token_to_id(EOS)
    tokens = LLTokenizer(made.to_str(), eos_token=eos)
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids, rng = list(made.encode(start).ids), random.Random(seed)
    assert matcher.try_consume_tokens(ids) == len(ids)
    for _ in range(2000):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(tokens.vocab_size) if mask[i // 8] >> i % 8 & 1]
        # Mostly ASCII: random bytes would be no UTF-8.
        choices = [i for i in allowed if i == 10 or 32 <= i < 127 or i >= 256] or allowed
        token_id = eos if eos in allowed and rng.random() < 0.4 else rng.choice(choices)
        if token_id == eos:
            return str(made.decode(ids, skip_special_tokens=False))
        assert matcher.consume_token(token_id)
        ids.append(token_id)
    raise AssertionError("no end")


def calls_of(form: CallFormat, text: str) -> list[tuple[str, Any]]:
    schemas = {each.name: arguments_schema(each) for each in FUNCTIONS}
    reader = MessageReader(MessageFormat(calls=form, schemas=schemas))
    message = whole_message(reader.push(text) + reader.finish())
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    for name, arguments in calls:
        Draft202012Validator(schemas[name]).validate(arguments)
    return calls


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_are_valid(name: str, special: bool) -> None:
    form = FORMATS[name]
    made = tokenizer(form, special=special)
    seen = set()
    for parallel in (True, False):
        grammar = call_grammar(FUNCTIONS, form, token_ids(form, made), required=True, parallel=parallel)
        for seed in range(12):
            calls = calls_of(form, drawn(grammar, made, seed))
            assert len(calls) == 1 or (parallel and form.later is not None and calls)
            seen.add(min(len(calls), 2))
    assert seen == ({1, 2} if form.later is not None else {1})


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_once_a_call_begins_it_is_valid(name: str, special: bool) -> None:
    form = FORMATS[name]
    made = tokenizer(form, special=special)
    grammar = call_grammar(FUNCTIONS, form, token_ids(form, made), required=False, parallel=True)
    for seed in range(6):
        text = "" if form.at_start else "a {\n< b"
        assert calls_of(form, drawn(grammar, made, seed, text + form.trigger))
    free = "plain {text} <tool [TOOL"
    assert drawn(grammar, made, 0, free).startswith(free)


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_for_answers_without_calls(name: str) -> None:
    form = FORMATS[name]
    made = tokenizer(form, special=False)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "additionalProperties": False}
    grammar = call_grammar(
        FUNCTIONS, form, token_ids(form, made), required=False, parallel=True, schema=schema
    )
    Draft202012Validator(schema).validate(json.loads(drawn(grammar, made, 1, '{"a')))
    assert calls_of(form, drawn(grammar, made, 1, form.first))


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_regex("ab"),
        LLMatcher.grammar_from_lark('start: "ab"'),
        LLMatcher.grammar_from_json_schema({"const": 1}),
    ],
)
@pytest.mark.parametrize("marks", [REASONING_MARKS[0], REASONING_MARKS[-1]], ids=["think", "channels"])
def test_a_grammar_starts_after_the_reasoning(grammar: str, marks: ReasoningMarks, is_open: bool) -> None:
    """After the closing mark, at once, or, if the prompt has not opened it, without any."""
    answer = "1" if "const" in grammar else "ab"
    made = Tokenizer.from_str(tokenizer(FORMATS["hermes"], special=False).to_str())
    tokens = ["<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    made.add_tokens([AddedToken(token, special=False) for token in tokens])
    ids = ServerTokenizer(made, ChatTemplates(None)).grammar_ids([marks.open, marks.close])
    whole, after = after_reasoning(grammar, marks, ids, is_open=is_open)
    end = next(token for token in ids if marks.close.startswith(token))
    assert after == ([ids[end]] if is_open else [])
    parser = LLMatcher(LLTokenizer(made.to_str(), eos_token=made.token_to_id(EOS)), whole, log_level=0)
    rest = marks.close.removeprefix(end)
    thought = rest if is_open else f"{marks.open}ab <tool_call><|end|>{{1{marks.close}"
    texts = {thought + answer: True, f"{thought}\n\n{answer}": True, answer: not (is_open and rest)}
    texts |= {f"{thought}x": False, f"{marks.open}x": False, f"{thought}x{answer}": False}
    for text, matches in texts.items():
        matcher, read = parser.deep_copy(), made.encode(text).ids
        is_whole = matcher.try_consume_tokens(read) == len(read) and matcher.is_accepting()
        assert is_whole is matches, text


@pytest.mark.parametrize(
    ("more", "is_allowed"), [({}, False), ({"additionalProperties": True}, True), ({"allOf": []}, True)]
)
def test_functions_take_what_they_declare(more: dict[str, Any], is_allowed: bool) -> None:
    parameters = {"properties": {"a": {"type": "integer"}}} | more
    schema = arguments_schema(FunctionDefinition(name="f", parameters=parameters))
    assert Draft202012Validator(schema).is_valid({"b": 1}) is is_allowed


def test_strict_tools_hold_no_unsupported_keyword() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}}
    for strict in (None, False, True):
        function = FunctionDefinition(name="f", parameters=parameters, strict=strict)
        grammar = call_grammar([function], FORMATS["hermes"], {}, required=True, parallel=True)
        is_error, _ = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar))
        assert is_error is bool(strict)
