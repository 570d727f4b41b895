"""OpenVINO GenAI, plain and speculative, in an environment of its own (``--openvino-python``).

Its exporter wants an older transformers than this project's, so both it and the pipeline run there, as
processes. Float32 runs in float32 throughout. Quantised weights run as OpenVINO does best, which is its
default: 8-bit inputs, bfloat16 in between where the processor multiplies in it, caches in 8 bits.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.common import Run, note

PLAIN, SPECULATIVE = "OpenVINO plain", "OpenVINO speculative"
PROCESS = Path(__file__).with_name("openvino_process.py")
# The weights of its exporter that have as many bits as ours.
FORMATS = {
    None: ["fp32"],
    "int8": ["int8"],
    "int4": ["int4", "--group-size", "32", "--sym", "--ratio", "1.0"],
}
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def export(checkpoint: str, python: Path, quantize: str | None, folder: Path) -> Path:
    """``checkpoint`` in OpenVINO's format at ``folder``, by its own exporter; kept if it is there already."""
    if folder.exists():
        note(f"Using {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        staged, unfinished = Path(work) / "checkpoint", Path(work) / "model"
        shutil.copytree(Path(checkpoint).resolve(), staged, copy_function=os.symlink)
        simplify_decoder(staged / "tokenizer.json")
        done = subprocess.run(
            [
                *(str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(staged)),
                *("--task", "text-generation-with-past", "--weight-format", *FORMATS[quantize]),
                str(unfinished),
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"OpenVINO's exporter failed on {checkpoint}:\n{done.stderr[-2000:]}")
        unfinished.rename(folder)
    return folder


def simplify_decoder(tokenizer: Path) -> None:
    """Drops decoding steps that OpenVINO lacks: a draft needs a tokenizer, though no text is decoded here."""
    content = json.loads(tokenizer.read_text())
    decoder = content["decoder"]
    if decoder["type"] == "Sequence":
        decoder["decoders"] = [step for step in decoder["decoders"] if "Regex" not in step.get("pattern", {})]
    tokenizer.unlink()  # a link to the checkpoint's
    tokenizer.write_text(json.dumps(content))


class OpenVino:
    """One pipeline in a process; as a context, it ends with it."""

    def __init__(
        self,
        python: Path,
        target: Path,
        draft: Path | None,
        num_speculative_tokens: int,
        num_threads: int,
        concurrency: int,
        *,
        is_float32: bool,
    ) -> None:
        options = {
            "target": str(target),
            "draft": None if draft is None else str(draft),
            "num_speculative_tokens": num_speculative_tokens,
            "num_threads": num_threads,
            "concurrency": concurrency,
            "properties": FLOAT32 if is_float32 else {},
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [str(python), str(PROCESS), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.version = self._read()["version"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self._log.seek(0)
            log = self._log.read()
            self.close()
            raise RuntimeError(f"OpenVINO ended:\n{log[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> Run:
        """Seconds are the pipeline's own: what it takes to reach the process is not among them."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        return Run(sum(map(len, answer["token_ids"])), answer["seconds"], token_ids=answer["token_ids"])

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(30)
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def variants(
    pipelines: Sequence[OpenVino], prompts: Sequence[list[int]], max_tokens: int
) -> dict[str, Callable[[], Run]]:
    """``pipelines``: one without a draft, then one with it, if there is one."""
    names = (PLAIN, SPECULATIVE)
    return {
        name: partial(pipeline.run, prompts, max_tokens)
        for name, pipeline in zip(names, pipelines, strict=False)
    }
