"""Text to token ids and back, and the model's chat template.

Wraps a Hugging Face fast tokenizer: its Rust core encodes and decodes. transformers only loads it and renders
templates, each in a process of its own; ``load_tokenizer`` waits for it and is called in a thread.
"""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from truedraft.engine.text.detokenizer import TextStream
from truedraft.engine.text.text_stream import MarkedTextStream, ending, text_stream
from truedraft.engine.text.vocabulary import Vocabulary
from truedraft.server.stages import timed
from truedraft.server.text.families import (
    GENERIC,
    CallFormat,
    ReasoningMarks,
    find_call_format,
    find_reasoning_marks,
)
from truedraft.server.text.fewest_tokens import FewestTokens
from truedraft.server.text.helper_process import helper_command, helper_environment
from truedraft.server.text.template_process import template_process
from truedraft.server.text.tokenizer_reader import told

# A folder with a tokenizer has at least one of them.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


# Stands for a message's text, to see whether a template writes it.
MARK = "the message's text"


class ChatTemplateError(Exception):
    """The model has no chat template, or its template refused the messages."""


class Tokenizer:
    """One loaded tokenizer. Safe to use from several threads: only a cache in it changes after loading."""

    def __init__(
        self, fast: FastTokenizer, templates: "ChatTemplates", fill_ids: Mapping[str, int] | None = None
    ) -> None:
        """``fill_ids``: tokens that fill in the middle, by the engine's names."""
        self.vocabulary = Vocabulary(fast)
        self.templates = templates
        self.fewest_tokens = FewestTokens(fast)
        self.fill_ids = fill_ids or {}
        self._fast = fast

    @cached_property
    def beginning(self) -> list[int]:
        """Returns the tokens that are put before a text, and not after it."""
        texts = [self.encode(text, add_special_tokens=True) for text in ("", "a")]
        return [*commonprefix(texts)]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A batch of one releases the interpreter's lock, which ``encode`` holds.
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        with timed("tokenize"):
            encodings = self._fast.encode_batch(texts, add_special_tokens=add_special_tokens)
            return [list(encoding.ids) for encoding in encodings]

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str | None]],
        longest: int | None,
        *,
        keeps_end: bool = False,
        add_special_tokens: bool = True,
    ) -> list[tuple[list[int], int | None]]:
        """Returns the tokens of each text or pair of texts, and where the second one begins. What is longer
        than ``longest`` is cut at its end, or with ``keeps_end`` at its beginning, the longer text of a pair
        first; special tokens stay. A text alone is a pair with None."""
        with timed("tokenize"):
            texts = [text for pair in pairs for text in pair if text is not None]
            encodings = iter(self._fast.encode_batch(texts, add_special_tokens=False))
            found = []
            for _, second in pairs:
                parts = [next(encodings)] + ([] if second is None else [next(encodings)])
                special = self._fast.num_special_tokens_to_add(len(parts) == 2) if add_special_tokens else 0
                if longest is not None:
                    room = max(0, longest - special)
                    for part, length in zip(
                        parts, _lengths([len(each.ids) for each in parts], room), strict=True
                    ):
                        part.truncate(length, direction="left" if keeps_end else "right")
                whole = self._fast.post_process(parts[0], (*parts, None)[1], add_special_tokens)
                first = next((at for at, kind in enumerate(whole.type_ids) if kind), None)
                found.append((list(whole.ids), first))
            return found

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        (text,) = self._fast.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def stream(self, *, skip_special_tokens: bool, marks: Sequence[str] = ()) -> TextStream:
        """Starts a text. Special tokens that are part of ``marks`` are text in any case."""
        stream = text_stream(self._fast, self.vocabulary, skip_special_tokens=skip_special_tokens)
        if skip_special_tokens and (shown := _part_of(marks, self.vocabulary.special)):
            return MarkedTextStream(stream, {token_id: text for text, token_id in shown.items()})
        return stream

    def ending(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the last tokens, as far as they decide how a text goes on after them."""
        return ending(self.vocabulary, token_ids)

    def grammar_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Returns the ids of tokens that are part of ``texts`` and that llguidance takes for no text."""
        return _part_of(texts, self.vocabulary.special | self.vocabulary.tags)

    def for_grammars(self) -> dict[str, Any]:
        """Arguments of ``LLTokenizer``, as ``llguidance.hf`` makes them. Any end will do to compile one."""
        return {"tokenizer": self._fast.to_str(), "eos_token": self.templates.eos_token_id or 0}

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        return self.templates.render(messages, {"add_generation_prompt": True} | dict(options))


def _lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Returns how many tokens of each text stay, which together have ``room``: the longer one loses first."""
    if sum(lengths) <= room or len(lengths) == 1:
        return [min(length, room) for length in lengths]
    shorter = min(*lengths, room // 2)
    return [room - shorter, shorter] if lengths[0] > lengths[1] else [shorter, room - shorter]


def _part_of(texts: Sequence[str], token_ids: Mapping[str, int]) -> dict[str, int]:
    return {token: token_id for token, token_id in token_ids.items() if any(token in text for text in texts)}


class ChatTemplates:
    """Renders messages with the model's chat template, or with the one that replaces it."""

    def __init__(self, model: Any, override: str | None = None) -> None:
        """Takes what ``tokenizer_reader`` tells of a model, or transformers' tokenizer."""
        self._model = model
        self._override = override
        self._fault = ""  # why the template is not asked again

    @property
    def eos_token_id(self) -> int | None:
        return getattr(self._model, "eos_token_id", None)

    @cached_property
    def source(self) -> str:
        """Returns the source of all templates that the model has; empty if it has none."""
        templates = self._override or self._model.chat_template or ""
        return "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Returns the variables that the template uses and does not set itself."""
        found = template_process().ask({"source": self.source})
        return frozenset(found.get("variables", ()))  # where it fails, rendering says what is wrong

    @cached_property
    def call_format(self) -> CallFormat:
        """Returns how the template writes tool calls: generically if it writes none, or in an unknown way."""
        return find_call_format(self.source) if "tools" in self.variables else GENERIC

    @cached_property
    def has_system(self) -> bool:
        """Returns whether it writes system messages: some templates refuse them or leave them out."""
        return self._writes_system(["system", "user"])

    @cached_property
    def has_later_system(self) -> bool:
        """Returns whether it writes them within a conversation, too."""
        return self._writes_system(["user", "system", "assistant", "user"])

    def _writes_system(self, roles: Sequence[str]) -> bool:
        said = {role: f"What the {role} says." for role in roles}
        try:
            messages = [{"role": role, "content": said[role]} for role in roles]
            return said["system"] in self._rendered(self._as_wanted(messages), {}, is_trial=True)
        except ChatTemplateError:
            return False

    @cached_property
    def reasoning_marks(self) -> ReasoningMarks | None:
        return find_reasoning_marks(self.source)

    @cached_property
    def wants_parts(self) -> bool:
        """Tells whether the template writes a text only where it comes in a list of parts.

        Some of models that see do: of a plain text they would write nothing, in silence.
        """
        return not self._writes(MARK) and self._writes(_in_parts(MARK))

    def _writes(self, content: Any) -> bool:
        try:
            return MARK in self._rendered([{"role": "user", "content": content}], {}, is_trial=True)
        except ChatTemplateError:
            return False

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Takes a moment in another process: not for the event loop's thread."""
        return self._rendered(self._as_wanted(messages), options)

    def _as_wanted(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        if not self.wants_parts:
            return messages
        return [{**each, "content": _in_parts(each.get("content") or "")} for each in messages]

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, is_trial: bool = False
    ) -> str:
        """A template that takes too long for a trial, whose messages are ours, is not asked again."""
        model = self._model
        if self._fault:
            raise ChatTemplateError(self._fault)
        if self._override is None and not model.chat_template:
            raise ChatTemplateError(
                "This model has no chat template. Set 'chat_template' in the server's configuration, "
                "or use /v1/completions."
            )
        question = {
            "model": {"chat_template": model.chat_template, "special_tokens_map": model.special_tokens_map},
            "template": self._override,
            "messages": list(messages),
            "options": dict(options),
        }
        with timed("template"):
            outcome = template_process().ask(question)
        if "error" in outcome:
            fault = f"The model's chat template refused the messages: {outcome['error']}"
            if is_trial and outcome.get("is_slow"):
                self._fault = fault
            raise ChatTemplateError(fault)
        return str(outcome["text"])


def _in_parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def load_tokenizer(
    model: str, chat_template: Path | None = None, read: Callable[[str], dict[str, Any]] = told
) -> Tokenizer:
    """Loads the tokenizer of a folder, a GGUF file or a hub id. Slow: may read from the network. ``read`` is
    ``read_apart`` where this process should stay small."""
    folder = Path(model).expanduser()
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"{model} has no tokenizer. Copy tokenizer.json and tokenizer_config.json of the original "
            "model into it."
        )
    found = read(model)
    fast, fill_ids = FastTokenizer.from_str(found.pop("fast")), found.pop("fill_ids")
    override = chat_template.read_text(encoding="utf-8") if chat_template else None
    templates = ChatTemplates(SimpleNamespace(**found), override)
    if templates.source:
        _ = templates.variables  # starts what renders them, so that no request waits for that
    return Tokenizer(fast, templates, fill_ids)


def read_apart(model: str) -> dict[str, Any]:
    """Asks a process, whose memory ends with it, what ``told`` tells."""
    done = subprocess.run(
        [*helper_command("tokenizer_reader"), model],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=helper_environment(),
        start_new_session=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"the process that reads the tokenizer of {model} has ended with {done.returncode}")
    found = json.loads(done.stdout)
    if "error" in found:
        raise ValueError(found["error"])
    return dict(found)
