"""Compiles the kernels for GPUs that are not here, and looks at what they would need.

Run by ``test_triton_attention``, in a process of its own: ``python -m tests.engine.triton_compile``.
"""

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from truedraft.engine.cuda import (
    kernels,
    latent_kernels,
    launch_recurrent,
    pointwise_kernels,
    recurrent_kernels,
    sampling_kernels,
)
from truedraft.engine.memory.recurrent_state import CHUNK, NUM_RECORDS

# The least that a program may have on any of them, of which some driver's share is taken off.
SHARED_MEMORY = 96 << 10
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
POINTERS = {"tables": "*i64", "first_tokens": "*i64", "counts": "*i64", "positions": "*i64", "slots": "*i64"}
TENSORS = (
    "query",
    "keys",
    "values",
    "query_key",
    "value",
    "cos",
    "sin",
    "gate_up",
    "x",
    "weight",
    "residual",
)
FLOATS = {"log_sums": "*fp32", "shares": "*fp32"}
SCALARS = {"scale": "fp32", "eps": "fp32"}


def compiled(
    kernel: Any, capability: int, dtype: torch.dtype, constants: dict[str, Any], output: str, **others: int
) -> Any:
    names = kernel.arg_names
    tensors = dict.fromkeys(TENSORS, f"*{NAMES[dtype]}") | {"output": output}
    types = POINTERS | FLOATS | SCALARS | tensors | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in tensors or n in FLOATS}
    source = ASTSource(
        kernel,
        {name: types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    options = {"num_warps": 4, "num_stages": kernels.NUM_STAGES, "enable_fp_fusion": True} | others
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_latents(capability: int, dtype: torch.dtype, heads: int, places: int, is_split: bool) -> None:
    """Compiles what the largest latent vectors need."""
    tile = kernels.latent_tile_size(places, dtype)
    sizes = {"TURNED": 64, "PADDED_TURNED": 64, "LATENT": 512, "PADDED_LATENT": 512}
    constants = {"HEADS": heads, "QUERY_STRIDE": (heads + 1) * 576, "IS_SPLIT": is_split}
    constants |= {**sizes, "TILE": tile, "KEY_TILE": kernels.LATENT_KEY_TILE}
    made = compiled(
        latent_kernels.attend_share_of_latents,
        capability,
        dtype,
        constants,
        "*fp32" if is_split else f"*{NAMES[dtype]}",
        num_warps=tile // kernels.LATENT_ROWS_OF_WARP,
        num_stages=kernels.latent_stages(dtype),
    )
    check(made, capability, dtype, heads, places)


def compile_join(capability: int, dtype: torch.dtype, size: int) -> None:
    padded = max(16, triton.next_power_of_2(size))
    constants = {"HEADS": 8, "SIZE": size, "PADDED_SIZE": padded, "MOST_SPLITS": kernels.MAX_SPLITS}
    kernel = compiled(kernels.join_shares, capability, dtype, constants, f"*{NAMES[dtype]}")
    check(kernel, capability, dtype, size)


def compile_small(capability: int, dtype: torch.dtype, size: int) -> None:
    constants = {"HEADS": 8, "KV_HEADS": 2, "SIZE": size, "PADDED_SIZE": triton.next_power_of_2(size)}
    constants |= {"ROTATED": size, "QUERY_STRIDE": 12 * size, "VALUE_STRIDE": 12 * size}
    own = f"*{NAMES[dtype]}"
    check(
        compiled(pointwise_kernels.rotate_and_store_head, capability, dtype, constants, own),
        capability,
        dtype,
        size,
    )
    gate = {"SIZE": 11 * size, "TILE": pointwise_kernels.GATE_TILE}
    check(compiled(pointwise_kernels.gated_silu_part, capability, dtype, gate, own), capability, dtype, size)
    norm = {"X_STRIDE": 33 * size, "HEADS": 1, "SIZE": 33 * size, "HAS_RESIDUAL": True}
    norm["PADDED_SIZE"] = triton.next_power_of_2(33 * size)
    check(compiled(pointwise_kernels.rms_norm_row, capability, dtype, norm, own), capability, dtype, size)


def compile_sampling(capability: int, vocab_size: int) -> None:
    """Nothing may be fused: a product would keep digits that torch's operations round off."""
    sizes = {"VOCAB": vocab_size, "WIDTH": 29, "TILE": sampling_kernels.TILE}
    for kernel, more in (
        (sampling_kernels.draw_row, {"NUM_LOGITS": vocab_size}),
        (sampling_kernels.judge_position, {}),
        (sampling_kernels.judge_row, {"VERDICT_WIDTH": 19}),
    ):
        given = sizes | more
        floats = ("logits", "probs", "draft_probs", "kept")
        types = {name: "*fp32" if name in floats else "*i64" for name in kernel.arg_names}
        types |= {name: "i32" for name in ("queries", "most_drawn") if name in types}
        types |= dict.fromkeys(given, "constexpr")
        constants = {(kernel.arg_names.index(name),): value for name, value in given.items()}
        options = {"num_warps": sampling_kernels.NUM_WARPS, "enable_fp_fusion": False}
        source = ASTSource(kernel, types, constants)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        check(made, capability, kernel)
        assert not {"fma.rn.f32", "div.full.f32"} & {*made.asm["ptx"].split()}


def compile_recurrence(capability: int, dtype: torch.dtype, size: int, columns: int) -> None:
    """Compiles what the delta rule needs; the others need less."""
    heads, keys, values = 4, 2 * size, 4 * columns
    x = {"X_SIZE": 2 * keys + 2 * values + 2 * heads, "GATED": False, "TOKENS": launch_recurrent.TOKENS}
    x |= {"FIRST": 0, "NUM_CHANNELS": 2 * keys + values, "NUM_INPUTS": 51, "TILE": launch_recurrent.CHANNELS}
    state = {"HEADS": heads, "KEY_HEADS": 2, "SIZE": size, "PADDED_SIZE": max(16, size), "COLUMNS": columns}
    log = {"KEY_STRIDE": 2 * keys + values, "NUM_RECORDS": NUM_RECORDS}
    tiles = {"TILE": min(launch_recurrent.MAX_COLUMNS, columns), "CHUNK": CHUNK}
    prepared = {"X_SIZE": x["X_SIZE"], "MIXED_SIZE": 2 * keys + values, "HEADS": heads, "SIZE": size}
    z = {"X_SIZE": x["X_SIZE"], "Z_FIRST": 2 * keys + values, "VALUE_STRIDE": 2 * keys + values}
    z |= {"SKIP_SIZE": columns, "SIZE": columns, "PADDED_SIZE": columns}
    own = f"*{NAMES[dtype]}"
    for name, constants, output in (
        ("convolve_tokens", x | {"WIDTH": 4, "HAS_BIAS": True, "SILU": True}, "*fp32"),
        ("keep_inputs", x, "*fp32"),
        ("prepare_delta", prepared | {"PADDED_HEADS": 4, "KEY_HEADS": 2, "PADDED_SIZE": size}, "*fp32"),
        ("prepare_mamba", prepared | {"PADDED_SIZE": size}, "*fp32"),
        ("recur_head", state | log | tiles | {"VALUE_STRIDE": 9, "TILED": False, "IS_DELTA": True}, "*fp32"),
        ("recur_head", state | log | tiles | {"VALUE_STRIDE": 9, "TILED": True, "IS_DELTA": False}, "*fp32"),
        (
            "keep_records",
            log | {"NUM_KEYS": keys, "NUM_VALUES": values, "HEADS": heads, "TILE": 1024},
            "*fp32",
        ),
        ("finish_heads", z | {"HAS_SKIP": False, "HAS_NORM": True}, own),
        ("finish_heads", z | {"HAS_SKIP": True, "HAS_NORM": True}, own),
    ):
        kernel = getattr(recurrent_kernels, name)
        types = dict.fromkeys(kernel.arg_names, "*fp32") | {"x": own, "output": output, "eps": "fp32"}
        types |= {"decays": "*fp64", "factors": "*fp64"}
        types |= dict.fromkeys(("query_scale", "smallest", "largest"), "fp32")
        types |= dict.fromkeys(recurrent_kernels._ROWS, "*i64") | dict.fromkeys(constants, "constexpr")
        source = ASTSource(
            kernel,
            {each: types[each] for each in kernel.arg_names if each in types},
            {(kernel.arg_names.index(each),): value for each, value in constants.items()},
            {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if types[n] == "*fp32"},
        )
        target = GPUTarget("cuda", capability, 32)
        check(triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 1}), name, size)


def check(made: Any, *what: Any) -> None:
    assert made.asm["cubin"]
    assert made.metadata.shared <= SHARED_MEMORY, (*what, made.metadata.shared)


if __name__ == "__main__":
    compile_latents(80, torch.bfloat16, heads=16, places=16, is_split=True)
    compile_latents(90, torch.bfloat16, heads=20, places=100, is_split=False)
    compile_latents(120, torch.float16, heads=128, places=128, is_split=True)
    compile_latents(89, torch.float32, heads=16, places=80, is_split=True)
    compile_join(90, torch.bfloat16, 512)
    compile_join(80, torch.float32, 8)
    compile_small(90, torch.bfloat16, 128)
    compile_small(80, torch.float16, 96)
    compile_small(89, torch.float32, 8)
    compile_recurrence(90, torch.bfloat16, size=128, columns=128)
    compile_sampling(90, 128_256)
    compile_sampling(80, 151_936)
