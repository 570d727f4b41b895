"""Declares the parameters of a request: one row each, with its type, range, default and purpose.

Whatever else knows a parameter derives from its row: the ranges that the engine checks, the fields of the
HTTP API and their descriptions, the flags of commands, the page's settings (``page/parameters.js``) and the
table in docs/parameters.md. The last two are written by ``python -m tools.write_parameters``.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_type_hints

import msgspec

Verification = Literal["rejection", "block", "coupled", "exact_match"]
DraftSampleMethod = Literal["greedy", "probabilistic"]

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_STOP_TOKENS = 1024
MAX_LOGPROB_TOKENS = 1024

# A parameter is accepted at these endpoints; the library has all parameters.
EVERYWHERE: Final = "all"
SPECULATION: Final = "all, in `speculation`"
COMPLETIONS: Final = "completions, chats"
CHATS: Final = "chats, responses"
OTHERWISE: Final = "by other names"


@dataclass(frozen=True)
class Range:
    """Holds the numbers from ``low`` to ``high``, without ``low`` itself if ``above``."""

    low: float
    high: float | None  # None: any number that the model or the settings leave room for
    above: bool = False

    def __contains__(self, value: float) -> bool:
        is_low = value < self.low or (self.above and value == self.low)
        return not is_low and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is None or (self.high >= INT64_MAX and self.low > INT64_MIN):
            return f"at least {self.low}"
        if (self.low, self.high) == (INT64_MIN, INT64_MAX):
            return "any integer of 64 bits"
        return f"above {self.low} and at most {self.high}" if self.above else f"{self.low} to {self.high}"

    @property
    def limits(self) -> dict[str, float]:
        """Returns the range as pydantic's keyword arguments."""
        limits = {"gt" if self.above else "ge": self.low}
        return limits if self.high is None else {**limits, "le": self.high}


@dataclass(frozen=True)
class Parameter:
    """Describes a parameter. Its ``name``, ``type`` and ``default`` are those of its field."""

    help: str  # one sentence for clients
    range: Range | None = None  # bounds its number, or the numbers in its list
    off: bool = False  # true if the default is the value that does nothing
    where: str = EVERYWHERE  # the endpoints that accept it
    need: str = ""  # the need (``core.needs``) of a request whose value is not the default
    column: str = ""  # the number that it fills in a row of numbers (``rows.columns.Field``)
    example: float = 0.0  # a value that has an effect, with which implementations are compared
    kind: Literal["", "cut", "penalty"] = ""  # true if it cuts tokens off or penalises them
    gguf_key: str = ""  # the key of its default in a GGUF file; generation configs have one, too
    is_openai: bool = False  # true if OpenAI's SDK has an argument of that name
    step: float | None = None  # the step of its number field on the page; None: there is no field
    name: str = ""
    type: Any = None
    default: Any = None

    def allows(self, value: float) -> bool:
        return self.range is None or value in self.range

    @property
    def description(self) -> str:
        """Returns its help with the default, as the API describes it."""
        if self.default in (None, {}, []):
            return self.help
        default = str(self.default).lower() if isinstance(self.default, bool) else f"{self.default:g}"
        return f"{self.help} Default {default}{': off' if self.off else ''}."


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Holds a request's parameters. The front end checks ranges, and the engine checks limits. None leaves a
    value to the engine, or asks for nothing."""

    max_tokens: Annotated[
        int, Parameter("Largest number of tokens to generate.", Range(1, None), where=OTHERWISE)
    ]
    temperature: Annotated[
        float,
        Parameter(
            "0 is greedy.",
            Range(0, 2),
            column="TEMPERATURE",
            example=1.5,
            gguf_key="temp",
            is_openai=True,
            step=0.1,
        ),
    ] = 1.0
    top_p: Annotated[
        float,
        Parameter(
            "Nucleus sampling.",
            Range(0, 1, above=True),
            off=True,
            kind="cut",
            column="TOP_P",
            example=0.8,
            gguf_key="top_p",
            is_openai=True,
            step=0.01,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter(
            "Keep the k most likely tokens.",
            Range(-1, INT64_MAX),  # -1 is another usual way to say "off"
            off=True,
            kind="cut",
            column="TOP_K",
            example=20,
            gguf_key="top_k",
            step=1,
        ),
    ] = 0
    min_p: Annotated[
        float,
        Parameter(
            "Drop tokens whose probability is below this share of the most likely one's.",
            Range(0, 1),
            off=True,
            kind="cut",
            column="MIN_P",
            example=0.1,
            gguf_key="min_p",
            step=0.01,
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        Parameter(
            "Subtracted from the logit of every token that the output has.",
            Range(-2, 2),
            kind="penalty",
            need="penalties",
            column="PRESENCE",
            example=0.5,
            is_openai=True,
            step=0.1,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            "Subtracted from a token's logit for each time that the output has it.",
            Range(-2, 2),
            kind="penalty",
            need="penalties",
            column="FREQUENCY",
            example=0.25,
            is_openai=True,
            step=0.1,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Parameter(
            "Divides positive logits of tokens that prompt or output have, multiplies negative ones.",
            Range(0.01, 10),
            kind="penalty",
            need="penalties",
            column="REPETITION",
            example=1.25,
            gguf_key="penalty_repeat",
            step=0.01,
        ),
    ] = 1.0
    logit_bias: Annotated[
        dict[int, float], Parameter("Added to logits, by token id.", Range(-100, 100), need="bias")
    ] = {}
    seed: Annotated[
        int | None,
        Parameter(
            "With the same seed and parameters the same tokens come out, whatever else runs.",
            Range(INT64_MIN, INT64_MAX),
            is_openai=True,
            step=1,
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int],
        Parameter(
            "Tokens that end the text, besides the model's own end-of-sequence tokens.", Range(0, None)
        ),
    ] = []
    min_tokens: Annotated[
        int,
        Parameter(
            "No stop token or stop string counts before this many tokens.", Range(0, None), need="bias"
        ),
    ] = 0
    ignore_eos: Annotated[bool, Parameter("Go on after the end-of-sequence token.")] = False
    logprobs: Annotated[
        int | None,
        Parameter(
            "Log-probabilities of the chosen tokens, and of this many others at each.",
            Range(0, None),
            where=OTHERWISE,
            need="logprobs",
        ),
    ] = None
    logprob_token_ids: Annotated[
        list[int],
        Parameter(
            "With logprobs: also the log-probabilities of these tokens, wherever a token is chosen.",
            Range(0, None),
            where=COMPLETIONS,
        ),
    ] = []
    prompt_logprobs: Annotated[
        int | None,
        Parameter(
            "Log-probabilities of the prompt's tokens, and of this many others at each.",
            Range(0, None),
            where=COMPLETIONS,
        ),
    ] = None
    prompt_logprobs_start: Annotated[
        int,
        Parameter(
            "The first token of the prompt, counted from 0, whose log-probability is told; what comes before "
            "it may be taken from the prefix cache.",
            Range(0, None),
            where=COMPLETIONS,
        ),
    ] = 0
    method: Annotated[
        str | None,
        Parameter(
            "Who drafts; 'auto' leaves it to the engine, which uses a prediction if there is one. "
            "With another method than these two a prediction is not used.",
            where=SPECULATION,
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        Parameter(
            "Tokens drafted per round; null and 'auto' leave it to the engine.",
            Range(0, 32),
            where=SPECULATION,
        ),
    ] = None
    draft_sample_method: Annotated[
        DraftSampleMethod | None,
        Parameter(
            "How a draft model draws its tokens: 'greedy' takes its most likely one, 'probabilistic' "
            "draws with the request's parameters (at temperature 0: as at 1). Null leaves it to the engine, "
            "which draws as the target does. Any verification goes with either.",
            where=SPECULATION,
        ),
    ] = None
    verification: Annotated[
        Verification | None,
        Parameter(
            "How drafted tokens are verified; null leaves it to the engine. 'exact_match' is for "
            "temperature 0, where all are the same.",
            where=SPECULATION,
        ),
    ] = None
    trace: Annotated[
        bool,
        Parameter(
            "Report every round: what was drafted, and what was accepted.", where=SPECULATION, need="trace"
        ),
    ] = False
    origins: Annotated[
        bool,
        Parameter(
            "Report with each token's text, in every chunk, where the token came from and "
            "both models' probability of it. 'sources' leaves the probabilities out, which is faster.",
            where=SPECULATION,
        ),
    ] = False
    grammar: Annotated[
        str | None,
        Parameter(
            "What the whole output must match, in llguidance's notation: Lark, or what "
            "`LLMatcher.grammar_from_regex` and `grammar_from_json_schema` return.",
            where=OTHERWISE,
        ),
    ] = None
    grammar_after: Annotated[
        list[int],
        Parameter(
            "The grammar holds only for what follows the first occurrence of these tokens in the output; "
            "what comes before is free, and so is an output that ends without them.",
            where=OTHERWISE,
        ),
    ] = []
    thinking_budget: Annotated[
        int | None,
        Parameter(
            "Reasoning is closed by the model's own mark after this many tokens of it.",
            Range(0, None),
            where=CHATS,
        ),
    ] = None
    thinking_marks: Annotated[
        list[list[int]],
        Parameter(
            "With thinking_budget: four lists of tokens, which open reasoning (none where the prompt does), "
            "which close it, which follow where the budget has closed it, and which may come before it.",
            where=OTHERWISE,
        ),
    ] = []


def _rows() -> dict[str, Parameter]:
    fields = {field.name: field for field in msgspec.structs.fields(SamplingParams)}
    rows = {}
    for name, annotated in get_type_hints(SamplingParams, include_extras=True).items():
        field, (row,) = fields[name], annotated.__metadata__
        default = None if field.required else field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        rows[name] = dataclasses.replace(row, name=name, type=annotated.__origin__, default=default)
    return rows


PARAMETERS: dict[str, Parameter] = _rows()
CUTS, PENALTIES = (
    tuple(name for name, row in PARAMETERS.items() if row.kind == kind) for kind in ("cut", "penalty")
)
# A checkpoint's generation config may have other defaults for these.
RECOMMENDED = {name: row for name, row in PARAMETERS.items() if row.gguf_key}
NEEDING = tuple(row for row in PARAMETERS.values() if row.need)
FILLING = tuple(row for row in PARAMETERS.values() if row.column)
