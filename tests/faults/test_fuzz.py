"""Random bodies and border messages: refused with a reason or understood, and never more than that.

``FUZZ_INPUTS=100000`` is the long form; the suite has a short one.
"""

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.server.running import MODEL, fake_worker_app
from tests.server.test_speculation_status import STATS
from truedraft.engine import messages
from truedraft.server.text.tokenizer import Tokenizer

NUM_INPUTS = int(os.environ.get("FUZZ_INPUTS", "1500"))

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "abc", "max_tokens": 3, "temperature": 0.5, "stop": ["x"]},
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_tokens": 3,
        "speculation": {"method": "auto", "num_speculative_tokens": 2},
    },
    "/v1/responses": {"model": MODEL, "input": "abc", "max_output_tokens": 16},
    "/tokenize": {"model": MODEL, "prompt": "abc"},
    "/detokenize": {"model": MODEL, "tokens": [1, 2, 3]},
}
FIELDS = (
    *("n", "logprobs", "echo", "seed", "top_p", "top_k", "min_p", "logit_bias", "suffix", "stream", "user"),
    *("stream_options", "prediction", "tools", "response_format", "priority", "stop_token_ids", "min_tokens"),
    *("presence_penalty", "truncate_prompt_tokens", "prompt_logprobs", "cache_salt", "verification"),
    *("structured_outputs", "tool_choice", "parallel_tool_calls", "reasoning_effort", "documents", "text"),
    *("chat_template_kwargs", "continue_final_message", "reasoning", "include", "metadata", "top_logprobs"),
)
ODD: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 2**31, 2**63, 2**64, 1e308, -0.0, "", "x", "\0", "\ud800", "😀", "9" * 50),
    *([], [[]], [None], [1, "a"], {}, {"": {}}, {"type": "json_object"}, {"5": 100}, {"include_usage": 1}),
    *(
        "auto",
        "none",
        "required",
        {"regex": "a(b"},
        {"regex": "a+"},
        {"choice": ["x"]},
        {"json": {"enum": 1}},
    ),
    *({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "minItems": -1}}},),
    *([{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}], {"effort": "high"}),
)
STATUSES = {200, 400, 404, 413, 422, 429}


async def test_bodies(model_folder: Path, tokenizer: Tokenizer) -> None:
    """Bodies come by ASGI, without a socket, eight at a time; the same worker has served all of them."""
    app = fake_worker_app(model_folder, lambda: tokenizer, "--once")
    models = app.state.services.models
    statuses: Counter[int] = Counter()

    async def send(client: httpx.AsyncClient, numbers: range) -> None:
        for number in numbers:
            drawn = random.Random(number)
            path = drawn.choice(list(PATHS))
            content = odd_body(drawn, PATHS[path])
            answer = await client.post(path, content=content, headers={"content-type": "application/json"})
            statuses[answer.status_code] += 1
            assert answer.status_code in STATUSES, (number, path, content)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert (error["type"], bool(error["message"])) != ("server_error", False), (number, content)

    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        await models.wait_until_ready()
        first_worker = models.first.worker
        await asyncio.gather(*(send(client, range(start, NUM_INPUTS, 8)) for start in range(8)))
        assert models.first.worker is first_worker
        assert models.first.engine.num_requests == 0
    print(f"{NUM_INPUTS} bodies: {dict(statuses)}")
    assert statuses[200] > NUM_INPUTS / 10


def odd_body(drawn: random.Random, body: dict[str, Any]) -> bytes:
    """Fields replaced, added and removed; in a third of the cases bytes, too."""
    body = dict(body)
    for _ in range(drawn.randrange(3)):
        body[drawn.choice((*FIELDS, *body))] = drawn.choice(ODD)
    if drawn.random() < 0.1:
        body.pop(drawn.choice(list(body)))
    content = json.dumps(body).encode()
    return mutated(drawn, content) if drawn.random() < 0.33 else content


def mutated(drawn: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(drawn.randint(1, 4)):
        place = drawn.randrange(len(changed) + 1)
        match drawn.randrange(3):
            case 0:
                changed[place:place] = drawn.randbytes(drawn.randint(1, 3))
            case 1:
                del changed[place : place + drawn.randint(1, 8)]
            case _:
                changed[place : place + 1] = drawn.randbytes(1)
    return bytes(changed)


def test_border_messages() -> None:
    """Decoding gives a message or one of two errors, whatever the bytes are."""
    drawn = random.Random(1)
    request = messages.Generate("r", [1, 2, 3], messages.SamplingParams(max_tokens=4))
    output = messages.TokenOutput("r", 0, [1, 2], None, 3, 1)
    cases = (
        (messages.encode(request), messages.decode_to_worker),
        (messages.encode(messages.Abort(["r"])), messages.decode_to_worker),
        (messages.encode(messages.StepOutput([output], STATS)), messages.decode_from_worker),
        (messages.encode(messages.Failed("r", "engine_error", "no memory")), messages.decode_from_worker),
    )
    num_refused = 0
    for _ in range(NUM_INPUTS):
        content, decode = drawn.choice(cases)
        try:
            assert isinstance(decode(mutated(drawn, content)), msgspec.Struct)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            num_refused += 1
    print(f"{NUM_INPUTS} border messages: {num_refused} refused")
    assert 0 < num_refused < NUM_INPUTS
