"""What structured outputs cost and what forced tokens give, on the bundled pair, in one process.

    python -m benchmarks.structured_outputs [--result NAME]

First one stream: the same requests with all drafts, with forced tokens only, without drafts, and
unconstrained; for a schema of which much is forced, one of long strings, and free text before a tool call.
Then 16 streams: the free ones' speed with and without a constrained one among them. At last masks of a wide
vocabulary.
"""

import argparse
import json
import random
import statistics
import string
import time

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from msgspec import structs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.common import CpuWatch, machine, warn_of_others
from benchmarks.result_file import Figure, record
from truedraft.engine.llm import LLM
from truedraft.engine.messages import Failed, Generate, SamplingParams
from truedraft.engine.sampling.grammar import Grammars

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


PROSE = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "story": {"type": "string", "minLength": 200, "maxLength": 400},
    },
    "required": ["title", "story"],
    "additionalProperties": False,
}
# tool_choice auto has this: any text, until a call begins.
BEFORE_A_CALL = r"""%llguidance {}
start: text | opening "{" /[a-z]*/ "}"
opening[lazy]: TEXT "<tool_call>"
text: TEXT
TEXT: /(.|\n)*/"""


def grammar(schema: dict[str, object]) -> str:
    """Returns the grammar that the server makes."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_flexible": False})


PROMPT = "Once upon a time"
NUM_REQUESTS, NUM_STREAMS, REPETITIONS = 40, 16, 7
# Tokens of the constrained stream, which must not end before the free ones.
LONG = 480
WIDE = 131_072


def one_stream(llm: LLM, params: SamplingParams, num_requests: int) -> tuple[float, float]:
    """Rounds and milliseconds per token."""
    num_tokens = num_rounds = 0
    started = time.perf_counter()
    for seed in range(num_requests):
        (completion,) = llm.generate(PROMPT, structs.replace(params, seed=seed))
        num_tokens += len(completion.token_ids)
        num_rounds += completion.num_rounds
    return num_rounds / num_tokens, 1e3 * (time.perf_counter() - started) / num_tokens


def free_streams(llm: LLM, is_constrained: bool) -> float:
    """Tokens per second of each of 15 free streams, while one more is served."""
    core, prompt = llm.core, llm.tokenizer.encode(PROMPT)
    free = SamplingParams(max_tokens=120, ignore_eos=True, seed=1)
    other = structs.replace(free, max_tokens=LONG)
    if is_constrained:
        many = grammar({"type": "array", "items": SCHEMA, "minItems": LONG})
        other = structs.replace(other, grammar=many, ignore_eos=False)
    left = NUM_STREAMS - 1
    for number in range(left):
        core.add(Generate(f"free-{number}", prompt, free))
    core.add(Generate("other", prompt, other))
    num_tokens = 0
    started = time.perf_counter()
    while left:
        for output in core.step():
            assert not isinstance(output, Failed)
            if output.request_id != "other":
                num_tokens += len(output.token_ids)
                left -= output.finish_reason is not None
    seconds = time.perf_counter() - started
    core.abort("other")
    return num_tokens / seconds / (NUM_STREAMS - 1)


def wide_tokenizer() -> LLTokenizer:
    """131,072 tokens: bytes, and random words with and without a space before them."""
    rng = random.Random(0)
    vocab = dict.fromkeys(pre_tokenizers.ByteLevel.alphabet())
    while len(vocab) < WIDE - 1:
        word = "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randint(2, 10)))
        vocab[rng.choice(["", "\u0120"]) + word] = None
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(vocab)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return LLTokenizer(tokenizer.to_str(), n_vocab=WIDE, eos_token=[WIDE - 1])


def mask_microseconds(tokenizer: LLTokenizer, source: str) -> tuple[float, float]:
    """Times a mask, and the slowest, along a text that ``source`` allows, in a sequence that is not the
    grammar's first."""
    grammars = Grammars(lambda: tokenizer)
    microseconds: list[float] = []
    for seed in range(REPETITIONS):
        rng, matcher = random.Random(seed), grammars.matcher(source)
        for _ in range(60):
            started = time.perf_counter()
            mask = matcher.masks([])
            microseconds.append(1e6 * (time.perf_counter() - started))
            assert mask is not None
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            token = int(rng.choice(np.flatnonzero(bits)))
            if token == WIDE - 1:
                break
            matcher.advance([token])
    return statistics.median(microseconds), max(microseconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="of a run")
    parser.add_argument("--repeats", type=int, default=REPETITIONS)
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    watch = CpuWatch()
    llm = LLM()
    constrained = {
        "schema": SamplingParams(max_tokens=200, grammar=grammar(SCHEMA)),
        "prose": SamplingParams(max_tokens=200, grammar=grammar(PROSE)),
        "before a call": SamplingParams(max_tokens=60, grammar=BEFORE_A_CALL),
    }
    methods = {"default": None, "forced tokens": "grammar", "no drafts": "none"}
    ways = {
        **{
            f"{name}, {drafts}": structs.replace(params, method=method)
            for name, params in constrained.items()
            for drafts, method in methods.items()
        },
        "free, default": SamplingParams(max_tokens=60),
        "free, no drafts": SamplingParams(max_tokens=60, method="none"),
    }
    for params in ways.values():
        one_stream(llm, params, 1)
    found = {
        name: [one_stream(llm, params, arguments.requests) for _ in range(arguments.repeats)]
        for name, params in ways.items()
    }
    for name, results in found.items():
        rounds, milliseconds = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"{name:28} {rounds:.2f} rounds and {milliseconds:.2f} ms a token")
    alone, beside = [], []
    for _ in range(arguments.repeats):
        alone.append(free_streams(llm, is_constrained=False))
        beside.append(free_streams(llm, is_constrained=True))
    print(f"16 free streams: {statistics.median(alone):.1f} tokens/s each")
    print(f"15 free ones beside a constrained one: {statistics.median(beside):.1f} tokens/s each")
    record(
        arguments.result,
        what=f"One stream, {arguments.requests} requests a run",
        rows="output, drafts",
        model="bundled pair",
        dtype="the file's own weights",
        num_repeats=arguments.repeats,
        machine=machine() | {"others": warn_of_others(watch)},
        figures=[
            figure
            for name, results in found.items()
            for figure in (
                Figure.of(name, "rounds per token", [rounds for rounds, _ in results]),
                Figure.of(name, "ms per token", [milliseconds for _, milliseconds in results]),
            )
        ],
    )
    tokenizer = wide_tokenizer()
    for name, source in (("any object", grammar({"type": "object"})), ("the schema", grammar(SCHEMA))):
        median, slowest = mask_microseconds(tokenizer, source)
        print(f"mask of {WIDE:,} tokens for {name}: {median:.0f} us, at most {slowest:.0f}")


if __name__ == "__main__":
    main()
