"""Compiles the kernels for real models' shapes and GPUs that are not here, and asks what they would need.

The launchers themselves are called, with tensors of real sizes in which nothing is ever read: so each
program is compiled as it is served. ``python -m tests.engine.triton_real_shapes`` prints the table.
``test_real_shapes`` compiles ``CHOSEN`` launches, or all of them with ALL_TESTS: in a process of its own, as
the interpreter's variable must not be set.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from truedraft.engine.cuda import (
    kernels,
    launch_experts,
    launch_recurrent,
    quantised_kernels,
    sampling_kernels,
)
from truedraft.engine.cuda.blocks import KINDS, PackedBlocks
from truedraft.engine.cuda.grouped_experts import ExpertMatrices, GroupedLinear, TokenGroups
from truedraft.engine.layers.linear import TorchLinear
from truedraft.engine.layers.mlp import Router
from truedraft.engine.layers.norm import Norm
from truedraft.engine.layers.quantised_blocks import TYPES
from truedraft.engine.layers.recurrent import Convolution, DeltaRule, Mamba2, Recurrence
from truedraft.engine.memory.batch import PagedRows, StateRows
from truedraft.engine.memory.huge_pages import HugePages
from truedraft.engine.memory.recurrent_state import LayerState, RecurrentCache

CPU = torch.device("cpu")
# What registers cannot hold goes to a stack in memory: a few addresses may, a tile may not.
MOST_STACK = 64


class Target(NamedTuple):
    """Says what a multiprocessor has, of which programs take shares, and the most that one may have."""

    shared: int
    shared_of_program: int
    threads: int
    registers: int = 1 << 16


TARGETS = {
    80: Target(164 << 10, 163 << 10, 2048),
    89: Target(100 << 10, 99 << 10, 1536),
    90: Target(228 << 10, 227 << 10, 2048),
    120: Target(100 << 10, 99 << 10, 1536),
}
# The driver keeps so much of the shared memory of each program.
KEPT = 1 << 10
# A multiprocessor holds at least so many programs at once: while one waits for memory, another computes. Some
# kernels have one on these targets: many rows of queries or long heads fill the shared memory of consumers'
# cards; a row is drawn or judged by one program of all of a multiprocessor's threads.
LEAST_PROGRAMS, SMALL, ALL = 2, (89, 120), (80, 89, 90, 120)
ALONE = {"attend_share": SMALL, "attend_share_of_latents": ALL, "multiply_share": SMALL}
ALONE |= dict.fromkeys(("draw_row", "judge_position", "judge_row"), ALL)


@dataclass(frozen=True, slots=True)
class Made:
    """Is one compiled program."""

    kernel: str
    target: int
    warps: int
    registers: int
    stack: int
    shared: int

    @property
    def programs(self) -> int:
        """Returns how many of them a multiprocessor holds at once."""
        has, threads = TARGETS[self.target], 32 * self.warps
        of_registers = has.registers // (-(-self.registers // 8) * 8 * threads)
        return min(of_registers, has.threads // threads, has.shared // (self.shared + KEPT))

    @property
    def faults(self) -> list[str]:
        """Says what would make it slow, or keep it from being launched."""
        faults = []
        if self.stack > MOST_STACK:
            faults.append(f"a stack of {self.stack} bytes")
        if self.shared > TARGETS[self.target].shared_of_program:
            faults.append(f"{self.shared} bytes of shared memory")
        if self.programs < (1 if self.target in ALONE.get(self.kernel, ()) else LEAST_PROGRAMS):
            faults.append(f"{self.programs} programs a multiprocessor")
        return faults


class _Driver:
    """Stands for the driver of a GPU that is not here."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Made]]:
    """Launches compile in here, and run nothing. Yields what they have compiled."""
    made: dict[Any, Made] = {}
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        done = run(self, *arguments, grid=grid, warmup=True, **constants)
        if done.hash not in made:
            made[done.hash] = _asked(self.__name__, capability, done)

    triton.runtime.driver.set_active(_Driver(capability))
    found: list[Made] = []
    with mock.patch.object(JITFunction, "run", compile_only):
        yield found
    found += made.values()


def _asked(name: str, capability: int, compiled: Any) -> Made:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    return Made(name, capability, warps, int(found[1]), int(found[2]), shared)


# The models' layers.


def attention(
    heads: tuple[int, int],
    size: int,
    rows: int,
    queries: int,
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> None:
    """Launches what one layer does between its products."""
    num_heads, kv_heads = heads
    tokens = rows * queries
    qkv = torch.empty(tokens, num_heads + 2 * kv_heads, size, dtype=dtype)
    query_key, value = qkv.split_with_sizes((num_heads + kv_heads, kv_heads), 1)
    keys = torch.empty(64, kv_heads, size, dtype=dtype)
    angles, slots = torch.empty(tokens, size, dtype=dtype), torch.empty(tokens, dtype=torch.int64)
    kernels.rotate_and_store(query_key, value, angles, angles, slots, keys, keys)
    query = query_key[:, :num_heads]
    output = torch.empty(query.shape, dtype=dtype)
    window = more.pop("window", None)
    told = paged(rows, queries), slots, 16, 0.1, window
    kernels.attend_rows(output, query, keys, keys, *told, **more)


def latents(heads: int, rows: int, queries: int, dtype: torch.dtype = torch.bfloat16) -> None:
    tokens = rows * queries
    query = torch.empty(tokens, heads + 1, 576, dtype=dtype)[:, :heads]
    output, keys = torch.empty(tokens, heads, 512, dtype=dtype), torch.empty(64, 1, 576, dtype=dtype)
    positions = torch.empty(tokens, dtype=torch.int64)
    kernels.attend_latents(output, query, keys, paged(rows, queries), positions, 16, 0.1)


def paged(rows: int, queries: int, longest: int = 32_768) -> PagedRows:
    numbers = torch.empty(rows, dtype=torch.int64)
    return PagedRows(torch.empty(rows, longest // 16, dtype=torch.int64), numbers, numbers, queries)


def others(hidden: int, mlp: int, tokens: int = 3) -> None:
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    kernels.rms_norm(x, x[0], 1e-6, x)
    kernels.rms_norm(x, x[0], 1e-6)
    kernels.gated_silu(torch.empty(tokens, 2 * mlp, dtype=torch.bfloat16))


def recurrence(rule: Recurrence, most: int = 1) -> None:
    channels, width = rule.convolution.weight.shape
    state = LayerState(
        *(tensor.new_empty(1, *tensor.shape[1:]) for tensor in _state(rule, channels, width).tensors)
    )
    numbers = torch.empty(1, dtype=torch.int64)
    rows = StateRows(most, *[numbers] * 6)
    launch_recurrent.recur(rule, torch.empty(most, rule.input_size, dtype=torch.bfloat16), rows, state)


def _state(rule: Recurrence, channels: int, width: int) -> LayerState:
    return LayerState.zeros(RecurrentCache(channels, width, rule.state, CPU), 1, HugePages())


def delta(key_heads: int, heads: int, size: int = 128) -> Recurrence:
    numbers = torch.empty(heads)
    convolution = Convolution(torch.empty(2 * key_heads * size + heads * size, 4), silu=True)
    norm = Norm(torch.empty(size), 1e-6)
    return DeltaRule(0, convolution, key_heads, heads, size, size, numbers, numbers, norm)


def mamba(heads: int, head_size: int, state_size: int, groups: int) -> Recurrence:
    inner, numbers = heads * head_size, torch.empty(heads)
    channels = inner + 2 * groups * state_size
    convolution = Convolution(torch.empty(channels, 4), torch.empty(channels), silu=True)
    rule = (0, convolution, heads, head_size, groups, state_size, numbers, numbers, numbers, (0.0, 9.0))
    return Mamba2(*rule, Norm(torch.empty(inner), 1e-5))


def product(name: str, outputs: int, inputs: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    x = torch.empty(rows, inputs, dtype=dtype)
    quantised_kernels.multiply(x, [packed(name, outputs, inputs)], None, 1.0, None)


def unpacked(name: str, has_ids: bool) -> None:
    rows = torch.empty(3, dtype=torch.int64) if has_ids else range(64)
    quantised_kernels.unpack(packed(name, 128, 4096), torch.bfloat16, rows)


def packed(name: str, outputs: int, inputs: int) -> PackedBlocks:
    """Returns blocks whose tensors have no numbers, but the types that kernels are compiled for."""
    type_ = TYPES[name]
    kind, few = KINDS[type_], torch.empty(0, dtype=torch.uint8)
    halves = few.view(torch.float16)
    scales = halves if kind.scaling < 2 else few
    return PackedBlocks(type_, outputs, inputs, few, few, scales, halves)


def experts(
    name: str | None,
    tokens: int,
    num: int = 128,
    chosen: int = 8,
    sizes: tuple[int, int] = (2048, 768),
    has_bias: bool = False,
) -> None:
    """Launches what a layer of experts does."""
    hidden, inner = sizes
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    router = Router(TorchLinear(x, None), num, chosen, "softmax", renormalises=True)
    choices, weights = launch_experts.choose_experts(router, torch.empty(tokens, num), None)
    groups = launch_experts.group_tokens(choices, num, torch.empty(2, dtype=torch.int64))

    def linear(parts: int, rows: int, inputs: int) -> GroupedLinear:
        addresses = torch.empty(parts, 1 if name is None else 4, num, dtype=torch.int64)
        part = ExpertMatrices(rows, inputs, None if name is None else TYPES[name], addresses)
        bias = torch.empty(num, parts * rows, dtype=torch.bfloat16) if has_bias else None
        return GroupedLinear((part,), (), parts * rows, 1.0, bias)

    launch_experts.multiply_experts(x, linear(1 if name is None else 2, inner, hidden), groups, chosen)
    gated = torch.empty(tokens * chosen, inner, dtype=torch.bfloat16)
    said = launch_experts.multiply_experts(gated, linear(1, hidden, inner), groups, 1)
    launch_experts.join_experts(said, choices, weights, None, x)


def heads_of_latents(tokens: int, heads: int = 16) -> None:
    """Launches the products that make queries look for latent vectors."""
    numbers = torch.empty(heads, dtype=torch.int32)
    pairs = torch.empty(heads, tokens, dtype=torch.int32)
    groups = TokenGroups(pairs, numbers, torch.empty(tokens, heads, dtype=torch.int32))
    part = ExpertMatrices(512, 128, None, torch.empty(1, 1, heads, dtype=torch.int64))
    x = torch.empty(tokens * heads, 128, dtype=torch.bfloat16)
    launch_experts.multiply_experts(x, GroupedLinear((part,), (), 512, 1.0), groups, 1)


def sampling(vocab_size: int, drafts: int) -> None:
    logits = torch.empty(2, drafts + 1, vocab_size)
    numbers = torch.empty(2, 34, dtype=torch.int64)
    sampling_kernels.draw_drafts(logits[:, 0], logits, numbers, numbers[0, :1])
    verdicts = torch.empty(2, 3 + drafts, dtype=torch.int64)
    sampling_kernels.judge(logits, torch.empty(2, 8, vocab_size), numbers, verdicts)


F32 = torch.float32
CASES: dict[str, Callable[[], None]] = {
    "Qwen3-8B, 1 x 1": lambda: attention((32, 8), 128, 1, 1),
    "Qwen3-8B, 64 x 5": lambda: attention((32, 8), 128, 64, 5),
    "Qwen3-8B, 1 x 33": lambda: attention((32, 8), 128, 1, 33),
    "Qwen3-8B, others": lambda: others(4096, 12_288),
    "Llama 3.2 1B, 64 x 5": lambda: attention((32, 8), 64, 64, 5),
    "Llama 3.1 8B in float32, 64 x 5": lambda: attention((32, 8), 128, 64, 5, F32),
    "Qwen2.5-7B, 64 x 5": lambda: attention((28, 4), 128, 64, 5),
    "head of 112, 64 x 5": lambda: attention((32, 8), 112, 64, 5),
    "gpt-oss-20b, 64 x 5": lambda: attention((64, 8), 64, 64, 5, window=128, sinks=torch.empty(64)),
    "Gemma 3, 64 x 5": lambda: attention((8, 4), 256, 64, 5, window=1024),
    "Gemma 3, 1 x 33": lambda: attention((8, 4), 256, 1, 33, window=1024),
    "Qwen3.5-4B, attention, 1 x 33": lambda: attention((16, 4), 256, 1, 33),
    "DeepSeek-V2-Lite, 1 x 1": lambda: latents(16, 1, 1),
    "DeepSeek-V2-Lite, 64 x 5": lambda: latents(16, 64, 5),
    "DeepSeek-V2-Lite, heads of 3": lambda: heads_of_latents(3),
    "DeepSeek-V2-Lite, heads of 320": lambda: heads_of_latents(320),
    "GLM-4.7-Flash, 64 x 5": lambda: latents(20, 64, 5),
    "Qwen3.5-4B, delta rule": lambda: recurrence(delta(16, 32)),
    "Granite 4 H, Mamba 2": lambda: recurrence(mamba(48, 64, 128, 1)),
    "Bamba, Mamba 2": lambda: recurrence(mamba(128, 64, 256, 1)),
    "Qwen3-30B-A3B, 1 token": lambda: experts(None, 1),
    "Qwen3-30B-A3B, 64 tokens": lambda: experts(None, 64),
    "Qwen3-30B-A3B Q4_K, 1 token": lambda: experts("Q4_K", 1),
    "Qwen3-30B-A3B Q4_K, 64 tokens": lambda: experts("Q4_K", 64),
    "Qwen3-30B-A3B Q6_K, 64 tokens": lambda: experts("Q6_K", 64),
    "gpt-oss-20b, experts, 64 tokens": lambda: experts(None, 64, 32, 4, (2880, 2880), has_bias=True),
    "Qwen3-8B, sampling": lambda: sampling(151_936, 4),
    "Gemma 3, sampling": lambda: sampling(262_144, 4),
    "float32 Q4_K, 64 rows": lambda: product("Q4_K", 4096, 4096, 64, F32),
    "embeddings Q6_K": lambda: unpacked("Q6_K", True),
    "prompts Q4_K": lambda: unpacked("Q4_K", False),
}
for _name in ("Q4_K", "Q6_K", "Q5_K", "Q3_K", "Q2_K", "Q8_0", "Q4_0", "Q5_1", "IQ4_XS", "MXFP4"):
    for _rows in (1, 64, 320):
        CASES[f"Llama 3.1 8B {_name}, {_rows} rows"] = lambda n=_name, r=_rows: product(n, 4096, 4096, r)  # type: ignore[misc]


def compiled(name: str, target: int) -> list[Made]:
    """Compiles what this case launches, and returns each program once."""
    with compiling_for(target) as made:
        CASES[name]()
    return made


# They meet every kernel, and what is largest of each, in about a minute on two slow threads.
CHOSEN = (
    ("Qwen3-8B, 64 x 5", 90),
    ("Qwen3.5-4B, attention, 1 x 33", 89),
    ("Llama 3.1 8B in float32, 64 x 5", 120),
    ("Qwen3-8B, others", 80),
    ("DeepSeek-V2-Lite, 64 x 5", 89),
    ("Qwen3.5-4B, delta rule", 90),
    ("Bamba, Mamba 2", 89),
    ("Qwen3-30B-A3B Q4_K, 64 tokens", 89),
    ("Llama 3.1 8B Q6_K, 64 rows", 89),
    ("Llama 3.1 8B Q4_K, 320 rows", 90),
    ("embeddings Q6_K", 80),
    ("Gemma 3, sampling", 89),
)


def shown(name: str, made: Made) -> str:
    needs = f"{made.registers:4}/{made.stack}/{made.shared >> 10} KiB"
    faults = ", ".join(made.faults)
    return (
        f"sm_{made.target:<4} {name:34} {made.kernel:24} {made.warps:2} {needs:16} {made.programs:2} {faults}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases in whose names this is found")
    parser.add_argument("--targets", type=int, nargs="+", default=list(TARGETS))
    parser.add_argument("--chosen", action="store_true", help="what tests compile")
    arguments = parser.parse_args()
    wanted = [(name, target) for target in arguments.targets for name in CASES if arguments.only in name]
    failed = False
    print("target, case, kernel, warps, registers/stack/shared, programs a multiprocessor, faults")
    for name, target in CHOSEN if arguments.chosen else wanted:
        for made in compiled(name, target):
            failed |= bool(made.faults)
            print(shown(name, made), flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
