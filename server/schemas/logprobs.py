"""Log-probabilities as the two endpoints shape them, and vLLM's shape for those of the prompt."""

from pydantic import BaseModel
from typing_extensions import TypedDict


class CompletionLogprobs(BaseModel):
    """Four lists with one entry per token. The first token of an echoed prompt has no log-probability.

    ``top_logprobs`` also has the token itself, so up to ``logprobs`` + 1 entries. ``text_offset`` is where
    the token starts in the choice's whole text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """``bytes`` are exact, also where ``token`` is part of a character and so has no text of its own."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


# There may be a million of these: as plain dictionaries they cost garbage collections nothing.
class PromptLogprob(TypedDict):
    """``rank`` 1 is the most likely token; one that is not among those asked for has its rank, too."""

    logprob: float
    rank: int
    decoded_token: str


# Keys are token ids. The first prompt token follows nothing: null.
PromptLogprobs = list[dict[int, PromptLogprob] | None]
