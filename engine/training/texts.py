"""Provides texts by a target, with the states of its layers, as its engine writes them.

Nothing is stored on disk: texts come in batches, are learned from, and forgotten.
"""

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import torch

from truedraft.engine.core.proposer import Observation, Proposer
from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import StepPlan
from truedraft.engine.library.params import SamplingParams
from truedraft.engine.llm import LLM
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.prompt_file import Prompt
from truedraft.engine.rows.drafts import Drafts
from truedraft.engine.sampling.sampler import Sampler


@dataclass(frozen=True)
class Text:
    """Holds a text. ``hidden`` [tokens - 1, taps, hidden size] are the states of all ``token_ids`` but the
    last."""

    token_ids: list[int]
    hidden: torch.Tensor


class Listener(Proposer):
    """Keeps the states that the target computes for each text, and drafts nothing.

    ``inputs_of`` returns, given the number of layers, the layers whose inputs are wanted. Those come first,
    and then the last layer's states after the target's last norm.
    """

    name = "listener"
    can_lag = False

    def __init__(self, inputs_of: Callable[[int], tuple[int, ...]]) -> None:
        self.inputs_of = inputs_of
        self.token_ids: dict[Sequence, list[int]] = {}
        self.hidden: dict[Sequence, list[torch.Tensor]] = {}

    def attach(self, target: ModelRunner) -> None:
        num_layers = target.model.num_layers
        self.taps = *(layer - 1 for layer in self.inputs_of(num_layers)), num_layers

    def observe(self, observations: Sequences[Observation]) -> None:
        for seen in observations:
            if seen.first == 0:  # A preempted text begins anew.
                self.token_ids[seen.sequence], self.hidden[seen.sequence] = [], []
            assert seen.hidden is not None
            self.token_ids[seen.sequence][seen.first :] = [*seen.token_ids, seen.next_token]
            self.hidden[seen.sequence].append(seen.hidden.clone())

    def propose(self, plan: StepPlan, sampler: Sampler) -> Drafts:
        return Drafts.empty(len(plan.rows), sampler.device)

    def take(self) -> list[Text]:
        """Returns all texts, and forgets them."""
        texts = [Text(ids, torch.cat(self.hidden[sequence])) for sequence, ids in self.token_ids.items()]
        self.token_ids, self.hidden = {}, {}
        return texts


class Writer:
    """Lets a target write texts that begin with ``prompts``, each of up to ``max_tokens`` tokens."""

    def __init__(
        self, llm: LLM, listener: Listener, prompts: list[Prompt], max_tokens: int, temperature: float
    ) -> None:
        self.llm = llm
        self.listener = listener
        self.prompts = [self._token_ids(prompt)[: max(1, max_tokens // 2)] for prompt in prompts]
        self.max_tokens = max_tokens
        self.temperature = temperature

    def write(self, first: int, count: int) -> list[Text]:
        """Continues prompts from number ``first`` on. After the last one the first follows again, with other
        random numbers."""
        numbers = range(first, first + count)
        prompts = [self.prompts[number % len(self.prompts)] for number in numbers]
        params = [
            SamplingParams(
                max_tokens=self.max_tokens - len(prompt),
                temperature=self.temperature,
                seed=number,
                method=Listener.name,
                num_speculative_tokens=1,
            )
            for prompt, number in zip(prompts, numbers, strict=True)
        ]
        self.llm.generate(prompts, params, progress=False)
        return self.listener.take()

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self.llm.tokenizer.encode(prompt))
        return self.llm.chat_template.token_ids(prompt, {})
