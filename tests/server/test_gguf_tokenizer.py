"""Tokenizers and chat templates from GGUF files: what the original tokenizer says, odd bytes included."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from truedraft.engine.gguf_file import GgufError
from truedraft.server.text.tokenizer import load_tokenizer

CORPUS = ["the cat sat on the mat, 1234 times", "def f(x):\n    return x + 10", "naïve café, 猫が好き"] * 9
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "  two\n\n\n lines \t",
    "12345 67.8e9 ½ ①",
    "don't I'll WE'VE",
    "<|im_start|>user\nhi<|im_end|>",
    "<|im_start |> <think>x</think>",
    "\x00\x7f\u0085\u200b\ufeff",
    "👩‍👩‍👧 e\u0301 \u202e abc",
    "".join(map(chr, range(1, 400))),
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
}


def train(split: str) -> FastTokenizer:
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = SPLITS[split], decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def train_sentencepiece() -> FastTokenizer:
    """With byte fallback, as Llama 2 has it."""
    tokenizer = FastTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 3, trainer)
    return tokenizer


def write(path: Path, tokenizer: FastTokenizer, kind: str, split: str, **fields: Any) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    added = {
        token.content: 3 if token.special else 4 for token in tokenizer.get_added_tokens_decoder().values()
    }
    merges = tokenizer.model.__getstate__()
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(split)
    writer.add_token_list([token for token, _ in vocabulary])
    if kind == "gpt2":
        writer.add_token_types([added.get(token, 1) for token, _ in vocabulary])
    else:
        writer.add_token_types(
            [6 if token.startswith("<0x") else 3 if i < 3 else 1 for token, i in vocabulary]
        )

    pairs = json.loads(merges)["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in pairs])
    for key, value in fields.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize("split", SPLITS)
def test_byte_level_vocabularies(split: str, tmp_path: Path) -> None:
    original = train(split)
    path = write(tmp_path / "m.gguf", original, "gpt2", split, eos_token_id=0, chat_template=TEMPLATE)
    ours = load_tokenizer(path)
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours.encode(text, add_special_tokens=True) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == original.decode(
                ids, skip_special_tokens=skip
            )
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}], {}) == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize("prefix", [True, False], ids=["with a space in front", "without"])
def test_vocabularies_with_byte_fallback(prefix: bool, tmp_path: Path) -> None:
    original = train_sentencepiece()
    if not prefix:
        original.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        original.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    fields = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "add_space_prefix": prefix}
    ours = load_tokenizer(write(tmp_path / "m.gguf", original, "llama", "default", **fields))
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text, add_special_tokens=True) == [1, *ids]
        assert ours.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=False)


def test_unknown_rules_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="cuts text by the rules other-bpe, which are not supported"):
        load_tokenizer(write(tmp_path / "a.gguf", train("gpt-2"), "gpt2", "other-bpe"))
    with pytest.raises(GgufError, match="tokenizer of the kind bert"):
        load_tokenizer(write(tmp_path / "b.gguf", train("gpt-2"), "bert", "gpt-2"))
    with pytest.raises(GgufError, match="eos_token_id 999 is no token"):
        load_tokenizer(write(tmp_path / "c.gguf", train("gpt-2"), "gpt2", "gpt-2", eos_token_id=999))


def test_torch_is_not_imported(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", train("gpt-2"), "gpt2", "gpt-2")
    code = (
        "import sys; from truedraft.server.text.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]);"
    )
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, path], check=True)
