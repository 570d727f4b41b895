"""vLLM on a CPU, plain, in float32, in an environment of its own (``--vllm-python``)."""

from pathlib import Path

from benchmarks.contestants.other_environment import OtherProcess

PLAIN = "vLLM plain"
PROCESS = Path(__file__).with_name("vllm_process.py")


def process(python: Path, target: str, num_threads: int, concurrency: int, context: int) -> OtherProcess:
    """``context``: tokens of a sequence."""
    options = {"target": target, "num_threads": num_threads, "concurrency": concurrency, "context": context}
    return OtherProcess(PLAIN, python, PROCESS, options)
