"""Measures the whole table on one GPU in under eight minutes: python -m benchmarks.gpu

First the device's copy bandwidth; with ``--tests`` the engine's tests on CUDA, which take five minutes and
more, before it. Then greedy identity of the bundled pair in
the working precision, every miss explained by the target's top-2 margin. Then, for each batch size and
interleaved, on a pair shaped as 8B and 1B and drawn on the device: our engine plain and speculative,
transformers ``generate`` on the batch, and ``generate`` with ``assistant_model``, which knows batches of one
only. Results are written as they come; what the time does not allow is left out and named.

``python -m benchmarks.gpu --device cpu --shape tiny`` runs the same without a GPU, in seconds; there are no
CUDA graphs then, whatever ``--graphs`` says, and the table of graphs is empty.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import formula, graphs, identity, on_device
from benchmarks import synthetic_pair as synthetic
from benchmarks.common import Run, Runs, machine, note, print_facts, print_table, read_prompts, save, summary
from benchmarks.contestants.transformers_generate import ASSISTED, GENERATE, TransformersGenerate
from benchmarks.contestants.truedraft import PLAIN, SPECULATIVE, Truedraft
from benchmarks.engine_runs import Variants, decode_params, run_engine
from benchmarks.plots import lines
from truedraft.engine.config import BUNDLED_PAIR
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.proposers.translated.pairing import load_tokenizer

ROOT = Path(__file__).parent.parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16 on a GPU"
    )
    parser.add_argument("--shape", choices=synthetic.PAIRS, default="8b")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of each drafted token")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=7.5, help="for everything; repeats give way")
    parser.add_argument("--cache-memory", default="6GiB", help="of the engine")
    parser.add_argument("--tests", action="store_true", help="run the tests on the device first")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument(
        "--graphs", choices=["on", "off", "both"], default="on", help="CUDA graphs; both: side by side"
    )
    parser.add_argument(
        "--save", type=Path, help="JSON file to write as results come; a PNG is saved next to it"
    )
    return parser.parse_args()


class Table:
    """Holds the document so far, written after every part, and what is left of the time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.ends = time.monotonic() + 60 * arguments.minutes
        self.document: dict[str, Any] = {
            "machine": machine() | {"torch": str(torch.__version__), "device": device_name(arguments.device)},
            "arguments": {name: str(value) for name, value in vars(arguments).items()},
            "left_out": [],
            "identity": [],
            "results": [],
            "phases": [],
        }

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.ends - time.monotonic())

    def add(self, name: str, value: Any) -> None:
        self.document[name] = value
        self.write()

    def leave_out(self, what: str) -> None:
        note(f"Left out for want of time: {what}")
        self.document["left_out"].append(what)

    def write(self) -> None:
        """What there is so far, so that a run that is cut off has written what it knew."""
        if self.arguments.save is not None:
            self.arguments.save.write_text(json.dumps(self.document, indent=2) + "\n")


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def run_tests(table: Table) -> None:
    """The engine's tests on CUDA; elsewhere they are skipped with a message."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "cuda",
        "-p",
        "no:cacheprovider",
        "tests/engine/test_cuda.py",
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=table.seconds_left)
    except subprocess.TimeoutExpired as expired:
        # Each test prints one character: dots have passed.
        so_far = (expired.stdout or b"").decode().splitlines()[:1]
        table.add("tests", f"not finished within {expired.timeout:.0f} s; so far: {''.join(so_far)}")
        note(f"Tests: {table.document['tests']}")
        return
    lines_out = (done.stdout or done.stderr).strip().splitlines()
    table.add("tests", lines_out[-1] if lines_out else f"pytest ended with {done.returncode}")
    note(f"Tests: {table.document['tests']}")


def match_rates(
    outputs: dict[str, Any], reference: str, prompts: list[list[int]], model: Any
) -> dict[str, Any]:
    return {
        "reference": reference,
        "same_text": identity.same_text(outputs, reference),
        "misses": [miss._asdict() for miss in identity.misses(outputs, reference, prompts, model)],
    }


def bundled_identity(table: Table, dtype: torch.dtype) -> None:
    """A real pair, because the synthetic one's margins are so wide that nothing could differ."""
    arguments = table.arguments
    target, draft = str(BUNDLED_PAIR / "target"), str(BUNDLED_PAIR / "draft")
    tokenizer = load_tokenizer(target)
    assert tokenizer is not None
    prompts = [list(tokenizer.encode(text)) for text in read_prompts(None)]
    name = str(dtype).removeprefix("torch.")
    k, with_graphs = arguments.num_speculative_tokens, graphs.settings(arguments)
    ours = Truedraft(target, draft, k, 0, arguments.device, name, method="draft_model", **with_graphs)
    peer = TransformersGenerate.from_folders(target, None, 0, arguments.device, dtype)
    variants = ours.variants(prompts, arguments.max_tokens) | peer.variants(prompts, arguments.max_tokens)
    outputs = {name: run().token_ids for name, run in variants.items()}
    table.add("identity_of_bundled_pair", match_rates(outputs, PLAIN, prompts, peer.target))


def cell_variants(
    core: EngineCore,
    peer: TransformersGenerate | None,
    prompts: list[list[int]],
    arguments: argparse.Namespace,
) -> Variants:
    variants: Variants = {
        name: partial(run_engine, core, prompts, decode_params(arguments.max_tokens, 0.0, k), len(prompts))
        for name, k in ((PLAIN, 0), (SPECULATIVE, arguments.num_speculative_tokens))
    }
    if arguments.graphs == "both":
        variants |= graphs.without(core, variants)
    if peer is not None:
        run = partial(peer.run, prompts, arguments.max_tokens)
        variants[GENERATE] = partial(run, assisted=False, batched=True)
        if len(prompts) == 1:
            variants[ASSISTED] = partial(run, assisted=True)
    return variants


def interleave_within(variants: Variants, repeats: int, seconds: float) -> Runs:
    """Calls ``interleave`` with at least one repeat and no new one after ``seconds``."""
    ends = time.monotonic() + seconds
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for repeat in range(repeats):
        if repeat > 0 and time.monotonic() > ends:
            break
        for name, variant in variants.items():
            runs[name].append(variant())
            note(f"  {repeat + 1}/{repeats} {name}: {runs[name][-1].tokens_per_second:.1f} tokens/s")
    return runs


def measure_batch(
    table: Table,
    core: EngineCore,
    peer: TransformersGenerate | None,
    batch: int,
    seconds: float,
    bytes_a_step: int,
) -> None:
    """All variants at one batch size: rows of the big table, phases, identity."""
    arguments = table.arguments
    note(f"Batch {batch}")
    prompts = synthetic.prompts(core.target.vocab_size, batch, arguments.prompt_length)
    variants = cell_variants(core, peer, prompts, arguments)
    interleave_within(variants, 1, seconds)  # warm
    runs = interleave_within(variants, arguments.repeats, seconds)
    baselines = {"to_plain": dict.fromkeys(runs, PLAIN)}
    if peer is not None:
        baselines["to_generate"] = dict.fromkeys(runs, GENERATE)
    if arguments.graphs == "both":
        baselines["to_without_graphs"] = graphs.baseline(runs)
    if ASSISTED in runs:
        baselines["to_assisted"] = dict.fromkeys(runs, ASSISTED)
    document = table.document
    for row in summary(runs, baselines):
        row = {"batch": batch, **row, "repeats": len(runs[PLAIN])}
        row.setdefault("to_assisted", None)
        document["results"].append(row)
    steps = [run.steps for run in runs[PLAIN] if run.steps is not None]
    # Over decoding steps only; a prompt's pass reads the same weights for many tokens.
    speed = bytes_a_step * statistics.median(step.num_rounds / step.seconds for step in steps)
    share = speed / document["copy_bandwidth"]
    theory = formula.speedup(runs[PLAIN], runs[SPECULATIVE]) or {}
    for name in (PLAIN, SPECULATIVE):
        phases = {"batch": batch, "variant": name, **formula.phases(runs[name])}
        phases["weight_bandwidth_to_copy"] = share if name == PLAIN else None
        for key in ("predicted", "achieved", "achieved_to_predicted"):
            phases[key] = theory.get(key) if name == SPECULATIVE else None
        document["phases"].append(phases)
    outputs = {name: repeats[0].token_ids for name, repeats in runs.items()}
    rates = match_rates(outputs, PLAIN, prompts, peer.target if peer is not None else None)
    document["identity"].append({"batch": batch, **rates})
    table.write()


def measure(table: Table) -> None:
    arguments = table.arguments
    device = arguments.device
    dtype = getattr(torch, arguments.dtype or ("float32" if device == "cpu" else "bfloat16"))
    if arguments.tests:
        run_tests(table)
    table.add("copy_bandwidth", on_device.copy_bandwidth(device, 1 << (26 if device == "cpu" else 30)))
    bundled_identity(table, dtype)

    pair = synthetic.PAIRS[arguments.shape]
    note("Drawing the pair on the device")
    core = on_device.engine_on_device(
        pair,
        arguments.acceptance,
        device,
        dtype,
        num_speculative_tokens=arguments.num_speculative_tokens,
        max_num_sequences=max(arguments.batch),
        cache_memory=arguments.cache_memory,
        **graphs.settings(arguments),
    )
    peer = None
    if not arguments.no_transformers:
        models = [
            on_device.drawn(pair, arguments.acceptance, name, device, dtype) for name in ("target", "draft")
        ]
        peer = TransformersGenerate(models[0], models[1], arguments.num_speculative_tokens)
    bytes_a_step = on_device.weight_bytes(pair.target, pair.vocab_size, dtype)
    for index, batch in enumerate(arguments.batch):
        if table.seconds_left == 0:
            table.leave_out(f"batch {batch}")
            continue
        # Half for the warm-up's sake: what compiles or captures at a new batch size does so there.
        seconds = table.seconds_left / (len(arguments.batch) - index) / 2
        measure_batch(table, core, peer, batch, seconds, bytes_a_step)
        table.add("graphs", graphs.facts(core))


def show(document: dict[str, Any]) -> None:
    print_facts(document["machine"])
    print(f"Tests on the device: {document.get('tests', 'not run')}")
    print(f"Copy: {document['copy_bandwidth'] / 1e9:.0f} GB/s read and written")
    rates = document["identity_of_bundled_pair"]
    print(f"Bundled pair, same greedy text as {rates['reference']}: {rates['same_text']}")
    misses = rates["misses"]
    for entry in document["identity"]:
        print(f"Batch {entry['batch']}, same greedy text as {entry['reference']}: {entry['same_text']}")
        misses = misses + entry["misses"]
    if misses:
        print_table(misses, "Where texts part, with the target's top-2 margin there")
    if document["results"]:
        print_table(document["results"], "Tokens per second")
        print_table(document["phases"], "A round by phase")
    if document.get("graphs"):
        print_table(document["graphs"], "CUDA graphs")
    if document["left_out"]:
        print(f"Left out for want of time: {', '.join(document['left_out'])}")


def main() -> None:
    table = Table(parse_arguments())
    measure(table)
    show(table.document)
    series: dict[str, dict[float, float]] = {}
    for row in table.document["results"]:
        series.setdefault(row["variant"], {})[row["batch"]] = row["tokens/s"]
    draw = partial(
        lines, series=series, title="Tokens per second", x_label="sequences at a time", y_label="tokens/s"
    )
    save(table.arguments.save, table.document, draw)


if __name__ == "__main__":
    main()
