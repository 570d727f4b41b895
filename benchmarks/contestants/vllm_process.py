"""vLLM on a CPU in a process of its own, see ``OtherProcess``."""

import json
import os
import sys
import time
from typing import Any

options: dict[str, Any] = json.loads(sys.argv[1])
# vLLM logs to standard output, where answers are expected.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ["OMP_NUM_THREADS"] = str(options["num_threads"])
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options['num_threads'] - 1}"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

from vllm import LLM, SamplingParams  # noqa: E402 - reads them


def main() -> None:
    engine = LLM(
        model=options["target"],
        dtype="float32",
        max_num_seqs=options["concurrency"],
        max_model_len=options["context"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        params = SamplingParams(
            max_tokens=request["max_tokens"], temperature=0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        start = time.perf_counter()
        results = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        said = [list(result.outputs[0].token_ids) for result in results]
        print(json.dumps({"seconds": seconds, "token_ids": said}), file=answers, flush=True)


if __name__ == "__main__":
    main()
