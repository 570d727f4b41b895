"""Request fields that the generating endpoints share, with OpenAI's ranges.

Every field may be null, which means "not given": defaults are filled in by
``server.generation.sampling_params``, their only home. Unknown fields are kept in ``model_extra`` and judged
by ``server.schemas.unsupported_fields``.
"""

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from truedraft.engine.parameters import (
    FILLING,
    INT64_MAX,
    MAX_LOGPROB_TOKENS,
    MAX_STOP_TOKENS,
    PARAMETERS,
    DraftSampleMethod,
    Verification,
)
from truedraft.server.schemas.foreign_parts import OtherPart
from truedraft.server.schemas.strict import RequestPart, alternative, tag
from truedraft.server.schemas.structured import ResponseFormat, StructuredOutputs

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

# The worker gets it once for each prompt.
MAX_SALT_LENGTH = 1024

NonEmptyString = Annotated[str, Field(min_length=1)]


def said(name: str, default: Any = None) -> Any:
    """Returns the field of a parameter as its row describes it. ``default`` None: the row's own is filled in
    where the engine's parameters are made."""
    row = PARAMETERS[name]
    description = row.description if default is None else row.help
    return Field(default, **_limits(name), description=description)


def _limits(name: str) -> dict[str, Any]:
    """Returns the range of a parameter that is a number, as pydantic has it; of others there is none."""
    row = PARAMETERS[name]
    return {} if row.range is None or row.default in ([], {}) else row.range.limits


def within(name: str) -> Any:
    """Returns the range of the numbers that a parameter holds."""
    held = PARAMETERS[name].range
    assert held is not None
    limits: dict[str, Any] = {**held.limits}
    return Field(**limits)


def _as_list(value: object) -> object:
    if not isinstance(value, str | list):
        raise PydanticCustomError("stop_type", "Input should be a string or a list of strings")
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[
    Annotated[list[NonEmptyString], Field(fail_fast=True)] | None,
    BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None),
]


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

    method: Literal[
        "auto", "draft_model", "eagle", "mtp", "assistant", "ngram", "prediction", "grammar", "none"
    ] = said("method", "auto")
    num_speculative_tokens: Annotated[
        int | None,
        within("num_speculative_tokens"),
        BeforeValidator(_auto_as_none, json_schema_input_type=int | Literal["auto"] | None),
    ] = Field(None, description=PARAMETERS["num_speculative_tokens"].help)
    draft_sample_method: DraftSampleMethod | None = said("draft_sample_method")
    verification: Verification | None = said("verification")
    trace: bool = said("trace", False)
    origins: bool | Literal["sources"] = said("origins", False)


B = TypeVar("B", bound=RequestPart)


class _NamedModel(RequestPart):
    model: str = Field(description="The served name; `GET /v1/models` tells it.")


def with_parameters(base: type[B]) -> type[B]:
    """Returns a class with a field of its name for each parameter that is one number of a row."""
    fields: dict[str, Any] = {row.name: (row.type | None, said(row.name)) for row in FILLING}
    return create_model(f"{base.__name__}Drawn", __base__=base, **fields)


_Drawn = with_parameters(_NamedModel)


class SamplingRequest(_Drawn):  # type: ignore[misc, valid-type]  # mypy knows no class that is made
    """All generating endpoints have these fields. ``prompt_field`` is the one that holds the prompt."""

    prompt_field: ClassVar[str]

    logit_bias: Annotated[dict[str, Annotated[float, within("logit_bias")]], Field(fail_fast=True)] | None = (
        said("logit_bias")
    )
    seed: int | None = said("seed")
    stop: StopStrings = Field(
        None,
        description="Strings that end the text, at most `max_stop_strings`; they are not part of it.",
    )
    stop_token_ids: (
        Annotated[
            list[Annotated[int, within("stop_token_ids")]],
            Field(fail_fast=True, max_length=MAX_STOP_TOKENS),
        ]
        | None
    ) = said("stop_token_ids")
    include_stop_str_in_output: bool | None = Field(
        None, description="Include the stop string or stop token in the text. Default false."
    )
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text. Default true."
    )
    min_tokens: int | None = said("min_tokens")
    ignore_eos: bool | None = said("ignore_eos")
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


class ThinkingBudget(RequestPart):
    """Requests whose answers may begin with reasoning have these names of one limit."""

    thinking_budget: int | None = said("thinking_budget")
    thinking_token_budget: int | None = Field(None, ge=0, description="vLLM's name of thinking_budget.")

    @property
    def budgets(self) -> dict[str, int]:
        """Returns what the request says, by the names that it uses."""
        said_by = {name: getattr(self, name) for name in ThinkingBudget.model_fields}
        return {name: value for name, value in said_by.items() if value is not None}

    @property
    def budget(self) -> tuple[str, int] | None:
        """Returns the limit and one of its names."""
        return next(iter(self.budgets.items()), None)

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if len({*self.budgets.values()}) > 1:
            raise ValueError(f"{' and '.join(self.budgets)} are the same limit; give one of them")
        return self


class GenerationRequest(SamplingRequest):
    """Completions and chat completions have these fields, too."""

    n: int | None = Field(
        None, ge=1, description="Choices per prompt, with the prompts at most `max_choices`. Default 1."
    )
    logprob_token_ids: (
        Annotated[
            list[Annotated[int, within("logprob_token_ids")]],
            Field(fail_fast=True, max_length=MAX_LOGPROB_TOKENS),
        ]
        | None
    ) = said("logprob_token_ids")
    prompt_logprobs: int | None = said("prompt_logprobs")
    prompt_logprobs_start: int | None = said("prompt_logprobs_start")
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
