"""Templates of models that see: some write a text only where it comes in a list of parts."""

from pathlib import Path

import pytest

from tests.server.tiny_tokenizer import write_tokenizer
from truedraft.server.text.tokenizer import load_tokenizer

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# SmolVLM and Idefics have this: the letters of a plain text would be parts of no type.
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}"
    "{% endfor %}{% endfor %}"
)
# Gemma 3 and Qwen2-VL have this.
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("template", [PLAIN, PARTS, BOTH], ids=["plain", "parts", "both"])
def test_every_form_has_the_text(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "model", chat_template=template)))
    assert tokenizer.apply_chat_template(MESSAGES, {}) == "<system>Be brief.<user>Hello"
    assert tokenizer.templates.wants_parts is (template is PARTS)


def test_a_message_without_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "model", chat_template=PARTS)))
    assert tokenizer.apply_chat_template([{"role": "assistant", "content": None}], {}) == "<assistant>"
