"""OpenAI's Agents SDK goes through a streamed turn with a tool: ``python openai_agents.py URL KIND``."""

import asyncio
import json
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

url, kind = sys.argv[1:]
ran: list[int] = []


@function_tool
def add(a: int) -> str:
    """Adds."""
    ran.append(a)
    return f"truedraft-{a + 41}"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    models = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
    agent = Agent(name="adder", model=models[kind]("tiny-model", client), tools=[add])
    result = Runner.run_streamed(agent, "Add.", max_turns=3)
    async for _ in result.stream_events():
        pass
    print(json.dumps({"text": result.final_output, "ran": len(ran)}))


asyncio.run(main())
