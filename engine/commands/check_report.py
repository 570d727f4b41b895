"""Writes the report of ``truedraft check``, its verdict, and how a terminal shows them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from rich.text import Text

from truedraft.engine.commands.check_drafts import NGRAM, DraftResult
from truedraft.engine.commands.check_exactness import GreedyResult
from truedraft.engine.commands.check_grammar import GrammarResult
from truedraft.engine.commands.check_law import LawResult
from truedraft.engine.commands.check_positions import PositionsResult
from truedraft.engine.commands.check_speed import PAYS_FROM, Speed
from truedraft.engine.commands.check_weights import WeightsResult
from truedraft.engine.messages import HEADS
from truedraft.engine.proposers.translated.pairing import TokenizerResult
from truedraft.engine.terminal import console, printable, table

# A draft's name in a table has this many characters.
NAME_WIDTH = 30
Setting: TypeAlias = int | Literal["auto"]


class Finding(Protocol):
    """Says what was compared, and lists what is wrong: nothing if the pair is exact."""

    @property
    def failure(self) -> str: ...

    @property
    def in_words(self) -> str: ...


@dataclass(frozen=True)
class Comparisons:
    """Holds the comparisons with plain decoding, and with other code that computes the target."""

    weights: WeightsResult | None
    greedy: GreedyResult
    positions: PositionsResult
    grammar: GrammarResult
    sampling: list[LawResult]

    @property
    def findings(self) -> list[tuple[str, Finding]]:
        """Returns them by their names in the report."""
        found: list[tuple[str, Finding]] = [] if self.weights is None else [("rounded", self.weights)]
        found += ("greedy", self.greedy), ("together", self.positions), ("grammar", self.grammar)
        return [*found, *(("sampling", result) for result in self.sampling)]

    @property
    def failures(self) -> list[str]:
        return [finding.failure for _, finding in self.findings if finding.failure]


@dataclass(frozen=True)
class Report(Comparisons):
    """Holds the comparisons and the gain of drafting.

    ``ngrams`` has the gain on a text that repeats itself, ``drafts`` that of each possible draft, the given
    one first, and ``advice`` says which of them to use.
    """

    target: str
    draft: str | None
    method: str
    device: str
    dtype: str
    tokenizers: TokenizerResult | None
    speeds: list[Speed]
    ngrams: list[Speed]
    drafts: list[DraftResult]
    advice: str
    exact: bool
    verdict: str


def verdict_of(
    failures: list[str], speeds: list[Speed], ngrams: list[Speed], setting: Setting, method: str
) -> str:
    """Says whether the pair is exact and pays; ``setting`` is the value of ``num_speculative_tokens``."""
    if failures:
        return f"NOT EXACT: {'; '.join(failures)}."
    return " ".join(["Exact.", *_gains(speeds, ngrams, setting, method)])


def _gains(speeds: list[Speed], ngrams: list[Speed], setting: Setting, method: str) -> Iterator[str]:
    overall = DraftResult("", speeds).by_length
    best = max(overall, key=lambda length: overall[length], default=0)
    pays = bool(speeds) and overall[best] >= PAYS_FROM
    name = "The head" if method in HEADS else "Copying earlier text" if method == NGRAM else "The draft model"
    if pays:
        yield f"{name} makes it {overall[best]:.2f} times as fast ({_tokens(best)})."
    elif speeds:
        yield f"{name} makes it slower: {overall[best]:.2f} times at best. Leave it out (--draft none)."
    else:
        yield "No draft model drafts."
    if ngrams:
        speed = max(ngrams, key=lambda speed: speed.speedup)
        yield f"N-grams alone, on a text that repeats itself: {speed.speedup:.2f} times."
    if pays and setting == "auto":
        yield "Keep the length at auto."
    elif pays and setting != best:
        yield f"With {_tokens(int(setting))} it is {overall[int(setting)]:.2f} times: set the length to auto."


def _tokens(number: int) -> str:
    return f"{number} token{'s' * (number > 1)}"


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
        fact("tokenizers", "\n".join([report.tokenizers.verdict, *report.tokenizers.special_tokens]))
        fact("drafts", report.tokenizers.drafts)
    for name, finding in report.findings:
        fact(name, finding.in_words, "red" if finding.failure else "green")
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
    """Returns the end of a long path, so that the table's numbers fit next to it."""
    return name if len(name) <= NAME_WIDTH else f"...{name[3 - NAME_WIDTH :]}"
