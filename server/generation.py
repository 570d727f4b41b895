"""Run one HTTP request: submit its prompts, turn token outputs into text deltas, count, clean up.

Between the routes, which know the two answer formats, and the engine client, which knows token ids. A
request of p prompts with ``n`` sequences each has p * n choices, numbered prompt by prompt.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from truedraft.engine.messages import FinishReason, Generate, SamplingParams, TokenOutput
from truedraft.server.client.engine_stream import EngineStream
from truedraft.server.client.worker_pool import WorkerPool
from truedraft.server.errors import (
    RequestTimeoutError,
    code_of,
)
from truedraft.server.metrics import Metrics, RequestTimer
from truedraft.server.schemas.answer import CompletionTokensDetails, PromptTokensDetails, Usage
from truedraft.server.text.choice import ChoiceDelta, ChoiceReader, FinishedChoice, SpeculationCounts
from truedraft.server.text.detokenizer import Detokenizer
from truedraft.server.text.message_reader import MessageFormat, MessageReader
from truedraft.server.text.prompt import TokenPrompt
from truedraft.server.text.tokenizer import Tokenizer

# Values in an answer up to which it is written at once: some milliseconds.
SMALL_ANSWER = 5000
# Bytes of memory that a value takes while it is written.
MEMORY_PER_VALUE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request wants generated."""

    id: str
    endpoint: str
    prompts: list[TokenPrompt]
    params: SamplingParams
    n: int
    priority: int
    cache_prompt: bool
    cache_salt: str
    key: str
    prediction_token_ids: list[int] | None
    stop_strings: list[str]
    include_stop_string: bool
    skip_special_tokens: bool
    echo: bool
    continues_prompt: bool  # with the same text, where a message begins a new one
    report_trace: bool = False
    message: MessageFormat | None = None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_values(self) -> int:
        """Estimates what the answer may hold: tokens, and what is reported of each."""
        params = self.params
        per_token = max(params.logprobs or 0, params.prompt_logprobs or 0) + 1
        num_tokens = sum(len(prompt.token_ids) for prompt in self.prompts) + params.max_tokens
        return self.num_choices * num_tokens * per_token

    @property
    def may_be_large(self) -> bool:
        """Whether writing the answer may take long enough for others to notice."""
        return self.num_values > SMALL_ANSWER

    @property
    def answer_weight(self) -> int:
        return MEMORY_PER_VALUE * self.num_values

    @property
    def wants_tokens(self) -> bool:
        return self.params.max_tokens > 0

    def prompt_of(self, choice: int) -> TokenPrompt:
        return self.prompts[choice // self.n]

    def engine_params(self) -> SamplingParams | None:
        """What the engine is asked for; None where nothing has to be computed.

        It always generates, so for a prompt's log-probabilities alone one token is asked for and dropped.
        """
        if self.wants_tokens:
            return self.params
        if self.params.prompt_logprobs is None:
            return None
        return msgspec.structs.replace(
            self.params, max_tokens=1, logprobs=None, num_speculative_tokens=0, trace=False, origins=False
        )

    def engine_requests(self) -> list[Generate]:
        """One per prompt, whose number ends its id; none where nothing has to be computed."""
        params = self.engine_params()
        if params is None:
            return []
        return [
            Generate(
                request_id=f"{self.id}-{number}",
                prompt_token_ids=prompt.token_ids,
                params=params,
                n=self.n,
                prediction_token_ids=self.prediction_token_ids,
                priority=self.priority,
                cache_prompt=self.cache_prompt,
                cache_salt=self.cache_salt,
            )
            for number, prompt in enumerate(self.prompts)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What became of a request, for its line in the log and for its trace. Times are since its arrival."""

    id: str
    usage: Usage
    speculation: SpeculationCounts
    num_rounds: int
    seconds: float
    queue_seconds: float | None
    first_token_seconds: float | None
    finish_reasons: list[str]  # "error" for choices that failed, "aborted" for those whose client left
    error: str | None = None  # its code

    def log_fields(self) -> dict[str, Any]:
        """Returns them as the log names them."""
        fields: dict[str, Any] = {
            "id": self.id,
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.prompt_tokens_details.cached_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "drafted": self.speculation.drafted,
            "accepted": self.speculation.accepted,
            "finish": ",".join(sorted(set(self.finish_reasons))),
        }
        if self.error is not None:
            fields["code"] = self.error
        for name in ("queue_seconds", "first_token_seconds"):
            if (seconds := getattr(self, name)) is not None:
                fields[name] = round(seconds, 6)
        return fields


class Generation:
    """``start`` it, read ``deltas`` or ``collect``, and always ``close`` it."""

    def __init__(self, job: Job, engine: WorkerPool, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self.job = job
        self._engine = engine
        self._timer = RequestTimer(metrics.requests, self._num_prompt_tokens())
        self._stream: EngineStream | None = None
        self.choices = [_reader(job, index, tokenizer) for index in range(job.num_choices)]
        self._num_tokens = 0
        self._num_cached_tokens = [0] * len(job.prompts)
        self._deadline: asyncio.TimerHandle | None = None
        self._is_over = False
        self._error: str | None = None

    @property
    def speculation(self) -> SpeculationCounts:
        return functools.reduce(SpeculationCounts.plus, (choice.speculation for choice in self.choices))

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def start(self, seconds_left: float | None = None, timeout: float | None = None) -> None:
        """Submit to the engine; raises ``NotReadyError`` or ``QueueFullError``.

        After ``seconds_left``, the rest of the request's ``timeout``, whatever reads the deltas gets
        ``RequestTimeoutError``.
        """
        if requests := self.job.engine_requests():
            self._stream = self._engine.submit(requests, self.job.key)
            if seconds_left is not None:
                late = RequestTimeoutError(f"The request was not finished within {timeout:g} seconds.")
                loop = asyncio.get_running_loop()
                self._deadline = loop.call_later(seconds_left, self._stream.fail, late)
        self._timer.submitted()

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        if self._stream is None:
            for choice in self.choices:
                yield choice.end_without_tokens()
        else:
            try:
                async for outputs in self._stream:
                    for delta in self._take(outputs):
                        yield delta
            except Exception as error:
                self._is_over = True  # failed, which is not the same as abandoned
                self._error = code_of(error)
                if isinstance(error, RequestTimeoutError):
                    self._timer.aborted("timeout")
                raise
        self._is_over = True
        by_length = any(choice.finish_reason == "length" for choice in self.choices)
        reason: FinishReason = "length" if by_length else "stop"
        _, num_drafted, num_accepted = self.speculation
        self._timer.finished(reason, num_drafted, num_accepted)

    async def collect(self) -> list[FinishedChoice]:
        choices = [FinishedChoice(index) for index in range(self.job.num_choices)]
        async for delta in self.deltas():
            choices[delta.index].add(delta)
        return choices

    def close(self) -> None:
        """Free whatever the engine still computes for this request."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._stream is not None:
            self._stream.close()
        if not self._is_over:
            self._is_over = True
            self._timer.aborted("disconnect")

    def usage(self) -> Usage:
        prompt = self._num_prompt_tokens()
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._num_tokens,
            total_tokens=prompt + self._num_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_cached_tokens)),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices),
                accepted_prediction_tokens=sum(choice.predicted.num_accepted for choice in self.choices),
                rejected_prediction_tokens=sum(choice.predicted.num_rejected for choice in self.choices),
            ),
        )

    def summary(self) -> "Summary":
        unfinished = "aborted" if self._error is None else "error"
        return Summary(
            id=self.job.id,
            usage=self.usage(),
            speculation=self.speculation,
            num_rounds=sum(choice.num_rounds for choice in self.choices),
            seconds=self._timer.seconds,
            queue_seconds=self._timer.queue_seconds,
            first_token_seconds=self._timer.first_token_seconds,
            finish_reasons=[choice.finish_reason or unfinished for choice in self.choices],
            error=self._error,
        )

    def _num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.job.prompts)

    def _take(self, outputs: Sequence[TokenOutput]) -> Iterator[ChoiceDelta]:
        """Turn what has come for each choice into one delta, and end its sequence at a stop string."""
        by_sequence: dict[tuple[str, int], list[TokenOutput]] = {}
        for output in outputs:
            by_sequence.setdefault(output.sequence, []).append(output)
        for (request_id, index), rounds in by_sequence.items():
            prompt = int(request_id.rpartition("-")[2])
            choice = self.choices[prompt * self.job.n + index]
            if choice.finish_reason is not None:
                continue  # was on its way when the stop string was found
            if index == 0:
                self._num_cached_tokens[prompt] = rounds[0].num_cached_tokens
            if not self.job.wants_tokens:
                yield choice.read_prompt(rounds[0])
                continue
            delta = choice.read(rounds)
            if delta.finish_reason is not None:
                assert self._stream is not None
                self._stream.stop(request_id, index)
            self._num_tokens += len(delta.token_ids)
            self._timer.output(delta, rounds[0].queue_seconds)
            yield delta


def _reader(job: Job, index: int, tokenizer: Tokenizer) -> ChoiceReader:
    detokenizer = Detokenizer(
        tokenizer.stream(
            skip_special_tokens=job.skip_special_tokens,
            marks=job.message.literals if job.message is not None else (),
            after=job.prompt_of(index).token_ids if job.continues_prompt else (),
        ),
        job.stop_strings,
        include_stop_string=job.include_stop_string,
        min_tokens=job.params.min_tokens,
    )
    return ChoiceReader(
        index,
        detokenizer,
        include_stop_string=job.include_stop_string,
        text_start=len(job.prompt_of(index).text) if job.echo else 0,
        stop_token_ids=job.params.stop_token_ids,
        prediction_length=len(job.prediction_token_ids or ()),
        message=None if job.message is None else MessageReader(job.message),
    )
