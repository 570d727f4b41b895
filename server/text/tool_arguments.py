"""Arguments of tool calls that are not written as JSON: what is made of them.

In tags, as Qwen3-Coder writes them, a string stands as it is between its parameter's tags, any other value as
JSON. With quotes, as Gemma writes them, all but names and strings is JSON, and these stand as they are.
"""

import json
import re
from typing import Any

from truedraft.engine.text.detokenizer import longest_stop_prefix

PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>", re.DOTALL)
NAME = re.compile(r"(?<=[{,])([^{}\[\],:]+):")
CUT = re.compile(r"(?<=[{,])[^{}\[\],:]+$")


def is_plain_text(schema: Any) -> bool:
    """Is true where values of the schema stand in tags as they are."""
    if not isinstance(schema, dict) or schema.get("type") != "string":
        return False
    choices = schema.get("enum", [])
    return isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)


def properties_of(parameters: dict[str, Any]) -> dict[str, Any]:
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def tagged_as_json(tagged: str, parameters: dict[str, Any]) -> str:
    """Parameters that are not complete are left out."""
    properties = properties_of(parameters)
    values = (
        (name, json.dumps(text, ensure_ascii=False) if is_plain_text(properties.get(name)) else text)
        for name, text in PARAMETER.findall(tagged)
    )
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in values) + "}"


def quoted_as_json(quoted: str, quote: str, *, is_complete: bool) -> str:
    """Converts what stands between the braces, with them; where it is cut, to a beginning of JSON."""
    if not is_complete:
        quoted = quoted[: len(quoted) - longest_stop_prefix(quoted, [quote])]
    pieces = f"{{{quoted}{'}' if is_complete else ''}".split(quote)
    if len(pieces) % 2 == 0:
        pieces.pop()  # a string without its end
    elif not is_complete:
        pieces[-1] = CUT.sub("", pieces[-1])
    written = [
        json.dumps(piece, ensure_ascii=False)
        if number % 2
        else NAME.sub(lambda name: f"{json.dumps(name[1], ensure_ascii=False)}: ", piece).replace(",", ", ")
        for number, piece in enumerate(pieces)
    ]
    return "".join(written)
