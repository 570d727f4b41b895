"""An object comes by a forced tool through instructor: ``python instructor_turn.py URL KIND``."""

import json
import sys
from typing import Any

import anthropic
import instructor
import openai
from pydantic import BaseModel

url, kind = sys.argv[1:]


class add(BaseModel):  # noqa: N801
    """Adds."""

    a: int


asked: dict[str, Any] = {
    "model": "tiny-model",
    "messages": [{"role": "user", "content": "Add."}],
    "response_model": add,
    "max_retries": 0,
}
if kind == "messages":
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))
    answer = client.create(**asked, max_tokens=200)
else:
    sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    if kind == "chat":
        client = instructor.from_openai(sdk, mode=instructor.Mode.TOOLS)
        *_, answer = client.create_partial(**asked)
    else:
        client = instructor.from_openai(sdk, mode=instructor.Mode.RESPONSES_TOOLS)
        answer = client.create(**asked)
print(json.dumps({"text": "Done.", "ran": answer.a}))
