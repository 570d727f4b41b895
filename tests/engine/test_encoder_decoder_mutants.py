"""The tests of encoder-decoder pairs can fail: planted bugs, each caught by a gate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import seq2seq_gates as gates
from tests.engine.seq2seq_gates import Pair
from tests.engine.test_encoder_decoder import save_tiny_pairs
from tests.engine.test_mutants import (
    draft_cache_skips_a_token,
    everything_accepted,
    recovered_from_the_target,
    rejected_tokens_stay_in_the_cache,
)
from tests.seq2seq_models import save_perturbed_seq2seq, save_random_seq2seq
from truedraft.engine import build
from truedraft.engine.memory import batch
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.models.hf import cross_attention
from truedraft.engine.models.hf.encoder_decoder import EncoderDecoderModel
from truedraft.engine.rows.table import Row
from truedraft.engine.sampling import adjust
from truedraft.engine.sampling.rules import GenerationRules

Patch = pytest.MonkeyPatch


def anothers_prompt(patch: Patch) -> None:
    """Each row of a batch looks at what its neighbour's encoder has read."""
    honest = batch._cross_groups

    def shifted(lengths: Any, offsets: Any, slots: Any, device: Any) -> Any:
        return honest(lengths, offsets, [*slots[1:], slots[0]], device)

    patch.setattr(batch, "_cross_groups", shifted)


def prompt_read_partly(patch: Patch) -> None:
    """The last token of the prompt is masked, as if it were padding."""
    honest = batch._cross_groups

    def cut(lengths: Any, offsets: Any, slots: Any, device: Any) -> Any:
        return honest(lengths, offsets, [s[: max(1, len(s) - 1)] for s in slots], device)

    patch.setattr(batch, "_cross_groups", cut)


def distances_in_the_packed_row(patch: Patch) -> None:
    """T5's bias as the model computes it, for tokens that stand side by side from the beginning."""
    honest = cross_attention._own_mask

    def packed(module: Any, group: batch.AttentionGroup, dtype: torch.dtype) -> torch.Tensor | None:
        group.mask(None)  # made of the right positions, and kept
        stand_at = group.query_positions
        group.query_positions = torch.arange(group.queries).expand_as(stand_at)
        mask = honest(module, group, dtype)
        group.query_positions = stand_at
        return mask

    patch.setattr(cross_attention, "_own_mask", packed)


def positions_count_the_prompt(patch: Patch) -> None:
    """The decoder's positions go on where the prompt's end."""
    honest = batch.ForwardBatch.build

    def build(spans: list[Span], *arguments: Any) -> batch.ForwardBatch:
        good = honest(spans, *arguments)
        shift = [span.table.num_encoder_tokens for span in spans for _ in span.token_ids]
        good.positions = good.positions + torch.tensor([shift])
        return good

    patch.setattr(batch.ForwardBatch, "build", build)


def prompt_not_read_again(patch: Patch) -> None:
    """After a preemption the encoder's part is taken for computed, wherever its new blocks are."""
    honest = EncoderDecoderModel._encoded
    seen: dict[int, Any] = {}

    def encoded(self: EncoderDecoderModel, span: Span, cache: KVCache) -> Span:
        table = span.table
        if table.num_computed_tokens == 0 and id(table) in seen:
            table.num_computed_tokens = table.num_encoder_tokens
            return Span(table, span.token_ids[table.num_encoder_tokens :], span.num_logits)
        seen[id(table)] = table
        return honest(self, span, cache)

    patch.setattr(EncoderDecoderModel, "_encoded", encoded)


def penalties_see_the_prompt(patch: Patch) -> None:
    patch.setattr(Row, "prompt", property(lambda self: self.token_ids[: self.num_prompt_tokens]))


def rules_forget_the_drafted_tokens(patch: Patch) -> None:
    """Repeated n-grams are looked for in what was committed only."""
    honest = adjust._apply_rules

    def apply(logits: torch.Tensor, row: Row, rules: Any, drafted: list[int], offset: int) -> None:
        honest(logits, row, rules, [], offset)

    patch.setattr(adjust, "_apply_rules", apply)


def rules_forgotten(patch: Patch) -> None:
    patch.setattr(GenerationRules, "apply", lambda self, logits, text, is_last: None)


def greedy(pair: Pair) -> None:
    gates.greedy_is_generate(pair, range(4, 5), in_flight=4)


MUTANTS: list[tuple[Callable[[Patch], None], str, Callable[[Pair], None]]] = [
    (rejected_tokens_stay_in_the_cache, "t5", greedy),
    (rejected_tokens_stay_in_the_cache, "bart", greedy),
    (anothers_prompt, "t5", greedy),
    (anothers_prompt, "marian", greedy),
    (prompt_read_partly, "t5", greedy),
    (distances_in_the_packed_row, "t5", greedy),
    (positions_count_the_prompt, "bart", greedy),
    (positions_count_the_prompt, "marian", greedy),
    (prompt_not_read_again, "t5", gates.preempted_is_undisturbed),
    (penalties_see_the_prompt, "t5", gates.repetition_penalty_is_generates),
    (rules_forget_the_drafted_tokens, "bart", greedy),
    (rules_forgotten, "bart", greedy),
    (rules_forgotten, "marian", greedy),
    (draft_cache_skips_a_token, "t5", gates.self_draft_is_always_accepted),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    root: Path = tmp_path_factory.mktemp("seq2seq-mutants")
    made = {}
    for family in ("t5", "bart", "marian"):
        target = save_random_seq2seq(root / family, family, seed=1)
        made[family] = Pair(target, save_perturbed_seq2seq(root / f"{family}-draft", target, 2, noise=0.01))
    return made


@pytest.fixture(scope="module")
def tiny_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return save_tiny_pairs(tmp_path_factory.mktemp("tiny-mutants"))


@pytest.mark.parametrize(("plant", "family", "gate"), MUTANTS)
def test_planted_bug_is_caught(
    pairs: dict[str, Pair], monkeypatch: Patch, plant: Any, family: str, gate: Any
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        gate(pairs[family])


@pytest.mark.parametrize(
    ("plant", "family"),
    [
        (everything_accepted, "t5"),
        (recovered_from_the_target, "bart"),
        (prompt_read_partly, "t5"),
        (rules_forgotten, "marian"),
    ],
)
def test_planted_bug_shows_in_samples(
    tiny_pairs: dict[str, Pair], monkeypatch: Patch, plant: Any, family: str
) -> None:
    monkeypatch.setattr(build, "native_ops", lambda rules: None)  # some are planted in torch's way of drawing
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        gates.sampled_is_the_targets(tiny_pairs[family], "rejection", in_flight=32, num_samples=1200)
