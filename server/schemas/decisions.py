"""``/v1/decisions``: questions about one input, and how probable their answers are, in OpenAI's shapes."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field

from truedraft.server.schemas.common import MAX_SALT_LENGTH, Content, NonEmptyString
from truedraft.server.schemas.responses import InputItems
from truedraft.server.schemas.strict import RequestPart, alternative, tag

# OpenAI's limits; how many questions and labels a request may have are settings.
MAX_CHOICES, MAX_LEVELS = 255, 10

Description = Annotated[str | None, Field(description="What it means, if its name does not say it.")]


class Question(RequestPart):
    """All questions have these."""

    instructions: Content = Field(description="What to judge: a string, or text parts.")
    name: str | None = Field(None, description="Repeated in the answer.")


class PredicateQuestion(Question):
    """It asks whether something is true of the input."""

    type: Literal["predicate"]


class ChoiceOption(RequestPart):
    value: NonEmptyString | bool = Field(description="A string or a boolean; `true` and `'true'` differ.")
    description: Description = None


class ChoiceQuestion(Question):
    """It asks which one of several values is right."""

    type: Literal["choice"]
    choices: Annotated[list[ChoiceOption], Field(fail_fast=True)] = Field(
        min_length=2, max_length=MAX_CHOICES, description="Each has another value."
    )


class Level(RequestPart):
    label: NonEmptyString
    description: Description = None


class ScoreQuestion(Question):
    """It asks how far up a scale something is."""

    type: Literal["score"]
    levels: Annotated[list[Level], Field(fail_fast=True)] = Field(
        min_length=2, max_length=MAX_LEVELS, description="From the lowest, which counts 0, to the highest."
    )


AnyQuestion = PredicateQuestion | ChoiceQuestion | ScoreQuestion


def _kind_of_question(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return tag(kind) if kind in ("predicate", "choice", "score") else None


Questions = Annotated[
    list[
        Annotated[
            Annotated[PredicateQuestion, alternative("predicate")]
            | Annotated[ChoiceQuestion, alternative("choice")]
            | Annotated[ScoreQuestion, alternative("score")],
            Discriminator(
                _kind_of_question,
                custom_error_type="question_type",
                custom_error_message="Input should be an object of the type 'predicate', 'choice' or 'score'",
            ),
        ]
    ],
    Field(min_length=1, fail_fast=True),
]


class DecisionRequest(RequestPart):
    """Asks for probabilities. Nothing is drawn, so there are no sampling parameters."""

    model: str = Field(description="The served name; `GET /v1/models` tells it.")
    input: InputItems = Field(description="What the questions are about: a text, or a conversation.")
    questions: Questions = Field(description="At most `max_questions`, answered in their order.")
    cache_prompt: bool | None = Field(
        None, description="Share what is computed through the prefix cache. Default true."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_LENGTH)] | None = Field(
        None, description="Share the prefix cache only with requests that have the same salt."
    )
    safety_identifier: str | None = Field(None, description="Accepted, not used.")
    prompt_cache_key: str | None = Field(
        None, description="Accepted, not used: equal inputs share the prefix cache without it."
    )
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Accepted, not used.")


class AnswerPart(BaseModel):
    """All answers repeat the name of their question."""

    name: str | None


class PredicateAnswer(AnswerPart):
    type: Literal["predicate"] = "predicate"
    probability: float = Field(description="The probability that it is true.")


class ChoiceProbability(BaseModel):
    value: str | bool
    probability: float


class ChoiceAnswer(AnswerPart):
    type: Literal["choice"] = "choice"
    choice: str | bool = Field(description="The value of the highest probability, the first of equal ones.")
    confidence: float = Field(description="Its probability.")
    probabilities: list[ChoiceProbability]


class LevelProbability(BaseModel):
    value: int = Field(description="The level's place, from 0.")
    label: str
    probability: float


class ScoreAnswer(AnswerPart):
    type: Literal["score"] = "score"
    score: float = Field(description="The mean of the levels' places by their probabilities.")
    confidence: float = Field(description="The highest probability.")
    probabilities: list[LevelProbability]


AnyAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class DecisionInputDetails(BaseModel):
    cached_tokens: int = Field(description="Tokens of the input that the cache had.")
    cache_write_tokens: int = Field(0, description="Always 0: there is nothing to pay for.")


class DecisionOutputDetails(BaseModel):
    reasoning_tokens: int = 0


class DecisionUsage(BaseModel):
    """``input_tokens``: the beginning that the questions share, once, and the rest of each question."""

    input_tokens: int
    input_tokens_details: DecisionInputDetails
    output_tokens: int = 0
    output_tokens_details: DecisionOutputDetails = Field(default_factory=DecisionOutputDetails)
    total_tokens: int


class Decision(BaseModel):
    model: str
    answers: list[AnyAnswer] = Field(description="In the order of the questions.")
    usage: DecisionUsage
