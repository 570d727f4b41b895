"""Tokenizers and chat templates from GGUF files: what the original tokenizer says, odd bytes included."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from truedraft.engine.formats.gguf_file import GgufError, read_gguf
from truedraft.engine.formats.gguf_tokenizer import (
    END_TEXTS,
    FILL_TEXTS,
    Vocabulary,
    gguf_tokenizer,
    read_vocabulary,
)
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
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
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


def write(
    path: Path, tokenizer: FastTokenizer, kind: str, split: str | None, types: Any = None, **fields: Any
) -> str:
    """``types`` of some tokens in place of those that the tokenizer has them in."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    added = {
        token.content: 3 if token.special else 4 for token in tokenizer.get_added_tokens_decoder().values()
    } | (types or {})
    merges = tokenizer.model.__getstate__()
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if split is not None:
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
        if key == "suppress_tokens":
            writer.add_array("tokenizer.ggml.suppress_tokens", value)
        else:
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
        original.normalizer = normalizers.Replace(" ", "▁")
        original.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    fields = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "add_space_prefix": prefix}
    ours = load_tokenizer(write(tmp_path / "m.gguf", original, "llama", "default", **fields))
    text = "the</s>the</s> cat<s>\nmat"
    assert ours.encode(text, add_special_tokens=False) == original.encode(text).ids
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text, add_special_tokens=True) == [1, *ids]
        assert ours.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=False)


def test_whole_texts_are_merged_in_vocabularies_of_gemma4(tmp_path: Path) -> None:
    """Every character is a token or spelt in bytes, and merges know no border but control tokens."""
    original = train_sentencepiece()
    original.normalizer = normalizers.Replace(" ", "▁")
    fields = {"bos_token_id": 1, "unk_token_id": 0}
    path = write(tmp_path / "m.gguf", original, "gemma4", None, **fields)
    ours = load_tokenizer(path)
    for text in [*TEXTS, "the</s>the</s> cat<s>\nmat"]:
        ids = original.encode(text).ids
        assert ours.encode(text, add_special_tokens=True) == [1, *ids]
    assert ours.decode(ids, skip_special_tokens=True) == "thethe cat\nmat"


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


def vocabulary(path: str) -> Vocabulary:
    found = read_vocabulary(read_gguf(path))
    assert found is not None
    return found


def with_tokens(*texts: str) -> FastTokenizer:
    tokenizer = train("gpt-2")
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    return tokenizer


def test_ends_and_fill_tokens_are_known_by_their_texts(tmp_path: Path) -> None:
    """Whatever types the file gives them: then they are control tokens, found whole and not shown."""
    texts = sorted(END_TEXTS - {"<|tool_response>", "<|return|>", "<|flush|>"})
    texts += [alternatives[-1] for alternatives in FILL_TEXTS.values()]
    original = with_tokens(*texts)
    ids = original.get_vocab()
    path = write(tmp_path / "m.gguf", original, "gpt2", "gpt-2", dict.fromkeys(texts, 1), eos_token_id=9)
    ends = {
        ids[text] for text in texts if text in END_TEXTS or text in ("[PAD]", "<reponame>", "<|file_sep|>")
    }
    assert vocabulary(path).end_ids == ends | {9}
    ours = load_tokenizer(path)
    for text in texts:
        assert ours.encode(f"the{text}cat", add_special_tokens=True) == original.encode(f"the{text}cat").ids
        assert ours.decode([ids[text]], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("company", "text"),
    [
        (("<|return|>", "<|call|>"), "<|end|>"),
        (("<|calls|>", "<|flush|>"), "<|end|>"),
        (("<|tool_response>",), "</s>"),
    ],
)
def test_a_token_that_ends_nothing_in_such_company(company: list[str], text: str, tmp_path: Path) -> None:
    original = with_tokens(*company, text)
    path = write(tmp_path / "m.gguf", original, "gpt2", "gpt-2", eos_token_id=0)
    named = {original.token_to_id(token) for token in company}
    assert named <= vocabulary(path).end_ids
    assert original.token_to_id(text) not in vocabulary(path).end_ids


def test_named_ends(tmp_path: Path) -> None:
    named = {"eos_token_id": 5, "eot_token_id": 6, "eom_token_id": 7}
    path = write(tmp_path / "m.gguf", train("gpt-2"), "gpt2", "gpt-2", **named)
    ids = train("gpt-2").get_vocab()
    assert vocabulary(path).end_ids == {5, 6, 7, ids["<|endoftext|>"], ids["<|im_end|>"]}


def test_ids_that_files_leave_out(tmp_path: Path) -> None:
    """The ends are llama.cpp's; the byte-level one is an ordinary token in a text."""
    path = write(tmp_path / "m.gguf", train_sentencepiece(), "llama", "default")
    assert vocabulary(path).ids.items() >= {"bos": 1, "eos": 2, "unknown": 0}.items()
    assert load_tokenizer(path).encode("the", add_special_tokens=True)[0] == 1
    original = train("gpt-2")
    path = write(tmp_path / "n.gguf", original, "gpt2", "gpt-2")
    assert 11 in vocabulary(path).end_ids
    ours = load_tokenizer(path)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=True) == original.encode(text).ids


@pytest.mark.parametrize(("split", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_rules_that_take_words_whole_and_begin_texts(split: str, begins: bool, tmp_path: Path) -> None:
    """``zzqq`` is a token that no merge makes."""
    tokenizer = with_tokens("zzqq")
    word = tokenizer.token_to_id("zzqq")
    path = write(tmp_path / "m.gguf", tokenizer, "gpt2", split, {"zzqq": 1}, eos_token_id=0, bos_token_id=1)
    ids = load_tokenizer(path).encode("zzqq", add_special_tokens=True)
    assert (ids == [1, word]) == begins
    assert (word in ids, ids[0] == 1) == (begins, begins)
    for said in (True, False):
        path = write(
            tmp_path / "n.gguf", tokenizer, "gpt2", split, bos_token_id=1, eos_token_id=0, add_bos_token=said
        )
        assert (load_tokenizer(path).encode("the", add_special_tokens=True)[0] == 1) == said
    path = write(tmp_path / "o.gguf", tokenizer, "gpt2", split, eos_token_id=0)
    if begins:
        with pytest.raises(GgufError, match=r"it lacks tokenizer\.ggml\.bos_token_id"):
            load_tokenizer(path)
    else:
        load_tokenizer(path)


def test_a_file_that_names_no_rules_is_cut_by_the_default_ones(tmp_path: Path) -> None:
    """Which cut runs of punctuation first, and numbers into three digits at a time."""
    original = train("gpt-2")
    for split in (None, "default"):
        ours = load_tokenizer(write(tmp_path / "m.gguf", original, "gpt2", split, eos_token_id=0))
        pieces = ours._fast.pre_tokenizer.pre_tokenize_str("it's 12345, 6")
        assert [piece for piece, _ in pieces] == ["it", "'", "s", "Ġ", "123", "45", ",", "Ġ", "6"]


def test_control_tokens_outside_of_the_alphabet_of_bytes(tmp_path: Path) -> None:
    texts = ["<｜User｜>", "<｜end▁of▁sentence｜>", "   "]
    original = with_tokens(*texts)
    types = {texts[0]: 3, texts[1]: 3}
    ours = load_tokenizer(write(tmp_path / "m.gguf", original, "gpt2", "gpt-2", types, eos_token_id=0))
    text = "<｜User｜>the   cat<｜end▁of▁sentence｜>"
    ids = ours.encode(text, add_special_tokens=True)
    assert ids == original.encode(text).ids
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.decode(ids, skip_special_tokens=True) == "the   cat"


@pytest.mark.parametrize("name", ["Phi 3", "Microsoft Phi-3 mini"])
def test_special_tokens_of_phi3_swallow_the_blanks_behind_them(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", train("gpt-2"), "gpt2", "gpt-2", eos_token_id=0, name=name)
    ours = load_tokenizer(path)
    plain, blank = (ours.encode(f"<|im_end|>{gap}the", add_special_tokens=True) for gap in ("", "\n "))
    assert (plain == blank) == ("Phi-3" in name)
    plain, blank = (ours.encode(f"<|endoftext|>{gap}the", add_special_tokens=True) for gap in ("", "\n "))
    assert plain != blank


def test_vocabularies_that_cannot_be_served(tmp_path: Path) -> None:
    original = train("gpt-2")
    path = write(tmp_path / "m.gguf", original, "gpt2", "gpt-2", eos_token_id=0, suppress_tokens=[3])
    with pytest.raises(GgufError, match=r"suppress_tokens = \[3\], which is not served"):
        load_tokenizer(path)
    path = write(tmp_path / "m.gguf", original, "gpt2", "gpt-2", eos_token_id=0)
    content = Path(path).read_bytes()
    twice = content.replace(b"\x0c\0\0\0\0\0\0\0<|im_start|>", b"\x0d\0\0\0\0\0\0\0<|endoftext|>")
    (tmp_path / "n.gguf").write_bytes(twice)
    with pytest.raises(GgufError, match=r"has the token <\|endoftext\|> twice"):
        load_tokenizer(str(tmp_path / "n.gguf"))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_values_of_other_types_are_refused_or_harmless(kind: str, tmp_path: Path) -> None:
    """Nothing but ``GgufError`` comes out."""
    original = train("gpt-2") if kind == "gpt2" else train_sentencepiece()
    file = read_gguf(write(tmp_path / "m.gguf", original, kind, "llama-bpe", bos_token_id=1, eos_token_id=0))
    keys = ["tokenizer.chat_template", "tokenizer.ggml.suppress_tokens", "tokenizer.ggml.scores"]
    keys += [key for key in file.metadata if key.startswith("tokenizer")]
    refused = []
    for key in keys:
        for value in (3, -1, 1.5, "x", True, [], [1], ["a"], [[1]], list(range(500))):
            try:
                gguf_tokenizer(replace(file, metadata=file.metadata | {key: value}))
            except GgufError as error:
                refused.append(str(error))
    assert len(refused) > 5 * len(keys)
    assert not any("\n" in sentence for sentence in refused)


def test_tokens_that_a_tokenizer_would_have_to_invent_are_missed(tmp_path: Path) -> None:
    """An id past the vocabulary reads past the model's tables."""
    tokenizer = train_sentencepiece()
    path = Path(write(tmp_path / "m.gguf", tokenizer, "llama", "default", bos_token_id=1))
    path.write_bytes(path.read_bytes().replace(b"<unk>", b"<unX>"))
    with pytest.raises(GgufError, match="lacks the token <unk>"):
        load_tokenizer(str(path))
