"""Answer parts that the generating endpoints share: usage, choices, the report about speculation."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from truedraft.engine.messages import FinishReason as EngineFinishReason
from truedraft.engine.messages import HeadOutput
from truedraft.server.schemas.logprobs import ChatLogprobs, CompletionLogprobs

FinishReason = EngineFinishReason | Literal["tool_calls"]


def is_none(value: object) -> bool:
    return value is None


class PromptTokensDetails(BaseModel):
    """``cached_tokens`` were taken over from earlier requests, counted once per prompt.

    Choices of one prompt may take over different numbers, as the first computes what the others share: what
    counts is each prompt's first choice, summed over the prompts, as in ``prompt_tokens``.
    """

    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    """The prediction counts are about the client's ``prediction`` only, never about other drafts.

    Accepted are its tokens that appeared in the completion, each counted once per choice; rejected are the
    others. Unlike OpenAI's, ``completion_tokens`` does not include rejected ones: it is what was generated.
    """

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    thinking_budget_spent: bool | None = Field(
        None,
        exclude_if=is_none,
        description="Whether the budget has closed the reasoning of a choice; absent without a budget.",
    )


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = Field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = Field(default_factory=CompletionTokensDetails)


class DraftedToken(BaseModel):
    """Probabilities are as processed by the request's parameters; one-hot at temperature 0."""

    id: int
    target_prob: float
    draft_prob: float
    accepted: bool


class TracedRound(BaseModel):
    """``position`` is the index of the round's first token in prompt plus output. ``head_output`` says which
    output layer a head drafted with: its own, or a copy in 4 bits. ``draft_vocabulary`` names the tokens that
    it drafted, one of the report's ``draft_vocabularies``; absent if it drafted all that it could."""

    position: int
    source: str
    rule: str
    drafted: list[DraftedToken]
    next_token: int
    head_output: HeadOutput | None = None
    draft_vocabulary: str | None = Field(None, exclude_if=is_none)


class SpeculationReport(BaseModel):
    """The ``truedraft`` object stands next to ``usage``. Only rounds that drafted something count.

    ``seeds`` are the choices' own, given or drawn: ``seed`` and ``verification`` set to these reproduce
    the choice. The last four are there only with ``trace``, and are what replaying takes:
    rounds per choice, token ids per prompt, the parameters as the engine took them, and what rounds name as
    draft vocabulary: the base64 of a bitmap with a bit for each token id, the lowest bits first.
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
    draft_vocabularies: dict[str, str] | None = Field(None, exclude_if=is_none)


class TokenOrigin(BaseModel):
    """Tells where one token of the answer came from.

    ``accepted``: drafted by ``source``, and accepted. ``recovered``: drawn by the target in place of a draft
    that it rejected. ``bonus``: drawn after a draft that was accepted whole. ``plain``: of a round without a
    draft. The probabilities are as processed by the request's parameters, one-hot at temperature 0.
    """

    text: str = Field("", description="The texts of all tokens, joined, are the choice's text.")
    token_id: int
    origin: Literal["accepted", "recovered", "bonus", "plain"]
    source: str | None = Field(None, description="Who drafted it; null unless it is accepted.")
    target_prob: float | None = Field(
        None, description='Null where only sources were asked for (`origins: "sources"`).'
    )
    draft_prob: float | None = Field(None, description="Null unless it is accepted; 1 if it was looked up.")


class Choice(BaseModel):
    """``token_ids`` and ``origins`` are there only if a request asks for them."""

    index: int
    logprobs: CompletionLogprobs | ChatLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = Field(
        None,
        exclude_if=is_none,
        description="The stop string or stop token that ended the text; absent for other ends.",
    )
    token_ids: list[int] | None = Field(None, exclude_if=is_none)
    origins: list[TokenOrigin] | None = Field(None, exclude_if=is_none)


class Answer(BaseModel):
    """Top level of every completion, chat completion and chunk, in OpenAI's order.

    A chunk leaves ``usage`` out unless the client asked for it; see ``server.http.sse``.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[Choice]
    usage: Usage | None = None
    truedraft: SpeculationReport | None = Field(None, exclude_if=is_none)
