"""Implements ``truedraft generate``: streams one prompt to the terminal, accepted tokens in their source's
colour.

``--rounds`` prints what each round did instead. With ``--compare`` the same prompt runs with and without
speculation, and with n-grams alone where there is a draft model, several times in alternation, and the
medians are printed side by side. Settings are the engine's own, from flags and ``TRUEDRAFT_*``.
"""

import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import structs
from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from truedraft.engine.commands.options import GenerateSettings, check_adapters
from truedraft.engine.commands.rounds import RoundPrinter
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.admission import RequestError
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.llm import LLM, Completion
from truedraft.engine.messages import DRAFT_MODEL, HEADS, WITH_DRAFT, SamplingParams, TokenOutput
from truedraft.engine.models.generation_defaults import recommended
from truedraft.engine.terminal import console, loading_bar, printable, stages, table
from truedraft.engine.text.detokenizer import TextStream

# Each source has its colour; accepted tokens of other sources are green, too.
COLOURS = {
    **dict.fromkeys(WITH_DRAFT, "green"),
    "ngram": "cyan",
    "prediction": "magenta",
    "grammar": "blue",
}


@dataclass
class Run:
    completion: Completion
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.completion.token_ids) / self.seconds


class Printer:
    """Writes tokens as text as soon as they form whole characters, and without escapes where there is no
    terminal."""

    def __init__(self, stream: TextStream, out: Console) -> None:
        self.stream = stream
        self.out = out

    def write(self, output: TokenOutput) -> None:
        for token_id, colour in zip(output.token_ids, _colours(output), strict=True):
            self.print(self.stream.step(token_id), colour)
        if output.finish_reason is not None:
            self.print(self.stream.flush(is_cut=output.finish_reason == "length"))

    def print(self, text: str, style: str = "") -> None:
        if self.out.is_terminal:
            self.out.print(Text(printable(text), style), end="")
        else:
            self.out.file.write(text)
        self.out.file.flush()


def _colours(output: TokenOutput) -> Iterator[str]:
    """Yields the colour of each token."""
    for one in output.origins or ():
        for place in range(one.num_tokens):
            yield COLOURS.get(one.source, "green") if place < one.num_accepted else ""


def main(settings: GenerateSettings) -> int:
    transformers_logging.disable_progress_bar()
    try:
        with loading_bar() as begin:
            check_adapters(settings)
            llm = LLM(begin=begin, **{name: getattr(settings, name) for name in EngineConfig.model_fields})
        _generate(llm, settings)
    except (ModelLoadError, RequestError) as error:
        print(f"truedraft: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def _generate(llm: LLM, settings: GenerateSettings) -> None:
    # Both sides of a comparison give the same text: greedily, or drawing with one seed under the coupled
    # rule.
    values = recommended(settings.generation_config, llm.core.target.model.generation_config)
    values |= {"seed": secrets.randbits(32)} if settings.compare else {}
    values |= settings.asked() | {"max_tokens": settings.max_tokens, "origins": True}
    values.pop("max_new_tokens", None)
    params = SamplingParams(**values)
    out = console()
    prompt_ids = llm.tokenizer.encode(settings.prompt)
    if settings.rounds:
        first = _print_rounds(llm, settings.prompt, params, RoundPrinter(llm, settings.prompt, out))
    else:
        first = _run(llm, settings.prompt, params, Printer(llm.text_stream(prompt_ids), out)).completion
    _print_acceptance(first, llm, out)
    if not settings.compare:
        return
    variants = {"plain": structs.replace(params, num_speculative_tokens=0), "speculative": params}
    if set(WITH_DRAFT).intersection(llm.core.admission.methods) or llm.core.admission.method == "none":
        variants["n-grams"] = structs.replace(params, method="ngram")
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    with stages(len(variants) * settings.repeats) as progress:
        for _ in range(settings.repeats):
            for name, variant in variants.items():
                progress.begin(name)
                runs[name].append(_run(llm, settings.prompt, variant))
    _print_comparison(runs, out)


def _run(llm: LLM, prompt: str, params: SamplingParams, printer: Printer | None = None) -> Run:
    completion = Completion()
    started = time.perf_counter()
    if printer:
        printer.print(prompt, "dim")
    for delta in llm.stream(prompt, params):
        completion.add_delta(delta)
        if printer:
            printer.write(delta.output)
    seconds = time.perf_counter() - started
    if printer:
        printer.print("\n\n")
    return Run(completion, seconds)


def _print_rounds(llm: LLM, prompt: str, params: SamplingParams, printer: RoundPrinter) -> Completion:
    completion = Completion()
    for delta in llm.stream(prompt, structs.replace(params, trace=True)):
        completion.add_delta(delta)
        if delta.output.trace is not None:
            printer.print(delta.output.trace, delta.output.token_ids)
    return completion


def _print_acceptance(completion: Completion, llm: LLM, out: Console) -> None:
    if completion.num_draft_tokens == 0:
        why = llm.core.speculation().get("why", "off: no source of drafts is configured")
        out.print(f"Nothing was drafted. Speculation is {why}.")
        return
    legend = Text()
    if out.color_system is not None:
        drafter = "head" if set(HEADS).intersection(llm.core.admission.methods) else "draft model"
        legend = Text.assemble((drafter, COLOURS[DRAFT_MODEL]), " ", ("n-gram", COLOURS["ngram"]), ": ")
    out.print(
        legend.append(
            f"{completion.num_accepted_tokens} of {completion.num_draft_tokens} drafted tokens accepted "
            f"({completion.acceptance_rate:.0%}), {completion.acceptance_length:.2f} tokens per round"
        )
    )


def _print_comparison(runs: dict[str, list[Run]], out: Console) -> None:
    rows = table(["", "tokens/s", "rounds", "tokens/round", "drafted", "accepted"])
    for name, done in runs.items():
        completion = done[0].completion
        speed = statistics.median(run.tokens_per_second for run in done)
        drafted = completion.num_draft_tokens
        rows.add_row(
            name,
            f"{speed:.1f}",
            str(completion.num_rounds),
            f"{completion.acceptance_length:.2f}",
            str(drafted),
            f"{completion.acceptance_rate:.0%}" if drafted else "",
        )
    out.print()
    out.print(rows)
    plain = runs["plain"]
    out.print()
    for name, words in (("speculative", "speculation is"), ("n-grams", "n-grams alone are")):
        if name not in runs:
            continue
        ratios = [
            run.tokens_per_second / other.tokens_per_second
            for run, other in zip(runs[name], plain, strict=True)
        ]
        same = all(run.completion.token_ids == plain[0].completion.token_ids for run in runs[name])
        verdict = Text(f"{words} {statistics.median(ratios):.2f} times as fast ", "bold")
        verdict.append(f"(median of {len(ratios)} interleaved pairs); same text: ", "not bold")
        out.print(verdict.append("yes" if same else "NO", "green" if same else "bold red"))
