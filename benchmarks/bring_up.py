"""Runs the first half hour on a GPU, correctness first: python -m benchmarks.bring_up

Stages, in the order in which they tell most, each in a process of its own with a limit in seconds, since a
failed capture spoils its process. What a stage prints comes as it is printed, and goes to the log as well.
One that fails shows its whole exception, and the next one runs.

  facts          versions; copy bandwidth, a node of a graph, an eager operation, a read of eight numbers
  kernels        Triton compiles, and attention agrees with float64, for each shape of program of both models
  identity:PAIR  captured rounds say what phases say, in float32, by every rule; nothing misses
  tests          tests/engine/test_cuda.py, in two processes
  gemm           each product of both models by cuBLAS and cuBLASLt, 1 to 160 rows, as a share of the copy
  engine:PAIR    tokens a second and a round by phase: 1, 8 and 32 rows; 0, 2 and 4 drafts; greedy and default
  profile:PAIR   kernels of a target's pass by name, count and time

Without stages: all of them, on the pairs ``tiny`` and ``8b``. ``--device cpu --dry-run`` runs what needs no
GPU, at sizes that say nothing about speed, and names the rest. Nothing is downloaded.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from benchmarks import formula, graphs, on_device
from benchmarks import synthetic_pair as synthetic
from benchmarks.common import machine, median_seconds, print_facts, print_table
from benchmarks.engine_runs import run_engine
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.cuda.triton_run import find_kernels
from truedraft.engine.layers.run import AttentionShape
from truedraft.engine.messages import SamplingParams

ROOT = Path(__file__).parent.parent
# In this order, with the seconds that each may take.
STAGES = {
    "facts": 60,
    "kernels": 120,
    "identity:tiny": 180,
    "tests": 900,
    "gemm": 120,
    "engine:tiny": 120,
    "engine:8b": 420,
    "profile:8b": 180,
}
NEED_A_GPU = ("kernels", "tests")
ROWS, DRAFTS = (1, 8, 32), (0, 2, 4)
GEMM_ROWS = (1, 2, 5, 8, 16, 32, 80, 160)
# Bytes of the weights that a product cycles through: more than any cache holds.
GEMM_BYTES = 1 << 30
NODES = 1000
# These are the tests of kernels, graphs and waits; the others are whole engines.
FIRST_TESTS = "kernel or in_place or graphs or host"
RULES = {
    "greedy": SamplingParams(max_tokens=48, temperature=0, ignore_eos=True),
    "rejection": SamplingParams(max_tokens=48, seed=1, verification="rejection", ignore_eos=True),
    "block": SamplingParams(max_tokens=48, seed=1, verification="block", ignore_eos=True),
    "coupled": SamplingParams(max_tokens=48, seed=1, ignore_eos=True),
    "cut": SamplingParams(
        max_tokens=48, seed=1, verification="rejection", top_k=40, top_p=0.9, ignore_eos=True
    ),
}


class Bench:
    """What the stages share. ``is_dry``: at sizes that say nothing about speed."""

    def __init__(self, device: str, dtype: torch.dtype, is_dry: bool) -> None:
        self.device = device
        self.dtype = dtype
        self.is_dry = is_dry
        self.repeats = 2 if is_dry else 20

    def seconds(self, work: Callable[[], object]) -> float:
        """Median, the device's work included."""

        def finished() -> None:
            work()
            on_device.synchronise(self.device)

        return median_seconds({"": finished}, self.repeats)[""]

    def copy_bandwidth(self) -> float:
        return on_device.copy_bandwidth(self.device, 1 << (20 if self.is_dry else 30))

    def replayed(self, function: Callable[[], None]) -> Callable[[], None]:
        """``function`` as one CUDA graph, on a GPU."""
        if self.device == "cpu":
            return function
        from truedraft.engine.runtime.cuda.capture import CudaCapture

        return CudaCapture(torch.device(self.device)).record(function)

    def facts(self, _: str) -> None:
        is_gpu = self.device != "cpu"
        x = torch.zeros(8, device=self.device)

        def operations() -> None:
            for _ in range(NODES):
                x.add_(1)

        operations()
        started = time.perf_counter()
        operations()
        eager = (time.perf_counter() - started) / NODES
        on_device.synchronise(self.device)
        replay = self.replayed(operations)
        print_facts(
            {
                **machine(),
                "torch": str(torch.__version__),
                "CUDA": str(torch.version.cuda),
                "device": torch.cuda.get_device_name() if is_gpu else "cpu",
                "capability": str(torch.cuda.get_device_capability()) if is_gpu else "none",
                "copy, GB/s read and written": f"{self.copy_bandwidth() / 1e9:.0f}",
                "dependent node of a graph, us": f"{1e6 * self.seconds(replay) / NODES:.2f}",
                "eager operation on the host, us": f"{1e6 * eager:.2f}",
                "read of eight numbers, us": f"{1e6 * self.seconds(x.tolist):.1f}",
            }
        )

    def kernels(self, _: str) -> None:
        for name in ("8b", "1b"):
            shape = synthetic.SHAPES[name]
            size = shape.hidden // shape.heads
            layer = AttentionShape(0, shape.heads, shape.kv_heads, size, size**-0.5, None, None)
            started = time.perf_counter()
            kernels = find_kernels([layer], self.dtype, torch.device(self.device))
            took = time.perf_counter() - started
            print(f"{name}: {'NOT USED' if kernels is None else 'used'} ({took:.1f} s)")

    def engine(self, pair: str, dtype: torch.dtype, **config: Any) -> EngineCore:
        settings: dict[str, Any] = {
            "num_speculative_tokens": max(DRAFTS),
            "max_num_sequences": max(self.rows),
            "cache_memory": "16MiB" if self.is_dry else "6GiB",
            "cuda_graph_seconds": 120,
        }
        return on_device.engine_on_device(
            synthetic.PAIRS[pair], 0.8, self.device, dtype, **(settings | config)
        )

    @property
    def rows(self) -> tuple[int, ...]:
        return (1, 2) if self.is_dry else ROWS

    def identity(self, pair: str) -> None:
        core = self.engine(pair, torch.float32)
        captured = graphs.graphs_of(core)
        prompts = synthetic.prompts(core.target.vocab_size, 5, 20)
        rows = []
        for name, params in RULES.items():
            params = msgspec.structs.replace(params, max_tokens=8 if self.is_dry else 48)
            run = partial(run_engine, core, prompts, params, len(prompts))
            variants = {"": run} | graphs.without(core, {"": run})
            ours, theirs = (variant().token_ids for variant in variants.values())
            rows.append({"rule": name, "same text": sum(map(lists_equal, ours, theirs)), "of": len(prompts)})
        print_table(rows, "Captured rounds against phases, float32")
        print(f"Graphs: {graphs.facts(core) or 'none'}")
        if any(row["same text"] != row["of"] for row in rows):
            raise AssertionError("texts differ: start with tests/engine/test_cuda.py -k graphs")
        if self.device != "cpu" and (captured is None or captured.num_misses):
            raise AssertionError("rounds were not captured; the warnings above say why")

    def tests(self, _: str) -> None:
        codes = []
        for chosen in (FIRST_TESTS, f"not ({FIRST_TESTS})"):
            options = ("-q", "-p", "no:cacheprovider", "--maxfail=4", "--durations=12", "-k", chosen)
            command = [sys.executable, "-m", "pytest", *options, "tests/engine/test_cuda.py"]
            codes.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
        if any(codes):
            raise AssertionError(f"pytest ended with {codes}")

    def gemm(self, _: str) -> None:
        copy = self.copy_bandwidth()
        table = []
        for name in ("tiny-target",) if self.is_dry else ("8b", "1b"):
            shape = synthetic.SHAPES[name]
            kv = shape.hidden // shape.heads * shape.kv_heads
            vocab_size = synthetic.PAIRS["tiny" if self.is_dry else "8b"].vocab_size
            products = {
                "qkv": (shape.hidden + 2 * kv, shape.hidden),
                "output": (shape.hidden, shape.hidden),
                "gate, up": (2 * shape.mlp, shape.hidden),
                "down": (shape.hidden, shape.mlp),
                "head": (vocab_size, shape.hidden),
            }
            for product, (outputs, inputs) in products.items():
                for library in ("cublas",) if self.device == "cpu" else ("cublas", "cublaslt"):
                    row = {"model": name, "product": product, "library": library}
                    table.append(row | self._gemm(outputs, inputs, library, copy))
                    print(table[-1], flush=True)
        print_table(table, "Products: weights read a second, as a share of the copy, by rows")

    def _gemm(self, outputs: int, inputs: int, library: str, copy: float) -> dict[str, str]:
        if self.device != "cpu":
            torch.backends.cuda.preferred_blas_library(library)
        num_bytes = outputs * inputs * self.dtype.itemsize
        number = max(2, (1 << 20 if self.is_dry else GEMM_BYTES) // num_bytes)
        weights = torch.randn(number, outputs, inputs, device=self.device, dtype=self.dtype)
        shares = {}
        for rows in GEMM_ROWS[:2] if self.is_dry else GEMM_ROWS:
            x = torch.randn(rows, inputs, device=self.device, dtype=self.dtype)

            def each(x: torch.Tensor = x) -> None:
                for weight in weights:
                    F.linear(x, weight)

            # The copy's bytes are read and written, these are read.
            shares[str(rows)] = f"{number * num_bytes / self.seconds(self.replayed(each)) / copy:.2f}"
        return shares

    def engine_stage(self, pair: str) -> None:
        core = self.engine(pair, self.dtype)
        copy = self.copy_bandwidth()
        shape = synthetic.PAIRS[pair]
        weights = on_device.weight_bytes(shape.target, shape.vocab_size, self.dtype)
        table = []
        for name, temperature in (("greedy", 0.0), ("default", 1.0)):
            for rows in self.rows:
                prompts = synthetic.prompts(core.target.vocab_size, rows, 64)
                plain = None
                for drafts in DRAFTS[:2] if self.is_dry else DRAFTS:
                    params = SamplingParams(
                        max_tokens=16 if self.is_dry else 96,
                        temperature=temperature,
                        ignore_eos=True,
                        num_speculative_tokens=drafts,
                    )
                    run = partial(run_engine, core, prompts, params, rows)
                    run()
                    done = max((run() for _ in range(2)), key=lambda run: run.tokens_per_second)
                    plain = plain or done
                    phases = formula.phases([done])
                    row = {"requests": name, "rows": rows, "drafts": drafts}
                    row["tokens/s"] = f"{done.tokens_per_second:.1f}"
                    row["to plain"] = f"{done.tokens_per_second / plain.tokens_per_second:.2f}"
                    row |= {key: f"{phases[key]:.2f}" for key in phases if key != "host_share"}
                    share = weights / (phases["round_ms"] / 1000) / copy
                    row["weights to copy"] = f"{share:.2f}" if drafts == 0 else ""
                    table.append(row)
                    print(row, flush=True)
        print_table(table, f"Pair {pair}, {self.dtype}; drafts are accepted with 0.8 when greedy")
        print(f"Graphs: {graphs.facts(core) or 'none'}")

    def profile(self, pair: str) -> None:
        core = self.engine(pair, self.dtype, cuda_graphs=False)
        (prompt,) = synthetic.prompts(core.target.vocab_size, 1, 64)
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, num_speculative_tokens=0)
        run_engine(core, [prompt], params)
        activity = torch.profiler.ProfilerActivity
        kind = activity.CPU if self.device == "cpu" else activity.CUDA
        with torch.profiler.profile(activities=[kind]) as profiler:
            run_engine(core, [prompt], params)
        sort = "self_cpu_time_total" if self.device == "cpu" else "self_device_time_total"
        print(profiler.key_averages().table(sort_by=sort, row_limit=30, max_name_column_width=90))


def lists_equal(ours: Any, theirs: Any) -> bool:
    return list(ours) == list(theirs)


def run_here(stage: str, bench: Bench) -> int:
    """1 if it fails, with the whole exception."""
    name, _, pair = stage.partition(":")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    try:
        with torch.inference_mode():
            getattr(bench, "engine_stage" if name == "engine" else name)(pair)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return 1
    return 0


def run_apart(stage: str, seconds: float, arguments: list[str], log: Any) -> str:
    """Runs the stage in another process; says what became of it."""
    command = [sys.executable, "-u", "-m", "benchmarks.bring_up", stage, "--here", *arguments]
    late = threading.Event()
    # In a group of its own, whose children end with it.
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:

        def stop() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, stop)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
            log.flush()
        code = process.wait()
        timer.cancel()
    if late.is_set():
        return f"stopped after {seconds:.0f} s"
    return "done" if code == 0 else f"FAILED ({code})"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"default: {' '.join(STAGES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--dry-run", action="store_true", help="the pair tiny in place of all, few repeats")
    parser.add_argument("--seconds", type=float, help="limit of every stage, in place of its own")
    parser.add_argument("--log", type=Path, default=Path("bring_up.log"))
    parser.add_argument("--here", action="store_true", help="one stage, in this process, without a limit")
    arguments = parser.parse_args()
    names = {stage.partition(":")[0] for stage in STAGES}
    for stage in arguments.stages:
        name, _, pair = stage.partition(":")
        if name not in names or (pair and pair not in synthetic.PAIRS):
            parser.error(f"there is no stage {stage!r}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    stages = list(dict.fromkeys(arguments.stages or STAGES))
    if arguments.dry_run:
        stages = list(dict.fromkeys(stage.replace(":8b", ":tiny") for stage in stages))
    if arguments.here:
        bench = Bench(arguments.device, getattr(torch, arguments.dtype), arguments.dry_run)
        raise SystemExit(run_here(stages[0], bench))
    passed = ["--device", arguments.device, "--dtype", arguments.dtype]
    passed += ["--dry-run"] if arguments.dry_run else []
    ends = []
    with arguments.log.open("w") as log:
        for stage in stages:
            if arguments.device == "cpu" and stage in NEED_A_GPU:
                end = "needs a GPU"
            else:
                print(f"\n=== {stage}", flush=True)
                log.write(f"\n=== {stage}\n")
                limit = arguments.seconds or STAGES.get(stage, max(STAGES.values()))
                started = time.monotonic()
                end = run_apart(stage, limit, passed, log)
                end += f", {time.monotonic() - started:.0f} s"
            ends.append({"stage": stage, "": end})
            log.write(f"=== {stage}: {end}\n")
    print_table(ends, f"Stages; all they said is in {arguments.log}")
    raise SystemExit(any("FAILED" in end[""] or "stopped" in end[""] for end in ends))


if __name__ == "__main__":
    main()
