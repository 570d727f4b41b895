"""Runs of engines with heads, and bugs to be planted in what feeds a head."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from tokenizers import Tokenizer

from tests.families import save_random
from tests.hybrids import HYBRIDS
from tests.models import make_engine, stepped
from tests.mtp import QWEN, NaiveMtp, add_to_checkpoint, random_head
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.proposer import Observation
from truedraft.engine.core.step import StepPlan
from truedraft.engine.messages import Generate, RoundTrace, SamplingParams
from truedraft.engine.proposers.heads.proposer import HeadProposer
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling.sampler import Sampler

TRAINED = str(Path(__file__).parents[2] / "benchmarks" / "story_hybrid")
STORIES = (
    "Once upon a time there was a little dog who",
    "Lily and Tom went to the park. They saw a",
    "Lily and Tom went to the park. They found a",
    "Lily and Tom went to the park. They",
    "The",
)


def save_small_hybrid(folder: Path, **sizes: Any) -> str:
    """Saves a random hybrid with a random MTP head, of a shape that kernels in C run."""
    name, config = HYBRIDS["Qwen3.5, two value heads for each key head"]
    path = save_random(folder, name, config | sizes)
    head = random_head(path).named_tensors(QWEN, "layers.0.")
    add_to_checkpoint(path, {f"mtp.{name}": tensor for name, tensor in head.items()})
    return path


def traces_of(
    core: EngineCore, texts: Sequence[list[int]], params: SamplingParams
) -> list[tuple[list[int], list[RoundTrace]]]:
    """Runs texts one after the other; returns each with its rounds."""
    found = []
    for number, prompt in enumerate(texts):
        core.add(Generate(str(number), prompt, structs.replace(params, trace=True)))
        text, rounds = list(prompt), []
        while core.has_work:
            for output in stepped(core):
                text += output.token_ids
                rounds += [output.trace] if output.trace and output.trace.draft_ids else []
        found.append((text, rounds))
    return found


def story_prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(f"{TRAINED}/tokenizer.json")
    return [tokenizer.encode(story).ids for story in STORIES]


def mtp_engine(target: str = TRAINED, draft: str = "mtp", **config: Any) -> EngineCore:
    """Makes one with short chunks of prompts, so that a text's states come in pieces."""
    settings = {"method": "auto", "max_num_batched_tokens": 12, "max_model_len": 64, **config}
    return make_engine(target, draft, **settings)


@torch.no_grad()
def compare_with_definition(
    head: NaiveMtp,
    core: EngineCore,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    drafted: Sequence[int] = (),
) -> int:
    """Compares all drafts with the definition's; returns how many were accepted."""
    num_compared = num_accepted = 0
    for text, rounds in traces_of(core, prompts, params):
        states = head.target[0].model(torch.tensor([text])).last_hidden_state[0]
        for one in rounds:
            expected = head.draft(
                text[: one.position], states[: one.position - 1], len(one.draft_ids), drafted
            )
            assert one.draft_ids == expected, (one.position, one.draft_ids, expected)
            num_compared, num_accepted = num_compared + 1, num_accepted + one.num_accepted
    assert num_compared > 3
    return num_accepted


def own_states_after_acceptance(patch: pytest.MonkeyPatch) -> None:
    """What drafts have stored stays, where they were accepted."""
    honest = HeadProposer.propose

    def propose(self: HeadProposer, plan: StepPlan, sampler: Sampler) -> Drafts:
        drafts = honest(self, plan, sampler)
        for part, length in zip(plan.rows, drafts.lengths, strict=True):
            self.cache.table(part.sequence).num_computed_tokens += max(0, length - 1)
        return drafts

    def observe(self: HeadProposer, observations: list[Observation]) -> None:
        told = []
        for seen in observations:
            table = self.cache.table(seen.sequence)
            num_stored = max(0, min(table.num_computed_tokens - seen.first, len(seen.token_ids) - 1))
            table.num_computed_tokens = min(table.num_computed_tokens, seen.first + num_stored)
            assert seen.hidden is not None
            told.append(
                replace(
                    seen,
                    first=seen.first + num_stored,
                    token_ids=seen.token_ids[num_stored:],
                    hidden=seen.hidden[num_stored:],
                )
            )
        honest_observe(self, told)

    honest_observe = HeadProposer.observe
    patch.setattr(HeadProposer, "propose", propose)
    patch.setattr(HeadProposer, "observe", observe)


def state_before_the_last(patch: pytest.MonkeyPatch) -> None:
    """A token comes with its own state, not with that of the token before it."""
    honest = HeadProposer.observe

    def observe(self: HeadProposer, observations: list[Observation]) -> None:
        honest(self, [replace(seen, hidden=seen.hidden.roll(1, 0)) for seen in observations])  # type: ignore[union-attr]

    patch.setattr(HeadProposer, "observe", observe)


def fed_one_token_short(patch: pytest.MonkeyPatch) -> None:
    """The first state of several accepted tokens is left out."""
    honest = HeadProposer.observe

    def observe(self: HeadProposer, observations: list[Observation]) -> None:
        honest(self, observations)
        for seen in observations:
            waiting = self._waiting[seen.sequence]
            waiting.states[: waiting.num_tokens] = waiting.known.roll(-1, 0)

    patch.setattr(HeadProposer, "observe", observe)


def places_are_found_by_their_own_tokens(patch: pytest.MonkeyPatch) -> None:
    """The last place of a block is taken over though another token follows it."""
    patch.setattr("truedraft.engine.build.LOOKAHEAD", 0)
