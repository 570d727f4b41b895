"""Says what the text must match: OpenAI's response formats, and ``structured_outputs`` as vLLM has it."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, model_validator

from truedraft.server.schemas.answer import is_none
from truedraft.server.schemas.strict import RequestPart, alternative, tag

JsonSchema = Annotated[dict[str, Any], Field(description="A JSON schema.")]


class TextFormat(RequestPart):
    """The answer is any text."""

    type: Literal["text"] = "text"


class JsonObjectFormat(RequestPart):
    """The answer is a JSON object."""

    type: Literal["json_object"]


class NamedSchema(RequestPart):
    model_config = ConfigDict(serialize_by_alias=True)

    name: str = Field("response", description="Not used.")
    description: str | None = Field(None, description="Not used.")
    json_schema: JsonSchema = Field(alias="schema")
    strict: bool | None = Field(
        None,
        description="The text matches the schema either way. If true, a `pattern` or `format` that cannot be "
        "enforced is an error; else it is left out.",
    )


class JsonSchemaFormat(RequestPart):
    """JSON that matches a schema, in the form of chats and completions."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatJsonSchemaFormat(NamedSchema):
    """JSON that matches a schema, in the form of `/v1/responses`."""

    type: Literal["json_schema"]


def _kind_of_format(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return tag(kind) if kind in ("text", "json_object", "json_schema") else None


_KIND = Discriminator(
    _kind_of_format,
    custom_error_type="format_type",
    custom_error_message="Input should be an object of type 'text', 'json_object' or 'json_schema'",
)
ResponseFormat = Annotated[
    Annotated[TextFormat, alternative("text")]
    | Annotated[JsonObjectFormat, alternative("json_object")]
    | Annotated[JsonSchemaFormat, alternative("json_schema")],
    _KIND,
]
FlatFormat = Annotated[
    Annotated[TextFormat, alternative("text")]
    | Annotated[JsonObjectFormat, alternative("json_object")]
    | Annotated[FlatJsonSchemaFormat, alternative("json_schema")],
    _KIND,
]


class TextOptions(RequestPart):
    """Says what the text of a `/v1/responses` answer has to match."""

    format: FlatFormat = Field(TextFormat(), description="Format that the text must have.")
    verbosity: str | None = Field(None, exclude_if=is_none, description="Accepted, not used.")


class StructuredOutputs(RequestPart):
    """Says, in one of four ways, what the text must match."""

    json_schema: Annotated[dict[str, Any] | str, Field(union_mode="left_to_right")] | None = Field(
        None, alias="json", description="JSON that matches a schema, given as an object or written out."
    )
    regex: str | None = Field(None, description="A regular expression, for the whole text.")
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="One of these texts."
    )
    grammar: str | None = Field(None, description="A context-free grammar in Lark's notation.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("exactly one of json, regex, choice and grammar must be given")
        return self
