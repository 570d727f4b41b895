"""Makes a head's input states in C (``fusion.c``) from states of its target's layers."""

import ctypes
from collections.abc import Sequence
from ctypes import byref

import torch

from truedraft.engine.layers.linear import Linear
from truedraft.engine.layers.norm import Norm
from truedraft.engine.memory.pointers import PointerError, address, new
from truedraft.engine.native.library import Fusion
from truedraft.engine.native.mlp import linear_at, native

FLOAT = torch.float32


class NativeFusion:
    """Norms the taps of a token together (``joint_norm``), then each by itself, and combines them. Without
    ``combine`` the only tap is the state."""

    def __init__(
        self,
        library: ctypes.CDLL,
        num_taps: int,
        tap_size: int,
        combine: Linear | None,
        tap_norms: Sequence[Norm],
        joint_norm: Norm | None,
    ) -> None:
        self.library = library
        self.num_taps, self.tap_size = num_taps, tap_size
        width = num_taps * tap_size
        if combine is None and num_taps != 1:
            raise PointerError(f"{num_taps} taps are no state without a layer that combines them")
        self.size = tap_size if combine is None else native(combine).out_features
        if tap_norms and (len(tap_norms) != num_taps or len({norm.eps for norm in tap_norms}) != 1):
            raise PointerError(f"{len(tap_norms)} norms are not alike, or not those of {num_taps} taps")
        stacked = torch.stack([norm.weight for norm in tap_norms]) if tap_norms else None
        self._kept = combine, joint_norm, stacked
        self.struct = Fusion(
            num_taps=num_taps,
            tap_size=tap_size,
            size=self.size,
            joint_norm=None if joint_norm is None else address(joint_norm.weight, FLOAT, (width,)),
            joint_norm_eps=0.0 if joint_norm is None else joint_norm.eps,
            tap_norms=None if stacked is None else address(stacked, FLOAT, (num_taps, tap_size)),
            tap_norm_eps=tap_norms[0].eps if tap_norms else 0.0,
            combine=None if combine is None else linear_at("combine", combine, width, self.size),
        )

    def __call__(self, tapped: torch.Tensor) -> torch.Tensor:
        """Makes states [tokens, size] of ``tapped`` [tokens, taps, tap size]."""
        tapped = tapped.contiguous()
        states, place = new((len(tapped), self.size), FLOAT)
        given = address(tapped, FLOAT, (len(tapped), self.num_taps, self.tap_size))
        if not self.library.fuse(byref(self.struct), place, given, len(tapped)):
            raise MemoryError("no memory for the states of a head")
        return states
