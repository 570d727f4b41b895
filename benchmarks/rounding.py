"""Compares rounding inputs to 8 bits with float32: python -m benchmarks.rounding model.gguf --questions FILE

A quantised GGUF file is served with integer sums, for which the inputs of layers are rounded to 8 bits. The
reference is the same file with its weights dequantised to float32 and nothing rounded. It answers 300
questions greedily with 16 tokens each; then the served model reads prompts and answers, and tells how likely
each token of an answer is and whether it is the most likely one there. llama.cpp takes part with the address
of its server, which has loaded the same file (``--llama-cpp http://127.0.0.1:8080``); it gets the same ids.

Questions are drawn with a fixed seed from JSONL files with the keys of HumanEval, GSM8K or MT-Bench
(``prompt``, ``question``, ``turns``), the same number from each file as far as it has them.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.request import Request, urlopen

from benchmarks.common import machine, note, print_table
from benchmarks.result_file import Figure, record, table_of
from truedraft.engine.llm import LLM, SamplingParams
from truedraft.engine.messages import TokenLogprob

NUM_QUESTIONS = 300
NUM_TOKENS = 16
SEED = 80
CHUNK = 20
TIMEOUT_SECONDS = 300
# llama.cpp names this many of the most likely tokens; one that is not among them counts as the last of them.
NUM_RANKED = 100


class Read(NamedTuple):
    """Describes one token of the reference's answer as a model reads it."""

    logprob: float
    is_most_likely: bool


def question_of(line: dict[str, Any]) -> str:
    """Returns the text of one line of a file, by whichever key it has."""
    if "turns" in line:
        return str(line["turns"][0])
    return str(line.get("prompt") or line["question"])


def draw_questions(paths: Sequence[Path]) -> list[str]:
    """Draws the questions; a file that has fewer than its share leaves the rest to the others."""
    files = [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in paths]
    numbers = random.Random(SEED)
    drawn: list[str] = []
    for done, lines in enumerate(sorted(files, key=len)):
        share = (NUM_QUESTIONS - len(drawn)) // (len(files) - done)
        drawn += [question_of(line) for line in numbers.sample(lines, min(share, len(lines)))]
    return drawn


Item = TypeVar("Item")


def chunks(items: Sequence[Item], name: str) -> Iterator[Sequence[Item]]:
    """Yields some items at a time, and notes how many are done."""
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]
        note(f"{name}: {min(start + CHUNK, len(items))} of {len(items)}")


def answer_greedily(llm: LLM, prompts: Sequence[list[int]]) -> list[list[TokenLogprob]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=0)
    return [
        list(completion.logprobs or ())
        for some in chunks(prompts, "answers")
        for completion in llm.generate(list(some), params, progress=False)
    ]


def read_answers(
    llm: LLM, name: str, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> list[list[Read]]:
    """Returns what ``llm`` says of each token of the answers."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    found = []
    for some in chunks(list(zip(prompts, answers, strict=True)), name):
        texts = [[*prompt, *answer] for prompt, answer in some]
        for completion, (_, answer) in zip(llm.generate(texts, params, progress=False), some, strict=True):
            assert completion.prompt_logprobs is not None
            entries = [entry for entry in completion.prompt_logprobs[-len(answer) :] if entry is not None]
            found.append([Read(entry.logprob, entry.rank == 1) for entry in entries])
    return found


class LlamaServer:
    """Asks llama.cpp's server for one token at a time; its cache keeps what it has read of a prompt."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def next_tokens(self, ids: list[int]) -> dict[int, float]:
        """Returns log-probabilities of the most likely next tokens, the most likely first."""
        body = {"prompt": ids, "n_predict": 1, "n_probs": NUM_RANKED, "temperature": 0, "cache_prompt": True}
        request = Request(
            f"{self.address}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            (token,) = json.load(answer)["completion_probabilities"]
        return {entry["id"]: entry["logprob"] for entry in token["top_logprobs"]}

    def read_answers(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[list[Read]]:
        return [
            [self.read(prompt + answer[:place], token) for place, token in enumerate(answer)]
            for some in chunks(list(zip(prompts, answers, strict=True)), "llama.cpp")
            for prompt, answer in some
        ]

    def read(self, ids: list[int], token: int) -> Read:
        ranked = self.next_tokens(ids)
        return Read(ranked.get(token, min(ranked.values())), next(iter(ranked)) == token)


def figures(row: str, reference: Sequence[list[Read]], found: Sequence[list[Read]]) -> list[Figure]:
    """Compares a model's readings with the reference's, which are its own greedy answers."""
    pairs = [
        pair for theirs, ours in zip(reference, found, strict=True) for pair in zip(theirs, ours, strict=True)
    ]
    logprobs = [read.logprob for answer in found for read in answer]
    of_reference = statistics.fmean(theirs.logprob for theirs, _ in pairs)
    cells = {
        f"first token is the reference's, of {len(found)}": sum(answer[0].is_most_likely for answer in found),
        f"all of the first {NUM_TOKENS} are": sum(
            all(read.is_most_likely for read in answer) for answer in found
        ),
        "all tokens, %": round(100 * statistics.fmean(ours.is_most_likely for _, ours in pairs), 2),
        "perplexity above float32's, %": round(
            100 * math.expm1(of_reference - statistics.fmean(logprobs)), 2
        ),
        "mean change of a log-probability": round(
            statistics.fmean(abs(theirs.logprob - ours.logprob) for theirs, ours in pairs), 4
        ),
    }
    return [Figure(row, column, value) for column, value in cells.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a quantised GGUF file with a chat template")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="JSONL files")
    parser.add_argument("--llama-cpp", metavar="URL", help="llama.cpp's server with the same file")
    parser.add_argument("--result", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    with LLM(str(arguments.model), draft="none", dtype="float32", cache_dtype="float32") as llm:
        prompts = [
            list(
                llm.tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
                )
            )
            for question in draw_questions(arguments.questions)
        ]
        greedy = answer_greedily(llm, prompts)
    answers = [[entry.token_id for entry in answer] for answer in greedy]
    reference = [[Read(entry.logprob, True) for entry in answer] for answer in greedy]
    found = figures("the weights in float32", reference, reference)
    with LLM(str(arguments.model), draft="none") as llm:
        found += figures("Truedraft", reference, read_answers(llm, "Truedraft", prompts, answers))
    if arguments.llama_cpp:
        server = LlamaServer(arguments.llama_cpp)
        found += figures("llama.cpp", reference, server.read_answers(prompts, answers))
    print_table(table_of(found, "computed by"), "Rounding of layers' inputs to 8 bits")
    record(
        arguments.result,
        what=f"{len(prompts)} questions: greedy answers of the weights in float32, as the others read them",
        rows="computed by",
        model=arguments.model.name,
        dtype="the file's weights, inputs of layers in 8 bits except in float32",
        num_repeats=1,
        machine=machine(),
        figures=found,
    )


if __name__ == "__main__":
    main()
