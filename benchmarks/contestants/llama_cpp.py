"""llama.cpp's server, plain and speculative, on the same weights: in float32, or in the same quantised file.

The pair is exported by llama.cpp's own converter. Prompts and answers are token ids, so the tokenizer in the
GGUF files is only a stand-in: checkpoints are exported with the synthetic pair's, which the converter knows.
Where there is a draft two servers run, one of them without it: a server that has one computes with it even
when nothing is drafted.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from benchmarks.common import Run, note, timed
from benchmarks.synthetic_tokenizer import save_tokenizer

PLAIN, SPECULATIVE = "llama.cpp plain", "llama.cpp speculative"
MTP = Path("mtp")
START_SECONDS, ANSWER_SECONDS = 120, 600
# What belongs to the tokenizer in a checkpoint folder.
TOKENIZER_FILES = ("tokenizer*", "*.jinja", "special_tokens_map.json", "vocab*", "merges.txt")


def export_gguf(checkpoint: str, source: Path, gguf: Path) -> Path:
    """``checkpoint`` as float32 GGUF at ``gguf``, by llama.cpp's converter; kept if it is there already."""
    if gguf.exists():
        note(f"Using {gguf}")
        return gguf
    gguf.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=gguf.parent) as folder:
        staged = Path(folder) / "checkpoint"
        shutil.copytree(checkpoint, staged, ignore=shutil.ignore_patterns(*TOKENIZER_FILES))
        config = json.loads((staged / "config.json").read_text())
        save_tokenizer(staged, config["vocab_size"])
        unfinished = Path(folder) / "model.gguf"
        done = subprocess.run(
            [
                *(sys.executable, str(source / "convert_hf_to_gguf.py"), str(staged)),
                *("--outtype", "f32", "--outfile", str(unfinished)),
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"llama.cpp's converter failed on {checkpoint}:\n{done.stderr[-2000:]}")
        unfinished.rename(gguf)
    return gguf


def quantise_gguf(gguf: Path, binaries: Path, kind: str) -> Path:
    """Quantises ``gguf`` to type ``kind`` (``Q4_K_M``) with llama.cpp's program, unless it is there."""
    quantised = gguf.with_name(f"{gguf.stem}-{kind}.gguf")
    if quantised.exists():
        note(f"Using {quantised}")
        return quantised
    unfinished = quantised.with_suffix(".unfinished")
    command = [str(binaries / "llama-quantize"), str(gguf), str(unfinished), kind]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"llama-quantize failed on {gguf}:\n{done.stderr[-2000:]}")
    unfinished.rename(quantised)
    return quantised


class LlamaServer:
    """Runs one ``llama-server`` process, which ends with the context."""

    def __init__(
        self,
        binaries: Path,
        target: Path,
        draft: Path | None,
        num_speculative_tokens: int,
        num_threads: int,
        context: int,
        end_of_text: int,
        cache_type: str = "f32",
        concurrency: int = 1,
    ) -> None:
        """``context``: of each of ``concurrency`` slots. ``end_of_text`` is an id that no answer has:
        ignoring the end, llama.cpp never says that token, where others say theirs and go on. It has to have
        one."""
        executable = binaries / "llama-server"
        if not executable.exists():
            raise FileNotFoundError(f"{binaries} has no llama-server")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = [
            *(str(executable), "--model", str(target), "--host", "127.0.0.1", "--port", str(self._port)),
            *("--threads", str(num_threads), "--threads-batch", str(num_threads)),
            *("--ctx-size", str(concurrency * context), "--parallel", str(concurrency), "--temp", "0"),
            *("--cache-type-k", cache_type, "--cache-type-v", cache_type),
            *("--override-kv", f"tokenizer.ggml.eos_token_id=int:{end_of_text}"),
        ]
        if draft is not None:
            command += draft_options(executable, draft, num_speculative_tokens, num_threads, cache_type)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        # A missing network must not matter: nothing is fetched.
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env=os.environ | {"LLAMA_OFFLINE": "1"}
        )
        self._threads = ThreadPoolExecutor(concurrency)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._answer("/health")
                return
            except OSError:  # not open, or HTTP 503 while it loads
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                log = self.log()
                self.close()
                raise RuntimeError(f"llama-server did not start:\n{log[-2000:]}")
            time.sleep(0.05)

    def _answer(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)) as connection:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        if response.status != 200:
            raise OSError(f"llama-server answers {response.status}: {content[:300].decode(errors='replace')}")
        answer: dict[str, Any] = json.loads(content)
        return answer

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> Run:
        """One request for each prompt, as many at a time as there are slots; seconds are the client's, HTTP
        included."""
        answers: list[dict[str, Any]] = []

        def ask(prompt: list[int]) -> dict[str, Any]:
            return self._answer("/completion", request(prompt, max_tokens))

        def work() -> None:
            answers.extend(self._threads.map(ask, prompts))

        seconds = timed(work)
        token_ids = [answer["tokens"] for answer in answers]
        num_tokens = sum(map(len, token_ids))
        drafted = sum(answer["timings"].get("draft_n", 0) for answer in answers)
        accepted = sum(answer["timings"].get("draft_n_accepted", 0) for answer in answers)
        # The first token of each answer comes with its prompt, all others from rounds.
        rounds = num_tokens - len(prompts) - accepted if drafted else 0
        return Run(num_tokens, seconds, rounds, drafted, accepted, token_ids)

    def close(self) -> None:
        self._threads.shutdown()
        self.process.terminate()
        self.process.wait(30)
        self._log.close()


def draft_options(
    executable: Path, draft: Path, num_speculative_tokens: int, num_threads: int, cache_type: str
) -> list[str]:
    """Always ``num_speculative_tokens`` drafts, however sure the draft is: a file, or ``mtp`` for the head in
    the target's. Options were renamed over time."""
    if draft == MTP:
        return ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(num_speculative_tokens)]
    known = subprocess.run([str(executable), "--help"], capture_output=True, text=True).stdout
    options = ["--model-draft", str(draft), "--threads-draft", str(num_threads), "--draft-p-min", "0"]
    if "--spec-draft-n-max" in known:
        options += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(num_speculative_tokens)]
        options += ["--spec-draft-n-min", "0"]
        options += ["--spec-draft-type-k", cache_type, "--spec-draft-type-v", cache_type]
    else:
        options += ["--draft-max", str(num_speculative_tokens), "--draft-min", "0"]
    return options


def request(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": max_tokens,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        # Greedy with the shortest chain of samplers there is.
        "temperature": 0,
        "samplers": ["top_k"],
        "top_k": 1,
    }


def variants(
    servers: Sequence[LlamaServer], prompts: Sequence[list[int]], max_tokens: int
) -> dict[str, Callable[[], Run]]:
    """``servers``: one without a draft, then one with it, if there is one."""
    names = (PLAIN, SPECULATIVE)
    return {
        name: partial(server.run, prompts, max_tokens) for name, server in zip(names, servers, strict=False)
    }
