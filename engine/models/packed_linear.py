"""Linear layers whose weight is packed once for oneDNN, for float32 on a CPU.

A plain product of a few rows re-packs the whole weight at every call, which costs two to three times the
one-row product and would eat what speculation gains. Packed, nine rows cost less than twice one row.
"""

import torch
from torch import nn

# Below this many weights the packed call's fixed cost (some 10 microseconds) outweighs what it saves.
MIN_PACKED_WEIGHTS = 1 << 18


class PackedLinear(nn.Module):
    """Stands in for ``nn.Linear`` without keeping the original weight."""

    weight: None = None  # T5 asks for its type

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed_weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:  # a prompt chunk that needs no logits
            return x.new_empty(*x.shape[:-1], self.out_features)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed_weight, self.bias, "none", [], "")
        return y


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    mkldnn_available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device.type == "cpu" and dtype == torch.float32 and mkldnn_available


def pack_linears(model: nn.Module) -> None:
    """Replace every large ``nn.Linear`` below ``model``, one at a time, so that memory never doubles."""
    for name, child in list(model.named_children()):
        if type(child) is nn.Linear and child.weight.numel() >= MIN_PACKED_WEIGHTS:
            setattr(model, name, PackedLinear(child))
        else:
            pack_linears(child)
