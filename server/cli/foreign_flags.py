"""Flags of vLLM, llama.cpp and Ollama, and what does the same here. docs/migrating.md is written from it."""

from collections.abc import Mapping

# Flag of another server -> what to use, as it ends the sentence "use ...".
USE: Mapping[str, str] = {
    "--model": "--target",
    "-m": "--target",
    "--model-path": "--target",
    "-hf": "--target with the file's hub id, owner/repository/model.gguf",
    "--hf-repo": "--target with the file's hub id, owner/repository/model.gguf",
    "--tokenizer": "the tokenizer in the model's folder",
    "--speculative-config": "--draft, --method and --num-speculative-tokens",
    "--speculative-model": "--draft",
    "-md": "--draft",
    "--model-draft": "--draft",
    "--spec-type": "--method",
    "--spec-draft-n-max": "--num-speculative-tokens",
    "--draft-max": "--num-speculative-tokens",
    "--draft-n": "--num-speculative-tokens",
    "--alias": "--served-model-name",
    "-a": "--served-model-name",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--context-length": "--max-model-len",
    "--max-num-seqs": "--max-num-sequences",
    "-np": "--max-num-sequences",
    "--parallel": "--max-num-sequences",
    "-b": "--max-num-batched-tokens",
    "--batch-size": "--max-num-batched-tokens",
    "--gpu-memory-utilization": "--cache-memory-share",
    "--mem-fraction-static": "--cache-memory-share",
    "--kv-cache-memory-bytes": "--cache-memory",
    "--enable-prefix-caching": "--prefix-caching",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--no-cache-prompt": "--no-prefix-caching",
    "--kv-events-config": "--kv-events-endpoint and --kv-events-topic",
    "-t": "--num-threads",
    "--threads": "--num-threads",
    "--pipeline-parallel-size": "--device-map auto",
    "--split-mode": "--device-map auto",
    "--data-parallel-size": "--workers",
    "--chat-template-file": "--chat-template",
    "--metrics": "no flag: metrics are always on; --metrics-prefix renames them",
    "--api-prefix": "--root-path",
    "--ssl-cert-file": "--ssl-certfile",
    "--ssl-key-file": "--ssl-keyfile",
    "--allowed-origins": "--cors-origins",
    "--quantization": "--quantize int8, int4 or fp8",
    "--cache-type-k": "--cache-dtype",
    "-ctk": "--cache-dtype",
    "--cache-type-v": "--cache-dtype",
    "-ctv": "--cache-dtype",
    "--kv-cache-dtype": "--cache-dtype",
    "--cache-type-k-draft": "--draft-cache-dtype",
    "-ctkd": "--draft-cache-dtype",
    "--cache-type-v-draft": "--draft-cache-dtype",
    "-ctvd": "--draft-cache-dtype",
    "--tool-call-parser": "no flag: the chat template tells how tools are called",
    "--enable-auto-tool-choice": "no flag: tools are always on",
    "--reasoning-parser": "no flag: the chat template tells how reasoning is marked",
    "--enable-lora": "no flag: --lora-modules is enough",
    "--lora": "--lora-modules name=folder",
    "--lora-paths": "--lora-modules",
    "--max-loras-per-batch": "--max-loras",
    "--jinja": "no flag: chat templates are always Jinja's",
    "--disable-log-requests": "--log-level warning",
    "--uvicorn-log-level": "--log-level",
    "--verbose": "--log-level debug",
    "-v": "--log-level debug",
}

# Flags without an equivalent: what stands in their place, as a sentence of its own.
DEVICE = "--device decides where the whole model runs."
NONE: Mapping[str, str] = {
    "-ngl": DEVICE,
    "--n-gpu-layers": DEVICE,
    "--gpu-layers": DEVICE,
    "--mmproj": "Pictures are read by models in transformers' form (docs/images.md); the text part of a GGUF "
    "file is served without it.",
    "--limit-mm-per-prompt": "--max-images is the largest number of pictures in a request.",
    "--enforce-eager": "CUDA graphs are taken where they help.",
}


def hint(flag: str) -> str:
    """Returns the end of an error's message about ``flag``; empty if no other server is known to have it."""
    if flag in USE:
        return f" Use {USE[flag]}."
    return f" {NONE[flag]}" if flag in NONE else ""


def table() -> str:
    """Returns the rows of docs/migrating.md that say what each flag is here."""
    flags: dict[str, list[str]] = {}
    for flag in (*USE, *NONE):
        flags.setdefault(hint(flag).strip(), []).append(f"`{flag}`")
    rows = [f"| {', '.join(names)} | {said} |" for said, names in flags.items()]
    return "\n".join(["| flag | here |", "|---|---|", *rows])
