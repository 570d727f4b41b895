"""Random engines under random requests; each answer must be that of plain decoding, alone.

An engine has any budget of tokens from 1 on, any block size, few blocks, and drafts in any way. Its requests
come at any time with any priority and parameters, and some are aborted. ``tests.faults.soak`` runs many.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.engine.grammars import END, GRAMMAR, VOCAB_SIZE, know_grammars
from tests.engine.planners import draft_cache
from tests.models import make_engine, save_perturbed, save_random_llama
from truedraft.engine import build
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.state_slots import StateSlots
from truedraft.engine.messages import Generate, SamplingParams, TokenLogprob, TokenOutput
from truedraft.engine.rounds.calibrate import calibrate

CONTEXT = 96
MAX_STEPS = 20_000
# Rounding moves log-probabilities by less than this.
TOLERANCE = 1e-3
GRAMMARS = (GRAMMAR, 'start: ("ab" | "c")+', "start: /[ab]{3,12}/")
# Each is part of a request with probability ``OPTION_SHARE``.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "top_p": (0.5, 0.9),
    "top_k": (1, 2, 4),
    "min_p": (0.05, 0.3),
    "presence_penalty": (-0.5, 1.0),
    "frequency_penalty": (0.5,),
    "repetition_penalty": (0.8, 1.2),
    "logit_bias": ({1: -100.0}, {2: 1.0, END: -1.0}),
    "stop_token_ids": ([0], [3, 4]),
    "logprobs": (0, 2),
    "prompt_logprobs": (0, 2),
    "trace": (True,),
    "origins": (True,),
    "method": ("none", "ngram", "draft_model"),
    "num_speculative_tokens": (0, 1, 2, 5, 12),
}
OPTION_SHARE = 0.15
# Many prompts begin with some of it.
SHARED = [0, 1, 2, 3, 0, 4] * 9


@dataclass
class Arrival:
    """A request that comes before a step, and is aborted before another one, unless it has ended."""

    request: Generate
    step: int
    aborted: int | None


@dataclass
class RandomRun:
    config: dict[str, Any]
    has_draft: bool
    num_blocks: int
    arrivals: list[Arrival]


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def add(self, output: TokenOutput) -> None:
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs


Answers = dict[tuple[str, int], Answer]


@dataclass(frozen=True)
class Pair:
    """A target that ends its texts, a draft that often agrees, and the target alone as the reference."""

    target: Any
    draft: Any
    plain: EngineCore
    make_engine: Callable[..., EngineCore] = make_engine

    @classmethod
    def make(cls, folder: Path) -> "Pair":
        target = save_random_llama(
            folder / "target", seed=31, vocab_size=VOCAB_SIZE, hidden=64, eos_token_id=END
        )
        draft = save_perturbed(folder / "draft", target, seed=32, noise=0.03)
        plain = make_engine(target, None, num_speculative_tokens=0, max_model_len=CONTEXT)
        return cls(target, draft, know_grammars(plain))

    def engine(self, run: RandomRun) -> EngineCore:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "calibrate", partial(calibrate, seconds=0.01))
            core = self.make_engine(self.target, self.draft if run.has_draft else None, **run.config)
        scheduler = core.scheduler
        scheduler.target_pool = _smaller(scheduler.target_pool, run.num_blocks)
        if scheduler.proposers:
            draft_cache(core).pool = _smaller(draft_cache(core).pool, run.num_blocks)
        return know_grammars(core)


def _smaller(pool: BlockPool, num_blocks: int) -> BlockPool:
    """Makes one of so many blocks, and with few slots if its model keeps states."""
    states = pool.states
    if states is not None:
        states = StateSlots(min(1 + num_blocks % 5, states.num_slots), states.copy)
    return BlockPool(min(num_blocks, pool.num_blocks), pool.block_size, states)


def random_run(seed: int, num_requests: int = 12) -> RandomRun:
    drawn = random.Random(seed)
    has_draft = drawn.random() < 0.7
    block_size = drawn.choice((1, 2, 4, 16))
    arrivals = [_arrival(drawn, number, has_draft) for number in range(num_requests)]
    longest = max(len(one.request.prompt_token_ids) + one.request.params.max_tokens for one in arrivals)
    config = {
        "method": drawn.choice(("auto", "draft_model", "ngram") if has_draft else ("auto", "ngram")),
        "num_speculative_tokens": drawn.choice(("auto", 1, 3, 8, 32)),
        "max_num_batched_tokens": drawn.choice((1, 2, 3, 4, 5, 7, 9, 16, 33, 1024)),
        "max_num_sequences": drawn.choice((1, 2, 5, 16)),
        "block_size": block_size,
        "prefix_caching": drawn.random() < 0.8,
        "step_seconds": drawn.choice((0, 0.02)),
        "native_kernels": drawn.random() < 0.8,
        "max_model_len": CONTEXT,
    }
    num_blocks = -(-longest // block_size) + drawn.choice((0, 3, 10, 100))
    config["prompt_seconds"] = drawn.choice((0, 1e-9, 0.2))  # the second leaves 16 tokens
    return RandomRun(config, has_draft, num_blocks, arrivals)


def _arrival(drawn: random.Random, number: int, has_draft: bool) -> Arrival:
    options = {name: drawn.choice(of) for name, of in OPTIONS.items() if drawn.random() < OPTION_SHARE}
    if not has_draft and options.get("method") == "draft_model":
        del options["method"]
    if drawn.random() < OPTION_SHARE:
        options["grammar"] = drawn.choice(GRAMMARS)
        options["grammar_after"] = drawn.choice(([], [0]))
        options.pop("stop_token_ids", None)  # they may be all that the grammar allows
    elif drawn.random() < OPTION_SHARE:
        options |= drawn.choice(({"ignore_eos": True}, {"min_tokens": 6}))
    params = SamplingParams(
        max_tokens=drawn.randint(1, 30),
        temperature=0 if drawn.random() < 0.4 else drawn.choice((0.5, 1.0, 1.6)),
        seed=drawn.randrange(2**31),
        verification=drawn.choice((None, None, None, "rejection", "block")),
        **options,
    )
    prompt = SHARED[: drawn.choice((0, 0, 7, 20, 50))]
    prompt += [drawn.randrange(END) for _ in range(drawn.choice((1, 1, 2, 5, 13)))]
    request = Generate(
        request_id=str(number),
        prompt_token_ids=prompt,
        params=params,
        n=drawn.choice((1, 1, 1, 3)),
        prediction_token_ids=[drawn.randrange(END) for _ in range(9)] if drawn.random() < 0.2 else None,
        priority=drawn.choice((0, 0, -1, 1)),
        cache_prompt=drawn.random() < 0.9,
        place=number % 5,
        tenant="abba"[number % 4],
    )
    return Arrival(request, drawn.randrange(30), drawn.randrange(60) if drawn.random() < 0.15 else None)


def answers(core: EngineCore, arrivals: list[Arrival]) -> Answers:
    """Runs until all have ended. No step may do nothing while there is work, and no request may fail."""
    found: Answers = {}
    waiting = sorted(arrivals, key=lambda one: one.step)
    for step in range(MAX_STEPS):
        while waiting and waiting[0].step <= step:
            request = waiting.pop(0).request
            core.add(request)
            found |= {(request.request_id, index): Answer() for index in range(request.n)}
        for one in arrivals:
            if one.aborted == step:
                core.abort(one.request.request_id)
        if not (core.has_work or waiting):
            return found
        for output in core.step():
            assert isinstance(output, TokenOutput), output
            found[output.request_id, output.index].add(output)
    raise AssertionError("the requests do not come to an end")


def check(pair: Pair, run: RandomRun) -> int:
    """Compare all answers; returns their number."""
    core = pair.engine(run)
    found = answers(core, run.arrivals)
    for pool in (core.scheduler.target_pool, *core.scheduler.draft_pools):
        assert pool.num_free == pool.num_blocks
        assert pool.states is None or pool.states.num_free == pool.states.num_slots
    for one in run.arrivals:
        expected = answers(pair.plain, [Arrival(_undrafted(one.request), 0, None)])
        for key, reference in expected.items():
            _assert_same(found[key], reference, one, f"choice {key} of {one.request}, {run.config}")
    return len(found)


def _undrafted(request: Generate) -> Generate:
    params = structs.replace(request.params, method="none", num_speculative_tokens=0)
    return structs.replace(request, params=params, prediction_token_ids=None)


def _assert_same(answer: Answer, expected: Answer, one: Arrival, what: str) -> None:
    params = one.request.params
    if answer.finish_reason is None:
        assert one.aborted is not None, what
    elif params.temperature == 0 or params.top_k == 1 or params.verification is None:
        assert (answer.token_ids, answer.finish_reason) == (expected.token_ids, expected.finish_reason), what
    else:
        return  # the law is the same, the tokens are not
    num_tokens = len(answer.token_ids)
    assert answer.token_ids == expected.token_ids[:num_tokens] or params.verification is not None, what
    if params.logprobs is not None and answer.finish_reason is not None:
        _assert_close(answer.logprobs, expected.logprobs, what)
    if params.prompt_logprobs is not None and num_tokens:
        _assert_close(answer.prompt_logprobs or [], expected.prompt_logprobs or [], what)


def _assert_close(found: Any, expected: Any, what: str) -> None:
    assert len(found) == len(expected), what
    for ours, theirs in zip(found, expected, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs, what
            continue
        assert ours.token_id == theirs.token_id, what
        assert abs(ours.logprob - theirs.logprob) < TOLERANCE, what
        for (_, one), (_, other) in zip(ours.top, theirs.top, strict=True):
            assert abs(one - other) < TOLERANCE, what
