"""Has the rotary angles of every position, as transformers' module of the model computes them."""

from typing import Any

import torch
import torch.nn.functional as F

from truedraft.engine.memory.huge_pages import HugePages

# A table of angles has at most this many positions and at most this many numbers.
MAX_TABLE_POSITIONS, MAX_TABLE_NUMBERS = 1 << 17, 1 << 24
# On a CPU the table grows by this many positions at a time.
GROWTH = 512


def rotary_kinds(config: Any) -> list[str | None]:
    """Returns the types of layers that have angles of their own; [None]: all layers have the same."""
    types = sorted(set(getattr(config, "layer_types", None) or ()))
    known = getattr(config, "rope_parameters", None) or {}
    return [kind for kind in types if kind in known] or [None]


def turned_pairs(config: Any, kind: str | None, size: int) -> tuple[int, int]:
    """Returns how many pairs of ``size`` numbers the angles of a kind rotate, and the distance between the
    numbers of a pair: proportional angles leave out the last pairs of a head, which other kinds do not
    have."""
    known = getattr(config, "rope_parameters", None) or {}
    settings = known.get(kind) if kind is not None else None
    if not settings or settings.get("rope_type") != "proportional":
        return size // 2, size // 2
    return int(settings.get("partial_rotary_factor", 1.0) * size // 2), size // 2


class NoAngles(torch.nn.Module):
    """Stands in for transformers' module in models that rotate nothing: a pair of numbers, by an angle of
    0."""

    rope_type = "none"

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = x.new_zeros(*position_ids.shape, 2)
        return turned + 1, turned


class Rotary:
    """Gives cos and signed sin of every position, from the model's own rotary module, by ``rotary_kinds``.

    Angles are a function of the position alone: ``choose_rotary_factors`` leaves longrope one set of factors,
    and dynamic frequencies change beyond the context only. ``repeats``: the module gives each angle twice in
    a row, not all of them twice; ``halves``: it gives each once, as two numbers or a complex one. ``apart``:
    pairs that are not rotated are left out (``turned_pairs``), rather than rotated by an angle of 0.
    ``axis_of`` [``size``] says which of a picture's three positions each number is rotated by, where a model
    sees pictures.
    """

    def __init__(
        self,
        module: Any,
        config: Any,
        like: torch.Tensor,
        *,
        repeats: bool = False,
        halves: bool = False,
        apart: bool = False,
    ) -> None:
        self.module = module
        self.repeats = repeats
        self.halves = halves
        self.apart = apart
        self.config = config
        self.kinds = rotary_kinds(config)
        self.like = like
        self.axis_of: torch.Tensor | None = None
        # Numbers of a head that are rotated, the first ones; where kinds differ, the most.
        self.size = self.compute(torch.zeros(1, dtype=torch.int64, device=like.device))[0].shape[-1]
        self.table: tuple[torch.Tensor, torch.Tensor] | None = None
        self.num_reached = 0  # positions whose angles are in the table
        num_positions = int(config.max_position_embeddings)
        if num_positions <= MAX_TABLE_POSITIONS or num_positions * self.size <= MAX_TABLE_NUMBERS:
            self.table = self._make_table(num_positions)
        # The host handles dynamic frequencies, and must not take part in a captured graph.
        types = module.rope_type.values() if isinstance(module.rope_type, dict) else [module.rope_type]
        self.needs_host = self.table is None and any("dynamic" in each for each in types)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and signed sin [kinds, tokens, ``size``] at ``positions`` [tokens]."""
        if self.table is None:
            return self.compute(positions)
        cos, sin = self.table
        if self.num_reached < cos.shape[1]:
            self.reach(int(positions.max()) + 1)
        return cos.index_select(1, positions), sin.index_select(1, positions)

    def mixed(self, axes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the same where tokens have three positions each: ``axes`` [3, tokens]. A text's tokens have
        three equal ones, and the angles of one."""
        assert self.axis_of is not None, "the model rotates by one position"
        cos, sin = zip(*(self.angles(positions) for positions in axes), strict=True)
        axis_of = self.axis_of.expand(1, *cos[0].shape)
        return tuple(torch.stack(each).gather(0, axis_of)[0] for each in (cos, sin))

    def reach(self, num_positions: int) -> int:
        """Extends the table to this many positions, as far as it goes; returns their number."""
        if num_positions > self.num_reached:
            self._grow(num_positions)
        return self.num_reached

    def reach_all(self) -> None:
        """Makes the whole table: a captured pass cannot ask the host for missing angles."""
        if self.table is not None:
            self.reach(self.table[0].shape[1])

    def _make_table(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the whole table on a device, where graphs read it by themselves. In the host's memory it
        has a place that takes none before it is written to."""
        if self.like.device.type != "cpu":
            self.num_reached = num_positions
            return self.compute(torch.arange(num_positions, device=self.like.device))
        cos, _ = self.compute(torch.zeros(1, dtype=torch.int64))
        pages, shape = HugePages(), (len(cos), num_positions, self.size)
        return pages.zeros(*shape, dtype=cos.dtype), pages.zeros(*shape, dtype=cos.dtype)

    @torch.inference_mode()
    def _grow(self, num_positions: int) -> None:
        assert self.table is not None
        end = min(-(-num_positions // GROWTH) * GROWTH, self.table[0].shape[1])
        for first in range(self.num_reached, end, GROWTH):
            positions = torch.arange(first, min(first + GROWTH, end))
            for kept, angles in zip(self.table, self.compute(positions), strict=True):
                kept[:, first : first + len(positions)] = angles
        self.num_reached = max(end, self.num_reached)

    def compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the same as ``angles``, without the table."""
        more = [() if kind is None else (kind,) for kind in self.kinds]
        found = [self.module(self.like, positions[None], *kind) for kind in more]
        found = [(each.real, each.imag) if isinstance(each, torch.Tensor) else each for each in found]
        found = [self._turning(kind, *angles) for kind, angles in zip(self.kinds, found, strict=True)]
        size = max(cos.shape[-1] for cos, _ in found)
        padded = [[F.pad(each, (0, size - each.shape[-1])) for each in angles] for angles in found]
        cos, sin = (torch.cat(parts) for parts in zip(*padded, strict=True))
        return cos, sin

    def _turning(
        self, kind: str | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the angles of what is turned, twice over, and negative sin first."""
        if self.halves:
            cos, sin = (torch.cat((angles, angles), dim=-1) for angles in (cos, sin))
        half = sin.shape[-1] // 2
        if self.repeats:
            cos, sin = (torch.cat((angles[..., ::2], angles[..., ::2]), dim=-1) for angles in (cos, sin))
        pairs = turned_pairs(self.config, kind, 2 * half)[0] if self.apart else half
        kept = [*range(pairs), *range(half, half + pairs)] if pairs < half else slice(None)
        return cos[..., kept], torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)[..., kept]
