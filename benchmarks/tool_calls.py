"""Answers of agents, which repeat each other:

    python -m benchmarks.tool_calls --target SmolLM2-135M-Instruct.Q4_1.gguf

Requests that differ in their question share a description of three tools; each answer calls one, in JSON. In
one process and interleaved: texts of earlier requests kept (``ngram_pool_tokens``), n-grams of the own text
alone, and no drafts. All that is kept is forgotten before each run, prefixes included. Greedy texts must be
the same in all.
"""

import argparse
import json
from functools import partial

from benchmarks.common import (
    CpuWatch,
    Run,
    interleave,
    machine,
    note,
    print_facts,
    print_table,
    summary,
    warn_if_busy,
    warn_of_others,
)
from benchmarks.engine_runs import Variants, run_engine
from benchmarks.result_file import Figure, record
from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import SamplingParams
from truedraft.engine.process.worker import keep_loaded
from truedraft.engine.proposers.translated.pairing import load_tokenizer

POOL, OWN, NONE = "n-grams, pool", "n-grams", "none"
CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Kyoto", "Quebec", "Nairobi", "Sydney", "Dublin", "Porto", "Delhi")
PEOPLE = ("Anna", "Marco", "Keiko", "Omar", "Lucia", "Peter", "Nadia")
ITEMS = ("green tea", "printer paper", "a desk lamp", "running shoes", "olive oil")
TOOLS = [
    {"name": "get_weather", "parameters": {"city": "string", "unit": "string", "days": "integer"}},
    {"name": "send_message", "parameters": {"recipient": "string", "subject": "string", "body": "string"}},
    {"name": "order_item", "parameters": {"item": "string", "quantity": "integer", "deliver_to": "string"}},
]
# One call of each tool shows the model the form.
EXAMPLES = [
    ("How hot will it be in Madrid tomorrow?", {"city": "Madrid", "unit": "celsius", "days": 1}),
    ("Write to Julia that I am late.", {"recipient": "Julia", "subject": "Delay", "body": "I am late."}),
    ("Get me two notebooks.", {"item": "notebooks", "quantity": 2, "deliver_to": "me"}),
]
SYSTEM = (
    "You are an assistant that calls tools. Answer with one JSON object that has the tool's name and its "
    "arguments, and nothing else. The tools: " + json.dumps(TOOLS)
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="a model with a chat template")
    parser.add_argument("--requests", type=int, default=72)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--pool-tokens", type=int, default=EngineConfig().num_pool_tokens)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: as the engine chooses")
    parser.add_argument("--repeats", type=int, default=5, help="5 or more for numbers worth reporting")
    parser.add_argument("--show", action="store_true", help="print the first answers")
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
    return parser.parse_args()


def questions(number: int) -> list[str]:
    """Returns questions for the three tools by turns, each with other names."""
    asked = []
    for i in range(number):
        city, person, item = CITIES[i % len(CITIES)], PEOPLE[i % len(PEOPLE)], ITEMS[i % len(ITEMS)]
        asked.append(
            (
                f"What will the weather be in {city} for the next {i % 6 + 2} days?",
                f"Tell {person} that the meeting in {city} is moved to {i % 8 + 9} o'clock.",
                f"Order {i % 4 + 1} of {item} for {person}.",
            )[i % 3]
        )
    return asked


def chat(question: str) -> list[dict[str, str]]:
    """Returns the messages that ask a question, after an example of each tool."""
    messages = [{"role": "system", "content": SYSTEM}]
    for tool, (asked, arguments) in zip(TOOLS, EXAMPLES, strict=True):
        call = json.dumps({"name": tool["name"], "arguments": arguments})
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": call}]
    return [*messages, {"role": "user", "content": question}]


def run(core: EngineCore, prompts: list[list[int]], params: SamplingParams, concurrency: int) -> Run:
    core.forget_prefixes()
    return run_engine(core, prompts, params, concurrency)


def main() -> None:
    arguments = parse_arguments()
    busy = warn_if_busy()
    tokenizer = load_tokenizer(arguments.target)
    if tokenizer is None or not tokenizer.chat_template:
        raise SystemExit(f"{arguments.target} has no chat template")
    prompts = [
        list(tokenizer.apply_chat_template(chat(question), add_generation_prompt=True, return_dict=False))
        for question in questions(arguments.requests)
    ]
    variants: Variants = {}
    for name, tokens, length in ((POOL, arguments.pool_tokens, None), (OWN, 0, None), (NONE, 0, 0)):
        core = build_engine(
            EngineConfig(
                target=arguments.target, draft="none", ngram_pool_tokens=tokens, num_threads=arguments.threads
            )
        )
        params = SamplingParams(
            max_tokens=arguments.max_tokens, temperature=0.0, num_speculative_tokens=length
        )
        variants[name] = partial(run, core, prompts, params, arguments.concurrency)
        run(core, prompts[:3], params, arguments.concurrency)
    keep_loaded()
    note("Measuring")
    watch = CpuWatch()
    runs = interleave(variants, arguments.repeats)
    others = warn_of_others(watch)
    expected = runs[NONE][0].token_ids
    if arguments.show:
        for ids in expected[:12]:
            print(repr(tokenizer.decode(ids)))
    figures = []
    rows = summary(runs, {"to_none": dict.fromkeys(variants, NONE), "to_own": dict.fromkeys(variants, OWN)})
    for row in rows:
        name, own = row["variant"], runs[row["variant"]]
        tokens = sum(one.num_tokens for one in own)
        row["passes_per_token"] = 1 - sum(one.num_accepted_tokens for one in own) / tokens
        row["tokens"] = own[0].num_tokens
        row["same_text"] = "yes" if all(one.token_ids == expected for one in own) else "NO"
        speeds, plain = ([one.tokens_per_second for one in some] for some in (own, runs[NONE]))
        figures += [
            Figure.of_ratios(name, "times none", speeds, plain),
            Figure(name, "passes per token", round(row["passes_per_token"], 3)),
        ]
    where = machine() | {"busy": busy}
    print_facts(where | {"others": others})
    print_table(rows, f"{arguments.requests} calls of tools, {arguments.concurrency} at a time")
    record(
        arguments.result,
        what=f"{arguments.requests} answers that call one of three tools, {runs[NONE][0].num_tokens} tokens, "
        f"{arguments.concurrency} at a time",
        rows="drafts",
        model="SmolLM2-135M-Instruct, Q4_1",
        dtype="the file's own weights",
        num_repeats=arguments.repeats,
        machine=where | {"others": others},
        figures=figures,
    )


if __name__ == "__main__":
    main()
