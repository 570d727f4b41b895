"""The engine as a library: text in, text out, no HTTP and no second process.

llm = LLM()  # the bundled pair; or LLM(target=..., draft=...)
for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=100)):
    print(completion.text)
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import index
from threading import Lock
from typing import Any

from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.proposer import Proposer
from truedraft.engine.core.ranges import checked
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.formats.pretrained_tokenizer import load_pretrained_tokenizer
from truedraft.engine.messages import (
    Failed,
    FinishReason,
    Generate,
    SamplingParams,
    TokenLogprob,
    TokenOutput,
)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The last tokens of a prompt that its completion's text is decoded with.
TEXT_BEFORE = 16


@dataclass
class Completion:
    """One finished sequence. ``text`` leaves out special tokens, ``token_ids`` does not."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 if nothing was drafted."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def acceptance_length(self) -> float:
        """Tokens per round: accepted ones plus the recovered or bonus token."""
        return len(self.token_ids) / max(1, self.num_rounds)

    def add(self, output: TokenOutput) -> None:
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        self.num_rounds += output.num_rounds
        self.num_draft_tokens += output.num_draft_tokens
        self.num_accepted_tokens += output.num_accepted_tokens
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs


class LLM:
    """A target and its draft, loaded in this process.

    ``proposer`` drafts too: a ``Proposer``, or several. Other
    keyword arguments are the settings of ``truedraft serve`` that concern models, speculation, batching and
    caches (``EngineConfig``); an unknown one is a ``pydantic.ValidationError``. Raises ``ModelLoadError``.

    Several threads may call it: their requests are decoded together, by whichever of them takes the next
    step. Whatever a call has submitted is aborted when it ends, in whatever way.
    """

    def __init__(self, *, proposer: Proposer | Sequence[Proposer] = (), **config: Any) -> None:
        self.config = EngineConfig(**config)
        proposers = [proposer] if isinstance(proposer, Proposer) else proposer
        self.core = build_engine(self.config, proposers=proposers)
        try:
            self.tokenizer = load_pretrained_tokenizer(str(self.config.target))
        except (OSError, ValueError) as error:
            raise ModelLoadError(str(error)) from error
        self._request_ids = count()
        self._lock = Lock()  # guards the engine, the tokenizer and what follows
        # Each open request's call reads here what has become of it.
        self._answers: dict[str, deque[TokenOutput | Failed]] = {}
        self._closed: deque[str] = deque()  # requests that the next one with the lock aborts

    def generate(
        self, prompts: str | Sequence[str | list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[Completion]:
        """One completion per prompt (text or token ids), all decoded together, in the prompts' order.

        ``params`` are one for all prompts or one for each. Raises ``RequestError`` for parameters that are
        out of range and for a prompt that does not fit, and names its index; ``ValueError`` where prompts and
        parameters differ in number.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        params_list = params if isinstance(params, list) else [params] * len(prompts)
        if len(params_list) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts and {len(params_list)} params")
        places = {self._new_id(): place for place in range(len(prompts))}
        completions = [Completion() for _ in prompts]
        answers: deque[TokenOutput | Failed] = deque()
        token_ids: list[list[int]] = []  # the prompts'
        place = 0
        try:
            for request_id, place in places.items():
                token_ids.append(self._submit(request_id, prompts[place], params_list[place], answers))
            for result in self._results(len(prompts), answers):
                place = places[result.request_id]
                completions[place].add(_succeeded(result))
        except RequestError as error:
            where = f"prompt {place}: " if len(prompts) > 1 else ""
            raise RequestError(error.code, f"{where}{error}") from error
        finally:
            self._close(places)
        for prompt_ids, completion in zip(token_ids, completions, strict=True):
            completion.text = self._text_after(self.text_before(prompt_ids), completion)
        return completions

    def chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Completion:
        """The answer to messages (``{"role": ..., "content": ...}``), written out by the chat template."""
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = self.generate([prompt], params)[0]
        answer.text = self.decode(answer.token_ids)  # a message begins anew
        return answer

    def stream(self, prompt: str | list[int], params: SamplingParams) -> Iterator[TokenOutput]:
        """The rounds of one prompt as they happen; leaving early aborts it."""
        request_id = self._new_id()
        answers: deque[TokenOutput | Failed] = deque()
        try:
            self._submit(request_id, prompt, params, answers)
            yield from map(_succeeded, self._results(1, answers))
        finally:
            self._close([request_id])

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def text_before(self, prompt_ids: list[int]) -> list[int]:
        """Returns the tokens that a text goes on with: none where only an encoder reads the prompt."""
        return [] if self.core.admission.encoder_decoder is not None else prompt_ids[-TEXT_BEFORE:]

    def _text_after(self, before: list[int], completion: Completion) -> str:
        """Returns how a text goes on: a decoder may drop a space before its first token.

        What is cut inside a character ends before it.
        """
        start = len(self.decode(before).rstrip(REPLACEMENT))
        text = self.decode([*before, *completion.token_ids])[start:]
        return text.rstrip(REPLACEMENT) if completion.finish_reason == "length" else text

    def _new_id(self) -> str:
        return f"prompt-{next(self._request_ids)}"

    def _submit(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        answers: "deque[TokenOutput | Failed]",
    ) -> list[int]:
        """Returns the prompt's tokens."""
        params = checked(params)
        with self._lock:
            self._abort_closed()
            token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
            self._check_room(len(token_ids), params)
            self._answers[request_id] = answers
            self.core.add(Generate(request_id=request_id, prompt_token_ids=token_ids, params=params))
        return token_ids

    def _check_room(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Refuses as the server does: the engine would end the text where the context ends."""
        room = self.core.admission.room(num_prompt_tokens)
        if 0 < room < params.max_tokens:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {num_prompt_tokens} tokens, which leaves room for {room} in the model's "
                f"context, but max_tokens is {params.max_tokens}",
            )

    def _results(
        self, num_open: int, answers: "deque[TokenOutput | Failed]"
    ) -> Iterator[TokenOutput | Failed]:
        """Yields what comes of a call's requests until all have ended, whichever call takes the steps."""
        while num_open:
            if not answers:
                with self._lock:
                    self._abort_closed()
                    if not answers:
                        self._step()
            while answers:
                result = answers.popleft()
                num_open -= isinstance(result, Failed) or result.finish_reason is not None
                yield result

    def _step(self) -> None:
        """Takes one step for all calls.

        Whatever ends it early, such as Ctrl-C, ends all of them: nothing that it leaves can be trusted.
        """
        try:
            for result in self.core.step():
                self._answers[result.request_id].append(result)
        except BaseException as error:
            self.core.reset()
            for request_id, answers in self._answers.items():
                answers.append(Failed(request_id, "interrupted", f"a step was ended by {error!r}"))
            raise

    def _close(self, request_ids: Iterable[str]) -> None:
        """The call that has submitted them ends. It may be in the midst of another one's step, where the
        garbage collector ends a stream: then they are aborted later."""
        self._closed.extend(request_ids)
        if self._lock.acquire(blocking=False):
            try:
                self._abort_closed()
            finally:
                self._lock.release()

    def _abort_closed(self) -> None:
        if self._closed:
            request_ids = {self._closed.popleft() for _ in range(len(self._closed))}
            self.core.abort_all(request_ids)
            for request_id in request_ids:
                self._answers.pop(request_id, None)


def _token_ids(prompt: Iterable[int]) -> list[int]:
    try:
        return [index(token_id) for token_id in prompt]
    except TypeError as error:
        raise RequestError("invalid_prompt", "a prompt is a text or a list of token ids") from error


def _succeeded(result: TokenOutput | Failed) -> TokenOutput:
    if isinstance(result, Failed):
        raise RequestError(result.code, result.message)
    return result
