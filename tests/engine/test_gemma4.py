"""Gemma 4: readers of other layers' keys, numbers of tokens for each layer, experts next to an MLP.

Each variant has the logits of transformers' layers, in C and in torch, however a text is cut; and whatever is
left out of a layer's description changes them.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.families import GEMMA4, GEMMA4_E, GEMMA4_MOE, SHAPE, VOCAB_SIZE, save_random
from tests.models import make_engine, run_engine
from truedraft.engine.layers.decoder import Attention, DecoderLayer, DecoderWeights
from truedraft.engine.layers.mlp import DenseAndExperts
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.load import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.decoder import NativeDecoder

pytestmark = pytest.mark.usefixtures("needs_compiler")

VARIANTS: dict[str, dict[str, Any]] = {
    "two sizes of heads": GEMMA4 | {"global_head_dim": 512},
    "readers and numbers for each layer": GEMMA4_E,
    "experts, and keys that are values": GEMMA4_MOE,
    "all of it": GEMMA4_MOE | GEMMA4_E,
}
IDS = [(7 * i * i + 3) % VOCAB_SIZE for i in range(40)]
EXACT = LoadOptions(compact_weights=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Returns the folder of a variant, made once."""
    root, made = tmp_path_factory.mktemp("gemma4"), {}

    def get(name: str) -> str:
        if name not in made:
            path = root / str(len(made))
            made[name] = save_random(path, "gemma4_text", SHAPE | VARIANTS[name])
        return str(made[name])

    return get


@torch.inference_mode()
def expected_logits(path: str) -> torch.Tensor:
    module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    logits: torch.Tensor = module(input_ids=torch.tensor([IDS])).logits[0]
    return logits


def logits_in(model: Model, sizes: list[int], is_whole: bool = True) -> torch.Tensor:
    runner = ModelRunner.build(model, num_blocks=12, block_size=4)
    if not is_whole:
        runner.fast_pass = None
    table = BlockTable()
    table.block_ids = [5, 2, 7, 1, 0, 11, 3, 4, 9, 10, 6, 8]
    found, begin = [], 0
    for size in sizes:
        found.append(runner.forward([Span(table, IDS[begin : begin + size], size)]).logits)
        begin += size
    return torch.cat(found)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_transformers_however_a_text_is_cut(name: str, folder: Callable[[str], str]) -> None:
    path = folder(name)
    expected = expected_logits(path)
    native, by_torch = (load_model(path, replace(EXACT, native_kernels=each)) for each in (True, False))
    assert (native.way, by_torch.way) == ("fused layers in C", "fused layers in torch")
    assert isinstance(ModelRunner.build(native, 12, 4).fast_pass, NativeDecoder)
    one_by_one = logits_in(native, [1] * len(IDS))
    for logits in (one_by_one, logits_in(by_torch, [len(IDS)]), logits_in(by_torch, [17, 3, 20])):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)
    for sizes, is_whole in (([len(IDS)], True), ([5, 1, 30, 4], True), ([13, 27], False)):
        assert torch.equal(logits_in(native, sizes, is_whole), one_by_one)


def test_layers_that_read_keep_nothing(folder: Callable[[str], str]) -> None:
    model = load_model(folder("readers and numbers for each layer"), EXACT)
    assert [cache.bytes_per_token for cache in model.caches] == [256, 512, 0, 0]


def test_tensors_that_readers_do_not_use_are_left_out(folder: Callable[[str], str], tmp_path: Path) -> None:
    """Published checkpoints have keys and values of all layers."""
    path = Path(folder("readers and numbers for each layer"))
    more = {"model.layers.2.self_attn.k_proj.weight": torch.ones(32, 32)}
    save_file(
        load_file(path / "model.safetensors") | more,
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    assert torch.equal(
        logits_in(load_model(str(tmp_path), EXACT), [40]), logits_in(load_model(str(path), EXACT), [40])
    )


def test_quantised_it_drafts_for_itself_and_changes_no_token(folder: Callable[[str], str]) -> None:
    path, params = folder("all of it"), SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    prompts = [IDS[:3], IDS[5:25]]
    plain = run_engine(make_engine(path, None, dtype="auto"), prompts, params)
    drafting = make_engine(path, "self:int4", dtype="auto")
    assert run_engine(drafting, prompts, params) == plain
    assert drafting.stats.num_accepted_tokens > 0


# --- Planted bugs ------------------------------------------------------------------------------------------

Bug = Callable[[DecoderLayer], DecoderLayer]


def shaped(**values: Any) -> Bug:
    def change(layer: DecoderLayer) -> DecoderLayer:
        assert isinstance(layer.mixer, Attention)
        return replace(layer, mixer=replace(layer.mixer, shape=replace(layer.mixer.shape, **values)))

    return change


def readers_with_windows(layer: DecoderLayer) -> DecoderLayer:
    assert isinstance(layer.mixer, Attention)
    return layer if layer.mixer.shape.source is None else shaped(sliding_window=2)(layer)


def turned_as_a_part(layer: DecoderLayer) -> DecoderLayer:
    """Turns the first quarter of a head by itself, where pairs stand half a head apart."""
    assert isinstance(layer.mixer, Attention)
    pairs, distance = layer.mixer.shape.turned or (0, 0)
    return shaped(turned=(pairs, pairs))(layer) if pairs < distance else layer


def with_equal_experts(layer: DecoderLayer) -> DecoderLayer:
    assert isinstance(layer.mlp, DenseAndExperts)
    experts = layer.mlp.experts
    router = replace(experts.router, expert_scales=None)
    return replace(layer, mlp=replace(layer.mlp, experts=replace(experts, router=router)))


def routed_like_experts(layer: DecoderLayer) -> DecoderLayer:
    assert isinstance(layer.mlp, DenseAndExperts)
    return replace(layer, mlp=replace(layer.mlp, router_norm=layer.mlp.experts_norm))


BUGS: dict[str, Bug] = {
    "values are not normed": shaped(value_norm=None),
    "a part of a head is turned by itself": turned_as_a_part,
    "scores are divided by the root of the head size": shaped(scaling=0.25),
    "readers have another window": readers_with_windows,
    "tokens have no numbers": lambda layer: replace(layer, token_branch=None),
    "layers have no factor": lambda layer: replace(layer, scale=1.0),
    "experts have no factors": with_equal_experts,
    "the router has the experts' norm": routed_like_experts,
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_what_is_left_out_is_noticed(bug: Bug, folder: Callable[[str], str]) -> None:
    model = load_model(folder("all of it"), replace(EXACT, native_kernels=False))
    assert isinstance(model, FusedDecoder)
    weights: DecoderWeights = replace(model.weights, layers=[bug(layer) for layer in model.weights.layers])
    wrong = logits_in(FusedDecoder(model.facts, weights), [40])
    right = logits_in(model, [40])
    assert (wrong - right).abs().max() > 0.01 * right.abs().max()
