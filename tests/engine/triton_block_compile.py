"""Compiles products with quantised weights, and experts, for GPUs that are not here, and looks at what they
would need.

Run by ``test_blocks_on_a_device``, in a process of its own: ``python -m tests.engine.triton_block_compile``.
"""

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.engine.triton_compile import NAMES, check
from truedraft.engine.cuda import expert_kernels, launch_experts
from truedraft.engine.cuda import quantised_kernels as kernels
from truedraft.engine.cuda.blocks import COLUMNS, KINDS, SCALE, SCALE_MIN, Kind
from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.layers.weight import LARGEST_FP8, LEAST_LARGEST


def compiled(
    kernel: Any, capability: int, kind: Kind, dtype: torch.dtype, output: torch.dtype, **constants: Any
) -> Any:
    names = kernel.arg_names
    constants["KIND"] = kind.constants
    scales = "*fp16" if kind.scaling in (SCALE, SCALE_MIN) else "*u8"
    types = {"x": f"*{NAMES[dtype]}", "output": f"*{NAMES[output]}", "shares": "*fp32", "ids": "*i64"}
    types |= {"low": "*u8", "high": "*u8", "scales": scales, "supers": "*fp16"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types}
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4, "num_stages": kernels.stages_of(constants["ROWS"])},
    )


def compile_one(name: str, capability: int, dtype: torch.dtype, rows: int) -> Any:
    kind = KINDS[TYPES[name]]
    sizes = {"ROWS": rows, "BLOCKS_AT_A_TIME": kernels.BLOCKS_AT_A_TIME}
    made = compiled(kernels.multiply_share, capability, kind, dtype, dtype, **sizes)
    check(made, name, capability, dtype, rows)
    return made


def compile_rows(name: str, capability: int, output: torch.dtype, has_ids: bool) -> Any:
    kind, rows = KINDS[TYPES[name]], kernels.MIN_ROWS if has_ids else COLUMNS
    made = compiled(kernels.unpack_block, capability, kind, output, output, ROWS=rows, HAS_IDS=has_ids)
    check(made, name, capability, output, has_ids)
    return made


def compile_rounding(capability: int) -> None:
    constants = {"LARGEST": LARGEST_FP8, "LEAST": LEAST_LARGEST, "SIZE": 14336, "PADDED_SIZE": 16384}
    types = {"values": "*fp8e4nv", "scales": "*fp32", "x": "*bf16"}
    names = kernels.round_row.arg_names
    source = ASTSource(
        kernels.round_row,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    check(made, "rounding", capability)


def compile_experts(capability: int, name: str | None, dtype: torch.dtype, rows: int) -> None:
    """Compiles products with weights at addresses in a table, and what comes before and after them."""
    kind = launch_experts.DENSE if name is None else KINDS[TYPES[name]].constants
    product = {"NUM_INPUTS": 2048, "EXPERTS": 128, "PAIRS_OF_ROW": 8, "KIND": kind, "ROWS": rows}
    product["TENSORS"] = 1 if name is None else 4
    product["BLOCKS_AT_A_TIME"] = launch_experts.BLOCKS_AT_A_TIME
    options = {"num_warps": 4, "num_stages": 3}
    router = {"EXPERTS": 512, "PADDED_EXPERTS": 512, "CHOSEN": 10, "IS_SOFTMAX": True, "RENORMALISES": True}
    router |= {"GROUPS": 8, "CHOSEN_GROUPS": 4, "SUMMED": 2}
    join = {"CHOSEN": 8, "SIZE": 2048, "TILE": kernels.JOINED, "HAS_SHARED": True, "HAS_RESIDUAL": True}
    for kernel, constants in (
        (expert_kernels.multiply_tile, product),
        (expert_kernels.choose_for_token, router | {"HAS_BIAS": True, "HAS_PADDING": True}),
        (expert_kernels.find_tokens_of_expert, {"TILE": launch_experts.LOOKED_AT}),
        (expert_kernels.join_experts_of_token, join),
    ):
        types = dict.fromkeys(("x", "output", "said", "shared", "residual", "numbers"), f"*{NAMES[dtype]}")
        types |= {"addresses": "*i64", "touched": "*i64", "is_there": "*i1"} | dict.fromkeys(
            ("multiplier", "added_to_sum"), "fp32"
        )
        types |= dict.fromkeys(("pairs", "counts", "chosen"), "*i32")
        types |= dict.fromkeys(("weights", "bias"), "*fp32") | dict.fromkeys(constants, "constexpr")
        names = kernel.arg_names
        source = ASTSource(
            kernel,
            {each: types.get(each, "i32") for each in names},
            {(names.index(each),): value for each, value in constants.items()},
            {(names.index(each),): [["tt.divisibility", 16]] for each in ("x", "output") if each in names},
        )
        check(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options), name, rows)


if __name__ == "__main__":
    compile_one("Q4_K", 90, torch.bfloat16, 64)
    compile_one("Q6_K", 89, torch.bfloat16, 16)
    compile_one("Q5_0", 80, torch.float16, 32)
    compile_one("Q8_0", 120, torch.float32, 16)
    compile_one("Q2_K", 90, torch.bfloat16, 64)
    compile_one("IQ4_XS", 80, torch.bfloat16, 16)
    compile_rows("MXFP4", 89, torch.bfloat16, has_ids=True)
    compile_rows("Q6_K", 90, torch.bfloat16, has_ids=True)
    compile_rows("Q5_1", 80, torch.float32, has_ids=False)
    compile_rounding(89)
    compile_experts(90, None, torch.bfloat16, 64)
    compile_experts(80, "Q4_K", torch.float16, 16)
