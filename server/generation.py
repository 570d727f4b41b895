"""Run one HTTP request: submit its prompts, turn token outputs into text deltas, count, clean up.

Between the routes, which know the two answer formats, and the engine client, which knows token ids. A
request of p prompts with ``n`` sequences each has p * n choices, numbered prompt by prompt.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.messages import FinishReason, Generate, SamplingParams, TokenOutput
from server.detokenizer import Detokenizer
from server.engine_client import EngineClient
from server.engine_stream import EngineStream
from server.metrics import Metrics, RequestTimer
from server.prompt import TokenPrompt
from server.schemas.common import Usage
from server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request wants generated."""

    id: str
    endpoint: str
    prompts: list[TokenPrompt]
    params: SamplingParams
    n: int
    stop_strings: list[str]
    include_stop_string: bool
    skip_special_tokens: bool

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def prompt_of(self, choice: int) -> TokenPrompt:
        return self.prompts[choice // self.n]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one round added to a choice; ``text`` may be empty while it is held back."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class FinishedChoice:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class SpeculationCounts(NamedTuple):
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


class Generation:
    """``start`` it, read ``deltas`` or ``collect``, and always ``close`` it."""

    def __init__(self, job: Job, engine: EngineClient, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self.job = job
        self.speculation = SpeculationCounts()
        self._engine = engine
        self._timer = RequestTimer(metrics.requests, job.endpoint, self._num_prompt_tokens())
        self._stream: EngineStream | None = None
        self._detokenizers = [
            Detokenizer(
                tokenizer.stream(skip_special_tokens=job.skip_special_tokens),
                job.stop_strings,
                include_stop_string=job.include_stop_string,
            )
            for _ in range(job.num_choices)
        ]
        self._num_tokens = 0
        self._finish_reasons: dict[int, FinishReason] = {}
        self._is_over = False

    def start(self) -> None:
        """Submit to the engine; raises ``NotReadyError`` or ``QueueFullError``."""
        if self.job.params.max_tokens > 0:
            self._stream = self._engine.submit(
                [
                    Generate(f"{self.job.id}-{number}", prompt.token_ids, self.job.params, self.job.n)
                    for number, prompt in enumerate(self.job.prompts)
                ]
            )
        self._timer.submitted()

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        if self._stream is None:
            for index in range(self.job.num_choices):
                yield self._finish(ChoiceDelta(index, "", [], "length"))
        else:
            try:
                async for output in self._stream:
                    if (delta := self._take(output)) is not None:
                        yield delta
            except Exception:
                self._is_over = True  # failed, which is not the same as abandoned
                raise
        self._is_over = True
        reason: FinishReason = "length" if "length" in self._finish_reasons.values() else "stop"
        self._timer.finished(reason, self.speculation.drafted, self.speculation.accepted)

    async def collect(self) -> list[FinishedChoice]:
        choices = [FinishedChoice(index) for index in range(self.job.num_choices)]
        async for delta in self.deltas():
            choice = choices[delta.index]
            choice.text += delta.text
            choice.token_ids += delta.token_ids
            choice.finish_reason = delta.finish_reason
        return choices

    def close(self) -> None:
        """Free whatever the engine still computes for this request."""
        if self._stream is not None:
            self._stream.close()
        if not self._is_over:
            self._is_over = True
            self._timer.aborted("disconnect")

    def usage(self) -> Usage:
        prompt = self._num_prompt_tokens()
        return Usage(
            prompt_tokens=prompt, completion_tokens=self._num_tokens, total_tokens=prompt + self._num_tokens
        )

    def _num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.job.prompts)

    def _take(self, output: TokenOutput) -> ChoiceDelta | None:
        """Turn one engine output into text, watching for stop strings."""
        index = self._choice_of(output)
        if index in self._finish_reasons:
            return None  # was on its way when the stop string was found
        detokenizer = self._detokenizers[index]
        ended_by_token = output.finish_reason == "stop" and not self.job.include_stop_string
        piece = detokenizer.push(output.token_ids[:-1] if ended_by_token else output.token_ids)
        num_tokens = piece.num_tokens + (1 if ended_by_token and not piece.stopped else 0)
        text, finish_reason = piece.text, output.finish_reason
        if piece.stopped:
            finish_reason = "stop"
            assert self._stream is not None
            self._stream.stop(output.request_id, output.index)
        elif output.finish_reason is not None:
            last = detokenizer.finish()
            text += last.text
            finish_reason = "stop" if last.stopped else output.finish_reason
        self._count(output, index, num_tokens)
        delta = ChoiceDelta(index, text, output.token_ids[:num_tokens], finish_reason)
        return delta if finish_reason is None else self._finish(delta)

    def _choice_of(self, output: TokenOutput) -> int:
        prompt = int(output.request_id.rpartition("-")[2])
        return prompt * self.job.n + output.index

    def _count(self, output: TokenOutput, index: int, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        self._timer.output(index, num_tokens)
        if output.num_draft_tokens:
            rounds, drafted, accepted = self.speculation
            self.speculation = SpeculationCounts(
                rounds + 1, drafted + output.num_draft_tokens, accepted + output.num_accepted_tokens
            )

    def _finish(self, delta: ChoiceDelta) -> ChoiceDelta:
        assert delta.finish_reason is not None
        self._finish_reasons[delta.index] = delta.finish_reason
        return delta
