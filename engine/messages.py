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
# A model is for one task: it writes text, makes vectors of texts, or scores pairs of texts.
Task = Literal["generate", "embed", "rerank"]
# Requests, metrics and settings know the sources of drafts by these names; no other file spells them out.
DRAFT_MODEL: Final = "draft_model"
EAGLE: Final = "eagle"
MTP: Final = "mtp"
HEADS: Final = (EAGLE, MTP)
WITH_DRAFT: Final = (DRAFT_MODEL, *HEADS)
Source = Literal["draft_model", "eagle", "mtp", "ngram", "prediction", "grammar", "none"]
Method = Literal["auto"] | Source
# The settings name one of these; predictions and grammars come with requests instead.
DefaultMethod = Literal["auto", "draft_model", "eagle", "mtp", "ngram", "none"]
NgramChoice = Literal["most_recent", "most_frequent"]
# A head drafts with the output layer that it was loaded with, or with a copy of it in 4 bits.
HeadOutput = Literal["own", "int4"]


# ``Failed`` has this code when a worker's weight files were changed while it read them.
WEIGHTS_CHANGED: Final = "weights_changed"


class Adapter(msgspec.Struct, frozen=True):
    """Names a LoRA adapter. ``digest`` is that of its files, which lie at ``path``; a worker that has not
    loaded it yet, or again, does so when it is asked for."""

    name: str
    path: str
    digest: str
    rank: int = 0  # the largest of its modules


class Picture(msgspec.Struct, frozen=True):
    """Is a picture of a prompt, in the size that the model is shown. Its tokens, which are placeholders,
    stand from index ``first`` of the prompt on."""

    first: int
    height: int
    width: int
    pixels: bytes  # red, green and blue of each pixel, row by row


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Asks for ``n`` sequences after ``prompt_token_ids``."""

    request_id: str
    prompt_token_ids: list[int]  # at least one token
    params: SamplingParams
    n: int = 1
    # the text that the client expects, drafted from unless ``params.method`` forbids
    prediction_token_ids: list[int] | None = None
    priority: int = 0  # requests with lower numbers are scheduled first
    cache_prompt: bool = True  # true if computed prefixes are shared with requests of the same ``cache_salt``
    cache_salt: str = ""
    place: int = 0  # orders requests of the same priority, lower numbers first
    tenant: str = ""  # the client's group: one tenant's sequences do not shut out another's
    adapter: Adapter | None = None  # computed prefixes are shared with requests of the same one
    pictures: list[Picture] = []  # in the order of their places

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class Text(msgspec.Struct, frozen=True, array_like=True):
    """Is one text, or a pair of texts whose second one begins at index ``second_from``."""

    token_ids: list[int]
    second_from: int | None = None


class Embed(msgspec.Struct, frozen=True, tag=True):
    """Asks for a vector of each of ``texts``, or for a score of each pair."""

    request_id: str
    texts: list[Text]
    dimensions: int | None = None  # the number of a vector's first numbers that are wanted; None: all
    normalizes: bool | None = None  # true if vectors get length 1; None: as the model's files say
    priority: int = 0  # has the meaning that it has in ``Generate``
    tenant: str = ""  # has the meaning that it has in ``Generate``
    n: ClassVar[int] = 1

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self.texts)


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stops one sequence of a request, or all of them when ``index`` is None. Unknown ids are ignored."""

    request_id: str
    index: int | None = None


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter. The answer is ``AdapterLoaded``, or ``Failed`` with the same id."""

    request_id: str
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Forget an adapter once the sequences that have it have ended. Unknown ones are ignored."""

    digest: str


class ClearPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Forget what earlier requests have left for later ones, in memory and in files; ``Cleared`` answers."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Asks the worker to leave its loop after the current step."""


class EncoderDecoderLengths(msgspec.Struct, frozen=True):
    """Holds the limits of an encoder-decoder target, in tokens."""

    max_prompt_len: int
    max_output_len: int
    num_start_tokens: int  # they precede the output in the cache and are not part of it


class EmbeddingFacts(msgspec.Struct, frozen=True):
    """Describes the vectors that a model makes, and how texts are prepared for it."""

    size: int  # the numbers of a vector
    prompts: dict[str, str] = {}  # texts to put before inputs, by their names in the model's files
    default_prompt: str | None = None  # the name of the one that is used if a request names none
    dimensions: list[int] = []  # sizes to which vectors may be cut; empty: any, if the model ``shortens``
    shortens: bool = False  # true if vectors may be cut at all
    lower_cases: bool = False  # true if texts are read in lower case
    pair_template: str = ""  # has places for instruction, query and document, if a pair is one text
    instruction: str = ""  # stands in the template unless a request has another one


class VisionFacts(msgspec.Struct, frozen=True):
    """Says how pictures are prepared for a model that sees. Each ``tile`` x ``tile`` pixels of a picture are
    a token; sides are multiples of ``tile``, and pixels are between ``min_pixels`` and ``max_pixels``."""

    token_id: int  # the placeholder
    tile: int
    min_pixels: int
    max_pixels: int
    resample: int  # Pillow's number of the filter that scales pictures
    max_images: int  # a prompt may have so many
    has_axes: bool = True  # true if tokens of a picture have positions by row and column

    def num_tokens(self, height: int, width: int) -> int:
        return (height // self.tile) * (width // self.tile)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Tells the front end that the models are loaded and the caches allocated, and describes both."""

    target: str
    draft: str | None
    device: str
    dtype: str  # the type in which linear layers multiply
    vocab_size: int
    max_model_len: int  # bounds prompt and output together
    num_target_blocks: int
    num_draft_blocks: int
    block_size: int
    methods: list[Source]  # the ways to draft that are available here; "none" always is
    method: Method  # the one that is used unless a request names another
    num_threads: int = 0
    thread_limit: str = ""  # why there are fewer threads than processors, unless the settings say so
    # what the model's generation config recommends, by the parameters' names
    default_sampling: dict[str, float] = {}
    # bounds prompt and output each, for a target with an encoder
    encoder_decoder: EncoderDecoderLengths | None = None
    forward: str = ""  # names in words what computes the target's layers
    weights: list[str] = []  # types in which the target's weights are kept, the most common first
    fingerprint: str = ""  # changes with whatever may change the target's tokens
    num_state_slots: int = 0  # sequences whose states fit into each cache of a model with recurrent layers
    state_bytes: int = 0  # memory of one sequence's states and their records in both caches
    max_num_sequences: int = 32  # the number of sequences that run at the same time
    cache_dtype: str = ""  # the type of the target's keys and values
    weight_bytes: int = 0  # memory of both models' linear layers and embeddings
    cache_bytes: int = 0  # memory of both caches once they are full
    worker_bytes: int = 0  # memory of the whole worker at start, weights included
    tried: list[str] = []  # one line for each draft that was measured at start, and for the choice
    task: Task = "generate"
    embedding: EmbeddingFacts | None = None  # None if the model writes text
    adapters: list[Adapter] = []  # LoRA adapters that the settings name
    vision: VisionFacts | None = None  # None if the model sees no pictures


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Holds the log-probability of one token under the target's raw logits."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the most likely tokens there, as (id, log-probability)
    rank: int = 1  # one more than the number of tokens that are more likely
    given: list[tuple[int, float]] = []  # the tokens of ``logprob_token_ids``, in their order


class PredictionUse(msgspec.Struct, frozen=True, array_like=True):
    """Tells how one step used the client's prediction."""

    matched: list[int]  # each emitted token's index in the prediction, or -1
    first_drafted: int  # index of the first token that was drafted from the prediction
    num_drafted: int


class DraftVocabulary(msgspec.Struct, frozen=True):
    """Identifies the tokens that a head drafts, where these are not all that it could draft."""

    digest: str  # the digest of the bitmap, which serves as a name
    bitmap: bytes | None  # has a bit for each id, the lowest bits first; None if an earlier round had it


class RoundTrace(msgspec.Struct, frozen=True):
    """Holds everything needed to verify one round again: who drafted what, and how it was judged.

    Probabilities are those after processing by the request's parameters; at temperature 0 they are 0 or 1.
    """

    position: int  # the absolute index of the round's first token
    source: str
    rule: str
    draft_ids: list[int]
    target_probs: list[float]  # the target's probability of each drafted token
    draft_probs: list[float]  # the probability with which each token was drafted
    num_accepted: int
    next_token: int  # the recovered or bonus token after the accepted ones
    next_target_prob: float | None = None  # the target's probability of it
    head_output: HeadOutput | None = None  # the output layer of the head that drafted, if one did
    vocabulary: DraftVocabulary | None = None  # the tokens of that layer; None: all


class RoundOrigin(msgspec.Struct, frozen=True, array_like=True):
    """Tells who drafted the tokens that a round gave."""

    source: str
    num_drafted: int
    num_accepted: int  # the first tokens of the round, which are drafts of ``source``
    num_tokens: int  # all of them: one more may follow the accepted ones


class TokenOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds what one step gave one sequence: in each round 1 to k + 1 tokens."""

    request_id: str
    index: int
    token_ids: list[int]  # includes an end-of-sequence or stop token
    finish_reason: FinishReason | None  # None while the sequence goes on
    num_draft_tokens: int
    num_accepted_tokens: int
    num_rounds: int = 1  # rounds of this step; above one only where they take some milliseconds together
    seed: int = 0  # the sequence's own seed, given or drawn
    num_cached_tokens: int = 0  # tokens of the prompt that earlier requests had computed
    # the time before the sequence's first step; comes with its first output
    queue_seconds: float | None = None
    logprobs: list[TokenLogprob] | None = None
    # come with the first output; the first token of the prompt has none
    prompt_logprobs: list[TokenLogprob | None] | None = None
    trace: RoundTrace | None = None
    prediction: PredictionUse | None = None  # None if the request has no prediction in use
    # one entry for each round that gave tokens, if the request asks for them
    origins: list[RoundOrigin] | None = None
    budget_spent: bool = False  # true if thinking_budget has closed the reasoning, in this step or before

    @property
    def sequence(self) -> tuple[str, int]:
        return self.request_id, self.index

    @property
    def is_first(self) -> bool:
        return self.queue_seconds is not None


class Embedded(msgspec.Struct, frozen=True, tag=True):
    """Answers an ``Embed`` request."""

    request_id: str
    vectors: list[bytes]  # float32 numbers, little-endian, of each text; a pair has one number, its score
    index: ClassVar[int] = 0
    finish_reason: ClassVar[FinishReason] = "stop"
    is_first: ClassVar[bool] = True


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """An adapter can be asked for from now on."""

    request_id: str
    adapter: Adapter


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Tells that a request ended by an error; all of its sequences are gone."""

    request_id: str  # empty if it is the worker itself that could not start
    code: str  # names the error for the client
    message: str


class DraftCounts(msgspec.Struct):
    """Counts the drafts of one source. A *draft* is the guess of one sequence in one round; empty ones do not
    count."""

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
    """Holds totals since the worker started, and gauges of this moment. The reader derives rates."""

    num_running: int
    num_waiting: int
    num_speculative_tokens: float
    cache_usage: dict[str, float]  # the used share of each model's cache, 0 to 1
    num_preemptions: int  # sequences that went back to the queue because cache blocks had run out
    num_prefix_queries: int  # prompt tokens looked up in the prefix cache
    num_prefix_hits: int  # prompt tokens found there
    drafts: dict[str, DraftCounts]  # counts by source
    draft_tokens_per_position: list[int]  # tokens drafted as the first, second, ... of their draft
    accepted_tokens_per_position: list[int]  # the same for accepted tokens
    phase_seconds: dict[str, float]
    # rows of rounds by runner: C, CUDA graphs, or phases, which are slower than either
    num_rows: dict[str, int] = {}
    num_yields: int = 0  # sequences that went back to the queue for a tenant that had none running
    prefix_files: PrefixFileStats | None = None  # if there are some


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """Holds what one engine step produced, or several short ones: the sequences' outputs in their order."""

    outputs: list[TokenOutput]
    stats: Stats  # describes the moment of sending


class SpeculationState(msgspec.Struct, frozen=True, tag=True):
    """Tells people how the draft length is chosen, and why. The worker sends it now and then."""

    state: dict[str, Any]


class Cleared(msgspec.Struct, frozen=True, tag=True):
    """A ``ClearPrefixes`` is done."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The worker has begun a stage of loading; ``stage`` names it for people."""

    stage: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Tells that the worker lives, and that its loop has been in the same step for ``step_seconds``."""

    step_seconds: float


ToWorker = Generate | Embed | Abort | LoadAdapter | UnloadAdapter | ClearPrefixes | Shutdown
FromWorker = (
    Loading | Ready | StepOutput | Embedded | AdapterLoaded | SpeculationState | Cleared | Failed | Heartbeat
)

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
    """Returns a message as it is on the border's sockets: its length, then its bytes."""
    data = encode(message)
    return LENGTH.pack(len(data)) + data


class Inbox:
    """Reassembles messages from the bytes of a socket, which arrive in pieces of any size."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, arrived: bytes) -> list[bytes]:
        """Returns the messages that are complete with these bytes."""
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
