"""Describes one stream of token ids and what the engine knows about it, in plain integers.

A request with ``n`` choices is ``n`` sequences. The last of a running sequence's ``token_ids`` is
*pending*: emitted, but not yet stored in any cache; the next step computes it first.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from truedraft.engine.core.needs import Need, Needs
from truedraft.engine.core.prediction import PredictionCursor
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import (
    DraftSampleMethod,
    FinishReason,
    SamplingParams,
    TokenLogprob,
    Verification,
)
from truedraft.engine.parameters import NEEDING
from truedraft.engine.sampling.splitmix import WEYL, mix

if TYPE_CHECKING:
    from truedraft.engine.memory.pictures import PromptPictures
    from truedraft.engine.sampling.grammar import Matcher
    from truedraft.engine.sampling.thinking import ThinkingBudget


@dataclass(slots=True, weakref_slot=True, eq=False)
class Sequence:
    """Is one stream of token ids with its parameters. ``seed`` and ``verification`` are always set: admission
    chooses what the client left open."""

    request_id: str
    index: int
    params: SamplingParams
    seed: int
    verification: Verification
    sources: tuple[str, ...]  # one of them drafts in a round
    num_speculative_tokens: int  # 0 without a source
    fixed_draft_length: bool  # always that many; else at most, as the policy decides
    stop_token_ids: frozenset[int]
    token_ids: list[int]
    num_prompt_tokens: int
    max_num_tokens: int  # prompt plus output, the context included
    priority: int = 0  # lower goes first
    place: int = 0  # orders those of the same priority; lower goes first
    tenant: str = ""  # whose it is: no tenant's sequences shut out those of another
    cache_prompt: bool = True  # may share its blocks with others, and take over theirs
    num_encoder_tokens: int = 0  # the first of them are the prompt of an encoder, which reads it whole
    forced_end: bool = False  # the last token that fits is forced to be a stop token; it says nothing
    cache_salt: str = ""  # shares only with sequences of the same salt and adapter
    adapter: str = ""  # the digest of the target's adapter; empty without one
    hold: object = None  # what is kept for it until the scheduler forgets it
    arrival: int = 0  # set by the scheduler
    arrived: float = 0.0  # when, by the monotonic clock; set by the scheduler
    queue_seconds: float | None = None  # from there to the first step; None until then
    num_cached_tokens: int | None = None  # prompt tokens taken over; None until it is admitted
    num_restored_tokens: int = 0  # the number of tokens of its beginning that were read from files
    is_looked_up: bool = False  # files have no more of its beginning than the cache
    target_blocks: BlockTable = field(default_factory=BlockTable)
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    traced_vocabulary: str | None = None  # digest of the last one that traces have told
    prediction: PredictionCursor | None = None  # if it is a source
    matcher: "Matcher | ThinkingBudget | None" = None  # follows what the output must be, after the last token
    has_rules: bool = False  # the checkpoint forbids or forces tokens (``sampling.rules``)
    draft_sample_method: DraftSampleMethod | None = None  # None: the draft draws as the target does
    unfollowed: frozenset[str] = frozenset()  # sources that are told nothing of it; set by the scheduler
    greedy: bool = field(init=False)
    drafts_greedily: bool = field(init=False)
    needs: Needs = field(init=False)  # in every round; what else a step adds is in its plan

    def __post_init__(self) -> None:
        self.greedy = is_greedy(self.params)
        method = self.draft_sample_method
        self.drafts_greedily = self.greedy if method is None else method == "greedy"
        self.needs = self._needs()
        if self.params.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = [None] * max(1, self.params.prompt_logprobs_start)

    def _needs(self) -> Needs:
        asked = {
            Need.SAMPLING: not self.greedy,
            Need.OTHER_DRAWS: self.drafts_greedily != self.greedy,
            Need.BLOCK_RULE: not self.greedy and self.verification == "block",
            Need.RULES: self.has_rules,
            Need.MASK: self.matcher is not None,
            Need.PICTURES: self.pictures is not None,
        }
        asked |= {Need(row.need): True for row in NEEDING if getattr(self.params, row.name) != row.default}
        return frozenset(need for need, is_asked in asked.items() if is_asked)

    def __len__(self) -> int:
        return len(self.token_ids)

    def is_followed_by(self, source: str) -> bool:
        """Tells whether a source may draft for it: one that cannot lag must have been told of all of it."""
        return source in self.sources and source not in self.unfollowed

    def insists_on(self, source: str) -> bool:
        """Tells whether the request wants a source to follow it whatever that costs."""
        return self.fixed_draft_length or self.params.method == source

    def length_after(self, num_tokens: int) -> int:
        """Returns the length with ``num_tokens`` more, as far as it may grow."""
        return min(len(self.token_ids) + num_tokens, self.max_num_tokens)

    @property
    def prefix_salt(self) -> str:
        """Returns what sequences that share computed beginnings have in common besides these, empty without
        an adapter and a salt. A digest has no slash, so nobody's salt makes two adapters alike."""
        return f"{self.adapter}/{self.cache_salt}" if self.adapter or self.cache_salt else ""

    @property
    def pictures(self) -> "PromptPictures | None":
        return self.target_blocks.pictures

    def prefix_ids(self, end: int, first: int = 0) -> list[int]:
        """Returns the tokens from ``first`` to ``end`` by what tells computed beginnings apart: the tokens of
        two pictures have the same ids, and numbers of their own here."""
        if self.pictures is None:
            return self.token_ids[first:end]
        known = self.pictures.identities
        return known[first:end] + self.token_ids[max(first, len(known)) : end]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Counts the tokens that the target has yet to store: 1 while decoding, more in the prompt."""
        return len(self.token_ids) - self.target_blocks.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Tells whether the pending token is all that the target has yet to store."""
        return self.num_uncomputed_tokens == 1

    @property
    def must_encode(self) -> bool:
        """Tells whether the next pass must bring the whole prompt: an encoder looks at all of it at once."""
        return self.num_encoder_tokens > 0 and self.target_blocks.num_computed_tokens == 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Tells whether some of the prompt's log-probabilities are asked for and not yet known."""
        if self.params.prompt_logprobs is None:
            return False
        assert self.prompt_logprobs is not None
        return len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def next_scoring_row(self) -> int:
        """Returns the place of the token whose logits tell the next of the prompt's log-probabilities."""
        assert self.prompt_logprobs is not None
        return len(self.prompt_logprobs) - 1

    def add_prompt_logprobs(self, first: int, logprobs: list[TokenLogprob]) -> None:
        """Adds those of prompt tokens ``first``, ``first`` + 1, ...; ones known already (before a preemption)
        are not taken twice. The first prompt token has none, nor has one before those asked for."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs += logprobs[max(0, len(self.prompt_logprobs) - first) :]

    def append(self, token_ids: list[int]) -> list[int]:
        """Appends newly emitted tokens up to the first that ends the sequence; returns those appended.

        A stop token is kept, as the last one. It wins over the length limit if it is within it.
        """
        fits = len(self.token_ids) + len(token_ids) < self.max_num_tokens
        if fits and self.stop_token_ids.isdisjoint(token_ids):
            self.token_ids += token_ids
            return token_ids
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            is_full = len(self.token_ids) >= self.max_num_tokens
            if token_id in self.stop_token_ids and not (is_full and self.forced_end):
                self.finish_reason = "stop"
            elif is_full:
                self.finish_reason = "length"
            if self.finish_reason:
                return token_ids[:count]
        return token_ids


def sequence_seed(seed: int, index: int) -> int:
    """Returns the seed of choice ``index`` of a request: the request's own for 0, unrelated ones after it.

    Those have 53 bits, which every JSON parser keeps.
    """
    return seed if index == 0 else mix(seed + index * WEYL) >> 11


def is_scored_alone(params: SamplingParams) -> bool:
    """Tells whether only a prompt's log-probabilities are asked for: the token after it is never stored."""
    return params.prompt_logprobs is not None and (params.max_tokens, params.num_speculative_tokens) == (1, 0)


def is_greedy(params: SamplingParams) -> bool:
    """Tells whether the target's most likely token is the only one that may come."""
    return params.temperature == 0 or params.top_k == 1
