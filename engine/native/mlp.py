"""Describes MLPs to C (``mlp.c``): structures are made of the parts that Python runs through, and checked
once.
"""

from ctypes import Structure, addressof

import torch

from truedraft.engine.layers.linear import Linear
from truedraft.engine.layers.mlp import (
    ACTIVATIONS,
    SCORINGS,
    UNGATED,
    DenseAndExperts,
    Experts,
    GatedMlp,
)
from truedraft.engine.memory.pointers import PointerError, address
from truedraft.engine.native import library as in_c
from truedraft.engine.native.linear import NativeLinear


def native(linear: Linear) -> NativeLinear:
    if not isinstance(linear, NativeLinear):
        raise PointerError(f"C has no layers like {linear}")
    return linear


def linear_at(name: str, linear: Linear, in_features: int, out_features: int) -> int:
    """Returns the address of a layer, whose numbers of inputs and outputs must be these."""
    found = native(linear)
    if (found.in_features, found.out_features) != (in_features, out_features):
        raise PointerError(
            f"{name} is a layer of {found.in_features} inputs and {found.out_features} outputs, "
            f"not of {in_features} and {out_features}"
        )
    return addressof(found.struct)


def gated_mlp(mlp: GatedMlp, hidden_size: int) -> in_c.GatedMlp:
    size, each = native(mlp.down).in_features, 1 if mlp.activation in UNGATED else 2
    return in_c.GatedMlp(
        gate_up=linear_at("gate_up", mlp.gate_up, hidden_size, each * size),
        down=linear_at("down", mlp.down, size, hidden_size),
        activation=ACTIVATIONS.index(mlp.activation),
        scales=None if mlp.scales is None else address(mlp.scales, torch.float32, (each * size,)),
    )


class NativeExperts:
    """Keeps the objects to which ``struct`` points."""

    def __init__(self, mlp: Experts) -> None:
        router, number = mlp.router, mlp.router.num_experts
        self.hidden_size = hidden_size = native(router.linear).in_features
        sizes = {native(expert.down).in_features for expert in mlp.experts}
        if len(mlp.experts) != number or len(sizes) != 1 or not 0 < router.num_chosen <= number:
            raise PointerError(
                f"C cannot choose {router.num_chosen} of {len(mlp.experts)} experts of the sizes {sizes}"
            )
        if (groups := router.groups) is not None and not (
            0 < groups.number <= number
            and number % groups.number == 0
            and 0 < groups.num_summed <= min(2, number // groups.number)
            and number // groups.number * groups.num_chosen >= router.num_chosen
        ):
            raise PointerError(f"C cannot choose {router.num_chosen} of {number} experts in {groups}")
        self.description = mlp
        self.experts = (in_c.GatedMlp * number)(*(gated_mlp(expert, hidden_size) for expert in mlp.experts))
        self.shared = None if mlp.shared is None else gated_mlp(mlp.shared, hidden_size)
        bias, scales, gate = router.choice_bias, router.expert_scales, mlp.shared_gate
        self.struct = in_c.Experts(
            router=linear_at("router", router.linear, hidden_size, number),
            experts=addressof(self.experts),
            shared=None if self.shared is None else addressof(self.shared),
            shared_gate=None if gate is None else linear_at("shared_gate", gate, hidden_size, 1),
            choice_bias=None if bias is None else address(bias, torch.float32, (number,)),
            expert_scales=None if scales is None else address(scales, torch.float32, (number,)),
            num_experts=number,
            num_chosen=router.num_chosen,
            scoring=SCORINGS.index(router.scoring),
            renormalises=router.renormalises,
            added_to_sum=router.added_to_sum,
            multiplier=router.multiplier,
            num_groups=0 if groups is None else groups.number,
            num_chosen_groups=0 if groups is None else groups.num_chosen,
            num_summed=0 if groups is None else groups.num_summed,
            touched=address(mlp.touched.counts, torch.int64, (2,)),
        )


def mlp_structure(mlp: GatedMlp | Experts | DenseAndExperts, hidden_size: int) -> tuple[Structure, object]:
    """Returns an MLP of this hidden size as a structure of C, and the objects that must be kept as long as
    that."""
    match mlp:
        case GatedMlp():
            return gated_mlp(mlp, hidden_size), mlp
        case Experts():
            experts = NativeExperts(mlp)
            if experts.hidden_size != hidden_size:
                raise PointerError(f"experts take {experts.hidden_size} numbers, not {hidden_size}")
            return experts.struct, experts
        case DenseAndExperts():
            dense, kept = gated_mlp(mlp.dense, hidden_size), mlp_structure(mlp.experts, hidden_size)
            if len({norm.eps for norm in mlp.norms.values()}) > 1:
                raise PointerError("C has one eps for the norms of a dense MLP and of experts")
            norms = {
                name: address(norm.weight, torch.float32, (hidden_size,)) for name, norm in mlp.norms.items()
            }
            eps = mlp.dense_norm.eps
            struct = in_c.DenseAndExperts(
                dense=addressof(dense), experts=addressof(kept[0]), **norms, norm_eps=eps
            )
            return struct, (dense, kept, mlp)
