"""Tests for every token of random requests whether it follows the target's law, given the text before it.

Each request has a prompt, a seed, a draft length and parameters of its own, drawn from all that requests may
ask for, and its text is longer than the longest draft. The target's distributions are computed anew, by
passes over whole texts without drafts. A token's place in its distribution, counted from the most likely
token on, is a number between 0 and 1 (the randomised probability integral transform), and these are uniform
if the text follows the law, at each position of a round (Diebold, Gunther and Tay, 1998). They are tested
with Anderson and Darling's statistic. A token that the law rules out is a failure by itself. ``check`` uses
this module.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from llguidance import LLMatcher
from msgspec.structs import replace

from truedraft.engine.commands.check_exactness import answers, is_wide, run
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.sequence import Sequence as TextSequence
from truedraft.engine.library.completion import Completion
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import Generate, RoundOrigin, SamplingParams, Verification
from truedraft.engine.models.base import Model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.rows.table import RowTable
from truedraft.engine.sampling.adjust import adjust_logits
from truedraft.engine.sampling.ops import in_width
from truedraft.engine.sampling.processors import SamplingTensors, to_probs

# A correct engine fails by chance once in a hundred thousand checks of a rule.
SIGNIFICANCE = 1e-5
DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8)
NUM_TOKENS = max(DRAFT_LENGTHS) + 4
LONGEST_PROMPT, NUM_LIKELY = 24, 16
# Positions of a round from this one on are tested together.
LAST_POSITION = 5
# Fewer numbers than these are not tested: the statistic's distribution is that of many.
MIN_TESTED = 40
# A position tells nothing where the law leaves no choice, or an order where it hardly tells tokens apart.
CERTAIN, ALIKE, TINY = 0.99, 0.01, 1e-30
# Tests of one round's positions have these names.
FIRST, BONUS, ALL, LATER, NEIGHBOURS = "undrafted", "bonus", "all", "2 and later", "neighbours"
# A request without these parameters has these values.
NEUTRAL: dict[str, dict[str, Any]] = {
    "biases": {"logit_bias": {}},
    "penalties": {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
}
# Each of these constraints leaves choices at every token, and allows other tokens after each.
REGEXES = r"( [a-z]{1,3}[0-9]|[A-Z][.,])+", r"([b-y]{1,2}[A-Z ])+"
GRAMMARS = [LLMatcher.grammar_from_regex(regex) for regex in REGEXES]
# Logits are kept for this many tokens at a time.
MAX_LOGITS = 1 << 25
MAX_BATCH, BLOCK_SIZE = 64, 16
# A moved share of the law is found 9 times of 10 if it is the root of this number times the limit divided by
# the number of tokens (simulated).
POWER = 0.6
Order = tuple[str, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LawResult:
    """Holds the findings for the texts under one rule.

    ``p_value`` is the smallest of ``num_tests``, times their number; ``worst`` names that test.
    ``impossible`` describes tokens that the law rules out. ``largest_gap`` is the largest difference of
    log-probabilities from those of the passes over whole texts; ``are_far`` says that it is too large.
    ``found`` is the shift, as a share of the law at the second drafted position and later ones, that 9 of 10
    checks would find.
    """

    verification: str
    num_texts: int
    num_tokens: int
    num_tests: int
    p_value: float
    worst: str
    found: float
    impossible: list[str]
    largest_gap: float
    are_far: bool
    resolution: float
    acceptance_rate: float

    @property
    def failure(self) -> str:
        """Says what is wrong; empty if nothing is. Where bits may differ, one token in a thousand may be at a
        cut."""
        under = f"under {self.verification}"
        if len(self.impossible) > (self.num_tokens / 1000 if self.resolution else 0):
            return f"samples have another distribution {under} ({self.impossible[0]})"
        if self.p_value <= SIGNIFICANCE:
            return f"samples have another distribution {under} (p = {self.p_value:.1e}, {self.worst})"
        return f"log-probabilities {under} differ by up to {self.largest_gap:.2g}" if self.are_far else ""

    @property
    def in_words(self) -> str:
        verdict = "FAILED" if self.failure else "passed"
        return (
            f"{self.verification:<10} p = {self.p_value:.3g} ({verdict}, limit {SIGNIFICANCE:g}; "
            f"{self.num_tokens} tokens of {self.num_texts} random requests, {self.acceptance_rate:.0%} "
            f"accepted; a shift of {self.found:.0%} would show)"
        )


@dataclass
class Text:
    """Holds a request, its output, and the rounds that gave the output."""

    request: Generate
    sequence: TextSequence
    completion: Completion
    origins: list[RoundOrigin]

    @property
    def number(self) -> str:
        return self.request.request_id

    @property
    def token_ids(self) -> list[int]:
        return self.completion.token_ids

    @property
    def offsets(self) -> list[int]:
        """Returns for each token how many tokens of its round precede it."""
        return [number for origin in self.origins for number in range(origin.num_tokens)]

    @property
    def ends_well(self) -> bool:
        """Tells whether the text ends with the first token that must end it, or at its length limit. The
        sequence has followed it."""
        sequence, stops = self.sequence, self.sequence.stop_token_ids
        *others, last = self.token_ids
        is_full = len(sequence.token_ids) == sequence.max_num_tokens
        return stops.isdisjoint(others) and (last in stops or is_full)

    def follow(self, at: int) -> None:
        """Moves the sequence, which has the tokens before, over the next one."""
        token = self.token_ids[at]
        self.sequence.token_ids.append(token)
        if self.sequence.matcher is not None and token not in self.sequence.stop_token_ids:
            self.sequence.matcher.advance([token])


def check_law(
    core: EngineCore,
    prompts: list[list[int]],
    verification: Verification,
    num_texts: int,
    resolution: float,
    seed: int = 0,
) -> LawResult:
    """Samples ``num_texts`` texts and judges them. ``resolution`` bounds the differences of
    log-probabilities."""
    rng = random.Random(f"{verification} {seed}")
    requests = list(random_requests(core, prompts, verification, num_texts, rng))
    texts = sampled(core, requests)
    differences: list[str] = []
    if verification == "coupled" and not resolution:
        plain = sampled(core, [undrafted(request) for request in requests])
        differences = [
            f"request {one.number} gets other tokens without drafts"
            for one, other in zip(texts, plain, strict=True)
            if one.token_ids != other.token_ids
        ]
    return judge(core, texts, verification, resolution, rng, differences)


def undrafted(request: Generate) -> Generate:
    """Returns a request that gets the same tokens under the coupled rule, as it has the same seed."""
    params = replace(request.params, num_speculative_tokens=0)
    return replace(request, params=params, prediction_token_ids=None)


def random_requests(
    core: EngineCore, prompts: list[list[int]], verification: Verification, number: int, rng: random.Random
) -> Iterator[Generate]:
    """Yields requests that the engine accepts. Their prompts share some beginnings, which the generator
    keeps."""
    longest = max(1, min(LONGEST_PROMPT, core.admission.room(0) // 2))
    num_tokens = max(1, min(NUM_TOKENS, core.admission.room(longest)))
    plain = SamplingParams(max_tokens=num_tokens, temperature=0, num_speculative_tokens=0, ignore_eos=True)
    beginnings = [prompt[:longest] for prompt in prompts]
    known = [text.token_ids for text in run(core, beginnings, plain)]
    likely = [token for token, _ in Counter(chain(*known)).most_common(NUM_LIKELY)]
    speculates = core.snapshot().num_speculative_tokens > 0
    for place in range(number):
        which = rng.randrange(len(prompts))
        params = random_params(rng, likely, num_tokens, verification)
        prompt = (beginnings[which] + known[which])[: rng.randint(1, longest)]
        predicted = known[which][max(0, len(prompt) - len(beginnings[which])) :]
        is_predicted = speculates and rng.random() < 0.15
        request = Generate(
            str(place),
            prompt,
            replace(params, num_speculative_tokens=rng.choice(DRAFT_LENGTHS) * speculates),
            prediction_token_ids=predicted if is_predicted else None,
        )
        try:
            core.admission.sequences(request)
        except RequestError:
            plainer = replace(request.params, grammar=None, draft_sample_method=None)
            request = replace(request, params=plainer)
        yield request


def random_params(
    rng: random.Random, likely: list[int], num_tokens: int, verification: Verification
) -> SamplingParams:
    """Draws each parameter or leaves it out, so that most requests have some of them and none has all."""

    def is_asked(chance: float = 0.3) -> bool:
        return rng.random() < chance

    has_grammar, has_stops = is_asked(0.2), is_asked(0.4)
    # With several penalties, a token that biases favour comes once in a round; without them, again and again.
    biased = rng.sample(likely, min(4, len(likely))) if is_asked(0.4) else []
    return SamplingParams(
        max_tokens=num_tokens,
        temperature=0.0 if is_asked(0.05) else rng.uniform(0.6, 1.6),
        top_k=rng.randint(2, 40) if is_asked() else 0,
        top_p=rng.uniform(0.3, 0.98) if is_asked() else 1.0,
        min_p=rng.uniform(0.02, 0.3) if is_asked(0.2) else 0.0,
        presence_penalty=rng.uniform(-0.5, 2) if is_asked(0.4) else 0.0,
        frequency_penalty=rng.uniform(-0.5, 2) if is_asked(0.4) else 0.0,
        repetition_penalty=rng.uniform(0.8, 1.8) if is_asked() else 1.0,
        logit_bias={token: rng.uniform(0, 7) if is_asked(0.7) else -100.0 for token in biased},
        min_tokens=rng.randint(1, num_tokens) if has_stops and not has_grammar else 0,
        stop_token_ids=rng.sample(likely, min(4, len(likely))) if has_stops else [],
        seed=rng.getrandbits(48),
        ignore_eos=not has_grammar and is_asked(0.5),
        logprobs=rng.randint(0, 2) if is_asked() else None,
        verification=verification,
        draft_sample_method="greedy" if verification == "block" and is_asked() else None,
        origins=True,
        grammar=rng.choice(GRAMMARS) if has_grammar else None,
    )


def sampled(core: EngineCore, requests: list[Generate]) -> list[Text]:
    """Returns the texts of requests that run together."""
    texts = [Text(each, core.admission.sequences(each)[0], Completion(), []) for each in requests]
    # Rounds of requests without further needs may be those of the loop in C.
    asks_more = [each.params.grammar is not None or each.params.logprobs is not None for each in requests]
    plain, others = (
        [each for each, more in zip(requests, asks_more, strict=True) if more is wanted]
        for wanted in (False, True)
    )
    for output in chain(answers(core, plain), answers(core, others)):
        text = texts[int(output.request_id)]
        text.completion.add(output)
        text.origins += output.origins or []
    return texts


class Places:
    """Collects tokens' places in their laws: numbers between 0 and 1, by order and position."""

    def __init__(self, rng: random.Random) -> None:
        self._uniform = rng.random
        self.numbers: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._last: dict[tuple[int, str], tuple[int, float]] = {}

    def add(self, text: int, at: int, positions: set[str], order: str, before: float, own: float) -> None:
        """Adds a token's place: ``before`` is the mass of tokens that precede it in the order, ``own`` that
        of the token and its equals. The difference of neighbours, around the circle, is uniform if they are
        independent.
        """
        number = before + self._uniform() * own
        for position in positions:
            self.numbers[order, position].append(number)
        last_at, last = self._last.get((text, order), (-2, 0.0))
        if last_at == at - 1:
            self.numbers[order, NEIGHBOURS].append((number - last) % 1.0)
        self._last[text, order] = at, number

    def tests(self) -> dict[str, float]:
        """Returns the p-value of each position and order with enough numbers."""
        return {
            f"position {position} by {order}": uniformity(numbers)
            for (order, position), numbers in self.numbers.items()
            if len(numbers) >= MIN_TESTED
        }


def judge(
    core: EngineCore,
    texts: list[Text],
    verification: Verification,
    resolution: float,
    rng: random.Random,
    differences: list[str],
) -> LawResult:
    """Compares every token of the texts with the target's law. ``differences`` are those already known to be
    impossible."""
    places, impossible, gaps = Places(rng), differences, list[float]()
    vocab_size = core.target.vocab_size
    batch = max(1, min(MAX_BATCH, MAX_LOGITS // (NUM_TOKENS * vocab_size)))
    for begin in range(0, len(texts), batch):
        part = texts[begin : begin + batch]
        logits = whole_logits(core.target.model, vocab_size, part)
        drafts: list[torch.Tensor] = []
        if core.draft is not None and core.admission.encoder_decoder is None:
            drafts = whole_logits(core.draft.model, vocab_size, part)
        positions = [positions_of(text.origins, is_block=verification == "block") for text in part]
        for at in range(max(len(text.token_ids) for text in part)):
            rows = [row for row, text in enumerate(part) if len(text.token_ids) > at]
            members = [part[row] for row in rows]
            raw = torch.stack([logits[row][at] for row in rows])
            drafted = torch.stack([drafts[row][at] for row in rows]) if drafts else None
            law = law_of(core, members, raw)
            gaps += gaps_of(members, raw, at)
            impossible += ruled_out(core, members, raw, law, at, resolution)
            chosen = torch.tensor([text.token_ids[at] for text in members])[:, None]
            for order, scores, is_told in orders(core, members, at, raw, law, drafted):
                own = scores.gather(1, chosen)
                ahead, equal = ((law * where).sum(1).tolist() for where in (scores > own, scores == own))
                told = (is_told & (law.gather(1, chosen)[:, 0] > 0)).tolist()
                for number, row in enumerate(rows):
                    if told[number]:
                        places.add(begin + row, at, positions[row][at], order, ahead[number], equal[number])
            for text in members:
                text.follow(at)
    impossible += [
        f"request {text.number} does not end where it must" for text in texts if not text.ends_well
    ]
    tests = places.tests()
    worst = min(tests, key=lambda name: tests[name], default="")
    completions = [text.completion for text in texts]
    num_drafted = sum(completion.num_draft_tokens for completion in completions)
    return LawResult(
        verification=verification,
        num_texts=len(texts),
        num_tokens=sum(len(completion.token_ids) for completion in completions),
        num_tests=len(tests),
        p_value=min(1.0, tests.get(worst, 1.0) * len(tests)),
        worst=worst,
        found=detectable(len(places.numbers["likelihood", LATER]), len(tests)),
        impossible=impossible,
        largest_gap=max(gaps, default=0.0),
        are_far=is_wide(gaps, resolution),
        resolution=resolution,
        acceptance_rate=sum(each.num_accepted_tokens for each in completions) / max(1, num_drafted),
    )


def positions_of(origins: Sequence[RoundOrigin], is_block: bool) -> list[set[str]]:
    """Returns for each token the positions of rounds at which it is tested. Whether a round reaches a
    position must not depend on the token there: the block rule looks at all drafts before it accepts the
    first, so its positions count from the rounds' beginnings, whether or not rounds reach them."""
    ends = list(accumulate((origin.num_tokens for origin in origins), initial=0))
    positions: list[set[str]] = [{ALL} for _ in range(ends[-1])]
    for first, end, origin in zip(ends, ends[1:], origins, strict=False):
        for number in range(origin.num_drafted):
            place = first + number
            if place < (len(positions) if is_block else end):
                positions[place] |= {str(min(number + 1, LAST_POSITION)), *([LATER] if number else [])}
        if origin.num_tokens > origin.num_drafted:
            positions[end - 1].add(BONUS if origin.num_drafted else FIRST)
    return positions


@torch.inference_mode()
def whole_logits(model: Model, vocab_size: int, texts: list[Text]) -> list[torch.Tensor]:
    """Returns the logits of each text's tokens, [tokens, vocab_size], by one pass over an empty cache."""
    ids = [text.sequence.token_ids + text.token_ids[:-1] for text in texts]
    num_blocks = -(-max(map(len, ids)) // BLOCK_SIZE)
    spans = []
    for row, (text, own) in enumerate(zip(texts, ids, strict=True)):
        table = BlockTable(text.sequence.num_encoder_tokens)
        table.block_ids = list(range(row * num_blocks, (row + 1) * num_blocks))
        table.state_slot = row
        # A draft may have fewer token ids.
        spans.append(Span(table, [min(one, model.vocab_size - 1) for one in own], len(text.token_ids)))
    runner = ModelRunner.build(model, len(texts) * num_blocks, BLOCK_SIZE, num_state_slots=len(texts))
    logits = in_width(runner.forward(spans).logits.float().cpu(), vocab_size)
    return list(torch.split(logits, [len(text.token_ids) for text in texts]))


def law_of(
    core: EngineCore,
    texts: list[Text],
    logits: torch.Tensor,
    params: list[SamplingParams] | None = None,
    uncounted: list[int] | None = None,
) -> torch.Tensor:
    """Returns the distributions from which plain decoding draws each text's next token, float64 [texts, V].
    ``params`` replace the texts' own. The last tokens of each text may be ``uncounted``."""
    params = params or [text.request.params for text in texts]
    lone = [
        LoneText(
            own,
            Rule.EXACT_MATCH if text.sequence.greedy else Rule.REJECTION,
            token_ids=text.sequence.token_ids[: len(text.sequence.token_ids) - number],
            num_prompt_tokens=text.sequence.num_prompt_tokens,
            num_encoder_tokens=text.sequence.num_encoder_tokens,
            stop_token_ids=text.sequence.stop_token_ids,
            matcher=text.sequence.matcher,
            has_rules=text.sequence.has_rules,
        )
        for text, own, number in zip(texts, params, uncounted or [0] * len(texts), strict=True)
    ]
    rows, none = RowTable().rows_of(lone), torch.zeros(len(texts), 0, dtype=torch.int64)
    adjusted = adjust_logits(logits[:, None], rows, none, 0, core.target.model.rules)
    probs = to_probs(adjusted, SamplingTensors.build(params, logits.device))[:, 0].double()
    for row, text in enumerate(texts):
        if text.sequence.greedy:
            probs[row] = F.one_hot(adjusted[row, 0].argmax(), probs.shape[1])
    return probs / probs.sum(1, keepdim=True)


def orders(
    core: EngineCore,
    texts: list[Text],
    at: int,
    raw: torch.Tensor,
    law: torch.Tensor,
    drafted: torch.Tensor | None,
) -> Iterator[Order]:
    """Yields orders of tokens, as scores [texts, V], and for which texts they tell tokens apart. Each likely
    fault has an order: a flatter law, random numbers that are used twice, biases and penalties that are
    ignored or do not see the round's drafts, drafts that are accepted without a test, and texts that end too
    early or too late."""
    is_open = law.amax(1) < CERTAIN

    def is_unlike(other: torch.Tensor) -> torch.Tensor:
        return is_open & ((law - other).abs().sum(1) / 2 > ALIKE)

    yield "likelihood", law, is_open
    yield "id", torch.arange(law.shape[1]).expand_as(law), is_open
    for name, neutral in NEUTRAL.items():
        without = law_of(core, texts, raw, [replace(text.request.params, **neutral) for text in texts])
        yield name, law / without.clamp(min=TINY), is_unlike(without)
    at_start = law_of(core, texts, raw, uncounted=[text.offsets[at] for text in texts])
    yield "counts of the round", law / at_start.clamp(min=TINY), is_unlike(at_start)
    if drafted is not None:
        believed = law_of(core, texts, drafted)
        yield "draft", believed / law.clamp(min=TINY), is_unlike(believed)
    ends = torch.zeros_like(law)
    for row, text in enumerate(texts):
        ends[row, sorted(text.sequence.stop_token_ids)] = 1
    mass = (law * ends).sum(1)
    yield "ends", ends, (mass > ALIKE) & (mass < CERTAIN)


def gaps_of(texts: list[Text], raw: torch.Tensor, at: int) -> list[float]:
    """Returns how far the log-probabilities of the texts are from those of ``raw`` logits."""
    asking = [row for row, text in enumerate(texts) if text.request.params.logprobs is not None]
    gaps = []
    for own, row in zip(raw[asking].log_softmax(-1), asking, strict=True):
        told = texts[row].completion.logprobs[at]
        for token, logprob in [(told.token_id, told.logprob), *told.top]:
            gaps.append(abs(float(own[token]) - logprob))
    return gaps


def ruled_out(
    core: EngineCore, texts: list[Text], raw: torch.Tensor, law: torch.Tensor, at: int, resolution: float
) -> list[str]:
    """Describes the texts that have a token of probability zero. A token at a cut is excused as far as
    floating point resolves."""
    found = []
    for row, text in enumerate(texts):
        token, params = text.token_ids[at], text.request.params
        if law[row, token] > 0:
            continue
        eased = raw[row : row + 1].clone()
        eased[0, token] += 2 * resolution
        cuts = replace(
            params, top_p=min(1.0, params.top_p + resolution), min_p=params.min_p * (1 - resolution)
        )
        if not resolution or law_of(core, [text], eased, [cuts])[0, token] == 0:
            found.append(f"token {at + 1} of request {text.number} has probability zero")
    return found


def uniformity(numbers: Sequence[float]) -> float:
    """Returns the p-value of Anderson and Darling's statistic for numbers that should be uniform. The tail is
    that of the first term of its series; a tenth is added to stay above the exact value."""
    x = torch.tensor(sorted(numbers), dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    weights = 2 * torch.arange(len(x)) + 1
    statistic = -len(x) - float((weights * (x.log() + (1 - x.flip(0)).log())).mean())
    return tail(statistic)


def tail(statistic: float) -> float:
    return min(1.0, 1.1 * math.sqrt(3) * math.erfc(math.sqrt(max(0.0, statistic))))


def detectable(number: int, num_tests: int) -> float:
    """Returns the share of a law that, moved from its second half to its first, one of ``num_tests`` tests
    with ``number`` tokens finds in 9 of 10 cases."""
    statistic = 0.0
    while tail(statistic) * max(1, num_tests) > SIGNIFICANCE:
        statistic += 0.1
    return min(1.0, math.sqrt(POWER * statistic / max(1, number)))
