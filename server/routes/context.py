"""One submitted request, as the routes see it while they write its answer."""

from dataclasses import dataclass
from typing import Any

from truedraft.engine.messages import TokenLogprob
from truedraft.server.generation.generation import Generation
from truedraft.server.generation.speculation_report import speculation_report
from truedraft.server.leniency import Leniency
from truedraft.server.models.served import Model
from truedraft.server.schemas.answer import SpeculationReport, TokenOrigin
from truedraft.server.schemas.common import ChunkStreamOptions, GenerationRequest, SamplingRequest
from truedraft.server.schemas.logprobs import PromptLogprobs
from truedraft.server.services import Services
from truedraft.server.text.logprobs import prompt_logprobs


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """One submitted request, and what every answer and chunk of it repeats."""

    body: SamplingRequest
    generation: Generation
    model: Model
    services: Services
    leniency: Leniency
    created: int

    def header(self) -> dict[str, Any]:
        return {
            "id": self.generation.prepared.id,
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": self.model.fingerprint,
        }

    def totals(self) -> dict[str, Any]:
        """``usage``, and ``truedraft`` for a client that spoke of speculation."""
        return {"usage": self.generation.usage(), "truedraft": self.report()}

    def report(self) -> SpeculationReport | None:
        if self.body.speculation is None:
            return None
        return speculation_report(self.generation, self.model.settings, self.model.worker)

    def ending(self) -> dict[str, Any]:
        """Returns the report for a choice's last chunk, if the answer ends here and no usage follows."""
        is_last = self.generation.is_complete and not self.include_usage
        return {"truedraft": self.report()} if is_last else {}

    def prompt_logprobs(self, scored: list[TokenLogprob | None] | None) -> PromptLogprobs | None:
        """``scored`` is missing where there is nothing to say: for a prompt of one token."""
        if not isinstance(self.body, GenerationRequest) or self.body.prompt_logprobs is None:
            return None
        return prompt_logprobs(scored or [None], self.body.prompt_logprobs, self.model.tokenizer.vocabulary)

    def token_ids(self, token_ids: list[int]) -> list[int] | None:
        is_asked_for = isinstance(self.body, GenerationRequest) and self.body.return_token_ids
        return token_ids if is_asked_for else None

    def origins(self, origins: list[TokenOrigin]) -> list[TokenOrigin] | None:
        return origins if self.generation.prepared.params.origins else None

    @property
    def include_usage(self) -> bool:
        options = self.body.stream_options
        return isinstance(options, ChunkStreamOptions) and bool(options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.body.stream_options
        return isinstance(options, ChunkStreamOptions) and bool(options.continuous_usage_stats)
