"""Writes a tokenizer of letters for tests of models that make vectors; importing it loads no torch."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors


def write_tokenizer(folder: Path) -> None:
    """Words are letters; a text has [CLS] before it and [SEP] after it."""
    from transformers import PreTrainedTokenizerFast  # loads torch

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "yes", "no"]
    words = {word: number for number, word in enumerate([*special, *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_tokens(["yes", "no"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder)
