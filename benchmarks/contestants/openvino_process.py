"""OpenVINO GenAI's pipeline in a process of its own, see ``OtherProcess``."""

import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = options["concurrency"]
    scheduler.cache_size = 1
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options["num_threads"]} | options["properties"]
    draft = options["draft"]
    if draft is not None:
        properties["draft_model"] = openvino_genai.draft_model(draft, "CPU", **properties)
    pipeline = openvino_genai.ContinuousBatchingPipeline(options["target"], scheduler, "CPU", properties)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        config = openvino_genai.GenerationConfig(
            max_new_tokens=request["max_tokens"],
            ignore_eos=True,
            eos_token_id=0,  # there has to be one
            do_sample=False,
            **({} if draft is None else {"num_assistant_tokens": options["num_speculative_tokens"]}),
        )
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in request["prompts"]]
        start = time.perf_counter()
        results = pipeline.generate(prompts, [config] * len(prompts))
        seconds = time.perf_counter() - start
        answers = [list(result.m_generation_ids[0]) for result in results]
        print(json.dumps({"seconds": seconds, "token_ids": answers}), flush=True)


if __name__ == "__main__":
    main()
