"""A whole request, whatever of its sequences arrives together: the same answer, and one delta a choice."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.test_choice import in_one_piece
from tests.server.test_text_stream import TOKENIZERS
from truedraft.engine.messages import Generate, SamplingParams, TokenLogprob, TokenOutput
from truedraft.server.errors import EngineError
from truedraft.server.generation.generation import Generation, _readers
from truedraft.server.generation.prepared_request import PreparedRequest
from truedraft.server.observability.metrics import ModelMetrics
from truedraft.server.settings import DEFAULT_PREFIX
from truedraft.server.text.choice import AnswerCounts, ChoiceDelta, FinishedChoice
from truedraft.server.text.prompt import TokenPrompt
from truedraft.server.text.tokenizer import Tokenizer
from truedraft.server.workers.engine_stream import EngineStream

STOP = "ab"


@dataclass
class HandDrivenEngine:
    """Gives a request what the test delivers, and notes what it aborts."""

    aborted: list[tuple[str, int | None]] = field(default_factory=list)

    def submit(self, requests: Sequence[Generate], key: str = "") -> EngineStream:
        self.stream = EngineStream(requests, lambda *sequence: self.aborted.append(sequence))
        return self.stream


class Answer(NamedTuple):
    choices: list[FinishedChoice]
    usage: Any
    counts: Any
    traces: Any
    num_generated: float


def prepared(num_prompts: int, n: int) -> PreparedRequest:
    return PreparedRequest(
        id="cmpl-x",
        endpoint="completions",
        prompts=[TokenPrompt([1, 2, 3], "abc") for _ in range(num_prompts)],
        params=SamplingParams(max_tokens=99, logprobs=0),
        n=n,
        priority=0,
        key="",
        cache_prompt=True,
        cache_salt="",
        prediction_token_ids=None,
        stop_strings=[STOP],
        include_stop_string=False,
        skip_special_tokens=True,
        echo=False,
        continues_prompt=True,
    )


def outputs_of(text: bytes, sequence: tuple[str, int], sizes: Sequence[int]) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    position = 0
    while position < len(text):
        token_ids = list(text[position : position + sizes[len(outputs) % len(sizes)]])
        position += len(token_ids)
        outputs.append(
            TokenOutput(
                *sequence,
                token_ids,
                "length" if position == len(text) else None,
                num_draft_tokens=4,
                num_accepted_tokens=len(token_ids) - 1,
                num_rounds=2,
                num_cached_tokens=2,
                queue_seconds=None if outputs else 0.5,
                logprobs=[TokenLogprob(token_id, -1.0, []) for token_id in token_ids],
            )
        )
    return outputs


async def let_read() -> None:
    """Waits until all readers wait for more: this loop runs nothing else."""
    for _ in range(10):
        await asyncio.sleep(0)


async def answer(
    prepared_request: PreparedRequest, tokenizer: Tokenizer, arrivals: Sequence[Sequence[TokenOutput]]
) -> Answer:
    """``arrivals`` come one after the other, each read before the next."""
    engine, metrics = HandDrivenEngine(), ModelMetrics(DEFAULT_PREFIX, 1)
    generation = Generation(prepared_request, engine, tokenizer, metrics)  # type: ignore[arg-type]
    generation.start()
    choices = [FinishedChoice(index) for index in range(prepared_request.num_choices)]
    deltas: list[ChoiceDelta] = []
    ended: list[tuple[str, int | None]] = []
    requests = prepared_request.engine_requests()
    sequences = [(request.request_id, index) for request in requests for index in range(request.n)]

    async def read() -> None:
        async for delta in generation.deltas():
            deltas.append(delta)
            choices[delta.index].add(delta)

    reading = asyncio.create_task(read())
    await let_read()
    for together in arrivals:
        deltas.clear()
        for output in together:
            engine.stream.deliver(output)
            if output.finish_reason is not None and output.sequence not in engine.aborted:
                ended.append(output.sequence)
        await let_read()
        for sequence, choice in zip(sequences, choices, strict=True):
            # What has ended is no longer computed: the engine ended it, or it was aborted.
            assert choice.finish_reason is None or sequence in [*ended, *engine.aborted]
        indices = [delta.index for delta in deltas]
        assert len(set(indices)) == len(indices), "a choice has several deltas of one arrival"
    await asyncio.wait_for(reading, None)
    generation.close()
    assert sorted(engine.aborted + ended) == sequences  # none is aborted after its end
    return Answer(
        [in_one_piece(choice) for choice in choices],
        generation.usage(),
        generation.counts,
        [choice.trace for choice in generation.choices],
        metrics.labelled.requests.get_sample_value("truedraft_generation_tokens_total") or 0.0,
    )


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[PreparedRequest, list[TokenOutput], list[list[TokenOutput]]]:
    """A request, its outputs in the order in which the worker made them, and a way to cut them."""
    num_prompts, n = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    sequences = [(f"cmpl-x-{prompt}", index) for prompt in range(num_prompts) for index in range(n)]
    texts = st.text("abc😀", min_size=1, max_size=12).map(str.encode)
    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)
    queues = [outputs_of(draw(texts), sequence, draw(sizes)) for sequence in sequences]
    steps = [
        output for step in range(48) for queue in queues if step < len(queue) for output in [queue[step]]
    ]
    cut: list[list[TokenOutput]] = []
    left = list(steps)
    while left:
        count = draw(st.integers(1, 12))
        cut.append(left[:count])
        left = left[count:]
    return prepared(num_prompts, n), steps, cut


@given(request=arrivals())
def test_what_arrives_together_does_not_matter(
    tokenizer: Tokenizer, request: tuple[PreparedRequest, list[TokenOutput], list[list[TokenOutput]]]
) -> None:
    wanted, outputs, cut = request
    one_by_one = asyncio.run(answer(wanted, tokenizer, [[output] for output in outputs]))
    assert asyncio.run(answer(wanted, tokenizer, cut)) == one_by_one
    for choice in one_by_one.choices:
        assert STOP not in choice.text
        assert choice.finish_reason is not None


def test_an_error_comes_after_what_was_delivered(tokenizer: Tokenizer) -> None:
    async def read() -> list[str]:
        engine = HandDrivenEngine()
        generation = Generation(prepared(1, 1), engine, tokenizer, ModelMetrics(DEFAULT_PREFIX, 1))  # type: ignore[arg-type]
        generation.start()
        for output in outputs_of(b"xyz", ("cmpl-x-0", 0), [1])[:2]:
            engine.stream.deliver(output)
        engine.stream.fail(EngineError("It broke.", code="broken"))
        seen = []
        try:
            async for delta in generation.deltas():
                seen.append(delta.text)
        except EngineError as error:
            seen.append(str(error.code))
        return seen

    assert asyncio.run(read()) == ["xy", "broken"]


def test_rounds_that_come_together_share_their_time(tokenizer: Tokenizer) -> None:
    """Rounds and tokens after the first arrival give one sample each, however they arrive."""

    async def read(cut: Sequence[int]) -> dict[str, float]:
        engine, metrics = HandDrivenEngine(), ModelMetrics(DEFAULT_PREFIX, 1)
        generation = Generation(prepared(1, 1), engine, tokenizer, metrics)  # type: ignore[arg-type]
        generation.start()
        reading = asyncio.create_task(generation.collect())
        outputs = outputs_of(b"x" * 12, ("cmpl-x-0", 0), [2])
        for count in cut:
            for output in outputs[:count]:
                engine.stream.deliver(output)
            outputs = outputs[count:]
            await let_read()
        await reading
        names = ("round_interval", "inter_token_latency", "time_to_first_token", "request_queue_time")
        samples = metrics.labelled.requests.get_sample_value
        rounds, tokens = (samples(f"truedraft_{name}_seconds_sum") for name in names[:2])
        assert rounds == pytest.approx(tokens)
        return {name: samples(f"truedraft_{name}_seconds_count") or 0.0 for name in names}

    expected = {
        "round_interval": 10.0,
        "inter_token_latency": 10.0,
        "time_to_first_token": 1.0,
        "request_queue_time": 1.0,
    }
    assert asyncio.run(read([1, 1, 1, 1, 1, 1])) == expected
    assert asyncio.run(read([1, 3, 2])) == expected
    assert asyncio.run(read([1, 5])) == expected
    expected |= {"round_interval": 6.0, "inter_token_latency": 6.0}
    assert asyncio.run(read([3, 1, 2])) == expected


@pytest.mark.parametrize(("continues_prompt", "text"), [(True, " the"), (False, "the")])
def test_a_completion_goes_on_with_its_prompt_and_a_message_begins(continues_prompt: bool, text: str) -> None:
    """SentencePiece's decoder drops the space before the first word of a text."""
    asked = replace(prepared(1, 1), prompts=[TokenPrompt([3], "a", [3])], continues_prompt=continues_prompt)
    (reader,) = _readers(asked, TOKENIZERS["bpe"], AnswerCounts())
    assert (
        reader.read(
            [TokenOutput("cmpl-x-0", 0, [2], "length", num_draft_tokens=0, num_accepted_tokens=0)]
        ).text
        == text
    )
