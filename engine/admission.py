"""Requests to sequences: limits checked, defaults filled in, seeds drawn. No tensors.

The front end has checked ranges already; what is checked here depends on the loaded models.
"""

import secrets
from dataclasses import dataclass

from engine.messages import Generate, Method, SamplingParams, Verification
from engine.sampling.random import sequence_seed
from engine.sequence import Sequence

# The longest draft that the policy may choose: drafts without a model cost next to nothing.
AUTO_LIMITS: dict[Method, int] = {"draft_model": 8, "ngram": 16}


class RequestError(Exception):
    """A request the engine cannot serve; ``code`` names the reason for the client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Admission:
    """What the loaded pair allows, and what requests get that do not say.

    ``method`` is one of ``methods`` or none. ``num_speculative_tokens`` None leaves the draft length to the
    policy; ``verification`` None decides by seed.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    methods: frozenset[Method]
    method: Method
    num_speculative_tokens: int | None
    verification: Verification | None

    def sequences(self, request: Generate) -> list[Sequence]:
        """The request's ``n`` sequences; ``RequestError`` if it can never be served."""
        params, prompt = request.params, request.prompt_token_ids
        self._check(prompt, params)
        seed = secrets.randbits(53) if params.seed is None else params.seed
        stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self.eos_token_ids
        method, num_speculative_tokens, fixed_draft_length = self._speculation(params)
        return [
            Sequence(
                request_id=request.request_id,
                index=index,
                params=params,
                seed=sequence_seed(seed, index),
                verification=self._verification(params),
                method=method,
                num_speculative_tokens=num_speculative_tokens,
                fixed_draft_length=fixed_draft_length,
                stop_token_ids=stop_token_ids,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                max_num_tokens=min(len(prompt) + params.max_tokens, self.max_model_len),
                priority=request.priority,
                cache_prompt=request.cache_prompt,
                cache_salt=request.cache_salt,
            )
            for index in range(request.n)
        ]

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise RequestError("empty_prompt", "the prompt has no tokens")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {len(prompt)} tokens, the model's context {self.max_model_len}",
            )
        if params.method not in (None, "none", *self.methods):
            raise RequestError(
                "speculation_unavailable", f"method {params.method!r} is not there: no draft model is loaded"
            )
        for name, ids in (
            ("the prompt", prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if any(not 0 <= token_id < self.vocab_size for token_id in ids):
                raise RequestError(
                    "invalid_token_id", f"{name} has a token id outside 0..{self.vocab_size - 1}"
                )

    def _verification(self, params: SamplingParams) -> Verification:
        by_seed: Verification = "rejection" if params.seed is None else "coupled"
        return params.verification or self.verification or by_seed

    def _speculation(self, params: SamplingParams) -> tuple[Method, int, bool]:
        """Who drafts; how many tokens; whether exactly so many or at most."""
        method = params.method or self.method
        asked = params.num_speculative_tokens
        length = self.num_speculative_tokens if asked is None else asked
        if method == "none" or length == 0:
            return "none", 0, True
        return (method, AUTO_LIMITS[method], False) if length is None else (method, length, True)
