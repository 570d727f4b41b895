"""Log and trace tell this about a request once it has ended; ``server.generation`` makes it."""

from dataclasses import dataclass
from typing import Any

from truedraft.server.schemas.answer import Usage
from truedraft.server.text.choice import AnswerCounts

# Where a route leaves a function in the request's state that sums up its generation.
SUMMARY = "summary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Says what became of a request. Times are since its first byte; ``prepared_seconds`` when the engine got
    it, and ``queue_seconds`` how long it waited there."""

    id: str
    usage: Usage
    speculation: AnswerCounts
    num_rounds: int
    seconds: float
    prepared_seconds: float
    queue_seconds: float | None
    first_token_seconds: float | None
    finish_reasons: list[str]  # "error" for choices that failed, "aborted" for those whose client left
    error: str | None = None  # its code

    def log_fields(self) -> dict[str, Any]:
        """Returns them as the log names them."""
        fields: dict[str, Any] = {
            "id": self.id,
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.prompt_tokens_details.cached_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "drafted": self.speculation.drafted,
            "accepted": self.speculation.accepted,
            "finish": ",".join(sorted(set(self.finish_reasons))),
        }
        if self.error is not None:
            fields["code"] = self.error
        for name in ("queue_seconds", "first_token_seconds"):
            if (seconds := getattr(self, name)) is not None:
                fields[name] = round(seconds, 6)
        return fields
