"""Makes sequences of requests: limits are checked, defaults filled in, seeds drawn; without tensors.

The front end has checked ranges already; what is checked here depends on the loaded models.
"""

import secrets
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from truedraft.engine.core.prediction import Prediction, PredictionCursor
from truedraft.engine.core.sequence import Sequence, is_greedy, is_scored_alone, sequence_seed
from truedraft.engine.core.step import AUTO_LIMITS, auto_limit
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import (
    Adapter,
    DraftSampleMethod,
    Generate,
    SamplingParams,
    Verification,
    VisionFacts,
)

if TYPE_CHECKING:
    from truedraft.engine.memory.pictures import PromptPictures
    from truedraft.engine.sampling.grammar import Grammars, Matcher
    from truedraft.engine.sampling.thinking import ThinkingBudget


NO_ADAPTERS = (
    "this model takes no LoRA adapters: that needs a fused family (docs/models.md) on a CPU, and "
    "lora_modules or allow_lora_updating"
)

NO_PICTURES = (
    "this model does not see pictures: that needs a Qwen-VL checkpoint with its preprocessor_config.json "
    "on a CPU, and max_images above 0 (docs/images.md)"
)


class RequestError(Exception):
    """Says why the engine cannot serve a request; ``code`` names the reason for the client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Adapters(Protocol):
    """Knows the target's adapters by digest. ``named`` are those of the settings."""

    named: list[Adapter]

    def load(self, name: str, path: str) -> Adapter:
        """Raises ``RequestError`` if the adapter cannot be loaded."""
        ...

    def unload(self, digest: str) -> None: ...

    def number_of(self, adapter: Adapter) -> int:
        """Returns the adapter's number in passes, and loads it if it is not there; raises ``RequestError`` if
        that cannot be."""
        ...

    def keep_for(self, number: int, sequence: Sequence) -> None:
        """Keeps the adapter at least as long as the sequence."""
        ...

    def free_unused(self) -> None:
        """Frees the memory of unloaded adapters whose last sequence has ended."""
        ...


class Vision(Protocol):
    """Sees pictures for the target."""

    facts: VisionFacts

    def check(self, request: Generate) -> None:
        """Raises ``RequestError`` unless the prompt has places for its pictures."""
        ...

    def see(self, request: Generate, *, waits: bool = True) -> "Future[PromptPictures]":
        """Begins to look at a request's pictures, in another thread; if it ``waits``, not before there is
        memory for what it sees."""
        ...

    def forget(self) -> None:
        """Forgets what earlier requests' pictures have left for later ones."""
        ...


@dataclass(frozen=True)
class EncoderDecoderLimits:
    """Says what an encoder-decoder target reads and writes at most, and what its decoder starts with.

    ``max_output_len`` does not count ``start_ids``. ``forced_eos_token_id`` ends what ``max_tokens`` cuts.
    """

    start_ids: tuple[int, ...]
    max_prompt_len: int
    max_output_len: int
    forced_eos_token_id: int | None = None


@dataclass(frozen=True)
class Admission:
    """Says what the loaded pair allows, and what requests get that leave it open.

    ``methods`` are the sources that can draft here, in the order in which sequences have them; ``method`` is
    auto, one of them or none. ``num_speculative_tokens`` None leaves the draft length
    to the policy; ``verification`` None decides by seed, ``draft_sample_method`` None by the temperature.
    Sources that are ``drawing`` can draft greedily or at random; what others draft is certain.
    ``encoder_decoder`` None: a decoder only.
    ``has_rules``: the checkpoint's generation config forbids or forces tokens. ``grammars`` None: outputs
    cannot be constrained. ``adapters`` None: the target takes none. ``vision`` None: it sees no pictures.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    methods: tuple[str, ...]
    method: str
    num_speculative_tokens: int | None
    verification: Verification | None
    draft_sample_method: DraftSampleMethod | None = None
    drawing: frozenset[str] = frozenset()
    encoder_decoder: EncoderDecoderLimits | None = None
    has_rules: bool = False
    grammars: "Grammars | None" = None
    adapters: Adapters | None = None
    vision: Vision | None = None

    def seeing(self, request: Generate, *, waits: bool = True) -> "Future[PromptPictures] | None":
        """Begins to look at a request's pictures, if it has some; raises ``RequestError`` if it can never be
        served."""
        if not request.pictures:
            return None
        if self.vision is None:
            raise RequestError("unsupported_parameter", NO_PICTURES)
        if request.params.trace:
            raise RequestError(
                "unsupported_parameter",
                "a trace has no pictures, so nobody could verify it: leave out speculation.trace",
            )
        if request.params.method in set(self.methods) - {*AUTO_LIMITS}:
            raise RequestError(
                "speculation_unavailable",
                f"method {request.params.method!r} drafts by what a model reads, and no draft sees pictures: "
                "after a picture auto, none, ngram, prediction and grammar are there",
            )
        self.vision.check(request)
        return self.vision.see(request, waits=waits)

    def sequences(self, request: Generate, pictures: "PromptPictures | None" = None) -> list[Sequence]:
        """Returns the request's ``n`` sequences, with what the target sees in its ``pictures``; raises
        ``RequestError`` if it can never be served."""
        params, prompt = request.params, request.prompt_token_ids
        self._check(request)
        start_ids: tuple[int, ...] = ()
        if self.encoder_decoder is not None:
            start_ids = self.encoder_decoder.start_ids
            max_tokens = min(params.max_tokens, self.encoder_decoder.max_output_len)
            params = structs.replace(params, max_tokens=max_tokens)
        num_encoder_tokens = len(prompt) if start_ids else 0
        num_prompt_tokens = len(prompt) + len(start_ids)
        seed = secrets.randbits(53) if params.seed is None else params.seed
        stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self.eos_token_ids
        sources, num_speculative_tokens, fixed_draft_length = self._speculation(request)
        self._check_draws(params, sources)
        prediction: Prediction | None = None
        if "prediction" in sources:
            prediction = Prediction(request.prediction_token_ids or [])
        matchers = self._matchers(request)
        adapter = self._adapter(request)
        found = [
            Sequence(
                request_id=request.request_id,
                index=index,
                params=params,
                seed=sequence_seed(seed, index),
                verification=self._verification(params),
                sources=sources,
                has_rules=self.has_rules,
                draft_sample_method=self._draft_sample_method(params, sources),
                num_speculative_tokens=num_speculative_tokens,
                fixed_draft_length=fixed_draft_length,
                stop_token_ids=stop_token_ids,
                token_ids=[*prompt, *start_ids],
                num_prompt_tokens=num_prompt_tokens,
                max_num_tokens=min(
                    num_prompt_tokens + params.max_tokens, self.max_model_len + is_scored_alone(params)
                ),
                num_encoder_tokens=num_encoder_tokens,
                forced_end=self._forced_end(params),
                target_blocks=BlockTable(num_encoder_tokens, adapter, pictures),
                priority=request.priority,
                place=request.place,
                tenant=request.tenant,
                cache_prompt=request.cache_prompt,
                cache_salt=request.cache_salt,
                adapter="" if request.adapter is None else request.adapter.digest,
                prediction=None if prediction is None else PredictionCursor(prediction),
                matcher=matcher,
            )
            for index, matcher in enumerate(matchers)
        ]
        if self.adapters is not None and adapter >= 0:
            for sequence in found:
                self.adapters.keep_for(adapter, sequence)
        return found

    def _adapter(self, request: Generate) -> int:
        if self.adapters is not None:
            self.adapters.free_unused()
        if request.adapter is None:
            return -1
        if self.adapters is None:
            raise RequestError("unsupported_parameter", NO_ADAPTERS)
        return self.adapters.number_of(request.adapter)

    def room(self, num_prompt_tokens: int) -> int:
        """Returns how many output tokens the context leaves after such a prompt."""
        if self.encoder_decoder is not None:
            return self.encoder_decoder.max_output_len
        return self.max_model_len - num_prompt_tokens

    def _check(self, request: Generate) -> None:
        params, prompt = request.params, request.prompt_token_ids
        if not prompt:
            raise RequestError("empty_prompt", "the prompt has no tokens")
        if self.encoder_decoder is not None:
            self._check_encoder(prompt, params, self.encoder_decoder)
        elif len(prompt) >= self.max_model_len + is_scored_alone(params):
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {len(prompt)} tokens, the model's context {self.max_model_len}",
            )
        if params.prompt_logprobs_start >= max(1, len(prompt)):
            raise RequestError(
                "invalid_value",
                f"prompt_logprobs_start is {params.prompt_logprobs_start}, but the prompt has {len(prompt)} "
                "tokens, counted from 0",
            )
        if params.method not in (None, "auto", "none", *self.methods):
            raise RequestError(
                "speculation_unavailable",
                f"method {params.method!r} is not there; auto, none, {', '.join(self.methods)} are",
            )
        if params.method == "prediction" and request.prediction_token_ids is None:
            raise RequestError("prediction_missing", "method 'prediction' needs a prediction")
        if params.method == "grammar" and params.grammar is None and params.thinking_budget is None:
            raise RequestError("grammar_missing", "method 'grammar' needs a grammar or a thinking_budget")
        if params.thinking_budget is not None and (
            len(params.thinking_marks) != 4 or not params.thinking_marks[1]
        ):
            raise RequestError(
                "invalid_value", "thinking_budget needs thinking_marks: four lists, the second with tokens"
            )
        if params.grammar_after and params.grammar is None:
            raise RequestError("grammar_missing", "grammar_after needs a grammar")
        for name, ids in (
            ("the prompt", prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
            ("logprob_token_ids", params.logprob_token_ids),
            ("grammar_after", params.grammar_after),
            ("thinking_marks", [token_id for mark in params.thinking_marks for token_id in mark]),
            ("the prediction", request.prediction_token_ids or []),
        ):
            if any(not 0 <= token_id < self.vocab_size for token_id in ids):
                raise RequestError(
                    "invalid_token_id", f"{name} has a token id outside 0..{self.vocab_size - 1}"
                )

    def _check_draws(self, params: SamplingParams, sources: tuple[str, ...]) -> None:
        """Refuses what cannot be had of how drafts are drawn and verified, or would not be exact."""
        if params.verification == "exact_match" and not is_greedy(params):
            raise RequestError(
                "invalid_value",
                "verification 'exact_match' is exact at temperature 0 alone; with another temperature use "
                "'rejection', 'block' or 'coupled', which accept any draft_sample_method",
            )
        if params.draft_sample_method == "probabilistic" and sources and self.drawing.isdisjoint(sources):
            raise RequestError(
                "unsupported_parameter",
                "draft_sample_method 'probabilistic' needs a model that draws drafts, but what "
                f"{' and '.join(sources)} drafts here is certain; use 'greedy' or leave it out",
            )

    def _draft_sample_method(
        self, params: SamplingParams, sources: tuple[str, ...]
    ) -> DraftSampleMethod | None:
        """Returns how drafts are drawn, as far as a source draws them."""
        if self.drawing.isdisjoint(sources):
            return None
        return params.draft_sample_method or self.draft_sample_method

    def _matchers(self, request: Generate) -> "list[Matcher | ThinkingBudget | None]":
        """Makes a matcher for each choice."""
        params = request.params
        if params.grammar is None and params.thinking_budget is None:
            return [None] * request.n
        if self.grammars is None or self.encoder_decoder is not None or self.has_rules:
            raise RequestError(
                "unsupported_parameter",
                "this model's output cannot be constrained by a grammar or a thinking_budget: it has an "
                "encoder, or a generation config that forbids or forces tokens",
            )
        if params.grammar is not None and (params.min_tokens or params.ignore_eos):
            raise RequestError(
                "unsupported_parameter", "a grammar ends the output: min_tokens and ignore_eos exclude it"
            )
        try:
            return [self.grammars.constraint(params, self.vocab_size) for _ in range(request.n)]
        except ValueError as error:
            raise RequestError("invalid_grammar", f"the grammar cannot be used: {error}") from error

    def _check_encoder(self, prompt: list[int], params: SamplingParams, limits: EncoderDecoderLimits) -> None:
        if len(prompt) > limits.max_prompt_len:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {len(prompt)} tokens, the encoder reads at most {limits.max_prompt_len}",
            )
        if params.prompt_logprobs is not None:
            raise RequestError(
                "unsupported_parameter", "an encoder's prompt has no probabilities: prompt_logprobs"
            )

    def _forced_end(self, params: SamplingParams) -> bool:
        limits = self.encoder_decoder
        return limits is not None and limits.forced_eos_token_id is not None and not params.ignore_eos

    def _verification(self, params: SamplingParams) -> Verification:
        by_seed: Verification = "rejection" if params.seed is None else "coupled"
        return params.verification or self.verification or by_seed

    def _speculation(self, request: Generate) -> tuple[tuple[str, ...], int, bool]:
        """Returns the sources that may draft, how many tokens, and whether it is always that many."""
        asked = request.params.num_speculative_tokens
        length = self.num_speculative_tokens if asked is None else asked
        sources = () if length == 0 else self._sources(request)
        if not sources:
            return (), 0, True
        if length is None:
            return sources, max(map(auto_limit, sources)), False
        return sources, length, True

    def _sources(self, request: Generate) -> tuple[str, ...]:
        """Returns the sources that may draft. A client that sends a prediction wants it used, whichever other
        sources the server uses; a method that it names itself comes first."""
        method = request.params.method
        if method == "none":
            return ()
        if method is not None and method != "auto":
            return (method,)
        allowed = {*self.methods} if self.method == "auto" else {self.method}
        allowed.discard("prediction")
        allowed.discard("grammar")
        is_constrained = request.params.grammar is not None or request.params.thinking_budget is not None
        if is_constrained and self.method != "none":
            allowed.add("grammar")
        if request.prediction_token_ids:
            allowed.add("prediction")
        if request.pictures:  # What a draft would read is placeholders.
            allowed -= set(self.methods) - {*AUTO_LIMITS}
        return tuple(source for source in self.methods if source in allowed)
