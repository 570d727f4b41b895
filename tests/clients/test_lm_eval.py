"""lm-evaluation-harness through ``local-completions``, compared with transformers computing the same."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.clients.conftest import MODEL, ROOT, TARGET, Server

TASKS = Path(__file__).parent / "lm_eval_tasks"
TOLERANCE = 1e-3
# The server keeps keys and values in 16 bits, so a sum over many tokens is as exact as its size allows.
RELATIVE = 1e-4
MAX_TOKENS = 40  # stories_generate.yaml has the same
STOPS = (".", "!")

# The harness may send its requests in these ways.
WAYS = {
    "tokens": {},
    "strings": {"tokenized_requests": False},
    "batches of tokens": {"batch_size": 4},
    "batches of strings": {"batch_size": 4, "tokenized_requests": False},
    "at once": {"num_concurrent": 4},
}


class Reference:
    """The target alone, computed by transformers from the whole text at once."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(TARGET)
        self.model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    @torch.no_grad()
    def log_likelihood(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """Returns the sum over the continuation's tokens, and whether each of them is the most likely one."""
        logits = self.model(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 : -1]
        wanted = torch.tensor(continuation)
        chosen = logits.log_softmax(-1).gather(-1, wanted[:, None])
        return float(chosen.sum()), bool((logits.argmax(-1) == wanted).all())

    def of_ending(self, context: str, ending: str) -> tuple[float, bool]:
        start = self.encode(context)
        whole = self.encode(context + ending)
        assert whole[: len(start)] == start, "the test's endings begin where tokens begin"
        return self.log_likelihood(start, whole[len(start) :])

    def of_text(self, text: str) -> float:
        """From its first token on, after the token that begins or ends texts."""
        prefix = self.tokenizer.bos_token_id
        if prefix is None:
            prefix = self.tokenizer.eos_token_id
        return self.log_likelihood([prefix], self.encode(text))[0]

    @torch.no_grad()
    def go_on(self, text: str) -> str:
        """Greedily, until one of STOPS, without it."""
        ids = torch.tensor([self.encode(text)])
        output = self.model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)[0, ids.shape[1] :]
        said = self.tokenizer.decode(output, skip_special_tokens=True)
        return said[: min((said.find(stop) for stop in STOPS if stop in said), default=len(said))]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks name their data by its path in the checkout."""
    monkeypatch.chdir(ROOT)


def evaluate(server: Server, task: str, **options: Any) -> dict[str, Any]:
    """The harness's results and samples of one task."""
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": MODEL,
            "base_url": f"{server.url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": str(TARGET),
            "max_length": 1024,
            "max_retries": 1,
            **options,
        },
        tasks=[task],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    assert results is not None
    return {"metrics": results["results"][task], "samples": results["samples"][task]}


@pytest.mark.parametrize("way", WAYS)
def test_log_likelihoods_and_greedy_flags(server: Server, reference: Reference, way: str) -> None:
    samples = evaluate(server, "stories_choice", **WAYS[way])["samples"]
    got, want = [], []
    for sample in samples:
        doc = sample["doc"]
        want += [reference.of_ending(doc["beginning"], ending) for ending in doc["endings"]]
        got += [(float(value), flag) for [(value, flag)] in sample["resps"]]
    assert len(got) == 18
    wanted = pytest.approx([value for value, _ in want], abs=TOLERANCE, rel=RELATIVE)
    assert [value for value, _ in got] == wanted
    flags = [flag for _, flag in want]
    assert [flag for _, flag in got] == flags
    assert sum(flags) == 3, "three endings are what the model itself would say"


@pytest.mark.parametrize("way", ["tokens", "at once"])
def test_perplexity(server: Server, reference: Reference, way: str) -> None:
    found = evaluate(server, "stories_perplexity", **WAYS[way])
    texts = [doc["beginning"] + doc["endings"][doc["best"]] for doc in (s["doc"] for s in found["samples"])]
    want = [reference.of_text(text) for text in texts]
    got = [float(sample["resps"][0][0]) for sample in found["samples"]]
    assert got == pytest.approx(want, abs=TOLERANCE, rel=RELATIVE)
    num_bytes = sum(len(text.encode()) for text in texts)
    perplexity = math.exp(-sum(want) / num_bytes)
    assert found["metrics"]["byte_perplexity,none"] == pytest.approx(perplexity, rel=TOLERANCE)


@pytest.mark.parametrize("way", ["tokens", "strings", "batches of tokens"])
def test_greedy_continuations(server: Server, reference: Reference, way: str) -> None:
    samples = evaluate(server, "stories_generate", **WAYS[way])["samples"]
    got = [sample["resps"][0][0] for sample in samples]
    assert got == [reference.go_on(sample["doc"]["beginning"]) for sample in samples]
    assert all(got)
