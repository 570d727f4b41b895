"""Decides in minutes what runs on a GPU and how fast, correctness first: python -m benchmarks.gpu_minutes

Stages stand in the order in which they decide most. Each says what was predicted, what was measured and
whether the prediction held, and all these lines are shown together in the end. A stage is a process of its
own with a limit in seconds, since a failed capture spoils its process: one that fails shows its whole
exception, one that hangs is ended, and the next one runs. In the folder ``--out``, ``minutes.log`` has all
that they print, as they print it, and ``minutes.json`` what became of each and its verdicts, written after
each stage.

  facts          versions; copy bandwidth, a node of a graph, an eager operation, a read of eight numbers
  identity       captured rounds say what phases say, by every rule: a small dense pair, hybrids, experts,
                 latents, an MTP head, files with blocks
  engine:PAIR    tokens a second and a round by phase: 1, 16 and 64 rows; 0 and 2 drafts; greedy and cut
  mix:PAIR       rounds of 16 rows: what one row that asks for more costs all, and seeds, top-p, penalties,
                 and a prompt that comes while they decode
  recur          a layer of Gated DeltaNet in the shape of Qwen3.5-4B
  experts        a layer of Qwen3-30B-A3B in 16 bits and in blocks
  attention      short, long and ragged batches, by the kernel's stages and programs
  products       products of 8B: cuBLAS, cuBLASLt, and blocks of Q4_K and Q6_K
  head           a hybrid's file with its MTP head
  profile:PAIR   kernels of a target's pass by name, count and time

Without stages: all of these, which take 540 seconds at most (``--limit``), on the pair ``8b``, which is drawn
on the device: no files, and nothing is downloaded. On request, alone:

  http:PAIR      the server, whose worker draws the pair on the device: 1, 16 and 64 clients, 200 seconds
  kernels        every type of blocks is gguf's to the bit, and a row's product the same in every batch
  tests          the tests that need a device, in two processes

``--device cpu --dry-run`` runs what needs no GPU, at sizes that say nothing about speed, and names the rest;
with TRITON_INTERPRET=1 in the environment Triton's interpreter runs its kernels as well.
"""

import argparse
import json
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
from benchmarks.gpu_kinds import Bench
from benchmarks.gpu_stages import VERDICT, has_kernels

ROOT = Path(__file__).parent.parent
# In this order, with the seconds that each may take; together they fit LIMIT.
STAGES = {
    "facts": 25,
    "identity": 75,
    "engine:8b": 110,
    "mix:8b": 70,
    "recur": 30,
    "experts": 30,
    "attention": 45,
    "products": 75,
    "head": 45,
    "profile:8b": 30,
}
ON_REQUEST = {"http:8b": 200, "kernels": 180, "tests": 900}
LIMIT, LEAST_SECONDS, DRY_FACTOR = 540, 8, 5


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
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of all stages together")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "gpu_minutes")), help="folder of log and JSON"
    )
    parser.add_argument("--here", action="store_true", help="one stage, in this process, without a limit")
    arguments = parser.parse_args()
    names = {stage.partition(":")[0] for stage in STAGES | ON_REQUEST}
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
    arguments.out.mkdir(parents=True, exist_ok=True)
    ended: list[dict[str, Any]] = []
    deadline = time.monotonic() + arguments.limit * (DRY_FACTOR if arguments.dry_run else 1)
    is_there = {"tests": arguments.device != "cpu", "attention": has_kernels(arguments.device)}
    with (arguments.out / "minutes.log").open("w") as log:
        for stage in stages:
            name, started = stage.partition(":")[0], time.monotonic()
            own = {each.partition(":")[0]: limit for each, limit in (STAGES | ON_REQUEST).items()}[name]
            # A dry run, on whatever machine, is to end.
            own *= DRY_FACTOR if arguments.dry_run else 1
            limit = min(arguments.seconds or own, deadline - started)
            print(f"\n=== {stage}", flush=True)
            log.write(f"\n=== {stage}\n")
            if not is_there.get(name, True):
                end, found = "needs a GPU", []
            elif limit < LEAST_SECONDS and not arguments.seconds:
                end, found = "left out: no time was left", []
            else:
                end, found = run_apart(stage, limit, passed, log)
            seconds = round(time.monotonic() - started, 1)
            log.write(f"=== {stage}: {end}, {seconds} s\n")
            ended.append({"stage": stage, "end": end, "seconds": seconds, "verdicts": [*map(parted, found)]})
            # Whatever happens to the rest, this is there.
            (arguments.out / "minutes.json").write_text(json.dumps(ended, indent=1))
        lines = [verdict for stage in ended for verdict in stage["verdicts"]]
        summary = "\n".join(f"{each['what']}: {each['numbers']}: {each['verdict']}" for each in lines)
        print(f"\nPredictions\n{summary}")
        log.write(f"\nPredictions\n{summary}\n")
    shown = [{"stage": each["stage"], "": each["end"], "seconds": each["seconds"]} for each in ended]
    print_table(shown, f"Stages; all they said is in {arguments.out}")
    raise SystemExit(any("FAILED" in each["end"] or "stopped" in each["end"] for each in ended))


def parted(verdict: str) -> dict[str, str]:
    """Returns the parts of a line that ``judge`` has printed."""
    return dict(zip(("what", "numbers", "verdict"), verdict.rsplit(": ", 2), strict=True))


if __name__ == "__main__":
    main()
