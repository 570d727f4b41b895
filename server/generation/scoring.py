"""Asks the engine for the log-probabilities of given continuations: nothing is drawn and no text is written.

What all prompts share is computed first, and they begin with it through the prefix cache. The first tokens of
continuations are read where their prompt ends, and the others where they come.
"""

import asyncio
import os
import uuid
from collections.abc import Sequence

from truedraft.engine.messages import Adapter, Generate, SamplingParams, TokenOutput
from truedraft.server.errors import code_of
from truedraft.server.observability.metrics import ModelMetrics, RequestTimer
from truedraft.server.observability.request_summary import Summary
from truedraft.server.schemas.answer import PromptTokensDetails, Usage
from truedraft.server.text.choice import AnswerCounts, ChoiceDelta
from truedraft.server.text.decisions import Asked
from truedraft.server.workers.worker_pool import WorkerPool

# Sequences that are in the engine at one time: those of other requests come between.
AT_ONCE = 32

# The tokens of a continuation but the last one.
Path = tuple[int, ...]


class Scoring:
    """``run`` it once; nothing of it is left in the engine afterwards, whatever happens."""

    def __init__(
        self,
        asked: Sequence[Asked],
        engine: WorkerPool,
        metrics: ModelMetrics,
        *,
        key: str,
        cache_salt: str,
        cache_prompt: bool,
        adapter: Adapter | None = None,
    ) -> None:
        self.asked = asked
        self.num_cached_tokens = 0
        self._engine = engine
        self._adapter = adapter
        self._key, self._cache_salt, self._cache_prompt = key, cache_salt, cache_prompt
        prompts = [one.prompt_ids for one in asked]
        self._shared = [*os.path.commonprefix(prompts)] if len(asked) > 1 else []
        self._timer = RequestTimer(metrics.requests, self.num_prompt_tokens)
        self._id = f"decision-{uuid.uuid4().hex}"
        self._num_sequences = 0
        self._end = "aborted"
        self._error: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Counts what the prompts share once, and the rest of each."""
        shared = len(self._shared)
        return shared + sum(len(one.prompt_ids) - shared for one in self.asked)

    async def run(self) -> list[list[float]]:
        """Returns the log-probability of each continuation, prompt by prompt."""
        self._timer.submitted()
        try:
            found = await self._scored()
        except asyncio.CancelledError:
            self._timer.aborted("disconnect")
            raise
        except Exception as error:
            self._end, self._error = "error", code_of(error)
            raise
        self._end = "stop"
        self._timer.finished("stop", 0, 0)
        return found

    async def _scored(self) -> list[list[float]]:
        trees = [Tree(one.labels) for one in self.asked]
        if self._shared and self._cache_prompt:
            await self._compute([self._request(self._shared, (), [])])
        wanted = [(number, path) for number, tree in enumerate(trees) for path in tree.next_ids]
        # Paths begin where their prompts end, so these come before them.
        for some in (
            *_some_at_once([one for one in wanted if not one[1]]),
            *_some_at_once([one for one in wanted if one[1]]),
        ):
            requests = [
                self._request(self.asked[number].prompt_ids, path, trees[number].next_ids[path])
                for number, path in some
            ]
            for (number, path), output in zip(some, await self._compute(requests), strict=True):
                trees[number].take(path, output)
        return [tree.logprobs() for tree in trees]

    def _request(self, prompt_ids: list[int], path: Path, next_ids: list[int]) -> Generate:
        """Asks for the log-probabilities of ``next_ids`` after ``path``, and of its own tokens but the first,
        which its prompt has told."""
        is_long = len(path) > 1
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            logprobs=0,
            logprob_token_ids=next_ids,
            prompt_logprobs=0 if is_long else None,
            prompt_logprobs_start=len(prompt_ids) + 1 if is_long else 0,
            num_speculative_tokens=0,
        )
        self._num_sequences += 1
        return Generate(
            request_id=f"{self._id}-{self._num_sequences}",
            prompt_token_ids=[*prompt_ids, *path],
            params=params,
            cache_prompt=self._cache_prompt,
            cache_salt=self._cache_salt,
            adapter=self._adapter,
        )

    async def _compute(self, requests: list[Generate]) -> list[TokenOutput]:
        """Returns the one output of each sequence, in their order."""
        stream = self._engine.submit(requests, self._key)
        found: dict[str, TokenOutput] = {}
        is_first = self._timer.first_token_seconds is None
        try:
            async for outputs in stream:
                for output in outputs:
                    found[output.request_id] = output
                    if self._timer.first_token_seconds is None:
                        self._timer.output(ChoiceDelta(0, "", [], None), output.queue_seconds)
        finally:
            stream.close()
        in_order = [found[request.request_id] for request in requests]
        if is_first:
            self.num_cached_tokens = in_order[0].num_cached_tokens
        return in_order

    def summary(self) -> Summary:
        usage = Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=0,
            total_tokens=self.num_prompt_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.num_cached_tokens),
        )
        return Summary(
            id=self._id,
            usage=usage,
            speculation=AnswerCounts(),
            num_rounds=self._num_sequences,
            seconds=self._timer.seconds,
            prepared_seconds=self._timer.prepared_seconds,
            queue_seconds=self._timer.queue_seconds,
            first_token_seconds=self._timer.first_token_seconds,
            finish_reasons=[self._end],
            error=self._error,
        )


def _some_at_once(wanted: list[tuple[int, Path]]) -> list[list[tuple[int, Path]]]:
    return [wanted[start : start + AT_ONCE] for start in range(0, len(wanted), AT_ONCE)]


class Tree:
    """Holds continuations of one prompt. ``next_ids``: the tokens whose log-probabilities are asked for after
    the prompt, which is the path of no tokens, and after each path."""

    def __init__(self, continuations: Sequence[Sequence[int]]) -> None:
        self._continuations = continuations
        wanted: dict[Path, dict[int, None]] = {(): {}}
        for first, *rest in continuations:
            wanted[()][first] = None
            if rest:
                wanted.setdefault((first, *rest[:-1]), {})[rest[-1]] = None
        self.next_ids = {path: [*ids] for path, ids in wanted.items()}
        self._next: dict[Path, dict[int, float]] = {}
        self._inside: dict[Path, float] = {}

    def take(self, path: Path, output: TokenOutput) -> None:
        assert output.logprobs is not None
        (entry,) = output.logprobs
        self._next[path] = dict(entry.given)
        self._inside[path] = sum(one.logprob for one in output.prompt_logprobs or () if one is not None)

    def logprobs(self) -> list[float]:
        """Returns the sums of the continuations' tokens."""
        return [self._logprob(tuple(ids)) for ids in self._continuations]

    def _logprob(self, ids: Path) -> float:
        first, path = self._next[()][ids[0]], ids[:-1]
        return first + self._inside[path] + self._next[path][ids[-1]] if path else first
