"""Request fields and answer parts that the generating endpoints share, with OpenAI's ranges.

Every field may be null, which means "not given": defaults are filled in by ``server.sampling_params``,
their only home. Unknown fields are kept in ``model_extra`` and judged by ``server.parameters``.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from engine.messages import FinishReason, Verification
from server.schemas.logprobs import ChatLogprobs, CompletionLogprobs

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

NonEmptyString = Annotated[str, Field(min_length=1)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _auto_as_none(value: object) -> object:
    return None if value == "auto" else value


class StrictModel(BaseModel):
    """JSON as it is: no numbers in strings, no NaN, no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


def kind_of_content(value: Any) -> str | None:
    """Which of the two forms of a content this is, so that an error is about that form only."""
    if isinstance(value, str):
        return "string"
    return "parts" if isinstance(value, list) else None


class Prediction(StrictModel):
    """OpenAI's predicted outputs: what the answer is expected to be, or most of it."""

    type: Literal["content"]
    content: Annotated[
        Annotated[str, Tag("string")] | Annotated[list[TextPart], Tag("parts")],
        Discriminator(
            kind_of_content,
            custom_error_type="content_type",
            custom_error_message="Input should be a string or a list of text parts",
        ),
    ]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(StrictModel):
    """Of `/v1/responses`, whose last event always has the usage."""

    include_obfuscation: Literal[False] | None = Field(None, description="Only false: nothing is padded.")


class ChunkStreamOptions(StreamOptions):
    """Of completions and chats."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the usage.")


class SpeculationOptions(StrictModel):
    """How one request speculates; changes its speed, never its output's distribution."""

    method: Literal["auto", "draft_model", "ngram", "prediction", "none"] = Field(
        "auto",
        description="Who drafts; 'auto' leaves it to the engine, which uses a prediction if there is one. "
        "With another method than these two a prediction is not used.",
    )
    num_speculative_tokens: Annotated[
        int | None,
        Field(ge=0, le=32),
        BeforeValidator(_auto_as_none, json_schema_input_type=int | Literal["auto"] | None),
    ] = Field(None, description="Tokens drafted per round; null and 'auto' leave it to the engine.")
    verification: Verification | None = Field(None, description="Null leaves it to the engine.")
    trace: bool = Field(False, description="Report every round: what was drafted, and how it was judged.")


class SamplingRequest(BaseModel):
    """What all generating endpoints have in common. ``prompt_field`` is the one that holds the prompt."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    prompt_field: ClassVar[str]

    model: str = Field(description="The served name; `GET /v1/models` tells it.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy. Default 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling. Default 1: off.")
    top_k: int | None = Field(
        None, ge=-1, le=INT64_MAX, description="Keep the k likeliest tokens. Default 0: off."
    )
    min_p: float | None = Field(None, ge=0, le=1, description="Drop tokens below this share of the best.")
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="Taken from the logit of every token that has occurred. Default 0."
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="The same, once per occurrence. Default 0."
    )
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=10, description="Divides the logit of every token that has occurred. Default 1."
    )
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="Added to logits, by token id."
    )
    seed: int | None = Field(
        None,
        ge=INT64_MIN,
        le=INT64_MAX,
        description="With the same seed and parameters the same tokens come out, whatever else runs.",
    )
    stop: Annotated[
        list[NonEmptyString] | None,
        Field(max_length=4),
        BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None),
    ] = Field(None, description="Up to 4 strings that end the text; they are not part of it.")
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, description="Tokens that end the text, besides the model's own end-of-sequence tokens."
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="Let the stop string or stop token be part of the text. Default false."
    )
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text. Default true."
    )
    min_tokens: int | None = Field(
        None, ge=0, description="No stop token or stop string counts before this many tokens. Default 0."
    )
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-sequence token. Default false.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, le=INT64_MAX, description="Keep the last tokens of the prompt."
    )
    stream: bool | None = Field(None, description="Answer in server-sent events. Default false.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream: true`.")
    speculation: SpeculationOptions | None = Field(
        None,
        description="How to speculate; the answer then has a `foretoken` object.",
    )
    priority: int | None = Field(
        None, ge=INT64_MIN, le=INT64_MAX, description="Lower goes first, whoever came first. Default 0."
    )
    cache_prompt: bool | None = Field(
        None, description="Share what is computed of the prompt with other requests. Default true."
    )
    cache_salt: NonEmptyString | None = Field(
        None, description="Share it with requests of the same salt only. Default: those without one."
    )

    # Accepted because they change nothing about the output.
    user: str | None = Field(None, description="Accepted, not used.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted, not kept.")
    store: bool | None = Field(None, description="Only false: nothing is ever stored.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="Accepted: there is one tier.")
    safety_identifier: str | None = Field(None, description="Accepted, not used.")
    prompt_cache_key: str | None = Field(None, description="Accepted; equal prompts share without it.")
    prompt_cache_retention: str | None = Field(None, description="Accepted, not used.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Accepted, not used.")


class GenerationRequest(SamplingRequest):
    """What completions and chat completions have in common, besides that."""

    n: int | None = Field(None, ge=1, le=128, description="Choices per prompt. Default 1.")
    prompt_logprobs: int | None = Field(
        None, ge=0, description="Log-probabilities of the prompt's tokens, and of this many others at each."
    )
    return_token_ids: bool | None = Field(
        None, description="Give the token ids of prompt and text too. Default false."
    )
    stream_options: ChunkStreamOptions | None = Field(None, description="Only with `stream: true`.")
    prediction: Prediction | None = Field(
        None, description="What the answer is expected to be: makes it come sooner, never another one."
    )


class PromptTokensDetails(BaseModel):
    """``cached_tokens`` were taken over from earlier requests, counted once per prompt.

    Choices of one prompt may take over different numbers, as the first computes what the others share: what
    counts is each prompt's first choice, summed over the prompts, as in ``prompt_tokens``.
    """

    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    """The prediction counts are about the client's ``prediction`` only, never about other drafts.

    Accepted are its tokens that appeared in the completion, each counted once per choice; rejected are those
    that were tried and did not. Its other tokens count as neither. Unlike OpenAI's, ``completion_tokens``
    does not include rejected ones: it is what was generated.
    """

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


def is_none(value: object) -> bool:
    return value is None


class DraftedToken(BaseModel):
    """Probabilities are as processed by the request's parameters; one-hot at temperature 0."""

    id: int
    target_prob: float
    draft_prob: float
    accepted: bool


class TracedRound(BaseModel):
    """``position`` is the index of the round's first token in prompt plus output."""

    position: int
    source: str
    rule: str
    drafted: list[DraftedToken]
    next_token: int


class SpeculationReport(BaseModel):
    """The ``foretoken`` object beside ``usage``. Only rounds that drafted something count.

    ``seeds`` are the choices' own, given or drawn: with ``seed`` and ``verification`` set to these the
    choice can be had again. The last three are there only with ``trace``, and are what replaying takes:
    rounds per choice, token ids per prompt, and the parameters as the engine took them.
    """

    rounds: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None
    acceptance_length: float
    method: str
    verification: str
    seeds: list[int | None]
    trace: list[list[TracedRound]] | None = Field(None, exclude_if=is_none)
    prompt_token_ids: list[list[int]] | None = Field(None, exclude_if=is_none)
    sampling_params: dict[str, Any] | None = Field(None, exclude_if=is_none)


class Choice(BaseModel):
    """``token_ids`` is there only with ``return_token_ids``."""

    index: int
    logprobs: CompletionLogprobs | ChatLogprobs | None = None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = Field(None, exclude_if=is_none)


class Answer(BaseModel):
    """Top level of every completion, chat completion and chunk, in OpenAI's order.

    A chunk leaves ``usage`` out unless the client asked for it; see ``server.sse``.
    """

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Choice]
    usage: Usage | None = None
    foretoken: SpeculationReport | None = Field(None, exclude_if=is_none)
