"""The engine: sequences in, a few tokens of each per step out.

``EngineCore.step`` is the algorithm; everything below it is detail. It knows token ids and logits, neither
text nor processes: ``worker`` runs it behind a socket, ``llm`` in place.
"""

import secrets

import torch

from engine.batch import Span
from engine.messages import Generate, SamplingParams, Stats, TokenOutput, Verification
from engine.models.decoder_only import DecoderModel
from engine.proposers.base import NoProposer, Proposer
from engine.sampling.random import sequence_seed
from engine.sampling.sampler import Drafts, Row, Rule, Sampler
from engine.sampling.verify import Verdict
from engine.scheduler import Scheduled, Scheduler
from engine.sequence import Sequence
from engine.stats import EngineStats


class RequestError(Exception):
    """A request the engine cannot serve; ``code`` names the reason for the client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EngineCore:
    """``num_speculative_tokens`` and ``verification`` are what requests get that do not say."""

    def __init__(
        self,
        target: DecoderModel,
        proposer: Proposer,
        scheduler: Scheduler,
        max_model_len: int,
        num_speculative_tokens: int,
        verification: Verification | None,
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.scheduler = scheduler
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.verification = verification
        self.stats = EngineStats()

    def add(self, request: Generate) -> None:
        """Queue a request's sequences; ``RequestError`` if it can never be served."""
        params, prompt = request.params, request.prompt_token_ids
        self._check(prompt)
        max_num_tokens = min(len(prompt) + params.max_tokens, self.max_model_len)
        if not self.scheduler.can_ever_fit(max_num_tokens):
            raise RequestError(
                "context_length_exceeded",
                f"{max_num_tokens} tokens do not fit into the cache; lower max_tokens or raise cache_memory",
            )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self.target.eos_token_ids
        for index in range(request.n):
            self.scheduler.add(
                Sequence(
                    request_id=request.request_id,
                    index=index,
                    params=params,
                    seed=sequence_seed(seed, index),
                    verification=self._verification(params),
                    num_speculative_tokens=self._draft_limit(params),
                    stop_token_ids=stop_token_ids,
                    token_ids=list(prompt),
                    num_prompt_tokens=len(prompt),
                    max_num_tokens=max_num_tokens,
                )
            )

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forget a request's sequences, or one of them; unknown ones are ignored."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.request_id == request_id and index in (None, sequence.index):
                self.scheduler.finish(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[TokenOutput]:
        with self.stats.phase("host"):
            scheduled = self.scheduler.schedule()
            if not scheduled:
                return []
            completing = [part for part in scheduled if part.completes]
            sampler = self._sampler(completing)
        with self.stats.phase("draft"):
            drafts = self.proposer.propose(scheduled, sampler)
        with self.stats.phase("score"):
            logits = self._score(scheduled, drafts)
        with self.stats.phase("verify"):
            verdict = sampler.verify(logits, drafts)
        with self.stats.phase("host"):
            return self._commit(completing, drafts, verdict)

    def _sampler(self, completing: list[Scheduled]) -> Sampler:
        rows = [
            Row(
                params=part.sequence.params,
                rule=_rule(part.sequence),
                seed=part.sequence.seed,
                position=len(part.sequence),
            )
            for part in completing
        ]
        return Sampler(rows, self.target.vocab_size, self.target.device)

    def _score(self, scheduled: list[Scheduled], drafts: Drafts) -> torch.Tensor:
        """Target logits of every drawing row's pending token and drafted tokens, packed."""
        drafted = iter(_drafted_ids(drafts))
        spans = []
        for part in scheduled:
            table = part.sequence.target_blocks
            start = table.num_computed_tokens
            token_ids = part.sequence.token_ids[start : start + part.num_tokens]
            if part.completes:
                draft = next(drafted)
                spans.append(Span(table, token_ids + draft, num_logits=len(draft) + 1))
            else:
                spans.append(Span(table, token_ids, num_logits=0))
        return self.target.forward(spans)

    def _commit(self, completing: list[Scheduled], drafts: Drafts, verdict: Verdict) -> list[TokenOutput]:
        """Append what was emitted and bring both caches back to all tokens but the pending one."""
        outputs = []
        rows = zip(
            completing,
            _drafted_ids(drafts),
            verdict.num_accepted.tolist(),
            verdict.next_token.tolist(),
            strict=True,
        )
        for part, draft, num_accepted, next_token in rows:
            sequence = part.sequence
            emitted = sequence.append([*draft[:num_accepted], next_token])
            # A stop inside the accepted run ends the sequence there: what follows was never said.
            num_accepted = min(num_accepted, len(emitted))
            self.stats.count_draft(len(draft), num_accepted)
            if sequence.finish_reason:
                self.scheduler.finish(sequence)
            else:
                self.scheduler.truncate(sequence, len(sequence) - 1)
            outputs.append(
                TokenOutput(
                    request_id=sequence.request_id,
                    index=sequence.index,
                    token_ids=emitted,
                    finish_reason=sequence.finish_reason,
                    num_draft_tokens=len(draft),
                    num_accepted_tokens=num_accepted,
                )
            )
        return outputs

    def snapshot(self) -> Stats:
        stats, scheduler = self.stats, self.scheduler
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_speculative_tokens=self.num_speculative_tokens,
            cache_usage=scheduler.cache_usage(),
            num_preemptions=scheduler.num_preemptions,
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            draft_tokens_per_position=list(stats.draft_tokens_per_position),
            accepted_tokens_per_position=list(stats.accepted_tokens_per_position),
            phase_seconds=dict(stats.phase_seconds),
        )

    def _check(self, prompt: list[int]) -> None:
        if not prompt:
            raise RequestError("empty_prompt", "the prompt has no tokens")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {len(prompt)} tokens, the model's context {self.max_model_len}",
            )
        if not 0 <= min(prompt) <= max(prompt) < self.target.vocab_size:
            raise RequestError("invalid_token_id", f"token ids must be in 0..{self.target.vocab_size - 1}")

    def _verification(self, params: SamplingParams) -> Verification:
        by_seed: Verification = "rejection" if params.seed is None else "coupled"
        return params.verification or self.verification or by_seed

    def _draft_limit(self, params: SamplingParams) -> int:
        if isinstance(self.proposer, NoProposer):
            return 0
        wanted = params.num_speculative_tokens
        return self.num_speculative_tokens if wanted is None else wanted


def _rule(sequence: Sequence) -> Rule:
    if sequence.greedy:
        return Rule.EXACT_MATCH
    return Rule.COUPLED if sequence.verification == "coupled" else Rule.REJECTION


def _drafted_ids(drafts: Drafts) -> list[list[int]]:
    """Each row's drafted ids, without padding."""
    return [ids[:length] for ids, length in zip(drafts.token_ids.tolist(), drafts.lengths, strict=True)]
