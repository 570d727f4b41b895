"""A process that renders chat templates within limits. Started by ``server.text.template_process``.

A template is a program that comes with a checkpoint: it may loop for ever or ask for all memory, inside of
operators that cannot be interrupted. Lines of JSON come in, each with a template and what to do with it; a
line with the outcome of each goes out. Where a template takes more time than it may, this process ends.
"""

import sys
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateSyntaxError, meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from truedraft.server.text.helper_process import answer_lines, limit_memory

# All that is rendered here gets this much address space.
MAX_MEMORY = 1 << 30
MAX_CHARACTERS = 32_000_000
MAX_ERROR = 1000


class TemplateModel:
    """Has what transformers wants of a tokenizer to render messages: its templates and special tokens."""

    get_chat_template = PreTrainedTokenizerBase.get_chat_template
    apply_chat_template = PreTrainedTokenizerBase.apply_chat_template

    def __init__(self, chat_template: Any, special_tokens_map: Mapping[str, Any]) -> None:
        self.chat_template = chat_template
        self.special_tokens_map = special_tokens_map


def main() -> int:
    limit_memory(MAX_MEMORY)
    answer_lines(outcome_of)
    return 0


def outcome_of(question: dict[str, Any]) -> dict[str, Any]:
    try:
        if "source" in question:
            return {"variables": variables(question["source"])}
        return {"text": rendered(**question)}
    except MemoryError:
        return {"error": f"it takes more than {MAX_MEMORY >> 20} MiB of memory"}
    except Exception as error:  # templates are programs: they may fail in any way that Python knows
        return {"error": (str(error) or type(error).__name__)[:MAX_ERROR]}


def variables(source: str) -> list[str]:
    """Returns those that the template uses and does not set itself."""
    try:
        environment = _compile_jinja_template(source).environment
        return sorted(meta.find_undeclared_variables(environment.parse(source)))
    except TemplateSyntaxError:
        return []  # rendering says what is wrong


def rendered(
    model: dict[str, Any], template: str | None, messages: list[Any], options: dict[str, Any]
) -> str:
    text = TemplateModel(**model).apply_chat_template(
        messages, chat_template=template, tokenize=False, **options
    )
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it writes more than {MAX_CHARACTERS} characters")
    return str(text)


if __name__ == "__main__":
    sys.exit(main())
