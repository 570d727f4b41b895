"""The engine as a library: text in, text out, no HTTP and no second process.

llm = LLM()  # the bundled pair; or LLM("model.gguf"), LLM("folder-or-hub-id", draft="another")
for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=100)):
    print(completion.text)
print(llm.chat([{"role": "user", "content": "Hello"}])[0].text)
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from operator import index
from typing import Any, Self, TypeVar, Unpack

from pydantic import ValidationError
from tokenizers import Tokenizer as FastTokenizer

from truedraft.engine import messages
from truedraft.engine.build import build_engine
from truedraft.engine.config import AUTO, EngineConfig
from truedraft.engine.config_errors import describe, nearest
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.proposer import Proposer
from truedraft.engine.errors import ConfigError, ModelLoadError
from truedraft.engine.formats.pretrained_tokenizer import load_pretrained_tokenizer
from truedraft.engine.hub.located import located, stage_of
from truedraft.engine.library.chat_template import ChatTemplate, Conversation
from truedraft.engine.library.completion import Completion, Delta, DeltaReader
from truedraft.engine.library.params import SamplingParams, checked_params, sampling_params, with_limit
from truedraft.engine.library.settings import LLMSettings
from truedraft.engine.library.shared_engine import Answers, RequestFailedError, SharedEngine
from truedraft.engine.messages import Generate
from truedraft.engine.models.generation_defaults import recommended
from truedraft.engine.terminal import prompt_bar
from truedraft.engine.text.detokenizer import Detokenizer, TextStream
from truedraft.engine.text.stop_strings import StopStrings
from truedraft.engine.text.text_stream import continued, ending, text_stream
from truedraft.engine.text.vocabulary import Vocabulary

__all__ = ["LLM", "Completion", "Delta", "SamplingParams"]

Prompt = str | list[int]
# Parameters here are the engine's own, without those that concern text.
Params = messages.SamplingParams

T = TypeVar("T")
logger = logging.getLogger(__name__)
# A function of this type returns an item's prompt tokens, the tokens that its text continues, and the number
# of tokens to write if nobody set one.
Read = Callable[[T], tuple[list[int], list[int], int]]
DEFAULT_COMPLETION_TOKENS = 16


class LLM:
    """A target and its draft, loaded in this process.

    ``target`` is a folder, a GGUF file or a hub id, None the bundled pair. ``proposer`` drafts too: a
    ``Proposer``, or several. ``begin`` hears the name of each stage of loading. Other keyword arguments are
    the settings of ``truedraft serve`` that concern models, speculation, batching and caches
    (``EngineConfig``); a wrong one is a ``ConfigError``. Raises ``ModelLoadError``.

    ``with LLM(...) as llm:`` gives the models' memory back at the end, as ``close`` does.

    Several threads may call it: their requests are decoded together, by whichever of them takes the next
    step. Whatever a call has submitted is aborted when it ends, in whatever way.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | None = None,
        *,
        draft: str | None = AUTO,
        proposer: Proposer | Sequence[Proposer] = (),
        begin: Callable[[str], None] = lambda stage: None,
        **settings: Unpack[LLMSettings],
    ) -> None:
        self.config = _config(target=None if target is None else os.fspath(target), draft=draft, **settings)
        proposers = [proposer] if isinstance(proposer, Proposer) else proposer
        found = located(self.config, lambda progress: begin(stage_of(progress)), logger.info)
        core = build_engine(found, begin, proposers=proposers)
        try:
            self.tokenizer = load_pretrained_tokenizer(str(found.target))
        except (OSError, ValueError) as error:
            raise ModelLoadError(str(error)) from error
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise ModelLoadError(f"the tokenizer of {self.config.target} has no fast (tokenizer.json) form")
        self._fast: FastTokenizer = fast
        self._vocabulary = Vocabulary(fast)
        self.chat_template = ChatTemplate(self.tokenizer)
        self._engine = SharedEngine(core)

    @property
    def core(self) -> EngineCore:
        return self._engine.core

    def close(self) -> None:
        """Gives the models' memory back. Calls of other threads that still run, and later calls, raise
        ``RequestError``."""
        self._engine.shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        draft = "" if self.config.draft in (None, AUTO) else f", draft={self.config.draft!r}"
        return f"LLM({self.config.target!r}{draft})"

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what a call without parameters uses: the sampling that the model's generation config
        recommends, and neutral values for what it leaves out."""
        values = recommended(self.config.generation_config, self.core.target.model.generation_config)
        values.pop("max_new_tokens", None)
        return SamplingParams(**values)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        model: str | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Continues prompts (texts or lists of token ids), all decoded together.

        Returns completions in the prompts' order; where ``params.n`` is above 1, a prompt's ``n`` follow each
        other. ``params`` are one for all prompts or one for each; without them the model's own recommendation
        holds (``get_default_sampling_params``), and 16 tokens are written. ``model`` names a LoRA adapter of
        ``lora_modules``; None is the target itself. A terminal shows a bar as several
        prompts run, unless ``progress`` is False. Raises ``RequestError`` for parameters that are out of
        range and for a prompt that does not fit, and names its index; ``ValueError`` where prompts and
        parameters differ in number.
        """
        items: Any = [prompts] if isinstance(prompts, str) or _is_token_ids(prompts) else prompts
        if not isinstance(items, Sequence):
            raise RequestError(
                "invalid_prompt",
                f"prompts must be a text, a list of token ids or a list of these, not {type(items).__name__}",
            )
        return self._complete(items, params, self._read_prompt, progress, model)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params | Sequence[Params] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model: str | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Answers a conversation, or several together, each written out by the model's chat template.

        A conversation is a list of messages (``{"role": ..., "content": ...}``). ``chat_template_kwargs`` are
        variables for the template. The rest is as for ``generate``, but without ``max_tokens`` an answer may
        have as many tokens as the model's context leaves.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(
                "invalid_prompt",
                'messages must be a list of {"role": ..., "content": ...}, or a list of such lists, '
                f"not {type(messages).__name__}",
            )
        is_one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        read = partial(self._read_conversation, options=chat_template_kwargs or {})
        return self._complete(conversations, params, read, progress, model)

    def stream(
        self, prompt: Prompt, params: Params | None = None, *, model: str | None = None
    ) -> Iterator[Delta]:
        """Continues one prompt and yields text as it comes; leaving early aborts it."""
        with closing(self._deltas([prompt], params, self._read_prompt, model)) as deltas:
            yield from (delta for _, delta in deltas)

    def stream_chat(
        self,
        messages: Conversation,
        params: Params | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model: str | None = None,
    ) -> Iterator[Delta]:
        """Answers one conversation and yields text as it comes; leaving early aborts it."""
        read = partial(self._read_conversation, options=chat_template_kwargs or {})
        with closing(self._deltas([messages], params, read, model)) as deltas:
            yield from (delta for _, delta in deltas)

    def room(self, prompt: Prompt | Conversation) -> int:
        """Returns the number of tokens that the model's context leaves after a prompt or a conversation."""
        with self._engine.lock:
            if isinstance(prompt, str) or _is_token_ids(prompt):
                token_ids, *_ = self._read_prompt(prompt)  # type: ignore[arg-type]
            else:
                token_ids, *_ = self._read_conversation(prompt, {})  # type: ignore[arg-type]
        return self.core.admission.room(len(token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def speculation(self) -> dict[str, Any]:
        """Tells how drafts are chosen at the moment and what passes cost, as ``GET /speculation`` does."""
        return self.core.speculation()

    def text_stream(self, before: Sequence[int] = ()) -> TextStream:
        """Starts a text that continues the prompt ``before``: a decoder may drop a space before its first
        token. Where only an encoder reads the prompt, the text begins without one."""
        stream = text_stream(self._fast, self._vocabulary, skip_special_tokens=True)
        if self.core.admission.encoder_decoder is not None:
            return stream
        return continued(stream, ending(self._vocabulary, before))

    def _complete(
        self,
        items: Sequence[T],
        params: Params | Sequence[Params] | None,
        read: Read[T],
        progress: bool,
        model: str | None,
    ) -> list[Completion]:
        completions: dict[tuple[int, int], Completion] = {}
        deltas = self._deltas(items, params, read, model)
        with closing(deltas), prompt_bar(len(items), shown=progress) as bar:
            for place, delta in deltas:
                completion = completions.setdefault((place, delta.index), Completion(index=delta.index))
                completion.add_delta(delta)
                bar.advance(len(delta.output.token_ids), is_done=delta.finish_reason is not None)
        for completion in completions.values():
            completion.add_texts(self._vocabulary)
        return [completions[key] for key in sorted(completions)]

    def _deltas(
        self,
        items: Sequence[T],
        given: Params | Sequence[Params] | None,
        read: Read[T],
        model: str | None,
    ) -> Generator[tuple[int, Delta]]:
        """Yields the additions to the items' texts, each with the item's index."""
        adapter = self._adapter(model)
        params_list = sampling_params(given, len(items), self.get_default_sampling_params)
        answers: Answers = deque()
        places: dict[str, int] = {}
        readers: dict[tuple[str, int], DeltaReader] = {}
        place = 0
        try:
            for place, (item, asked) in enumerate(zip(items, params_list, strict=True)):
                with self._engine.lock:  # The lock guards the tokenizer, too.
                    token_ids, before, limit = read(item)
                    params = checked_params(with_limit(asked, limit))
                    request = self._request(token_ids, params, adapter)
                places[request.request_id] = place
                self._engine.submit(request, answers)
                stream, stops = self.text_stream(before), StopStrings(params.stop_strings)
                for number in range(params.n):
                    readers[request.request_id, number] = _reader(params, stream.copy(), stops)
            for output in self._engine.results(answers) if readers else ():
                reader = readers.get(output.sequence)
                if reader is None:
                    continue  # This output was on its way when a stop string was found.
                delta = reader.read(output)
                if delta.finish_reason is not None:
                    del readers[output.sequence]
                    if output.finish_reason is None:
                        self._engine.abort(*output.sequence)
                yield places[output.request_id], delta
                if not readers:
                    break
        except RequestError as error:
            place = places[error.request_id] if isinstance(error, RequestFailedError) else place
            where = f"prompt {place}: " if len(items) > 1 else ""
            raise RequestError(error.code, f"{where}{error}") from error
        finally:
            self._engine.close(places)

    def _read_prompt(self, prompt: Prompt) -> tuple[list[int], list[int], int]:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        return token_ids, token_ids, DEFAULT_COMPLETION_TOKENS

    def _read_conversation(
        self, messages: Conversation, options: Mapping[str, Any]
    ) -> tuple[list[int], list[int], int]:
        token_ids = self.chat_template.token_ids(messages, options)
        return token_ids, [], max(1, self.core.admission.room(len(token_ids)))

    def _adapter(self, model: str | None) -> messages.Adapter | None:
        """Returns the LoRA adapter of a name; None is for the target, whose own name is one, too."""
        if model is None or model == self.config.target:
            return None
        adapters = self.core.admission.adapters
        named = [] if adapters is None else adapters.named
        for adapter in named:
            if adapter.name == model:
                return adapter
        names = ", ".join(adapter.name for adapter in named) or "none"
        raise RequestError("model_not_found", f"there is no LoRA adapter {model!r}; lora_modules has {names}")

    def _request(
        self, token_ids: list[int], params: SamplingParams, adapter: messages.Adapter | None
    ) -> Generate:
        """Makes a request, and refuses one that does not fit as the server does: the engine alone would cut
        the text where the context ends."""
        room = self.core.admission.room(len(token_ids))
        if 0 < room < (params.max_tokens or 0):
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {len(token_ids)} tokens, which leaves room for {room} in the model's "
                f"context, but max_tokens is {params.max_tokens}",
            )
        predicted = None
        if params.prediction is not None:
            predicted = self.tokenizer.encode(params.prediction, add_special_tokens=False)
        return Generate(
            request_id=self._engine.new_id(),
            prompt_token_ids=token_ids,
            params=params.for_engine(),
            n=params.n,
            prediction_token_ids=predicted,
            adapter=adapter,
        )


def _reader(params: SamplingParams, stream: TextStream, stops: StopStrings) -> DeltaReader:
    detokenizer = Detokenizer(
        stream,
        stops,
        include_stop_string=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )
    return DeltaReader(detokenizer, params.stop_token_ids, include_stop=params.include_stop_str_in_output)


def _config(**settings: Any) -> EngineConfig:
    """Returns the settings; raises ``ConfigError`` with one line for each wrong one."""
    for name in settings:
        if name not in EngineConfig.model_fields:
            raise ConfigError(f"LLM has no setting {name}.{nearest(name, EngineConfig.model_fields)}")
    try:
        return EngineConfig(**settings)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None


def _is_token_ids(prompts: Any) -> bool:
    return isinstance(prompts, list) and len(prompts) > 0 and isinstance(prompts[0], int)


def _token_ids(prompt: Iterable[int]) -> list[int]:
    try:
        return [index(token_id) for token_id in prompt]
    except TypeError as error:
        raise RequestError("invalid_prompt", "a prompt is a text or a list of token ids") from error
