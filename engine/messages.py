"""Front end and worker exchange these messages: msgpack of builtins, nothing pickled.

The front end sends ``Generate``, or ``Embed`` to a model that makes vectors, ``Abort`` and ``ClearPrefixes``.
The worker answers with ``Ready`` once, then ``StepOutput`` for each engine step that produced something, or
for several short ones together, ``Embedded`` for all texts of a request, and ``Failed`` for a request it
cannot serve.
Both processes import this module; it imports neither torch nor HTTP.

Words used here and everywhere: a *request* is what the client asked; each of its ``n`` choices is a
*sequence*, addressed by (request_id, index). *Drafted* tokens are guesses; *accepted* ones were kept.
"""

import struct
from typing import Any, ClassVar, Final, Literal

import msgspec

from truedraft.engine.parameters import DraftSampleMethod as DraftSampleMethod
from truedraft.engine.parameters import SamplingParams as SamplingParams
from truedraft.engine.parameters import Verification as Verification

FinishReason = Literal["stop", "length"]
# What a model is for: it writes text, makes vectors of texts, or scores pairs of texts.
Task = Literal["generate", "embed", "rerank"]
# What the setting draft names has these names in requests, metrics and settings; no other file spells them
# out.
DRAFT_MODEL: Final = "draft_model"
EAGLE: Final = "eagle"
MTP: Final = "mtp"
HEADS: Final = (EAGLE, MTP)
WITH_DRAFT: Final = (DRAFT_MODEL, *HEADS)
Source = Literal["draft_model", "eagle", "mtp", "ngram", "prediction", "grammar", "none"]
Method = Literal["auto"] | Source
# The settings name one of these: predictions and grammars come with requests.
DefaultMethod = Literal["auto", "draft_model", "eagle", "mtp", "ngram", "none"]
NgramChoice = Literal["most_recent", "most_frequent"]
# A head drafts with the output layer that it was loaded with, or a copy of it in 4 bits.
HeadOutput = Literal["own", "int4"]


# The code of ``Failed`` of a worker whose files of weights were changed while it read them.
WEIGHTS_CHANGED: Final = "weights_changed"


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Generate ``n`` sequences after ``prompt_token_ids`` (at least one token).

    ``prediction_token_ids`` is what the client expects every sequence to say, or most of it; None if it did
    not say. It is drafted from if ``params.method`` leaves that open or asks for it.
    Lower ``priority`` goes first, and of the same priority lower ``place``. The sequences of one ``tenant``
    do not shut out those of another; its name means nothing to the worker. With ``cache_prompt`` the request
    shares computed prefixes with others of the same ``cache_salt``.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    n: int = 1
    prediction_token_ids: list[int] | None = None
    priority: int = 0
    cache_prompt: bool = True
    cache_salt: str = ""
    place: int = 0
    tenant: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class Text(msgspec.Struct, frozen=True, array_like=True):
    """Is a text, or a pair of them, whose second one begins with the token ``second_from``."""

    token_ids: list[int]
    second_from: int | None = None


class Embed(msgspec.Struct, frozen=True, tag=True):
    """Make a vector of each of ``texts``, or a score of each pair.

    A vector's first ``dimensions`` numbers are wanted, or all of them (None). ``normalizes`` takes the place
    of what the model's files say. ``priority`` and ``tenant`` are as in ``Generate``.
    """

    request_id: str
    texts: list[Text]
    dimensions: int | None = None
    normalizes: bool | None = None
    priority: int = 0
    tenant: str = ""
    n: ClassVar[int] = 1

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self.texts)


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop one sequence of a request, or all of them when ``index`` is None. Unknown ids are ignored."""

    request_id: str
    index: int | None = None


class ClearPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Forget what earlier requests have left for later ones, in memory and in files; ``Cleared`` answers."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop after the current step."""


class EncoderDecoderLengths(msgspec.Struct, frozen=True):
    """In tokens. ``num_start_tokens`` precede the output in the cache and are not part of it."""

    max_prompt_len: int
    max_output_len: int
    num_start_tokens: int


class EmbeddingFacts(msgspec.Struct, frozen=True):
    """Says what vectors are like, and how texts are prepared. Vectors that the model ``shortens`` may be cut
    to ``dimensions``, or to any number where these are not listed. ``pair_template`` has places for an
    instruction, a query and a document, which a model that reads them as one text is given."""

    size: int
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    dimensions: list[int] = []
    shortens: bool = False
    lower_cases: bool = False
    pair_template: str = ""
    instruction: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The models are loaded and the caches allocated.

    ``dtype`` is what linear layers multiply in, ``weights`` the types in which the target's are kept, most of
    them first, ``fingerprint`` changes with whatever may change the target's tokens. ``max_model_len`` bounds
    prompt and output together; with an encoder-decoder target ``encoder_decoder`` bounds each.
    """

    target: str
    draft: str | None
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    num_target_blocks: int
    num_draft_blocks: int
    block_size: int
    methods: list[Source]  # who can draft here; "none" is always possible
    method: Method  # who drafts unless a request says otherwise
    num_threads: int = 0
    thread_limit: str = ""  # why these are fewer than the machine has processors, unless the settings say so
    default_sampling: dict[str, float] = {}  # what the model's generation config recommends, by its names
    encoder_decoder: EncoderDecoderLengths | None = None
    forward: str = ""  # what computes the target's layers, in words
    weights: list[str] = []  # types that the target's weights are kept in, most of them first
    fingerprint: str = ""  # what tokens depend on
    num_state_slots: int = 0  # in each cache whose model has recurrent layers
    state_bytes: int = 0  # what one sequence's states and records take in both caches
    max_num_sequences: int = 32  # so many run at the same time
    cache_dtype: str = ""  # what the target's keys and values are kept in
    weight_bytes: int = 0  # both models' linear layers and embeddings
    cache_bytes: int = 0  # both caches, once they are full
    worker_bytes: int = 0  # what the worker has in memory at start, weights included
    tried: list[str] = []  # what was measured of each draft that lies next to the target, and what is taken
    task: Task = "generate"
    embedding: EmbeddingFacts | None = None  # there is none of a model that writes text


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token under the target's raw logits, and the most likely (id, logprob) there.
    ``rank`` is one more than the number of tokens that are more likely. ``given`` are those of
    ``logprob_token_ids``, in their order."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int = 1
    given: list[tuple[int, float]] = []


class PredictionUse(msgspec.Struct, frozen=True, array_like=True):
    """What one step had to do with the client's prediction.

    ``matched`` has an entry for each emitted token: its index in the prediction, or -1. The step drafted
    ``num_drafted`` of the prediction's tokens from index ``first_drafted`` on.
    """

    matched: list[int]
    first_drafted: int
    num_drafted: int


class DraftVocabulary(msgspec.Struct, frozen=True):
    """Names by a ``digest`` the tokens that a head drafts, where these are not all that it could draft.
    ``bitmap`` has a bit for each id, the lowest bits first; None if an earlier round has told it."""

    digest: str
    bitmap: bytes | None


class RoundTrace(msgspec.Struct, frozen=True):
    """Everything needed to verify one round again: who drafted what, and how it was judged.

    ``target_probs`` and ``draft_probs`` are those of each drafted token, as processed by the request's
    parameters (one-hot at temperature 0), ``next_target_prob`` that of the token drawn after them.
    ``position`` is the absolute index of the round's first token. If a head drafted, ``head_output`` is its
    output layer, and ``vocabulary`` the tokens of that, unless it has all.
    """

    position: int
    source: str
    rule: str
    draft_ids: list[int]
    target_probs: list[float]
    draft_probs: list[float]
    num_accepted: int
    next_token: int
    next_target_prob: float | None = None
    head_output: HeadOutput | None = None
    vocabulary: DraftVocabulary | None = None


class RoundOrigin(msgspec.Struct, frozen=True, array_like=True):
    """Where a round's ``num_tokens`` came from: the first ``num_accepted`` are drafts of ``source``, one more
    may follow. ``num_drafted`` tokens were drafted."""

    source: str
    num_drafted: int
    num_accepted: int
    num_tokens: int


class TokenOutput(msgspec.Struct, frozen=True):
    """What one step gave one sequence: 1 to k + 1 tokens a round, the last one final if ``finish_reason``.

    An end-of-sequence or stop token is included in ``token_ids``. ``num_draft_tokens`` and
    ``num_accepted_tokens`` are those of this step's ``num_rounds``, one unless all of them are a few
    milliseconds. ``seed`` is the sequence's own, given or drawn.
    ``num_cached_tokens`` of the prompt were taken over from earlier requests. ``queue_seconds`` is how long
    the sequence waited for its first step; it and ``prompt_logprobs``, of which the first prompt token has
    none, come with the first output. ``prediction`` is there if one is in use. ``origins`` has an entry for
    each round that gave tokens, if the request asks for them.
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    num_draft_tokens: int
    num_accepted_tokens: int
    num_rounds: int = 1
    seed: int = 0
    num_cached_tokens: int = 0
    queue_seconds: float | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    trace: RoundTrace | None = None
    prediction: PredictionUse | None = None
    origins: list[RoundOrigin] | None = None
    budget_spent: bool = False  # thinking_budget has closed the reasoning, in this step or before

    @property
    def sequence(self) -> tuple[str, int]:
        return self.request_id, self.index

    @property
    def is_first(self) -> bool:
        return self.queue_seconds is not None


class Embedded(msgspec.Struct, frozen=True, tag=True):
    """What an ``Embed`` gave: the numbers of each text's vector, float32 and little-endian. That of a pair
    has one number, its score."""

    request_id: str
    vectors: list[bytes]
    index: ClassVar[int] = 0
    finish_reason: ClassVar[FinishReason] = "stop"
    is_first: ClassVar[bool] = True


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A request ended by an error; all of its sequences are gone. ``code`` names it for the client.

    With an empty ``request_id`` it is the worker itself that could not start.
    """

    request_id: str
    code: str
    message: str


class DraftCounts(msgspec.Struct):
    """A *draft* is what one sequence guessed in one round; those of no tokens are not counted."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class PrefixFileStats(msgspec.Struct, frozen=True):
    """Tells of the files of ``prefix_cache_dir``. ``num_hits`` of the prompt tokens found in the prefix cache
    had been read from them, ``num_bytes`` is what all of them take. ``num_damaged`` files were not served,
    ``num_failures`` reads and writes failed, ``num_dropped`` pieces were not written. Nothing is written any
    more unless ``is_writing``."""

    num_hits: int
    num_bytes: int
    read_bytes: int
    read_seconds: float
    written_bytes: int
    num_damaged: int
    num_failures: int
    num_dropped: int
    is_writing: bool


class Stats(msgspec.Struct, frozen=True):
    """Totals since the worker started, and gauges of this moment. Rates are derived by the reader.

    ``drafts`` counts by source. ``*_per_position[i]`` counts tokens drafted or accepted as the (i+1)-th of
    their draft. ``num_rows`` counts rows of rounds by runner: C, CUDA graphs,
    or phases, which are slower than either.
    """

    num_running: int
    num_waiting: int
    num_speculative_tokens: float
    cache_usage: dict[str, float]
    num_preemptions: int  # sequences put back because cache blocks had run out
    num_prefix_queries: int  # prompt tokens looked up in the prefix cache
    num_prefix_hits: int
    drafts: dict[str, DraftCounts]
    draft_tokens_per_position: list[int]
    accepted_tokens_per_position: list[int]
    phase_seconds: dict[str, float]
    num_rows: dict[str, int] = {}
    num_yields: int = 0  # sequences put back for a tenant that had none running
    prefix_files: PrefixFileStats | None = None  # if there are some


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """What one engine step produced, or several: each sequence's outputs in their order.

    ``stats`` are those of the moment of sending.
    """

    outputs: list[TokenOutput]
    stats: Stats


class SpeculationState(msgspec.Struct, frozen=True, tag=True):
    """Tells people how the draft length is chosen, and why. Sent now and then."""

    state: dict[str, Any]


class Cleared(msgspec.Struct, frozen=True, tag=True):
    """A ``ClearPrefixes`` is done."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The worker has begun a stage of loading; ``stage`` names it for people."""

    stage: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The worker lives; its loop has been in the same step for ``step_seconds``."""

    step_seconds: float


ToWorker = Generate | Embed | Abort | ClearPrefixes | Shutdown
FromWorker = Loading | Ready | StepOutput | Embedded | SpeculationState | Cleared | Failed | Heartbeat

LENGTH = struct.Struct("<Q")

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    return _encoder.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    return _to_worker.decode(data)


def decode_from_worker(data: bytes) -> FromWorker:
    return _from_worker.decode(data)


def framed(message: ToWorker | FromWorker) -> bytes:
    """A message as it is on the border's sockets: its length, then its bytes."""
    data = encode(message)
    return LENGTH.pack(len(data)) + data


class Inbox:
    """Reassembles messages from the bytes of a socket, which arrive in pieces of any size."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, arrived: bytes) -> list[bytes]:
        """The messages that are complete with these bytes."""
        self._bytes += arrived
        messages, start = [], 0
        while len(self._bytes) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes, start)
            end = start + LENGTH.size + length
            if end > len(self._bytes):
                break
            messages.append(bytes(self._bytes[start + LENGTH.size : end]))
            start = end
        del self._bytes[:start]
        return messages
