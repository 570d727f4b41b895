"""Every text-generation model that transformers knows, tried with a tiny config: served how, or refused why.

    python -m tools.family_table            # tries all, in minutes; writes docs/models.md and the record
    python -m tools.family_table gemma3     # tries some and writes those anew

A type is built from transformers' own default config, made small, with random weights, and saved as a
checkpoint. The engine loads it as any other. Its logits of a text must be those of transformers' whole model:
of a multimodal one those without images. Types run in processes of their own, with a time limit.
"""

import argparse
import json
import multiprocessing
import re
import sys
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import ByteSize
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.load import check_config
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions

ROOT = Path(__file__).parent.parent
PAGE, RECORD = ROOT / "docs" / "models.md", ROOT / "tools" / "family_table.json"
BEGIN, END = "<!-- families: python -m tools.family_table -->", "<!-- end of families -->"

SECONDS = 120
CONTEXT, WINDOW, VOCAB_SIZE, STD = 256, 8, 96, 0.25
TEXT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(20)]
CHUNK = 13
# Largest deviation of a logit, as a share of the largest one.
TOLERANCE = 1e-3

# Fields of configs by what they are, and the size that they get.
SIZES: dict[str, int | float] = (
    dict.fromkeys(["vocab_size", "text_vocab_size"], VOCAB_SIZE)
    | dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"], 32)
    | dict.fromkeys(["intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"], 48)
    | dict.fromkeys(["intermediate_size_mlp", "encoder_ffn_dim", "decoder_ffn_dim"], 48)
    | dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 24)
    | dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4)
    | dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4)
    | dict.fromkeys(["num_key_value_heads", "num_kv_heads"], 2)
    | dict.fromkeys(["head_dim"], 16)
    | dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], CONTEXT)
    | dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4)
    | dict.fromkeys(["num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k"], 2)
    | dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "num_nextn_predict_layers"], 1)
    | dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16)
    | dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 8)
    | {"image_size": 32, "patch_size": 16, "vocab_size_per_layer_input": VOCAB_SIZE}
    | {"hidden_size_per_layer_input": 8}
)
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "depth",
)
WINDOWS = ("sliding_window", "attention_chunk_size")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}

# What a type needs beyond that, by the path of the field.
THREE_DIMENSIONS = {
    "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
BY_KIND = {"full_attention": PLAIN, "sliding_attention": PLAIN}
# Later layers use the keys and values of earlier ones.
SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
HYBRID = ["linear_attention", "full_attention"]
# Compressed keys and values are those of all heads.
OF_ALL_HEADS = {"num_key_value_heads": 4, "head_dim": 8}
MORE: dict[str, dict[str, Any]] = {
    "axk1": OF_ALL_HEADS,
    "axk2": OF_ALL_HEADS,
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "beam": {"rope_parameters": BY_KIND},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass": {"text_config.rope_parameters": BY_KIND},
    "cohere_compass_text": {"rope_parameters": BY_KIND},
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8},
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
    },
    "deepseek_v2": {**OF_ALL_HEADS, "num_experts_per_tok": 2, "n_routed_experts": 4, "topk_method": "greedy"},
    "deepseek_v3": OF_ALL_HEADS,
    "deepseek_v32": OF_ALL_HEADS,
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 24,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe": THREE_DIMENSIONS,
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "gemma3n_text": {**SHARED, "intermediate_size": 48, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**SHARED, "per_layer_config": {}},
    "glm46v": THREE_DIMENSIONS,
    "glm4v": THREE_DIMENSIONS,
    "glm4v_moe": {"text_config.rope_parameters": {**PLAIN, "mrope_section": [1, 1, 0]}},
    "glm4_moe_lite": OF_ALL_HEADS,
    "glm_moe_dsa": OF_ALL_HEADS,
    "glm_ocr": THREE_DIMENSIONS,
    "glmga": THREE_DIMENSIONS,
    "granitemoehybrid": {
        "layer_types": HYBRID,
        "num_local_experts": 0,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
    "granite_docling": {"vision_config.out_hidden_size": 32},
    "gemma4_unified": {"text_config.per_layer_config": {}},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl": {
        "text_config.head_dim": 16,
        "text_config.rope_parameters": {**PLAIN, "xdrope_section": [2, 2, 2, 2]},
    },
    "inkling2": {"vision_config.text_hidden_size": 32},
    "kimi_k25": {"text_config.num_key_value_heads": 4, "text_config.head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm2_vl": {"text_config.layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"]},
    "lfm3_vl": {"text_config.layer_types": ["conv", "full_attention", "sliding_attention"]},
    "longcat_flash": {**OF_ALL_HEADS, "qk_head_dim": 16},
    "minicpm3": OF_ALL_HEADS,
    "ministral": {"head_dim": 16},
    "mistral4": {"num_key_value_heads": 4},
    "mistral_large4": {
        "text_config.num_key_value_heads": 4,
        "text_config.head_dim": 8,
        "text_config.kv_source_layers": [0, 1],
    },
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "muse_spark": {"audio_config.out_hidden_size": 32},
    "nemotron": {"num_key_value_heads": 2},
    # transformers' own prompts and steps differ where a step is less than this.
    "nemotron_h": {"time_step_min": 1e-9},
    "paddleocr_vl": {"text_config.rope_parameters": {**PLAIN, "mrope_section": [2, 2, 4]}},
    "qwen2_5_omni_thinker": THREE_DIMENSIONS,
    "qwen2_5_vl": THREE_DIMENSIONS,
    "qwen2_vl": THREE_DIMENSIONS,
    "qwen3_5": {"text_config.layer_types": HYBRID},
    "qwen3_5_moe": {"text_config.layer_types": HYBRID},
    "qwen3_5_moe_text": {"layer_types": HYBRID},
    "qwen3_5_text": {"layer_types": HYBRID},
    "qwen3_next": {"layer_types": HYBRID},
    "step3p7": {"text_config.sliding_window": WINDOW},
    "youtu": OF_ALL_HEADS,
    "unlimited_ocr": {"text_config.num_key_value_heads": 4},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
}


def model_types() -> list[str]:
    """Every type that writes text, multimodal ones among them."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


TITLES = {
    "fused": "served by the fused forward",
    "layers": "served by transformers' layers over our cache",
    "encoder-decoder": "served as [encoder-decoders](encoder-decoder.md)",
    "untried": "not tried: transformers' defaults make no model, small or not",
}


@dataclass(frozen=True)
class Outcome:
    """``how`` is one of the titles' keys, refused, or failed, which must not be. ``text`` is the type of a
    multimodal model's text part."""

    how: str
    why: str = ""
    text: str = ""


def tiny_config(model_type: str) -> Any:
    """transformers' default config with small sizes and one layer of each kind."""
    config_class = CONFIG_MAPPING[model_type]
    values = _small(config_class().to_dict())
    for path, value in MORE.get(model_type, {}).items():
        *groups, name = path.split(".")
        group = values
        for each in groups:
            group = group[each]
        group[name] = value
    return config_class(**{name: value for name, value in values.items() if name != "model_type"})


def _small(values: dict[str, Any]) -> dict[str, Any]:
    layers = next((values[name] for name in LAYERS if isinstance(values.get(name), int)), 0)
    kinds = values.get("layer_types") or []
    picked = sorted({kind: kinds.index(kind) for kind in kinds}.values())
    picked += [i for i in range(layers - 1, -1, -1) if i not in picked][: max(0, 2 - len(picked))]
    picked = sorted(i for i in picked if i < layers)
    context = next((values[n] for n in ("max_position_embeddings", "n_positions") if values.get(n)), CONTEXT)
    small: dict[str, Any] = {}
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "transformers_version" or value is None:
            continue
        if name == "per_layer_config" and isinstance(value, dict):
            small[name] = {picked.index(int(i)): each for i, each in value.items() if int(i) in picked}
        elif isinstance(value, dict):
            small[name] = _small(value)
        elif isinstance(value, list) and layers and len(value) == layers:
            small[name] = [value[i] for i in picked]
        elif name in LAYERS and is_number:
            small[name] = len(picked) or 2
        elif name in WINDOWS and is_number:
            small[name] = WINDOW if value < context else CONTEXT
        elif name in SIZES and is_number:
            small[name] = min(value, SIZES[name])
        elif name in SPECIAL:
            small[name] = SPECIAL[name]
        elif name == "initializer_range":
            small[name] = STD
        elif name == "mrope_section":
            small[name] = [2, 3, 3]
        else:
            small[name] = value
    return small


def outcome(model_type: str) -> Outcome:
    """Tells what becomes of a checkpoint of that type: refused by default config, or a tiny one's fate."""
    if (default := _default_config(model_type)) is not None:
        with TemporaryDirectory() as folder:
            default.save_pretrained(folder)
            try:
                check_config(folder, LoadOptions())
            except ModelLoadError as error:
                if not str(error).startswith("cannot load"):  # transformers' own defaults, then
                    return _refused(error, folder, default)
    with TemporaryDirectory() as folder:
        try:
            config = tiny_config(model_type)
            expected, reason = save(config, folder)
        except Exception as error:
            return Outcome("untried", f"{type(error).__name__}: {' '.join(str(error).split())}")
        if reason:
            return Outcome("untried", f"transformers itself fails: {reason}", _text_type(config))
        try:
            return Outcome(*served(folder, expected), _text_type(config))
        except ModelLoadError as error:
            return _refused(error, folder, config)


def _default_config(model_type: str) -> Any:
    """None where transformers' defaults make no model."""
    try:
        return None if model_type in MORE else CONFIG_MAPPING[model_type]()
    except Exception:
        return None


def _refused(error: ModelLoadError, folder: str, config: Any) -> Outcome:
    why = re.sub(r"[\d.]+%", "N %", str(error).replace(folder, "the checkpoint"))
    return Outcome("refused", why, _text_type(config))


def _text_type(config: Any) -> str:
    inner = str(config.get_text_config(decoder=True).model_type)
    return "" if inner == config.model_type else inner


@torch.inference_mode()
def save(config: Any, folder: str) -> tuple[torch.Tensor | None, str]:
    """Saves a random model; returns its logits of the text [tokens, vocabulary], or why it has none."""
    mappings: Any = (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
    if config.is_encoder_decoder:
        mappings = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,)
    model = _random(next(mapping[type(config)] for mapping in mappings if type(config) in mapping), config)
    model.save_pretrained(folder)
    if config.is_encoder_decoder:
        return None, ""
    try:
        return model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0].float(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _random(model_class: Any, config: Any) -> Any:
    torch.manual_seed(1)
    model = model_class._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms, biases and sinks start as constants; trained ones are not
            parameter.add_(torch.randn_like(parameter) * STD)
    return model.float().eval()


def served(folder: str, expected: torch.Tensor | None) -> tuple[str, str]:
    """Returns how the engine serves the checkpoint in ``folder``; ``ModelLoadError`` if it refuses it."""
    core = build_engine(
        EngineConfig(
            target=folder,
            draft="none",
            method="none",
            num_speculative_tokens=0,  # nothing is measured
            device="cpu",
            block_size=4,
            cache_memory=ByteSize(1 << 24),
        )
    )
    core.add(Generate("greedy", TEXT, SamplingParams(max_tokens=8, temperature=0)))
    while core.has_work:
        core.step()
    model = core.target.model
    if expected is None:
        return "encoder-decoder", ""
    deviation = float((logits(model) - expected).abs().max() / expected.abs().max())
    if not deviation <= TOLERANCE:
        return "failed", f"its logits deviate by {deviation:.1e} from transformers'"
    return "fused" if isinstance(model, FusedDecoder) else "layers", ""


@torch.inference_mode()
def logits(model: Model) -> torch.Tensor:
    """[tokens, vocabulary] of the text, in two chunks over a cache."""
    runner = ModelRunner.build(model, num_blocks=1, block_size=len(TEXT), num_state_slots=1)
    table = BlockTable()
    table.block_ids, table.state_slot = [0], 0
    chunks = TEXT[:CHUNK], TEXT[CHUNK:]
    return torch.cat([runner.forward([Span(table, chunk, len(chunk))]).logits for chunk in chunks])


def _report(model_type: str, end: Connection) -> None:
    try:
        end.send(outcome(model_type))
    except Exception as error:
        end.send(Outcome("failed", f"{type(error).__name__}: {' '.join(str(error).split())}"))


def tried(model_type: str) -> Outcome:
    """``outcome`` in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_report, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else Outcome("failed", f"not done after {SECONDS} s")
    except EOFError:
        process.join()
        return Outcome("failed", f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def table(outcomes: dict[str, Outcome]) -> str:
    """The families as a table in Markdown."""
    lines = ["| | number | model types of transformers |", "|---|---|---|"]
    for how, title in TITLES.items():
        names = [_name(each, outcomes[each]) for each in outcomes if outcomes[each].how == how]
        lines.append(f"| {title} | {len(names)} | {', '.join(names)} |")
    reasons: dict[str, list[str]] = {}
    for model_type, each in outcomes.items():
        if each.how == "refused":
            inner = each.text or model_type
            why = each.why.replace(f"{model_type} ", "... ").replace(f"{inner} ", "... ")
            reasons.setdefault(why, []).append(model_type)
    lines += ["", "| refused: what is said | number | model types |", "|---|---|---|"]
    for why, names in sorted(reasons.items(), key=lambda reason: -len(reason[1])):
        lines.append(
            f"| {why.replace('|', '')} | {len(names)} | {', '.join(f'`{name}`' for name in names)} |"
        )
    return "\n".join(lines)


def _name(model_type: str, outcome: Outcome) -> str:
    return f"`{model_type}`" + (f" (`{outcome.text}`)" if outcome.text else "")


def page(text: str, outcomes: dict[str, Outcome]) -> str:
    """``text`` of docs/models.md with the table of ``outcomes``."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(outcomes)}\n{END}{rest.split(END)[1]}"


def recorded() -> dict[str, Outcome]:
    """The outcomes of the last run, by model type."""
    return {name: Outcome(**each) for name, each in json.loads(RECORD.read_text()).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Try every text-generation model that transformers knows.")
    parser.add_argument("model_types", nargs="*", help="only these; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something has changed")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    outcomes = {}
    for model_type in args.model_types or model_types():
        outcomes[model_type] = each = tried(model_type)
        print(f"{model_type:28} {each.how:16} {each.why}", flush=True)
    failed = [name for name, each in outcomes.items() if each.how == "failed"]
    if args.check:
        changed = [name for name, each in outcomes.items() if each != recorded().get(name)]
        print(f"changed: {', '.join(changed) or 'nothing'}")
        return bool(changed or failed)
    if args.model_types:
        outcomes = dict(sorted((recorded() | outcomes).items()))
    record = {name: asdict(each) for name, each in outcomes.items()}
    RECORD.write_text(json.dumps(record, indent=0) + "\n")
    PAGE.write_text(page(PAGE.read_text(), outcomes))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
