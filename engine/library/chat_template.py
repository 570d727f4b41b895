"""Writes out a conversation by the model's own chat template."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from truedraft.engine.core.admission import RequestError

Conversation = Sequence[Mapping[str, Any]]

# This stands for a message's text, to see whether a template writes it.
MARK = "the message's text"


class ChatTemplate:
    """Renders the template of ``tokenizer``, which is transformers'. It renders in a sandbox, but in this
    process: a template that loops for ever is not stopped."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def exists(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def token_ids(self, messages: Conversation, options: Mapping[str, Any]) -> list[int]:
        """Returns the conversation's tokens, up to where the answer begins."""
        if not self.exists:
            raise RequestError(
                "chat_template_missing", "this model has no chat template; continue a text with generate"
            )
        try:
            messages = [dict(message) for message in messages]
        except (TypeError, ValueError) as error:
            raise RequestError(
                "invalid_prompt", 'a conversation is a list of messages: {"role": ..., "content": ...}'
            ) from error
        if not messages:
            raise RequestError("empty_prompt", "the conversation has no messages")
        if self._wants_parts:
            messages = [{**each, "content": _in_parts(each.get("content") or "")} for each in messages]
        text = self._rendered(messages, {"add_generation_prompt": True, **options})
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def writes_system(self) -> bool:
        """Tells whether the template writes system messages: some refuse them or leave them out."""
        messages = [{"role": "system", "content": MARK}, {"role": "user", "content": "Hello."}]
        try:
            return MARK in self._rendered(messages, {})
        except RequestError:
            return False

    @cached_property
    def _wants_parts(self) -> bool:
        """Tells whether the template writes a text only where it comes in a list of parts, as some of
        multimodal models do: of a plain text they would write nothing, in silence."""
        return not self._writes(MARK) and self._writes(_in_parts(MARK))

    def _writes(self, content: Any) -> bool:
        try:
            return MARK in self._rendered([{"role": "user", "content": content}], {})
        except RequestError:
            return False

    def _rendered(self, messages: Conversation, options: Mapping[str, Any]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # Templates are programs: they may fail in any way that Python knows.
            reason = str(error) or type(error).__name__
            raise RequestError(
                "invalid_prompt", f"the chat template refused the messages: {reason}"
            ) from error


def _in_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
