"""Reads one choice of a request: the engine's outputs of one sequence come in, deltas of text go out.

Decides where the choice ends (by a stop string, before the engine knows) and gives each token's
log-probability out together with its text. ``server.generation`` has one ``ChoiceReader`` per choice.
"""

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from truedraft.engine.messages import PredictionUse, RoundTrace, TokenLogprob, TokenOutput
from truedraft.engine.text.detokenizer import Detokenizer
from truedraft.server.schemas.answer import FinishReason, TokenOrigin
from truedraft.server.text.logprobs import ScoredToken
from truedraft.server.text.message_parser import MessageParser, Part, joined
from truedraft.server.text.origins import OriginReader


class ChoiceDelta(msgspec.Struct, frozen=True):
    """Holds what one or several rounds added to a choice.

    ``text`` may be empty while it is held back; ``scored`` and ``origins`` are of the tokens whose text it
    completes, if they were asked for, while ``token_ids`` are those of the rounds. ``parts``: of the message
    that the text makes up, if it is one.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    scored: list[ScoredToken] = []
    origins: list[TokenOrigin] = []
    prompt_scored: list[TokenLogprob | None] | None = None
    num_rounds: int = 0
    stop_reason: str | int | None = None
    parts: list[Part] = []


def one_delta(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """Returns several deltas of a choice in a row as one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        scored=[scored for delta in deltas for scored in delta.scored],
        origins=[origin for delta in deltas for origin in delta.origins],
        prompt_scored=deltas[0].prompt_scored,
        num_rounds=sum(delta.num_rounds for delta in deltas),
        parts=joined([part for delta in deltas for part in delta.parts]),
    )


@dataclass(slots=True)
class FinishedChoice:
    """Collects the deltas of a choice; each costs the same, whatever came before."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    scored: list[ScoredToken] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    prompt_scored: list[TokenLogprob | None] | None = None
    stop_reason: str | int | None = None
    _texts: list[str] = field(default_factory=list)
    _parts: list[Part] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def parts(self) -> list[Part]:
        return joined(self._parts)

    def add(self, delta: ChoiceDelta) -> None:
        self._texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.scored += delta.scored
        self.origins += delta.origins
        self._parts += delta.parts
        self.prompt_scored = self.prompt_scored or delta.prompt_scored


@dataclass(slots=True)
class AnswerCounts:
    """Counts over all choices of an answer, whose readers add to it: the rounds that drafted and their
    tokens, tokens of the reasoning, and those of a prediction that appeared and that did not."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reasoning: int = 0
    predicted: int = 0
    mispredicted: int = 0


class PredictionCount:
    """Counts which of the prediction's ``length`` tokens appeared in a choice; none do unless it was used."""

    def __init__(self, length: int, counts: AnswerCounts) -> None:
        self._length = length
        self._counts = counts
        self._appeared: set[int] = set()
        self._is_used = False

    def add(self, use: PredictionUse, num_tokens: int) -> None:
        """Adds one round; only its first ``num_tokens`` are part of the choice."""
        if not self._is_used:
            self._is_used = True
            self._counts.mispredicted += self._length
        num_before = len(self._appeared)
        self._appeared.update(index for index in use.matched[:num_tokens] if index >= 0)
        num_new = len(self._appeared) - num_before
        self._counts.predicted += num_new
        self._counts.mispredicted -= num_new


class ReasoningCount:
    """Tokens of a message's reasoning, its marks included: those that begin before its end."""

    def __init__(self, message: MessageParser, counts: AnswerCounts) -> None:
        self._message = message
        self._counts = counts
        self._offsets: list[int] | None = []  # while the end is not known

    def add(self, offsets: Sequence[int]) -> None:
        if self._offsets is None:
            return
        self._offsets += offsets
        end = self._message.reasoning_end
        if end is not None:
            self._counts.reasoning += sum(offset < end for offset in self._offsets)
            self._offsets = None


class ChoiceReader:
    """``text_start`` is where the choice's own text starts: after the echoed prompt. ``counts`` are those of
    the answer that the choice belongs to."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        *,
        include_stop_string: bool,
        text_start: int,
        stop_token_ids: Container[int] = (),
        prediction_length: int = 0,
        message: MessageParser | None = None,
        counts: AnswerCounts | None = None,
    ) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.seed: int | None = None
        self.trace: list[RoundTrace] = []
        self.counts = counts or AnswerCounts()
        self._predicted = PredictionCount(prediction_length, self.counts)
        self._stop_token_ids = stop_token_ids
        self._detokenizer = detokenizer
        self._include_stop_string = include_stop_string
        self._text_start = text_start
        self.num_rounds = 0
        self._unshown: deque[ScoredToken] = deque()
        self._origins = OriginReader()
        self.budget_spent = False
        self._message = message
        self._reasoning = None if message is None else ReasoningCount(message, self.counts)

    def read(self, outputs: Sequence[TokenOutput]) -> ChoiceDelta:
        """Turn one output or more into text. Not to be called after ``finish_reason`` is set.

        What follows a stop string was on its way when the string was found; it is not looked at.
        """
        deltas = []
        for output in outputs:
            deltas.append(self._read(output))
            if self.finish_reason is not None:
                break
        return one_delta(deltas)

    def _read(self, output: TokenOutput) -> ChoiceDelta:
        # A stop token ends the text without being part of it.
        ended_by_token = output.finish_reason == "stop" and not self._include_stop_string
        piece = self._detokenizer.push(output.token_ids[:-1] if ended_by_token else output.token_ids)
        text, offsets, num_shown = piece.text, piece.offsets, piece.num_shown
        self.finish_reason = "stop" if piece.stopped else output.finish_reason
        stop_reason: str | int | None = piece.stop_string
        if output.finish_reason is not None and not piece.stopped:
            last = self._detokenizer.finish(is_cut=output.finish_reason == "length")
            text += last.text
            num_shown += last.num_shown
            if ended_by_token:
                offsets.append(self._detokenizer.num_characters)
                num_shown += 1
            if last.stopped:
                self.finish_reason, stop_reason = "stop", last.stop_string
            elif output.finish_reason == "stop" and output.token_ids[-1] in self._stop_token_ids:
                stop_reason = output.token_ids[-1]
        self._remember(output, len(offsets))
        parts = self._read_message(text, output.token_ids, offsets, self._cut_off(stop_reason))
        return ChoiceDelta(
            index=self.index,
            text=text,
            token_ids=output.token_ids[: len(offsets)],
            finish_reason=self.finish_reason,
            scored=self._show(output, offsets, num_shown),
            origins=self._origins.read(output, text, offsets, num_shown) if output.origins else [],
            prompt_scored=output.prompt_logprobs,
            num_rounds=output.num_rounds,
            stop_reason=stop_reason,
            parts=parts,
        )

    def read_prompt(self, output: TokenOutput) -> ChoiceDelta:
        """The output of a request for no tokens: only what it says about the prompt counts."""
        self.seed = output.seed
        return self.end_without_tokens(output.prompt_logprobs)

    def end_without_tokens(self, prompt_scored: list[TokenLogprob | None] | None = None) -> ChoiceDelta:
        self.finish_reason = "length"
        return ChoiceDelta(self.index, "", [], "length", prompt_scored=prompt_scored)

    def _cut_off(self, stop_reason: str | int | None) -> str | None:
        """Returns what is known to follow a text that was cut; None for one that the model has ended."""
        if isinstance(stop_reason, str):
            return "" if self._include_stop_string else stop_reason
        return "" if self.finish_reason == "length" else None

    def _read_message(
        self, text: str, token_ids: Sequence[int], offsets: list[int], cut_off: str | None
    ) -> list[Part]:
        """The parts that ``text`` completes; a choice that ends by itself with calls ends because of them,
        unless a stop string cuts one."""
        if self._message is None or self._reasoning is None:
            return []
        marks, mark_ends = self._message.mark_ids, []
        if marks:
            ends = [*offsets[1:], self._detokenizer.num_characters]
            mark_ends = [end for token_id, end in zip(token_ids, ends, strict=False) if token_id in marks]
        parts = joined(self._message.push(text, mark_ends))
        if self.finish_reason is not None:
            parts = joined(parts, self._message.finish(cut_off))
        self._reasoning.add(offsets)
        if self.finish_reason == "stop" and self._message.num_calls and not self._message.is_in_call:
            self.finish_reason = "tool_calls"
        return parts

    def _remember(self, output: TokenOutput, num_tokens: int) -> None:
        self.seed = output.seed
        self.num_rounds += output.num_rounds
        self.budget_spent = output.budget_spent
        if output.prediction is not None:
            self._predicted.add(output.prediction, num_tokens)
        if output.trace is not None:
            self.trace.append(output.trace)
        if output.num_draft_tokens:
            self.counts.rounds += output.num_rounds
            self.counts.drafted += output.num_draft_tokens
            self.counts.accepted += output.num_accepted_tokens

    def _show(self, output: TokenOutput, offsets: list[int], num_shown: int) -> list[ScoredToken]:
        """Take in the tokens that counted, give out those whose text is out."""
        if output.logprobs is None and not self._unshown:
            return []
        self._unshown += [
            ScoredToken.of(scored, self._text_start + offset)
            for scored, offset in zip(output.logprobs or [], offsets, strict=False)
        ]
        return [self._unshown.popleft() for _ in range(min(num_shown, len(self._unshown)))]
