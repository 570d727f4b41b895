"""Reads a traced answer from JSON: the parts that ``engine.commands.replay`` needs.

It is a whole answer of the server (completion or chat) or its ``truedraft`` object alone, for instance

    {"sampling_params": {"max_tokens": 40, "temperature": 0.7}, "prompt_token_ids": [[1, 5, 9]],
     "seeds": [42], "trace": [[{"position": 3, "source": "draft_model", "rule": "rejection", "next_token": 8,
       "drafted": [{"id": 7, "target_prob": 0.4, "draft_prob": 0.5, "accepted": true}]}]]}

Seeds and rounds have an entry for each choice; choices are numbered prompt by prompt.

A round that a head drafted for has ``head_output`` and, if it drafted fewer tokens than it could, the name of
these, ``draft_vocabulary``: they are in ``{"draft_vocabularies": {name: bitmap in base64}}``, and the name is
their digest. Older traces have "fewer" as output layer instead, and do not say which tokens that were.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from truedraft.engine.messages import HeadOutput, RoundTrace, SamplingParams
from truedraft.engine.models.heads.named_vocabulary import digest_of

FEWER = "fewer"


class TraceFileError(Exception):
    """The file holds no trace that could be replayed; the message is for the user."""


class DraftedToken(msgspec.Struct, frozen=True):
    """Holds a drafted token. Probabilities are those after processing by the request's parameters; 0 or 1 at
    temperature 0."""

    id: int
    target_prob: float
    draft_prob: float
    accepted: bool


class TracedRound(msgspec.Struct, frozen=True):
    """Holds one round. ``position`` is the index of its first token in prompt plus output, ``head_output``
    the output layer of the head that drafted, and ``draft_vocabulary`` names its tokens if these are not
    all."""

    position: int
    source: str
    rule: str
    drafted: list[DraftedToken]
    next_token: int
    head_output: HeadOutput | Literal["fewer"] | None = None
    draft_vocabulary: str | None = None

    @property
    def draft_ids(self) -> list[int]:
        return [token.id for token in self.drafted]

    @property
    def num_accepted(self) -> int:
        return sum(token.accepted for token in self.drafted)

    @classmethod
    def of(cls, trace: RoundTrace) -> "TracedRound":
        """Converts the engine's report of a round into the server's form."""
        drafted = zip(trace.draft_ids, trace.target_probs, trace.draft_probs, strict=True)
        tokens = [DraftedToken(*token, number < trace.num_accepted) for number, token in enumerate(drafted)]
        vocabulary = None if trace.vocabulary is None else trace.vocabulary.digest
        return cls(
            trace.position, trace.source, trace.rule, tokens, trace.next_token, trace.head_output, vocabulary
        )


class TracedChoice(msgspec.Struct, frozen=True):
    """A choice is one sequence: ``output_token_ids`` are those of the answer, if it has them."""

    prompt_token_ids: list[int]
    seed: int
    rounds: list[TracedRound]
    output_token_ids: list[int] | None = None


class TracedAnswer(msgspec.Struct, frozen=True):
    """An answer has the bitmaps of the draft vocabularies that its rounds name."""

    params: SamplingParams
    choices: list[TracedChoice]
    draft_vocabularies: dict[str, bytes]

    @property
    def rounds(self) -> Iterator[TracedRound]:
        return (round_ for choice in self.choices for round_ in choice.rounds)


class _Report(msgspec.Struct, frozen=True):
    sampling_params: SamplingParams
    prompt_token_ids: list[list[int]]
    seeds: list[int]
    trace: list[list[TracedRound]]
    draft_vocabularies: dict[str, bytes] = {}


class _Choice(msgspec.Struct, frozen=True):
    index: int
    token_ids: list[int] | None = None


def read_answer(path: Path) -> TracedAnswer:
    """Reads an answer; raises ``TraceFileError`` if the file cannot be read or lacks something that a replay
    needs."""
    try:
        answer = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise TraceFileError(f"cannot read {path}: {error}") from error
    if not isinstance(answer, dict):
        raise TraceFileError(f"{path} holds no JSON object")
    return parse_answer(answer)


def parse_answer(answer: dict[str, Any]) -> TracedAnswer:
    report = answer.get("truedraft", answer)
    if not isinstance(report, dict) or report.get("trace") is None:
        raise TraceFileError("there is no trace; ask for one with speculation: {trace: true}")
    try:
        parsed = msgspec.convert(report, _Report, str_keys=True)
        choices = msgspec.convert(answer.get("choices", []), list[_Choice])
    except msgspec.ValidationError as error:
        raise TraceFileError(f"the trace is not as the server writes it: {error}") from error
    prompts, num_choices = parsed.prompt_token_ids, len(parsed.trace)
    if not prompts or num_choices % len(prompts) or len(parsed.seeds) != num_choices:
        raise TraceFileError(
            f"{num_choices} traced choices, {len(prompts)} prompts and {len(parsed.seeds)} seeds do not match"
        )
    vocabularies = parsed.draft_vocabularies
    for name in {one.draft_vocabulary for rounds in parsed.trace for one in rounds} - {None}:
        if name not in vocabularies or digest_of(vocabularies[name]) != name:
            raise TraceFileError(f"draft_vocabularies does not have the tokens of {name}, which rounds name")
    output_token_ids = {choice.index: choice.token_ids for choice in choices}
    choices_per_prompt = num_choices // len(prompts)
    return TracedAnswer(
        parsed.sampling_params,
        [
            TracedChoice(prompts[index // choices_per_prompt], seed, rounds, output_token_ids.get(index))
            for index, (seed, rounds) in enumerate(zip(parsed.seeds, parsed.trace, strict=True))
        ],
        vocabularies,
    )
