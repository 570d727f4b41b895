"""Sees the pictures of prompts: runs the vision tower of a checkpoint, which is transformers' own module,
in a thread of its own, so that no step waits for it.

Pictures come as pixels of the size that the tower is given. What it makes of one is a function of these
alone, and is kept for a while: a conversation sends its pictures again with each request.
"""

import json
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from truedraft.engine.checkpoints.checkpoint import Checkpoint
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.admission import RequestError
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.identities import DIGEST_BYTES, identity
from truedraft.engine.memory.pictures import PromptPictures
from truedraft.engine.messages import Generate, Picture, VisionFacts
from truedraft.engine.models.architecture import read_architecture
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.load_errors import stage
from truedraft.engine.models.options import LoadOptions

# One of these files says how pictures are prepared.
PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
# What the tower has made of pictures takes at most this for open requests, and for later ones.
MOST_OPEN_BYTES, MOST_KEPT_BYTES = 1 << 30, 1 << 28

logger = logging.getLogger(__name__)


class Family(NamedTuple):
    """Names transformers' class of a family's ``tower``, and the number of its vision config that is the size
    of features. If it ``alternates``, row and column turn every third pair of a head each, and else the pairs
    of sections that follow each other."""

    tower: str
    size: str
    alternates: bool


FAMILIES = {
    "qwen2_vl": Family("Qwen2VisionTransformerPretrainedModel", "hidden_size", alternates=False),
    "qwen2_5_vl": Family("Qwen2_5_VisionTransformerPretrainedModel", "out_hidden_size", alternates=False),
    "qwen3_vl": Family("Qwen3VLVisionModel", "out_hidden_size", alternates=True),
    "qwen3_5": Family("Qwen3_5VisionModel", "out_hidden_size", alternates=True),
}


class Tower:
    """Is ``Vision`` of ``admission`` for the families that Qwen's image processor serves."""

    def __init__(self, config: Any, module: Any, processor: Any, facts: VisionFacts) -> None:
        self.facts = facts
        self._module = module
        self._processor = processor
        self._merge = int(config.vision_config.spatial_merge_size)
        described = [config.vision_config.to_dict(), processor.to_dict()]
        self._described = json.dumps(described, sort_keys=True, default=str).encode()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pictures")
        # Keys are salts and digests: by how soon an answer comes, one could tell what another one has sent.
        self._kept: OrderedDict[tuple[str, bytes], torch.Tensor] = OrderedDict()
        self._num_open_bytes = 0
        self._changed = threading.Condition()

    def check(self, request: Generate) -> None:
        """Raises ``RequestError`` unless the prompt has a placeholder for each token of its pictures."""
        facts, end = self.facts, 0
        if len(request.pictures) > facts.max_images:
            raise RequestError("invalid_value", f"a prompt may have {facts.max_images} pictures (max_images)")
        for number, picture in enumerate(request.pictures):
            height, width, size = picture.height, picture.width, facts.tile
            is_sized = min(height, width) >= size and height % size == width % size == 0
            if not is_sized or len(picture.pixels) != 3 * height * width:
                raise RequestError(
                    "invalid_value",
                    f"picture {number} has no pixels of {height} x {width} in tiles of {size}",
                )
            if height * width > facts.max_pixels:
                raise RequestError("invalid_value", f"picture {number} has more pixels than the model reads")
            last = picture.first + facts.num_tokens(height, width)
            places = request.prompt_token_ids[picture.first : last]
            is_marked = len(places) == last - picture.first and set(places) == {facts.token_id}
            if picture.first < end or not is_marked:
                raise RequestError(
                    "invalid_value",
                    f"the prompt has no place of {last - picture.first} tokens for picture {number}",
                )
            end = last

    def see(self, request: Generate, *, waits: bool = True) -> "Future[PromptPictures]":
        """Begins to look at a request's pictures. If it ``waits``, it does so until open requests have ended,
        where the features of theirs take too much memory."""
        return self._thread.submit(self._see, request, waits)

    @torch.inference_mode()
    def _see(self, request: Generate, waits: bool) -> PromptPictures:
        try:
            return self._seen(request, waits)
        except Exception as error:  # a tower fails in many ways, of which none may end the worker
            raise RequestError("engine_error", f"the pictures could not be looked at: {error}") from error

    def _seen(self, request: Generate, waits: bool) -> PromptPictures:
        digests = [self._digest(picture) for picture in request.pictures]
        if waits:
            self._wait()
        features = [self._features(request, *each) for each in zip(request.pictures, digests, strict=True)]
        seen = prompt_pictures(request.prompt_token_ids, request.pictures, digests, features, self.facts.tile)
        with self._changed:
            self._num_open_bytes += seen.num_bytes
        weakref.finalize(seen, self._ended, seen.num_bytes).atexit = False
        return seen

    def _wait(self) -> None:
        with self._changed:
            while self._num_open_bytes >= MOST_OPEN_BYTES and threading.main_thread().is_alive():
                self._changed.wait(1)

    def _ended(self, num_bytes: int) -> None:
        with self._changed:
            self._num_open_bytes -= num_bytes
            self._changed.notify_all()

    def _digest(self, picture: Picture) -> bytes:
        digest = blake2b(self._described, digest_size=DIGEST_BYTES)
        digest.update(f"{picture.height} {picture.width} ".encode() + picture.pixels)
        return digest.digest()

    def forget(self) -> None:
        """Forgets what was kept for later requests."""
        self._thread.submit(self._kept.clear)

    def _features(self, request: Generate, picture: Picture, digest: bytes) -> torch.Tensor:
        """Returns the features of a picture's tokens, [tokens, 1 + layers, hidden size]."""
        key = request.cache_salt, digest
        if request.cache_prompt and key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        pixels = np.frombuffer(picture.pixels, dtype=np.uint8).reshape(picture.height, picture.width, 3)
        inputs = self._processor(
            images=[pixels], do_resize=False, input_data_format="channels_last", return_tensors="pt"
        )
        seen = self._module(
            inputs["pixel_values"].to(self._module.dtype), grid_thw=inputs["image_grid_thw"], return_dict=True
        )
        more = getattr(seen, "deepstack_features", None) or []
        features = torch.stack([seen.pooler_output, *more], dim=1)
        if request.cache_prompt:
            self._kept[key] = features
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > MOST_KEPT_BYTES:
            self._kept.popitem(last=False)
        return features


def prompt_pictures(
    token_ids: Sequence[int],
    pictures: Sequence[Picture],
    digests: Sequence[bytes],
    features: Sequence[torch.Tensor],
    tile: int,
) -> PromptPictures:
    """Describes the pictures of a prompt. The tokens of a picture all have the position after the last one
    before it, in the first dimension, plus their row in the second and their column in the third; what
    follows has the position after the largest of these."""
    places: list[npt.NDArray[np.int64]] = []
    axes: list[npt.NDArray[np.int64]] = []
    identities: list[int] = []
    index = position = 0
    for picture, digest in zip(pictures, digests, strict=True):
        text = picture.first - index
        axes.append(np.arange(position, position + text)[None].repeat(3, 0))
        identities += token_ids[index : picture.first]
        position += text
        rows, columns = picture.height // tile, picture.width // tile
        inside = np.stack(np.meshgrid([0], np.arange(rows), np.arange(columns), indexing="ij")).reshape(3, -1)
        axes.append(inside + position)
        places.append(picture.first + np.arange(rows * columns))
        identities += [identity(digest)] * (rows * columns)
        position += max(rows, columns)
        index = picture.first + rows * columns
    return PromptPictures(
        np.concatenate(places),
        torch.cat(list(features)),
        np.concatenate(axes, axis=1),
        position - index,
        identities,
    )


def load_vision(model: Model, config: EngineConfig, options: LoadOptions) -> Tower | None:
    """Loads the vision tower of the target's checkpoint; None if there is none that is known, or if the
    settings want none."""
    assert config.target is not None
    path = config.target
    if not config.max_images or not Path(path).is_dir() or options.trust_remote_code:
        return None
    architecture = read_architecture(path, options)
    if architecture.config.model_type not in FAMILIES:
        return None
    is_ranked = config.tensor_parallel_size > 1
    if not isinstance(model, FusedDecoder) or model.device.type != "cpu" or is_ranked:
        where = "on a GPU" if model.device.type != "cpu" else f"by {model.way}"
        where = "in several processes (tensor_parallel_size)" if is_ranked else where
        logger.warning("%s is served without its vision tower: its text part is run %s", path, where)
        return None
    if not any((Path(path) / name).is_file() for name in PREPROCESSORS):
        logger.warning("%s is served without its vision tower: it has no %s", path, PREPROCESSORS[0])
        return None
    if find_spec("PIL") is None:
        words = "pictures need the package pillow: pip install 'truedraft[images]'"
        logger.warning("%s is served without its vision tower: %s", path, words)
        return None
    with stage(path, "vision tower"):
        return _load(path, architecture.config, model, config, options)


def _load(path: str, config: Any, model: FusedDecoder, settings: EngineConfig, options: LoadOptions) -> Tower:
    # transformers imports this only where pillow is there.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(path)
    if not processor.do_resize:
        raise ModelLoadError(f"{path}: do_resize of its preprocessor is false, but pictures are scaled here")
    family = FAMILIES[config.model_type]
    vision, size = config.vision_config, dict(processor.size)
    given = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    needed = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    if given != needed:
        raise ModelLoadError(f"{path}: its preprocessor cuts pictures by {given}, and the tower by {needed}")
    if (written := getattr(vision, family.size)) != config.text_config.hidden_size:
        raise ModelLoadError(
            f"{path}: the tower writes {written} numbers a token, and the text part reads "
            f"{config.text_config.hidden_size}"
        )
    tile = vision.patch_size * vision.spatial_merge_size
    most = settings.max_image_tokens * tile * tile
    facts = VisionFacts(
        token_id=config.image_token_id,
        tile=tile,
        min_pixels=min(int(size["shortest_edge"]), most),
        max_pixels=min(int(size["longest_edge"]), most),
        resample=int(processor.resample),
        max_images=settings.max_images,
    )
    module = _tower(path, config, options, model.dtype)
    rotary = model.rotary
    sections = config.text_config.rope_parameters.get("mrope_section")
    rotary.axis_of = axis_of(sections, rotary.size, alternates=family.alternates).to(model.device)
    return Tower(config, module, processor, facts)


def _tower(path: str, config: Any, options: LoadOptions, dtype: torch.dtype) -> Any:
    checkpoint = Checkpoint.find(path, options.allow_pickle)
    if checkpoint is None:
        raise ModelLoadError(f"{path} has no weights of a vision tower")
    names = {name.partition("visual.")[2]: name for name in checkpoint.files if "visual." in name}
    stored = checkpoint.read(names.values())
    kind = config.model_type
    modeling: Any = import_module(f"transformers.models.{kind}.modeling_{kind}")
    module, info = getattr(modeling, FAMILIES[kind].tower).from_pretrained(
        None,
        config=config.vision_config,
        state_dict={name: stored[given] for name, given in names.items()},
        dtype=dtype,
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    if faults := [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]:
        raise ModelLoadError(
            f"{path}: the vision tower lacks tensors, or has others: {sorted(map(str, faults))[0]}"
        )
    return module.eval().requires_grad_(False)


def axis_of(sections: Sequence[int] | None, size: int, *, alternates: bool) -> torch.Tensor:
    """Returns which of three positions turns each of ``size`` numbers of a head: time, row or column of a
    picture. ``sections`` are the pairs that each turns, one after the other; if it ``alternates``, row and
    column turn every third pair as far as their sections reach, and time all others."""
    if sections is None or len(sections) != 3 or (not alternates and 2 * sum(sections) != size):
        raise ModelLoadError(f"mrope_section is {sections}, which are no three parts of {size // 2} pairs")
    pairs = torch.arange(3).repeat_interleave(torch.tensor(sections))
    if alternates:
        pairs = torch.zeros(size // 2, dtype=torch.int64)
        pairs[1 : 3 * sections[1] : 3] = 1
        pairs[2 : 3 * sections[2] : 3] = 2
    return torch.cat((pairs, pairs))
