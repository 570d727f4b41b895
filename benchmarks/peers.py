"""Compares with transformers, llama.cpp, OpenVINO GenAI and vLLM: python -m benchmarks.peers --pair 290m

The same weights, prompts, draft length and threads for everybody, in the same run and interleaved: A, B, C,
A, B, C, ... Greedy, exactly ``--max-tokens`` tokens for each prompt, one prompt after the other or
``--concurrency`` of them at a time. Ratios are taken within a repeat, then the median of the repeats; texts
are compared token by token. llama.cpp joins in when its binaries are named (``--llama-cpp-bin build/bin
--llama-cpp-src llama.cpp``), OpenVINO and vLLM when environments are (``--openvino-python venv/bin/python``,
``--vllm-python``); see benchmarks/README.md. With ``--gguf Q4_0`` Truedraft and llama.cpp run from one
quantised file, with ``--target FILE.gguf`` from that one, with ``--quantize int8`` Truedraft and OpenVINO
quantise one checkpoint; ``--prompt-length 512 --max-tokens 1`` compares prompts. ``--dtype bfloat16``:
arithmetic of Truedraft, transformers and OpenVINO, with ``--gguf BF16`` llama.cpp's too.
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from benchmarks import formula, identity, synthetic_gguf
from benchmarks.common import (
    CpuWatch,
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
from benchmarks.contestants import (
    llama_cpp,
    openvino_pipeline,
    other_environment,
    transformers_generate,
    truedraft,
    vllm_cpu,
)
from benchmarks.engine_runs import Variants
from benchmarks.pairs import BUNDLED, Pair, add_pair_options, chat_prompt_ids, prompt_ids, resolve_pair
from benchmarks.plots import bars
from benchmarks.result_file import Figure, record
from truedraft.engine.native.threads import set_num_threads

# What is compared with what; those that ran are printed.
RATIOS = [
    (truedraft.PLAIN, transformers_generate.GENERATE),
    (truedraft.PLAIN, llama_cpp.PLAIN),
    (truedraft.PLAIN, openvino_pipeline.PLAIN),
    (truedraft.PLAIN, vllm_cpu.PLAIN),
    (truedraft.SPECULATIVE, truedraft.PLAIN),
    (truedraft.DEFAULT, truedraft.PLAIN),
    (truedraft.DEFAULT, llama_cpp.PLAIN),
    (truedraft.SPECULATIVE, transformers_generate.GENERATE),
    (truedraft.SPECULATIVE, transformers_generate.ASSISTED),
    (truedraft.SPECULATIVE, llama_cpp.PLAIN),
    (truedraft.SPECULATIVE, llama_cpp.SPECULATIVE),
    (truedraft.SPECULATIVE, openvino_pipeline.PLAIN),
    (truedraft.SPECULATIVE, openvino_pipeline.SPECULATIVE),
]
# The draft has this type with ``--gguf``.
DRAFT_TYPE = "Q8_0"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_pair_options(parser, "290m")
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every contestant")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--auto", action="store_true", help="a variant that decides itself what to draft")
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        help="also run a head that drafts this many tokens of the vocabulary",
    )
    parser.add_argument("--num-prompts", type=int, default=1, help="prompts of one run")
    parser.add_argument(
        "--chats", choices=["questions", "edits"], help="prompts through the target's chat template"
    )
    parser.add_argument(
        "--concurrency", type=int, default=1, help="of them at a time; above 1 transformers is left out"
    )
    parser.add_argument("--repeats", type=int, default=5, help="5 or more for numbers worth reporting")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--llama-cpp-bin", type=Path, help="folder with llama-server")
    parser.add_argument("--llama-cpp-src", type=Path, help="folder with convert_hf_to_gguf.py")
    parser.add_argument(
        "--gguf", metavar="TYPE", help="quantise the target to it (Q8_0, Q4_0, Q4_K_M), the draft to Q8_0"
    )
    parser.add_argument(
        "--quantize", choices=["int8", "int4"], help="quantise the checkpoint, for OpenVINO too"
    )
    parser.add_argument(
        "--openvino-python", type=Path, help="python of an environment with openvino-genai, optimum-intel"
    )
    parser.add_argument("--vllm-python", type=Path, help="python of an environment with vLLM for CPUs")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: float32, or a quantised file's own"
    )
    parser.add_argument("--prepare", action="store_true", help="make the files in --work and stop")
    parser.add_argument("--save", type=Path, help="write JSON to this file, and a PNG next to it")
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
    return parser.parse_args()


def kept_name(folder: str) -> str:
    """Files are kept for other runs: other checkpoints must not find them under the same name."""
    path = Path(folder).resolve()
    return f"{path.parent.name}-{crc32(str(path.parent).encode()):08x}-{path.name}"


def gguf_files(arguments: argparse.Namespace, pair: Pair, work: Path) -> list[Path | None]:
    if pair.is_gguf:
        return [Path(pair.target), pair.draft_file and Path(pair.draft_file)]
    if arguments.llama_cpp_src is None:
        raise SystemExit("--llama-cpp-bin needs --llama-cpp-src, for the converter")
    files: list[Path | None] = []
    for folder, kind in ((pair.target, arguments.gguf), (pair.draft_file, arguments.gguf and DRAFT_TYPE)):
        file = None
        if folder is not None:
            to = work / "gguf" / f"{kept_name(folder)}.gguf"
            file = llama_cpp.export_gguf(folder, arguments.llama_cpp_src, to)
            if kind:
                file = llama_cpp.quantise_gguf(file, arguments.llama_cpp_bin, kind)
        files.append(file)
    return files


def openvino_folders(arguments: argparse.Namespace, pair: Pair, work: Path) -> list[Path | None]:
    python, quantize = arguments.openvino_python, arguments.quantize
    return [
        folder
        and openvino_pipeline.export(
            folder, python, quantize, work / "openvino" / f"{kept_name(folder)}-{quantize or 'float32'}"
        )
        for folder in (pair.target, pair.draft)
    ]


def measured_ratios(runs: Runs) -> list[dict[str, Any]]:
    return [
        {"ratio": f"{ours} / {theirs}", "median": median_ratio(runs[ours], runs[theirs])}
        for ours, theirs in RATIOS
        if ours in runs and theirs in runs
    ]


@dataclass(frozen=True)
class Contest:
    """Has what is run, and what is needed to judge it: ``model`` is transformers', if it takes part, and
    ``process_ids`` are of those that run elsewhere."""

    variants: Variants
    prompts: list[list[int]]
    model: Any | None
    process_ids: list[int]


def check_options(arguments: argparse.Namespace) -> None:
    if arguments.gguf and not arguments.llama_cpp_bin:
        raise SystemExit("--gguf needs --llama-cpp-bin, for llama-quantize")
    if arguments.gguf and arguments.quantize:
        raise SystemExit("--gguf and --quantize: the weights are quantised once")
    if arguments.gguf and arguments.openvino_python:
        raise SystemExit("--openvino-python has no GGUF files: name --quantize instead of --gguf")
    if arguments.quantize and arguments.llama_cpp_bin:
        raise SystemExit("llama.cpp quantises nothing at load: name --gguf instead of --quantize")
    if arguments.vllm_python and (arguments.gguf or arguments.quantize):
        raise SystemExit("--vllm-python runs in float32 only: no --gguf, no --quantize")


def prepare(arguments: argparse.Namespace, work: Path, stack: ExitStack) -> Contest:
    """Makes the files, loads what runs here, and starts what runs in processes of its own."""
    check_options(arguments)
    pair = resolve_pair(arguments, arguments.pair, work)
    if pair.is_gguf and (arguments.gguf or arguments.quantize or arguments.openvino_python):
        raise SystemExit(
            f"{pair.target} is quantised already: no --gguf, no --quantize, no --openvino-python"
        )
    gguf = gguf_files(arguments, pair, work) if arguments.llama_cpp_bin else None
    exported = openvino_folders(arguments, pair, work) if arguments.openvino_python else None
    if arguments.prepare:
        raise SystemExit(f"Prepared {work}")
    k, threads, concurrency = arguments.num_speculative_tokens, arguments.threads, arguments.concurrency
    set_num_threads(threads)
    is_float32 = not (arguments.gguf or arguments.quantize or pair.is_gguf)
    dtype = arguments.dtype or ("float32" if is_float32 else "auto")
    target, draft = gguf if gguf and arguments.gguf else (pair.target, pair.draft)
    engine = partial(
        truedraft.Truedraft,
        str(target),
        None if draft is None else str(draft),
        k,
        threads,
        "cpu",
        dtype,
        auto=arguments.auto,
        quantize=arguments.quantize or "none",
    )
    num_drafted = arguments.draft_vocab_size
    engines = [engine(draft_vocab_size="full" if num_drafted else "auto")]
    if num_drafted:
        engines.append(engine(draft_vocab_size=num_drafted, note=f"{num_drafted:,} tokens drafted"))
    ours = engines[0]
    if arguments.chats:
        prompts = chat_prompt_ids(pair, arguments.num_prompts, arguments.chats)
    else:
        prompts = prompt_ids(pair, arguments.num_prompts, arguments.prompt_length)
    variants = {}
    for each in engines:
        variants |= each.variants(prompts, arguments.max_tokens, concurrency)
    model: Any | None = None
    if not arguments.no_transformers and is_float32 and concurrency == 1:
        peer = transformers_generate.TransformersGenerate.from_folders(
            pair.target, pair.draft, k, "cpu", getattr(torch, dtype)
        )
        model = peer.target
        variants |= peer.variants(prompts, arguments.max_tokens)
    length, process_ids = max(map(len, prompts)) + arguments.max_tokens, []
    if gguf is not None:
        answered = {token for row in variants[truedraft.PLAIN]().token_ids for token in row}
        unsaid = max(set(range(ours.core.target.vocab_size)) - answered)
        # In float32 all keep float32 in their caches; a quantised file is run as llama.cpp does best.
        cache_type = "f32" if is_float32 else "f16"
        servers = start_llama_servers(arguments, gguf, length + 64, unsaid, cache_type, stack)
        variants |= llama_cpp.variants(servers, prompts, arguments.max_tokens)
        process_ids += [server.process.pid for server in servers]
    processes = start_environments(arguments, pair.target, exported, dtype, length, stack)
    variants |= other_environment.variants(processes, prompts, arguments.max_tokens)
    process_ids += [process.process.pid for process in processes]
    return Contest(variants, prompts, model, process_ids)


def start_llama_servers(
    arguments: argparse.Namespace,
    gguf: Sequence[Path | None],
    context: int,
    unsaid: int,
    cache_type: str,
    stack: ExitStack,
) -> list[llama_cpp.LlamaServer]:
    """Starts one without the draft, and one with it, if there is one."""
    k, threads, concurrency = arguments.num_speculative_tokens, arguments.threads, arguments.concurrency
    target, draft = gguf
    assert target is not None
    servers = []
    for file in (None, draft)[: 1 if draft is None else 2]:
        server = llama_cpp.LlamaServer(
            arguments.llama_cpp_bin, target, file, k, threads, context, unsaid, cache_type, concurrency
        )
        servers.append(stack.enter_context(closing(server)))
    return servers


def start_environments(
    arguments: argparse.Namespace,
    checkpoint: str,
    exported: Sequence[Path | None] | None,
    dtype: str,
    length: int,
    stack: ExitStack,
) -> list[other_environment.OtherProcess]:
    """Starts OpenVINO without the draft, and with it, and vLLM, where their environments are named."""
    k, threads, concurrency = arguments.num_speculative_tokens, arguments.threads, arguments.concurrency
    processes = []
    if exported is not None:
        target, draft = exported
        assert target is not None
        for folder in (None, draft)[: 1 if draft is None else 2]:
            process = openvino_pipeline.process(
                arguments.openvino_python, target, folder, k, threads, concurrency, dtype
            )
            processes.append(stack.enter_context(closing(process)))
    if arguments.vllm_python:
        process = vllm_cpu.process(arguments.vllm_python, checkpoint, threads, concurrency, length)
        processes.append(stack.enter_context(closing(process)))
    return processes


def measure(arguments: argparse.Namespace, work: Path, stack: ExitStack) -> dict[str, Any]:
    """Everything that the tables show, as one document."""
    busy = warn_if_busy()
    contest = prepare(arguments, work, stack)
    note("One run of each to warm up")
    interleave(contest.variants, 1)
    note("Measuring")
    watch = CpuWatch(contest.process_ids)
    runs = interleave(contest.variants, arguments.repeats)
    others = warn_of_others(watch)

    reference = transformers_generate.GENERATE if contest.model is not None else truedraft.PLAIN
    outputs = {name: repeats[0].token_ids for name, repeats in runs.items()}
    rows = summary(runs, {"to_generate": dict.fromkeys(runs, reference)})
    for row, same in zip(rows, identity.same_text(outputs, reference).values(), strict=True):
        row["same_text"] = same
    misses = identity.misses(outputs, reference, contest.prompts, contest.model)
    plain, speculative = runs[truedraft.PLAIN], runs.get(truedraft.SPECULATIVE)
    # The only token of an answer comes with its prompt.
    has_rounds = arguments.max_tokens > 1
    return {
        "machine": machine()
        | {"torch": torch.__version__, "threads": arguments.threads, "busy": busy, "others": others},
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "results": rows,
        "ratios": measured_ratios(runs),
        "formula": formula.speedup(plain, speculative) if has_rounds and speculative else None,
        "phases": [
            {"truedraft": name, **formula.phases(repeats)}
            for name, repeats in (("plain", plain), ("speculative", speculative))
            if has_rounds and repeats
        ],
        "misses": [miss._asdict() for miss in misses],
        "tokens_per_second": {
            name: [run.tokens_per_second for run in repeats] for name, repeats in runs.items()
        },
    }


def show(document: dict[str, Any], arguments: argparse.Namespace) -> None:
    print_facts(document["machine"])
    print(
        f"{arguments.target or arguments.pair} pair, {numbers_of(arguments)}, "
        f"greedy, {arguments.concurrency} at a time, {arguments.num_speculative_tokens} drafts a round; "
        f"{arguments.num_prompts} prompts x "
        f"{arguments.max_tokens} tokens a run, medians of {arguments.repeats} interleaved runs"
    )
    print_table(document["results"], "Tokens per second")
    print_table(document["ratios"], "Ratios within a repeat, medians")
    if document["phases"]:
        print_table(document["phases"], "A round of Truedraft's, by phase")
    if document["formula"]:
        print_table([document["formula"]], "Speed-up: tokens a round / (drafts x c + v), and achieved")
    if document["misses"]:
        print_table(document["misses"], "Answers unlike the reference's, with the top-2 margin")


def numbers_of(arguments: argparse.Namespace) -> str:
    """Names the types of weights and arithmetic."""
    target = Path(arguments.target or "")
    in_file = target.stem.rpartition(".")[2] if target.suffix.lower() == ".gguf" else None
    if not arguments.target and arguments.pair in synthetic_gguf.SHAPES:
        in_file = arguments.file_type
    return " ".join(filter(None, (arguments.gguf, arguments.quantize, in_file, arguments.dtype))) or "float32"


def model_name(arguments: argparse.Namespace) -> str:
    if arguments.target:
        return Path(arguments.target).name.split(".")[0]
    return "bundled pair" if arguments.pair == BUNDLED else f"{arguments.pair.upper()} pair"


def figures(speeds: dict[str, list[float]]) -> list[Figure]:
    """Returns tokens per second of each program, and how many times as fast the best way of Truedraft is."""
    ours = next(
        name for name in (truedraft.DEFAULT, truedraft.SPECULATIVE, truedraft.PLAIN) if name in speeds
    )
    rows = []
    for name, repeats in speeds.items():
        rows.append(Figure.of(name, "tokens/s", repeats))
        if name != ours:
            rows.append(Figure.of_ratios(name, f"{ours}, times as fast", speeds[ours], repeats))
    return rows


def main() -> None:
    arguments = parse_arguments()
    with ExitStack() as stack:
        work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        document = measure(arguments, work, stack)
    show(document, arguments)
    save(arguments.save, document, lambda figure: bars(figure, document["results"], "Tokens per second"))
    prompts = {"questions": "answers to questions", "edits": "edits of programs"}.get(
        arguments.chats, "texts"
    )
    if arguments.num_prompts == 1:
        prompts = "text"
    streams = "One greedy stream" if arguments.concurrency == 1 else f"{arguments.concurrency} greedy streams"
    record(
        arguments.result,
        what=f"{streams}, {arguments.num_prompts} {prompts} a run, {arguments.max_tokens} tokens each",
        rows="program",
        model=model_name(arguments) + (f", {arguments.chats}" if arguments.chats else ""),
        dtype=numbers_of(arguments),
        num_repeats=arguments.repeats,
        machine=document["machine"],
        figures=figures(document["tokens_per_second"]),
    )


if __name__ == "__main__":
    main()
