"""Models whose chat template writes no tools get them as plain text, which any template can write.

The functions stand in the system message, calls in the assistant's, results in the user's. Calls have a form
like any family's, ``families.GENERIC``, so that grammars and readers need to know nothing of this.
"""

import json
from collections.abc import Sequence
from typing import Any

from truedraft.server.text.families import GENERIC

Fields = dict[str, Any]

EXAMPLE = f"{GENERIC.first}its name{GENERIC.before_arguments}{{}}{GENERIC.end}"
INSTRUCTIONS = f"""\
You can call these functions:
%s
To call one, write
{EXAMPLE}
Its arguments match the schema of its parameters. Several calls may follow each other."""


def as_plain_messages(
    messages: Sequence[Fields], tools: Sequence[Fields] | None, *, has_system: bool
) -> list[Fields]:
    """Returns the messages without tools. ``has_system``: the template writes system messages; otherwise the
    functions stand in front of what the user says first."""
    written = _without_calls(messages)
    if not tools:
        return written
    functions = "\n".join(_json(tool["function"]) for tool in tools)
    text = INSTRUCTIONS % functions
    if has_system and written and written[0]["role"] == "system":
        written[0] = written[0] | {"content": _joined(written[0]["content"], text)}
        return written
    if has_system:
        return [{"role": "system", "content": text}, *written]
    place = next((at for at, each in enumerate(written) if each["role"] == "user"), None)
    if place is None:
        return [{"role": "user", "content": text}, *written]
    written[place] = written[place] | {"content": _joined(text, written[place]["content"])}
    return written


def _without_calls(messages: Sequence[Fields]) -> list[Fields]:
    """Returns the messages with calls and results as text. Results next to each other are one message with
    what the user says after them: some templates want users and assistants to take turns."""
    written: list[Fields] = []
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message["role"] == "tool"
        if is_result:
            content = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": content}
        elif calls := message.get("tool_calls"):
            content = "\n".join(filter(None, [message["content"], *map(_call, calls)]))
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            message["content"] = content
        last = written[-1] if written else None
        if last and last["role"] == message["role"] == "user" and (is_result or was_result):
            last["content"] = _joined(last["content"], message["content"], "\n")
        else:
            written.append(dict(message))
    return written


def _call(call: Fields) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return f"{GENERIC.first}{name}{GENERIC.before_arguments}{_json(arguments)}{GENERIC.end}"


def _joined(first: Any, second: Any, gap: str = "\n\n") -> Any:
    """Joins contents, which are texts or, with pictures, lists of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{gap}{second}" if first else second
    before = [{"type": "text", "text": f"{first}{gap}"}] if isinstance(first, str) else first
    after = [{"type": "text", "text": f"{gap}{second}"}] if isinstance(second, str) else second
    return [*before, *after]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
