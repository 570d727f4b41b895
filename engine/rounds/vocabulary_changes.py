"""Changes between steps which tokens a head drafts, and in how many bits, as texts are served.

A round's drafts are drawn and verified in one step, so each is verified with the distribution that it was
drawn from, whatever the next step drafts with. A new layer is made of the checkpoint in a thread of its own
while the old one drafts on, and there is never more than one that is not in use. It is timed before it is
taken: one that takes longer than its size promised is dropped.
"""

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple

import torch

from truedraft.engine.core.step import Kind, StepPlan, StepResult
from truedraft.engine.layers.decoder import MakeOutput
from truedraft.engine.layers.linear import Linear
from truedraft.engine.machine.beside import start_beside
from truedraft.engine.machine.heap import trim_heap
from truedraft.engine.models.heads.served_tokens import Ids, ServedTokens
from truedraft.engine.proposers.heads.proposer import HeadProposer
from truedraft.engine.rounds.draft_vocabulary import Chosen, in_words, output_seconds, smaller_sizes
from truedraft.engine.speculation.costs import PassCosts
from truedraft.engine.speculation.planner import SpeculationPlanner, by_proposer
from truedraft.engine.speculation.vocabulary_choice import LEAST_GAIN, Layer, VocabularyChoice

# Steps that are learned from together.
STEPS = 16

logger = logging.getLogger(__name__)


class Making(NamedTuple):
    """Holds a layer that is being made, of ``token_ids``; None: of all."""

    layer: Layer
    token_ids: Ids | None
    made: Future[Linear | None]


class VocabularyChanges:
    """Implements ``core.planning.Reviser``: it lets ``proposer`` draft what promises most by ``planner``.
    ``own`` is the target's output layer, of which ``make`` makes others; ``chosen`` is what it begins with,
    and ``always`` are tokens that are drafted in any case."""

    def __init__(
        self,
        proposer: HeadProposer,
        planner: SpeculationPlanner,
        own: Linear,
        make: MakeOutput,
        chosen: Chosen,
        always: Iterable[int],
    ) -> None:
        self.proposer = proposer
        self.planner = planner
        self.vocab_size = proposer.vocab_size
        self._own = own
        self._make = make
        self._curves = chosen.curves
        sizes = smaller_sizes(self.vocab_size)
        layers = [Layer(size, bits) for size in (self.vocab_size, *sizes) for bits in sorted(self._curves)]
        self.served = ServedTokens(self.vocab_size, sizes, always)
        self.choice = VocabularyChoice(layers, Layer(self.vocab_size, chosen.in_four_bits))
        self._first, self._first_passes = self.choice.current, planner.costs.drafts[proposer.name]
        # What a layer takes, by what its size and its bits promise.
        self._slower = dict.fromkeys(layers, 1.0)
        self.num_changes = 0
        self._making: Making | None = None
        self._steps: list[tuple[StepPlan, StepResult]] = []

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        self._steps.append((plan, result))
        if self._making is not None and self._making.made.done():
            making, self._making = self._making, None
            self._learn()  # the steps so far have drafted with the layer that may go
            self._take(making)
        if len(self._steps) >= STEPS:
            self._learn()
            if self._making is None:
                self._review()

    def state(self) -> dict[str, object]:
        """Returns builtins for ``GET /speculation``."""
        layer, found = self.choice.current, self.choice.found
        ids = self.proposer.head.token_ids
        state = {
            "tokens": layer.num_tokens,
            "of": self.vocab_size,
            "in_four_bits": layer.in_four_bits,
            "share_of_outputs": round(self.served.drafted_share, 4),
            "changes": self.num_changes,
        }
        why = in_words(ids, self.vocab_size, layer.in_four_bits)
        if found is None:
            return state | {"why": f"{why}, as measured at start: too few tokens have been served to compare"}
        other = f"{found.layer.num_tokens} tokens" + (" in 4 bits" if found.layer.in_four_bits else "")
        return state | {"why": f"{why}: at best {other} would make {found.gain:.2f} times the speed"}

    def _learn(self) -> None:
        num_drafts = num_accepted = 0
        name = self.proposer.name
        for plan, result in self._steps:
            for part in plan.prompts:
                if part.kind is Kind.PROMPT:
                    sequence = part.sequence
                    first = sequence.num_cached_tokens or 0  # what requests share counts once
                    self.served.read_prompt(sequence.token_ids[first : sequence.num_prompt_tokens])
            for place, part in enumerate(plan.rows):
                self.served.read_output([token for one in result.rounds for token in one.emitted[place]])
                if part.draft.source == name:
                    verdicts = [each for each in by_proposer(place, part, result.rounds)[0] if each[0]]
                    num_drafts += len(verdicts)
                    num_accepted += sum([accepted > 0 for _, accepted in verdicts])
        self.choice.learn(num_drafts, num_accepted)
        self._steps.clear()

    def _shares(self) -> dict[Layer, float]:
        return {layer: self.served.share(layer.num_tokens) for layer in self.choice.layers}

    def _rate(self, layer: Layer, accepted: float) -> float | None:
        return self.planner.rate_with(self.proposer.name, self._passes(layer), accepted)

    def _seconds(self, layer: Layer, num_tokens: float) -> float:
        """Returns what an output layer takes: memory is read row by row."""
        share = layer.num_tokens / self.vocab_size
        return self._slower[layer] * share * self._curves[layer.in_four_bits](num_tokens)

    def _passes(self, layer: Layer) -> PassCosts:
        """Returns what the head's passes take with a layer: what was measured at start, with another layer's
        time, and no less than that."""
        first = self._first_passes

        def longer(num_tokens: float) -> float:
            own, before = self._seconds(layer, num_tokens), self._seconds(self._first, num_tokens)
            return max(own - before, own - first.by_tokens(num_tokens))

        return first if layer == self._first else first.plus(longer)

    def _review(self) -> None:
        served = self.served
        layer = self.choice.review(served.num_outputs, self._shares(), served.drafted_share, self._rate)
        if layer is None:
            return
        ids = None if layer.num_tokens == self.vocab_size else served.most_frequent(layer.num_tokens)
        logger.debug("Making an output layer of %s", in_words(ids, self.vocab_size, layer.in_four_bits))
        if ids is None and not layer.in_four_bits:
            self._use(layer, None, self._own)
        else:
            made = start_beside(lambda: self._make(ids, layer.in_four_bits))
            self._making = Making(layer, ids, made)

    def _take(self, making: Making) -> None:
        """Takes a layer that has been made, unless it was made in vain."""
        layer, token_ids, made = making
        if (error := made.exception()) is not None:
            logger.warning("No other output layer could be made for the head: %s", error)
        linear = None if error is not None else made.result()
        if linear is None or not self._still_pays(layer, linear):
            self.choice.wait(self.served.num_outputs)
            return
        self._use(layer, token_ids, linear)

    def _still_pays(self, layer: Layer, linear: Linear) -> bool:
        """Times the layer next to the one in use, at the same moment."""
        model = self.proposer.head.model
        current = self.choice.current
        ours, theirs = (output_seconds(each, model, 1) for each in (linear, model.weights.head))
        promised = self._seconds(layer, 1) / self._seconds(current, 1)
        self._slower[layer] *= ours / theirs / promised
        accepted = self.choice.accepted(layer, self._shares(), self.served.drafted_share)
        before, after = self._rate(current, 1.0), self._rate(layer, accepted)
        return before is not None and after is not None and after >= LEAST_GAIN * before

    def _use(self, layer: Layer, token_ids: Ids | None, linear: Linear) -> None:
        served, choice = self.served, self.choice
        accepted = choice.accepted(layer, self._shares(), served.drafted_share)
        ids = None if token_ids is None else torch.from_numpy(token_ids)
        self.proposer.draft_with(ids, linear, layer.in_four_bits)
        choice.change(layer, served.num_outputs, served.drafted_share)
        served.draft(token_ids)
        self.num_changes += 1
        self.planner.change(self.proposer.name, self._passes(layer), accepted)
        trim_heap()
        logger.info(
            "The head drafts %s from now on", in_words(token_ids, self.vocab_size, layer.in_four_bits)
        )
