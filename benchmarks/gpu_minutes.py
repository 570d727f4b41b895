"""Decides in minutes what runs on a GPU and how fast, correctness first: python -m benchmarks.gpu_minutes

Stages stand in the order in which they decide most; the first three take about five minutes. Each says what
was predicted, what was measured and whether the prediction held, and all these lines are shown together in
the end. A stage is a process of its own with a limit in seconds, since a failed capture spoils its process.
What it prints comes as it is printed, and goes to the log as well. One that fails shows its whole exception,
and the next one runs.

  facts          versions; copy bandwidth, a node of a graph, an eager operation, a read of eight numbers
  kernels        attention agrees with float64; quantised weights are gguf's to the bit, and a row's product
                 the same in every batch; captured rounds say what phases say, in float32, by every rule
  mix:PAIR       rounds of 16 rows: what one row that asks for more costs all, and seeds, top-p, penalties,
                 and a prompt that comes while they decode
  products       products of both models, 1 to 320 rows: cuBLAS, cuBLASLt, and quantised weights of every type
  attention      short, long and ragged batches, by the kernel's stages and programs
  engine:PAIR    tokens a second and a round by phase: 1, 8 and 32 rows; 0, 2 and 4 drafts; greedy and default
  profile:PAIR   kernels of a target's pass by name, count and time
  tests          the tests that need a device, in two processes

Without stages: all of them, on the pair ``8b``, which is drawn on the device: no files, and nothing is
downloaded. ``--device cpu --dry-run`` runs what needs no GPU, at sizes that say nothing about speed, and
names the rest; with TRITON_INTERPRET=1 in the environment Triton's interpreter runs its kernels as well.
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
from pathlib import Path
from typing import Any

import torch

from benchmarks import synthetic_pair as synthetic
from benchmarks.common import print_table
from benchmarks.gpu_stages import VERDICT, Bench, has_kernels

ROOT = Path(__file__).parent.parent
# In this order, with the seconds that each may take.
STAGES = {
    "facts": 60,
    "kernels": 180,
    "mix:8b": 240,
    "products": 150,
    "attention": 90,
    "engine:8b": 420,
    "profile:8b": 180,
    "tests": 900,
}


def run_here(stage: str, bench: Bench) -> int:
    """1 if it fails, with the whole exception."""
    name, _, pair = stage.partition(":")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    try:
        with torch.inference_mode():
            getattr(bench, name)(pair)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return 1
    return 0


def run_apart(stage: str, seconds: float, arguments: list[str], log: Any) -> tuple[str, list[str]]:
    """Runs the stage in another process; says what became of it, and which verdicts it gave."""
    command = [sys.executable, "-u", "-m", "benchmarks.gpu_minutes", stage, "--here", *arguments]
    late, verdicts = threading.Event(), []
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
            if line.startswith(VERDICT):
                verdicts.append(line.removeprefix(VERDICT).strip())
        code = process.wait()
        timer.cancel()
    if late.is_set():
        return f"stopped after {seconds:.0f} s", verdicts
    return "done" if code == 0 else f"FAILED ({code})", verdicts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"default: {' '.join(STAGES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--dry-run", action="store_true", help="the pair tiny in place of all, few repeats")
    parser.add_argument("--seconds", type=float, help="limit of every stage, in place of its own")
    parser.add_argument("--log", type=Path, default=Path("gpu_minutes.log"))
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
    ends, verdicts = [], []
    with arguments.log.open("w") as log:
        for stage in stages:
            is_there = {"tests": arguments.device != "cpu", "attention": has_kernels(arguments.device)}
            if not is_there.get(stage, True):
                end = "needs a GPU"
            else:
                print(f"\n=== {stage}", flush=True)
                log.write(f"\n=== {stage}\n")
                limit = arguments.seconds or STAGES.get(stage, max(STAGES.values()))
                started = time.monotonic()
                end, found = run_apart(stage, limit, passed, log)
                end += f", {time.monotonic() - started:.0f} s"
                verdicts += found
            ends.append({"stage": stage, "": end})
            log.write(f"=== {stage}: {end}\n")
        summary = "\n".join(verdicts)
        print(f"\nPredictions\n{summary}")
        log.write(f"\nPredictions\n{summary}\n")
    print_table(ends, f"Stages; all they said is in {arguments.log}")
    raise SystemExit(any("FAILED" in end[""] or "stopped" in end[""] for end in ends))


if __name__ == "__main__":
    main()
