"""Replays a traced answer offline: every draft, every verdict and every drawn token is decided again.

Fresh forward passes (no cache, no batch) give the distributions of the target and of the draft, the seed
gives the random numbers, and each decision of the trace is compared with what the rules say
(``replay_round``). The module knows nothing of files and output; ``verify_trace`` prints the result.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from truedraft.engine.commands.replay_round import Finding, Fresh, Outcome, RoundCheck
from truedraft.engine.commands.trace_file import TracedChoice, TracedRound
from truedraft.engine.core.sequence import is_greedy
from truedraft.engine.messages import DRAFT_MODEL, HEADS, SamplingParams
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.sampling.grammar import Grammars, Matcher
from truedraft.engine.sampling.thinking import ThinkingBudget


class DraftKey(NamedTuple):
    """Identifies who drafts and, if it is a head, its output layer and the tokens of that."""

    source: str
    head_output: str | None = None
    vocabulary: str | None = None


def key_of(round_: TracedRound) -> DraftKey:
    return DraftKey(round_.source, round_.head_output, round_.draft_vocabulary)


@dataclass(frozen=True)
class RoundReport:
    number: int  # counts from 1
    round: TracedRound
    findings: list[Finding]

    @property
    def outcome(self) -> Outcome:
        found = {finding.outcome for finding in self.findings}
        worst = (outcome for outcome in (Outcome.WRONG, Outcome.NEAR_TIE) if outcome in found)
        return next(worst, Outcome.CONFIRMED)


class Replayer:
    """Replays answers. ``drafts`` are the models and heads that draft: tokens drawn by others cannot be
    judged. ``grammars`` are needed if the output is constrained; ``tolerance`` is for probabilities."""

    def __init__(
        self,
        target: FreshModel,
        drafts: Mapping[DraftKey, Fresh],
        params: SamplingParams,
        tolerance: float,
        grammars: Grammars | None = None,
    ) -> None:
        self.target = target
        self.drafts = drafts
        self.params = params
        self.tolerance = tolerance
        self.grammars = grammars

    def replay(self, choice: TracedChoice) -> Iterator[RoundReport]:
        """Yields a report for each round. Rounds with a wrong decision are followed as traced, so that later
        ones are judged as far as possible."""
        num_prompt_tokens = len(self.target.begin(choice.prompt_token_ids))
        stop_token_ids = self.target.stop_token_ids(self.params)
        output: list[int] = []
        has_ended = False
        matcher = self._matcher()
        for number, round_ in enumerate(choice.rounds, start=1):
            text = self.target.text(self.params, choice.prompt_token_ids, output, stop_token_ids)
            if senseless := self._structure(round_, num_prompt_tokens + len(output), has_ended):
                yield RoundReport(number, round_, senseless)
                return
            if matcher is not None:
                text = replace(text, matcher=matcher)
            findings = self._decisions(round_, text, choice.seed)
            emitted = _until_stop(
                [*round_.draft_ids[: round_.num_accepted], round_.next_token], stop_token_ids
            )
            if choice.output_token_ids is not None:
                findings += _compare_output(choice.output_token_ids, len(output), emitted)
            output += emitted
            if number == len(choice.rounds) and len(choice.output_token_ids or []) > len(output):
                findings.append(Finding(Outcome.WRONG, "the answer goes on after the last traced round"))
            has_ended = emitted[-1] in stop_token_ids or len(output) >= self.params.max_tokens
            if matcher is not None and not has_ended:
                matcher.advance(emitted)
            yield RoundReport(number, round_, findings)

    def _matcher(self) -> Matcher | ThinkingBudget | None:
        if self.params.grammar is None and self.params.thinking_budget is None:
            return None
        assert self.grammars is not None
        return self.grammars.constraint(self.params, self.target.vocab_size)

    def _decisions(self, round_: TracedRound, text: LoneText, seed: int) -> list[Finding]:
        """Compares the decisions; a token within noise of the top-p or min-p cut may have been on either side
        of it."""
        findings = self._check(round_, text, seed)
        params = text.params
        if not _is_wrong(findings) or (params.top_p == 1 and params.min_p == 0):
            return findings
        for nudge in (1 - self.tolerance, 1 + self.tolerance):
            nudged = msgspec.structs.replace(
                params, top_p=min(1.0, params.top_p * nudge), min_p=params.min_p * nudge
            )
            again = self._check(round_, replace(text, params=nudged), seed)
            if not _is_wrong(again):
                return [Finding(Outcome.NEAR_TIE, "a token is next to the top-p or min-p cut"), *again]
        return findings

    def _check(self, round_: TracedRound, text: LoneText, seed: int) -> list[Finding]:
        draft = self.drafts.get(key_of(round_))
        check = RoundCheck(self.target, draft, self.tolerance, round_, text, seed)
        return list(check.findings())

    def _structure(self, round_: TracedRound, length: int, has_ended: bool) -> list[Finding]:
        """Returns faults that make a round senseless before any number is compared."""
        flags = [token.accepted for token in round_.drafted]
        greedy = is_greedy(self.params)
        asked = Rule.EXACT_MATCH.value if greedy else self.params.verification or round_.rule
        sampling_rules = {rule.value for rule in Rule if rule is not Rule.EXACT_MATCH}
        known = {Rule.EXACT_MATCH.value} if greedy else sampling_rules
        ids = [*round_.draft_ids, round_.next_token]
        problems = {
            "the sequence had ended before": has_ended,
            f"it starts at {round_.position}, the text so far has {length} tokens": round_.position != length,
            f"its rule is {round_.rule}, the request's {asked}": round_.rule not in known
            or round_.rule != asked,
            "a drafted token is accepted after one that is not": flags != sorted(flags, reverse=True),
            "it drafted without a source": bool(flags) and round_.source == "none",
            "there is no draft model to draft it again": round_.source == DRAFT_MODEL
            and key_of(round_) not in self.drafts,
            "a head drafted before the target had computed a token": round_.source in HEADS and length < 2,
            "it has a token id that the target does not know": not all(
                0 <= token_id < self.target.vocab_size for token_id in ids
            ),
        }
        return [Finding(Outcome.WRONG, problem) for problem, is_so in problems.items() if is_so]


def _is_wrong(findings: list[Finding]) -> bool:
    return any(finding.outcome is Outcome.WRONG for finding in findings)


def _until_stop(token_ids: list[int], stop_token_ids: frozenset[int]) -> list[int]:
    for count, token_id in enumerate(token_ids, start=1):
        if token_id in stop_token_ids:
            return token_ids[:count]
    return token_ids


def _compare_output(answer: list[int], start: int, emitted: list[int]) -> list[Finding]:
    """Compares the answer with the trace; it may end earlier than the trace, at a stop string."""
    got = answer[start : start + len(emitted)]
    if got == emitted[: len(got)]:
        return []
    return [Finding(Outcome.WRONG, f"it emitted {emitted}, the answer has {got}")]
