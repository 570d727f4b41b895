"""``truedraft check``: is this pair exact here, and does speculation pay? A report and a verdict in words.

It loads the pair as the server would, compares the tokenizers, tests exactness (``check_exactness``), says
what quantised weights cost (``check_weights``) and measures (``check_speed``), n-grams on a text that repeats
itself. A target without a draft is checked with n-grams, and tried with its own weights in fewer bits. Exit
code 0: exact; 1: not exact; 2: cannot be loaded. Settings are the engine's own, from flags and
``TRUEDRAFT_*``.
"""

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from pydantic import Field
from pydantic_settings import BaseSettings
from rich.text import Text
from transformers.utils import logging as transformers_logging

from truedraft.engine.build import build_engine
from truedraft.engine.commands.check_exactness import (
    SIGNIFICANCE,
    TESTED,
    ChiSquareResult,
    EngineFailedError,
    GreedyResult,
    Law,
    check_greedy,
    check_law,
    expected_law,
)
from truedraft.engine.commands.check_grammar import GrammarResult, check_grammar
from truedraft.engine.commands.check_positions import (
    LongTexts,
    PositionsResult,
    check_positions,
    long_texts,
)
from truedraft.engine.commands.check_speed import PAYS_FROM, Speed, measure
from truedraft.engine.commands.check_weights import WeightsResult, check_weights
from truedraft.engine.commands.options import command_options
from truedraft.engine.commands.terminal import Stages, console, printable, stages, table
from truedraft.engine.config import SELF_DRAFTS, EngineConfig
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.messages import SamplingParams, Verification
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.loader import draft_source, load_options
from truedraft.engine.proposers.draft_model import DraftModelProposer
from truedraft.engine.proposers.ngram import NgramProposer
from truedraft.engine.proposers.translated.pairing import TokenizerResult, load_tokenizer, pair_models

EXACT, NOT_EXACT, CANNOT_LOAD = 0, 1, 2
PROMPTS = [
    "Once upon a time there was a",
    "The old man looked at the sea and said:",
    "In the morning the children went to",
    "The capital of France is",
]
# N-grams find nothing in texts like these. What they can bring is measured on one that says a sentence again.
REPEATED = (
    "Every evening the keeper climbed the narrow stairs of the old tower and lit the lamp for the ships. "
)
NUM_REPEATS = 3
MAX_PROMPT_TOKENS, NUM_TESTED_PROMPT_TOKENS = 512, 2
GREEDY_LENGTHS, GREEDY_TOKENS = (1, 4, 8), 32
NUM_TIMED_PROMPTS = 2
DEFAULT_LENGTH = 4  # where the setting leaves it to the policy
SPEED_LENGTHS, TEMPERATURES = (2, 4, 8), (0.0, 1.0)
RULES: tuple[Verification, ...] = ("rejection", "block", "coupled")
NUM_STAGES = 5 + len(RULES) + (1 + len(TEMPERATURES)) * len(SELF_DRAFTS)
# Logits closer than this may change places when they are computed in another shape.
RESOLUTIONS = {"torch.float32": 1e-3, "torch.bfloat16": 0.1, "torch.float16": 0.02}


class CheckSettings(EngineConfig, BaseSettings):
    """Check a pair of models: tokenizers, exactness, acceptance and speed."""

    model_config = command_options("check")

    prompts: Path | None = Field(None, description="File of prompts, one a line. Default: four openings.")
    samples: int = Field(1500, ge=100, description="Samples of each chi-square test.")
    repeats: int = Field(5, ge=1, description="Timed runs of each variant.")
    seconds: float = Field(14.0, gt=0, description="Time for measuring speed, about.")
    long_seconds: float = Field(
        20.0,
        gt=0,
        description="Time for texts beyond the target's windows and original contexts, about.",
    )
    json_output: bool = Field(
        False, validation_alias="json", description="Print one JSON object instead of the report."
    )


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
    own_drafts: dict[str, list[Speed]]  # of a target without a draft: what its own weights would bring
    exact: bool
    verdict: str


def main(settings: CheckSettings) -> int:
    transformers_logging.disable_progress_bar()
    try:
        with stages(NUM_STAGES) as progress:
            report = check(settings, progress)
    except (ModelLoadError, RequestError, OSError) as error:
        print(f"truedraft: {error}", file=sys.stderr)
        return CANNOT_LOAD
    except EngineFailedError as error:
        print(f"NOT EXACT: the engine failed: {error}", file=sys.stderr)
        return NOT_EXACT
    if settings.json_output:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        _print(report)
    return EXACT if report.exact else NOT_EXACT


def check(settings: CheckSettings, progress: Stages) -> Report:
    assert settings.target is not None  # filled in by EngineConfig
    progress.begin("The target's own distribution")
    tokenizer = load_tokenizer(settings.target)
    texts = settings.prompts.read_text().splitlines() if settings.prompts else PROMPTS
    prompt, tested, law, weights, texts_beyond = _expected(settings, tokenizer, texts[0])
    # The reference is gone before the engine comes: a large target fits into memory only once.
    fields = {name: getattr(settings, name) for name in EngineConfig.model_fields}
    # Lengths are measured one by one, so the policy must not choose.
    configured = (
        DEFAULT_LENGTH if settings.num_speculative_tokens == "auto" else settings.num_speculative_tokens
    )
    fields["num_speculative_tokens"] = configured
    if settings.method == "auto" and settings.draft is not None and configured:
        fields["method"] = DraftModelProposer.name  # it is the pair that is checked, not n-grams
    elif settings.method == "auto" and configured:
        fields["method"] = NgramProposer.name
    progress.begin("Loading the models")
    core = build_engine(EngineConfig(**fields))
    prompts = [_encode(tokenizer, text, number, core.target.vocab_size) for number, text in enumerate(texts)]
    method = core.admission.method
    speculates = core.snapshot().num_speculative_tokens > 0
    room = core.admission.room(max(map(len, prompts)))
    progress.begin("Greedy text")
    lengths, num_tokens = GREEDY_LENGTHS if speculates else (0,), min(GREEDY_TOKENS, room)
    # Layers of ours that round give the same bits however many tokens they compute.
    resolution = RESOLUTIONS[str(core.target.model.dtype)] if weights is None else 0.0
    greedy = check_greedy(core, prompts, lengths, num_tokens, resolution)
    progress.begin("Long texts beside short ones")
    positions = check_positions(core, texts_beyond, configured if speculates else 0, resolution)
    progress.begin("Text of a grammar")
    grammar = check_grammar(core, prompts, lengths, num_tokens, resolution)
    sampling = []
    for rule in RULES:
        progress.begin(f"Samples under {rule} verification")
        sampling.append(check_law(core, prompt, tested, law, rule, settings.samples))
    has_own_speeds = speculates and (settings.draft is not None or settings.method != "auto")
    speeds = _speeds(core, prompts, settings, configured, progress) if has_own_speeds else []
    ngrams = _ngram_speeds(core, tokenizer, settings, progress) if configured else []
    differs = greedy.differences or positions.greedy.differences or grammar.greedy.differences
    exact = not differs and all(result.passed for result in sampling)
    report = Report(
        target=settings.target,
        draft=settings.draft if method == DraftModelProposer.name else None,
        method=method,
        device=str(core.target.device),
        dtype=str(core.target.model.arithmetic).removeprefix("torch."),
        tokenizers=_tokenizers(core, settings),
        weights=weights,
        greedy=greedy,
        positions=positions,
        grammar=grammar,
        sampling=sampling,
        speeds=speeds,
        ngrams=ngrams,
        own_drafts={},
        exact=exact,
        verdict=_verdict(exact, greedy, positions, grammar, sampling, speeds, configured)
        + _of_ngrams(exact, ngrams),
    )
    if settings.draft is not None or settings.method != "auto" or not configured or not exact:
        return report
    del core  # a large target fits into memory only once
    tried = {draft: _try_own(draft, settings, fields, prompts, configured, progress) for draft in SELF_DRAFTS}
    own_drafts = {draft: speeds for draft, speeds in tried.items() if speeds}
    return replace(report, own_drafts=own_drafts, verdict=report.verdict + _recommendation(own_drafts))


def _try_own(
    draft: str,
    settings: CheckSettings,
    fields: dict[str, Any],
    prompts: list[list[int]],
    configured: int,
    progress: Stages,
) -> list[Speed]:
    progress.begin(f"Loading {draft}")
    try:
        core = build_engine(EngineConfig(**fields | {"draft": draft, "method": DraftModelProposer.name}))
    except ModelLoadError:
        return []
    return _speeds(core, prompts, settings, configured, progress)


def _recommendation(own_drafts: dict[str, list[Speed]]) -> str:
    ratios = {
        (draft, length): ratio
        for draft, speeds in own_drafts.items()
        for length, ratio in _by_length(speeds).items()
    }
    if not ratios:
        return ""
    draft, length = max(ratios, key=lambda key: ratios[key])
    how_fast = f"{ratios[draft, length]:.2f} times as fast at {length} tokens"
    if ratios[draft, length] < PAYS_FROM:
        return f"; the target's own weights as its draft would not pay ({how_fast} at best, {draft})"
    return f"; --draft {draft} would pay: {how_fast}"


def _expected(
    settings: CheckSettings, tokenizer: Any | None, text: str
) -> tuple[list[int], SamplingParams, Law, WeightsResult | None, LongTexts]:
    assert settings.target is not None
    options = load_options(settings)
    target = FreshModel(settings.target, options)
    # The shorter the prompt, the more samples there are time for; what follows is as good a test.
    prompt = _encode(tokenizer, text, 0, target.vocab_size)[:NUM_TESTED_PROMPT_TOKENS]
    law = expected_law(target, prompt, settings.samples)
    texts = long_texts(target, settings.max_model_len, settings.long_seconds)
    return prompt, *law, check_weights(target, settings.target, options, tokenizer), texts


def _encode(tokenizer: Any | None, text: str, number: int, vocab_size: int) -> list[int]:
    """Without a tokenizer any ids will do."""
    if tokenizer is None:
        return [(7 * number + step) % vocab_size for step in range(1, 5)]
    return list(tokenizer.encode(text))[:MAX_PROMPT_TOKENS]


def _tokenizers(core: EngineCore, settings: CheckSettings) -> TokenizerResult | None:
    if core.draft is None:
        return None
    assert settings.target is not None
    sizes = core.target.vocab_size, core.draft.vocab_size
    return pair_models(settings.target, draft_source(settings)[0], *sizes).result


def _speeds(
    core: EngineCore, prompts: list[list[int]], settings: CheckSettings, configured: int, progress: Stages
) -> list[Speed]:
    lengths = sorted({*SPEED_LENGTHS, configured})
    seconds = settings.seconds / len(TEMPERATURES)
    speeds = []
    for temperature in TEMPERATURES:
        progress.begin(f"Speed at temperature {temperature:g}")
        timed = prompts[:NUM_TIMED_PROMPTS]
        speeds += measure(core, timed, lengths, temperature, settings.repeats, seconds)
    return speeds


def _ngram_speeds(
    core: EngineCore, tokenizer: Any | None, settings: CheckSettings, progress: Stages
) -> list[Speed]:
    """Returns what n-grams bring where the text repeats itself; they cost little elsewhere."""
    if core.admission.encoder_decoder is not None:
        return []
    progress.begin("Speed of n-grams")
    prompt = NUM_REPEATS * _encode(tokenizer, REPEATED, 0, core.target.vocab_size)
    prompt = prompt[-max(1, core.admission.room(0) // 2) :]
    seconds = settings.seconds / len(TEMPERATURES)
    return measure(core, [prompt], SPEED_LENGTHS, 0.0, settings.repeats, seconds, NgramProposer.name)


def _of_ngrams(exact: bool, speeds: list[Speed]) -> str:
    if not (exact and speeds):
        return ""
    best = max(speeds, key=lambda speed: speed.speedup)
    return (
        f"; n-grams, which auto drafts where they pay: {best.speedup:.2f} times as fast at "
        f"{best.num_speculative_tokens} tokens on a text that repeats itself"
    )


def _verdict(
    exact: bool,
    greedy: GreedyResult,
    positions: PositionsResult,
    grammar: GrammarResult,
    sampling: list[ChiSquareResult],
    speeds: list[Speed],
    configured: int,
) -> str:
    if not exact:
        failed = [
            f"{result.verification} (p = {result.p_value:.1e})" for result in sampling if not result.passed
        ]
        reasons = ["greedy decoding differs"] if greedy.differences else []
        reasons += ["a text depends on what is decoded beside it"] if positions.greedy.differences else []
        reasons += ["greedy text of a grammar differs"] if grammar.greedy.differences else []
        reasons += [f"samples have another distribution under {', '.join(failed)}"] if failed else []
        return f"NOT EXACT: {'; '.join(reasons)}"
    if not speeds:
        return "exact; no draft model drafts"
    overall = _by_length(speeds)
    best = max(overall, key=lambda length: overall[length])
    if overall[best] < PAYS_FROM:
        return (
            f"exact, but speculation loses: {overall[best]:.2f} times as fast at best; "
            "use --num-speculative-tokens 0"
        )
    verdict = f"exact; speculation pays: {overall[best]:.2f} times as fast at {best} tokens"
    if best != configured:
        verdict += f" ({overall[configured]:.2f} at {configured}); use --num-speculative-tokens {best}"
    return verdict


def _by_length(speeds: list[Speed]) -> dict[int, float]:
    """The speed-up of each draft length: geometric mean over the temperatures."""
    ratios: dict[int, list[float]] = {}
    for speed in speeds:
        ratios.setdefault(speed.num_speculative_tokens, []).append(speed.speedup)
    return {length: math.prod(each) ** (1 / len(each)) for length, each in sorted(ratios.items())}


def _print(report: Report) -> None:
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
    for draft, speeds in report.own_drafts.items():
        out.print(f"\nwith --draft {draft}:")
        _print_speeds(speeds)
    out.print(f"\n{report.verdict}", style="bold" if report.exact else "bold red")


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
    for temperature in TEMPERATURES:
        of_temperature = [speed for speed in speeds if speed.temperature == temperature]
        if not of_temperature:
            continue
        longest = of_temperature[-1]
        shares = "  ".join(f"{share:.2f}" for share in longest.acceptance_by_position)
        out.print(f"accepted up to position 1, 2, ... at temperature {temperature:g}: {shares}")
