"""GGUF files in parts, and names in any case: the same model as the whole file, or a sentence."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from transformers import Qwen3Config

from tests.gguf_models import save_gguf
from truedraft.engine.formats.gguf_file import GgufError, GgufFile, read_gguf
from truedraft.engine.models.load import load_model
from truedraft.engine.models.options import LoadOptions

CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
)
COUNT = 3


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.gguf"
    save_gguf(path, CONFIG, "F32", embedding_kind="F32")
    return path


def split(whole: Path, stem: str, suffix: str = ".gguf", **said: int) -> list[Path]:
    """Writes parts like gguf-split's: metadata in the first part, tensors in all of them."""
    reader = GGUFReader(whole)
    paths = []
    for number in range(COUNT):
        paths.append(whole.with_name(f"{stem}-{number + 1:05d}-of-{COUNT:05d}{suffix}"))
        writer = GGUFWriter(paths[-1], "qwen3")
        if number == 0:
            _copy_metadata(reader, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", said.get("count", COUNT))
        writer.add_int32("split.tensors.count", said.get("tensors", len(reader.tensors)))
        for index, tensor in enumerate(reader.tensors):
            if index % COUNT in (number, said.get("also", number)):
                writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter) -> None:
    for name, field in reader.fields.items():
        if name.startswith("qwen3."):
            value: Any = field.contents()
            writer.add_key_value(name, value, field.types[0])


def tensors(file: GgufFile) -> dict[str, bytes]:
    return {
        name: bytes(place.data[place.offset : place.offset + 4 * int(np.prod(place.shape))])
        for name, place in file.tensors.items()
    }


@pytest.mark.parametrize("number", range(COUNT))
def test_any_part_stands_for_all(whole: Path, number: int) -> None:
    paths = split(whole, "model")
    found = read_gguf(str(paths[number]))
    assert tensors(found) == tensors(read_gguf(str(whole)))
    model = load_model(str(paths[number]), LoadOptions())
    assert model.num_parameters == load_model(str(whole), LoadOptions()).num_parameters


def test_suffixes_in_any_case(whole: Path) -> None:
    upper = whole.rename(whole.with_name("MODEL.GGUF"))
    load_model(str(upper), LoadOptions())
    load_model(str(split(upper, "PARTS", ".GGUF")[0]), LoadOptions())


def refusal(path: Path) -> str:
    with pytest.raises(GgufError) as caught:
        read_gguf(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_parts_that_are_missing_or_of_something_else(whole: Path) -> None:
    paths = split(whole, "model")
    paths[1].rename(whole.with_name("away"))
    assert re.search(r"model-00002-of-00003.gguf cannot be read", refusal(paths[0]))
    assert "two of its parts have a tensor" in refusal(split(whole, "other", also=2)[0])
    assert "split.count is 4, but 3 are found" in refusal(split(whole, "other", count=4)[0])
    assert re.search(r"split.tensors.count is 7, but \d+ are", refusal(split(whole, "other", tensors=7)[0]))
    paths = split(whole, "model")
    aside = paths[2].rename(whole.with_name("aside"))
    paths[1].rename(paths[2])
    aside.rename(paths[1])
    assert "model-00002-of-00003.gguf is not part 2 of its model: its split.no is 2" in refusal(paths[0])
    paths = split(whole, "model")
    paths[0].write_bytes(paths[1].read_bytes())
    assert "model-00001-of-00003.gguf is not part 1 of its model: its split.no is 1" in refusal(paths[2])
    paths = split(whole, "model")
    paths[1].write_bytes(split(whole, "other", tensors=7)[1].read_bytes())
    assert "are not parts of one model: their split.tensors.count differs" in refusal(paths[0])
    alone = paths[0].rename(whole.with_name("alone.gguf"))
    assert "its split.count is 3, but 1 are found" in refusal(alone)
    assert "is named as part 4 of 3" in refusal(whole.with_name("model-00004-of-00003.gguf"))
