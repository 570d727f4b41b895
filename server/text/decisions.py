"""Writes the questions of a decision for the model, and makes its answers of the labels' log-probabilities.

A question is the end of the last message, so that all questions share what comes before. Its labels are the
texts that the model could answer with. Called in a thread: prompts are tokenized here.
"""

import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from truedraft.server.errors import (
    ContextLengthError,
    InvalidRequestError,
    RequestTooLargeError,
    UnsupportedParameterError,
)
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.chat import Message
from truedraft.server.schemas.common import content_text
from truedraft.server.schemas.decisions import (
    AnyAnswer,
    AnyQuestion,
    ChoiceAnswer,
    ChoiceOption,
    ChoiceProbability,
    ChoiceQuestion,
    DecisionRequest,
    Level,
    LevelProbability,
    PredicateAnswer,
    PredicateQuestion,
    ScoreAnswer,
)
from truedraft.server.text.families import NEXT_MESSAGE
from truedraft.server.text.prompt import (
    PromptLimits,
    check_characters,
    check_length,
    input_messages,
    render_chat,
    template_variables,
)
from truedraft.server.text.tokenizer import Tokenizer

YES_OR_NO = ("Yes", "No")

# Prompts that are tokenized at once: the encodings of more would take much memory.
AT_ONCE = 32
# The input is tokenized with each question, in all at most so many times the characters of one prompt.
TIMES_TOKENIZED = 8


class Asked(NamedTuple):
    """``labels`` are the tokens of a question's labels, each after ``prompt_ids``."""

    prompt_ids: list[int]
    labels: list[list[int]]


@dataclass(frozen=True)
class Frame:
    """Holds the text around a question, from the conversation's beginning to where the model answers.
    ``ending`` is what ends an answer."""

    before: str
    after: str
    ending: Sequence[int]


def ask(request: DecisionRequest, tokenizer: Tokenizer, limits: PromptLimits) -> list[Asked]:
    """Returns the prompt and the labels of each question; refuses labels that no tokens tell apart."""
    texts = [question_text(question) for question in request.questions]
    frame = _frame(request, tokenizer)
    _check_work(frame, texts, tokenizer, limits)
    prompts: list[list[int]] = []
    for first in range(0, len(texts), AT_ONCE):
        some = [frame.before + text + frame.after for text in texts[first : first + AT_ONCE]]
        prompts += tokenizer.encode_all(some, add_special_tokens=False)
    asked = []
    for number, (question, prompt) in enumerate(zip(request.questions, prompts, strict=True)):
        labels = _label_tokens(question, f"questions.{number}", tokenizer, frame.ending)
        longest = len(prompt) + max(map(len, labels))
        if longest > limits.max_tokens:
            raise ContextLengthError(
                f"{limits.context}, but the input with questions.{number} and its longest label has "
                f"{longest} tokens.",
                param="input",
            )
        asked.append(Asked(prompt, labels))
    return asked


def _check_work(frame: Frame, texts: list[str], tokenizer: Tokenizer, limits: PromptLimits) -> None:
    """Each question is tokenized after the whole input, so that its tokens are those of the whole text."""
    num_characters = len(frame.before) + len(frame.after)
    check_characters(num_characters + sum(map(len, texts)), limits, "input")
    check_length(frame.before, tokenizer, limits, "input")
    work = len(texts) * num_characters + sum(map(len, texts))
    if work > (most := TIMES_TOKENIZED * limits.max_characters):
        raise RequestTooLargeError(
            f"The input with each of {len(texts)} questions has {work} characters, but at most {most} are "
            f"tokenized ({TIMES_TOKENIZED} times max_prompt_characters): ask fewer questions at a time.",
            param="questions",
        )


def question_text(question: AnyQuestion) -> str:
    """Returns a question as the model reads it."""
    asked = content_text(question.instructions)
    if isinstance(question, PredicateQuestion):
        return f"{asked}\n\nIs this true? Answer with Yes or No only."
    if isinstance(question, ChoiceQuestion):
        what, options = "Options", list(zip(labels_of(question), question.choices, strict=True))
        return f"{asked}\n\n{what}:\n{_listed(options)}\n\nAnswer with one of the options only."
    levels = list(zip(labels_of(question), question.levels, strict=True))
    return f"{asked}\n\nLevels, from the lowest:\n{_listed(levels)}\n\nAnswer with one of the levels only."


def labels_of(question: AnyQuestion) -> list[str]:
    """Returns the texts of the possible answers. Next to a boolean, strings are quoted as in JSON, so that
    "true" is not true."""
    if isinstance(question, PredicateQuestion):
        return [*YES_OR_NO]
    if not isinstance(question, ChoiceQuestion):
        return [level.label for level in question.levels]
    values = [choice.value for choice in question.choices]
    is_quoted = any(isinstance(value, bool) for value in values)
    return [
        json.dumps(value, ensure_ascii=False) if is_quoted or isinstance(value, bool) else value
        for value in values
    ]


def _listed(options: Sequence[tuple[str, ChoiceOption | Level]]) -> str:
    return "\n".join(
        f"- {label}: {option.description}" if option.description else f"- {label}"
        for label, option in options
    )


def _frame(request: DecisionRequest, tokenizer: Tokenizer) -> Frame:
    """Renders the conversation once, with a mark in the place of the questions."""
    mark, answer = (f"{what} {secrets.token_hex(8)}" for what in ("question", "answer"))
    messages = _with_question(input_messages(request.input), mark)
    options = _without_reasoning(tokenizer)
    text = render_chat(messages, tokenizer, param="input", options=options)
    before, _, after = text.partition(mark)
    if not after:
        raise InvalidRequestError("The model's chat template leaves the question out.", param="questions")
    told = [*messages, Message(role="assistant", content=answer)]
    whole = render_chat(told, tokenizer, param="input", options=options | {"add_generation_prompt": False})
    ending = tokenizer.encode(whole.partition(answer)[2], add_special_tokens=False)[:1]
    return Frame(before, after + _end_of_reasoning(text, tokenizer), ending)


def _with_question(messages: list[Message], question: str) -> list[Message]:
    """A last message of the user goes on with the question: many templates refuse two in a row."""
    if messages and messages[-1].role == "user":
        *earlier, last = messages
        return [*earlier, Message(role="user", content=f"{content_text(last.content)}\n\n{question}")]
    return [*messages, Message(role="user", content=question)]


def _without_reasoning(tokenizer: Tokenizer) -> dict[str, Any]:
    """Probabilities are read where the answer begins, so that the model does not reason before it."""
    asked: Mapping[str, tuple[str, Any]] = {"enable_thinking": ("enable_thinking", False)}
    return template_variables(asked, tokenizer, Leniency(strict=False))


def _end_of_reasoning(text: str, tokenizer: Tokenizer) -> str:
    """Returns what closes the reasoning that a template has begun all the same."""
    marks = tokenizer.templates.reasoning_marks
    if marks is None:
        return ""
    if marks.answer:
        return marks.answer if text.rstrip().endswith(NEXT_MESSAGE) else ""
    return f"\n{marks.close}\n\n" if text.rstrip().endswith(marks.open.rstrip()) else ""


def _label_tokens(
    question: AnyQuestion, path: str, tokenizer: Tokenizer, ending: Sequence[int]
) -> list[list[int]]:
    """Where a label begins another one, the end of the answer belongs to each: "1" is not "10"."""
    labels = labels_of(question)
    found = tokenizer.encode_all(labels, add_special_tokens=False)
    field = {"choice": "choices.{}.value", "score": "levels.{}.label"}.get(question.type, "type")
    places = [f"{path}.{field.format(number)}" for number in range(len(labels))]
    seen: dict[tuple[int, ...], str] = {}
    for place, ids in zip(places, found, strict=True):
        if not ids:
            raise InvalidRequestError(f"{place} has no tokens.", param=place)
        if (other := seen.setdefault(tuple(ids), place)) != place:
            raise InvalidRequestError(f"{place} is the same as {other}.", param=place)
    if not any(tuple(ids[:end]) in seen for ids in found for end in range(1, len(ids))):
        return found
    if not ending:
        raise UnsupportedParameterError(
            f"Of {path}, one label begins another, and this model's chat template says nothing that ends an "
            "answer: use labels that begin differently.",
            param=path,
        )
    return [[*ids, *ending] for ids in found]


def answers(questions: Sequence[AnyQuestion], logprobs: Sequence[Sequence[float]]) -> Iterator[AnyAnswer]:
    """Yields the answer to each question, of its labels' log-probabilities."""
    for question, of_labels in zip(questions, logprobs, strict=True):
        probabilities = normalised(of_labels)
        best = probabilities.index(max(probabilities))
        confidence = probabilities[best]
        if isinstance(question, PredicateQuestion):
            yield PredicateAnswer(name=question.name, probability=probabilities[0])
        elif isinstance(question, ChoiceQuestion):
            values = [choice.value for choice in question.choices]
            yield ChoiceAnswer(
                name=question.name,
                choice=values[best],
                confidence=confidence,
                probabilities=[
                    ChoiceProbability(value=value, probability=probability)
                    for value, probability in zip(values, probabilities, strict=True)
                ],
            )
        else:
            yield ScoreAnswer(
                name=question.name,
                score=math.fsum(place * probability for place, probability in enumerate(probabilities)),
                confidence=confidence,
                probabilities=[
                    LevelProbability(value=place, label=level.label, probability=probability)
                    for place, (level, probability) in enumerate(
                        zip(question.levels, probabilities, strict=True)
                    )
                ],
            )


def normalised(logprobs: Sequence[float]) -> list[float]:
    """Returns the shares of the probabilities in their sum, in float64."""
    most = max(logprobs)
    weights = [math.exp(each - most) for each in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
