"""A checked HTTP request, ready to run: its prompts as tokens, its parameters, and how its text is read.

The routes prepare it (``server.routes.submit``); ``server.generation`` runs it.
"""

from dataclasses import dataclass

import msgspec

from truedraft.engine.messages import Adapter, Generate, SamplingParams
from truedraft.server.text.message_parser import MessageFormat
from truedraft.server.text.prompt import TokenPrompt

# Values in an answer up to which it is written at once: some milliseconds.
SMALL_ANSWER = 5000
# Bytes of memory that a value takes while it is written.
MEMORY_PER_VALUE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """Holds what one HTTP request wants generated."""

    id: str
    endpoint: str
    prompts: list[TokenPrompt]
    params: SamplingParams
    n: int
    priority: int
    cache_prompt: bool
    cache_salt: str
    key: str
    prediction_token_ids: list[int] | None
    stop_strings: list[str]
    include_stop_string: bool
    skip_special_tokens: bool
    echo: bool
    continues_prompt: bool  # with the same text, where a message begins a new one
    report_trace: bool = False
    adapter: Adapter | None = None
    message: MessageFormat | None = None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_values(self) -> int:
        """Estimates what the answer may hold: tokens, and what is reported of each."""
        params = self.params
        per_token = max(params.logprobs or 0, params.prompt_logprobs or 0) + len(params.logprob_token_ids) + 1
        num_tokens = sum(len(prompt.token_ids) for prompt in self.prompts) + params.max_tokens
        return self.num_choices * num_tokens * per_token

    @property
    def may_be_large(self) -> bool:
        """Is true where writing the answer may take long enough for other requests to notice."""
        return self.num_values > SMALL_ANSWER

    @property
    def answer_weight(self) -> int:
        return MEMORY_PER_VALUE * self.num_values

    @property
    def wants_tokens(self) -> bool:
        return self.params.max_tokens > 0

    def prompt_of(self, choice: int) -> TokenPrompt:
        return self.prompts[choice // self.n]

    def engine_params(self) -> SamplingParams | None:
        """Returns what the engine is asked for; None where nothing has to be computed.

        It always generates, so for a prompt's log-probabilities alone one token is asked for and dropped.
        """
        if self.wants_tokens:
            return self.params
        if self.params.prompt_logprobs is None:
            return None
        return msgspec.structs.replace(
            self.params,
            max_tokens=1,
            logprobs=None,
            logprob_token_ids=[],
            num_speculative_tokens=0,
            trace=False,
            origins=False,
        )

    def engine_requests(self) -> list[Generate]:
        """One per prompt, whose number ends its id; none where nothing has to be computed."""
        params = self.engine_params()
        if params is None:
            return []
        return [
            Generate(
                request_id=f"{self.id}-{number}",
                prompt_token_ids=prompt.token_ids,
                params=params,
                n=self.n,
                prediction_token_ids=self.prediction_token_ids,
                priority=self.priority,
                cache_prompt=self.cache_prompt,
                cache_salt=self.cache_salt,
                adapter=self.adapter,
                pictures=list(prompt.pictures),
            )
            for number, prompt in enumerate(self.prompts)
        ]
