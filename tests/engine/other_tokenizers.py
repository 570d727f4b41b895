"""Tokenizers that cut the same text differently, and tiny models that have learnt one text with each.

All are trained in place on ``TEXT``. A model that knows the text by heart continues it whatever its tokens
are, so a draft in other tokens is accepted if, and only if, the translation is right.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|end|>"
TEXT = (
    'The tortoise 🐢 walked slowly to the river, and the hare 🐇 laughed: "Why don\'t you hurry?"\n'
    "乌龟慢慢地走到河边，兔子笑了。 Cafe\u0301 naïve coöperation costs 12345.67 € today!\n"
    "\tTwo  spaces,   three; a family 👨\u200d👩\u200d👧 sat under the tree. Привет, мир! "
    "At last the tortoise won, and nobody laughed any more."
)
# What the models learn; short, so that they learn it in a second.
LEARNT = TEXT[: TEXT.index("\tTwo")]


def byte_level(vocab_size: int, special: str = EOS) -> Tokenizer:
    """Makes a tokenizer like GPT-2's: every byte is known, and a character may be several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def metaspace(vocab_size: int) -> Tokenizer:
    """Makes one like Llama 2's: a space before the first word, unknown characters as bytes, <s> first."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?<=[^▁])▁"), "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=50,
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def characters() -> Tokenizer:
    """Makes each character a token; unknown ones are lost."""
    alphabet = sorted(set(TEXT) | set("abcdefghijklmnopqrstuvwxyz"))
    vocab = {"<unk>": 0, "</s>": 1, **{character: i for i, character in enumerate(alphabet, start=2)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<unk>", special=True)])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "coarse": lambda: byte_level(400),
    "fine": lambda: byte_level(290, special="</s>"),
    "metaspace": lambda: metaspace(400),
    "characters": characters,
}


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    ends = [token for token in (EOS, "</s>") if tokenizer.token_to_id(token) is not None]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=ends[0]).save_pretrained(folder)


def save_learnt(folder: Path, name: str, steps: int, vocab_size: int | None = None) -> str:
    """A Llama of one layer that knows ``LEARNT`` by heart, with tokenizer ``name``; returns the folder."""
    tokenizer = TOKENIZERS[name]()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size or tokenizer.get_vocab_size(),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    ids = torch.tensor(tokenizer.encode(LEARNT, add_special_tokens=False).ids)
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, 2 * (1 - step / steps))
        starts = torch.randint(len(ids), (2,), generator=generator).tolist()
        batch = torch.stack([ids.roll(-start)[:96] for start in starts])
        logits = model(input_ids=batch).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return str(folder)
