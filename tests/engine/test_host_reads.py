"""What the host reads of a round: nothing before all is drafted, the drafts once, the verdict once per rule.

Tensors on the meta device have no numbers: reading one raises, and all else goes the way of a GPU. There a
read waits until the device has done what it was given; ``test_cuda`` looks for that.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.conftest import Models
from tests.engine.planners import phases_of
from tests.models import make_engine, run_engine
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.needs import Need
from truedraft.engine.core.sequence import Sequence as Text
from truedraft.engine.core.step import DraftChoice, ScheduledSequence, StepPlan
from truedraft.engine.layers.attention import ATTENTION_NAME
from truedraft.engine.memory.kv_cache import AttentionCache
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.fused import describe_module
from truedraft.engine.models.hf import decoder_only
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.proposers.draft_model import DraftModelProposer
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.rows.table import RowTable
from truedraft.engine.sampling.sampler import Sampler

META = torch.device("meta")
# Top-p looks at fewer tokens first.
VOCAB_SIZE = 3000
LENGTHS = [5, 1, 3, 0, 5]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 99, "temperature": 1.2, "seed": 1, **fields})


GREEDY, COUPLED = params(temperature=0), params(verification="coupled")
REJECTION, BLOCK = params(verification="rejection"), params(verification="block")
CUT = {"top_k": 9, "min_p": 0.01}
ROWS = {
    "greedy": [GREEDY],
    "coupled": [COUPLED],
    "rejection": [REJECTION],
    "block": [BLOCK],
    "cut": [params(verification="rejection", **CUT), params(verification="rejection")],
    "top-p": [params(verification="rejection", top_p=0.9)],
    "of all rules": [GREEDY, COUPLED, REJECTION, BLOCK],
    "adjusted": [
        params(verification="rejection", logit_bias={3: 5.0}, frequency_penalty=0.5),
        params(temperature=0, repetition_penalty=1.3, min_tokens=50),
    ],
}


@pytest.fixture(scope="module", params=["same ids", "fewer ids", "more ids", "the module's own layers"])
def model(request: pytest.FixtureRequest) -> ModelRunner:
    """Loads a draft model."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE + {"fewer ids": -10, "more ids": 10}.get(request.param, 0),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=ATTENTION_NAME,
    )
    with META:
        module = LlamaForCausalLM(config).eval().requires_grad_(False)
    facts = ModelFacts(config, module.generation_config, 0, torch.float32, META)
    if request.param != "the module's own layers":
        return ModelRunner.build(
            FusedDecoder(facts, describe_module(module, facts)), num_blocks=32, block_size=4
        )
    with pytest.MonkeyPatch.context() as patch:  # the probe reads
        shapes = [AttentionCache((2, 8), (2, 8), torch.float32, META)] * 2
        patch.setattr(decoder_only, "probe_layers", lambda *_: shapes)
        return ModelRunner.build(decoder_only.DecoderModel(module, facts), num_blocks=32, block_size=4)


def part_of(number: int, given: SamplingParams, length: int) -> ScheduledSequence:
    """A sequence whose draft cache lacks two tokens."""
    text = Text(
        request_id=str(number),
        index=0,
        params=given,
        seed=number,
        verification=given.verification or "rejection",
        sources=("draft_model",),
        num_speculative_tokens=7,
        fixed_draft_length=True,
        stop_token_ids=frozenset([2]),
        token_ids=[1, 2, 3, number],
        num_prompt_tokens=3,
        max_num_tokens=99,
    )
    text.target_blocks.num_computed_tokens = 3
    return ScheduledSequence(
        text,
        num_tokens=1,
        draft=DraftChoice("draft_model", length),
        num_catch_up_tokens=1,
    )


@torch.inference_mode()
def drafted(
    model: ModelRunner, rows: Sequence[SamplingParams]
) -> tuple[Sampler, Drafts, list[ScheduledSequence]]:
    """Returns the sequences, too: their rows end with them."""
    each = [rows[i % len(rows)] for i in range(len(LENGTHS))]
    parts = [part_of(i, *row) for i, row in enumerate(zip(each, LENGTHS, strict=True))]
    sampler = Sampler(RowTable().rows_of([part.sequence for part in parts]), VOCAB_SIZE, META)
    proposer = DraftModelProposer(model, BlockPool(32, 4), 99, VOCAB_SIZE)
    for number, part in enumerate(parts):
        table = proposer.cache.table(part.sequence)
        table.block_ids = [5 - number, 6 + number, 20 + number]
        table.num_computed_tokens = 2
    plan = StepPlan(parts, parts, frozenset({Need.DRAFT_MODEL}), 1, 0.0)
    return sampler, proposer.propose(plan, sampler), parts


def count_reads(
    patch: pytest.MonkeyPatch, answers: dict[str, Callable[[torch.Tensor], Any]] | None = None
) -> list[str]:
    """The ways by which tensors are read from here on. ``answers`` stand in for what they would give."""
    reads: list[str] = []
    for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"):
        honest = (answers or {}).get(name, getattr(torch.Tensor, name))

        def read(self: torch.Tensor, name: str = name, honest: Callable[..., Any] = honest) -> Any:
            reads.append(name)
            return honest(self)

        patch.setattr(torch.Tensor, name, read)
    return reads


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_nothing_is_read_while_a_gpu_drafts(rows: list[SamplingParams], model: ModelRunner) -> None:
    _, drafts, _ = drafted(model, rows)
    assert (drafts.lengths, drafts.token_ids.shape) == (LENGTHS, (5, 5))
    with pytest.raises((RuntimeError, NotImplementedError)):
        drafts.token_ids.tolist()


@pytest.mark.parametrize("name", ROWS)
def test_a_gpus_drafts_are_read_once_and_a_verdict_per_rule(
    name: str, model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, drafts, parts = drafted(model, ROWS[name])
    logits = torch.empty(sum(LENGTHS) + len(LENGTHS), VOCAB_SIZE, device=META)
    reads = count_reads(
        monkeypatch,
        {"tolist": lambda x: np.zeros(x.shape, dtype=np.int64).tolist(), "__bool__": lambda x: False},
    )
    assert list(map(len, drafts.ids)) == LENGTHS == [part.draft.num_tokens for part in parts]
    assert reads == ["tolist"]
    assert len(sampler.verify(logits, drafts)) == len(LENGTHS)
    of_verdict = ["tolist"] * len(sampler.groups)
    # The read asks whether the most likely tokens hold top-p's mass.
    assert reads[1:] == (["__bool__"] if name == "top-p" else []) + of_verdict


def reads_while_drafting(core: EngineCore, patch: pytest.MonkeyPatch) -> list[list[str]]:
    """Returns the reads of each round."""
    (proposer,) = phases_of(core).proposers
    propose = proposer.propose
    rounds: list[list[str]] = []

    def watched(*arguments: Any) -> Drafts:
        with pytest.MonkeyPatch.context() as patch:
            reads = count_reads(patch)
            drafts = propose(*arguments)
        if any(drafts.lengths):
            rounds.append(reads)
        return drafts

    patch.setattr(proposer, "propose", watched)
    return rounds


@pytest.mark.parametrize("draft", ["close_draft", "lacking_draft", "padded_draft"])
def test_reads_do_not_grow_with_the_drafts(
    draft: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU without kernels in C, where the loop is the same."""
    said = []
    for num_drafts in (1, 7):
        core = make_engine(
            models.target,
            getattr(models, draft),
            num_speculative_tokens=num_drafts,
            native_kernels=False,
            max_num_sequences=3,
        )
        rounds = reads_while_drafting(core, monkeypatch)
        said.append(run_engine(core, [[1, 2, 3], [4, 5], [6]], SamplingParams(max_tokens=40, temperature=0)))
        assert rounds
        assert not any(rounds)
        assert core.stats.num_draft_tokens > 40 * num_drafts // 4
    assert said[0] == said[1]
