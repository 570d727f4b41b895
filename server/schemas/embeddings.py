"""Defines requests and answers of ``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``. Unknown fields are
reported.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from truedraft.server.schemas.answer import is_none
from truedraft.server.schemas.strict import RequestPart

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, min_length=1)]
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1)]
INT32_MAX = 2**31 - 1


class VectorRequest(RequestPart):
    """Has what all requests to models of vectors share."""

    model: str = Field(description="The served name.")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=INT32_MAX,
        description="Cut each text, or pair of texts, to so many tokens, those around it included; -1: to as "
        "many as the model reads. Without it longer texts get 400.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where a text that is too long loses its tokens. Default right: at its end."
    )
    priority: int | None = Field(
        None,
        ge=-INT32_MAX,
        le=INT32_MAX,
        description="Lower goes first (setting `allow_priority`). Default 0.",
    )
    user: str | None = Field(None, description="Accepted, not used.")


class EmbeddingRequest(VectorRequest):
    input: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)] = Field(
        description="A text, several texts, a text's token ids, or those of several texts. Token ids are "
        "taken as they are, without those that the tokenizer would put around a text."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, or base64 of them in float32, little-endian. Default float."
    )
    dimensions: int | None = Field(
        None, ge=1, description="How many numbers of a vector are wanted, of a model that is made for it."
    )
    prompt_name: str | None = Field(
        None, description="Which of the model's prompts stands before each text. Default: the model's own."
    )
    input_type: Literal["query", "document"] | None = Field(
        None, description="Whether the texts are searched for or searched, which chooses the prompt, too."
    )
    normalize: bool | None = Field(
        None, description="Whether vectors have the length 1. Default: as the model's files say."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the tokens that the tokenizer puts around a text. Default true."
    )


class VectorUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: VectorUsage


class DocumentText(RequestPart):
    text: str


class RerankRequest(VectorRequest):
    query: str = Field(description="What the documents are compared with.")
    documents: Annotated[list[str | DocumentText], Field(fail_fast=True, min_length=1)] = Field(
        description="Texts, or objects with a `text`."
    )
    top_n: int | None = Field(
        None, ge=0, description="How many results are wanted, the best ones. Default, and 0: all."
    )
    return_documents: bool | None = Field(
        None, description="Repeat the documents in the answer. Default true."
    )
    instruction: str | None = Field(
        None, description="What the query is for, of a model that is asked in words. Default: its own."
    )

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class RerankResult(BaseModel):
    index: int = Field(description="The document's place in the request.")
    document: dict[str, str] | None = Field(None, exclude_if=is_none)
    relevance_score: float


class RerankAnswer(BaseModel):
    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RerankResult] = Field(description="The best one first.")
    usage: VectorUsage


class ScoreRequest(VectorRequest):
    text_1: str | Texts = Field(description="A text that is paired with each other one, or several.")
    text_2: str | Texts = Field(
        description="One text or several; as many as text_1 has, if that has several."
    )
    instruction: str | None = Field(
        None, description="What text_1 is for, of a model that is asked in words. Default: its own."
    )


class Score(BaseModel):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreAnswer(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage
