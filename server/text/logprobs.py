"""The engine's log-probabilities in the shapes clients know: completions, chats, and vLLM's for prompts.

They are the target's, of its raw logits. No two entries may fall together because their texts are equal, so
tokens without a text of their own are written as bytes and a second equal text as ``token_id:7``.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from truedraft.engine.messages import TokenLogprob
from truedraft.engine.text.vocabulary import Vocabulary
from truedraft.server.schemas.logprobs import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from truedraft.server.text.prompt import TokenPrompt
from truedraft.server.text.tokenizer import Tokenizer

# OpenAI's number for "very unlikely": JSON has no minus infinity.
VERY_UNLIKELY = -9999.0

# What OpenAI puts before the bytes of a completion's token that has no text of its own.
BYTES_MARK = "bytes:"


class ScoredToken(NamedTuple):
    """A token has its log-probability and the most likely ones in its place; its text starts at ``offset``.

    ``logprob`` is None for the first token of a prompt, which follows nothing.
    """

    token_id: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    offset: int
    given: Sequence[tuple[int, float]] = ()

    @classmethod
    def of(cls, scored: TokenLogprob, offset: int) -> Self:
        return cls(scored.token_id, scored.logprob, scored.top, offset, scored.given)

    def others(self, count: int) -> dict[int, float]:
        """Returns the most likely tokens, and those that the request names, each once. The engine may have
        been asked for more of the former, for the sake of another field."""
        return dict(self.top[:count]) | dict(self.given)


def completion_logprobs(
    tokens: Sequence[ScoredToken], num_top: int, vocabulary: Vocabulary
) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[vocabulary.text_of(token.token_id, BYTES_MARK) for token in tokens],
        token_logprobs=[None if token.logprob is None else _finite(token.logprob) for token in tokens],
        top_logprobs=[_top_by_text(token, num_top, vocabulary) for token in tokens],
        text_offset=[token.offset for token in tokens],
    )


def chat_logprobs(tokens: Iterable[ScoredToken], num_top: int, vocabulary: Vocabulary) -> ChatLogprobs:
    content = []
    for token in tokens:
        assert token.logprob is not None
        chosen = _top_logprob(token.token_id, token.logprob, vocabulary)
        top = [_top_logprob(*entry, vocabulary) for entry in token.others(num_top).items()]
        content.append(ChatTokenLogprob(**chosen.model_dump(), top_logprobs=top))
    return ChatLogprobs(content=content)


def prompt_logprobs(
    scored: Sequence[TokenLogprob | None], num_top: int, vocabulary: Vocabulary
) -> PromptLogprobs:
    return [None if token is None else _prompt_entry(token, num_top, vocabulary) for token in scored]


def echoed_tokens(
    prompt: TokenPrompt, scored: Sequence[TokenLogprob | None], tokenizer: Tokenizer
) -> list[ScoredToken]:
    """The prompt's tokens, placed in the text that ``echo`` repeats."""
    offsets = _offsets_in_prompt(prompt, tokenizer)
    return [
        ScoredToken(token_id, None, [], offset) if token is None else ScoredToken.of(token, offset)
        for token_id, token, offset in zip(prompt.token_ids, scored, offsets, strict=True)
    ]


def _offsets_in_prompt(prompt: TokenPrompt, tokenizer: Tokenizer) -> list[int]:
    """A token that the tokenizer put before the text, such as a begin token, is at 0 like the first one."""
    stream = tokenizer.stream(skip_special_tokens=False)
    offsets, decoded = [], ""
    for token_id in prompt.token_ids:
        offsets.append(len(decoded))
        decoded += stream.step(token_id)
    decoded += stream.flush()
    surplus = len(decoded) - len(prompt.text) if decoded.endswith(prompt.text) else 0
    return [min(max(0, offset - surplus), len(prompt.text)) for offset in offsets]


def _top_by_text(token: ScoredToken, num_top: int, vocabulary: Vocabulary) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    own_text = vocabulary.text_of(token.token_id, BYTES_MARK)
    by_text: dict[str, float] = {}
    for token_id, logprob in _with_chosen(token.token_id, token.logprob, token.others(num_top)):
        text = vocabulary.text_of(token_id, BYTES_MARK)
        is_taken = token_id != token.token_id and (text == own_text or text in by_text)
        by_text[f"token_id:{token_id}" if is_taken else text] = _finite(logprob)
    return by_text


def _prompt_entry(token: TokenLogprob, num_top: int, vocabulary: Vocabulary) -> dict[int, PromptLogprob]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.top, start=1)}
    return {
        token_id: PromptLogprob(
            logprob=_finite(logprob),
            rank=ranks.get(token_id, token.rank),
            decoded_token=vocabulary.text_of(token_id),
        )
        for token_id, logprob in _with_chosen(token.token_id, token.logprob, dict(token.top[:num_top]))
    }


def _with_chosen(token_id: int, logprob: float, others: dict[int, float]) -> Iterable[tuple[int, float]]:
    """Returns the other tokens, and the chosen one if it is not among them."""
    return {**others, token_id: others.get(token_id, logprob)}.items()


def _top_logprob(token_id: int, logprob: float, vocabulary: Vocabulary) -> TopLogprob:
    raw = vocabulary.bytes_of(token_id)
    return TopLogprob(
        token=vocabulary.text_of(token_id),
        logprob=_finite(logprob),
        bytes=None if raw is None else list(raw),
    )


def _finite(logprob: float) -> float:
    return max(logprob, VERY_UNLIKELY)
