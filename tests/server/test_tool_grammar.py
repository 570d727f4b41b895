"""What a tool grammar lets through is read back as valid calls, whatever the model draws."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.server.tiny_tokenizer import byte_characters
from truedraft.engine.text.schema.cleaning import SchemaError
from truedraft.engine.text.schema.demands import Placed
from truedraft.engine.text.schema.place import Place
from truedraft.server.schemas.tools import FunctionDefinition
from truedraft.server.text.chat_parts import whole_message
from truedraft.server.text.families import CALL_FORMATS, GENERIC, REASONING_MARKS, CallFormat, ReasoningMarks
from truedraft.server.text.grammar import tool_calls
from truedraft.server.text.grammar.tool_calls import Function, after_reasoning, arguments_schema
from truedraft.server.text.message_parser import MessageFormat, MessageParser
from truedraft.server.text.tokenizer import ChatTemplates
from truedraft.server.text.tokenizer import Tokenizer as ServerTokenizer

FORMATS = {each.name: each for each in (*CALL_FORMATS, GENERIC)}
EOS = "<|endoftext|>"
MARK = re.compile(r"<[^<>\s=/]+>|\[[A-Z_]+\]")
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
    marks = {mark for text in form.literals for mark in MARK.findall(text)}
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
    reasoning = REASONING_MARKS[-1] if form.before_content else None
    reader = MessageParser(MessageFormat(reasoning, form, schemas=schemas))
    message = whole_message(reader.push(text) + reader.finish())
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    for name, arguments in calls:
        Draft202012Validator(schemas[name]).validate(arguments)
    return calls


def call_grammar(functions: Sequence[FunctionDefinition], *args: Any, **options: Any) -> str:
    return str(tool_calls.call_grammar([Function(each) for each in functions], *args, **options))


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
    free = f"{form.before_content}plain {{text}} <tool [TOOL"
    assert drawn(grammar, made, 0, free).startswith(free)


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_for_answers_without_calls(name: str) -> None:
    form = FORMATS[name]
    made = tokenizer(form, special=False)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "additionalProperties": False}
    grammar = call_grammar(
        FUNCTIONS,
        form,
        token_ids(form, made),
        required=False,
        parallel=True,
        schema=Placed(schema, Place("s")),
    )
    answer = drawn(grammar, made, 1, f'{form.before_content}{{"a').removeprefix(form.before_content)
    Draft202012Validator(schema).validate(json.loads(answer))
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
def test_a_grammar_starts_after_the_reasoning(grammar: str, is_open: bool) -> None:
    """After the closing mark, at once, or, if the prompt has not opened it, without any."""
    answer = "1" if "const" in grammar else "ab"
    thought = "" if is_open else "<think>ab <tool_call><|end|>{1</think>"
    texts = {thought + answer: True, f"{thought}\n\n{answer}": True, answer: True}
    texts |= {f"{thought}x": False, "<think>x": False, f"{thought}x{answer}": False}
    assert after_marks(REASONING_MARKS[0], grammar, is_open=is_open, texts=[*texts]) == [*texts.values()]


THOUGHT = "<|channel|>analysis<|message|>{1 ab<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"


def test_a_grammar_of_the_last_message() -> None:
    texts = {f"{FINAL}ab": True, f"{THOUGHT}{FINAL}ab": True, f"{THOUGHT * 2}{FINAL}ab": True}
    texts |= {"ab": False, f"{THOUGHT}ab": False, f"{THOUGHT}{FINAL}x": False, THOUGHT: False}
    grammar = LLMatcher.grammar_from_regex("ab")
    assert after_marks(REASONING_MARKS[-1], grammar, is_open=False, texts=[*texts]) == [*texts.values()]


@pytest.mark.parametrize("required", [False, True])
def test_calls_after_the_reasoning(required: bool) -> None:
    """An answer may stand there, too, unless calls are required."""
    form = FORMATS["gpt_oss"]
    texts = {CALL: True, f"{THOUGHT}{CALL}": True, f"{THOUGHT}{FINAL}ab": not required}
    texts |= {f"{THOUGHT}{CALL}x": False, f"{THOUGHT}{CALL.replace('now', 'other')}": False}

    def grammar(ids: dict[str, int]) -> str:
        return call_grammar(FUNCTIONS, form, ids, required=required, parallel=True)

    found = after_marks(REASONING_MARKS[-1], grammar, is_open=False, texts=[*texts], has_header=True)
    assert found == [*texts.values()]


def after_marks(
    marks: ReasoningMarks,
    grammar: str | Callable[[dict[str, int]], str],
    *,
    is_open: bool,
    texts: list[str],
    has_header: bool = False,
) -> list[bool]:
    """Returns whether each text matches the grammar after the reasoning."""
    made = Tokenizer.from_str(tokenizer(FORMATS["hermes"], special=False).to_str())
    names = ["<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"]
    made.add_tokens([AddedToken(token, special=False) for token in names])
    own = ServerTokenizer(made, ChatTemplates(None))
    if callable(grammar):
        grammar = grammar(own.grammar_ids(FORMATS["gpt_oss"].literals))
    whole, after = after_reasoning(
        grammar, marks, own.grammar_ids(marks.literals), is_open=is_open, has_header=has_header
    )
    assert after == ([made.token_to_id(marks.close)] if is_open else [])
    parser = LLMatcher(LLTokenizer(made.to_str(), eos_token=made.token_to_id(EOS)), whole, log_level=0)
    found = []
    for text in texts:
        matcher, ids = parser.deep_copy(), made.encode(text).ids
        found.append(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
    return found


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/tree"},
        "mixed": {
            "anyOf": [{"type": "string", "minLength": 1, "maxLength": 2}, {"type": ["null", "boolean"]}]
        },
        "kinds": {
            "type": "array",
            "items": {"enum": ["a,b", 1, None, True, ["x", 2]]},
            "minItems": 1,
            "maxItems": 3,
        },
        "map": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}},
        "ä": {"const": 'q"\n\\'},
        "free": {},
    },
    "required": ["tree", "kinds"],
    "additionalProperties": False,
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"leaf": {"type": "number"}, "next": {"$ref": "#/$defs/tree"}},
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.arguments == "quoted"])
def test_nested_arguments_with_quotes(name: str) -> None:
    form = FORMATS[name]
    made = tokenizer(form, special=True)
    function = FunctionDefinition(name="f", parameters=NESTED, strict=True)
    grammar = call_grammar([function], form, token_ids(form, made), required=True, parallel=False)
    seen: set[str] = set()
    for seed in range(40):
        text = drawn(grammar, made, seed)
        reader = MessageParser(MessageFormat(calls=form))
        (call,) = whole_message(reader.push(text) + reader.finish()).tool_calls or []
        arguments = json.loads(call.function.arguments)
        Draft202012Validator(NESTED).validate(arguments)
        assert [*arguments] == sorted(arguments)
        seen |= arguments.keys()
    assert seen == NESTED["properties"].keys()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "pattern": "a"}, "pattern"),
        ({"const": "a<escape>b"}, "cannot be written"),
        ({"$ref": "other#/x"}, "does not exist"),
        ({"properties": {"a:b": {}}}, "name of a parameter"),
    ],
)
def test_what_cannot_be_written_with_quotes(schema: Any, reason: str) -> None:
    form = FORMATS["function_gemma"]
    ids = token_ids(form, tokenizer(form, special=True))
    parameters = {"type": "object", "properties": {"x": schema}}
    function = FunctionDefinition(name="f", parameters=parameters, strict=True)
    with pytest.raises(ValueError, match=reason):
        call_grammar([function], form, ids, required=True, parallel=True)
    with pytest.raises(ValueError, match="no token"):
        call_grammar([FunctionDefinition(name="f")], form, {}, required=True, parallel=True)


@pytest.mark.parametrize(
    ("more", "is_allowed"), [({}, False), ({"additionalProperties": True}, True), ({"allOf": []}, True)]
)
def test_functions_take_what_they_declare(more: dict[str, Any], is_allowed: bool) -> None:
    parameters = {"properties": {"a": {"type": "integer"}}} | more
    schema = arguments_schema(FunctionDefinition(name="f", parameters=parameters))
    assert Draft202012Validator(schema).is_valid({"b": 1}) is is_allowed


@pytest.mark.parametrize("name", FORMATS)
def test_required_names_without_a_schema_are_written(name: str) -> None:
    form = FORMATS[name]
    made = tokenizer(form, special=True)
    parameters = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["q"]}
    function = FunctionDefinition(name="f", parameters=parameters)
    grammar = call_grammar([function], form, token_ids(form, made), required=True, parallel=False)
    reasoning = REASONING_MARKS[-1] if form.before_content else None
    for seed in range(5):
        schemas = {"f": arguments_schema(function)}
        reader = MessageParser(MessageFormat(reasoning, form, schemas=schemas))
        text = drawn(grammar, made, seed)
        (call,) = whole_message(reader.push(text) + reader.finish()).tool_calls or []
        arguments = json.loads(call.function.arguments)
        assert "q" in arguments
        assert arguments.keys() <= {"b", "q"}


def test_no_unsupported_keyword_is_ignored() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}}
    function = FunctionDefinition(name="f", parameters=parameters)
    for form in ("hermes", "qwen_tags"):
        with pytest.raises(SchemaError, match="format") as raised:
            call_grammar([function], FORMATS[form], {}, required=True, parallel=True)
        assert raised.value.place == "parameters.properties.a.format"


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.arguments == "quoted"])
def test_nested_types_are_written_once(name: str) -> None:
    """Each level with two types would double the rules below it."""
    schema: dict[str, Any] = {}
    for _ in range(60):
        schema = {"type": ["array", "object"], "items": schema, "additionalProperties": schema}
    function = FunctionDefinition(name="f", parameters={"type": "object", "properties": {"a": schema}})
    form = FORMATS[name]
    grammar = call_grammar(
        [function], form, token_ids(form, tokenizer(form, special=True)), required=True, parallel=True
    )
    assert len(grammar.splitlines()) < 60 * 5
