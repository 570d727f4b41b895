"""Planners that always say the same: engines whose drafts a test decides."""

from collections.abc import Mapping
from collections.abc import Sequence as Sequences

from truedraft.engine.core.block_pool import BlockPool
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.needs import Need
from truedraft.engine.core.planning import MAX_FORCED, Lookup, Planner, ReadingLookup, StepChoice
from truedraft.engine.core.proposer import Proposer, ProposerCache
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import DraftChoice, Known, StepPlan, StepResult
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.proposers.draft_model import DraftModelProposer
from truedraft.engine.proposers.grammar import ForcedTokens
from truedraft.engine.proposers.ngram import NgramProposer
from truedraft.engine.proposers.prediction import PredictionProposer
from truedraft.engine.rounds.round import RoundRunner


def phases_of(core: EngineCore) -> RoundRunner:
    """Returns the engine's runner of rounds."""
    assert isinstance(core.runner, RoundRunner)
    return core.runner


def loops_in_c(core: EngineCore) -> bool:
    """Tells whether rounds are a loop in C, where they can be."""
    return isinstance(core.runner, RoundRunner) and core.runner.loop is not None


def without_loop(core: EngineCore) -> RoundRunner:
    """The runner, whose rounds are all Python's from now on."""
    runner = phases_of(core)
    runner.loop = None
    return runner


class CachedProposer(Proposer):
    """Owns a cache as the draft model does, and drafts nothing itself: a test says what it has computed."""

    name = "draft_model"
    need = Need.DRAFT_MODEL

    def __init__(self, pool: BlockPool | None = None) -> None:
        self.cache = ProposerCache(pool or BlockPool(1, 1))

    @property
    def pools(self) -> Sequences[BlockPool]:
        return (self.cache.pool,)

    def tables(self, sequence: Sequence) -> Sequences[tuple[BlockPool, BlockTable]]:
        return ((self.cache.pool, self.cache.table(sequence)),)

    def num_missing(self, sequence: Sequence) -> int:
        return self.cache.num_missing(sequence)

    def reset(self) -> None:
        self.cache.reset()


def draft_cache(core: EngineCore) -> ProposerCache:
    """Returns the cache of the engine's draft model."""
    proposer = core.scheduler.proposers[0]
    assert isinstance(proposer, DraftModelProposer)
    return proposer.cache


def use_planner(core: EngineCore, planner: Planner) -> None:
    if isinstance(planner, FixedPlanner):
        planner.proposers = {proposer.name: proposer for proposer in core.scheduler.proposers}
    core.planner = core.scheduler.planner = planner


# No look-up reads more at once.
ALL = 1 << 30


def lookups(ngram_min_match: int = 1) -> dict[str, Lookup]:
    proposers: list[Lookup] = [NgramProposer(ngram_min_match), PredictionProposer()]
    return {proposer.name: proposer for proposer in proposers}


class FixedPlanner:
    """Every sequence drafts as much as it may from the first of its sources that offers something;
    ``rotates``: from another one in each round."""

    def __init__(
        self,
        lookups: Mapping[str, Lookup] | None = None,
        max_draft_len: int = 1 << 30,
        max_rounds: int = 1,
        rotates: bool = False,
        prefills: bool = True,
        proposers: Sequences[Proposer] = (),
    ) -> None:
        self.lookups = lookups or {}
        self.proposers = {proposer.name: proposer for proposer in proposers}
        self.max_draft_len = max_draft_len
        self.max_rounds = max_rounds
        self.rotates = rotates
        self.prefills = prefills
        self.num_speculative_tokens = 0.0
        self.observed: list[tuple[StepPlan, StepResult]] = []

    def choose(self, decoding: list[Sequence]) -> StepChoice:
        drafts = {sequence: self.choose_for_prompt(sequence) for sequence in decoding}
        self.num_speculative_tokens = sum(draft.num_first_drafts for draft in drafts.values())
        return StepChoice(drafts, self.max_rounds)

    def choose_for_prompt(self, sequence: Sequence) -> DraftChoice:
        options = [choice for source in sequence.sources if (choice := self._choice(sequence, source))]
        if not options:
            return DraftChoice()
        return options[(sequence.index + len(sequence)) % len(options) if self.rotates else 0]

    def _choice(self, sequence: Sequence, source: str) -> DraftChoice | None:
        room = min(sequence.num_speculative_tokens, sequence.max_num_tokens - len(sequence) - 1)
        if source in self.proposers:
            room = min(room, self.max_draft_len - len(sequence))
            num_missing = self.proposers[source].num_missing(sequence)
            return DraftChoice(source, room, num_missing) if room > 0 else None
        if source not in self.lookups:
            return None
        lookup = self.lookups[source]
        if isinstance(lookup, ReadingLookup):
            lookup.read(sequence, ALL)
        draft_ids = lookup.offers(sequence, room)[1] if room > 0 else []
        if sequence.matcher is not None:
            draft_ids = sequence.matcher.allowed(draft_ids)
        if not draft_ids:
            return None
        known = Known(lookup.name, draft_ids)
        if source != "grammar" or sequence.matcher is None:
            return DraftChoice(known=known)
        model = ("draft_model", room) if "draft_model" in sequence.sources else ("none", 0)
        return DraftChoice(*model, known=known, in_round=ForcedTokens(sequence.matcher, MAX_FORCED))

    def lagging(self, sequence: Sequence) -> list[str]:
        return [] if self.prefills else list(self.proposers)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        self.observed.append((plan, result))

    def forget(self, sequence: Sequence) -> None:
        pass

    def forget_texts(self) -> None:
        pass

    def state(self) -> dict[str, object]:
        return {"policy": "fixed"}
