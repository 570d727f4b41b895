"""Tiny random encoder-decoder models of every served family, built in place, no downloads.

Weights are large enough that the distributions are far from flat and depend on the prompt and the whole
prefix. Generation configs are as the families' checkpoints have them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

PAD, EOS = 0, 1


def _t5_like(**fields: Any) -> dict[str, Any]:
    return {
        "d_kv": 8,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": PAD,
    } | fields


def _bart_like(hidden: int, layers: int, context: int, **fields: Any) -> dict[str, Any]:
    return {
        "d_model": hidden,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 2 * hidden,
        "decoder_ffn_dim": 2 * hidden,
        "max_position_embeddings": context,
        "init_std": 0.35,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": 2,
    } | fields


def _t5(vocab_size: int, hidden: int, layers: int, context: int) -> Any:
    """Tied head, plain relu: the first T5."""
    sizes = {"d_model": hidden, "d_ff": 2 * hidden, "num_layers": layers, "n_positions": context}
    return T5ForConditionalGeneration(T5Config(vocab_size=vocab_size, **_t5_like(**sizes)))


def _flan_t5(vocab_size: int, hidden: int, layers: int, context: int) -> Any:
    """Gated gelu, a head of its own."""
    sizes = {"d_model": hidden, "d_ff": 2 * hidden, "num_layers": layers, "n_positions": context}
    fields = _t5_like(**sizes, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    return T5ForConditionalGeneration(T5Config(vocab_size=vocab_size, **fields))


def _mt5(vocab_size: int, hidden: int, layers: int, context: int) -> Any:
    sizes = {"d_model": hidden, "d_ff": 2 * hidden, "num_layers": layers}
    config = MT5Config(vocab_size=vocab_size, **_t5_like(**sizes), tie_word_embeddings=False)
    config.n_positions = context
    return MT5ForConditionalGeneration(config)


def _bart(vocab_size: int, hidden: int, layers: int, context: int) -> Any:
    """Starts with its end, then is forced to its beginning; ends by force where the length does."""
    config = BartConfig(
        vocab_size=vocab_size,
        **_bart_like(hidden, layers, context, decoder_start_token_id=EOS),
        forced_eos_token_id=EOS,
    )
    model = BartForConditionalGeneration(config)
    model.generation_config.forced_bos_token_id = 2
    model.generation_config.forced_eos_token_id = EOS
    model.generation_config.no_repeat_ngram_size = 3
    return model


def _marian(vocab_size: int, hidden: int, layers: int, context: int) -> Any:
    """Starts with padding and may not say it."""
    config = MarianConfig(
        vocab_size=vocab_size,
        **_bart_like(hidden, layers, context, decoder_start_token_id=PAD),
        scale_embedding=True,
        decoder_vocab_size=vocab_size,
    )
    model = MarianMTModel(config)
    model.generation_config.bad_words_ids = [[PAD]]
    model.generation_config.forced_eos_token_id = EOS
    return model


def _mbart(vocab_size: int, hidden: int, layers: int, context: int) -> Any:
    config = MBartConfig(
        vocab_size=vocab_size, **_bart_like(hidden, layers, context, decoder_start_token_id=EOS)
    )
    model = MBartForConditionalGeneration(config)
    model.generation_config.forced_bos_token_id = 3
    return model


def _pegasus(vocab_size: int, hidden: int, layers: int, context: int) -> Any:
    config = PegasusConfig(
        vocab_size=vocab_size, **_bart_like(hidden, layers, context, decoder_start_token_id=PAD)
    )
    return PegasusForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[int, int, int, int], Any]] = {
    "t5": _t5,
    "flan-t5": _flan_t5,
    "mt5": _mt5,
    "bart": _bart,
    "mbart": _mbart,
    "marian": _marian,
    "pegasus": _pegasus,
}


def save_random_seq2seq(
    folder: Path,
    family: str,
    seed: int,
    vocab_size: int = 24,
    hidden: int = 32,
    layers: int = 2,
    context: int = 128,
) -> str:
    """Saved in float32; returns the folder."""
    torch.manual_seed(seed)
    model = FAMILIES[family](vocab_size, hidden, layers, context)
    model.generation_config.max_length = None
    with torch.no_grad():
        if "final_logits_bias" in dict(model.named_buffers()):
            model.final_logits_bias.normal_(std=0.3)
        for name, parameter in model.named_parameters():
            # T5's own initial values let the newest token decide alone; here prompt and distance matter, too.
            if "relative_attention_bias" in name:
                parameter.normal_(std=1.5)
            elif name.endswith((".q.weight", ".v.weight", ".o.weight")):
                parameter.mul_(4.0 if ".q." in name else 1.5)
            elif "encoder_attn.out_proj.weight" in name:
                parameter.mul_(3.0)
            elif name == "shared.weight" and "t5" in family:
                parameter.mul_(0.15)
            elif name == "decoder.final_layer_norm.weight" and "t5" in family:
                parameter.mul_(15.0 if family == "t5" else 2.0)  # a tied head is as small as the embedding
    model.save_pretrained(folder)
    return str(folder)


def save_perturbed_seq2seq(folder: Path, original: str, seed: int, noise: float) -> str:
    """Saves the model in ``original`` with noise on its weights: a draft that agrees often, not always."""
    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_pretrained(original, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(folder)
    return str(folder)


def generated(model: Any, prompt: list[int], max_new_tokens: int, **options: Any) -> list[int]:
    """What ``generate`` says after the decoder's start tokens, a forced first one included."""
    ids = torch.tensor([prompt])
    forced = model.generation_config.forced_bos_token_id
    num_start = 1 if forced is None else 2
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens + num_start - 1,
        **options,
    )
    said: list[int] = output[0, num_start:].tolist()
    return said
