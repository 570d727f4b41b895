"""Implements ``truedraft verify-trace``: prints the replay of a traced answer, round by round, and a verdict
in words.

Exit code 0: every decision is confirmed (near ties included); 1: some are not; 2: it cannot be replayed.
Settings are the engine's own, from flags and ``TRUEDRAFT_*``; those about scheduling change nothing here.
"""

import sys
from collections.abc import Mapping
from functools import partial

from transformers.utils import logging as transformers_logging

from truedraft.engine.build import drafting_method
from truedraft.engine.commands.options import ReplaySettings, with_models
from truedraft.engine.commands.replay import DraftKey, Replayer, RoundReport, key_of
from truedraft.engine.commands.replay_round import Fresh, Outcome
from truedraft.engine.commands.trace_file import FEWER, TracedAnswer, TraceFileError, read_answer
from truedraft.engine.config import AUTO
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.messages import ASSISTANT, DRAFT_MODEL, HEADS
from truedraft.engine.models.base import Model
from truedraft.engine.models.heads.assistant import FreshAssistant
from truedraft.engine.models.heads.assistant_file import load_assistant
from truedraft.engine.models.heads.fresh import FreshHead
from truedraft.engine.models.heads.head import Head
from truedraft.engine.models.heads.loader import load_head
from truedraft.engine.models.heads.named_vocabulary import token_ids_of
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import draft_source, load_options
from truedraft.engine.proposers.grammar import GrammarProposer
from truedraft.engine.proposers.ngram import NgramProposer
from truedraft.engine.proposers.prediction import PredictionProposer
from truedraft.engine.proposers.translated.proposer import TranslatedDraftProposer
from truedraft.engine.sampling.grammar import Grammars
from truedraft.engine.sampling.grammar_compiler import GrammarError
from truedraft.engine.sampling.grammar_tokenizer import load_tokenizer

CONFIRMED, REFUTED, UNUSABLE = 0, 1, 2
# Half precision leaves two or three digits of a logit.
TOLERANCES = {"torch.float32": 1e-4, "torch.bfloat16": 0.05, "torch.float16": 0.02}
# These sources draw nothing; tokens that a draft model drew are judged if there is one.
JUDGED = (
    *(GrammarProposer.name, NgramProposer.name, PredictionProposer.name),
    *(TranslatedDraftProposer.trace_source, DRAFT_MODEL, "none"),
)
HEADER = (
    f"{'round':>5} {'position':>8}  {'source':<12}{'rule':<12}"
    f"{'drafted':>7}{'accepted':>9}  {'next':>6}  verdict"
)


def main(settings: ReplaySettings) -> int:
    transformers_logging.disable_progress_bar()
    try:
        answer = read_answer(settings.file)
        replayer = _replayer(with_models(settings), answer)
        return _replay(replayer, answer)
    except (TraceFileError, ModelLoadError, GrammarError) as error:
        print(f"truedraft: {error}", file=sys.stderr)
        return UNUSABLE


def _replayer(settings: ReplaySettings, answer: TracedAnswer) -> Replayer:
    options = load_options(settings)
    assert settings.target is not None  # EngineConfig filled it in.
    if settings.draft == AUTO:
        raise TraceFileError(
            "draft auto is measured anew at each start: name what the server's start says is taken"
        )
    target = FreshModel(settings.target, options)
    drafts: dict[DraftKey, Fresh] = {}
    method = None if settings.draft is None else drafting_method(settings.draft)
    if method == DRAFT_MODEL:
        drafts[DraftKey(DRAFT_MODEL)] = FreshModel(*draft_source(settings))
    elif method is not None and (keys := _keys_of_heads(answer)):
        loaded = target.served or load_model(settings.target, options)
        drafts |= _heads(settings, loaded, keys, answer.draft_vocabularies)
    _check_drawn(answer, drafts)
    grammars = Grammars(partial(load_tokenizer, settings.target, target.vocab_size, target.eos_token_ids))
    tolerance = settings.tolerance or TOLERANCES[str(options.dtype)]
    return Replayer(target, drafts, answer.params, tolerance, grammars)


def _keys_of_heads(answer: TracedAnswer) -> set[DraftKey]:
    keys = {key_of(round_) for round_ in answer.rounds}
    return {key for key in keys if key.source in HEADS and key.head_output not in (None, FEWER)}


def _heads(
    settings: ReplaySettings, target: Model, keys: set[DraftKey], vocabularies: Mapping[str, bytes]
) -> dict[DraftKey, Fresh]:
    """Returns the head or assistant of the settings for each of ``keys``. A head's output layer has all
    tokens, of which some are left out again."""
    assert settings.target is not None
    assert settings.draft is not None
    source, options = draft_source(settings)
    head = load_head(settings.draft, target, settings.target, options)
    if head is None:  # The draft is no model either.
        assistant = FreshAssistant(target, load_assistant(source, target, options))
        return {key: assistant for key in keys if key.source == ASSISTANT}
    outputs: dict[str | None, Head] = {"own": head}
    if any(key.head_output == "int4" for key in keys):
        make = head.model.weights.make_output
        linear = None if make is None else make(None, True)
        if linear is None:
            raise TraceFileError("it was drafted with an output layer in 4 bits, which is not made here")
        outputs["int4"] = head.drafting(None, linear, in_four_bits=True)
    found: dict[DraftKey, Fresh] = {}
    for key in keys:
        if key.source == head.method:
            ids = None if key.vocabulary is None else token_ids_of(vocabularies[key.vocabulary])
            if ids is not None and ids.max(initial=0) >= target.vocab_size:
                raise TraceFileError(
                    f"the draft vocabulary {key.vocabulary} has tokens that the target has not"
                )
            found[key] = FreshHead(target, outputs[key.head_output], ids)
    return found


def _check_drawn(answer: TracedAnswer, drafts: Mapping[DraftKey, Fresh]) -> None:
    """Refuses tokens that were drawn from probabilities that cannot be computed again."""
    for round_ in answer.rounds:
        is_drawn = any(token.draft_prob != 1 for token in round_.drafted)
        if not is_drawn or round_.source in JUDGED or key_of(round_) in drafts:
            continue
        if round_.source not in HEADS:
            raise TraceFileError(
                f"{round_.source} has drawn some of its rounds, which cannot be repeated here"
            )
        if round_.head_output == FEWER:
            raise TraceFileError(
                "a head has drawn some of its rounds from fewer tokens than the target has, and the trace "
                "does not say which, as older ones do not: ask for the answer again"
            )
        raise TraceFileError(
            f"a head has drawn some of its rounds: name that {round_.source} head with --draft"
        )


def _replay(replayer: Replayer, answer: TracedAnswer) -> int:
    reports = []
    for number, choice in enumerate(answer.choices):
        print(f"choice {number}: prompt of {len(choice.prompt_token_ids)} tokens, seed {choice.seed}")
        print(HEADER)
        for report in replayer.replay(choice):
            _print(report)
            reports.append(report)
    outcomes = [report.outcome for report in reports]
    num_wrong = outcomes.count(Outcome.WRONG)
    num_ties = outcomes.count(Outcome.NEAR_TIE)
    drafted = sum(len(report.round.drafted) for report in reports)
    ties = f"; {num_ties} of them near ties, decided by floating-point noise" if num_ties else ""
    if num_wrong:
        first = next(report.number for report in reports if report.outcome is Outcome.WRONG)
        print(f"NOT CONFIRMED: {num_wrong} of {len(reports)} rounds are wrong, first round {first}")
        return REFUTED
    print(f"confirmed: {len(reports)} rounds with {drafted} drafted tokens{ties}")
    return CONFIRMED


def _print(report: RoundReport) -> None:
    round_ = report.round
    print(
        f"{report.number:>5} {round_.position:>8}  {round_.source:<12}{round_.rule:<12}"
        f"{len(round_.drafted):>7}{round_.num_accepted:>9}  {round_.next_token:>6}  {report.outcome.value}"
    )
    for finding in report.findings:
        print(f"      round {report.number}, {finding.outcome.value}: {finding.message}")
