"""A round of drafts as one call of C (``draft.c``): passes of the draft model, and a draw after each.

Draws what ``Sampler.draw_drafts`` draws with ``NativeDraws``, bit for bit. Rows with penalties, bias or a
trace take the loop.
"""

from array import array
from collections.abc import Sequence
from ctypes import addressof, byref

import torch

from engine.batch import Span
from engine.draft_length.confidence import BINS, Patience, PatientDraft
from engine.native.decoder import NativeDecoder, PackedTokens
from engine.native.draws import NativeDraws
from engine.native.library import DraftRows, Processors
from engine.sampling.processors import SamplingTensors
from engine.sampling.random import round_seeds
from engine.sampling.sampler import Drafts, Rule, Sampler

# As in draft.c.
WAYS = {Rule.EXACT_MATCH: 0, Rule.COUPLED: 1, Rule.REJECTION: 2, Rule.BLOCK: 2}
_BINS = array("d", BINS)


def draft_round(
    decoder: NativeDecoder,
    spans: list[Span],
    limits: list[int],
    patient: Sequence[PatientDraft | None],
    sampler: Sampler,
) -> Drafts | None:
    """Stores ``spans`` and drafts for the rows of ``sampler``, whose spans are those that want a logit, in
    order: up to ``limits`` tokens each, ``patient`` ones as far as their patience goes. Counts what it has
    stored.

    None if it cannot; nothing has happened then.
    """
    if not can_draw(decoder, sampler) or not decoder.holds(spans):
        return None
    packed = PackedTokens(spans)
    span_of_row = [i for i, span in enumerate(spans) if span.num_logits]
    num_rows, longest, vocab_size = len(limits), max(limits), decoder.vocab_size
    assert len(span_of_row) == num_rows == packed.num_logits
    ids = torch.zeros(num_rows, longest, dtype=torch.int64)
    numbers = array("q", [*span_of_row, *limits, *[0] * (2 * num_rows)])  # the last ones are C's to fill
    start, column = numbers.buffer_info()[0], numbers.itemsize * num_rows
    drawing = Drawing(
        sampler, longest, vocab_size, [None if row is None else row.patience for row in patient]
    )
    rows = drawing.rows
    rows.span, rows.limit = start, start + column
    rows.num_drawn, rows.num_kept = start + 2 * column, start + 3 * column
    rows.ids = ids.data_ptr()
    probs = confidence = None
    if sampler.uses_draft_probs:
        probs = torch.zeros(num_rows, longest, vocab_size)
        rows.probs = probs.data_ptr()
    if drawing.needs_confidence:
        confidence = torch.empty(num_rows, longest)
        rows.confidence = confidence.data_ptr()
    if not decoder.library.draft(byref(decoder.decoder), byref(packed.new), byref(rows)):
        return None
    num_drawn, lengths = list(numbers[2 * num_rows : 3 * num_rows]), list(numbers[3 * num_rows :])
    passes = iter(num_drawn)
    for span in spans:
        span.table.num_computed_tokens += len(span.token_ids) + (next(passes) - 1 if span.num_logits else 0)
    if confidence is not None:
        for row, row_draft in enumerate(patient):
            if row_draft is not None:
                row_draft.confidences += confidence[row, : num_drawn[row]].tolist()
    width = max(lengths)
    if width < longest:
        ids, probs = ids[:, :width], None if probs is None else probs[:, :width]
    return Drafts(ids, probs, lengths)


def can_draw(decoder: NativeDecoder, sampler: Sampler) -> bool:
    """Whether C can draw what the rows draw from this model's logits."""
    if sampler.traced or sampler.needs_adjustment:
        return False
    if sampler.all_greedy:
        return decoder.vocab_size <= sampler.vocab_size
    return decoder.vocab_size == sampler.vocab_size and isinstance(sampler.make_draws(), NativeDraws)


def address(numbers: "array[int] | array[float]") -> int:
    return numbers.buffer_info()[0]


class Drawing:
    """How the rows of ``sampler`` draw up to ``longest`` drafts each, and when they end early, as C reads it.

    To be kept as long as C uses ``rows``, where spans, limits and what comes of it are not filled in.
    """

    def __init__(
        self, sampler: Sampler, longest: int, vocab_size: int, patience: Sequence[Patience | None]
    ) -> None:
        self.rows = DraftRows(len(sampler.rows), longest, vocab_size, len(BINS), torch.get_num_threads())
        self.needs_confidence = any(patience)
        self._kept: list[object] = []
        if not sampler.all_greedy:
            self._sample(sampler)
        if self.needs_confidence:
            self._end_early(patience)

    def _sample(self, sampler: Sampler) -> None:
        rows = self.rows
        # Arrays: right after a pass of a model, torch and numpy take ten times as long to make a tensor.
        ways = array("q", [WAYS[row.rule] for row in sampler.rows])
        seeds = array("q", [row.seed for row in sampler.rows])
        positions = array("q", [row.position for row in sampler.rows])
        if (members := sampler.groups.get(Rule.BLOCK)) is not None:
            of_rounds = round_seeds(sampler.seeds[members], sampler.positions[members])
            for i, seed in zip(members, of_rounds.tolist(), strict=True):
                seeds[i] = seed
        sampling = SamplingTensors.build([row.params for row in sampler.rows], sampler.device)
        processors = Processors(*(column.data_ptr() for column in sampling[:4]))
        few = None
        if sampling.largest_top_k or sampling.any_top_p or sampling.any_min_p:
            few = torch.empty(rows.num_threads, rows.vocab)
            rows.few = few.data_ptr()
        rows.way, rows.seeds, rows.positions = map(address, (ways, seeds, positions))
        rows.processors = addressof(processors)
        self._kept += [ways, seeds, positions, sampling, processors, few]

    def _end_early(self, patience: Sequence[Patience | None]) -> None:
        """Rows without patience never do."""
        rows, bins, always = self.rows, range(len(BINS)), [1.0] * len(BINS)
        by_table = {rule.table: list(map(rule.table.hope, bins)) for rule in patience if rule is not None}
        to_score, to_draft, rates = array("d"), array("d"), array("d")
        for rule in patience:
            to_score.append(rule.least_to_score if rule is not None else 0.0)
            to_draft.append(rule.least_to_draft if rule is not None else 0.0)
            rates.extend(by_table[rule.table] if rule is not None else always)
        rows.least_to_score, rows.least_to_draft = address(to_score), address(to_draft)
        rows.rates, rows.bins = address(rates), address(_BINS)
        self._kept += [to_score, to_draft, rates]
