"""Request fields that the generating endpoints share, with OpenAI's ranges.

Every field may be null, which means "not given": defaults are filled in by
``server.generation.sampling_params``, their only home. Unknown fields are kept in ``model_extra`` and judged
by ``server.schemas.unsupported_fields``.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from truedraft.engine.messages import DraftSampleMethod, Verification
from truedraft.server.schemas.foreign_parts import OtherPart
from truedraft.server.schemas.strict import RequestPart, alternative, tag
from truedraft.server.schemas.structured import ResponseFormat, StructuredOutputs

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

# The worker gets both once for each prompt.
MAX_STOP_TOKENS = 1024
MAX_SALT_LENGTH = 1024

NonEmptyString = Annotated[str, Field(min_length=1)]


def _as_list(value: object) -> object:
    if not isinstance(value, str | list):
        raise PydanticCustomError("stop_type", "Input should be a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _auto_as_none(value: object) -> object:
    return None if value == "auto" else value


class TextPart(RequestPart):
    """It holds text, by the name that any of OpenAI's endpoints has for it."""

    type: Literal["text", "input_text", "output_text"] = "text"
    text: str


class RefusalPart(RequestPart):
    """It holds what an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _kind_of_part(value: Any) -> str:
    kind = (value.get("type") or "text") if isinstance(value, dict) else None
    if kind in ("text", "input_text", "output_text"):
        return tag("text")
    return tag("refusal") if kind == "refusal" else tag("other")


ContentPart = Annotated[
    Annotated[TextPart, alternative("text")]
    | Annotated[RefusalPart, alternative("refusal")]
    | Annotated[OtherPart, alternative("other")],
    Discriminator(_kind_of_part),
]


def _kind_of_content(value: Any) -> str | None:
    if isinstance(value, str):
        return tag("string")
    return tag("parts") if isinstance(value, list) else None


# Which of the two forms of a content this is, so that an error is about that form only.
CONTENT_KIND = Discriminator(
    _kind_of_content,
    custom_error_type="content_type",
    custom_error_message="Input should be a string or a list of text parts",
)
Content = Annotated[
    Annotated[str, alternative("string")]
    | Annotated[list[ContentPart], Field(fail_fast=True), alternative("parts")],
    CONTENT_KIND,
]


def content_text(content: str | list[TextPart | RefusalPart | OtherPart] | None) -> str:
    """Returns the text of a content; its thoughts and calls are no text."""
    if isinstance(content, list):
        return "\n".join(part.text for part in content if part.text is not None)
    return content or ""


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# transformers' function has arguments of these names; a template's variables may have any other.
RESERVED_IN_TEMPLATES = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"}
    | {"max_length", "messages", "padding", "processor_kwargs", "return_assistant_tokens_mask"}
    | {"return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"}
)


def _not_reserved(values: dict[str, Any]) -> dict[str, Any]:
    for name in values:
        if name in RESERVED_IN_TEMPLATES:
            raise ValueError(f"'{name}' is not a variable of chat templates that requests may set")
    return values


TemplateVariables = Annotated[
    Annotated[dict[str, Any], AfterValidator(_not_reserved)] | None,
    Field(description="Variables for the chat template, such as `enable_thinking`."),
]


class Prediction(RequestPart):
    """OpenAI's predicted outputs: what the answer is expected to be, or most of it."""

    type: Literal["content"]
    content: Annotated[
        Annotated[str, alternative("string")]
        | Annotated[list[TextPart], Field(fail_fast=True), alternative("parts")],
        CONTENT_KIND,
    ]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(RequestPart):
    """Options of streams of `/v1/responses`, whose last event always has the usage."""

    include_obfuscation: bool | None = Field(None, description="Accepted and not needed: nothing is padded.")


class ChunkStreamOptions(StreamOptions):
    """Options of streams of completions and chats."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="Together with include_usage: every chunk carries the usage so far."
    )

    @model_validator(mode="after")
    def _only_with_usage(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats is only allowed with include_usage: true")
        return self


class SpeculationOptions(RequestPart):
    """Controls how one request speculates: its speed changes, its output's distribution never does."""

    method: Literal["auto", "draft_model", "eagle", "mtp", "ngram", "prediction", "grammar", "none"] = Field(
        "auto",
        description="Who drafts; 'auto' leaves it to the engine, which uses a prediction if there is one. "
        "With another method than these two a prediction is not used.",
    )
    num_speculative_tokens: Annotated[
        int | None,
        Field(ge=0, le=32),
        BeforeValidator(_auto_as_none, json_schema_input_type=int | Literal["auto"] | None),
    ] = Field(None, description="Tokens drafted per round; null and 'auto' leave it to the engine.")
    draft_sample_method: DraftSampleMethod | None = Field(
        None,
        description="How a draft model draws its tokens: 'greedy' takes its most likely one, 'probabilistic' "
        "draws with the request's parameters (at temperature 0: as at 1). Null leaves it to the engine, "
        "which draws as the target does. Any verification goes with either.",
    )
    verification: Verification | None = Field(
        None,
        description="How drafted tokens are verified; null leaves it to the engine. 'exact_match' is for "
        "temperature 0, where all are the same.",
    )
    trace: bool = Field(False, description="Report every round: what was drafted, and what was accepted.")
    origins: bool | Literal["sources"] = Field(
        False,
        description="Report with each token's text, in every chunk, where the token came from and "
        "both models' probability of it. 'sources' leaves the probabilities out, which is"
        " faster.",
    )


class SamplingRequest(RequestPart):
    """All generating endpoints have these fields. ``prompt_field`` is the one that holds the prompt."""

    prompt_field: ClassVar[str]

    model: str = Field(description="The served name; `GET /v1/models` tells it.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy. Default 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling. Default 1: off.")
    top_k: int | None = Field(
        None, ge=-1, le=INT64_MAX, description="Keep the k most likely tokens. Default 0: off."
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Drop tokens whose probability is below this share of the most likely one's. "
        "Default 0: off.",
    )
    presence_penalty: float | None = Field(
        None,
        ge=-2,
        le=2,
        description="Subtracted from the logit of every token that the output has. Default 0.",
    )
    frequency_penalty: float | None = Field(
        None,
        ge=-2,
        le=2,
        description="Subtracted from a token's logit for each time that the output has it. Default 0.",
    )
    repetition_penalty: float | None = Field(
        None,
        ge=0.01,
        le=10,
        description="Divides positive logits of tokens that prompt or output have, multiplies negative ones. "
        "Default 1.",
    )
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(fail_fast=True)] | None
    ) = Field(None, description="Added to logits, by token id.")
    seed: int | None = Field(
        None,
        ge=INT64_MIN,
        le=INT64_MAX,
        description="With the same seed and parameters the same tokens come out, whatever else runs.",
    )
    stop: Annotated[
        Annotated[list[NonEmptyString], Field(fail_fast=True)] | None,
        BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None),
    ] = Field(
        None,
        description="Strings that end the text, at most `max_stop_strings`; they are not part of it.",
    )
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None
    ) = Field(None, description="Tokens that end the text, besides the model's own end-of-sequence tokens.")
    include_stop_str_in_output: bool | None = Field(
        None, description="Include the stop string or stop token in the text. Default false."
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
        description="How to speculate; the answer then has a `truedraft` object.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="What the text must match: one of `json`, `regex`, `choice` and `grammar`."
    )
    priority: int | None = Field(
        None,
        ge=INT32_MIN,
        le=INT32_MAX,
        description="Requests with a lower value go first; only with the setting `allow_priority`. "
        "Default 0.",
    )
    cache_prompt: bool | None = Field(
        None,
        description="Share what is computed of the prompt with other requests, through the prefix "
        "cache. Default true.",
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_LENGTH)] | None = Field(
        None,
        description="Share the prefix cache only with requests that have the same salt. Default: with"
        " those that have none.",
    )

    # Accepted because they change nothing about the output.
    user: str | None = Field(None, description="Accepted, not used.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted, not kept.")
    store: bool | None = Field(None, description="Accepted: nothing is ever stored.")
    service_tier: str | None = Field(None, description="Accepted: there is one tier.")
    safety_identifier: str | None = Field(None, description="Accepted, not used.")
    prompt_cache_key: str | None = Field(
        None, description="Accepted, not used: equal prompts share the prefix cache without it."
    )
    prompt_cache_retention: str | None = Field(None, description="Accepted, not used.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Accepted, not used.")


class GenerationRequest(SamplingRequest):
    """Completions and chat completions have these fields, too."""

    n: int | None = Field(
        None, ge=1, description="Choices per prompt, with the prompts at most `max_choices`. Default 1."
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, description="Log-probabilities of the prompt's tokens, and of this many others at each."
    )
    return_token_ids: bool | None = Field(
        None, description="Also return the token ids of prompt and text. Default false."
    )
    stream_options: ChunkStreamOptions | None = Field(None, description="Only with `stream: true`.")
    response_format: ResponseFormat | None = Field(
        None, description="JSON that matches a schema, any JSON object, or any text, which is the default."
    )
    prediction: Prediction | None = Field(
        None,
        description="What the answer is expected to be. A good prediction makes the answer come "
        "sooner; it never changes it.",
    )
