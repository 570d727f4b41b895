"""Implements ``truedraft check``: is this pair exact here, and does speculation pay? A report and a verdict
in words.

It loads the pair as the server would, compares the tokenizers, tests exactness (``check_exactness``,
``check_positions``, ``check_law``), says what quantised weights cost (``check_weights``) and measures speed
(``check_speed``), with n-grams on a text that repeats itself, too. A target without a draft is checked with
n-grams. Other drafts that the target could have here are tried for comparison (``check_drafts``). A pair that
is not exact is not measured. Exit code 0: exact; 1: not exact; 2: cannot be loaded. Settings are the engine's
own, from flags and ``TRUEDRAFT_*``.
"""

import json
import sys
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from transformers.utils import logging as transformers_logging

from truedraft.engine.build import build_engine, drafting_method
from truedraft.engine.commands.check_drafts import NGRAM, DraftResult, advice, memory_of, others_to_try
from truedraft.engine.commands.check_exactness import EngineFailedError, Resolution, check_greedy
from truedraft.engine.commands.check_grammar import check_grammar
from truedraft.engine.commands.check_law import check_law
from truedraft.engine.commands.check_positions import LongTexts, check_positions, long_texts
from truedraft.engine.commands.check_report import Comparisons, Report, print_report, verdict_of
from truedraft.engine.commands.check_speed import Speed, measure
from truedraft.engine.commands.check_weights import WeightsResult, check_weights
from truedraft.engine.commands.options import CheckSettings, with_models
from truedraft.engine.config import AUTO, SELF_DRAFTS, EngineConfig
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.library.chat_template import ChatTemplate
from truedraft.engine.messages import WITH_DRAFT, Method, Verification
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.options import draft_source, load_options
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.proposers.ngram import NgramProposer
from truedraft.engine.proposers.translated.pairing import TokenizerResult, load_tokenizer, pair_models
from truedraft.engine.terminal import Stages, stages

EXACT, NOT_EXACT, CANNOT_LOAD = 0, 1, 2
PROMPTS = [
    "Once upon a time there was a",
    "The old man looked at the sea and said:",
    "In the morning the children went to",
    "The capital of France is",
]
# N-grams find nothing in texts like these. Their gain is measured on a text that says a sentence again.
REPEATED = (
    "Every evening the keeper climbed the narrow stairs of the old tower and lit the lamp for the ships. "
)
NUM_REPEATS = 3
MAX_PROMPT_TOKENS = 512
GREEDY_LENGTHS, GREEDY_TOKENS = (1, 4, 8), 32
NUM_TIMED_PROMPTS = 2
DEFAULT_LENGTH = 4  # These lengths are measured where the setting leaves the length to the policy.
SPEED_LENGTHS, TEMPERATURES = (2, 4, 8), (0.0, 1.0)
RULES: tuple[Verification, ...] = ("rejection", "block", "coupled")
# Each further draft has a stage of loading; their number is known once the target is loaded.
NUM_STAGES = 6 + len(RULES) + 2 * len(TEMPERATURES) + len(SELF_DRAFTS)
# Logits closer than this may change places when they are computed in another shape.
SAME_KERNELS = 1e-5
RESOLUTIONS = {"torch.float32": 1e-3, "torch.bfloat16": 0.1, "torch.float16": 0.02}


def main(settings: CheckSettings) -> int:
    transformers_logging.disable_progress_bar()
    try:
        with stages(NUM_STAGES) as progress:
            report = check(with_models(settings), progress)
    except (ModelLoadError, RequestError, OSError) as error:
        print(f"truedraft: {error}", file=sys.stderr)
        return CANNOT_LOAD
    # The engine checks its own invariants by assertions.
    except (EngineFailedError, AssertionError) as error:
        print(f"NOT EXACT: the engine failed: {error}", file=sys.stderr)
        return NOT_EXACT
    if settings.json_output:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        print_report(report)
    return EXACT if report.exact else NOT_EXACT


def check(settings: CheckSettings, progress: Stages) -> Report:
    """Returns the findings; raises ``EngineFailedError`` if the engine itself ends a text."""
    assert settings.target is not None  # EngineConfig filled it in.
    progress.begin("The target by itself")
    tokenizer = load_tokenizer(settings.target)
    prompts_of = _Prompts(tokenizer, settings)
    # The reference is gone before the engine comes: a large target fits into memory only once.
    expected = _expected(settings, tokenizer)
    length = DEFAULT_LENGTH if settings.num_speculative_tokens == "auto" else settings.num_speculative_tokens
    progress.begin("Loading the models")
    core = _pair(settings, length)
    prompts = prompts_of.token_ids(core.target.vocab_size)
    compared = _compare(core, prompts, expected, length, settings.samples, progress)
    if compared.failures:
        return _report(core, settings, compared, [], [])
    names_source = core.drafter is not None or settings.method != "auto"
    speculates = core.snapshot().num_speculative_tokens > 0
    speeds = _speeds(core, prompts, settings, length, progress) if speculates and names_source else []
    ngrams = _ngram_speeds(core, tokenizer, settings, progress) if length else []
    report = _report(core, settings, compared, speeds, ngrams)
    if not settings.compare or not length:
        return report
    given = _name(settings, core)
    results = [DraftResult(given, speeds, memory_of(core))] if speeds else []
    if not (speeds and given == NGRAM) and core.admission.encoder_decoder is None:
        results.append(DraftResult(NGRAM, _speeds(core, prompts, settings, length, progress, NGRAM)))
    others = others_to_try(settings, core, settings.compare_with)
    del core  # A large target fits into memory only once.
    for draft in others:
        result = _try(draft, settings, prompts, length, progress)
        if result.speeds or draft in settings.compare_with:
            results.append(result)
    return replace(report, drafts=results, advice=advice(results, given))


def _pair(settings: CheckSettings, length: int) -> EngineCore:
    """Returns the engine to check: with the draft of the settings, or with the one that it has chosen
    itself."""
    core = build_engine(EngineConfig(**_fields(settings, length)))
    if settings.draft == AUTO and settings.method == "auto" and length:
        method = NgramProposer.name if core.drafter is None else drafting_method(core.drafter)
        core.admission = replace(core.admission, method=method)
    return core


def _fields(settings: CheckSettings, length: int, **others: Any) -> dict[str, Any]:
    """Returns the engine's own settings: lengths are measured one by one, so the policy must not choose
    them. The same prompts come again and again, so what they were answered must not help."""
    fields = {name: getattr(settings, name) for name in EngineConfig.model_fields}
    fields |= {"num_speculative_tokens": length, "ngram_pool_tokens": 0}
    if settings.method == "auto" and length:
        # The pair is to be checked, not n-grams.
        draft = settings.draft
        fields["method"] = NgramProposer.name if draft is None else drafting_method(draft)
    return fields | others


def _compare(
    core: EngineCore,
    prompts: list[list[int]],
    expected: "_Expected",
    length: int,
    num_samples: int,
    progress: Stages,
) -> Comparisons:
    speculates = core.snapshot().num_speculative_tokens > 0
    lengths = GREEDY_LENGTHS if speculates else (0,)
    num_tokens = min(GREEDY_TOKENS, core.admission.room(max(map(len, prompts))))
    rounding = RESOLUTIONS[str(core.target.model.dtype)]
    # Passes in C give the same bits however many tokens they compute, so that no tie of rounded weights is
    # excused.
    gaps = 0.0 if isinstance(core.target.fast_pass, NativeDecoder) else rounding
    resolution = Resolution(0.0 if expected.weights is not None else gaps, gaps)
    progress.begin("Greedy text")
    greedy = check_greedy(core, prompts, lengths, num_tokens, resolution)
    progress.begin("Long texts together with short ones")
    reference = expected.reference, rounding if expected.weights is None else SAME_KERNELS
    positions = check_positions(
        core, expected.long_texts, length if speculates else 0, resolution, *reference
    )
    progress.begin("Text of a grammar")
    grammar = check_grammar(core, prompts, lengths, num_tokens, resolution)
    sampling = []
    for rule in RULES:
        progress.begin(f"Samples under {rule} verification")
        # A position that counts whether or not a round reaches it needs more texts to show as much.
        number = 2 * num_samples if rule == "block" else num_samples
        sampling.append(check_law(core, prompts, rule, number, resolution.gaps))
    return Comparisons(expected.weights, greedy, positions, grammar, sampling)


def _report(
    core: EngineCore,
    settings: CheckSettings,
    compared: Comparisons,
    speeds: list[Speed],
    ngrams: list[Speed],
) -> Report:
    assert settings.target is not None
    method, failures = core.admission.method, compared.failures
    return Report(
        target=settings.target,
        draft=core.drafter if method in WITH_DRAFT else None,
        method=method,
        device=str(core.target.device),
        dtype=str(core.target.model.arithmetic).removeprefix("torch."),
        tokenizers=_tokenizers(core, settings),
        **vars(compared),
        speeds=speeds,
        ngrams=ngrams,
        drafts=[],
        advice="",
        exact=not failures,
        verdict=verdict_of(failures, speeds, ngrams, settings.num_speculative_tokens, method),
    )


def _name(settings: CheckSettings, core: EngineCore) -> str:
    """Returns the value of the setting ``draft`` for the draft that is checked."""
    return core.drafter if core.drafter and core.admission.method in WITH_DRAFT else core.admission.method


def _try(
    draft: str, settings: CheckSettings, prompts: list[list[int]], length: int, progress: Stages
) -> DraftResult:
    """Measures another draft, with the target loaded again."""
    progress.begin(f"Trying {draft}")
    fields = _fields(settings, length, draft=draft, method=drafting_method(draft))
    try:
        core = build_engine(EngineConfig(**fields))
    except (ModelLoadError, OSError) as error:
        return DraftResult(draft, [], reason=str(error))
    return DraftResult(draft, _speeds(core, prompts, settings, length, None), memory_of(core))


class _Prompts:
    """Writes prompts in the target's tokens: texts to be continued, or a user's questions."""

    def __init__(self, tokenizer: Any | None, settings: CheckSettings) -> None:
        self.tokenizer = tokenizer
        self.texts = PROMPTS
        self.template: ChatTemplate | None = None
        if settings.prompts is not None:
            self.texts = [text for text in settings.prompts.read_text().splitlines() if text.strip()]
            if not self.texts:
                raise RequestError("empty_prompt", f"{settings.prompts} has no prompts: write one a line")
            template = None if tokenizer is None else ChatTemplate(tokenizer)
            if settings.chat and template is not None and template.exists:
                self.template = template

    def token_ids(self, vocab_size: int) -> list[list[int]]:
        """Returns the token ids of all prompts."""
        if self.template is None:
            return [
                _encode(self.tokenizer, text, number, vocab_size) for number, text in enumerate(self.texts)
            ]
        messages = [[{"role": "user", "content": text}] for text in self.texts]
        return [self.template.token_ids(each, {})[:MAX_PROMPT_TOKENS] for each in messages]


@dataclass(frozen=True)
class _Expected:
    """Holds the target's outputs as computed without the engine; ``reference`` names the code that computed
    them."""

    reference: str
    weights: WeightsResult | None
    long_texts: LongTexts


def _expected(settings: CheckSettings, tokenizer: Any | None) -> _Expected:
    assert settings.target is not None
    options = load_options(settings)
    target = FreshModel(settings.target, options)
    reference = "transformers' layers" if target.served is None else "passes by themselves"
    texts = long_texts(target, settings.max_model_len, settings.long_seconds)
    return _Expected(reference, check_weights(target, settings.target, options, tokenizer), texts)


def _encode(tokenizer: Any | None, text: str, number: int, vocab_size: int) -> list[int]:
    """Returns token ids of a text; without a tokenizer any ids will do."""
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
    core: EngineCore,
    prompts: list[list[int]],
    settings: CheckSettings,
    length: int,
    progress: Stages | None,
    method: Method | None = None,
) -> list[Speed]:
    """Returns the speeds of ``method``, or of the engine's own choice."""
    lengths = sorted({*SPEED_LENGTHS, length})
    seconds = settings.seconds / len(TEMPERATURES)
    speeds = []
    for temperature in TEMPERATURES:
        if progress is not None:
            drafts = "" if method is None else f" of {method}"
            progress.begin(f"Speed{drafts} at temperature {temperature:g}")
        timed = prompts[:NUM_TIMED_PROMPTS]
        speeds += measure(core, timed, lengths, temperature, settings.repeats, seconds, method)
    return speeds


def _ngram_speeds(
    core: EngineCore, tokenizer: Any | None, settings: CheckSettings, progress: Stages
) -> list[Speed]:
    """Returns the speeds of n-grams where the text repeats itself; they cost little elsewhere."""
    if core.admission.encoder_decoder is not None:
        return []
    progress.begin("Speed of n-grams")
    prompt = NUM_REPEATS * _encode(tokenizer, REPEATED, 0, core.target.vocab_size)
    prompt = prompt[-max(1, core.admission.room(0) // 2) :]
    seconds = settings.seconds / len(TEMPERATURES)
    return measure(core, [prompt], SPEED_LENGTHS, 0.0, settings.repeats, seconds, NgramProposer.name)
