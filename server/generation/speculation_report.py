"""The ``truedraft`` object of an answer says what speculation did for the request; it may have a trace.

Counts, seeds and traces come from ``server.generation``; here they get the method, the rule and the
parameters that applied.
"""

from base64 import b64encode
from typing import Any

import msgspec

from truedraft.engine.config import EngineConfig
from truedraft.engine.messages import (
    DraftSampleMethod,
    Method,
    Ready,
    RoundTrace,
    SamplingParams,
    Verification,
)
from truedraft.server.generation.generation import Generation
from truedraft.server.schemas.answer import DraftedToken, SpeculationReport, TracedRound


def speculation_report(generation: Generation, config: EngineConfig, worker: Ready) -> SpeculationReport:
    counts, prepared = generation.counts, generation.prepared
    is_predicted = bool(prepared.prediction_token_ids)
    params = _effective_params(prepared.engine_params() or prepared.params, config, worker, is_predicted)
    report = SpeculationReport(
        rounds=counts.rounds,
        drafted_tokens=counts.drafted,
        accepted_tokens=counts.accepted,
        acceptance_rate=counts.accepted / counts.drafted if counts.drafted else None,
        acceptance_length=1 + counts.accepted / counts.rounds if counts.rounds else 1.0,
        method="none" if params.num_speculative_tokens == 0 else str(params.method),
        verification=_rule(params),
        seeds=[choice.seed for choice in generation.choices],
    )
    if prepared.report_trace:
        report.trace = [[_traced(round_) for round_ in choice.trace] for choice in generation.choices]
        report.prompt_token_ids = [prompt.token_ids for prompt in prepared.prompts]
        report.sampling_params = _as_json(params)
        report.draft_vocabularies = _vocabularies(generation) or None
    return report


def _vocabularies(generation: Generation) -> dict[str, str]:
    """Returns the tokens of each vocabulary that rounds name, once for all choices."""
    told = (round_.vocabulary for choice in generation.choices for round_ in choice.trace)
    return {each.digest: b64encode(each.bitmap).decode() for each in told if each and each.bitmap is not None}


def _effective_params(
    params: SamplingParams, config: EngineConfig, worker: Ready, is_predicted: bool
) -> SamplingParams:
    """Fills in the engine's own settings where the request left them open."""
    asked = params.num_speculative_tokens
    configured = None if config.num_speculative_tokens == "auto" else config.num_speculative_tokens
    length = configured if asked is None else asked
    method = params.method or _method(worker, is_predicted)
    return msgspec.structs.replace(
        params,
        method=method,
        num_speculative_tokens=0 if method == "none" else length,
        draft_sample_method=params.draft_sample_method or _configured_draws(config),
        verification=params.verification or _configured(params, config),
    )


def _method(worker: Ready, is_predicted: bool) -> Method:
    """A prediction is used in addition to any other draft source."""
    if not is_predicted:
        return worker.method
    return "prediction" if worker.method == "none" else "auto"


def _configured(params: SamplingParams, config: EngineConfig) -> Verification:
    if config.verification != "auto":
        return config.verification
    return "rejection" if params.seed is None else "coupled"


def _configured_draws(config: EngineConfig) -> DraftSampleMethod | None:
    return None if config.draft_sample_method == "auto" else config.draft_sample_method


def _rule(params: SamplingParams) -> str:
    """Greedy decoding has its own rule, whatever was asked for."""
    is_greedy = params.temperature == 0 or params.top_k == 1
    return "exact_match" if is_greedy else str(params.verification)


def _traced(round_: RoundTrace) -> TracedRound:
    drafted = zip(round_.draft_ids, round_.target_probs, round_.draft_probs, strict=True)
    return TracedRound(
        position=round_.position,
        source=round_.source,
        rule=round_.rule,
        drafted=[
            DraftedToken(
                id=token_id,
                target_prob=target_prob,
                draft_prob=draft_prob,
                accepted=number < round_.num_accepted,
            )
            for number, (token_id, target_prob, draft_prob) in enumerate(drafted)
        ],
        next_token=round_.next_token,
        head_output=round_.head_output,
        draft_vocabulary=None if round_.vocabulary is None else round_.vocabulary.digest,
    )


def _as_json(params: SamplingParams) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(params, str_keys=True)
    return plain
