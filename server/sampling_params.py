"""A checked request to the engine's ``SamplingParams``: the home of OpenAI's defaults.

Ranges of single fields are declared in ``server.schemas``; what depends on several of them, on the model or
on the prompt's length is decided here.
"""

from engine.messages import Ready, SamplingParams
from server.errors import ContextLengthError, InvalidRequestError
from server.schemas.chat import ChatRequest
from server.schemas.common import GenerationRequest, SpeculationOptions
from server.schemas.completion import CompletionRequest

DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_TEMPERATURE = 1.0


def build_sampling_params(
    request: GenerationRequest, *, num_prompt_tokens: int, worker: Ready
) -> SamplingParams:
    """``num_prompt_tokens`` is that of the longest prompt, which leaves least room for output."""
    _check_stream_options(request)
    speculation = request.speculation or SpeculationOptions()
    return SamplingParams(
        max_tokens=_max_tokens(request, num_prompt_tokens, worker.max_model_len),
        temperature=DEFAULT_TEMPERATURE if request.temperature is None else request.temperature,
        top_k=max(0, request.top_k or 0),  # -1 is another usual way to say "off"
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        seed=request.seed,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=request.stop_token_ids or [],
        num_speculative_tokens=_num_speculative_tokens(speculation, worker),
        verification=speculation.verification,
    )


def _check_stream_options(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options is only allowed with stream: true.", param="stream_options")


def _max_tokens(request: GenerationRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    if num_prompt_tokens >= max_model_len:
        raise ContextLengthError(
            f"This model's context is {max_model_len} tokens long, but the prompt has {num_prompt_tokens} "
            "tokens and at least one more is needed.",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
        )
    room = max_model_len - num_prompt_tokens
    name, asked = _asked_tokens(request)
    if asked is None:
        return room
    if asked > room:
        raise ContextLengthError(
            f"This model's context is {max_model_len} tokens long, but {num_prompt_tokens} tokens of prompt "
            f"and {asked} of output were asked for. Shorten the prompt or lower {name}.",
            param=name,
        )
    return asked


def _asked_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    """The field that limits the output and its value; None is "until the context ends"."""
    if isinstance(request, CompletionRequest):
        asked = request.max_tokens
        return "max_tokens", DEFAULT_COMPLETION_TOKENS if asked is None else asked
    assert isinstance(request, ChatRequest)
    if request.max_completion_tokens is None:
        return "max_tokens", request.max_tokens
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens are the same limit; give one of them.", param="max_tokens"
        )
    return "max_completion_tokens", request.max_completion_tokens


def _num_speculative_tokens(speculation: SpeculationOptions, worker: Ready) -> int | None:
    """Drafted tokens per round that the request asks for; None leaves it to the engine."""
    asked = speculation.num_speculative_tokens
    if speculation.method == "none":
        if asked:
            raise InvalidRequestError(
                "method 'none' drafts nothing, so num_speculative_tokens must be 0 or absent.",
                param="speculation.num_speculative_tokens",
            )
        return 0
    if speculation.method == "draft_model" and worker.draft is None:
        raise InvalidRequestError("This server has no draft model.", param="speculation.method")
    return asked
