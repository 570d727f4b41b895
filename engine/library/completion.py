"""Defines what the library returns: finished completions, and the pieces of one that is still running."""

from collections.abc import Container
from dataclasses import dataclass, field

from msgspec import structs

from truedraft.engine.messages import FinishReason, TokenLogprob, TokenOutput
from truedraft.engine.text.detokenizer import Detokenizer
from truedraft.engine.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Delta:
    """Holds what one step added to a text.

    ``text`` ends with a whole character, and may be empty while one is not complete or could still become a
    stop string. ``index`` is the completion's place among the ``n`` of its prompt. ``output`` is the engine's
    output: token ids, draft counts, log-probabilities and whatever else was asked for.
    """

    text: str
    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    output: TokenOutput


class Logprob(TokenLogprob, frozen=True, array_like=True):
    r"""Adds to a token's log-probability, as the engine gives it, the texts of the token and of those in
    ``top``. A token that is a part of a character is shown by its bytes, as in ``\xf0\x9f``."""

    text: str = ""
    top_texts: list[str] = []


def with_texts(entry: TokenLogprob, vocabulary: Vocabulary) -> Logprob:
    texts = [vocabulary.text_of(token_id) for token_id, _ in entry.top]
    text = vocabulary.text_of(entry.token_id)
    return Logprob(entry.token_id, entry.logprob, entry.top, entry.rank, entry.given, text, texts)


@dataclass
class Completion:
    """Holds one finished sequence. ``text`` leaves out special tokens and the stop string or token that ended
    it, ``token_ids`` do not.

    ``index`` is its place among the ``n`` of its prompt. ``stop_reason`` is the stop string or the id of
    ``stop_token_ids`` that ended it, None for any other end. ``LLM.generate`` and ``LLM.chat`` return a
    ``Logprob``, which has texts, for each log-probability that was asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    index: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def acceptance_rate(self) -> float:
        """Returns accepted over drafted tokens; 0 if nothing was drafted."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def acceptance_length(self) -> float:
        """Returns the tokens per round: accepted ones plus the recovered or bonus token."""
        return len(self.token_ids) / max(1, self.num_rounds)

    def add(self, output: TokenOutput) -> None:
        """Adds a step's tokens, without their text."""
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        self.num_rounds += output.num_rounds
        self.num_draft_tokens += output.num_draft_tokens
        self.num_accepted_tokens += output.num_accepted_tokens
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs

    def add_texts(self, vocabulary: Vocabulary) -> None:
        """Gives each log-probability the texts of its tokens."""
        self.logprobs = [with_texts(entry, vocabulary) for entry in self.logprobs]
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [
                None if entry is None else with_texts(entry, vocabulary) for entry in self.prompt_logprobs
            ]

    def add_delta(self, delta: Delta) -> None:
        self.add(delta.output)
        self.text += delta.text
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class DeltaReader:
    """Turns the outputs of one sequence into text, and finds where a stop string ends it."""

    def __init__(
        self, detokenizer: Detokenizer, stop_token_ids: Container[int], *, include_stop: bool
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_token_ids = stop_token_ids
        self._include_stop = include_stop

    def read(self, output: TokenOutput) -> Delta:
        """Returns the text of one output. A token that ends the text is not part of it, and neither is
        anything after a stop string."""
        ended_by_token = output.finish_reason == "stop" and not self._include_stop
        piece = self._detokenizer.push(output.token_ids[:-1] if ended_by_token else output.token_ids)
        text, stopped_by = piece.text, piece.stop_string
        if piece.stopped:
            output = _cut(output, len(piece.offsets))
        elif output.finish_reason is not None:
            last = self._detokenizer.finish(is_cut=output.finish_reason == "length")
            text, stopped_by = text + last.text, last.stop_string
        stop_reason: str | int | None = stopped_by
        if stopped_by is None and output.finish_reason == "stop":
            last_id = output.token_ids[-1]
            stop_reason = last_id if last_id in self._stop_token_ids else None
        finish_reason = "stop" if stopped_by is not None else output.finish_reason
        return Delta(text, output.index, finish_reason, stop_reason, output)


def _cut(output: TokenOutput, num_tokens: int) -> TokenOutput:
    """Removes the tokens after a stop string."""
    logprobs = None if output.logprobs is None else output.logprobs[:num_tokens]
    return structs.replace(output, token_ids=output.token_ids[:num_tokens], logprobs=logprobs)
