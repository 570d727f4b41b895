"""Recognises a body, or a part of one, that has the form of another endpoint, and says which.

``error_handlers`` adds it to the error of a body that is not valid: what is missing is rarely the point.
"""

from collections.abc import Mapping, Sequence
from typing import Any

CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

# The field that an endpoint needs -> what another endpoint has in its place, and where it belongs.
PROMPTS: Mapping[str, Mapping[str, str]] = {
    "messages": {"input": RESPONSES, "prompt": "/v1/completions", "contents": "another vendor's API"},
    "input": {"messages": CHATS, "prompt": "/v1/completions"},
    "prompt": {"messages": CHATS, "input": RESPONSES, "inputs": "another server's API"},
}
# What a tool has that tells its form -> whose form it is.
TOOL_FORMS = {
    "function": f"{CHATS}: an object with 'function'",
    "input_schema": f"{MESSAGES}: 'name', 'description' and 'input_schema'",
    "inputSchema": "MCP's servers: 'inputSchema'",
    "parameters": f"{RESPONSES}: 'name', 'description' and 'parameters'",
    "name": f"{RESPONSES}: 'name', 'description' and 'parameters'",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def hint(param: Sequence[str], kind: str, body: Any) -> str | None:
    """Returns what to say in addition to an error of ``kind`` at ``param``; None if nothing is recognised."""
    if not isinstance(body, dict) or not param:
        return None
    if kind == "missing" and len(param) == 1:
        found = next((name for name in PROMPTS.get(param[0], ()) if name in body), None)
        return None if found is None else f"'{found}' belongs to {PROMPTS[param[0]][found]}"
    if param[0] == "tools" and len(param) > 1 and param[1].isdecimal():
        return _of_tool(param[2:], body)
    return _of_choice(body.get("tool_choice"), "messages" in body) if param[0] == "tool_choice" else None


def _of_tool(inside: Sequence[str], body: Mapping[str, Any]) -> str | None:
    tools = body.get("tools")
    tool = next((each for each in tools if isinstance(each, dict)), {}) if isinstance(tools, list) else {}
    wanted = inside[0] if inside else ""
    found = next((name for name in TOOL_FORMS if name in tool and name != wanted), None)
    if found is None or wanted not in ("function", "input_schema", "name", "type"):
        return None
    return f"this tool has the form of {TOOL_FORMS[found]}"


def _of_choice(choice: Any, is_chat: bool) -> str | None:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, str):
        return f'write {{"type": "{"any" if choice == "required" else choice}"}} on {MESSAGES}'
    if kind in CHOICES:
        return f"this is the form of {MESSAGES}; write '{CHOICES[kind]}' here"
    if kind in ("tool", "function"):
        inner = '"function": {"name": ...}' if is_chat else '"name": ...'
        return f'this is the form of another endpoint; write {{"type": "function", {inner}}} here'
    return None
