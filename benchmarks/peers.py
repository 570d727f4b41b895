"""Foretoken beside transformers and llama.cpp: python -m benchmarks.peers --pair 290m

The same weights, prompts, draft length and threads for everybody, in the same run and interleaved: A, B, C,
A, B, C, ... One stream, greedy, exactly ``--max-tokens`` tokens for each prompt. Ratios are taken within a
repeat, then the median of the repeats; texts are compared token by token. llama.cpp joins in when its
binaries are named (``--llama-cpp-bin build/bin --llama-cpp-src llama.cpp``); see benchmarks/README.md. With
``--gguf Q4_0`` both run from one quantised file; ``--prompt-length 512 --max-tokens 1`` compares prompts.
``--dtype bfloat16``: ours and transformers' arithmetic, with ``--gguf BF16`` llama.cpp's too.
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from benchmarks import formula, identity
from benchmarks.common import (
    CpuWatch,
    Run,
    Runs,
    interleave,
    machine,
    median_ratio,
    note,
    print_facts,
    print_table,
    save,
    summary,
    warn_if_busy,
    warn_of_others,
)
from benchmarks.contestants import foretoken, llama_cpp, transformers_generate
from benchmarks.pairs import add_pair_options, prompt_ids, resolve_pair
from benchmarks.plots import bars

# What is compared with what; those that ran are printed.
RATIOS = [
    (foretoken.PLAIN, transformers_generate.GENERATE),
    (foretoken.PLAIN, llama_cpp.PLAIN),
    (foretoken.SPECULATIVE, foretoken.PLAIN),
    (foretoken.SPECULATIVE, transformers_generate.GENERATE),
    (foretoken.SPECULATIVE, transformers_generate.ASSISTED),
    (foretoken.SPECULATIVE, llama_cpp.PLAIN),
    (foretoken.SPECULATIVE, llama_cpp.SPECULATIVE),
]
# Of the draft with ``--gguf``.
DRAFT_TYPE = "Q8_0"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_pair_options(parser, "290m")
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every contestant")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-prompts", type=int, default=1, help="prompts of one run, one after the other")
    parser.add_argument("--repeats", type=int, default=5, help="5 or more for numbers worth reporting")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--llama-cpp-bin", type=Path, help="folder with llama-server")
    parser.add_argument("--llama-cpp-src", type=Path, help="folder with convert_hf_to_gguf.py")
    parser.add_argument(
        "--gguf", metavar="TYPE", help="quantise the target to it (Q8_0, Q4_0, Q4_K_M), the draft to Q8_0"
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: float32, or a quantised file's own"
    )
    parser.add_argument("--prepare", action="store_true", help="make the files in --work and stop")
    parser.add_argument("--save", type=Path, help="write JSON to this file, and a PNG beside it")
    return parser.parse_args()


def gguf_files(arguments: argparse.Namespace, folders: tuple[str, str], work: Path) -> tuple[Path, Path]:
    if arguments.llama_cpp_src is None:
        raise SystemExit("--llama-cpp-bin needs --llama-cpp-src, for the converter")
    # Files are kept for other runs: other pairs must not find them under the same name.
    name = f"{Path(folders[0]).parent.name}-{crc32(str(Path(folders[0]).resolve()).encode()):08x}"
    target, draft = (
        llama_cpp.export_gguf(folder, arguments.llama_cpp_src, work / "gguf" / f"{name}-{role}.gguf")
        for folder, role in zip(folders, ("target", "draft"), strict=True)
    )
    if arguments.gguf:
        binaries = arguments.llama_cpp_bin
        target = llama_cpp.quantise_gguf(target, binaries, arguments.gguf)
        draft = llama_cpp.quantise_gguf(draft, binaries, DRAFT_TYPE)
    return target, draft


def measured_ratios(runs: Runs) -> list[dict[str, Any]]:
    return [
        {"ratio": f"{ours} / {theirs}", "median": median_ratio(runs[ours], runs[theirs])}
        for ours, theirs in RATIOS
        if ours in runs and theirs in runs
    ]


def measure(arguments: argparse.Namespace, work: Path, stack: ExitStack) -> dict[str, Any]:
    """Everything that the tables show, as one document."""
    busy = warn_if_busy()
    if arguments.gguf and not arguments.llama_cpp_bin:
        raise SystemExit("--gguf needs --llama-cpp-bin, for llama-quantize")
    pair = resolve_pair(arguments, arguments.pair, work)
    if pair.draft is None:
        raise SystemExit("--target needs --draft")
    folders = (pair.target, pair.draft)
    k, threads = arguments.num_speculative_tokens, arguments.threads
    gguf = gguf_files(arguments, folders, work) if arguments.llama_cpp_bin else None
    if arguments.prepare:
        raise SystemExit(f"Prepared {work}")
    torch.set_num_threads(threads)
    dtype = arguments.dtype or ("auto" if arguments.gguf else "float32")
    files = map(str, gguf) if gguf and arguments.gguf else folders
    ours = foretoken.Foretoken(*files, k, threads, "cpu", dtype)
    prompts = prompt_ids(pair, arguments.num_prompts, arguments.prompt_length)
    variants: dict[str, Callable[[], Run]] = dict(ours.variants(prompts, arguments.max_tokens))
    model: Any | None = None
    if not arguments.no_transformers and not arguments.gguf:
        peer = transformers_generate.TransformersGenerate.from_folders(
            *folders, k, "cpu", getattr(torch, dtype)
        )
        model = peer.target
        variants |= peer.variants(prompts, arguments.max_tokens)
    process_ids = []
    if gguf is not None:
        context = max(map(len, prompts)) + arguments.max_tokens + 64
        answered = {token for row in variants[foretoken.PLAIN]().token_ids for token in row}
        unsaid = max(set(range(ours.core.target.vocab_size)) - answered)
        # In float32 all keep float32 in their caches; a quantised file is run as llama.cpp does best.
        cache_type = "f16" if arguments.gguf else "f32"
        servers = [
            stack.enter_context(
                llama_cpp.LlamaServer(
                    *(arguments.llama_cpp_bin, gguf[0], draft, k, threads, context, unsaid, cache_type)
                )
            )
            for draft in (None, gguf[1])
        ]
        process_ids = [server.process.pid for server in servers]
        variants |= llama_cpp.variants(servers[0], servers[1], prompts, arguments.max_tokens)
    note("One run of each to warm up")
    interleave(variants, 1)
    note("Measuring")
    watch = CpuWatch(process_ids)
    runs = interleave(variants, arguments.repeats)
    others = warn_of_others(watch)

    reference = transformers_generate.GENERATE if model is not None else foretoken.PLAIN
    outputs = {name: repeats[0].token_ids for name, repeats in runs.items()}
    rows = summary(runs, {"to_generate": dict.fromkeys(runs, reference)})
    for row, same in zip(rows, identity.same_text(outputs, reference).values(), strict=True):
        row["same_text"] = same
    plain, speculative = runs[foretoken.PLAIN], runs[foretoken.SPECULATIVE]
    # The only token of an answer comes with its prompt.
    has_rounds = arguments.max_tokens > 1
    return {
        "machine": machine()
        | {"torch": torch.__version__, "threads": threads, "busy": busy, "others": others},
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "results": rows,
        "ratios": measured_ratios(runs),
        "formula": formula.speedup(plain, speculative) if has_rounds else None,
        "phases": [
            {"foretoken": name, **formula.phases(repeats)}
            for name, repeats in (("plain", plain), ("speculative", speculative))
            if has_rounds
        ],
        "misses": [miss._asdict() for miss in identity.misses(outputs, reference, prompts, model)],
        "tokens_per_second": {
            name: [run.tokens_per_second for run in repeats] for name, repeats in runs.items()
        },
    }


def show(document: dict[str, Any], arguments: argparse.Namespace) -> None:
    print_facts(document["machine"])
    kind = " ".join(filter(None, (arguments.gguf, arguments.dtype))) or "float32"
    print(
        f"{arguments.target or arguments.pair} pair, {kind}, greedy, one stream, "
        f"{arguments.num_speculative_tokens} drafts a round; {arguments.num_prompts} prompts x "
        f"{arguments.max_tokens} tokens a run, medians of {arguments.repeats} interleaved runs"
    )
    print_table(document["results"], "Tokens per second")
    print_table(document["ratios"], "Ratios within a repeat, medians")
    if document["phases"]:
        print_table(document["phases"], "A round of Foretoken's, by phase")
    if document["formula"]:
        print_table([document["formula"]], "Speed-up: tokens a round / (drafts x c + v), and achieved")
    if document["misses"]:
        print_table(document["misses"], "Answers unlike the reference's, with the top-2 margin")


def main() -> None:
    arguments = parse_arguments()
    with ExitStack() as stack:
        work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        document = measure(arguments, work, stack)
    show(document, arguments)
    save(arguments.save, document, lambda figure: bars(figure, document["results"], "Tokens per second"))


if __name__ == "__main__":
    main()
