"""LoRA adapters in GGUF files say what the PEFT adapters say that llama.cpp's converter has made them of."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from tests.adapters import SHAPE, named, save_adapter, written
from tests.models import make_engine
from truedraft.engine.config import BUNDLED_PAIR
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.gguf import adapters as gguf_adapters
from truedraft.engine.messages import SamplingParams

# Files of the first architecture have the rows of queries and keys in pairs.
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
}
TARGETS = {
    **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    "lm_head": "lm_head",
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GREEDY = SamplingParams(max_tokens=8, temperature=0, logprobs=0)
PROMPT = [5, 17, 33, 4, 60]


def in_file(name: str) -> str:
    """Returns llama.cpp's name of a tensor of PEFT's."""
    module, kind = name.removeprefix("base_model.model.").removesuffix(".weight").split(".lora_")
    if module != "lm_head":
        _, _, layer, rest = module.split(".", 3)
        module = f"blk.{layer}.{NAMES[rest]}"
    return f"{module.replace('lm_head', 'output')}.weight.lora_{kind.lower()}"


def in_pairs(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders rows as llama.cpp's converter does for the architecture llama."""
    rows, rank = tensor.shape
    return tensor.reshape(heads, 2, rows // heads // 2, rank).swapaxes(1, 2).reshape(rows, rank)


def write(
    path: Path,
    architecture: str,
    tensors: Mapping[str, torch.Tensor],
    alpha: float = 8.0,
    kind: str = "lora",
    type_: str = "adapter",
    more: Callable[[GGUFWriter], None] = lambda writer: None,
    dtype: Any = np.float32,
) -> str:
    writer = GGUFWriter(path, architecture)
    writer.add_type(type_)
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", alpha)
    more(writer)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy().astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def converted(folder: Path, architecture: str, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        is_paired = architecture == "llama" and "lora_B" in name
        if is_paired and ("q_proj" in name or "k_proj" in name):
            is_query = "q_proj" in name
            tensor = in_pairs(tensor, config.num_attention_heads if is_query else config.num_key_value_heads)
        found[in_file(name)] = tensor
    return found


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Returns a base, an adapter in PEFT's form, and the same in a file."""
    architecture, folder = request.param, tmp_path_factory.mktemp("case")
    torch.manual_seed(3)
    base, config = str(folder / "base"), CONFIGS[architecture]
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    adapter = save_adapter(folder / "adapter", base, [*TARGETS], 1)  # its alpha is 8
    tensors = converted(Path(adapter), architecture, config)
    return base, adapter, write(folder / "adapter.gguf", architecture, tensors)


def texts(base: str, adapter: str) -> Any:
    core = make_engine(base, None, lora_modules=[f"a={adapter}"], num_speculative_tokens=0)
    return written(core, [(PROMPT, named(core)[0]), (PROMPT, None)], GREEDY)


def test_a_file_is_the_adapter_that_it_was_made_of(case: tuple[str, str, str]) -> None:
    base, folder, file = case
    adapted, plain = texts(base, file)
    assert [adapted, plain] == texts(base, folder)
    assert adapted != plain


def test_rows_in_pairs_are_seen(case: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    base, folder, file = case
    monkeypatch.setattr(gguf_adapters, "is_paired", lambda architecture, name: False)
    assert (texts(base, file) == texts(base, folder)) == ("qwen3" in Path(base, "config.json").read_text())


MODULE = "blk.0.attn_v.weight"


def pair(rank: int = 2, name: str = MODULE) -> dict[str, torch.Tensor]:
    return {f"{name}.lora_a": torch.ones(rank, 64), f"{name}.lora_b": torch.ones(32, rank)}


def scale_of(base: str, file: str) -> float:
    core = make_engine(base, None, lora_modules=[f"a={file}"], num_speculative_tokens=0)
    layers: Any = core.admission.adapters
    (parts,) = layers._layers._kept[0].values()
    return float(parts[0][1](torch.ones(1, len(parts[0][0](torch.ones(1, 64))[0])))[0, 0])


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize(("alpha", "rank", "sum_of_row"), [(8.0, 2, 8.0), (3.0, 4, 3.0), (0.0, 4, 4.0)])
def test_scales_are_those_of_llama_cpp(
    case: tuple[str, str, str], alpha: float, rank: int, sum_of_row: float, tmp_path: Path
) -> None:
    """Alpha divided by the rank; no scale where alpha is 0."""
    architecture = "qwen3" if "qwen3" in Path(case[0], "config.json").read_text() else "llama"
    file = write(tmp_path / "a.gguf", architecture, pair(rank), alpha)
    assert scale_of(case[0], file) == pytest.approx(sum_of_row)


def as_alora(writer: GGUFWriter) -> None:
    writer.add_array("adapter.alora.invocation_tokens", [1, 2])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architecture": "qwen2"}, "models of the type qwen2"),
    "no adapter": ({"type_": "model"}, "no LoRA adapter"),
    "another kind": ({"kind": "control"}, "no LoRA adapter"),
    "begins at a text": ({"more": as_alora}, "aLoRA"),
    "alpha": ({"alpha": float("nan")}, "finite number"),
    "embeddings": ({"tensors": pair(name="token_embd.weight")}, "token_embd.weight.lora_a"),
    "norms": ({"tensors": {"blk.0.attn_norm.weight": torch.ones(64)}}, "blk.0.attn_norm.weight"),
    "half of it": ({"tensors": {f"{MODULE}.lora_a": torch.ones(2, 64)}}, "lora_A of"),
    "shapes": ({"tensors": pair() | {f"{MODULE}.lora_b": torch.ones(31, 2)}}, "[31, 2]"),
    "rank": ({"tensors": pair(65)}, "above max_lora_rank"),
    "numbers": (
        {
            "tensors": {
                f"{MODULE}.lora_a": torch.ones(2, 192),
                f"{MODULE}.lora_b": torch.full((192, 2), torch.inf),
            }
        },
        "not finite",
    ),
    "nothing": ({"tensors": {}}, "no tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    given, words = REFUSED[name]
    file = write(tmp_path / "a.gguf", **{"architecture": "llama", "tensors": pair(), **given})
    with pytest.raises(ModelLoadError, match="the LoRA adapter a cannot be loaded") as error:
        make_engine(str(BUNDLED_PAIR / "target"), None, lora_modules=[f"a={file}"])
    assert words in str(error.value)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.gguf", "llama", pair()))
    whole = path.read_bytes()
    for end in (0, 3, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelLoadError):
            make_engine(str(BUNDLED_PAIR / "target"), None, lora_modules=[f"a={path}"])


def test_an_adapter_of_another_size_is_refused(case: tuple[str, str, str], tmp_path: Path) -> None:
    """Its rows may not even be pairs of rows of this model's heads."""
    architecture = "qwen3" if "qwen3" in Path(case[0], "config.json").read_text() else "llama"
    tensors = {
        "blk.0.attn_q.weight.lora_a": torch.ones(2, 64),
        "blk.0.attn_q.weight.lora_b": torch.ones(54, 2),
    }
    file = write(tmp_path / "a.gguf", architecture, tensors)
    with pytest.raises(ModelLoadError, match=r"\[54, 2\], where this model"):
        make_engine(case[0], None, lora_modules=[f"a={file}"])


def test_a_file_in_parts_is_refused(tmp_path: Path) -> None:
    """Its digest would be that of one part."""
    for number in (1, 2):
        name = "v" if number == 1 else "k"
        write(tmp_path / f"a-{number:05d}-of-00002.gguf", "llama", pair(name=f"blk.0.attn_{name}.weight"))
    with pytest.raises(ModelLoadError, match="file in parts"):
        make_engine(
            str(BUNDLED_PAIR / "target"), None, lora_modules=[f"a={tmp_path / 'a-00001-of-00002.gguf'}"]
        )
