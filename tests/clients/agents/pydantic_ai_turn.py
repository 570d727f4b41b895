"""pydantic-ai goes through a streamed turn with a tool: ``python pydantic_ai_turn.py URL KIND``."""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, kind = sys.argv[1:]
provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
models = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
agent = Agent(models[kind]("tiny-model", provider=provider))
ran: list[int] = []


@agent.tool_plain
def add(a: int) -> str:
    """Adds."""
    ran.append(a)
    return f"truedraft-{a + 41}"


async def main() -> None:
    async with agent.iter("Add.") as run:
        async for node in run:
            if Agent.is_model_request_node(node):
                async with node.stream(run.ctx) as events:
                    async for _ in events:
                        pass
    assert run.result is not None
    print(json.dumps({"text": run.result.output, "ran": len(ran)}))


asyncio.run(main())
