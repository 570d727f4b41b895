"""The exactness tests can fail: bugs seen in public engines, planted one by one, each caught by a gate.

``MUTANTS`` maps a bug to how it is planted and the gate that must raise. The unmutated engine passes the
same gates (``test_the_engine_itself_passes``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.engine import gates
from tests.engine.conftest import Models
from truedraft.engine import build
from truedraft.engine.core import commit as commits
from truedraft.engine.core import engine as core
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import StepPlan
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory import batch
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.proposers import draft_model
from truedraft.engine.proposers.draft_model import DraftModelProposer
from truedraft.engine.rounds import round as rounds
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling import adjust, random, torch_ops, verify
from truedraft.engine.sampling.ops import inverse_cdf
from truedraft.engine.sampling.random import Stream
from truedraft.engine.sampling.sampler import Sampler
from truedraft.engine.sampling.step_rows import StepRows
from truedraft.engine.sampling.torch_ops import TorchOps
from truedraft.engine.sampling.verify import Verdict

Patch = pytest.MonkeyPatch

WARM = SamplingParams(max_tokens=3, temperature=0.7, top_k=3)
FLAT = SamplingParams(max_tokens=3, temperature=1.5)
NARROW = SamplingParams(
    max_tokens=3, temperature=1.5, repetition_penalty=0.8, logit_bias={3: -100.0}, min_tokens=3
)
PLAIN = SamplingParams(max_tokens=3)
PENALIZED = SamplingParams(max_tokens=3, presence_penalty=0.5, frequency_penalty=0.8, repetition_penalty=1.3)


def raw_draft_probs(patch: Patch) -> None:
    """The draft reports the unprocessed distribution, but drew from the processed one."""
    honest = Sampler.draw_drafts

    def draw(self: Sampler, logits: torch.Tensor, drafted: torch.Tensor, *options: Any, **named: Any) -> Any:
        draw = honest(self, logits, drafted, *options, **named)
        return draw if draw.probs is None else draw._replace(probs=logits.softmax(-1))

    patch.setattr(Sampler, "draw_drafts", draw)


def argmax_draft_called_sampled(patch: Patch) -> None:
    """A greedy draft reports the distribution that it did not draw from."""
    patch.setattr(torch_ops, "inverse_cdf", lambda weights, uniforms: weights.argmax(-1))


def recovered_with(patch: Patch, spent: Stream) -> None:
    """Tokens that follow a rejection are drawn with the numbers of another stream, those of their round."""
    honest = torch_ops.uniform

    def uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        if stream is Stream.RECOVER:
            seeds, stream = random.round_seeds(seeds, positions[:, :1]), spent
        return honest(seeds, positions, stream)

    patch.setattr(torch_ops, "uniform", uniform)


def draft_noise_draws_the_recovered_token(patch: Patch) -> None:
    recovered_with(patch, Stream.DRAFT)


def accept_noise_draws_the_recovered_token(patch: Patch) -> None:
    recovered_with(patch, Stream.ACCEPT)


def draft_drawn_in_low_precision(patch: Patch) -> None:
    """Drawn from rounded probabilities, verified against exact ones."""

    def coarse(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        return inverse_cdf((16 * weights).round(), uniforms)

    patch.setattr(torch_ops, "inverse_cdf", coarse)


def residual_through_softmax(patch: Patch) -> None:
    def softmaxed(target_row: torch.Tensor, draft_row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (weight[..., None] * target_row - draft_row).clamp(min=0).softmax(-1)

    patch.setattr(verify, "residual", softmaxed)


def recovered_from_the_target(patch: Patch) -> None:
    """The residual forgets to take away what the draft had."""
    patch.setattr(verify, "residual", lambda target_row, draft_row, weight: target_row)


def target_changed_in_place(patch: Patch) -> None:
    honest = verify.verify_rejection

    def careless(target_probs: torch.Tensor, draft_ids: torch.Tensor, *rest: torch.Tensor) -> Verdict:
        verdict = honest(target_probs, draft_ids, *rest)
        target_probs[:, :-1].scatter_(-1, draft_ids[..., None], 0.0)
        return verdict

    patch.setattr(verify, "verify_rejection", careless)


def bonus_from_unprocessed_logits(patch: Patch) -> None:
    honest = TorchOps._probs

    def probs(
        self: TorchOps, step: StepRows, logits: torch.Tensor, *arguments: Any, **options: Any
    ) -> torch.Tensor:
        processed = honest(self, step, logits, *arguments, **options)
        if processed.shape[1] > 1:
            processed[:, -1] = logits[:, -1].softmax(-1)
        return processed

    patch.setattr(TorchOps, "_probs", probs)


def everything_accepted(patch: Patch) -> None:
    honest = torch_ops.uniform

    def uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        numbers = honest(seeds, positions, stream)
        return numbers * 0 if stream is Stream.ACCEPT else numbers

    patch.setattr(torch_ops, "uniform", uniform)


def rows_off_by_one(patch: Patch) -> None:
    """Each draft is compared with the distribution after it."""
    honest = verify.verify_rejection

    def shifted(target_probs: torch.Tensor, *rest: torch.Tensor, **numbers: torch.Tensor) -> Verdict:
        return honest(torch.cat([target_probs[:, 1:], target_probs[:, -1:]], dim=1), *rest, **numbers)

    patch.setattr(torch_ops, "verify_rejection", shifted)


def unsure_drafts_dropped(patch: Patch) -> None:
    """A drawn token is withdrawn because its own probability is low."""
    honest = Sampler.verify

    def drop(self: Sampler, logits: torch.Tensor, drafts: Drafts) -> Any:
        assert drafts.probs is not None
        own = drafts.probs.gather(-1, drafts.token_ids[..., None]).squeeze(-1)
        kept = (own > 0.25).long().cumprod(-1).sum(-1).tolist()
        lengths = [min(a, b) for a, b in zip(kept, drafts.lengths, strict=True)]
        rows = [start + j for start, n in zip(_starts(drafts), lengths, strict=True) for j in range(n + 1)]
        width = max(lengths)
        return honest(
            self, logits[rows], Drafts(drafts.token_ids[:, :width], drafts.probs[:, :width], lengths)
        )

    patch.setattr(Sampler, "verify", drop)


def _starts(drafts: Drafts) -> list[int]:
    return np.cumsum([0, *(length + 1 for length in drafts.lengths[:-1])]).tolist()


def large_batches_mix_their_drafts(patch: Patch) -> None:
    honest = TorchOps._draft_probs

    def mixed(self: TorchOps, step: StepRows, drafts: Drafts, members: Any) -> torch.Tensor:
        probs = honest(self, step, drafts, members)
        return probs.roll(1, 0) if len(probs) > 2 else probs

    patch.setattr(TorchOps, "_draft_probs", mixed)


def block_numbers_by_position_only(patch: Patch) -> None:
    """Numbers that a verdict has looked at come again in the next round."""
    patch.setattr(TorchOps, "_seeds", lambda self, step, members: step.seeds[members])


def noise_forgets_the_position(patch: Patch) -> None:
    honest = random.exponential_noise
    patch.setattr(
        random, "exponential_noise", lambda s, p, vocab_size: honest(s, torch.zeros_like(p), vocab_size)
    )


def coupled_emits_the_draft(patch: Patch) -> None:
    """Accepts by equality, as coupling does, but with noise that the draft does not share."""
    honest = verify.accept_while_equal

    def emit(target_ids: list[int], draft_ids: list[int]) -> tuple[int, int]:
        return len(draft_ids), honest(target_ids, draft_ids)[1]

    patch.setattr(verify, "accept_while_equal", emit)


def penalties_see_only_the_last_token(patch: Patch) -> None:
    def text_counts(rows: Any, vocab: int, device: torch.device) -> torch.Tensor:
        last = F.one_hot(torch.tensor([row.token_ids[-1] for row in rows]), vocab).float()
        return torch.stack([torch.zeros_like(last), last])

    def counts(base: torch.Tensor, drafted: torch.Tensor, offset: int, positions: int) -> torch.Tensor:
        return base[:, None].repeat(1, positions, 1)

    patch.setattr(adjust, "_text_counts", text_counts)
    patch.setattr(adjust, "_counts", counts)


def all_penalties_count_the_prompt(patch: Patch) -> None:
    honest = adjust._text_counts

    def text_counts(rows: Any, vocab: int, device: torch.device) -> torch.Tensor:
        in_prompt, in_output = honest(rows, vocab, device)
        return torch.stack([in_prompt, in_prompt + in_output])

    patch.setattr(adjust, "_text_counts", text_counts)


def repetition_forgets_the_prompt(patch: Patch) -> None:
    honest = adjust._text_counts

    def text_counts(rows: Any, vocab: int, device: torch.device) -> torch.Tensor:
        _, in_output = honest(rows, vocab, device)
        return torch.stack([torch.zeros_like(in_output), in_output])

    patch.setattr(adjust, "_text_counts", text_counts)


def penalties_count_the_pending_token_twice(patch: Patch) -> None:
    honest = adjust._text_counts

    def text_counts(rows: Any, vocab: int, device: torch.device) -> torch.Tensor:
        last = torch.tensor([row.token_ids[-1] for row in rows])
        return honest(rows, vocab, device) + F.one_hot(last, vocab)

    patch.setattr(adjust, "_text_counts", text_counts)


def penalties_ignore_the_drafted_prefix(patch: Patch) -> None:
    """One count serves all positions of a round ("relaxed")."""
    honest = adjust._counts

    def counts(base: torch.Tensor, drafted: torch.Tensor, offset: int, positions: int) -> torch.Tensor:
        return honest(base, drafted[:, :0], 0, 1).repeat(1, positions, 1)

    patch.setattr(adjust, "_counts", counts)


def minimum_counts_rounds_not_tokens(patch: Patch) -> None:
    """The minimum length is looked up once per round, for its first position."""
    honest = adjust.adjust_in_place

    def adjusted(logits: torch.Tensor, rows: Any, *others: Any) -> None:
        honest(logits, rows, *others)
        for place, row in enumerate(rows):
            if row.is_below_minimum:
                logits[place][:, row.stop_token_ids] = -torch.inf

    patch.setattr(torch_ops, "adjust_in_place", adjusted)


def positions_advance_by_rounds(patch: Patch) -> None:
    """All tokens of a round stand at the pending token's position."""
    honest = batch.ForwardBatch.build

    def build(spans: Any, *arguments: Any) -> batch.ForwardBatch:
        good = honest(spans, *arguments)
        starts = [span.table.num_computed_tokens for span in spans for _ in span.token_ids]
        scoring = [span.table.num_computed_tokens > 0 and len(span.token_ids) < 10 for span in spans]
        if all(scoring):
            good.positions = torch.tensor([starts])
        return good

    patch.setattr(batch.ForwardBatch, "build", build)


def draft_cache_skips_a_token(patch: Patch) -> None:
    """After full acceptance only the newest token is fed; the last drafted one never gets in."""
    honest = draft_model.DraftModelProposer._catch_up

    def catch_up(self: Any, part: Any) -> Any:
        span = honest(self, part)
        if span is not None and part.draft.num_first_drafts and len(span.token_ids) == 2:
            return batch.Span(span.table, span.token_ids[-1:], span.num_logits)
        return span

    patch.setattr(draft_model.DraftModelProposer, "_catch_up", catch_up)


def rejected_tokens_stay_in_the_cache(patch: Patch) -> None:
    """Truncation forgets blocks, but the next tokens are stored after the rejected ones."""
    honest = commits.commit

    def commit(plan: StepPlan, *rest: Any) -> Any:
        drawing = [part.sequence for part in plan.rows]
        computed = {id(s): s.target_blocks.num_computed_tokens for s in drawing}
        outputs = honest(plan, *rest)
        for sequence in drawing:
            table: BlockTable = sequence.target_blocks
            if 0 < table.num_computed_tokens < computed[id(sequence)]:
                table.block_ids[:] = table.block_ids[::-1]
        return outputs

    patch.setattr(core, "commit", commit)


def recovered_token_lost(patch: Patch) -> None:
    """A rejection is handled a round late: the word drawn in its place never reaches the client."""
    honest = commits.commit

    def commit(*arguments: Any) -> Any:
        return [
            msgspec.structs.replace(output, token_ids=output.token_ids[:-1])
            if output.num_accepted_tokens < output.num_draft_tokens
            else output
            for output in honest(*arguments)
        ]

    patch.setattr(core, "commit", commit)


def stop_seen_only_at_the_end_of_a_round(patch: Patch) -> None:
    honest = Sequence.append

    def append(self: Sequence, token_ids: list[int]) -> list[int]:
        inside, last = token_ids[:-1], token_ids[-1]
        room = self.max_num_tokens - len(self.token_ids)
        self.token_ids += inside[: room - 1]
        return inside[: room - 1] + honest(self, [last])

    patch.setattr(Sequence, "append", append)


def disliked_drafts_dropped(patch: Patch) -> None:
    """A draft that the model has drawn is not verified if the prediction says something else."""
    honest = DraftModelProposer.propose

    def propose(self: DraftModelProposer, plan: StepPlan, sampler: Sampler) -> Drafts:
        drafts = honest(self, plan, sampler)
        lengths = [
            length if not length or drafts.token_ids[i, 0] in part.sequence.prediction.expected(1) else 0
            for i, (part, length) in enumerate(zip(plan.rows, drafts.lengths, strict=True))
        ]
        return Drafts(drafts.token_ids, drafts.probs, lengths)

    patch.setattr(DraftModelProposer, "propose", propose)


def look_ups_called_drawn(patch: Patch) -> None:
    """A looked-up token is judged as if it had been drawn from a flat distribution."""
    honest = rounds.merge_drafts

    def flat(parts: list[Drafts], num_rows: int, vocab_size: int, *given: Any) -> Drafts:
        for part in parts:
            if part.probs is None:
                part.probs = torch.full((*part.token_ids.shape, vocab_size), 1 / vocab_size)
        return honest(parts, num_rows, vocab_size, *given)

    patch.setattr(rounds, "merge_drafts", flat)


def draft_cache_skips_what_others_drafted(patch: Patch) -> None:
    """When the draft model takes over again it computes the newest tokens only."""
    honest = DraftModelProposer._catch_up

    def catch_up(self: Any, part: Any) -> Any:
        span = honest(self, part)
        if span is not None and part.num_catch_up_tokens > 2:
            return batch.Span(span.table, span.token_ids[-2:], span.num_logits)
        return span

    patch.setattr(DraftModelProposer, "_catch_up", catch_up)


@dataclass(frozen=True)
class Mutant:
    plant: Callable[[Patch], None]
    gate: Callable[[Models], None]


def histogram(params: SamplingParams, rule: Rule, **options: int) -> Callable[[Models], None]:
    return lambda models: gates.joint_distribution(params, rule, **options)


def greedy(models: Models) -> None:
    gates.greedy_identity(models, SamplingParams(max_tokens=40, temperature=0))


def greedy_with_penalties(models: Models) -> None:
    gates.greedy_identity(models, gates.PENALTIES)


def purity(models: Models) -> None:
    gates.leaves_its_inputs_alone(verify.verify_rejection)


MINIMUM = SamplingParams(max_tokens=3, min_tokens=1, logit_bias={4: 1.0})

MUTANTS = [
    Mutant(raw_draft_probs, histogram(WARM, Rule.REJECTION)),
    Mutant(argmax_draft_called_sampled, histogram(PLAIN, Rule.REJECTION)),
    Mutant(draft_noise_draws_the_recovered_token, histogram(PLAIN, Rule.REJECTION)),
    Mutant(accept_noise_draws_the_recovered_token, histogram(PLAIN, Rule.REJECTION)),
    Mutant(draft_drawn_in_low_precision, histogram(PLAIN, Rule.REJECTION, num_samples=20_000)),
    Mutant(residual_through_softmax, histogram(PLAIN, Rule.REJECTION)),
    Mutant(residual_through_softmax, histogram(PLAIN, Rule.BLOCK)),
    Mutant(recovered_from_the_target, histogram(PLAIN, Rule.REJECTION)),
    Mutant(target_changed_in_place, purity),
    Mutant(bonus_from_unprocessed_logits, histogram(WARM, Rule.REJECTION)),
    Mutant(bonus_from_unprocessed_logits, histogram(WARM, Rule.COUPLED)),
    Mutant(everything_accepted, histogram(PLAIN, Rule.REJECTION)),
    Mutant(rows_off_by_one, histogram(PLAIN, Rule.REJECTION)),
    Mutant(unsure_drafts_dropped, histogram(PLAIN, Rule.REJECTION)),
    Mutant(large_batches_mix_their_drafts, histogram(PLAIN, Rule.REJECTION, in_flight=8)),
    Mutant(block_numbers_by_position_only, histogram(NARROW, Rule.BLOCK, num_samples=20_000)),
    Mutant(noise_forgets_the_position, histogram(PLAIN, Rule.COUPLED)),
    Mutant(coupled_emits_the_draft, histogram(PLAIN, Rule.COUPLED)),
    Mutant(penalties_see_only_the_last_token, histogram(PENALIZED, Rule.REJECTION)),
    Mutant(penalties_count_the_pending_token_twice, histogram(PENALIZED, Rule.REJECTION)),
    Mutant(all_penalties_count_the_prompt, histogram(PENALIZED, Rule.REJECTION)),
    Mutant(repetition_forgets_the_prompt, histogram(PENALIZED, Rule.COUPLED)),
    Mutant(penalties_ignore_the_drafted_prefix, histogram(PENALIZED, Rule.COUPLED)),
    Mutant(penalties_ignore_the_drafted_prefix, greedy_with_penalties),
    Mutant(minimum_counts_rounds_not_tokens, histogram(MINIMUM, Rule.REJECTION)),
    Mutant(positions_advance_by_rounds, greedy),
    Mutant(draft_cache_skips_a_token, gates.self_draft_is_always_accepted),
    Mutant(rejected_tokens_stay_in_the_cache, greedy),
    Mutant(recovered_token_lost, greedy),
    Mutant(stop_seen_only_at_the_end_of_a_round, gates.ends_at_the_first_stop),
    Mutant(disliked_drafts_dropped, gates.mixed_sources_distribution),
    Mutant(look_ups_called_drawn, gates.mixed_sources_distribution),
    Mutant(draft_cache_skips_what_others_drafted, gates.self_draft_survives_other_sources),
    Mutant(noise_forgets_the_position, lambda models: gates.joint_distribution(FLAT, Rule.COUPLED)),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.plant.__name__)
def test_planted_bug_is_caught(models: Models, monkeypatch: Patch, mutant: Mutant) -> None:
    monkeypatch.setattr(build, "native_ops", lambda rules: None)  # most are planted in the definition
    mutant.plant(monkeypatch)
    # The self-check at load sees some of them first.
    with pytest.raises((AssertionError, ModelLoadError)):
        mutant.gate(models)


def test_a_bug_of_large_batches_hides_in_small_ones(monkeypatch: Patch) -> None:
    """Why histograms are taken at several batch sizes."""
    large_batches_mix_their_drafts(monkeypatch)
    gates.joint_distribution(PLAIN, Rule.REJECTION, num_samples=1500, in_flight=2)


@pytest.mark.parametrize(
    "gate",
    [
        greedy,
        greedy_with_penalties,
        gates.self_draft_is_always_accepted,
        gates.ends_at_the_first_stop,
        gates.seeded_identity,
        gates.mixed_sources_distribution,
        gates.self_draft_survives_other_sources,
        purity,
    ],
)
def test_the_engine_itself_passes(models: Models, gate: Callable[[Models], None]) -> None:
    gate(models)


@pytest.mark.parametrize(
    ("params", "rule", "num_samples"),
    [
        (WARM, Rule.REJECTION, 4000),
        (WARM, Rule.COUPLED, 4000),
        (FLAT, Rule.COUPLED, 4000),
        (NARROW, Rule.BLOCK, 20_000),
        (PLAIN, Rule.REJECTION, 20_000),
        (PLAIN, Rule.BLOCK, 4000),
        (PLAIN, Rule.COUPLED, 4000),
        (PENALIZED, Rule.REJECTION, 4000),
        (PENALIZED, Rule.COUPLED, 4000),
        (MINIMUM, Rule.REJECTION, 4000),
    ],
)
def test_the_sampler_itself_passes(params: SamplingParams, rule: Rule, num_samples: int) -> None:
    """Every histogram that a bug changes is right without it, with as many samples."""
    gates.joint_distribution(params, rule, num_samples)
