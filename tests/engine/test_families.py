"""Every family of decoders: the very tokens of transformers' ``generate``, a draft of itself always accepted.

What cannot be served is refused when it is loaded, by name. The planted bugs at the end show that each
family's feature changes the text, so that the table would notice if it were lost.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families import FAMILIES, SHAPE, VOCAB_SIZE, save_random
from tests.models import greedily_generated, make_engine, run_engine
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers import attention
from truedraft.engine.layers.attention import ATTENTION_NAME, AttentionCall, PagedAttention, attention_forward
from truedraft.engine.layers.rotary import Rotary
from truedraft.engine.memory.kv_cache import KVCache
from truedraft.engine.messages import SamplingParams, Verification
from truedraft.engine.models import cache_plan
from truedraft.engine.models.hf.decoder_only import DecoderModel
from truedraft.engine.models.hf.module import load_causal_model, load_decoder
from truedraft.engine.models.hf.self_check import self_check
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.positions import choose_rotary_factors

pytestmark = pytest.mark.usefixtures("packs_small_layers")

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
CPU = torch.device("cpu")


def prompts() -> list[list[int]]:
    """Shorter than a window, longer than one, longer than a step's budget."""
    generator = torch.Generator().manual_seed(5)
    lengths = (1, 5, 13, 30, 50)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def by_generate(folder: str) -> list[list[int]]:
    config = AutoConfig.from_pretrained(folder)
    choose_rotary_factors(config, None)  # generate() would begin with the other set
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    return greedily_generated(model, prompts(), NUM_TOKENS)


def engine(folder: str, num_speculative_tokens: int, **config: Any) -> EngineCore:
    """The model as its own draft; three at a time, prompts in chunks of sixteen tokens."""
    defaults = {"max_num_sequences": 3, "max_num_batched_tokens": 16, "prefix_caching": False}
    return make_engine(
        folder, folder, num_speculative_tokens=num_speculative_tokens, **{**defaults, **config}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family_folder: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    path = family_folder(family)
    expected = by_generate(path)
    assert len({token for output in expected for token in output}) > 4, "a text of one token shows nothing"
    assert run_engine(engine(path, 0), prompts(), GREEDY) == expected

    core = engine(path, 4, prefix_caching=True)
    if "in C" in family:
        assert core.target.model.way == "fused layers in C"
    assert run_engine(core, prompts(), GREEDY) == expected
    assert core.scheduler.num_prefix_hits == 0
    assert run_engine(core, prompts(), GREEDY) == expected
    assert core.scheduler.num_prefix_hits > 0
    assert core.stats.num_accepted_tokens == core.stats.num_draft_tokens > 0
    run_engine(core, prompts(), [sampled(rule) for rule in RULES])
    # Rounding may move a probability by its last bits, and then a uniform number may fall between.
    assert core.stats.num_accepted_tokens >= core.stats.num_draft_tokens - 1

    # What is computed again after a preemption is a prompt to a family: some stand for all.
    if [*FAMILIES].index(family) % 3:
        return
    block_bytes = 4 * 2 * core.target.model.cache_bytes_per_token
    blocks_of_longest = (len(prompts()[-1]) + NUM_TOKENS + 4) // 4 + 1
    # Layers with a window would give so many blocks back that nobody had to be preempted.
    monkeypatch.setattr(cache_plan, "windows_of", lambda *_: None)
    small = engine(path, 4, cache_memory=block_bytes * (blocks_of_longest + 4))
    assert run_engine(small, prompts(), GREEDY) == expected
    assert small.scheduler.num_preemptions > 0


RULES: list[Verification] = ["rejection", "block", "coupled", "rejection", "coupled"]


def sampled(rule: Verification) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=3, verification=rule)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Mamba": (
        "mamba",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        "mamba models cannot be served: their recurrent layers keep a running state",
    ),
    "RWKV": (
        "rwkv",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
        "rwkv models cannot be served: their recurrent layers keep a running state",
    ),
    "BLOOM, positions as a bias of its own attention": (
        "bloom",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "no attention that transformers lets us replace",
    ),
    "Falcon, its own attention classes": ("falcon", SHAPE, "no attention that transformers lets us replace"),
    "StableLM, no keyword arguments": ("stablelm", SHAPE, "handed no keyword arguments"),
    "Llama 4, attention in chunks": (
        "llama4_text",
        {
            **SHAPE,
            "head_dim": 8,
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
        },
        "neither causal nor a sliding window",
    ),
    "Llama 4, its temperature": (
        "llama4_text",
        {
            **SHAPE,
            "head_dim": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "no_rope_layers": [1, 0],
        },
        "the temperature follows a token's place in the batch instead of its position",
    ),
    "Qwen2-MoE, a window that only its mask has": (
        "qwen2_moe",
        {
            **SHAPE,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
        "its mask shows 8 tokens, but its attention gets no window",
    ),
    "Doge, a mask of its own": ("doge", SHAPE, "a mask of its own"),
    "BERT, both directions": ("bert", SHAPE, "looks at later tokens too"),
    "DiffLlama, two attentions in one": ("diffllama", SHAPE, "over our cache the logits deviate"),
}


@pytest.mark.parametrize("model", REFUSED)
def test_what_cannot_be_served_is_refused_at_load(tmp_path: Path, model: str) -> None:
    model_type, values, message = REFUSED[model]
    path = save_random(tmp_path, model_type, values)
    with pytest.raises(ModelLoadError) as refused:
        make_engine(path, None)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("keyword", "given"), [("position_bias", torch.zeros(1)), ("indices", [1]), ("is_causal", False)]
)
def test_unknown_keywords_of_attention_are_refused(keyword: str, given: Any) -> None:
    heads = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelLoadError, match=keyword):
        attention_forward(
            torch.nn.Module(), heads, heads, heads, None, attention_context=None, **{keyword: given}
        )


def test_keywords_without_effect_are_taken(family_folder: Callable[[str], str]) -> None:
    decoder = load_decoder(family_folder("Llama"), LoadOptions())
    seen = {}

    class Recorder:
        def attend(self, call: AttentionCall, query: torch.Tensor, *others: Any) -> torch.Tensor:
            seen[call.layer] = query.shape
            return query

    heads, module = torch.zeros(1, 2, 3, 4), decoder.module.model.layers[1].self_attn
    attention_forward(
        module,
        heads,
        heads,
        heads,
        None,
        attention_context=Recorder(),
        dropout=0.0,
        indices=None,
        use_cache=False,
    )
    assert seen == {1: (3, 2, 4)}


# --- Planted bugs: each must change the text or be noticed at load -----------------------------------------

Patch = pytest.MonkeyPatch


def spoil(patch: Patch, change: Callable[[AttentionCall], AttentionCall]) -> None:
    honest = PagedAttention.attend
    patch.setattr(PagedAttention, "attend", lambda self, call, *tensors: honest(self, change(call), *tensors))


def no_softcap(patch: Patch) -> None:
    spoil(patch, lambda call: replace(call, softcap=None))


def no_sinks(patch: Patch) -> None:
    spoil(patch, lambda call: replace(call, sinks=None))


def no_window(patch: Patch) -> None:
    spoil(patch, lambda call: replace(call, sliding_window=None))


def window_one_too_long(patch: Patch) -> None:
    spoil(patch, lambda call: replace(call, sliding_window=call.sliding_window and call.sliding_window + 1))


def default_scaling(patch: Patch) -> None:
    honest = F.scaled_dot_product_attention
    patch.setattr(
        attention.F,
        "scaled_dot_product_attention",
        lambda *args, scale, **others: honest(*args, **others),
    )


def positions_from_zero(patch: Patch) -> None:
    honest, angles = DecoderModel._call, Rotary.angles
    patch.setattr(
        DecoderModel,
        "_call",
        lambda self, ids, positions, *others: honest(self, ids, positions - positions.min(), *others),
    )
    patch.setattr(Rotary, "angles", lambda self, positions: angles(self, positions - positions.min()))


def layers_share_a_cache(patch: Patch) -> None:
    gather, run = KVCache.gather, KVCache.run
    patch.setattr(KVCache, "gather", lambda self, layer, slots: gather(self, 0, slots))
    patch.setattr(KVCache, "run", lambda self, layer, *slots: run(self, 0, *slots))


PLANTED: list[tuple[str, Callable[[Patch], None]]] = [
    ("Gemma 2", no_softcap),
    ("Gemma 2", no_window),
    ("GPT-OSS, attention sinks", no_sinks),
    ("GPT-OSS, attention sinks", window_one_too_long),
    ("Mistral, sliding window", no_window),
    ("Mistral, sliding window", window_one_too_long),
    ("Gemma 3", no_window),
    ("Phi-3", window_one_too_long),
    ("Granite", default_scaling),
    ("GPT-2", positions_from_zero),
    ("OPT", positions_from_zero),
    ("SmolLM3", positions_from_zero),
    ("Llama", layers_share_a_cache),
]


@pytest.mark.parametrize(("family", "bug"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_the_table_notices(
    family_folder: Callable[[str], str], monkeypatch: Patch, family: str, bug: Callable[[Patch], None]
) -> None:
    path = family_folder(family)
    expected = by_generate(path)
    # A layer that has lost its window would not find the blocks that are its own.
    monkeypatch.setattr(cache_plan, "windows_of", lambda *_: None)
    core = engine(path, 0, self_check=False)
    bug(monkeypatch)
    assert run_engine(core, prompts(), GREEDY) != expected


@pytest.mark.parametrize(
    ("family", "bug"),
    [("Gemma 2", no_softcap), ("GPT-OSS, attention sinks", no_sinks), ("Granite", default_scaling)]
    + [("Llama", positions_from_zero), ("Llama", layers_share_a_cache)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_self_check_notices(
    family_folder: Callable[[str], str], monkeypatch: Patch, family: str, bug: Callable[[Patch], None]
) -> None:
    decoder = load_decoder(family_folder(family), LoadOptions())
    self_check(decoder)
    bug(monkeypatch)
    with pytest.raises(ModelLoadError, match="deviate by"):
        self_check(decoder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Gemma 2", "Qwen3-MoE", "GPT-OSS, attention sinks"])
def test_the_self_check_bears_rounding(
    family_folder: Callable[[str], str], family: str, dtype: torch.dtype
) -> None:
    self_check(load_decoder(family_folder(family), LoadOptions(dtype)))


def test_the_self_check_names_broken_weights(family_folder: Callable[[str], str]) -> None:
    decoder = load_decoder(family_folder("Llama"), LoadOptions())
    decoder.module.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ModelLoadError, match="not finite in float32"):
        self_check(decoder)


def test_a_recurrence_beside_attention_is_noticed_though_the_model_hides_it(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Every layer of Falcon-H1 has attention; only the logits tell of its state."""
    sizes = {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
    }
    path = save_random(tmp_path, "falcon_h1", {**SHAPE, "head_dim": 8, **sizes})
    module = load_causal_model(path, LoadOptions(), ATTENTION_NAME)
    monkeypatch.setattr(type(module), "_is_stateful", False)
    facts = ModelFacts(module.config, module.generation_config, 0, torch.float32, torch.device("cpu"))
    with pytest.raises(ModelLoadError, match="deviate by"):
        self_check(DecoderModel(module, facts))
