"""A checked request to the engine's ``SamplingParams``: the home of OpenAI's defaults.

Ranges of single fields are declared in ``server.schemas``; what depends on several of them, on the model or
on the prompt's length is decided here.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from truedraft.engine.messages import DraftSampleMethod, Method, Ready, SamplingParams, Verification
from truedraft.engine.parameters import CUTS, PARAMETERS, PENALTIES
from truedraft.server.errors import ContextLengthError, InvalidRequestError, UnsupportedParameterError
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.chat import ChatRequest
from truedraft.server.schemas.common import GenerationRequest, SamplingRequest, SpeculationOptions
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.schemas.responses import ResponsesRequest
from truedraft.server.settings import RequestSettings

DEFAULT_COMPLETION_TOKENS = 16

# A request says these by their own names. What it leaves out is as the model's makers recommend, or
# else as the parameters' rows say.
PLAIN = ("temperature", "seed", "ignore_eos", *CUTS, *PENALTIES)

# A key of a JSON object that is an integer, in the one way to write it.
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

# OpenAI's largest top_logprobs, and ours of prompt_logprobs.
MAX_TOP_LOGPROBS = 20

# Methods whose drafts are known text: there is nothing to draw.
CERTAIN_METHODS = frozenset({"ngram", "prediction", "grammar"})

# Tokens that a round may draft where the request leaves it to the engine.
MAX_DRAFTED = 32


def build_sampling_params(
    request: SamplingRequest,
    *,
    num_prompt_tokens: int,
    worker: Ready,
    limits: RequestSettings,
    leniency: Leniency,
) -> SamplingParams:
    """``num_prompt_tokens`` is that of the longest prompt, which leaves least room for output."""
    max_logprobs = limits.max_logprobs
    _check_stream_options(request)
    if worker.encoder_decoder is not None:
        _check_prompt_is_not_scored(request)
    _check_token_ids("stop_token_ids", request.stop_token_ids or [], worker.vocab_size)
    speculation = request.speculation or SpeculationOptions()
    can_clamp = limits.clamp_max_tokens and not leniency.is_strict
    may_clamp = can_clamp and isinstance(request, ChatRequest | ResponsesRequest)
    max_tokens = _max_tokens(request, num_prompt_tokens, worker, leniency if may_clamp else None)
    logprobs = _logprobs(request, max_logprobs)
    plain = {name: _plain(name, request, worker) for name in PLAIN}
    return SamplingParams(
        **plain,
        max_tokens=max_tokens,
        logit_bias=_logit_bias(request.logit_bias or {}, worker.vocab_size, limits.max_logit_bias),
        min_tokens=_min_tokens(request, max_tokens),
        stop_token_ids=request.stop_token_ids or [],
        logprobs=logprobs,
        logprob_token_ids=_logprob_token_ids(request, logprobs, worker.vocab_size),
        prompt_logprobs=(prompt_logprobs := _prompt_logprobs(request, logprobs, max_logprobs)),
        prompt_logprobs_start=_prompt_logprobs_start(request, prompt_logprobs, num_prompt_tokens),
        method=_method(request, speculation, worker),
        num_speculative_tokens=_num_speculative_tokens(speculation),
        draft_sample_method=_draft_sample_method(speculation, worker),
        verification=_verification(speculation, plain),
        trace=speculation.trace or speculation.origins is True,
        origins=speculation.origins is not False,
    )


def _plain(name: str, request: SamplingRequest, worker: Ready) -> Any:
    row, asked = PARAMETERS[name], getattr(request, name)
    if asked is None:
        asked = worker.default_sampling.get(name, row.default)
    # -1 is another usual way to say "off"
    return max(0, int(asked)) if name == "top_k" else asked


def check_answer_size(
    request: SamplingRequest, params: SamplingParams, prompts: Sequence[int], n: int, limits: RequestSettings
) -> None:
    """Refuse an answer of more values than one may hold; ``prompts`` are the lengths of the prompts.

    A value is what is told of a token: its id, its origin, its text again, each of its log-probabilities, and
    each drafted token of a trace. What a stream has sent is gone, so there only the prompts' and the trace
    count, which come in one piece.
    """
    wants_ids = isinstance(request, GenerationRequest) and bool(request.return_token_ids)
    of_prompts = {
        "prompt_logprobs": 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1,
        "echo": int(isinstance(request, CompletionRequest) and bool(request.echo)),
        "return_token_ids": int(wants_ids),
    }
    drafted = MAX_DRAFTED if params.num_speculative_tokens is None else params.num_speculative_tokens
    of_output = {"speculation.trace": drafted + 1 if params.trace else 0}
    if not request.stream:
        each = params.logprobs is not None and params.logprobs + len(params.logprob_token_ids) + 1
        of_output["logprobs"] = int(each)
        of_output["return_token_ids"] = of_prompts["return_token_ids"]
        of_output["speculation.origins"] = int(params.origins)
    num_prompt, num_output = n * sum(prompts), n * len(prompts) * params.max_tokens
    values = Counter({name: num_prompt * each for name, each in of_prompts.items()})
    values.update({name: num_output * each for name, each in of_output.items()})
    if values.total() > limits.max_answer_values:
        raise InvalidRequestError(
            f"The answer could hold {values.total()} values (tokens times values per token), but at most "
            f"{limits.max_answer_values} are allowed (max_answer_values). Ask for fewer tokens, prompts, "
            "choices or alternatives.",
            param=max(values, key=values.__getitem__),
        )


def longest_request(worker: Ready) -> int:
    """Tokens of prompt and output together that fit into the model's context and into the empty cache.

    An encoder-decoder model bounds each alone, too; see ``_max_output``.
    """
    if worker.embedding is not None:  # no cache holds texts that are computed in one pass
        return worker.max_model_len
    return min(worker.max_model_len, worker.num_target_blocks * worker.block_size)


def longest_prompt(worker: Ready) -> tuple[int, str]:
    """Tokens of the longest prompt, which may leave no room for output, and what bounds it."""
    longest = longest_request(worker)
    if (lengths := worker.encoder_decoder) is not None:
        return lengths.max_prompt_len, f"This model's encoder reads at most {lengths.max_prompt_len} tokens"
    if longest < worker.max_model_len:
        return longest, f"This server's cache holds {longest} tokens (setting cache_memory)"
    # OpenAI's own words, by which clients tell this error from others.
    return longest, f"This model's maximum context length is {longest} tokens"


def check_prediction(token_ids: list[int] | None, worker: Ready) -> None:
    """A prediction that no answer could be is refused."""
    if token_ids is not None and len(token_ids) > worker.max_model_len:
        raise InvalidRequestError(
            f"The prediction has {len(token_ids)} tokens; this model's context has {worker.max_model_len}.",
            param="prediction",
        )


def _check_stream_options(request: SamplingRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options is only allowed with stream: true.", param="stream_options")


def _check_prompt_is_not_scored(request: SamplingRequest) -> None:
    """The output of an encoder-decoder model does not continue the prompt, which only its encoder reads."""
    asked = {
        "echo": isinstance(request, CompletionRequest) and bool(request.echo),
        "prompt_logprobs": isinstance(request, GenerationRequest) and request.prompt_logprobs is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise UnsupportedParameterError(
                f"'{name}' is not supported: this model's encoder reads the prompt and predicts nothing.",
                param=name,
            )


def _max_output(
    request: SamplingRequest, num_prompt_tokens: int, worker: Ready, clamping: Leniency | None
) -> int:
    """Output tokens that an encoder-decoder model has room for; ``ContextLengthError`` if there are none
    or fewer than asked."""
    lengths = worker.encoder_decoder
    assert lengths is not None
    if num_prompt_tokens > lengths.max_prompt_len:
        raise ContextLengthError(
            f"This model's encoder reads at most {lengths.max_prompt_len} tokens, but the prompt has "
            f"{num_prompt_tokens}.",
            param=request.prompt_field,
        )
    cached = worker.num_target_blocks * worker.block_size
    room = cached - num_prompt_tokens - lengths.num_start_tokens
    if room < 1:
        raise ContextLengthError(
            f"This server's cache holds {cached} tokens (setting cache_memory), but the prompt has "
            f"{num_prompt_tokens} and at least {lengths.num_start_tokens + 1} more are needed.",
            param=request.prompt_field,
        )
    name, asked = _asked_tokens(request)
    if asked is None:
        return min(lengths.max_output_len, room)
    if clamping is not None:
        return _clamped(name, asked, min(lengths.max_output_len, room), clamping)
    if asked > lengths.max_output_len:
        raise ContextLengthError(
            f"This model's decoder writes at most {lengths.max_output_len} tokens, "
            f"but {asked} were asked for. Lower {name}.",
            param=name,
        )
    if asked > room:
        raise ContextLengthError(
            f"This server's cache holds {cached} tokens (setting cache_memory), but {num_prompt_tokens} "
            f"tokens of prompt and {asked} of output were asked for. Shorten the prompt or lower {name}.",
            param=name,
        )
    return asked


def _clamped(name: str, asked: int, room: int, clamping: Leniency) -> int:
    """Returns as many tokens as there is room for, and reports it where that is fewer than asked."""
    if asked > room:
        clamping.adjust(name, room)
    return min(asked, room)


def _max_tokens(
    request: SamplingRequest, num_prompt_tokens: int, worker: Ready, clamping: Leniency | None
) -> int:
    """``clamping`` is None where a request for more than there is room for is refused."""
    if worker.encoder_decoder is not None:
        return _max_output(request, num_prompt_tokens, worker, clamping)
    longest, limit = longest_prompt(worker)
    name, asked = _asked_tokens(request)
    room = longest - num_prompt_tokens
    if room < (asked != 0):
        more = " and at least one more is needed" if asked != 0 else ""
        raise ContextLengthError(
            f"{limit}, but the prompt has {num_prompt_tokens} tokens{more}.", param=request.prompt_field
        )
    if asked is None:
        return min(room, int(worker.default_sampling.get("max_new_tokens", room)))
    if clamping is not None:
        return _clamped(name, asked, room, clamping)
    if asked > room:
        raise ContextLengthError(
            f"{limit}, but {num_prompt_tokens} tokens of prompt and {asked} of output were asked for. "
            f"Shorten the prompt or lower {name}.",
            param=name,
        )
    return asked


def _asked_tokens(request: SamplingRequest) -> tuple[str, int | None]:
    """The field that limits the output and its value; None leaves it to the model: its
    generation config's ``max_new_tokens``, or until the context ends."""
    if isinstance(request, ResponsesRequest):
        return "max_output_tokens", request.max_output_tokens
    assert isinstance(request, ChatRequest | CompletionRequest)
    if request.max_completion_tokens is None:
        default = DEFAULT_COMPLETION_TOKENS if isinstance(request, CompletionRequest) else None
        return "max_tokens", default if request.max_tokens is None else request.max_tokens
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens are the same limit; give one of them.", param="max_tokens"
        )
    return "max_completion_tokens", request.max_completion_tokens


def _min_tokens(request: SamplingRequest, max_tokens: int) -> int:
    asked = request.min_tokens or 0
    if asked > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {asked}, but at most {max_tokens} tokens will be generated.", param="min_tokens"
        )
    return asked


def _logit_bias(bias: Mapping[str, float], vocab_size: int, limit: int) -> dict[int, float]:
    if len(bias) > limit:
        raise InvalidRequestError(
            f"logit_bias has {len(bias)} entries, but at most {limit} are allowed (max_logit_bias).",
            param="logit_bias",
        )
    for key in bias:
        if not TOKEN_ID.fullmatch(key):
            raise InvalidRequestError(f"logit_bias: {key[:20]!r} is not a token id.", param="logit_bias")
    by_id = {int(key): value for key, value in bias.items()}
    _check_token_ids("logit_bias", by_id, vocab_size)
    return by_id


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise InvalidRequestError(
                f"{name}: token id {token_id} is not in the vocabulary of {vocab_size} tokens.", param=name
            )


def _logprobs(request: SamplingRequest, max_logprobs: int) -> int | None:
    """Returns how many of the most likely tokens to report at each position; None reports nothing."""
    if isinstance(request, CompletionRequest):
        return _limited("logprobs", request.logprobs, max_logprobs)
    assert isinstance(request, ChatRequest | ResponsesRequest)
    if not request.wants_logprobs:
        if request.top_logprobs:
            raise InvalidRequestError(
                f"top_logprobs is only allowed with {request.logprobs_switch}.", param="top_logprobs"
            )
        return None
    return _limited("top_logprobs", request.top_logprobs or 0, max(max_logprobs, MAX_TOP_LOGPROBS))


def _prompt_logprobs(request: SamplingRequest, logprobs: int | None, max_logprobs: int) -> int | None:
    """Enough for ``prompt_logprobs`` itself and for the log-probabilities of an echoed prompt."""
    if not isinstance(request, GenerationRequest):
        return None
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError(
            "prompt_logprobs is only allowed without stream: true.", param="prompt_logprobs"
        )
    asked = _limited("prompt_logprobs", request.prompt_logprobs, max(max_logprobs, MAX_TOP_LOGPROBS))
    if logprobs is None or not isinstance(request, CompletionRequest) or not request.echo:
        return asked
    return max(asked or 0, logprobs)


def _logprob_token_ids(request: SamplingRequest, logprobs: int | None, vocab_size: int) -> list[int]:
    asked = (isinstance(request, GenerationRequest) and request.logprob_token_ids) or []
    if asked and logprobs is None:
        raise InvalidRequestError(
            "logprob_token_ids is only allowed with logprobs: 0 or more on completions, true on chats.",
            param="logprob_token_ids",
        )
    _check_token_ids("logprob_token_ids", asked, vocab_size)
    return asked


def _prompt_logprobs_start(
    request: SamplingRequest, prompt_logprobs: int | None, num_prompt_tokens: int
) -> int:
    start = (isinstance(request, GenerationRequest) and request.prompt_logprobs_start) or 0
    if start and prompt_logprobs is None:
        raise InvalidRequestError(
            "prompt_logprobs_start is only allowed with prompt_logprobs, or with echo and logprobs.",
            param="prompt_logprobs_start",
        )
    if start >= max(1, num_prompt_tokens):
        raise InvalidRequestError(
            f"prompt_logprobs_start is {start}, but the prompt has {num_prompt_tokens} tokens, counted "
            "from 0.",
            param="prompt_logprobs_start",
        )
    return start


def _limited(name: str, asked: int | None, limit: int) -> int | None:
    if asked is not None and asked > limit:
        raise InvalidRequestError(
            f"{name} is {asked}, but at most {limit} are reported (max_logprobs).", param=name
        )
    return asked


def _num_speculative_tokens(speculation: SpeculationOptions) -> int | None:
    """Drafted tokens per round that the request asks for; None leaves it to the engine."""
    asked = speculation.num_speculative_tokens
    if speculation.method == "none":
        if asked:
            raise InvalidRequestError(
                "method 'none' drafts nothing, so num_speculative_tokens must be 0 or absent.",
                param="speculation.num_speculative_tokens",
            )
        return 0
    return asked


def _method(request: SamplingRequest, speculation: SpeculationOptions, worker: Ready) -> Method | None:
    if speculation.method == "auto":
        return None
    prediction = request.prediction if isinstance(request, GenerationRequest) else None
    if speculation.method == "prediction" and prediction is None:
        raise InvalidRequestError("speculation.method 'prediction' needs a 'prediction'.", param="prediction")
    if speculation.method != "none" and speculation.method not in worker.methods:
        known = ", ".join(("auto", "none", *worker.methods))
        raise InvalidRequestError(
            f"This server cannot draft by the method {speculation.method!r}; it can by {known}.",
            param="speculation.method",
        )
    return speculation.method


def _draft_sample_method(speculation: SpeculationOptions, worker: Ready) -> DraftSampleMethod | None:
    """Returns what is asked for. Only a draft model can draw at random: other drafts are certain."""
    asked = speculation.draft_sample_method
    method = worker.method if speculation.method == "auto" else speculation.method
    if asked != "probabilistic" or method == "none":
        return asked
    if CERTAIN_METHODS.issuperset(worker.methods):
        reason = "this server has none"
    elif method in CERTAIN_METHODS:
        reason = f"method {method!r} does not use it"
    else:
        return asked
    raise InvalidRequestError(
        f"speculation.draft_sample_method 'probabilistic' needs a draft model, and {reason}; use 'greedy' or "
        "leave it out.",
        param="speculation.draft_sample_method",
    )


def _verification(speculation: SpeculationOptions, plain: Mapping[str, Any]) -> Verification | None:
    """Returns what is asked for. To match the target's most likely token would change a sampled answer."""
    is_greedy = plain["temperature"] == 0 or plain["top_k"] == 1
    if speculation.verification == "exact_match" and not is_greedy:
        raise InvalidRequestError(
            "speculation.verification 'exact_match' is exact at temperature 0 alone; set temperature to 0, "
            "or use 'rejection', 'block' or 'coupled'.",
            param="speculation.verification",
        )
    return speculation.verification
