"""Scoring and the verdict in one launch: the target's pass over the drafts, its own tokens, what stands.

The usual way brings logits back and judges them in a few launches more, after the host has read the drafts.
Here the drafts stay on the device: the pass reads them there, all positions are drawn at once
(``captured_verify``), and the host reads a handful of integers a row, once a round. What no captured round
holds is scored and judged as usual.

Every captured round is compared with the usual pass and the usual verdict. If one deviates or cannot be
captured, none is used.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.batch import Span
from engine.core.block_pool import BlockTable
from engine.messages import SamplingParams
from engine.models.decoder_only import DecoderModel
from engine.models.draft_chain import CHECK_ROWS
from engine.models.graph_capture import Capture, capture_planned
from engine.models.layer_parts import TorchParts
from engine.models.lean_decoder import same_logits
from engine.models.round_inputs import RoundBucket, RoundInputs, smallest_round
from engine.models.step_graphs import StepGraphs, Text, check_texts
from engine.sampling.adjust import History
from engine.sampling.captured_draw import DrawKind, DrawRow
from engine.sampling.captured_verify import captured_verify
from engine.sampling.random import counters
from engine.sampling.sampler import Drafts, Row, Rule, Sampler
from engine.sampling.verify import RowVerdict

# Numbers before a row's drafts in what a round leaves: a RowVerdict.
VERDICT_NUMBERS = 3
# Rounds of the comparison at start: none of the drafts stands in the first; one more in each of the others.
CHECK_ROUNDS = 3


class CapturedRound:
    """The captured rounds of the target whose passes are ``steps``.

    Used as ``DecoderModel.captured_round``: ``find`` first, then ``launch``, then ``read``.
    """

    def __init__(self, steps: StepGraphs, planned: Sequence[RoundBucket]) -> None:
        self.steps = steps
        self.capture = steps.capture
        device, scratch_block = steps.logits.device, steps.inputs.scratch_block
        gathers = not steps.lean.reads_in_place
        self.inputs = RoundInputs(planned, steps.block_size, scratch_block, device, self.capture, gathers)
        # In one place for all, as their pool is overwritten by every replay.
        most = max(bucket.shape.rows * _width(bucket) for bucket in planned)
        self.verdicts = torch.zeros(most, dtype=torch.int64, device=device)
        self.counters = counters(steps.logits.shape[1], device)
        self.replays: dict[RoundBucket, Callable[[], None]] = {}
        self.num_replays = 0
        self.num_misses = 0
        self._chosen: dict[tuple[DrawKind, int, int, int], RoundBucket | None] = {}

    def find(
        self, tables: Sequence[BlockTable], num_draft: Sequence[int], rows: Sequence[DrawRow]
    ) -> RoundBucket | None:
        """The captured round that holds one pending token and up to ``num_draft`` drafts a row."""
        if not self.steps.enabled:
            return None
        ends = [table.num_computed_tokens + count + 1 for table, count in zip(tables, num_draft, strict=True)]
        blocks = -(-max(ends) // self.steps.block_size)
        wanted = max(row.kind for row in rows), len(rows), max(num_draft) + 1, blocks
        if wanted not in self._chosen:
            self._chosen[wanted] = smallest_round(self.replays, *wanted)
        self.num_misses += self._chosen[wanted] is None
        return self._chosen[wanted]

    def launch(
        self,
        bucket: RoundBucket,
        tables: Sequence[BlockTable],
        pending: Sequence[int],
        drafts: torch.Tensor,
        num_draft: Sequence[int],
        rows: Sequence[DrawRow],
    ) -> None:
        """Score and judge row i's token ``pending[i]`` and, behind it, its first ``num_draft[i]`` of
        ``drafts``, int64 [rows, most drafts] on the device. They are counted as computed; room must be
        reserved. Does not wait."""
        self.num_replays += 1
        self.replay(bucket, tables, pending, drafts, num_draft, rows)
        for table, count in zip(tables, num_draft, strict=True):
            table.num_computed_tokens += count + 1

    def replay(
        self,
        bucket: RoundBucket,
        tables: Sequence[BlockTable],
        pending: Sequence[int],
        drafts: torch.Tensor,
        num_draft: Sequence[int],
        rows: Sequence[DrawRow],
    ) -> None:
        self.inputs.send(bucket.shape, tables, pending, num_draft, rows)
        if drafts.numel():
            self.inputs.drafted(bucket.shape)[: len(rows), : drafts.shape[1]].copy_(drafts)
        self.replays[bucket]()

    def read(self, bucket: RoundBucket, num_draft: Sequence[int]) -> tuple[list[list[int]], list[RowVerdict]]:
        """Drafts and verdicts of the rows of the last launch, which was of ``bucket``. Waits for it."""
        numbers = self._verdicts(bucket)[: len(num_draft)].tolist()
        drafted, verdicts = [], []
        for count, (num_accepted, next_token, failed, *ids) in zip(num_draft, numbers, strict=True):
            drafted.append(ids[:count])
            verdicts.append(RowVerdict(num_accepted, next_token, bool(failed)))
        return drafted, verdicts

    @torch.inference_mode()
    def add(self, bucket: RoundBucket) -> None:
        """Capture one more. Raises whatever the device's library does."""
        self.inputs.send(bucket.shape, [], [], [], [])  # as in ``StepGraphs.add``
        self.replays[bucket] = self.capture.record(lambda: self._round(bucket))
        self._chosen.clear()

    def _round(self, bucket: RoundBucket) -> None:
        """What is captured: no Python decision here or below depends on the inputs' values."""
        lean, shape = self.steps.lean, bucket.shape
        inputs = self.inputs.batch(shape)
        parts = TorchParts(inputs.batch, self.steps.cache, lean.rotary, lean.attention)
        logits = self.steps.logits[: shape.num_tokens]
        logits.copy_(lean.logits(lean.hidden(inputs.batch.token_ids[0], parts), parts))
        verdict = captured_verify(
            bucket.kind,
            logits.view(shape.rows, shape.queries, -1),
            inputs.draw,
            inputs.first_positions,
            inputs.drafted,
            inputs.num_draft,
            self.counters,
        )
        numbers = torch.cat([torch.stack(verdict, dim=1), inputs.drafted], dim=1)
        self._verdicts(bucket).copy_(numbers)

    def _verdicts(self, bucket: RoundBucket) -> torch.Tensor:
        """[rows, VERDICT_NUMBERS + most drafts]"""
        rows, width = bucket.shape.rows, _width(bucket)
        return self.verdicts[: rows * width].view(rows, width)


def _width(bucket: RoundBucket) -> int:
    return VERDICT_NUMBERS + bucket.shape.queries - 1


def capture_rounds(
    model: DecoderModel,
    planned: Sequence[RoundBucket],
    num_blocks: int,
    capture: Capture,
    deadline: float,
    min_free: int,
) -> None:
    """As ``capture_steps``, after it and for a target; without its passes there are no rounds either.

    Leaves the model as it was if anything goes wrong.
    """
    if not isinstance(model.graphs, StepGraphs):
        return
    steps = model.graphs
    with steps.left_out():  # rounds are compared with the usual passes
        rounds = capture_planned(
            "rounds",
            "ones",
            planned,
            lambda: CapturedRound(steps, planned),
            lambda bucket, number: check_texts(model, bucket.shape, num_blocks, number),
            partial(_is_right, model),
            capture,
            deadline,
            min_free,
        )
    if rounds is not None:
        model.captured_round = rounds


@torch.inference_mode()
def _is_right(model: DecoderModel, rounds: CapturedRound, bucket: RoundBucket, texts: list[Text]) -> bool:
    """Whether rounds over ``texts`` are as they should be. A text's first new token is pending and the others
    are drafts, which in later rounds begin with what the target has said in the one before."""
    kind, tables = bucket.kind, [text.table for text in texts]
    rows = [CHECK_ROWS[DrawKind(kind - i % (kind + 1))] for i in range(len(texts))]
    sampler = Sampler([_row(*pair) for pair in zip(texts, rows, strict=True)], model.vocab_size, model.device)
    pending = [text.new[0] for text in texts]
    drafted = [text.new[1:] for text in texts]
    num_draft = [len(ids) for ids in drafted]
    model.forward([Span(text.table, text.context, 1) for text in texts])
    for _ in range(min(CHECK_ROUNDS, bucket.shape.queries)):
        padded = [ids + [0] * (max(num_draft) - len(ids)) for ids in drafted]
        drafts = Drafts(torch.tensor(padded, device=model.device).long(), None, num_draft)
        rounds.replay(bucket, tables, pending, drafts.token_ids, num_draft, rows)
        found = rounds.read(bucket, num_draft)
        logits = _drawn_logits(rounds, bucket, num_draft)
        # The verdict is judged by the round's own logits: rounding may tell two close ids apart.
        if found != (drafted, sampler.verify(logits, drafts)):
            return False
        spans = [
            Span(table, [token_id, *ids], 1 + len(ids))
            for table, token_id, ids in zip(tables, pending, drafted, strict=True)
        ]
        expected = model.forward(spans)
        for table, count in zip(tables, num_draft, strict=True):
            table.num_computed_tokens -= count + 1
        if not same_logits(logits, expected, model.dtype):
            return False
        said = [
            [*ids[: verdict.num_accepted], verdict.next_token]
            for ids, verdict in zip(drafted, found[1], strict=True)
        ]
        drafted = [(new + ids[len(new) :])[: len(ids)] for new, ids in zip(said, drafted, strict=True)]
    return True


def _drawn_logits(rounds: CapturedRound, bucket: RoundBucket, num_draft: Sequence[int]) -> torch.Tensor:
    """The last replay's logits without padding: [sum of (num_draft + 1), vocab]."""
    shape = bucket.shape
    by_row = rounds.steps.logits[: shape.num_tokens].view(shape.rows, shape.queries, -1)
    return torch.cat([by_row[row, : count + 1] for row, count in enumerate(num_draft)])


def _row(text: Text, row: DrawRow) -> Row:
    """The row of a usual sampler that draws as ``row``, after a text and its pending token."""
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0 if row.is_greedy else row.temperature,
        top_k=row.top_k,
        top_p=row.top_p,
        min_p=row.min_p,
    )
    token_ids = [*text.context, text.new[0]]
    history = History(params, token_ids, len(token_ids), frozenset())
    return Row(Rule.EXACT_MATCH if row.is_greedy else Rule.COUPLED, row.seed, history)
