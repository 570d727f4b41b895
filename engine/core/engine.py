"""The engine: sequences in, a few tokens of each per step out.

``EngineCore.step`` is the algorithm; everything below it is detail. It knows token ids and logits, neither
text nor processes: ``worker`` runs it behind a socket, ``llm`` in place.
"""

from collections.abc import Callable

import torch

from engine.batch import Span
from engine.core.admission import Admission, RequestError
from engine.core.scheduler import Scheduled, Scheduler
from engine.core.sequence import Sequence
from engine.core.stats import EngineStats
from engine.draft_length.rounds import RoundSeconds
from engine.messages import Failed, Generate, RoundTrace, Stats, TokenOutput
from engine.models.decoder_only import DecoderModel
from engine.proposers.routed import RoutedProposer
from engine.round_report import (
    failure,
    follow_prediction,
    outcome,
    output_logprobs,
    take_prompt_logprobs,
    traces,
)
from engine.sampling.adjust import History
from engine.sampling.draws import Draws, TorchDraws
from engine.sampling.sampler import Row, Rule, Sampler
from engine.sampling.verify import RowVerdict
from engine.whole_rounds import WholeRounds


class EngineCore:
    """Models, proposer and scheduler are made by ``build``."""

    def __init__(
        self,
        target: DecoderModel,
        proposer: RoutedProposer,
        scheduler: Scheduler,
        admission: Admission,
        make_draws: Callable[[], Draws] = TorchDraws,
        step_seconds: float = 0.0,
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.scheduler = scheduler
        self.admission = admission
        self.make_draws = make_draws
        self.stats = EngineStats()
        self.whole_rounds: WholeRounds | None = WholeRounds(
            target, proposer.draft_model, scheduler, self.stats, step_seconds
        )
        self._rows: dict[Sequence, Row] = {}  # of the last step's sequences

    def add(self, request: Generate) -> None:
        """Queue a request's sequences; ``RequestError`` if it can never be served."""
        sequences = self.admission.sequences(request)
        longest = sequences[0].max_num_tokens
        if not self.scheduler.can_ever_fit(longest):
            raise RequestError(
                "context_length_exceeded",
                f"{longest} tokens do not fit into the cache; lower max_tokens or raise cache_memory",
            )
        for sequence in sequences:
            self.scheduler.add(sequence)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forget a request's sequences, or one of them; unknown ones are ignored."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.request_id == request_id and index in (None, sequence.index):
                self.scheduler.finish(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @torch.inference_mode()
    def step(self) -> list[TokenOutput | Failed]:
        """Schedule, propose, score, verify, commit; where rounds are short, several of them at once."""
        stats = self.stats
        stats.start_step()
        scheduled = self.scheduler.schedule()
        parts = [part for part in scheduled if part.completes]
        sampler = Sampler(self._rows_of(parts), self.target.vocab_size, self.target.device, self.make_draws)
        host = stats.end_phase("host")
        if not scheduled:
            return []
        if self.whole_rounds is not None and len(parts) == len(self.scheduler.running):
            outputs = self.whole_rounds.step(parts, sampler, host)
            if outputs is not None:
                return outputs

        drafts = self.proposer.propose(scheduled, sampler)
        drafted = drafts.ids
        draft = stats.end_phase("draft")

        logits = self._score(scheduled, drafted)
        score = stats.end_phase("score")

        verdicts = sampler.verify(logits, drafts)
        score += stats.end_phase("verify")
        round_traces = traces(parts, self.proposer.trace_source, sampler, drafts, logits, verdicts)

        for part in scheduled:
            if not part.completes:
                self.scheduler.publish(part.sequence)
        outputs = self._commit(parts, drafted, logits, verdicts, round_traces)
        host += stats.end_phase("host")
        if self.whole_rounds is not None:
            self.whole_rounds.last_seconds = draft + score + host
        self._observe(scheduled, parts, drafted, verdicts, RoundSeconds(draft, score, host))
        return outputs

    def _rows_of(self, parts: list[Scheduled]) -> list[Row]:
        """Every sequence has a row in the samplers of all its steps; it follows the tokens by itself."""
        known = self._rows
        self._rows = {part.sequence: known.get(part.sequence) or self._row(part.sequence) for part in parts}
        return list(self._rows.values())

    def _row(self, sequence: Sequence) -> Row:
        history = History(
            params=sequence.params,
            token_ids=sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            stop_token_ids=sequence.stop_token_ids,
            num_encoder_tokens=sequence.num_encoder_tokens,
            rules=self.target.rules,
        )
        return Row(_rule(sequence), sequence.seed, history)

    def _score(self, scheduled: list[Scheduled], drafted: list[list[int]]) -> torch.Tensor:
        """Target logits of every drawing sequence's pending token and drafted tokens, packed."""
        drafts = iter(drafted)
        spans, num_drawing_rows = [], []
        for part in scheduled:
            sequence = part.sequence
            table = sequence.target_blocks
            start = table.num_computed_tokens
            token_ids = sequence.token_ids[start : start + part.num_tokens]
            num_rows = 0
            if part.completes:
                draft = next(drafts)
                token_ids += draft
                num_rows = len(draft) + 1
            num_logits = len(token_ids) if sequence.wants_prompt_logprobs else num_rows
            spans.append(Span(table, token_ids, num_logits))
            num_drawing_rows.append(num_rows)
        logits = self.target.forward(spans)
        if len(logits) == sum(num_drawing_rows):
            return logits
        return take_prompt_logprobs(scheduled, spans, num_drawing_rows, logits)

    def _commit(
        self,
        parts: list[Scheduled],
        drafted: list[list[int]],
        logits: torch.Tensor,
        verdicts: list[RowVerdict],
        round_traces: list[RoundTrace | None],
    ) -> list[TokenOutput | Failed]:
        """Append what was emitted and bring both caches back to all tokens but the pending one."""
        outputs: list[TokenOutput | Failed] = []
        failed_requests: set[str] = set()
        next_row = 0
        for part, draft, verdict, trace in zip(parts, drafted, verdicts, round_traces, strict=True):
            sequence = part.sequence
            num_accepted, next_token, failed = verdict
            first_row, next_row = next_row, next_row + len(draft) + 1
            if sequence.request_id in failed_requests:
                continue  # another choice of its request has just failed
            if failed:
                failed_requests.add(sequence.request_id)
                self.abort(sequence.request_id)
                outputs.append(failure(sequence))
                continue
            is_first = len(sequence.token_ids) == sequence.num_prompt_tokens
            emitted = sequence.append([*draft[:num_accepted], next_token])
            # A stop inside the accepted run ends the sequence there: what follows was never said.
            num_kept = min(num_accepted, len(emitted))
            if draft:
                self.stats.count_draft(part.source, len(draft), num_kept)
            self.scheduler.settle(sequence)
            outputs.append(
                TokenOutput(
                    request_id=sequence.request_id,
                    index=sequence.index,
                    token_ids=emitted,
                    finish_reason=sequence.finish_reason,
                    num_draft_tokens=len(draft),
                    num_accepted_tokens=num_kept,
                    seed=sequence.seed,
                    num_cached_tokens=sequence.num_cached_tokens or 0,
                    queue_seconds=sequence.queue_seconds if is_first else None,
                    logprobs=output_logprobs(sequence, logits, first_row, emitted),
                    prompt_logprobs=sequence.prompt_logprobs if is_first else None,
                    trace=trace if sequence.params.trace else None,
                    prediction=follow_prediction(part, emitted, len(draft)),
                )
            )
        return outputs

    def _observe(
        self,
        scheduled: list[Scheduled],
        parts: list[Scheduled],
        drafted: list[list[int]],
        verdicts: list[RowVerdict],
        seconds: RoundSeconds,
    ) -> None:
        """Tell the planner what became of the rows it was asked about, and what the step cost."""
        if not self.scheduler.planner.learns:
            return
        # A draft cache that only caught up has drafted nothing, which is nobody's failure.
        outcomes = [
            outcome(part, len(draft), verdict.num_accepted)
            for part, draft, verdict in zip(parts, drafted, verdicts, strict=True)
            if part.sequence in self.scheduler.chosen
            and (part.num_draft_tokens or not part.num_catch_up_tokens)
        ]
        # Steps that also compute prompts say nothing about rounds.
        self.scheduler.planner.observe(outcomes, seconds if len(outcomes) == len(scheduled) else None)

    def speculation(self) -> dict[str, object]:
        """How drafts are chosen, and why: for ``GET /speculation``."""
        state: dict[str, object] = {
            "policy": "fixed",
            "num_draft_tokens": self.admission.num_speculative_tokens or 0,
        }
        if self.scheduler.planner.policy is not None:
            state = self.scheduler.planner.policy.state()
        if self.scheduler.planner.chooser is not None:
            state = {**state, "sources": self.scheduler.planner.chooser.state()}
        return state

    @property
    def _draft_length_in_force(self) -> float:
        """Tokens that a drafting sequence guesses per round: the last step's mean, or the fixed number."""
        if self.admission.method == "none":
            return 0
        if self.admission.num_speculative_tokens is not None:
            return self.admission.num_speculative_tokens
        lengths = [choice.num_tokens for choice in self.scheduler.chosen.values()]
        return sum(lengths) / len(lengths) if lengths else 0

    def snapshot(self) -> Stats:
        stats, scheduler = self.stats, self.scheduler
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_speculative_tokens=self._draft_length_in_force,
            cache_usage=scheduler.cache_usage(),
            num_preemptions=scheduler.num_preemptions,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            drafts=dict(stats.drafts),
            draft_tokens_per_position=list(stats.draft_tokens_per_position),
            accepted_tokens_per_position=list(stats.accepted_tokens_per_position),
            phase_seconds=dict(stats.phase_seconds),
        )


def _rule(sequence: Sequence) -> Rule:
    return Rule.EXACT_MATCH if sequence.greedy else Rule(sequence.verification)
