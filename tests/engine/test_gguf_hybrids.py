"""GGUF files of hybrid models are the models that they were made from, and their value heads are in order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from tests.engine.test_hybrid_families import CUTS, expected_logits, logits_in
from tests.families import save_random
from tests.gguf_hybrids import save_hybrid_gguf
from tests.gguf_models import join
from tests.hybrids import (
    CONV_FIRST,
    EXPERTS,
    FULL,
    HYBRID,
    HYBRIDS,
    MAMBA,
    delta_net,
    falcon,
    granite,
    nemotron,
)
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.formats.gguf_file import read_gguf
from truedraft.engine.gguf.checkpoint import GgufCheckpoint, open_gguf
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.loader import load_causal_model, load_model, requantised
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.quantised import QuantisedLinear

# Inputs of all linear layers are whole blocks, and rows that are stacked are whole panels.
WHOLE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
DELTA_WHOLE = {**WHOLE, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 16}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "LFM2": ("lfm2", {**HYBRIDS["LFM2"][1], **WHOLE}),
    "LFM2 with experts": (
        "lfm2_moe",
        {**HYBRID, **CONV_FIRST, **EXPERTS, **WHOLE, "num_dense_layers": 1},
    ),
    "Qwen3.5, 1 head a key": ("qwen3_5_text", {**delta_net(2, 2, 4), **DELTA_WHOLE}),
    "Qwen3.5, 2 heads a key": ("qwen3_5_text", {**delta_net(2, 4, 4), **DELTA_WHOLE}),
    "Qwen3.5, 3 heads a key": ("qwen3_5_text", {**delta_net(2, 6, 3), **DELTA_WHOLE}),
    "Qwen3.5 with experts": ("qwen3_5_moe_text", {**delta_net(2, 4, 4), **DELTA_WHOLE, **EXPERTS}),
    "Qwen3-Next": ("qwen3_next", {**delta_net(2, 4, 4), **DELTA_WHOLE, **EXPERTS}),
    "Granite 4 H with experts": (
        "granitemoehybrid",
        granite(**WHOLE, shared_intermediate_size=64, num_local_experts=4, num_experts_per_tok=2),
    ),
    "Falcon-H1": ("falcon_h1", falcon(**WHOLE, mamba_d_ssm=64, mamba_n_heads=4)),
    "Falcon-H1 with norms": (
        "falcon_h1",
        falcon(
            **{**WHOLE, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 2},
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mlp_bias=True,
        ),
    ),
    "Nemotron-H": (
        "nemotron_h",
        {
            **nemotron("mlp", MAMBA, FULL, MAMBA, "mlp", mlp_bias=True),
            **WHOLE,
            "mamba_head_dim": 16,
        },
    ),
    "Nemotron-H with experts": (
        "nemotron_h",
        {
            **nemotron(MAMBA, "moe", FULL, "moe"),
            **WHOLE,
            "mamba_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
            "routed_scaling_factor": 2.5,
        },
    ),
    "Granite 4 H": ("granitemoehybrid", granite(**WHOLE, shared_intermediate_size=64)),
    "Granite 4 H with angles": (
        "granitemoehybrid",
        granite(
            **WHOLE,
            shared_intermediate_size=64,
            mamba_n_groups=2,
            position_embedding_type="rope",
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    ),
}
# Files mix types: outputs and decays have more bits than the rest.
MIXED = {
    "ssm_out.weight": "Q5_1",
    "ssm_beta.weight": "Q8_0",
    "ssm_alpha.weight": "Q8_0",
    "attn_v.weight": "Q8_0",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a family, made once."""
    root, folders = tmp_path_factory.mktemp("gguf_hybrids"), {}

    def get(name: str) -> str:
        if name not in folders:
            folders[name] = save_random(root / str(len(folders)), *FILES[name])
        return str(folders[name])

    return get


def test_joined_matrices_of_a_hybrid(folder: Callable[[str], str], tmp_path: Path) -> None:
    """Queries have gates; a recurrent layer has a matrix of the joined name, which is another."""
    source, path = tmp_path / "model.gguf", tmp_path / "joined.gguf"
    save_hybrid_gguf(source, folder("Qwen3-Next"))
    join(source, path)
    joined = read_gguf(str(path)).tensors
    assert {f"blk.{layer}.attn_qkv.weight" for layer in range(3)} < joined.keys()
    assert not any(".attn_q." in name or "_up_exps" in name for name in joined if "gate_up" not in name)
    found, expected = (logits_in(load_model(str(file), LoadOptions()), CUTS[1]) for file in (path, source))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", FILES)
def test_files_are_the_models_they_were_made_from(
    folder: Callable[[str], str], name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "model.gguf")
    expected = expected_logits(save_hybrid_gguf(Path(path), folder(name)))
    scale = expected.abs().max()
    ours = logits_in(load_model(path, LoadOptions(compact_weights=False)), CUTS[1])
    assert (ours - expected).abs().max() < 2e-4 * scale
    reference = expected_logits(load_causal_model(path, LoadOptions(), "eager"))
    assert (reference - expected).abs().max() < 2e-4 * scale
    theirs = logits_in(load_model(folder(name), LoadOptions(compact_weights=False)), CUTS[0])
    assert (ours - theirs).abs().max() < 2e-4 * scale


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("name", FILES)
def test_blocks_are_multiplied_as_they_are_stored(
    folder: Callable[[str], str], name: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    expected = expected_logits(save_hybrid_gguf(path, folder(name), "Q8_0", **MIXED))
    model = load_model(str(path), LoadOptions())
    assert isinstance(model, FusedDecoder)
    mixers = [linear for mixer in model.weights.mixers for linear in mixer.linears]
    assert all(isinstance(linear, QuantisedLinear) for linear in mixers)
    whole, cut = (logits_in(model, sizes) for sizes in CUTS)
    assert torch.equal(whole, cut)
    assert 0 < (whole - expected).square().mean().sqrt() / expected.std() < 0.2


# Ways to compute a checkpoint, and how far logits may deviate: random weights make much of four bits.
WAYS: dict[str, tuple[LoadOptions, float]] = {
    "eight bits": (LoadOptions(quantize="int8"), 0.3),
    "four bits": (LoadOptions(quantize="int4"), 0.9),
    "bfloat16": (LoadOptions(torch.bfloat16), 0.1),
    "torch": (LoadOptions(native_kernels=False), 1e-4),
}


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("name", ["LFM2", "Qwen3.5, 3 heads a key", "Granite 4 H"])
def test_other_types_and_torch_deviate_by_rounding(folder: Callable[[str], str], name: str) -> None:
    expected = expected_logits(
        AutoModelForCausalLM.from_pretrained(
            folder(name), dtype=torch.float64, experts_implementation="eager"
        )
    ).float()
    for way, (options, bound) in WAYS.items():
        model = load_model(folder(name), options)
        assert isinstance(model, FusedDecoder)
        assert model.is_quantised == way.endswith("bits")
        whole = logits_in(model, CUTS[0])
        assert (whole - expected).square().mean().sqrt() < bound * expected.std(), way
        if model.is_native:
            assert torch.equal(logits_in(model, CUTS[1]), whole), way


@pytest.mark.parametrize("name", ["Qwen3.5, 2 heads a key", "Qwen3.5, 3 heads a key"])
def test_value_heads_in_the_other_order_are_another_model(
    folder: Callable[[str], str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug, the classic one: nothing at load tells of it, for transformers' module has it, too."""
    path = tmp_path / "model.gguf"
    expected = expected_logits(save_hybrid_gguf(path, folder(name)))
    honest = GgufCheckpoint.__init__

    def grouped(self: Any, *others: Any) -> None:
        honest(self, *others)
        self.is_tiled = False

    monkeypatch.setattr(GgufCheckpoint, "__init__", grouped)
    ours = logits_in(load_model(str(path), LoadOptions(compact_weights=False)), CUTS[0])
    assert (ours - expected).square().mean().sqrt() > 0.5 * expected.std()


def test_layers_that_predict_further_tokens_are_left_out(
    folder: Callable[[str], str], tmp_path: Path
) -> None:
    path, head = tmp_path / "model.gguf", {"eh_proj.weight": torch.ones(64, 128)}
    expected = expected_logits(save_hybrid_gguf(path, folder("Qwen3.5, 2 heads a key"), head=head))
    ours = logits_in(load_model(str(path), LoadOptions(compact_weights=False)), CUTS[0])
    assert (ours - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["Qwen3.5 with experts", "Granite 4 H with angles"])
def test_shapes_are_those_of_what_is_read(folder: Callable[[str], str], tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    save_hybrid_gguf(path, folder(name))
    checkpoint = open_gguf(str(path))
    read = {each: tuple(tensor.shape) for each, tensor in checkpoint.read(checkpoint.files).items()}
    assert checkpoint.shapes(checkpoint.files) == read


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_quantised_at_load_a_file_is_laid_out_as_before(
    folder: Callable[[str], str], tmp_path: Path, quantize: str
) -> None:
    """Value heads in another order would be another model, which transformers' layers would compute, too."""
    path = str(tmp_path / "model.gguf")
    save_hybrid_gguf(Path(path), folder("Qwen3.5, 2 heads a key"), "F16")
    file = open_gguf(path)
    quantised = requantised(file, LoadOptions(quantize=quantize))
    assert quantised.is_tiled
    assert quantised.shapes(file.files) == file.shapes(file.files)


def test_decays_that_grow_are_refused(folder: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_hybrid_gguf(path, folder("Qwen3.5, 1 head a key"))
    (place,) = (tensor for tensor in GGUFReader(path).tensors if tensor.name == "blk.0.ssm_a")
    content = bytearray(path.read_bytes())
    content[place.data_offset + 3] ^= 0x80  # the sign
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"A_log has decay rates that are not below zero"):
        load_model(str(path), LoadOptions())
    assert place.tensor_type == gguf.GGMLQuantizationType.F32
