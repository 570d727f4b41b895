"""The page docs/support-matrix.md, written from what tiny pairs really do: python -m tests.support_matrix

One cell is one request parameter under one proposer and one verification rule; ``cell`` runs the engine and
returns the words that are true of it. ``test_support_matrix`` holds the page to that.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch

from tests import naive
from tests.assistants import Shape, save_pair
from tests.engine.grammars import GRAMMAR, allowed, know_grammars, make_tokenizer
from tests.engine.simulation import chi_square
from tests.families import GEMMA4
from tests.models import make_engine, save_perturbed, save_random_llama, stepped
from truedraft.engine.commands.replay import DraftKey, Replayer
from truedraft.engine.commands.replay_round import Fresh, Outcome
from truedraft.engine.commands.trace_file import TracedChoice, TracedRound
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.sequence import sequence_seed
from truedraft.engine.llm import Completion
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.engine.models.heads.assistant import FreshAssistant
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.proposers.assistant import AssistantProposer

PAGE = Path(__file__).parent.parent / "docs" / "support-matrix.md"
VOCAB_SIZE, NUM_TOKENS, STOP_ID, PROMPT = 6, 3, 5, [2, 1, 0, 3, 2, 1, 4, 0]
NUM_SAMPLES, NUM_SEEDS, SIGNIFICANCE = 500, 12, 1e-5
PROPOSERS = ("draft_model", "assistant", "ngram", "none")
RULES = ("rejection", "block", "coupled", "exact match")
EXACT, SAME, EQUAL, REPEATABLE, ALONE, VERIFIED, REFUSED, NO = (
    "exact",
    "same tokens",
    "equal",
    "repeatable",
    "as alone",
    "verified",
    "refused",
    "NO",
)

# Parameters that decide which tokens come, each with a value that matters on the tiny pair.
DECIDING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.4},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.2},
    "presence_penalty": {"presence_penalty": 0.7},
    "frequency_penalty": {"frequency_penalty": 0.6},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {0: 1.5, 2: -2.0}},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [0, 1]},
    "ignore_eos": {"ignore_eos": True},
    "stop_token_ids": {"stop_token_ids": [0, 3]},
    "grammar": {"grammar": GRAMMAR},
}
# These parameters decide how a draft model draws, and so nothing of what comes out.
DRAWING: dict[str, dict[str, Any]] = {
    f"draft_sample_method: {method}": {"draft_sample_method": method}
    for method in ("greedy", "probabilistic")
}
REPORTING = ("logprobs", "prompt_logprobs", "seed", "n", "trace")
PARAMETERS = (*DECIDING, *DRAWING, *REPORTING)

SETTINGS: dict[str, Any] = {
    "num_speculative_tokens": 2,
    "ngram_min_match": 1,
    "max_num_sequences": 128,
    "method": "auto",
}

Law = dict[tuple[int, ...], float]


@dataclass
class Pair:
    """Two models that agree often, not always; the engines around them and fresh ones to compare with."""

    target: FreshModel
    drafts: Mapping[DraftKey, Fresh]
    cores: dict[str, EngineCore]

    @classmethod
    def build(cls, folder: Path) -> "Pair":
        target = save_random_llama(
            folder / "target", seed=21, vocab_size=VOCAB_SIZE, layers=1, hidden=16, eos_token_id=STOP_ID
        )
        draft = save_perturbed(folder / "draft", target, seed=22, noise=0.1)
        core = know_grammars(make_engine(target, draft, **SETTINGS))
        fresh = [FreshModel(path, LoadOptions()) for path in (target, draft)]
        return cls(fresh[0], {DraftKey("draft_model"): fresh[1]}, dict.fromkeys(PROPOSERS, core))

    @classmethod
    def with_assistant(cls, folder: Path) -> "Pair":
        """Makes a Gemma 4 with an assistant; none of its tokens is all but certain."""
        sizes = {"vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE}
        shape = Shape(GEMMA4 | sizes | {"final_logit_softcapping": 5.0})
        pair = save_pair(folder, shape, seed=23, eos_token_id=STOP_ID)
        core = know_grammars(make_engine(pair.target, pair.path, **SETTINGS))
        (proposer,) = core.scheduler.proposers
        assert isinstance(proposer, AssistantProposer)
        assistant = FreshAssistant(core.target.model, proposer.runner.assistant)
        target = FreshModel(pair.target, LoadOptions())
        return cls(target, {DraftKey("assistant", "own"): assistant}, dict.fromkeys(PROPOSERS, core))

    def run(self, proposer: str, params: list[SamplingParams], n: int = 1) -> list[Completion]:
        """Entries are one request each; choices come one after the other."""
        core = self.cores[proposer]
        each = [msgspec.structs.replace(p, method=proposer) for p in params]
        for number, request_params in enumerate(each):
            core.add(Generate(str(number), PROMPT, request_params, n))
        completions = [Completion() for _ in range(len(params) * n)]
        while core.has_work:
            for output in stepped(core):
                completions[int(output.request_id) * n + output.index].add(output)
        return completions

    def logits(self, token_ids: list[int]) -> naive.Row:
        key = tuple(token_ids)
        if key not in self._rows:
            row = self.target.logits(token_ids, VOCAB_SIZE)[-1]
            self._rows[key] = row.double().numpy()
        return self._rows[key]

    def __post_init__(self) -> None:
        self._rows: dict[tuple[int, ...], naive.Row] = {}


def pairs_of(folder: Path) -> dict[str, Pair]:
    """Makes the pair of each proposer."""
    usual = dict.fromkeys(PROPOSERS, Pair.build(folder / "usual"))
    return usual | {"assistant": Pair.with_assistant(folder / "gemma")}


def params_of(rule: str, **given: Any) -> SamplingParams:
    decoding = {"temperature": 0} if rule == "exact match" else {"temperature": 0.9, "verification": rule}
    return SamplingParams(**{"max_tokens": NUM_TOKENS + 1, **decoding, **given})


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def seeded(params: SamplingParams, num_seeds: int) -> list[SamplingParams]:
    return [msgspec.structs.replace(params, seed=seed) for seed in range(num_seeds)]


def cell(pair: Pair, parameter: str, proposer: str, rule: str) -> str:
    try:
        return _served(pair, parameter, proposer, rule)
    except RequestError as error:
        return REFUSED if parameter.split(":")[0] in str(error) else NO


def _served(pair: Pair, parameter: str, proposer: str, rule: str) -> str:
    if parameter == "temperature" and rule == "exact match":
        return _same_tokens(pair, params_of(rule), proposer)  # 0 is what makes it this rule
    if given := DECIDING.get(parameter) or DRAWING.get(parameter):
        params = params_of(rule, **given)
        if rule in ("coupled", "exact match"):
            return _same_tokens(pair, params, proposer)
        return EXACT if p_value(pair, params, proposer) > SIGNIFICANCE else NO
    check: Callable[[Pair, str, str], str] = globals()[f"_{parameter}"]
    return check(pair, proposer, rule)


def p_value(pair: Pair, params: SamplingParams, proposer: str) -> float:
    law = law_of(pair, params)
    said = tokens_of(pair.run(proposer, seeded(params, NUM_SAMPLES)))
    counts = Counter(tuple(tokens[:NUM_TOKENS]) for tokens in said)
    texts = sorted(law.keys() | counts.keys())
    return chi_square(
        np.array([counts[text] for text in texts], dtype=float), np.array([law.get(t, 0.0) for t in texts])
    )


def law_of(pair: Pair, params: SamplingParams) -> Law:
    """Exact distribution of the first tokens, or of the whole output if a stop token ends it before."""
    stop_ids = sorted(pair.target.stop_token_ids(params))
    tokenizer = make_tokenizer()
    law: Law = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: Law = {}
        for tokens, probability in law.items():
            if tokens and tokens[-1] in stop_ids:
                longer[tokens] = probability
                continue
            logits = pair.logits([*PROMPT, *tokens])
            if params.grammar is not None:
                logits = np.where(allowed(tokenizer, params, tokens), logits, -np.inf)
            row = naive.distribution(logits, params, PROMPT, tokens, stop_ids)
            for token, share in enumerate(row):
                if share > 0:
                    longer[*tokens, token] = probability * float(share)
        law = longer
    return law


def _same_tokens(pair: Pair, params: SamplingParams, proposer: str) -> str:
    """Tokens are those of plain decoding, and plain decoding itself has the right law."""
    longer = msgspec.structs.replace(params, max_tokens=12)
    requests = seeded(longer, NUM_SEEDS)
    if tokens_of(pair.run(proposer, requests)) != tokens_of(pair.run("none", requests)):
        return NO
    if proposer == "none" and p_value(pair, params, proposer) <= SIGNIFICANCE:
        return NO
    return SAME


def _logprobs(pair: Pair, proposer: str, rule: str) -> str:
    for completion in pair.run(proposer, seeded(params_of(rule, logprobs=2, max_tokens=12), NUM_SEEDS)):
        text = PROMPT + completion.token_ids
        rows = pair.target.logits(text, VOCAB_SIZE).log_softmax(-1)[len(PROMPT) - 1 :]
        if not _agree(completion.logprobs, rows, completion.token_ids):
            return NO
    return EQUAL


def _prompt_logprobs(pair: Pair, proposer: str, rule: str) -> str:
    [completion] = pair.run(proposer, [params_of(rule, prompt_logprobs=2)])
    rows = pair.target.logits(PROMPT, VOCAB_SIZE).log_softmax(-1)
    logprobs = completion.prompt_logprobs or []
    return EQUAL if _agree(logprobs[1:], rows, PROMPT[1:]) else NO


def _agree(logprobs: list[Any], rows: torch.Tensor, token_ids: list[int]) -> bool:
    if [entry.token_id for entry in logprobs] != token_ids:
        return False
    for entry, row in zip(logprobs, rows, strict=False):
        claimed = torch.tensor([entry.logprob, *(value for _, value in entry.top)])
        actual = row[[entry.token_id, *(token_id for token_id, _ in entry.top)]]
        if not torch.allclose(claimed, actual, atol=1e-4):
            return False
    return True


def _seed(pair: Pair, proposer: str, rule: str) -> str:
    """The same tokens as plain decoding, or at least the same ones again in another batch."""
    params = params_of(rule, max_tokens=12)
    together = tokens_of(pair.run(proposer, seeded(params, NUM_SEEDS)))
    alone = [pair.run(proposer, [request])[0].token_ids for request in seeded(params, NUM_SEEDS)]
    if together != alone:
        return NO
    plain = tokens_of(pair.run("none", seeded(params, NUM_SEEDS)))
    return SAME if together == plain and rule in ("coupled", "exact match") else REPEATABLE


def _n(pair: Pair, proposer: str, rule: str) -> str:
    params = params_of(rule, max_tokens=12, seed=7)
    choices = tokens_of(pair.run(proposer, [params], n=3))
    alone = [msgspec.structs.replace(params, seed=sequence_seed(7, index)) for index in range(3)]
    return ALONE if choices == tokens_of(pair.run(proposer, alone)) else NO


def _trace(pair: Pair, proposer: str, rule: str) -> str:
    params = params_of(rule, max_tokens=12, seed=3, trace=True, method=proposer)
    core = pair.cores[proposer]
    core.add(Generate("traced", PROMPT, params))
    rounds = []
    while core.has_work:
        rounds += [TracedRound.of(output.trace) for output in stepped(core) if output.trace]
    replayer = Replayer(pair.target, pair.drafts, params, tolerance=1e-4)
    reports = list(replayer.replay(TracedChoice(PROMPT, 3, rounds)))
    return VERIFIED if all(report.outcome is not Outcome.WRONG for report in reports) else NO


INTRODUCTION = """\
# Support matrix

Written by `python -m tests.support_matrix` from what the engine does with tiny pairs of models;
`tests/test_support_matrix.py` fails if the page and the engine differ. Rows are request parameters, columns
are who drafts (`speculation.method`) and how drafts are verified (`speculation.verification`; exact match is
temperature 0).

| word | what was checked |
|---|---|
| exact | the joint distribution of the first three tokens is the one enumerated from fresh forwards of the \
target (chi-square, {samples} seeds) |
| same tokens | for each seed, the tokens of plain decoding; those of plain decoding are exact |
| equal | values as in a fresh forward of the final text, within 0.0001 |
| repeatable | the same tokens again with the same seed and the same draft, alone or in a batch; with \
another draft they may be others |
| as alone | each choice has the text that a request for it alone would get, with the seed derived for it |
| verified | an offline replay confirms every decision |
| refused | a 400 names the field and what to use instead |

Every parameter works with every proposer and every rule, but for one: what an n-gram drafts is not drawn, so
it cannot be drawn at random.
"""


def page(cells: dict[tuple[str, str, str], str]) -> str:
    parts = [INTRODUCTION.format(samples=NUM_SAMPLES)]
    for proposer in PROPOSERS:
        rows = [
            f"| {parameter} | {' | '.join(cells[parameter, proposer, rule] for rule in RULES)} |"
            for parameter in PARAMETERS
        ]
        head = f"| {proposer} | {' | '.join(RULES)} |\n|{'---|' * (len(RULES) + 1)}"
        parts.append("\n".join([head, *rows]) + "\n")
    return "\n".join(parts)


def all_cells(pairs: Mapping[str, Pair]) -> dict[tuple[str, str, str], str]:
    return {
        (parameter, proposer, rule): cell(pairs[proposer], parameter, proposer, rule)
        for parameter in PARAMETERS
        for proposer in PROPOSERS
        for rule in RULES
    }


def write() -> None:
    with TemporaryDirectory() as folder:
        PAGE.write_text(page(all_cells(pairs_of(Path(folder)))))


if __name__ == "__main__":
    write()
