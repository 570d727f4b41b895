"""Bodies that are not JSON in UTF-8, or more than JSON can say; and what of them is allowed."""

import pytest

from tests.server.refusals import CHAT, COMPLETIONS, body, refused_raw
from tests.server.running import MODEL, RunningServer
from truedraft.server.errors import InvalidRequestError
from truedraft.server.http.json_body import MAX_DEPTH, STRUCTURE, parse_json


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "Expecting property name enclosed in double quotes, line 1 column 2"),
        (b'{"model": "m"', "Expecting ',' delimiter, line 1 column 14"),
        (b'{"model": "m",\n}', "line 2 column 1"),
        (b'{"model": "m"} {}', "Extra data, line 1 column 16"),
        (b"{\"model\": 'm'}", "Expecting value"),
        (b'{"model": "a\nb"}', "Invalid control character"),
        (b'{"model": "\\x"}', "Invalid \\escape"),
        (b'{"model": "\xff"}', "it is not UTF-8, from byte 11 on"),
        ('{"model": "é"}'.encode("latin-1"), "it is not UTF-8, from byte 11 on"),
        ('{"model": "m"}'.encode("utf-16"), "it is not UTF-8"),
        (b'{"model": "\xed\xa0\x80"}', "it is not UTF-8"),  # a surrogate, written as if it were a character
        (body('"temperature": NaN'), "NaN is not a JSON number"),
        (body('"temperature": Infinity'), "Infinity is not a JSON number"),
        (body('"temperature": -Infinity'), "-Infinity is not a JSON number"),
        (body('"metadata": {"deep": [NaN]}'), "NaN is not a JSON number"),
        (body('"unknown": NaN'), "NaN is not a JSON number"),
        (body(f'"seed": {"9" * 5000}'), "it has a number with too many digits"),
        (body(f'"unknown": -{"9" * 5000}'), "it has a number with too many digits"),
    ],
)
def test_what_is_not_json(server: RunningServer, content: bytes, reason: str) -> None:
    error = refused_raw(server, content)
    assert (error["code"], error["param"]) == ("invalid_json", None)
    assert error["message"].startswith("The request body is not valid JSON: ")
    assert reason in error["message"]


def test_byte_order_mark_is_skipped(server: RunningServer) -> None:
    content = b"\xef\xbb\xbf" + body('"n": 1')
    response = server.client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 200


@pytest.mark.parametrize("field", ["metadata", "unknown", "prompt", "stop", "logit_bias", "speculation"])
@pytest.mark.parametrize(("before", "after"), [("[", "]"), ('{"a": ', "}")], ids=["lists", "objects"])
@pytest.mark.parametrize("depth", [101, 500, 40_000])
def test_deep_nesting(server: RunningServer, field: str, before: str, after: str, depth: int) -> None:
    nested = f"{before * depth}1{after * depth}"
    content = body('"n": 1', prompt=nested) if field == "prompt" else body(f'"{field}": {nested}')
    error = refused_raw(server, content)
    assert error["code"] == "invalid_json"
    assert f"nested deeper than {MAX_DEPTH} levels" in error["message"]


@pytest.mark.parametrize(
    ("string", "is_closed"),
    [
        (b'"', False),
        (b'"\\', False),
        (b'"\\"', False),
        (b'""', True),
        (b'"\\\\"', True),
        (b'"\\\\\\"', False),
        (b'"[{:,\\"[{:,"', True),
        (b'"[{:,\\"[{:,', False),
    ],
)
def test_the_scan_never_starts_inside_a_string(string: bytes, is_closed: bool) -> None:
    """Each place where it could, in a long string without an end, would cost a walk to the body's end."""
    assert [match[0] for match in STRUCTURE.finditer(string)] == [string]
    assert [match[0] for match in STRUCTURE.finditer(b"[" + string + b":,1")] == (
        [b"[", string, b":", b","] if is_closed else [b"[", string + b":,1"]
    )


@pytest.mark.parametrize("piece", [b'\\"', b"\\\\", b"x", b'\\":'])
def test_a_string_without_an_end_is_read_once(piece: bytes) -> None:
    """A walk for each of its quotes would take minutes, and days with a body of 8 MB."""
    with pytest.raises(InvalidRequestError, match="Unterminated string|Expecting"):
        parse_json(b'"' + piece * (20_000 // len(piece)) + b":" * 200_000)


def test_unclosed_brackets(server: RunningServer) -> None:
    assert refused_raw(server, b"[" * 100_000)["code"] == "invalid_json"


def test_depth_that_is_allowed() -> None:
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_json(deepest)
    assert parse_json(b"[" + b'{"a": [1, "[[["]}, ' * 200 + b"1]")
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        parse_json(b"[0, " + deepest + b"]")


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ('"max_tokens": 3', "max_tokens"),
        ('"unknown": 1, "other": 2, "unknown": 1', "unknown"),
        ('"metadata": {"deep": [{"a": 1, "b": 2, "a": 3}]}', "a"),
        ('"\\u006d\\u006fdel": "x"', "model"),
        ('"\\ud800": 1, "\\ud800": 2', "\\ud800"),
        ('"": 1, "": 2', ""),
    ],
)
def test_equal_keys(server: RunningServer, extra: str, key: str) -> None:
    error = refused_raw(server, body(extra))
    assert (error["param"], error["code"]) == (key, "duplicate_key")
    assert f"'{key}' twice" in error["message"]


def test_equal_keys_of_different_objects() -> None:
    assert parse_json(b'{"a": {"a": 1}, "b": [{"a": 1}, {"a": 1}]}')


def test_many_keys_do_not_take_long() -> None:
    content = b"{" + b", ".join(b'"%d": 1' % number for number in range(90_000)) + b"}"
    assert len(parse_json(content)) == 90_000
    with pytest.raises(InvalidRequestError, match="'89999' twice"):
        parse_json(content[:-1] + b', "89999": 2}')


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (COMPLETIONS, '"prompt": "\\ud800"'),
        (COMPLETIONS, '"prompt": "a\\uDC00b"'),
        (COMPLETIONS, '"prompt": ["fine", "\\ude00\\ud83d"]'),
        (COMPLETIONS, '"prompt": "x", "stop": "\\ud800"'),
        (COMPLETIONS, '"prompt": "x", "stop": ["\\ud83d\\ud83d\\ude00"]'),
        (COMPLETIONS, '"prompt": "x", "user": "\\ud800"'),
        (COMPLETIONS, '"prompt": "x", "metadata": {"\\ud800": 1}'),
        (COMPLETIONS, '"prompt": "x", "\\ud800": 1'),
        (COMPLETIONS, '"prompt": "x", "speculation": {"\\ud800": 1}'),
        (COMPLETIONS, '"prompt": "x", "logit_bias": {"\\ud800": 1}'),
        (COMPLETIONS, '"prompt": "x", "cache_salt": "\\ud800"'),
        (CHAT, '"messages": [{"role": "user", "content": "\\ud800"}]'),
        (CHAT, '"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]'),
        (CHAT, '"messages": [{"role": "tool", "content": "x", "tool_call_id": "\\ud800"}]'),
        (CHAT, '"messages": [{"role": "user", "content": "x", "\\udfff": "x"}]'),
    ],
)
def test_halves_of_characters(server: RunningServer, path: str, content: str) -> None:
    error = refused_raw(server, f'{{"model": "{MODEL}", {content}}}'.encode(), path)
    assert error["code"] == "invalid_json"
    assert "is half of a character" in error["message"]


def test_both_halves_are_a_character(server: RunningServer) -> None:
    content = body('"echo": true, "return_token_ids": true', prompt='"\\ud83d\\ude00 \\\\ud800"')
    response = server.client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 200
    assert bytes(response.json()["choices"][0]["prompt_token_ids"]) == "😀 \\ud800".encode()


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "text/plain",
        "text/json",
        "text/x+json",
        "application",
        "application/jsonp",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/json, text/plain",
    ],
)
def test_wrong_content_types(server: RunningServer, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = server.client.post(COMPLETIONS, content=body('"n": 1'), headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"]
)
def test_right_content_types(server: RunningServer, content_type: str) -> None:
    headers = {"content-type": content_type}
    assert server.client.post(COMPLETIONS, content=body('"n": 1'), headers=headers).status_code == 200
