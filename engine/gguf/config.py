"""Turns a GGUF file's metadata into transformers' config. Every key of its architecture is used or refused.

The meaning of a key, and the value where it is missing, are llama.cpp's. Five exceptions follow the models'
makers: the windows of Mistral and Phi-3, and of EXAONE 4 of other than 64 layers, which llama.cpp leaves out,
Phi-3's long factors, and the angles of gpt-oss, whose bounds between slow and fast ones llama.cpp rounds.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from transformers import AutoConfig

from truedraft.engine.families.table import FAMILIES
from truedraft.engine.formats.gguf_file import GgufError, GgufFile
from truedraft.engine.formats.gguf_tokenizer import Vocabulary
from truedraft.engine.gguf import latent
from truedraft.engine.gguf.experts import NEVER_TIED, expert_settings, has_experts
from truedraft.engine.gguf.gemma4 import BY_LAYER, gemma4_settings
from truedraft.engine.gguf.hybrids import SETTINGS, WITH_ZEROS, hybrid_settings
from truedraft.engine.gguf.keys import GgufKeys
from truedraft.engine.gguf.settings import (
    attends_with_biases,
    granite_multipliers,
    rotary_factors,
    rotated_part,
    without_further_layers,
)

# Each architecture has one name in GGUF files and one in transformers.
MODEL_TYPES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf is not None}
MODEL_TYPES["nemotron_h_moe"] = "nemotron_h"
# Gemmas with this many layers scale scores by hidden size / heads; the others scale them by the head size.
SCALED_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}
# These are the values of files that have none of the keys: the distance between layers without a window, the
# rotary base of the others, and Gemma 2's window.
PATTERNS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "olmo2": 4, "exaone4": 4}
GEMMA3_LOCAL_BASE, GEMMA2_WINDOW, EXAONE_WINDOW = 10000.0, 4096, 4096
# An EXAONE 4 with this many layers has windows of that size even if its file names none.
EXAONE_LAYERS = 64
ROPE_BASE = 10000.0
# A file must have these keys, which begin with the architecture's name.
NEEDED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
# Files of these architectures may leave out the size of dense layers, or have another epsilon.
NOT_NEEDED = {
    "qwen35moe": "feed_forward_length",
    "qwen3next": "feed_forward_length",
    "nemotron_h": "attention.layer_norm_rms_epsilon",
    "nemotron_h_moe": "attention.layer_norm_rms_epsilon",
}
OPTIONAL = {"attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim"}
# These keys are served only with values that change nothing.
NEUTRAL: dict[str, Sequence[Any]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_chunk_feed_forward_length": (0,),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0, 1, 2, 3),  # A file that pools makes vectors (``embedding.task``).
    "residual_scale": (0.0, 1.0),
    "rope.dimension_sections": ([0, 0, 0, 0], [0, 0, 0]),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "router_logit_softcapping": (0.0,),
    "use_parallel_residual": (False,),
}
# Granite 4 without a running state has keys for its size all the same.
STATE_SIZES = ("ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank")
# These keys describe the file, not the model.
INFORMATION = ("tensor_data_layout", "rope.scaling.finetuned")
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def gguf_config(file: GgufFile, vocabulary: Vocabulary | None) -> Any:
    """Returns the config; raises ``GgufError`` or ``ModelLoadError`` for files that cannot be served."""
    architecture = file.architecture
    keys = GgufKeys(file, WITH_ZEROS.get(architecture, ()), BY_LAYER if architecture == "gemma4" else ())
    found: dict[str, Any] = {
        name: keys.needed(key, float if key.endswith("epsilon") else int)
        for key, name in NEEDED.items()
        if key != NOT_NEEDED.get(architecture) or keys.says(key) is not None
    }
    found |= {name: value for key, name in OPTIONAL.items() if (value := keys.number(key, int)) is not None}
    heads = found["num_attention_heads"]
    kv_heads = found.setdefault("num_key_value_heads", heads)
    found.setdefault("head_dim", found["hidden_size"] // heads)
    if heads % kv_heads or found["head_dim"] < 2:
        raise GgufError(f"{file.path} is damaged: {heads} heads cannot share {kv_heads}")
    if found["num_hidden_layers"] > len(file.tensors):
        layers, tensors = found["num_hidden_layers"], len(file.tensors)
        raise GgufError(f"{file.path} is damaged: it has {tensors} tensors for {layers} layers")
    found["vocab_size"] = _vocab_size(file, keys, vocabulary)
    is_tied = "output.weight" not in file.tensors and architecture not in NEVER_TIED
    found["tie_word_embeddings"] = is_tied
    for name in ("bos", "eos"):
        found[f"{name}_token_id"] = None if vocabulary is None else vocabulary.ids.get(name)
    found["pad_token_id"] = None  # No text is padded.
    found["rope_parameters"] = _rope(keys, found)
    is_hybrid = architecture in SETTINGS
    settings = (hybrid_settings if is_hybrid else _of_family)(file, keys, found)
    model_type = MODEL_TYPES[architecture]
    if with_experts := has_experts(keys, architecture):
        settings |= expert_settings(keys, architecture, found | settings)
    found |= {} if is_hybrid else settings
    _close(keys, found)
    if architecture == "deepseek2":
        model_type = latent.model_type(found)
    # A llama with experts is transformers' mixtral, and one with windows its mistral.
    if architecture == "llama" and (with_experts or "sliding_window" in found):
        model_type = "mixtral" if with_experts else "mistral"
    # An OLMo 2 with windows is OLMo 3.
    if architecture == "olmo2" and "sliding_window" in found:
        model_type = "olmo3"
    return AutoConfig.for_model(model_type, **(settings if is_hybrid else found))


def _of_family(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that only the architecture's family has."""
    if (settings := FAMILY_SETTINGS.get(file.architecture)) is not None:
        return settings(file, keys, found)
    window = keys.says("attention.sliding_window")
    if file.architecture in WITH_WINDOWS:
        return WITH_WINDOWS[file.architecture](file, keys, found, window)
    if window and window < found["max_position_embeddings"]:
        raise GgufError(
            f"{file.path} has a sliding window of {window}, which {file.architecture} does not use"
        )
    if file.architecture in ("granite", "granitemoe"):
        return _granite(file, keys, found)
    if file.architecture == "seed_oss":
        return {"attention_bias": attends_with_biases(file), "attention_out_bias": False}
    return {}


def _glm4(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    rope = found["rope_parameters"] | rotated_part(keys, found["head_dim"])
    return {"rope_parameters": rope, "attention_bias": attends_with_biases(file)}


def _granite(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    keys.needed("logit_scale", float)
    keys.expect("rope.scaling.finetuned", True)  # Otherwise nothing is rotated.
    for key in STATE_SIZES:
        keys.says(key)
    if file.architecture == "granite":
        keys.says("expert_shared_feed_forward_length")
    return granite_multipliers(keys, found["head_dim"]) | {"attention_bias": attends_with_biases(file)}


def _llama(file: GgufFile, keys: GgufKeys, found: dict[str, Any], window: int | None) -> dict[str, Any]:
    mlp_bias = any(f"blk.0.ffn_{part}.bias" in file.tensors for part in ("gate", "up", "down"))
    more = {"attention_bias": attends_with_biases(file), "mlp_bias": mlp_bias}
    return more | ({"sliding_window": window} if window else {})


def _olmo2(file: GgufFile, keys: GgufKeys, found: dict[str, Any], window: int | None) -> dict[str, Any]:
    """Returns the settings of OLMo 3: windows, in whose layers positions are not scaled. OLMo 2 has none."""
    if not window:
        return {}
    rope = found["rope_parameters"]
    keys.expect("rope.freq_base_swa", rope["rope_theta"])
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "sliding_window": window,
        "layer_types": _layer_types(keys, PATTERNS["olmo2"], found["num_hidden_layers"]),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _exaone4(file: GgufFile, keys: GgufKeys, found: dict[str, Any], window: int | None) -> dict[str, Any]:
    """Returns which layers have windows: the other layers rotate nothing then."""
    layers = found["num_hidden_layers"]
    if window is None and layers == EXAONE_LAYERS:
        window = EXAONE_WINDOW
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    return {"sliding_window": window, "layer_types": _layer_types(keys, PATTERNS["exaone4"], layers)}


def _close(keys: GgufKeys, found: dict[str, Any]) -> None:
    """Refuses keys that are left and would change the text."""
    size, rope = found["head_dim"], found["rope_parameters"]
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        keys.expect(key, size)
    for key in ("rope.dimension_count", "rope.dimension_count_swa"):
        keys.expect(key, size)
    keys.expect("rope.freq_base_swa", rope.get("rope_theta"))
    keys.expect("attention.scale", 0.0, found.get("query_pre_attn_scalar", size) ** -0.5)
    for key, neutral in NEUTRAL.items():
        keys.expect(key, *neutral)
    for key in INFORMATION:
        keys.says(key)
    keys.account.close("has {name} = {value}, which is not known for this architecture")


def _vocab_size(file: GgufFile, keys: GgufKeys, vocabulary: Vocabulary | None) -> int:
    place = file.tensors.get("token_embd.weight")
    if place is None:
        raise GgufError(f"{file.path} lacks weights of the model: token_embd.weight")
    rows = place.shape[0]
    keys.expect("vocab_size", rows)
    if vocabulary is not None and len(vocabulary.tokens) != rows:
        tokens = len(vocabulary.tokens)
        raise GgufError(f"{file.path} has {tokens} tokens in its vocabulary, but {rows} rows of embeddings")
    return rows


def _rope(keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", float, ROPE_BASE)}
    kind = keys.says("rope.scaling.type", "linear")
    old = keys.says("rope.scale_linear")
    factor = keys.says("rope.scaling.factor", old) or 1.0
    original = keys.number("rope.scaling.original_context_length", int)
    if kind not in ("none", "linear", "yarn", "longrope") or not isinstance(factor, float) or factor < 0:
        raise GgufError(f"{keys.path} scales its positions by {kind} and {factor}, which is not supported")
    if kind == "yarn":
        # YaRN multiplies this factor of the angles' size by a further one of its own.
        more = keys.number("rope.scaling.attn_factor", float, 1.0)
        own = 1 + 0.1 * math.log(max(factor, 1.0))
        keys.expect("rope.scaling.yarn_attn_factor", 1.0, own)
        rope["attention_factor"] = own * more
        rope["original_max_position_embeddings"] = original or found["max_position_embeddings"]
        return rope | {"rope_type": "yarn", "factor": factor}
    if kind == "longrope" and (keys.prefix != "phi3." or factor != 1):
        raise GgufError(f"{keys.path} scales its positions by longrope, which is not supported")
    if kind == "linear" and factor != 1:
        return rope | {"rope_type": "linear", "factor": factor}
    return rope | {"rope_type": "default"}


def _phi3(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    rope = dict(found["rope_parameters"])
    more = {"rope_parameters": rope, "sliding_window": keys.says("attention.sliding_window") or None}
    size = keys.number("rope.dimension_count", int, found["head_dim"])
    if found["head_dim"] * found["num_attention_heads"] != found["hidden_size"]:
        raise GgufError(f"{file.path} has heads that do not make up its phi3.embedding_length")
    if size > found["head_dim"] or size % 2:
        raise GgufError(f"{file.path} rotates {size} numbers of a head of {found['head_dim']}")
    rope["partial_rotary_factor"] = size / found["head_dim"]
    if int(found["head_dim"] * rope["partial_rotary_factor"]) != size:
        raise GgufError(f"{file.path} rotates {size} of {found['head_dim']} numbers, which is not supported")
    if rope["rope_type"] != "default":
        raise GgufError(f"{file.path} scales its positions by {rope['rope_type']}, which phi3 does not use")
    if LONG_FACTORS not in file.tensors or SHORT_FACTORS not in file.tensors:
        return more
    original = keys.number("rope.scaling.original_context_length", int)
    if original is None or original < 2:
        raise GgufError(f"{file.path} does not say its phi3.rope.scaling.original_context_length")
    rope |= {
        "rope_type": "longrope",
        "long_factor": rotary_factors(file, LONG_FACTORS, size // 2),
        "short_factor": rotary_factors(file, SHORT_FACTORS, size // 2),
        "original_max_position_embeddings": original,
        "attention_factor": keys.number("rope.scaling.attn_factor", float, 1.0),
    }
    # Beyond this length every position would rotate by other angles, those in the cache included.
    more["max_position_embeddings"] = min(original, found["max_position_embeddings"])
    return more


def _glm4_moe(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    rope = found["rope_parameters"] | rotated_part(keys, found["head_dim"])
    return without_further_layers(keys, found) | {
        "rope_parameters": rope,
        "attention_bias": attends_with_biases(file),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _gpt_oss(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    window = keys.needed("attention.sliding_window", int)
    rope = dict(found["rope_parameters"])
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # These are the makers' angles; llama.cpp rounds them.
    types = _layer_types(keys, PATTERNS["gpt-oss"], found["num_hidden_layers"])
    return {"sliding_window": window, "layer_types": types, "rope_parameters": rope}


def _gemma(file: GgufFile, keys: GgufKeys, found: dict[str, Any]) -> dict[str, Any]:
    architecture, layers = file.architecture, found["num_hidden_layers"]
    window = keys.number("attention.sliding_window", int, GEMMA2_WINDOW if architecture == "gemma2" else None)
    if window is None:
        raise GgufError(f"{keys.path} does not say its model's {architecture}.attention.sliding_window")
    scalar = found["head_dim"]
    if layers == SCALED_BY_HIDDEN_SIZE[architecture]:
        scalar = found["hidden_size"] // found["num_attention_heads"]
    more: dict[str, Any] = {"sliding_window": window, "query_pre_attn_scalar": scalar}
    names = ["final_logit_softcapping"] + (["attn_logit_softcapping"] if architecture == "gemma2" else [])
    for name in names:
        if (cap := keys.number(name, float)) is not None:
            more[name] = cap
    more["layer_types"] = _layer_types(keys, PATTERNS[architecture], layers)
    if architecture == "gemma3":
        if found["rope_parameters"]["rope_type"] == "yarn":
            raise GgufError(f"{keys.path} scales its positions by yarn, which gemma3 does not use")
        base = keys.number("rope.freq_base_swa", float, GEMMA3_LOCAL_BASE)
        local = {"rope_type": "default", "rope_theta": base}
        more["rope_parameters"] = {
            "full_attention": found["rope_parameters"],
            "sliding_attention": local,
        }
    return more


def _layer_types(keys: GgufKeys, default: int, layers: int) -> list[str]:
    """Returns which layers have a window: the pattern counts layers, or has a value for each layer."""
    pattern = keys.says("attention.sliding_window_pattern", default)
    if isinstance(pattern, list):
        slides = [bool(each) for each in pattern]
    else:
        slides = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(layers)]
    if len(slides) != layers:
        raise GgufError(
            f"{keys.path} says of {len(slides)} layers whether they have a window, not of {layers}"
        )
    return ["sliding_attention" if each else "full_attention" for each in slides]


# Some settings belong to single families, and some families read their window in a way of their own.
FAMILY_SETTINGS: dict[str, Callable[[GgufFile, GgufKeys, dict[str, Any]], dict[str, Any]]] = {
    "phi3": _phi3,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma4": gemma4_settings,
    "gpt-oss": _gpt_oss,
    "deepseek2": lambda file, keys, found: latent.latent_settings(keys, found),
    "glm4moe": _glm4_moe,
    "glm4": _glm4,
    "chatglm": _glm4,
}
WITH_WINDOWS: dict[str, Callable[[GgufFile, GgufKeys, dict[str, Any], int | None], dict[str, Any]]] = {
    "olmo2": _olmo2,
    "exaone4": _exaone4,
    "llama": _llama,
}
