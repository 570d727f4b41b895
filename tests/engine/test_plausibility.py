"""Quantised weights that are misread are worse than chance; trained models and random ones are not."""

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.test_packed_table import in_words
from tests.families import FAMILIES, SHAPE
from truedraft.engine.build import load_models
from truedraft.engine.checkpoints import packed
from truedraft.engine.config import EngineConfig
from truedraft.engine.models import plausibility
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.plausibility import MARGIN, MAX_TOKENS, mean_surprise, warn_if_misread

TARGET = Path(__file__).parents[2] / "engine" / "demo_pair" / "target"
GROUP, VOCAB_SIZE = 32, 2048
WORSE = "worse than chance"


def quantised(folder: Path, said: dict[str, Any], stored_less: int) -> str:
    """Quantises the bundled target by GPTQ, with zero points of their own, from which ``stored_less`` is
    taken off where they are stored."""
    shutil.copytree(TARGET, folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weights = tensors.pop(name).float().numpy()
        base, (rows, inputs) = name.removesuffix(".weight"), weights.shape
        grouped = weights.reshape(rows, -1, GROUP)
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scales = np.maximum((high - low) / 15, 1e-4).astype(np.float16)
        zeros = np.clip(np.round(-low / scales), 1, 15).astype(np.int64)
        codes = np.clip(np.round(grouped / scales[:, :, None]) + zeros[:, :, None], 0, 15)
        tensors |= {
            f"{base}.qweight": in_words(codes.astype(np.int64).reshape(rows, inputs), 4).T.contiguous(),
            f"{base}.qzeros": in_words((zeros - stored_less).T, 4).contiguous(),
            f"{base}.scales": torch.from_numpy(scales).T.contiguous(),
        }
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False} | said
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": gptq}))
    return str(folder)


@pytest.mark.parametrize("is_misread", [False, True])
def test_a_format_that_no_other_statement_denies_is_warned_of(
    is_misread: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Zero points are stored as they are, where the first format takes one off; they vary, so that no other
    statement of the file tells."""
    path = quantised(tmp_path, {"checkpoint_format": "gptq"}, stored_less=0 if is_misread else 1)
    with caplog.at_level(logging.WARNING):
        load_models(EngineConfig(target=path, device="cpu"), lambda stage: None)
    assert (WORSE in caplog.text) == is_misread
    if is_misread:
        assert f"{path}, quantised by gptq, predicts" in caplog.text


def test_a_draft_is_looked_at_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = quantised(tmp_path, {"checkpoint_format": "gptq"}, stored_less=0)
    config = EngineConfig(target=str(TARGET), draft=path, device="cpu")
    load_models(config, lambda stage: None)
    assert f"{path}, quantised by gptq" in caplog.text


def test_a_reader_that_takes_codes_in_another_order_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = quantised(tmp_path, {}, stored_less=1)
    unpacked = packed._unpacked
    monkeypatch.setattr(
        packed, "_unpacked", lambda words, bits, order=None: unpacked(words, bits, (1, 0, 3, 2, 5, 4, 7, 6))
    )
    warn_if_misread(load_model(path, LoadOptions()), path)
    assert WORSE in caplog.text


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", ["target", "draft"])
def test_trained_models_are_far_below_chance(name: str, quantize: str) -> None:
    model = load_model(str(TARGET.parent / name), LoadOptions(quantize=quantize))
    ids = plausibility.load_pretrained_tokenizer(str(TARGET))(plausibility.PLAIN_TEXT)["input_ids"]
    assert mean_surprise(model, ids[:MAX_TOKENS]) < 0.7 * math.log(VOCAB_SIZE)


def test_no_random_model_of_the_zoo_is_taken_for_a_misread_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Untrained weights of the usual size are what chance is; every family is made of such once."""
    monkeypatch.setattr(plausibility, "quantised_by", lambda path: "nothing")
    surprises = []
    for number, (name, (kind, fields)) in enumerate(FAMILIES.items()):
        folder = tmp_path / str(number)
        torch.manual_seed(number)
        shape = {} if kind in ("gpt2", "gpt_bigcode") else SHAPE
        fields = {**shape, **fields, "vocab_size": VOCAB_SIZE, "initializer_range": 0.02}
        if "vocab_size_per_layer_input" in fields:
            fields["vocab_size_per_layer_input"] = VOCAB_SIZE
        config = AutoConfig.for_model(kind, **fields)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TARGET / file, folder)
        model = load_model(str(folder), LoadOptions(self_check=False))
        ids = plausibility.load_pretrained_tokenizer(str(folder))(plausibility.PLAIN_TEXT)["input_ids"]
        surprises.append((mean_surprise(model, ids[:MAX_TOKENS]) - math.log(VOCAB_SIZE), name))
        warn_if_misread(model, str(folder))
    assert WORSE not in caplog.text
    assert max(surprises)[0] < 0.7 * MARGIN
