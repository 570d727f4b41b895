"""A grammar over six tokens, engines that know it, and what they must do: gates that raise."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from msgspec import structs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests import naive
from tests.engine.planners import FixedPlanner, lookups, use_planner
from tests.engine.simulation import chi_square
from tests.models import make_engine, run_engine, save_perturbed, save_random_llama
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.planning import Lookup
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.proposers.grammar import GrammarProposer
from truedraft.engine.sampling.grammar import Grammars

PIECES = ["a", "b", "ab", "c", "bc"]
VOCAB_SIZE, END = 6, 5
# Its n-grams offer free letters, letters that are not allowed, and an end.
PROMPT = [0, 2, 3, 0, END, 1, 2, 3, 2, 1]
# After any letter "abc" is forced, in two tokens; then up to three letters are free, and the end is forced.
GRAMMAR = 'start: /[abc]/ "abc" /[ab]{0,3}/'
MAX_TOKENS = 6
SIGNIFICANCE = 1e-5

Text = tuple[int, ...]
# Who drafts: forced tokens and n-grams in turn, the draft model with forced tokens, or it alone.
Drafting = Literal["none", "known", "draft_model and forced", "draft_model"]


def make_tokenizer() -> LLTokenizer:
    """With merges, so that forced text is forced in the tokens that the tokenizer would write."""
    vocab = {piece: number for number, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("b", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return LLTokenizer(tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=[END])


def know_grammars(core: EngineCore) -> EngineCore:
    core.admission = replace(core.admission, grammars=Grammars(make_tokenizer))
    return core


def grammar_planner(max_rounds: int = 1) -> FixedPlanner:
    """Forced tokens and n-grams in turn."""
    sources = {"grammar": GrammarProposer(), **lookups(ngram_min_match=1)}
    return FixedPlanner(sources, rotates=True, max_rounds=max_rounds)


def model_planner(drafting: Drafting, max_rounds: int = 1) -> FixedPlanner:
    """The draft model drafts to the end of the text, and beyond; before it forced tokens, if they are asked
    for."""
    sources: dict[str, Lookup] = {"grammar": GrammarProposer()} if drafting != "draft_model" else {}
    return FixedPlanner(sources, max_rounds=max_rounds)


def allowed(tokenizer: LLTokenizer, params: SamplingParams, text: Text) -> list[bool]:
    """Uses a parser of its own for every text: nothing to roll back."""
    if params.grammar is None:
        return [True] * VOCAB_SIZE
    after = tuple(params.grammar_after)
    starts = [end for end in range(len(after), len(text) + 1) if text[end - len(after) : end] == after]
    if not starts:
        return [True] * VOCAB_SIZE
    parser = LLMatcher(tokenizer, params.grammar)
    assert parser.consume_tokens(list(text[starts[0] :]))
    bits = parser.compute_bitmask()[0]
    return [bool(bits >> token & 1) for token in range(VOCAB_SIZE)]


def enumerated(target: str, params: SamplingParams) -> dict[Text, float]:
    """Returns the probability of each text that a model may write after the prompt."""
    model, tokenizer = FreshModel(target, LoadOptions()), make_tokenizer()
    texts: dict[Text, float] = {}

    def enumerate_from(text: Text, probability: float) -> None:
        if len(text) == params.max_tokens or END in text:
            texts[text] = probability
            return
        logits = model.logits([*PROMPT, *text], VOCAB_SIZE)[-1].double().numpy()
        masked = np.where(allowed(tokenizer, params, text), logits, -np.inf)
        for token, share in enumerate(naive.distribution(masked, params, PROMPT, text, [END])):
            if share > 0:
                enumerate_from((*text, token), probability * share)

    enumerate_from((), 1.0)
    return texts


@dataclass(frozen=True)
class Constrained:
    """Holds a model with a draft model, and the exact distribution of its texts under the grammar at
    ``temperature``."""

    target: str
    draft: str
    params: SamplingParams
    texts: dict[Text, float]

    @classmethod
    def make(cls, folder: Path, hidden: int = 16, **changed: Any) -> "Constrained":
        target = save_random_llama(
            folder / "target", seed=11, vocab_size=VOCAB_SIZE, layers=1, hidden=hidden, eos_token_id=END
        )
        draft = save_perturbed(folder / "draft", target, seed=12, noise=0.1)
        given = {"max_tokens": MAX_TOKENS, "temperature": 1.3, "grammar": GRAMMAR}
        params = SamplingParams(**given | changed)
        return cls(target, draft, params, enumerated(target, params))

    def engine(self, drafting: Drafting = "known", **config: object) -> EngineCore:
        """With any source that is asked for; the planner decides."""
        by_model = drafting.startswith("draft_model")
        options = {
            "method": "draft_model" if by_model else "none" if drafting == "none" else "auto",
            "num_speculative_tokens": 0 if drafting == "none" else "auto",
            **config,
        }
        return know_grammars(make_engine(self.target, self.draft if by_model else None, **options))


def masked_distribution(
    constrained: Constrained,
    verification: str,
    in_flight: int,
    num_samples: int,
    drafting: Drafting = "known",
    max_rounds: int = 1,
    **config: object,
) -> None:
    """Texts are distributed as enumerated. Up to ``max_rounds`` share a step."""
    core = constrained.engine(drafting, max_num_sequences=in_flight, verification=verification, **config)
    planner = grammar_planner(max_rounds) if drafting == "known" else model_planner(drafting, max_rounds)
    if drafting != "none":
        use_planner(core, planner)
    params = [structs.replace(constrained.params, seed=seed) for seed in range(num_samples)]
    counts = Counter(map(tuple, run_engine(core, [PROMPT] * num_samples, params)))
    assert counts.keys() <= constrained.texts.keys()
    observed = np.array([counts[text] for text in constrained.texts])
    assert chi_square(observed, np.array([*constrained.texts.values()])) > SIGNIFICANCE
    if drafting in ("known", "draft_model and forced"):
        forced = core.stats.drafts["grammar"]
        assert forced.num_accepted_tokens == forced.num_draft_tokens > 0
    if drafting != "none":
        assert max(len(plan.rows) for plan, _ in planner.observed) == in_flight
        assert (max(len(result.rounds) for _, result in planner.observed) > 1) is (max_rounds > 1)
        others = core.stats.drafts["ngram" if drafting == "known" else "draft_model"]
        assert 0 < others.num_accepted_tokens < others.num_draft_tokens
