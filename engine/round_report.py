"""What a step tells of its rows besides tokens: log-probabilities, traces, use of a prediction, failures."""

from collections.abc import Callable

import torch

from engine.batch import Span
from engine.core.scheduler import Scheduled
from engine.core.sequence import Sequence
from engine.draft_length.rounds import Outcome
from engine.messages import Failed, PredictionUse, RoundTrace, TokenLogprob
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import Drafts, Sampler
from engine.sampling.verify import RowVerdict


def take_prompt_logprobs(
    scheduled: list[Scheduled], spans: list[Span], num_drawing_rows: list[int], logits: torch.Tensor
) -> torch.Tensor:
    """Keep the prompts' log-probabilities with their sequences; return the drawing rows alone."""
    drawing_rows = []
    for part, rows, num_drawing in zip(
        scheduled, torch.split(logits, [span.num_logits for span in spans]), num_drawing_rows, strict=True
    ):
        sequence = part.sequence
        if sequence.wants_prompt_logprobs:
            first = sequence.target_blocks.num_computed_tokens - len(rows)
            # The row of token i predicted token i + 1.
            known = sequence.token_ids[first + 1 : min(first + 1 + len(rows), sequence.num_prompt_tokens)]
            assert sequence.params.prompt_logprobs is not None
            sequence.add_prompt_logprobs(
                first + 1, token_logprobs(rows[: len(known)], known, sequence.params.prompt_logprobs)
            )
        drawing_rows.append(rows[len(rows) - num_drawing :])
    return torch.cat(drawing_rows)


def output_logprobs(
    sequence: Sequence, logits: torch.Tensor, first_row: int, emitted: list[int]
) -> list[TokenLogprob] | None:
    """Of the tokens emitted, if they were asked for; raw ``logits`` [rows, V] from ``first_row`` on."""
    num_top = sequence.params.logprobs
    if num_top is None:
        return None
    return token_logprobs(logits[first_row : first_row + len(emitted)], emitted, num_top)


def follow_prediction(part: Scheduled, emitted: list[int], num_drafted: int) -> PredictionUse | None:
    """Move the cursor over what was emitted, and say how much of it the prediction knew."""
    cursor = part.sequence.prediction
    if cursor is None:
        return None
    first = cursor.place
    return PredictionUse(cursor.follow(emitted), first, num_drafted if part.source == "prediction" else 0)


def traces(
    parts: list[Scheduled],
    name_source: Callable[[str], str],
    sampler: Sampler,
    drafts: Drafts,
    logits: torch.Tensor,
    verdicts: list[RowVerdict],
) -> list[RoundTrace | None]:
    """One per drawing sequence; Nones where nobody asked. ``name_source``: what traces call a source."""
    if not sampler.traced:
        return [None] * len(sampler.rows)
    target_probs, draft_probs = (probs.tolist() for probs in sampler.drafted_probs(logits, drafts))
    return [
        RoundTrace(
            position=row.position,
            source=name_source(parts[i].source) if drafts.lengths[i] else "none",
            rule=row.rule.value,
            draft_ids=drafts.ids[i],
            target_probs=target_probs[i][: drafts.lengths[i]],
            draft_probs=draft_probs[i][: drafts.lengths[i]],
            num_accepted=verdicts[i].num_accepted,
            next_token=verdicts[i].next_token,
        )
        for i, row in enumerate(sampler.rows)
    ]


def outcome(
    part: Scheduled,
    num_drafted: int,
    num_accepted: int,
    next_right: bool | None = None,
    may_have_ended: bool = True,
) -> Outcome:
    """For who chooses what is drafted; only a step's last round can have ended a sequence."""
    ended = may_have_ended and part.sequence.finish_reason is not None
    return Outcome(part.sequence, num_drafted, num_accepted, ended, part.source, next_right)


def failure(sequence: Sequence) -> Failed:
    """The model gave no distribution for this sequence."""
    return Failed(
        request_id=sequence.request_id,
        code="invalid_logits",
        message=f"the model gave no distribution (NaN, infinity or nothing allowed) after "
        f"{len(sequence)} tokens",
    )
