"""``foretoken generate``: stream one prompt to the terminal, accepted draft tokens in colour.

With ``--compare`` the same prompt runs with and without speculation, several times by turns, and the
medians are printed side by side. Settings are the engine's own, from flags and ``FORETOKEN_*``.
"""

import os
import secrets
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, CliApp, CliPositionalArg
from tokenizers.decoders import DecodeStream
from transformers.utils import logging as transformers_logging

from engine.commands.options import command_options
from engine.config import EngineConfig
from engine.core.admission import RequestError
from engine.llm import LLM, Completion
from engine.messages import SamplingParams
from engine.models.errors import ModelLoadError

GREEN, DIM, RESET = "\033[32m", "\033[2m", "\033[0m"


class GenerateSettings(EngineConfig, BaseSettings):
    """Stream a completion to the terminal; accepted draft tokens are coloured."""

    model_config = command_options("generate")

    prompt: CliPositionalArg[str] = Field(description="Text to continue.")
    compare: bool = Field(False, description="Also decode without speculation and print both speeds.")
    max_tokens: int = Field(200, ge=1, description="Tokens to generate at most.")
    temperature: float = Field(0.7, ge=0, le=2, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus of the distribution to sample from.")
    seed: int | None = Field(None, description="Makes sampling repeatable. Default: drawn anew.")
    repeats: int = Field(5, ge=1, description="Timed pairs of runs under --compare.")


@dataclass
class Run:
    completion: Completion
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.completion.token_ids) / self.seconds


class Printer:
    """Writes tokens as text as soon as they form whole characters."""

    def __init__(self, tokenizer: Any, colour: bool) -> None:
        self.tokenizer = tokenizer.backend_tokenizer
        self.stream = DecodeStream(skip_special_tokens=True)
        self.colour = colour

    def write(self, token_ids: list[int], num_accepted: int) -> None:
        for i, token_id in enumerate(token_ids):
            text = self.stream.step(self.tokenizer, token_id)
            if text and i < num_accepted and self.colour:
                text = f"{GREEN}{text}{RESET}"
            print(text or "", end="", flush=True)


def main(arguments: list[str]) -> int:
    transformers_logging.disable_progress_bar()
    settings = CliApp.run(GenerateSettings, cli_args=arguments)
    try:
        llm = LLM(**{name: getattr(settings, name) for name in EngineConfig.model_fields})
        _generate(llm, settings)
    except (ModelLoadError, RequestError) as error:
        print(f"foretoken: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def _generate(llm: LLM, settings: GenerateSettings) -> None:
    # Both sides of a comparison say the same: greedily, or drawing with one seed under the coupled rule.
    seed = settings.seed
    if seed is None and settings.compare:
        seed = secrets.randbits(32)
    params = SamplingParams(
        max_tokens=settings.max_tokens, temperature=settings.temperature, top_p=settings.top_p, seed=seed
    )
    plain_params = SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=seed,
        num_speculative_tokens=0,
    )
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    first = _run(llm, settings.prompt, params, Printer(llm.tokenizer, colour), colour)
    if not settings.compare:
        _print_acceptance(first.completion, colour)
        return
    plain, speculative = [], []
    for _ in range(settings.repeats):
        plain.append(_run(llm, settings.prompt, plain_params))
        speculative.append(_run(llm, settings.prompt, params))
    _print_comparison(plain, speculative)


def _run(
    llm: LLM, prompt: str, params: SamplingParams, printer: Printer | None = None, colour: bool = False
) -> Run:
    completion = Completion()
    started = time.perf_counter()
    if printer:
        print(f"{DIM}{prompt}{RESET}" if colour else prompt, end="", flush=True)
    for output in llm.stream(prompt, params):
        completion.add(output)
        if printer:
            printer.write(output.token_ids, output.num_accepted_tokens)
    seconds = time.perf_counter() - started
    if printer:
        print("\n")
    return Run(completion, seconds)


def _print_acceptance(completion: Completion, colour: bool) -> None:
    if completion.num_draft_tokens == 0:
        print("Nothing was drafted: there is no draft model, or speculation is off.")
        return
    where = f"{GREEN}coloured{RESET}: " if colour else ""
    print(
        f"{where}{completion.num_accepted_tokens} of {completion.num_draft_tokens} drafted tokens accepted "
        f"({completion.acceptance_rate:.0%}), {completion.acceptance_length:.2f} tokens per round"
    )


def _print_comparison(plain: list[Run], speculative: list[Run]) -> None:
    _print_acceptance(speculative[0].completion, colour=False)
    print(f"\n{'':14}{'tokens/s':>10}{'rounds':>9}{'tokens/round':>15}")
    for name, runs in (("plain", plain), ("speculative", speculative)):
        completion = runs[0].completion
        speed = statistics.median(run.tokens_per_second for run in runs)
        print(f"{name:14}{speed:10.1f}{completion.num_rounds:9}{completion.acceptance_length:15.2f}")
    ratios = [s.tokens_per_second / p.tokens_per_second for p, s in zip(plain, speculative, strict=True)]
    same = all(run.completion.token_ids == plain[0].completion.token_ids for run in speculative)
    print(
        f"\nspeculation is {statistics.median(ratios):.2f} times as fast "
        f"(median of {len(ratios)} interleaved pairs); same text: {'yes' if same else 'NO'}"
    )
