"""Tiny random checkpoints of models that make vectors or scores, as safetensors."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    NomicBertConfig,
    NomicBertModel,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from tests.vector_tokenizer import write_tokenizer

VOCAB_SIZE = 160
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
ROBERTA = {**SIZES, "pad_token_id": 1, "type_vocab_size": 1}
MODERN = {**SIZES, "local_attention": 12, "pad_token_id": 1, "cls_token_id": 2, "sep_token_id": 3}
# Each family has a base model, and settings of its config.
ENCODERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert": (BertModel, BertConfig, SIZES),
    "roberta": (RobertaModel, RobertaConfig, ROBERTA),
    "xlm-roberta": (XLMRobertaModel, XLMRobertaConfig, ROBERTA),
    "distilbert": (
        DistilBertModel,
        DistilBertConfig,
        {"vocab_size": VOCAB_SIZE, "dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4}
        | {"max_position_embeddings": 130},
    ),
    "modernbert": (ModernBertModel, ModernBertConfig, MODERN),
    "nomic_bert": (NomicBertModel, NomicBertConfig, {**SIZES, "pad_token_id": 0}),
    "embeddinggemma": (
        Gemma3TextModel,
        Gemma3TextConfig,
        {**DECODER, "use_bidirectional_attention": True, "sliding_window": 12, "query_pre_attn_scalar": 16}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}
CLASSIFIERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert": (BertForSequenceClassification, BertConfig, SIZES),
    "roberta": (RobertaForSequenceClassification, RobertaConfig, ROBERTA),
    "xlm-roberta": (XLMRobertaForSequenceClassification, XLMRobertaConfig, ROBERTA),
    "distilbert": (DistilBertForSequenceClassification, DistilBertConfig, ENCODERS["distilbert"][2]),
    "modernbert": (ModernBertForSequenceClassification, ModernBertConfig, MODERN),
    "modernbert-mean": (
        ModernBertForSequenceClassification,
        ModernBertConfig,
        {**MODERN, "classifier_pooling": "mean"},
    ),
}
DECODERS: dict[str, Any] = {
    "whole": Qwen3ForCausalLM,
    "bare": Qwen3Model,
    "classifier": Qwen3ForSequenceClassification,
}
# sentence-transformers' folders.
POOLING = "1_Pooling"


def write_model(folder: Path, made_by: Any, config_class: Any, settings: dict[str, Any], **more: Any) -> Any:
    """Saves a random model with weights that are large enough to tell its layers apart; returns it."""
    torch.manual_seed(7)
    model = made_by(config_class(**settings, **more)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.15 if parameter.dim() > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * scale + ("orm" in name and "weight" in name))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def write_modules(
    folder: Path, pooling: dict[str, Any] | None = None, *others: tuple[str, dict[str, Any]], **said: Any
) -> None:
    """Writes sentence-transformers' files: ``others`` are modules after pooling, ``said`` its config."""
    modules = [("Transformer", ""), ("Pooling", POOLING)]
    (folder / POOLING).mkdir(exist_ok=True)
    (folder / POOLING / "config.json").write_text(json.dumps(pooling or {"pooling_mode": "mean"}))
    for number, (kind, config) in enumerate(others, start=2):
        path = f"{number}_{kind}"
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config))
        modules.append((kind, path))
    listed = [
        {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))


def texts_of(*lengths: int, first: int = 4) -> list[list[int]]:
    """Returns token ids of texts of these lengths."""
    return [
        [first + (5 * i * i + 3 * i + 7 * number) % (100 - first) for i in range(length)]
        for number, length in enumerate(lengths)
    ]
