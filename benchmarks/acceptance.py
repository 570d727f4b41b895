"""Compares acceptance by the rejection, block and coupled rules with theory: python -m benchmarks.acceptance

Runs the engine on story openings and looks at every round's two processed distributions. Theory says, for
each position that was reached: rejection accepts with probability 1 - TV, coupling with
sum_x 1 / sum_y max(target_y / target_x, draft_y / draft_x); for each round: block keeps the expected length
of the drafts that were drawn (``explain_block``), which is never below rejection's for the same drafts.
Measured minus expected, in standard errors, must stay within 4.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.common import STORY_OPENINGS
from truedraft.engine.llm import LLM
from truedraft.engine.messages import SamplingParams, Verification
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling.adjust import replace_broken
from truedraft.engine.sampling.explain import explain_block, explain_rejection
from truedraft.engine.sampling.processors import to_probs
from truedraft.engine.sampling.sampler import Sampler
from truedraft.engine.sampling.torch_ops import pad_rows
from truedraft.engine.sampling.verify import RowVerdict

MAX_DEVIATION = 4.0


@dataclass
class Tally:
    """Sums over trials: ``variance`` is that of the measured sum, given the expectations."""

    measured: float = 0.0
    expected: float = 0.0
    variance: float = 0.0
    num_trials: int = 0

    def add(self, measured: torch.Tensor, expected: torch.Tensor, variance: torch.Tensor) -> None:
        self.measured += float(measured.sum())
        self.expected += float(expected.sum())
        self.variance += float(variance.sum())
        self.num_trials += measured.numel()

    @property
    def deviation(self) -> float:
        return (self.measured - self.expected) / self.variance**0.5

    def __str__(self) -> str:
        mean, theory = self.measured / self.num_trials, self.expected / self.num_trials
        off = f"{self.deviation:+.2f} standard errors"
        return f"{mean:.4f}, theory {theory:.4f} ({off}, {self.num_trials} trials)"


class Observer:
    """Wraps ``Sampler.judge`` and compares every round's verdict with what its distributions promise."""

    def __init__(self, verification: Verification) -> None:
        self.verification = verification
        self.positions = Tally()  # acceptance of each reached position
        self.rounds = Tally()  # kept length of each round, given its drafts

    def wrap(
        self, honest: Callable[[Sampler, torch.Tensor, Drafts], list[RowVerdict]]
    ) -> Callable[..., list[RowVerdict]]:
        def judge(sampler: Sampler, logits: torch.Tensor, drafts: Drafts) -> list[RowVerdict]:
            verdicts = honest(sampler, logits, drafts)
            if drafts.probs is not None and max(drafts.lengths) > 0:
                num_accepted = torch.tensor([verdict.num_accepted for verdict in verdicts])
                self._observe(sampler, logits, drafts, num_accepted)
            return verdicts

        return judge

    def _observe(
        self, sampler: Sampler, logits: torch.Tensor, drafts: Drafts, num_accepted: torch.Tensor
    ) -> None:
        assert drafts.probs is not None
        adjusted = sampler.adjust(logits, drafts)
        padded, _ = replace_broken(pad_rows(adjusted, drafts.lengths, drafts.token_ids.shape[1] + 1))
        target = to_probs(padded, sampler.cuts(list(range(len(sampler.rows))))).double()
        draft, num_draft = drafts.probs.double(), torch.tensor(drafts.lengths)
        index = torch.arange(draft.shape[1])
        reached = (index <= num_accepted[:, None]) & (index < num_draft[:, None])
        accepted = (index < num_accepted[:, None])[reached].double()
        if self.verification != "block":
            rule = coupling if self.verification == "coupled" else overlap
            chance = rule(target[:, :-1][reached], draft[reached])
            self.positions.add(accepted, chance, chance * (1 - chance))
        if self.verification != "coupled":
            explain = explain_block if self.verification == "block" else explain_rejection
            lengths = explain(target, drafts.token_ids, draft, num_draft).length_probs[num_draft > 0]
            numbers = torch.arange(lengths.shape[1], dtype=torch.float64)
            mean = (lengths * numbers).sum(-1)
            variance = (lengths * numbers**2).sum(-1) - mean**2
            self.rounds.add(num_accepted[num_draft > 0].double(), mean, variance)


def overlap(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """1 - TV of each pair of rows [trials, vocab]."""
    return torch.minimum(target, draft).sum(-1)


def coupling(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Agreement of two exponential races with one noise, row by row to spare memory."""
    chances = []
    for p, q in zip(target, draft, strict=True):
        both = ((p > 0) & (q > 0)).nonzero().squeeze(-1)
        ratios = torch.maximum(p[None] / p[both][:, None], q[None] / q[both][:, None])
        chances.append((1 / ratios.sum(1)).sum())
    return torch.stack(chances)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    llm = LLM(target=args.target, draft=args.draft, method="draft_model")
    honest = Sampler.judge
    rules: tuple[Verification, ...] = ("rejection", "block", "coupled")
    worst = 0.0
    for temperature in args.temperature:
        for rule in rules:
            observer = Observer(rule)
            Sampler.judge = observer.wrap(honest)  # type: ignore[method-assign]
            # Tracing makes the engine keep the draft's distributions under every rule.
            params = [
                SamplingParams(
                    max_tokens=args.max_tokens,
                    temperature=temperature,
                    seed=seed,
                    verification=rule,
                    trace=True,
                )
                for seed in range(len(STORY_OPENINGS))
            ]
            completions = llm.generate(STORY_OPENINGS, params)
            rounds, tokens = (
                sum(map(f, completions)) for f in (lambda c: c.num_rounds, lambda c: len(c.token_ids))
            )
            print(f"temperature {temperature:g}, {rule}: {tokens / rounds:.2f} tokens per round")
            for name, tally in (("position accepted", observer.positions), ("length kept", observer.rounds)):
                if tally.num_trials:
                    print(f"    {name:18} {tally}")
                    worst = max(worst, abs(tally.deviation))
    Sampler.judge = honest  # type: ignore[method-assign]
    print(
        f"largest deviation {worst:.2f} standard errors: {'within' if worst < MAX_DEVIATION else 'BEYOND'} 4"
    )


if __name__ == "__main__":
    main()
