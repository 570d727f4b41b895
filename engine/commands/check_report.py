"""Says what ``truedraft check`` has found: the report, its verdict, and how a terminal shows them."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.text import Text

from truedraft.engine.commands.check_drafts import NGRAM, DraftResult
from truedraft.engine.commands.check_exactness import SIGNIFICANCE, TESTED, ChiSquareResult, GreedyResult
from truedraft.engine.commands.check_grammar import GrammarResult
from truedraft.engine.commands.check_positions import PositionsResult
from truedraft.engine.commands.check_speed import PAYS_FROM, Speed
from truedraft.engine.commands.check_weights import WeightsResult
from truedraft.engine.proposers.translated.pairing import TokenizerResult
from truedraft.engine.terminal import console, printable, table

# Characters of a draft's name in a table.
NAME_WIDTH = 30


@dataclass(frozen=True)
class Comparisons:
    """Holds what was compared with plain decoding."""

    greedy: GreedyResult
    positions: PositionsResult
    grammar: GrammarResult
    sampling: list[ChiSquareResult]

    @property
    def failures(self) -> list[str]:
        """What is not as it is without drafts, in words; empty where the pair is exact."""
        failed = [
            f"{result.verification} (p = {result.p_value:.1e})"
            for result in self.sampling
            if not result.passed
        ]
        reasons = ["greedy decoding differs"] if self.greedy.differences else []
        reasons += ["a text depends on its neighbours"] if self.positions.greedy.differences else []
        reasons += ["greedy text of a grammar differs"] if self.grammar.greedy.differences else []
        reasons += [f"samples have another distribution under {', '.join(failed)}"] if failed else []
        return reasons


@dataclass(frozen=True)
class Report:
    target: str
    draft: str | None
    method: str
    device: str
    dtype: str
    tokenizers: TokenizerResult | None
    weights: WeightsResult | None
    greedy: GreedyResult
    positions: PositionsResult
    grammar: GrammarResult
    sampling: list[ChiSquareResult]
    speeds: list[Speed]
    ngrams: list[Speed]  # on a text that repeats itself, greedily
    drafts: list[DraftResult]  # what the target could draft with, the given draft first
    advice: str  # which of them to use
    exact: bool
    verdict: str


Setting: TypeAlias = int | Literal["auto"]


def verdict_of(failures: list[str], speeds: list[Speed], ngrams: list[Speed], setting: Setting) -> str:
    """Says in a sentence whether the pair is exact and pays; ``setting`` is ``num_speculative_tokens``."""
    if failures:
        return f"NOT EXACT: {'; '.join(failures)}"
    return _of_drafts(speeds, setting) + _of_ngrams(ngrams)


def _of_drafts(speeds: list[Speed], setting: Setting) -> str:
    if not speeds:
        return "exact; no draft model drafts"
    overall = DraftResult("", speeds).by_length
    best = max(overall, key=lambda length: overall[length])
    if overall[best] < PAYS_FROM:
        return (
            f"exact, but speculation loses: {overall[best]:.2f} times as fast at best; "
            "leave out the draft (--draft none) and save its memory"
        )
    verdict = f"exact; speculation pays: {overall[best]:.2f} times as fast at {best} tokens"
    if setting in (best, "auto"):
        return verdict + ("; leave the length to auto" if setting == "auto" else "")
    return f"{verdict} ({overall[int(setting)]:.2f} at {setting}); use --num-speculative-tokens auto"


def _of_ngrams(speeds: list[Speed]) -> str:
    if not speeds:
        return ""
    best = max(speeds, key=lambda speed: speed.speedup)
    return (
        f"; n-grams, which auto drafts where they pay: {best.speedup:.2f} times as fast at "
        f"{best.num_speculative_tokens} tokens on a text that repeats itself"
    )


def print_report(report: Report) -> None:
    """Prints the report for people."""
    out = console()
    facts = table(["", ""], num_left=2)
    facts.show_header = False

    def fact(name: str, text: str, style: str = "") -> None:
        facts.add_row(name, Text(printable(text), style))

    fact("target", report.target)
    fact("draft", report.draft or report.method)
    fact("device", f"{report.device}, {report.dtype}")
    if report.tokenizers is not None:
        fact("tokenizers", report.tokenizers.verdict)
        for line in report.tokenizers.special_tokens:
            fact("", line)
        fact("drafts", report.tokenizers.drafts)
    if report.weights is not None:
        fact("rounded", f"log-probability {report.weights.in_words}")

    def compared(name: str, greedy: GreedyResult, more: str = "") -> None:
        words = "identical to plain decoding" if not greedy.differences else "DIFFERENT from plain decoding"
        ties = f"; {greedy.near_ties} near ties left aside" if greedy.near_ties else ""
        style = "red" if greedy.differences else "green"
        fact(name, f"{words}, {greedy.num_tokens} tokens compared{ties}{more}", style)
        for line in greedy.differences:
            fact("", line)

    compared("greedy", report.greedy)
    compared("together", report.positions.greedy, report.positions.in_words)
    if report.grammar.reason:
        fact("grammar", report.grammar.reason)
    else:
        median, most = report.grammar.mask_microseconds
        compared("grammar", report.grammar.greedy, f"; a mask in {median:.0f} µs, {most:.0f} µs at most")
    for result in report.sampling:
        fact(
            "sampling",
            f"{result.verification:<10} p = {result.p_value:.3g} "
            f"({'passed' if result.passed else 'FAILED'}, limit {SIGNIFICANCE:g}; "
            f"{result.num_samples} samples, {result.num_cells} cells, "
            f"temperature {result.temperature:g}, top-k {TESTED.top_k}, "
            f"{result.acceptance_rate:.0%} accepted)",
            "green" if result.passed else "red",
        )
    out.print(facts)
    if report.speeds:
        _print_speeds(report.speeds)
    if report.ngrams:
        out.print("\nn-grams, on a text that repeats itself:")
        _print_speeds(report.ngrams)
    if report.drafts:
        _print_drafts(report.drafts)
    out.print(f"\n{report.verdict}", style="bold" if report.exact else "bold red")
    if report.advice:
        out.print(report.advice, style="bold")


def _print_speeds(speeds: list[Speed]) -> None:
    out = console()
    columns = ["temperature", "drafted", "accepted", "tokens/round", "tokens/s", "plain", "speed-up", "ideal"]
    rows = table([*columns, "costs: draft", "score", "rest"], num_left=0)
    for speed in speeds:
        costs = speed.costs
        rows.add_row(
            f"{speed.temperature:g}",
            str(speed.num_speculative_tokens),
            f"{speed.acceptance_rate:.0%}",
            f"{speed.acceptance_length:.2f}",
            f"{speed.tokens_per_second:.1f}",
            f"{speed.plain_tokens_per_second:.1f}",
            f"{speed.speedup:.2f}",
            f"{speed.ideal:.2f}",
            *(f"{cost:.2f}" for cost in (costs.draft, costs.score, costs.rest)),
        )
    out.print()
    out.print(rows)
    for temperature in sorted({speed.temperature for speed in speeds}):
        of_temperature = [speed for speed in speeds if speed.temperature == temperature]
        longest = of_temperature[-1]
        shares = "  ".join(f"{share:.2f}" for share in longest.acceptance_by_position)
        out.print(f"accepted up to position 1, 2, ... at temperature {temperature:g}: {shares}")


def _print_drafts(results: list[DraftResult]) -> None:
    """Prints one line for each draft, at its best length; the fastest first."""
    out = console()
    out.print("\nwhat this target could draft with here, each at its best length:\n")
    rows = table(["draft", "accepted", "tokens/round", "speed-up", "at", "memory"])
    measured = [result for result in results if result.speeds]
    for result in sorted(measured, key=lambda result: -result.speedup):
        rows.add_row(
            Text(printable(_short("n-grams" if result.draft == NGRAM else result.draft))),
            f"{result.acceptance_rate:.0%}",
            f"{result.acceptance_length:.2f}",
            f"{result.speedup:.2f}",
            str(result.length),
            f"{result.memory / 2**20:,.1f} MiB" if result.memory else "none",
        )
    out.print(rows)
    for result in results:
        if result.reason:
            out.print(printable(f"{result.draft} was not tried: {result.reason}"))
    out.print("memory: the draft's weights, and its cache for 1,000 tokens")


def _short(name: str) -> str:
    """Returns the end of a long path: the table's numbers are to stand next to it."""
    return name if len(name) <= NAME_WIDTH else f"...{name[3 - NAME_WIDTH :]}"
