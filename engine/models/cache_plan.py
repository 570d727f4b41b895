"""Decides how many blocks the caches have, and how many of their own layers with a sliding window have.

A token looks at a window's last tokens alone, so a long text needs few blocks there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pydantic import ByteSize

from truedraft.engine.config import EngineConfig
from truedraft.engine.core.window_blocks import WindowBlocks, blocks_held
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.memory.cache_memory import cache_budget, cache_sizes
from truedraft.engine.memory.kv_cache import AttentionCache
from truedraft.engine.models.base import Model
from truedraft.engine.models.working_memory import prompt_bytes

# Windows of beginnings that other texts may share take as many blocks as this part of the other layers has.
KEPT_PART = 16


class Captured(Protocol):
    """Says what graphs take: bytes, and the logits of a step."""

    @property
    def memory(self) -> int: ...

    @property
    def num_scored(self) -> int: ...


class CachePlan(NamedTuple):
    """Says how many blocks each pool has, and how many slots for states where a model has some. ``windows``
    has for each model the blocks of its layers with a window; None where these have the same as the
    others."""

    num_blocks: int
    num_state_slots: int
    windows: Sequence[WindowBlocks | None]


@dataclass(frozen=True, slots=True)
class Windows:
    """Describes the layers with a window of one model. ``width`` is the widest window, ``block_bytes`` what a
    block takes in all of these layers. A step computes at most ``num_step_tokens``."""

    width: int
    block_bytes: int
    block_size: int
    num_step_tokens: int

    @property
    def held(self) -> int:
        """Returns the number of blocks that a text has at most."""
        return blocks_held(self.width, self.block_size)

    @property
    def fewest(self) -> int:
        """Returns the number of blocks that one text and a step need."""
        return self.held + -(-self.num_step_tokens // self.block_size)

    def num_blocks(self, alike: int, room: int, num_sequences: int) -> int:
        """Returns how many blocks these layers have, if all layers could have ``alike`` many.

        They are enough for ``num_sequences`` texts, a step, and beginnings that other texts may share, but no
        more than there is ``room`` for. One more is nobody's.
        """
        wanted = self.fewest + (num_sequences - 1) * self.held + alike // KEPT_PART
        return min(wanted, max(room, self.fewest), alike - 1)


def windows_of(model: Model, config: EngineConfig, is_target: bool = True) -> Windows | None:
    """Returns those of a model whose layers with a window may have blocks of their own; None if it has no
    such layers, or they keep all blocks as the others do: on other devices than a CPU, in several ranks, with
    an encoder, and where gateways are told of blocks with which any text can begin
    (``kv_events_endpoint``)."""
    layers = [
        cache for cache in model.caches if isinstance(cache, AttentionCache) and cache.window is not None
    ]
    is_here = all(cache.device.type == "cpu" for cache in model.caches) and config.tensor_parallel_size == 1
    if not layers or not is_here or model.has_encoder or config.kv_events_endpoint is not None:
        return None
    return Windows(
        width=max(cache.window or 0 for cache in layers),
        block_bytes=config.block_size * sum(cache.bytes_per_token for cache in layers),
        block_size=config.block_size,
        # A draft model computes prompts, and what it has missed of other texts.
        num_step_tokens=config.max_num_batched_tokens * (1 if is_target else 2),
    )


def plan_caches(
    config: EngineConfig,
    models: Sequence[Model],
    max_model_len: int,
    graphs: Captured | None,
    num_windowed: int = 1,
) -> CachePlan:
    """Returns the number of blocks that the memory for caches holds, but no more than could ever be used. The
    first of ``models`` is the target; the first ``num_windowed`` may have own blocks for windows."""
    bytes_per_block = config.block_size * sum(model.cache_bytes_per_token for model in models)
    state_bytes = sum(model.state_bytes_per_sequence for model in models)
    devices = {cache.device for model in models for cache in model.caches}
    num_sequences = config.num_sequences_on(models[0].device.type)
    num_logits = 0 if graphs is None else graphs.num_scored + num_sequences
    reserved = prompt_bytes(models, config.max_num_batched_tokens, num_logits)
    budget = cache_budget(config, devices, reserved + (0 if graphs is None else graphs.memory))
    if graphs is not None:
        budget -= bytes_per_block
    longest = -(-max_model_len // config.block_size)
    most = longest * num_sequences
    alike = min(budget // bytes_per_block, most) if bytes_per_block else most
    found = [windows_of(model, config, model is models[0]) for model in models[:num_windowed]]
    # Otherwise no text that fits would give a block back.
    found = [each if each and each.fewest < alike and each.held < longest else None for each in found]
    of_windows = sum(each.block_bytes for each in found if each is not None)
    bytes_per_block -= of_windows
    # Other layers need memory, too.
    room = budget // of_windows // (2 if bytes_per_block else 1) if of_windows else 0
    own: list[WindowBlocks | None] = [None] * len(models)
    for place, each in enumerate(found):
        if each is not None:
            number = each.num_blocks(alike, room, num_sequences)
            own[place] = WindowBlocks(number, config.block_size, each.width, each.num_step_tokens)
            budget -= (number + 1) * each.block_bytes
    num_blocks, num_state_slots = cache_sizes(
        budget,
        bytes_per_block,
        state_bytes,
        config.block_size,
        num_sequences,
        most,
    )
    if num_blocks < 1:
        states = f" and the states of one sequence ({state_bytes} bytes)" if state_bytes else ""
        raise ModelLoadError(
            f"{ByteSize(budget).human_readable()} for the caches (cache_memory) do not hold one block of "
            f"{config.block_size} tokens ({bytes_per_block} bytes){states}"
        )
    return CachePlan(num_blocks, num_state_slots, own)
