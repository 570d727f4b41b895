"""A T5-shaped pair that translates a few sentences into German: trained in place, in seconds.

    python -m tests.translation_pair FOLDER

Folders are as T5's on the hub: config, generation config, safetensors, and a unigram tokenizer that ends each
prompt with ``</s>``. The draft is smaller and trained less, so that it is often right and sometimes wrong.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import T5Config, T5ForConditionalGeneration

PREFIX = "translate English to German: "
SENTENCES = {
    "The house is wonderful.": "Das Haus ist wunderbar.",
    "The house is small.": "Das Haus ist klein.",
    "The garden is green.": "Der Garten ist grün.",
    "The child reads a book.": "Das Kind liest ein Buch.",
    "I have a dog and a cat.": "Ich habe einen Hund und eine Katze.",
    "Good morning, dear friends.": "Guten Morgen, liebe Freunde.",
    "We are going to the sea today.": "Wir fahren heute ans Meer.",
    "Where is the old bridge?": "Wo ist die alte Brücke?",
    "He who fights with monsters must take care not to become a monster.": (
        "Wer mit Ungeheuern kämpft, mag zusehn, dass er nicht dabei zum Ungeheuer wird."
    ),
    "And if you gaze long into an abyss, the abyss also gazes into you.": (
        "Und wenn du lange in einen Abgrund blickst, blickt der Abgrund auch in dich hinein."
    ),
}
PAD, EOS, UNKNOWN = 0, 1, 2
VOCAB_SIZE = 260
# The model's vocabulary is padded, as T5's is.
PADDED_VOCAB_SIZE = 272


def build_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    texts = [PREFIX + english for english in SENTENCES] + list(SENTENCES.values())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", EOS)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def train(
    tokenizer: Tokenizer, hidden: int, layers: int, steps: int, seed: int
) -> T5ForConditionalGeneration:
    """flan-T5's shape: gated gelu, a head of its own."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=PADDED_VOCAB_SIZE,
        d_model=hidden,
        d_kv=16,
        d_ff=2 * hidden,
        num_layers=layers,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.0,
        decoder_start_token_id=PAD,
        n_positions=512,
    )
    model = T5ForConditionalGeneration(config)
    english = [tokenizer.encode(PREFIX + text).ids for text in SENTENCES]
    german = [tokenizer.encode(text).ids for text in SENTENCES.values()]
    inputs, labels = _padded(english, PAD), _padded(german, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for _ in range(steps):
        loss = model(input_ids=inputs, attention_mask=(inputs != PAD).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def _padded(rows: list[list[int]], padding: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [padding] * (width - len(row)) for row in rows])


def save_pair(folder: Path) -> tuple[str, str]:
    """Write ``folder/target`` and ``folder/draft``; returns both paths."""
    tokenizer = build_tokenizer()
    for name, hidden, layers, steps in (("target", 64, 2, 120), ("draft", 32, 1, 90)):
        train(tokenizer, hidden, layers, steps, seed=1).save_pretrained(folder / name)
        save_tokenizer(tokenizer, folder / name)
    return str(folder / "target"), str(folder / "draft")


if __name__ == "__main__":
    print(*save_pair(Path(sys.argv[1])), sep="\n")
