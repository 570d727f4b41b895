"""The engine as a library: text in, text out, no HTTP and no second process.

llm = LLM()  # the bundled pair; or LLM(target=..., draft=...)
for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=100)):
    print(completion.text)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.admission import RequestError
from truedraft.engine.gguf_file import load_pretrained_tokenizer
from truedraft.engine.messages import (
    Failed,
    FinishReason,
    Generate,
    SamplingParams,
    TokenLogprob,
    TokenOutput,
)
from truedraft.engine.models.errors import ModelLoadError


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

    Keyword arguments are the settings of ``truedraft serve`` that concern models, speculation, batching and
    caches (``EngineConfig``); an unknown one is a ``pydantic.ValidationError``. Raises ``ModelLoadError``.
    """

    def __init__(self, **config: Any) -> None:
        self.config = EngineConfig(**config)
        self.core = build_engine(self.config)
        try:
            self.tokenizer = load_pretrained_tokenizer(str(self.config.target))
        except (OSError, ValueError) as error:
            raise ModelLoadError(str(error)) from error
        self._request_ids = count()

    def generate(
        self, prompts: str | Sequence[str | list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[Completion]:
        """One completion per prompt (text or token ids), all decoded together, in the prompts' order.

        ``params`` are one for all prompts or one for each. Raises ``RequestError`` for a prompt that does not
        fit, and ``ValueError`` where prompts and parameters differ in number.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        params_list = params if isinstance(params, list) else [params] * len(prompts)
        completions = {}
        for prompt, prompt_params in zip(prompts, params_list, strict=True):
            completions[self._submit(prompt, prompt_params)] = Completion()
        while self.core.has_work:
            for output in self._step():
                completions[output.request_id].add(output)
        for completion in completions.values():
            completion.text = self.decode(completion.token_ids)
        return list(completions.values())

    def chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Completion:
        """The answer to messages (``{"role": ..., "content": ...}``), written out by the chat template."""
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return self.generate([prompt], params)[0]

    def stream(self, prompt: str | list[int], params: SamplingParams) -> Iterator[TokenOutput]:
        """The rounds of one prompt as they happen; leaving early aborts it."""
        request_id = self._submit(prompt, params)
        try:
            while self.core.has_work:
                yield from self._step()
        finally:
            self.core.abort(request_id)

    def _step(self) -> Iterator[TokenOutput]:
        for result in self.core.step():
            if isinstance(result, Failed):
                raise RequestError(result.code, result.message)
            yield result

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _submit(self, prompt: str | list[int], params: SamplingParams) -> str:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request_id = f"prompt-{next(self._request_ids)}"
        self.core.add(Generate(request_id=request_id, prompt_token_ids=token_ids, params=params))
        return request_id
