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

    def num_blocks(self, budget: int, block_bytes: int, num_sequences: int, longest: int) -> int:
        """Returns how many blocks these layers have, 0 for the same as the others, where a block takes
        ``block_bytes`` in these and no text has more than ``longest``.

        They are enough for ``num_sequences`` texts, a step, and beginnings that other texts may share, but
        take no more than half of the ``budget`` where the other layers need memory, too.
        """
        alike = min(budget // (block_bytes + self.block_bytes), num_sequences * longest)
        if alike <= self.fewest or longest <= self.held:
            return 0  # no text that fits would give a block back
        wanted = self.fewest + (num_sequences - 1) * self.held + alike // KEPT_PART
        room = budget // self.block_bytes // (2 if block_bytes else 1)
        return min(wanted, max(room, self.fewest), alike - 1)  # one more is nobody's


def windows_of(model: Model, config: EngineConfig) -> Windows | None:
    """Returns those of a model whose layers with a window may have blocks of their own; None if it has no
    such layers, or they keep all blocks as the others do: on other devices than a CPU, with an encoder, and
    where gateways are told of blocks with which any text can begin (``kv_events_endpoint``)."""
    layers = [
        cache for cache in model.caches if isinstance(cache, AttentionCache) and cache.window is not None
    ]
    is_here = all(cache.device.type == "cpu" for cache in model.caches)
    if not layers or not is_here or model.has_encoder or config.kv_events_endpoint is not None:
        return None
    return Windows(
        width=max(cache.window or 0 for cache in layers),
        block_bytes=config.block_size * sum(cache.bytes_per_token for cache in layers),
        block_size=config.block_size,
        num_step_tokens=config.max_num_batched_tokens,
    )


def plan_caches(
    config: EngineConfig, models: Sequence[Model], max_model_len: int, graphs: Captured | None
) -> CachePlan:
    """Returns the number of blocks that the memory for caches holds, but no more than could ever be used. The
    first of ``models`` is the target."""
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
    own: WindowBlocks | None = None
    if (windows := windows_of(models[0], config)) is not None:
        others = bytes_per_block - windows.block_bytes
        if num_own := windows.num_blocks(budget, others, num_sequences, longest):
            own = WindowBlocks(num_own, config.block_size, windows.width, windows.num_step_tokens)
            # One more belongs to nobody.
            budget, bytes_per_block = budget - (num_own + 1) * windows.block_bytes, others
    num_blocks, num_state_slots = cache_sizes(
        budget,
        bytes_per_block,
        state_bytes,
        config.block_size,
        num_sequences,
        longest * num_sequences,
    )
    if num_blocks < 1:
        states = f" and the states of one sequence ({state_bytes} bytes)" if state_bytes else ""
        raise ModelLoadError(
            f"{ByteSize(budget).human_readable()} for the caches (cache_memory) do not hold one block of "
            f"{config.block_size} tokens ({bytes_per_block} bytes){states}"
        )
    return CachePlan(num_blocks, num_state_slots, [own, *[None] * (len(models) - 1)])
