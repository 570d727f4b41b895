"""A tool is called through LiteLLM's provider of Anthropic's API: ``python litellm_bridge.py URL KIND``."""

import asyncio
import json
import sys
from typing import Any

import litellm

url, kind = sys.argv[1:]
litellm.suppress_debug_info = True
MESSAGES = [{"role": "user", "content": "Add."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
asked: dict[str, Any] = {
    "model": "anthropic/tiny-model",
    "api_base": url,
    "api_key": "none",
    "max_tokens": 200,
}


async def bridge() -> dict[str, Any]:
    """Anthropic's form in and out."""
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    answer = await litellm.anthropic.messages.acreate(messages=MESSAGES, tools=tools, **asked)
    (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    return dict(call["input"])


def chat() -> dict[str, Any]:
    """OpenAI's form in and out, Anthropic's on the way."""
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
    chunks = list(litellm.completion(messages=MESSAGES, tools=tools, stream=True, num_retries=0, **asked))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    return dict(json.loads(call.function.arguments))


given = asyncio.run(bridge()) if kind == "bridge" else chat()
print(json.dumps({"text": "Done.", "ran": given["a"]}))
