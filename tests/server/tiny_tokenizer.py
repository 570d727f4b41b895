"""A byte-level tokenizer without merges: token id = byte, plus four special tokens. Needs no download."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]

CHAT_TEMPLATE = """\
{% for document in documents or [] %}[{{ document.title }}]{% endfor %}\
{% if enable_thinking is false %}<no thoughts>{% endif %}\
{% for message in messages %}{% if message['name'] == 'nobody' %}\
{{ raise_exception('nobody may not speak') }}{% endif %}\
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies, by byte value."""
    keeps = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = iter(range(256, 512))
    return [chr(byte) if byte in keeps else chr(next(moved)) for byte in range(256)]


def write_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL_TOKENS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder
