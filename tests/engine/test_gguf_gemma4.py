"""GGUF files of Gemma 4 are the models that they were made from; with one thing changed they are what
llama.cpp computes, or refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import AutoModelForCausalLM

from tests.engine.test_gemma4 import EXACT, IDS, expected_logits, logits_in
from tests.engine.test_gguf_mutations import IDS as SHORT
from tests.engine.test_gguf_mutations import (
    Content,
    changed_keys,
    equal_and_refused,
    logits_unless_refused,
    outcome,
    served,
)
from tests.families import GEMMA4, GEMMA4_E, GEMMA4_MOE, SHAPE, save_random
from tests.gguf_models import finish
from tests.llama_cpp_gemma4 import Gemma4Graph
from truedraft.engine.checkpoints.stacks import stored_tensors
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.loader import load_causal_model, load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.quantised import QuantisedEmbeddings, QuantisedLinear

# Inputs of all linear layers are whole blocks.
WHOLE = {
    **SHAPE,
    "final_logit_softcapping": 5.0,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OF_E = {**GEMMA4_E, "hidden_size_per_layer_input": 32, "tie_word_embeddings": True}
OF_EXPERTS = {**GEMMA4_MOE, "moe_intermediate_size": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "31B": {**WHOLE, **GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "E2B": {**WHOLE, **OF_E},
    "E4B": {**WHOLE, **OF_E, "use_double_wide_mlp": False},
    "26B-A4B": {**WHOLE, **OF_EXPERTS},
    "all of it": {**WHOLE, **OF_EXPERTS, **OF_E},
}
ROOT = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
# Parameters of a layer; what is not said ends as transformers' names do.
LAYER = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
}
WHOLE_NAMES = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "layer_scalar": "layer_output_scale.weight",
}


def stored_name(name: str) -> str:
    if not name.startswith("model.layers."):
        base, _, end = name.rpartition(".")
        return f"{ROOT[base]}.{end}"
    number, own = name.removeprefix("model.layers.").split(".", 1)
    base, _, end = own.rpartition(".")
    return f"blk.{number}.{WHOLE_NAMES.get(own) or f'{LAYER[base]}.{end}'}"


def save_gemma4_gguf(path: Path, folder: str, kind: str = "F32") -> Any:
    """Returns transformers' module with the weights that the file stands for, which is as llama.cpp's
    converter writes it. ``kind``: of matrices but routers, whose inputs are whole blocks here."""
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = module.config
    writer = GGUFWriter(path, "gemma4")
    _add_metadata(writer, config)
    with torch.no_grad():
        for name, parameter in stored_tensors(module).items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            is_rounded = parameter.ndim > 1 and "router" not in name
            number = GGMLQuantizationType[kind if is_rounded else "F32"]
            data = gguf.quantize(np.ascontiguousarray(parameter.numpy()), number)
            parameter.copy_(torch.from_numpy(gguf.dequantize(data, number)).view(parameter.shape))
            writer.add_tensor(stored_name(name), data, raw_dtype=number)
    full = config.per_layer_config["full_attention"].head_dim
    turned = int(full * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    factors = np.array([1.0] * turned + [1e30] * (full // 2 - turned), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    # Published checkpoints have keys and values of all layers.
    for layer in range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers):
        own = config.per_layer_config[layer]
        rows = own.num_key_value_heads * own.head_dim
        writer.add_tensor(f"blk.{layer}.attn_k.weight", np.ones((rows, config.hidden_size), dtype=np.float32))
        writer.add_tensor(f"blk.{layer}.attn_k_norm.weight", np.ones(own.head_dim, dtype=np.float32))
    finish(writer)
    return module


def _add_metadata(writer: GGUFWriter, config: Any) -> None:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    layers, shared, rope = config.num_hidden_layers, config.num_kv_shared_layers, config.rope_parameters
    full, sliding = (config.per_layer_config[kind] for kind in ("full_attention", "sliding_attention"))
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    wide = [config.intermediate_size * (1 + (layer >= layers - shared)) for layer in range(layers)]
    writer.add_feed_forward_length(wide if config.use_double_wide_mlp else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    heads = [(sliding if each else full).num_key_value_heads for each in slides]
    writer.add_head_count_kv(heads if len({*heads}) > 1 else heads[0])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_key_length_swa(sliding.head_dim)
    writer.add_value_length_swa(sliding.head_dim)
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_rope_dimension_count_swa(sliding.head_dim)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Returns the folder of a variant, made once."""
    root, made = tmp_path_factory.mktemp("gguf_gemma4"), {}

    def get(name: str) -> str:
        if name not in made:
            made[name] = save_random(root / str(len(made)), "gemma4_text", VARIANTS[name])
        return str(made[name])

    return get


@pytest.mark.parametrize("name", VARIANTS)
def test_files_are_the_models_they_were_made_from(
    name: str, folder: Callable[[str], str], tmp_path: Path
) -> None:
    path = str(tmp_path / "model.gguf")
    save_gemma4_gguf(Path(path), folder(name))
    expected = expected_logits(folder(name))
    torch.testing.assert_close(
        logits_in(load_model(path, EXACT), [17, 3, 20]), expected, rtol=1e-4, atol=2e-4
    )
    reference: Any = load_causal_model(path, LoadOptions(), "eager")
    with torch.inference_mode():
        found = reference(input_ids=torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("name", ["31B", "all of it"])
def test_blocks_are_multiplied_as_they_are_stored(
    name: str, folder: Callable[[str], str], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    module = save_gemma4_gguf(path, folder(name), "Q8_0")
    with torch.inference_mode():
        expected = module(input_ids=torch.tensor([IDS])).logits[0]
    model = load_model(str(path), LoadOptions())
    assert isinstance(model, FusedDecoder)
    assert isinstance(model.weights.embeddings, QuantisedEmbeddings)
    assert all(isinstance(layer.mixer.qkv, QuantisedLinear) for layer in model.weights.layers)
    assert isinstance(ModelRunner.build(model, 12, 4).fast_pass, NativeDecoder)
    whole = logits_in(model, [len(IDS)])
    assert torch.equal(logits_in(model, [5, 1, 30, 4]), whole)
    # A token that rounding gives other experts has other logits altogether.
    deviations = (whole - expected).square().mean(-1)
    assert 0 < deviations.median().sqrt() / expected.std() < 0.1


# --- Files with one thing changed --------------------------------------------------------------------------

HIDDEN, LAYERS, VOCAB_SIZE, INNER, SIZE, FULL_SIZE, INPUTS, NUMBER, EXPERT = 32, 4, 24, 40, 16, 32, 8, 4, 24
SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
METADATA: dict[str, Any] = {
    "block_count": LAYERS,
    "context_length": 64,
    "embedding_length": HIDDEN,
    "feed_forward_length": [INNER, INNER, 2 * INNER, 2 * INNER],
    "attention.head_count": 4,
    "attention.head_count_kv": [2, 1, 2, 1],
    "attention.key_length": FULL_SIZE,
    "attention.value_length": FULL_SIZE,
    "attention.key_length_swa": SIZE,
    "attention.value_length_swa": SIZE,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 6,
    "attention.sliding_window_pattern": [True, False, True, False],
    "attention.shared_kv_layers": 2,
    "embedding_length_per_layer_input": INPUTS,
    "final_logit_softcapping": 5.0,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "rope.dimension_count": FULL_SIZE,
    "rope.dimension_count_swa": SIZE,
    "expert_count": NUMBER,
    "expert_used_count": 2,
    "expert_feed_forward_length": EXPERT,
}
# Other values of keys than those that the file has; None removes it.
VALUES: dict[str, list[Any]] = {
    "block_count": [2, 3, 5],
    "feed_forward_length": [INNER, [INNER] * 4, [INNER] * 2, [INNER, 2 * INNER, INNER, 2 * INNER], [], None],
    "attention.head_count": [2, 3, [4] * 4, [4, 2, 4, 2]],
    "attention.head_count_kv": [2, [2] * 4, [2, 1, 1, 1], [1, 1, 2, 1], [2, 1], [2, 0, 2, 0], [], None],
    "attention.key_length": [SIZE, None],
    "attention.value_length": [SIZE, None],
    "attention.key_length_swa": [FULL_SIZE, None],
    "attention.value_length_swa": [8, None],
    "attention.layer_norm_rms_epsilon": [0.5],
    "attention.sliding_window": [3, 0, None],
    "attention.sliding_window_pattern": [
        [True, False, False, False],
        [False, True, True, False],
        [True] * 4,
        [True, False],
        [1, 0, 1, 0],
        2,
        None,
    ],
    "attention.shared_kv_layers": [0, 1, 3, 4, 5, None],
    "attention.causal": [False, True],
    "attention.scale": [0.5],
    "embedding_length_per_layer_input": [0, 4, None],
    "final_logit_softcapping": [3.0, 0.0, None],
    "rope.freq_base": [1e3, None],
    "rope.freq_base_swa": [1e3, None],
    "rope.dimension_count": [SIZE, None],
    "rope.dimension_count_swa": [8, None],
    "rope.scaling.type": ["yarn", "none"],
    "rope.scaling.factor": [4.0],
    "expert_count": [0, 2, None],
    "expert_used_count": [1, 0, 5, None],
    "expert_feed_forward_length": [EXPERT // 2, None],
    "expert_gating_func": [1, 2],
    "expert_weights_scale": [2.0],
    "expert_shared_count": [1],
    "nextn_predict_layers": [1],
    "a_key_of_tomorrow": [1],
}


def base(is_uniform: bool = False) -> Content:
    """Makes a file with all that some file of Gemma 4 has; ``is_uniform``: all layers have the same shapes.
    Keys are values, too, in the second one otherwise."""
    draws, metadata = np.random.default_rng(1), dict(METADATA)
    if is_uniform:
        metadata |= {f"{key}_swa": FULL_SIZE for key in SIZES} | {"attention.head_count_kv": 1}

    def drawn(*shape: int) -> Any:
        return draws.normal(0, 0.25, shape).astype(np.float32) + (len(shape) == 1)

    tensors = {
        "token_embd.weight": drawn(VOCAB_SIZE, HIDDEN),
        "output_norm.weight": drawn(HIDDEN),
        "rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32),
        "per_layer_token_embd.weight": drawn(VOCAB_SIZE, LAYERS * INPUTS),
        "per_layer_model_proj.weight": drawn(LAYERS * INPUTS, HIDDEN),
        "per_layer_proj_norm.weight": drawn(INPUTS),
    }
    for layer in range(LAYERS):
        size, keys = (FULL_SIZE, FULL_SIZE) if layer % 2 or is_uniform else (SIZE, 2 * SIZE)
        inner = METADATA["feed_forward_length"][layer]
        shapes: dict[str, tuple[int, ...]] = {
            "attn_q.weight": (4 * size, HIDDEN),
            "attn_output.weight": (HIDDEN, 4 * size),
            "attn_q_norm.weight": (size,),
            "attn_k.weight": (keys, HIDDEN),
            "attn_k_norm.weight": (size,),
            "ffn_gate.weight": (inner, HIDDEN),
            "ffn_up.weight": (inner, HIDDEN),
            "ffn_down.weight": (HIDDEN, inner),
            "inp_gate.weight": (INPUTS, HIDDEN),
            "proj.weight": (HIDDEN, INPUTS),
            "layer_output_scale.weight": (1,),
            "ffn_gate_inp.weight": (NUMBER, HIDDEN),
            "ffn_gate_inp.scale": (HIDDEN,),
            "ffn_gate_up_exps.weight": (NUMBER, 2 * EXPERT, HIDDEN),
            "ffn_down_exps.weight": (NUMBER, HIDDEN, EXPERT),
            "ffn_down_exps.scale": (NUMBER,),
        }
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
        norms += ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")
        shapes |= {f"{norm}.weight": (HIDDEN,) for norm in norms}
        if layer != 1 or is_uniform:
            shapes["attn_v.weight"] = (keys, HIDDEN)
        tensors |= {f"blk.{layer}.{name}": drawn(*shape) for name, shape in shapes.items()}
    return Content("gemma4", metadata, tensors)


def is_changed(name: str) -> bool:
    """Tells whether a tensor is: all of the first layer, and of the others what reads or stores keys."""
    return not name.startswith(("blk.1", "blk.2", "blk.3")) or "attn_" in name and "norm.weight" not in name


def key_mutations(content: Content) -> Iterator[Content]:
    return changed_keys(content, [{key: value} for key, values in VALUES.items() for value in values])


def removed_tensors(content: Content) -> Iterator[Content]:
    for name in filter(is_changed, content.tensors):
        changed = content.copy()
        del changed.tensors[name]
        yield changed


def reshaped_tensors(content: Content) -> Iterator[Content]:
    for name in filter(is_changed, content.tensors):
        changed, tensor = content.copy(), content.tensors[name]
        changed.tensors[name] = np.repeat(tensor, 2, axis=0) if len(tensor) == 1 else tensor[:-1]
        yield changed


def added_tensors(content: Content) -> Iterator[Content]:
    ones = np.ones(HIDDEN, dtype=np.float32)
    factors = [[1.0] * 16, [1e30] * 16, [1.0] * 5 + [1e30] * 11, [1.0, 1e30] * 8, [2.0] * 4 + [1e30] * 12]
    factors += [[1.0] * 4 + [8.0] * 12]
    changes: list[dict[str, Any]] = [
        {"output.weight": content.tensors["token_embd.weight"][::-1].copy()},
        *({"rope_freqs.weight": np.array(each, dtype=np.float32)} for each in factors),
        {"blk.1.attn_v.weight": content.tensors["blk.1.attn_k.weight"][::-1].copy()},
        {"blk.0.ffn_up_exps.scale": np.ones(NUMBER, dtype=np.float32)},
        {"blk.0.ffn_gate_exps.weight": content.tensors["blk.0.ffn_gate_up_exps.weight"][:, :EXPERT].copy()},
        {"blk.0.attn_qkv.weight": ones},
        {"blk.0.attn_output.scale": ones[:1]},
        {"blk.0.attn_output.bias": ones},
        {"blk.3.attn_k.bias": ones},
        {"blk.1.rope_freqs.weight": ones[:16]},
        {"blk.4.attn_norm.weight": ones},
        {"altup_proj.weight": ones},
    ]
    for change in changes:
        changed = content.copy()
        changed.tensors |= change
        yield changed


MUTATIONS: dict[str, Callable[[Content], Iterator[Content]]] = {
    "key changed": key_mutations,
    "tensor removed": removed_tensors,
    "tensor reshaped": reshaped_tensors,
    "tensor added": added_tensors,
}
# Files served as by llama.cpp, and refused, by kind of mutation.
COUNTS = [(11, 69), (4, 38), (0, 42), (4, 13)]


def reference(content: Content) -> Any:
    """Logits, or None where llama.cpp refuses."""

    def make() -> Gemma4Graph:
        return Gemma4Graph(content.architecture, content.keys, content.tensors)

    return logits_unless_refused(make, SHORT, KeyError, TypeError)


@pytest.mark.parametrize("kind", MUTATIONS)
def test_mutated_files_are_the_reference_or_refused(kind: str, tmp_path: Path) -> None:
    content = base()
    if kind == "key changed":
        assert outcome(content, tmp_path / "whole.gguf", reference) == "equal"
    expected = COUNTS[list(MUTATIONS).index(kind)]
    assert equal_and_refused(content, MUTATIONS[kind], tmp_path, reference) == expected


def test_layers_that_read_others_follow_one_of_each_type(tmp_path: Path) -> None:
    """llama.cpp reads by number, transformers by type; nor has transformers a window in the last layer."""
    content, expected = base(is_uniform=True), {(True, False): "equal"}
    for pattern in (
        [*pair, True, False] for pair in ((True, False), (False, True), (True, True), (False, False))
    ):
        content.metadata["attention.sliding_window_pattern"] = pattern
        result = outcome(content, tmp_path / "model.gguf", reference)
        assert result == expected.get((pattern[0], pattern[1]), "refused")
    content.metadata["attention.sliding_window_pattern"] = [True, False, False, True]
    assert "of the last one that it has none" in served(content, tmp_path / "model.gguf")


def test_the_table_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert f"| gemma4 | {' | '.join(f'{equal}, {refused}' for equal, refused in COUNTS)} |" in page
