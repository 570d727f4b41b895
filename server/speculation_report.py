"""The ``foretoken`` object of an answer: what speculation did for this request.

Counts come from ``server.generation``; here they become rates, with the method and rule that were in force.
"""

from engine.config import EngineConfig
from engine.messages import Ready, SamplingParams
from server.generation import SpeculationCounts
from server.schemas.common import SpeculationReport


def speculation_report(
    counts: SpeculationCounts, params: SamplingParams, config: EngineConfig, worker: Ready
) -> SpeculationReport:
    return SpeculationReport(
        rounds=counts.rounds,
        drafted_tokens=counts.drafted,
        accepted_tokens=counts.accepted,
        acceptance_rate=counts.accepted / counts.drafted if counts.drafted else None,
        acceptance_length=1 + counts.accepted / counts.rounds if counts.rounds else 1.0,
        method=_method(params, config, worker),
        verification=_verification(params, config),
    )


def _method(params: SamplingParams, config: EngineConfig, worker: Ready) -> str:
    length = params.num_speculative_tokens
    length = config.num_speculative_tokens if length is None else length
    return "draft_model" if length and worker.draft is not None else "none"


def _verification(params: SamplingParams, config: EngineConfig) -> str:
    if params.temperature == 0:
        return "exact_match"  # the rule of greedy decoding, whatever was asked for
    rule = params.verification or config.verification
    if rule == "auto":
        return "rejection" if params.seed is None else "coupled"
    return rule
