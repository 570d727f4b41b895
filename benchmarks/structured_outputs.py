"""What structured outputs cost and what forced tokens give, on the bundled pair, in one process.

    python -m benchmarks.structured_outputs

First one stream: the same requests with forced tokens drafted, without drafts, and unconstrained. Then 16
streams: the free ones' speed with and without a constrained one among them.
"""

import json
import statistics
import time

from llguidance import LLMatcher
from msgspec import structs

from engine.core.engine import EngineCore
from engine.llm import LLM
from engine.messages import Failed, Generate, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 16}, "city": {"enum": ["Rome", "Oslo"]}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "colours", "address"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), defaults={"whitespace_flexible": False})
PROMPT = "Once upon a time"
NUM_REQUESTS, NUM_STREAMS, REPETITIONS = 40, 16, 7


def one_stream(llm: LLM, params: SamplingParams) -> tuple[float, float]:
    """Rounds and milliseconds per token."""
    num_tokens = num_rounds = 0
    started = time.perf_counter()
    for seed in range(NUM_REQUESTS):
        (completion,) = llm.generate(PROMPT, structs.replace(params, seed=seed))
        num_tokens += len(completion.token_ids)
        num_rounds += completion.num_rounds
    return num_rounds / num_tokens, 1e3 * (time.perf_counter() - started) / num_tokens


def free_streams(llm: LLM, num_constrained: int) -> float:
    """Tokens per second of each free stream, while ``num_constrained`` others are served beside them."""
    core, prompt = llm.core, llm.tokenizer.encode(PROMPT)
    free = SamplingParams(max_tokens=120, ignore_eos=True, seed=1)
    num_free = NUM_STREAMS - 1
    for number in range(num_free):
        core.add(Generate(f"free-{number}", prompt, free))
    others = structs.replace(free, grammar=GRAMMAR, ignore_eos=False) if num_constrained else free
    num_others = num_tokens = 0
    started = time.perf_counter()
    left = num_free
    _add_other(core, prompt, others, num_others)
    while left:
        for output in core.step():
            assert not isinstance(output, Failed)
            if output.request_id.startswith("free"):
                num_tokens += len(output.token_ids)
                left -= output.finish_reason is not None
            elif output.finish_reason is not None:
                num_others += 1
                _add_other(core, prompt, others, num_others)
    seconds = time.perf_counter() - started
    core.abort(f"other-{num_others}")
    return num_tokens / seconds / num_free


def _add_other(core: EngineCore, prompt: list[int], params: SamplingParams, number: int) -> None:
    core.add(Generate(f"other-{number}", prompt, params))


def main() -> None:
    llm = LLM()
    constrained = SamplingParams(max_tokens=200, grammar=GRAMMAR)
    ways = {
        "constrained, default": constrained,
        "constrained, no drafts": structs.replace(constrained, method="none"),
        "free, default": SamplingParams(max_tokens=60),
        "free, no drafts": SamplingParams(max_tokens=60, method="none"),
    }
    for params in ways.values():
        one_stream(llm, params)
    found = {name: [one_stream(llm, params) for _ in range(REPETITIONS)] for name, params in ways.items()}
    for name, results in found.items():
        rounds, milliseconds = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"{name:24} {rounds:.2f} rounds and {milliseconds:.2f} ms a token")
    alone, beside = [], []
    for _ in range(REPETITIONS):
        alone.append(free_streams(llm, 0))
        beside.append(free_streams(llm, 1))
    print(f"16 free streams: {statistics.median(alone):.1f} tokens/s each")
    print(f"15 free ones beside a constrained one: {statistics.median(beside):.1f} tokens/s each")


if __name__ == "__main__":
    main()
