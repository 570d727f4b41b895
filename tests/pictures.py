"""Tiny random models that see, pictures for them, and what transformers makes of both."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.server.tiny_tokenizer import write_tokenizer
from truedraft.engine.messages import Generate, Picture, SamplingParams

Pixels = npt.NDArray[np.uint8]

IMAGE, START, END = 90, 92, 93
TILE = 8
# The sizes of pictures in tiles: rows and columns.
SIZES = [(3, 5), (1, 1), (4, 2), (2, 7)]


def seeing_config(vocab_size: int = 96, marks: tuple[int, int, int] = (IMAGE, START, END)) -> Qwen3VLConfig:
    """Returns the config of a model with two deepstack layers. ``marks`` are the ids of placeholder, start
    and end."""
    return Qwen3VLConfig(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": TILE // 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 2],
            "initializer_range": 0.2,
        },
        image_token_id=marks[0],
        video_token_id=marks[0] + 1,
        vision_start_token_id=marks[1],
        vision_end_token_id=marks[2],
    )


def save_seeing(folder: Path, seed: int = 0, config: Qwen3VLConfig | None = None) -> str:
    """Saves a random model whose answers depend on what it sees."""
    torch.manual_seed(seed)
    config = config or seeing_config()
    model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if "merger" in name and name.endswith("fc2.weight"):
                parameter.mul_(3)  # what is seen is as large as embeddings
    model.save_pretrained(folder)
    processor(config).save_pretrained(folder)
    generation = Path(folder) / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": None}))
    return str(folder)


def processor(config: Any) -> Qwen2VLImageProcessorPil:
    vision = config.vision_config
    return Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        size={"shortest_edge": TILE * TILE, "longest_edge": 40 * TILE * TILE},
    )


def pixels(number: int, size: tuple[int, int]) -> Pixels:
    """Returns a random picture of ``size`` in tiles."""
    shape = size[0] * TILE, size[1] * TILE, 3
    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{% if part['type'] == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]


def save_seeing_chat(folder: Path, seed: int = 0) -> str:
    """Saves a model as ``save_seeing`` does, with a tokenizer whose tokens are bytes and a chat template."""
    write_tokenizer(folder, chat_template=CHAT_TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    start, end, image = map(tokenizer.token_to_id, MARKS)
    return save_seeing(folder, seed, seeing_config(272, (image, start, end)))


class Shown:
    """Is a prompt of texts and pictures, one after the other."""

    def __init__(self, *parts: Sequence[int] | Pixels) -> None:
        self.token_ids: list[int] = []
        self.pictures: list[Picture] = []
        self.arrays: list[Any] = []
        for part in parts:
            if not isinstance(part, np.ndarray):
                self.token_ids += part
                continue
            height, width, _ = part.shape
            self.pictures.append(Picture(len(self.token_ids) + 1, height, width, part.tobytes()))
            self.arrays.append(part)
            self.token_ids += [START, *[IMAGE] * (height * width // TILE**2), END]

    def request(self, request_id: str, params: SamplingParams, **more: Any) -> Generate:
        return Generate(request_id, self.token_ids, params, pictures=self.pictures, **more)


class Oracle:
    """Runs transformers' whole model."""

    def __init__(self, folder: str) -> None:
        self.model: Any = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def inputs(self, shown: Shown) -> dict[str, Any]:
        ids = torch.tensor([shown.token_ids])
        found: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}
        if shown.arrays:
            found |= self.processor(
                images=shown.arrays, input_data_format="channels_last", return_tensors="pt"
            )
        return found

    @torch.inference_mode()
    def logprobs(self, shown: Shown) -> torch.Tensor:
        """Returns log-probabilities at each token of the prompt."""
        logits = self.model(**self.inputs(shown), use_cache=False).logits[0]
        return torch.log_softmax(logits, -1)

    @torch.inference_mode()
    def greedy(self, shown: Shown, num_tokens: int) -> list[int]:
        inputs = self.inputs(shown)
        ids = self.model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        return ids[0, len(shown.token_ids) :].tolist()
