"""What the rounding of layers' inputs to 8 bits changes: python -m benchmarks.rounding model.gguf

A quantised file is served with integer sums, whose inputs are rounded. The reference is the same file with
its weights dequantised to float32 and nothing rounded. Of 300 questions: how often the first greedy token is
the reference's, how often the first tokens all are, and how likely the reference's own answer is to each, in
nats a token. llama.cpp joins in with the address of its server, which has loaded the same file
(``--llama-cpp http://127.0.0.1:8080``); it is asked for the tokens of the same prompts, token by token.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from urllib.request import Request, urlopen

from benchmarks.common import machine, note
from benchmarks.result_file import Figure, record
from truedraft.engine.llm import LLM, SamplingParams

NUM_TOKENS = 8
TIMEOUT_SECONDS = 120
# llama.cpp names so many of the most likely tokens; one that is not among them counts as the last of them.
NUM_RANKED = 100

THINGS = (
    *("France", "Japan", "Brazil", "Egypt", "Canada", "India", "Norway", "Spain", "Kenya", "Peru", "Italy"),
    *("Greece", "China", "Mexico", "Poland", "Turkey", "Chile", "Sweden", "Cuba", "Iran", "water", "gold"),
    *("salt", "iron", "glass", "paper", "bread", "milk", "honey", "coffee", "a river", "a desert"),
    *("an island", "the moon", "a volcano", "a forest", "the ocean", "a glacier", "a cat", "a whale"),
    *("an eagle", "a spider", "a horse", "a tiger", "music", "chess", "football", "painting", "poetry"),
    "mathematics",
)
FORMS = (
    "What is {} known for?",
    "Tell me one fact about {}.",
    "Write a sentence about {}.",
    "Why do people like {}?",
    "What is the best thing about {}?",
    "Explain {} to a child.",
)


def questions() -> list[str]:
    """Returns 300 questions: each form with each of 50 things."""
    return [form.format(thing) for form in FORMS for thing in THINGS]


def prompts_of(llm: LLM) -> list[list[int]]:
    """Returns the questions as token ids, by the model's chat template."""
    return [
        list(
            llm.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
        )
        for question in questions()
    ]


def greedy(llm: LLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    return [completion.token_ids for completion in llm.generate(list(prompts), params, progress=False)]


def nats(llm: LLM, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
    """Returns for each answer minus the mean log-probability of its tokens."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    found = []
    for completion, answer in zip(llm.generate(whole, params, progress=False), answers, strict=True):
        assert completion.prompt_logprobs is not None
        entries = completion.prompt_logprobs[-len(answer) :]
        found.append(-statistics.fmean(entry.logprob for entry in entries if entry is not None))
    return found


class LlamaServer:
    """Asks llama.cpp's server for one token at a time; what it has read of a prompt stays in its cache."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def ranked(self, ids: list[int]) -> dict[int, float]:
        """Returns log-probabilities of the most likely next tokens, the most likely first."""
        body = {"prompt": ids, "n_predict": 1, "n_probs": NUM_RANKED, "temperature": 0, "cache_prompt": True}
        request = Request(
            f"{self.address}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            (token,) = json.load(answer)["completion_probabilities"]
        return {entry["id"]: entry["logprob"] for entry in token["top_logprobs"]}

    def greedy(self, prompt: list[int], length: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < length:
            ids.append(next(iter(self.ranked([*prompt, *ids]))))
        return ids

    def nats(self, prompt: list[int], answer: list[int]) -> float:
        found = []
        for place, token in enumerate(answer):
            ranked = self.ranked([*prompt, *answer[:place]])
            found.append(ranked.get(token, min(ranked.values())))
        return -statistics.fmean(found)


def figures(
    row: str, expected: Sequence[list[int]], answers: Sequence[list[int]], surprise: Sequence[float]
) -> list[Figure]:
    pairs = list(zip(expected, answers, strict=True))
    first = sum(one[0] == other[0] for one, other in pairs)
    same = sum(one == other[: len(one)] for one, other in pairs)
    mean = statistics.fmean(surprise)
    note(f"{row}: {first} first tokens, {same} beginnings of {len(pairs)}; {mean:.4f} nats")
    return [
        Figure(row, f"first token equal, of {len(pairs)}", first),
        Figure(row, f"first {NUM_TOKENS} tokens equal", same),
        Figure(row, "nats a token of the reference's answer", round(mean, 4)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--llama-cpp", metavar="URL", help="llama.cpp's server with the same file")
    parser.add_argument("--result", help="name of the file in benchmarks/results")
    arguments = parser.parse_args()
    with LLM(arguments.model, draft="none", dtype="float32", cache_dtype="float32") as reference:
        prompts = prompts_of(reference)
        expected = greedy(reference, prompts)
        found = figures("dequantised float32", expected, expected, nats(reference, prompts, expected))
    with LLM(arguments.model, draft="none") as served:
        found += figures("Truedraft", expected, greedy(served, prompts), nats(served, prompts, expected))
    if arguments.llama_cpp:
        server = LlamaServer(arguments.llama_cpp)
        answers = [
            server.greedy(prompt, len(answer)) for prompt, answer in zip(prompts, expected, strict=True)
        ]
        surprise = [server.nats(prompt, answer) for prompt, answer in zip(prompts, expected, strict=True)]
        found += figures("llama.cpp", expected, answers, surprise)
    record(
        arguments.result,
        what="Greedy beginnings of 300 questions, and how likely the reference's are",
        rows="computed by",
        model=arguments.model.rpartition("/")[2],
        dtype="the file's weights; inputs of layers in 8 bits, but for the reference",
        num_repeats=1,
        machine=machine(),
        figures=found,
    )


if __name__ == "__main__":
    main()
