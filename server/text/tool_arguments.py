"""Arguments of tool calls that are written in tags, as Qwen3-Coder does: to and from JSON.

A string stands as it is between its parameter's tags, any other value as JSON.
"""

import json
import re
from typing import Any

PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>", re.DOTALL)


def is_plain_text(schema: Any) -> bool:
    """Whether values of the schema are written as they are."""
    if not isinstance(schema, dict) or schema.get("type") != "string":
        return False
    choices = schema.get("enum", [])
    return isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)


def properties_of(parameters: dict[str, Any]) -> dict[str, Any]:
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def json_arguments(tagged: str, parameters: dict[str, Any]) -> str:
    """As JSON. Parameters that are not complete are left out."""
    properties = properties_of(parameters)
    values = (
        (name, json.dumps(text, ensure_ascii=False) if is_plain_text(properties.get(name)) else text)
        for name, text in PARAMETER.findall(tagged)
    )
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in values) + "}"
