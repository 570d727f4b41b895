"""Has the linear layer of which a rank computes some outputs."""

import numpy as np
import numpy.typing as npt
import torch

from truedraft.engine.layers.linear import Linear
from truedraft.engine.parallel.group import Group

Numbers = npt.NDArray[np.int64]


class SplitLinear:
    """Computes a rank's outputs of a linear layer, whose numbers are ``rows``, with ``own``; the output has
    all. If the rank has only its share of the inputs, there are ``in_features`` of them, which are gathered
    first; ``order`` has their places among those that are gathered, where these are in another order."""

    def __init__(
        self,
        group: Group,
        own: Linear,
        rows: Numbers,
        out_features: int,
        in_features: int | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        self.group = group
        self.own = own
        self.rows = torch.from_numpy(rows)
        self.out_features = out_features
        self.in_features = in_features
        self.order = order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._whole(self.own(self._inputs(x)))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        share = residual.index_select(1, self.rows.to(residual.device))
        return self._whole(self.own.add_to(share, self._inputs(x)))

    def _inputs(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_features is None:
            return x
        gathered = self.group.gather(x)
        if self.order is not None:
            return gathered.index_select(1, self.order.to(x.device))
        return gathered[:, : self.in_features]

    def _whole(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.group.gather(outputs)[:, : self.out_features].contiguous()


def own_linear(linear: Linear) -> Linear:
    """Returns the layer that this rank computes itself."""
    return linear.own if isinstance(linear, SplitLinear) else linear
