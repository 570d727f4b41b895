"""Compares the operations of a round in C with torch's on a few rows, when an engine is loaded."""

import torch

from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.drafts import Drafts, RowVerdict
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.rows.table import RowTable
from truedraft.engine.sampling.probes import PARAMS
from truedraft.engine.sampling.sampler import Sampler
from truedraft.engine.sampling.torch_ops import RoundOps, TorchOps

CPU = torch.device("cpu")
# Probabilities may differ by this much; both ways round to 1e-7.
TOLERANCE = 1e-5
# The vocabulary fills no vector; each row drafts this many tokens or fewer.
VOCAB_SIZE, NUM_DRAFTS = 1003, 3


def agrees(ops: RoundOps) -> bool:
    """Tells whether ``ops`` draw, adjust and verify as torch does, by every rule, with and without cuts."""
    probes = [
        LoneText(
            params,
            rule,
            seed,
            stop_token_ids=frozenset({11, 12}),
            drafts_greedily=rule is Rule.EXACT_MATCH or seed % 7 == 3,
        )
        for seed, (params, rule) in enumerate((params, rule) for params in PARAMS * 8 for rule in Rule)
    ]
    rows = RowTable().rows_of(probes)
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(len(rows), NUM_DRAFTS + 1, VOCAB_SIZE, generator=generator)
    near = logits[:, :-1] + 2 * torch.randn(len(rows), NUM_DRAFTS, VOCAB_SIZE, generator=generator)
    expected, found = (
        drawn_and_judged(Sampler(rows, VOCAB_SIZE, CPU, each), logits, near) for each in (TorchOps(), ops)
    )
    (drafts, adjusted, verdicts), (our_drafts, ours, our_verdicts) = expected, found
    assert drafts.probs is not None
    assert our_drafts.probs is not None
    return (
        torch.equal(our_drafts.token_ids, drafts.token_ids)
        and torch.allclose(our_drafts.probs, drafts.probs, rtol=0, atol=TOLERANCE)
        and torch.equal(ours, adjusted)
        and our_verdicts == verdicts
    )


def drawn_and_judged(
    sampler: Sampler, logits: torch.Tensor, draft_logits: torch.Tensor
) -> tuple[Drafts, torch.Tensor, list[RowVerdict]]:
    """Returns drafts of every row from ``draft_logits`` [B, K, V], the target's adjusted logits and the
    verdicts; rows draft 0 to K tokens in turns."""
    num_rows, num_drafts, vocab_size = draft_logits.shape
    token_ids = torch.zeros(num_rows, num_drafts, dtype=torch.int64)
    probs = torch.zeros(num_rows, num_drafts, vocab_size)
    for position in range(num_drafts):
        draw = sampler.draw_drafts(draft_logits[:, position].clone(), token_ids[:, :position])
        token_ids[:, position] = draw.ids
        if draw.probs is not None:
            probs[:, position] = draw.probs
    # The rules take turns from row to row, so each of them meets every length.
    lengths = [num_drafts - row // len(Rule) % (num_drafts + 1) for row in range(num_rows)]
    packed = torch.cat([logits[row, : length + 1] for row, length in enumerate(lengths)])
    drafts = Drafts(token_ids, probs if sampler.uses_draft_probs else None, lengths)
    adjusted = sampler.adjust(packed, drafts)
    return drafts, adjusted, sampler.judge(adjusted.clone(), drafts)
