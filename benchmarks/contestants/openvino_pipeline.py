"""OpenVINO GenAI, plain and speculative, in an environment of its own (``--openvino-python``).

Its exporter wants an older transformers than this project's, so both it and the pipeline run there, as
processes. Float32 runs in float32 throughout, bfloat16 in bfloat16. Quantised weights run as OpenVINO does
best, which is its default: 8-bit inputs, bfloat16 in between where the processor multiplies in it, caches in
8 bits.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.common import note
from benchmarks.contestants.other_environment import OtherProcess

PLAIN, SPECULATIVE = "OpenVINO plain", "OpenVINO speculative"
PROCESS = Path(__file__).with_name("openvino_process.py")
# The weights of its exporter that have as many bits as ours.
FORMATS = {
    None: ["fp32"],
    "int8": ["int8"],
    "int4": ["int4", "--group-size", "32", "--sym", "--ratio", "1.0"],
}
# Properties by the type that is computed in; "auto" is OpenVINO's own choice.
PROPERTIES = {
    "float32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "auto": {},
}


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


def process(
    python: Path,
    target: Path,
    draft: Path | None,
    num_speculative_tokens: int,
    num_threads: int,
    concurrency: int,
    dtype: str = "auto",
) -> OtherProcess:
    options = {
        "target": target,
        "draft": draft,
        "num_speculative_tokens": num_speculative_tokens,
        "num_threads": num_threads,
        "concurrency": concurrency,
        "properties": PROPERTIES[dtype],
    }
    return OtherProcess(PLAIN if draft is None else SPECULATIVE, python, PROCESS, options)
