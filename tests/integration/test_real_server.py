"""The official client talks to the real server process with the bundled pair."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.integration.conftest import DRAFTED, Server
from tests.server.running import wait_for

MODEL = "truedraft-demo"
HEROES = [
    "a little girl",
    "a big dog",
    "a red bird",
    "a small cat",
    "an old man",
    "a boy",
    "a fish",
    "a tree",
]
PROMPTS = [f"{start} {hero}" for start in ("Once upon a time, there was", "One day,") for hero in HEROES]


def complete(server: Server, prompt: str, **parameters: Any) -> str:
    completion = server.openai.completions.create(model=MODEL, prompt=prompt, **parameters)
    return completion.choices[0].text


async def stream_all(server: Server, **parameters: Any) -> list[str]:
    """All prompts at the same time, each as a stream; the texts put together again."""

    async def one(client: AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True, **parameters)
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        return list(await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS)))


@pytest.mark.parametrize("parameters", [{"temperature": 0}, {"temperature": 0.8, "seed": 11}])
def test_sixteen_streams_say_what_they_say_alone(server: Server, parameters: dict[str, Any]) -> None:
    alone = [complete(server, prompt, max_tokens=60, **parameters) for prompt in PROMPTS]
    assert all(alone)
    together = asyncio.run(stream_all(server, max_tokens=60, **parameters))
    assert together == alone


@pytest.mark.parametrize("parameters", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}])
def test_speculation_changes_nothing_but_the_rounds(server: Server, parameters: dict[str, Any]) -> None:
    def run(speculation: dict[str, Any]) -> Any:
        return server.openai.completions.create(
            model=MODEL,
            prompt=PROMPTS[0],
            max_tokens=80,
            extra_body={"speculation": speculation},
            **parameters,
        )

    plain = run({"method": "none"})
    for k in (1, 4, 8):
        for method in ("draft_model", "ngram"):
            answer = run({"method": method, "num_speculative_tokens": k})
            assert answer.choices[0].text == plain.choices[0].text
            assert answer.truedraft["method"] == method


@pytest.mark.parametrize("parameters", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}])
def test_a_prediction_changes_nothing_but_the_rounds(server: Server, parameters: dict[str, Any]) -> None:
    """The official client sends a right prediction, one whose beginning is replaced, and a wrong one."""

    def chat(**more: Any) -> Any:
        return server.openai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a story about a fox."}],
            max_completion_tokens=80,
            **parameters,
            **more,
        )

    plain = chat(extra_body={"speculation": {"method": "none"}})
    text = plain.choices[0].message.content
    details = plain.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    for predicted in (text, "Here it is. " + text[len(text) // 3 :], "Nothing of this will be said. " * 5):
        answer = chat(prediction={"type": "content", "content": predicted})
        assert answer.choices[0].message.content == text
        details = answer.usage.completion_tokens_details
        if predicted == text:
            assert details.accepted_prediction_tokens > 60
        if predicted.endswith(text[-40:]):
            assert details.accepted_prediction_tokens > 30
        assert answer.usage.completion_tokens == plain.usage.completion_tokens
    stream = chat(
        prediction={"type": "content", "content": [{"type": "text", "text": text}]},
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 60


def test_chat_streams_a_role_then_text_then_usage(server: Server) -> None:
    chunks = list(
        server.openai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a story about a dog."}],
            max_tokens=40,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 40


def test_counters_grow_by_what_was_generated(server: Server) -> None:
    before = server.metric("truedraft_generation_tokens_total")
    drafted = server.metric("truedraft_spec_decode_num_draft_tokens_total")
    completion = server.openai.completions.create(
        model=MODEL,
        prompt=PROMPTS[1],
        max_tokens=40,
        temperature=0,
        extra_body={"ignore_eos": True, "speculation": DRAFTED},
    )
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 40
    assert server.metric("truedraft_generation_tokens_total") - before == 40
    assert server.metric("truedraft_spec_decode_num_draft_tokens_total") > drafted


def test_shared_beginning_is_computed_once(server: Server) -> None:
    """What was cached is counted, and changes nothing about what is said."""
    story = "The fox and the bird went to the river to look for the lost red ball. " * 4

    def ask(**fields: Any) -> Any:
        return server.openai.completions.create(
            model=MODEL, prompt=story, max_tokens=20, temperature=0, extra_body=fields
        )

    hits = server.metric("truedraft_prefix_cache_hits_total")
    first, again, alone, salted = ask(), ask(priority=0), ask(cache_prompt=False), ask(cache_salt="mine")
    assert len({answer.choices[0].text for answer in (first, again, alone, salted)}) == 1
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, again, alone, salted)]
    assert cached[0] == cached[2] == cached[3] == 0
    assert cached[1] > first.usage.prompt_tokens // 2
    assert server.metric("truedraft_prefix_cache_hits_total") - hits == cached[1]


def test_logprobs_of_echo_are_those_of_generation(server: Server) -> None:
    """The text's log-probabilities, scored afterwards as a prompt, are those given while generating it."""

    def choice(**fields: Any) -> Any:
        request = {"model": MODEL, "temperature": 0, "logprobs": 1, **fields}
        return server.post("/v1/completions", request).json()["choices"][0]

    said = choice(prompt=PROMPTS[2], max_tokens=30, return_token_ids=True)
    prompt_ids = choice(prompt=PROMPTS[2], max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    text = prompt_ids + said["token_ids"]
    scored = choice(prompt=text, max_tokens=0, echo=True)
    want = said["logprobs"]["token_logprobs"]
    assert scored["logprobs"]["token_logprobs"][-len(want) :] == pytest.approx(want, abs=1e-4)


def test_a_client_that_leaves_frees_its_sequence(server: Server) -> None:
    """Tried again where everything was said before it had left, which is for the machine to say."""
    aborted = server.metric("truedraft_requests_aborted_total")
    body = {"model": MODEL, "prompt": PROMPTS[3], "max_tokens": 900, "ignore_eos": True}
    for _ in range(100):
        with server.stream("/v1/completions", body) as response:
            next(response.iter_lines())
        wait_for(lambda: server.metric("truedraft_num_requests_running") == 0, "the end")
        if server.metric("truedraft_requests_aborted_total") > aborted:
            break
    assert server.metric("truedraft_requests_aborted_total") == aborted + 1
    assert server.metric("truedraft_kv_cache_usage_perc") == 0


def test_speculation_is_told(server: Server) -> None:
    complete(server, PROMPTS[4], max_tokens=20)
    state = server.get("/speculation").json()
    assert (state["proposer"], state["num_speculative_tokens"]) == ("auto", "auto")
