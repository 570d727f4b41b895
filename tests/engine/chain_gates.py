"""What must hold of captured draft chains, as functions that raise ``AssertionError``: the ids that the usual
loop draws, stored where it stores them. On tapes and on real graphs."""

import random
from collections.abc import Sequence as Sequences
from typing import Any

import torch

from engine.core.engine import EngineCore
from engine.core.scheduler import Scheduled
from engine.core.sequence import Sequence
from engine.messages import SamplingParams
from engine.models.draft_chain import DraftChain
from engine.proposers.draft_model import DraftModelProposer
from engine.sampling.adjust import History
from engine.sampling.sampler import Drafts, Row, Rule, Sampler
from tests.models import make_engine, run_engine

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], list(range(16)) * 2, [2, 2]]
BLOCK_SIZE = 4
NUM_SEQUENCES = 4
LONGEST = 90
ROUNDS = 24
GREEDY = SamplingParams(max_tokens=LONGEST, temperature=0)
WARM = SamplingParams(max_tokens=LONGEST, temperature=1.3, seed=1)
CUTS = [
    SamplingParams(max_tokens=LONGEST, temperature=0.9, top_k=5, seed=2),
    SamplingParams(max_tokens=LONGEST, temperature=1.5, top_p=0.8, seed=-3),
    SamplingParams(max_tokens=LONGEST, temperature=1.1, min_p=0.1, seed=1 << 60),
    SamplingParams(max_tokens=LONGEST, temperature=0.7, top_k=9, top_p=0.9, min_p=0.02, seed=5),
]
ROWS = {
    "greedy": [GREEDY],
    "sampled": [WARM],
    "greedy and sampled": [GREEDY, WARM],
    "cut": CUTS,
    "of all kinds": [GREEDY, WARM, CUTS[0], CUTS[3]],
}


def proposer_of(core: EngineCore) -> DraftModelProposer:
    proposer = core.proposer.proposers["draft_model"]
    assert isinstance(proposer, DraftModelProposer)
    return proposer


def chain_of(core: EngineCore) -> DraftChain:
    chain = proposer_of(core).model.draft_chain
    assert isinstance(chain, DraftChain)
    return chain


def same_as_the_loop(
    target: str, draft: str, rows: Sequences[SamplingParams], tolerance: float = 1e-4, **config: Any
) -> None:
    """Random rounds of ragged drafts over scattered blocks, partly accepted: drafts are the usual loop's, so
    is the whole cache after each round, and slots that were not to be written keep every bit."""
    config = {"max_num_sequences": NUM_SEQUENCES, "num_speculative_tokens": 5, **config}
    chained, loop = (
        make_engine(target, draft, cuda_graphs=graphs, native_kernels=False, **config)
        for graphs in (True, False)
    )
    chain = chain_of(chained)
    assert proposer_of(loop).model.draft_chain is None
    # Others have been here: what they left must not matter, not even through a mask.
    for core in (chained, loop):
        for part in stored(core):
            part.fill_(torch.nan)
    both = [_Sequences(core, rows) for core in (chained, loop)]
    choose = random.Random(7)
    vocab_size = chained.target.vocab_size
    held: list[tuple[Drafts, Drafts]] = []
    for number in range(ROUNDS):
        chosen = choose.sample(range(NUM_SEQUENCES), choose.randint(1, NUM_SEQUENCES))
        lengths = [choose.choice([0, 1, 2, 3, 5, 5, 7]) for _ in chosen]
        if number == 0:
            chosen, lengths = list(range(NUM_SEQUENCES)), [0] * NUM_SEQUENCES
        before = [part.clone() for part in stored(chained)]
        held = [*held[-1:], tuple(twin.propose(chosen, lengths) for twin in both)]  # type: ignore[list-item]
        for ours, theirs in held:
            assert ours.lengths == theirs.lengths
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        _assert_same_caches(chained, loop, before, both[1].last_written, tolerance)
        for row, length in zip(chosen, lengths, strict=True):
            drafted = held[-1][1].token_ids[chosen.index(row), :length].tolist()
            said = [*drafted[: choose.randint(0, length)], choose.randrange(vocab_size)]
            for twin in both:
                twin.say(row, said)
    assert chain.num_replays > ROUNDS // 2


class _Sequences:
    """Sequences of one engine's draft model, in blocks that lie in no order, without an engine's step."""

    def __init__(self, core: EngineCore, rows: Sequences[SamplingParams]) -> None:
        self.core = core
        self.proposer = proposer_of(core)
        self.last_written: list[int] = []  # slots
        choose = random.Random(3)
        per_row = -(-(LONGEST + 8) // BLOCK_SIZE)
        blocks = list(range(NUM_SEQUENCES * per_row))
        choose.shuffle(blocks)
        self.all = []
        for index in range(NUM_SEQUENCES):
            prompt = [choose.randrange(core.target.vocab_size) for _ in range(choose.randint(1, 30))]
            params = rows[index % len(rows)]
            made = Sequence(
                request_id=str(index),
                index=0,
                params=params,
                seed=(params.seed or 0) + index,
                verification="coupled",
                sources=("draft_model",),
                num_speculative_tokens=7,
                fixed_draft_length=True,
                stop_token_ids=frozenset(),
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                max_num_tokens=LONGEST,
            )
            made.draft_blocks.block_ids = blocks[index * per_row : (index + 1) * per_row]
            self.all.append(made)

    @torch.inference_mode()
    def propose(self, chosen: Sequences[int], lengths: Sequences[int]) -> Drafts:
        sequences = [self.all[row] for row in chosen]
        before = [sequence.draft_blocks.num_computed_tokens for sequence in sequences]
        parts = [
            Scheduled(
                sequence,
                num_tokens=1,
                num_draft_tokens=length,
                completes=True,
                source="draft_model",
                num_catch_up_tokens=len(sequence) - 1 - sequence.draft_blocks.num_computed_tokens,
            )
            for sequence, length in zip(sequences, lengths, strict=True)
        ]
        rows = [_row(sequence) for sequence in sequences]
        sampler = Sampler(rows, self.core.target.vocab_size, self.core.target.device)
        drafts = self.proposer.propose(parts, sampler)
        self.last_written = [
            table.block_ids[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE
            for table, first in zip([s.draft_blocks for s in sequences], before, strict=True)
            for i in range(first, table.num_computed_tokens)
        ]
        for sequence, length in zip(sequences, lengths, strict=True):
            assert sequence.draft_blocks.num_computed_tokens == len(sequence) + max(-1, length - 1)
        return drafts

    def say(self, row: int, token_ids: list[int]) -> None:
        """The last of these was not drafted. Who has said enough starts from the beginning."""
        sequence = self.all[row]
        sequence.token_ids += token_ids
        if len(sequence) >= LONGEST:
            del sequence.token_ids[sequence.num_prompt_tokens :]
        table = sequence.draft_blocks
        table.num_computed_tokens = min(table.num_computed_tokens, len(sequence) - 1)
        sequence.target_blocks.num_computed_tokens = len(sequence) - 1


def _row(sequence: Sequence) -> Row:
    history = History(
        sequence.params, sequence.token_ids, sequence.num_prompt_tokens, sequence.stop_token_ids
    )
    return Row(Rule.EXACT_MATCH if sequence.greedy else Rule.COUPLED, sequence.seed, history)


def stored(core: EngineCore) -> list[torch.Tensor]:
    """All that the draft's cache holds."""
    cache = proposer_of(core).model.cache
    assert cache is not None
    return [*cache.keys, *cache.values]


def _assert_same_caches(
    chained: EngineCore, loop: EngineCore, before: list[torch.Tensor], written: list[int], tolerance: float
) -> None:
    for ours, old, theirs in zip(stored(chained), before, stored(loop), strict=True):
        assert bool(theirs[written].isfinite().all())
        _assert_close(ours[written], theirs[written], tolerance)
        untouched = torch.ones(len(old), dtype=torch.bool, device=old.device)
        untouched[written] = False
        untouched[-BLOCK_SIZE:] = False
        assert torch.equal(_bits(ours[untouched]), _bits(old[untouched]))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def _assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    if theirs.numel():
        scale = max(1.0, float(theirs.abs().max()))
        assert float((ours.float() - theirs.float()).abs().max()) <= tolerance * scale


def same_drafts_and_tokens(
    chained: EngineCore,
    loop: EngineCore,
    params: Sequences[SamplingParams],
    arrivals: Sequences[int] | None = None,
) -> None:
    """Whole engines: every round's drafts, what is said, what is accepted and what the draft's cache holds at
    the end. ``loop`` has as many blocks as ``chained``, so that they lie alike."""
    chain = chain_of(chained)
    assert proposer_of(loop).model.draft_chain is None
    before = chain.num_replays
    rounds: list[list[tuple[list[list[int]], list[int]]]] = []
    said = []
    for core in (chained, loop):
        rounds.append([])
        _record(core, rounds[-1])
        said.append(run_engine(core, PROMPTS, params, arrivals))
    assert rounds[0] == rounds[1]
    assert said[0] == said[1]
    assert chained.stats.num_accepted_tokens == loop.stats.num_accepted_tokens > 0
    assert chain.num_replays > before
    for ours, theirs in zip(stored(chained), stored(loop), strict=True):
        _assert_close(ours[:-BLOCK_SIZE], theirs[:-BLOCK_SIZE], 1e-4)


def _record(core: EngineCore, rounds: list[tuple[list[list[int]], list[int]]]) -> None:
    propose = type(core.proposer).propose

    def recorded(scheduled: list[Scheduled], sampler: Sampler) -> Drafts:
        drafts = propose(core.proposer, scheduled, sampler)
        rounds.append((drafts.token_ids.tolist(), list(drafts.lengths)))
        return drafts

    core.proposer.propose = recorded  # type: ignore[method-assign]
