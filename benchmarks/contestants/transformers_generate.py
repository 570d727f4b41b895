"""transformers' ``generate``, without and with ``assistant_model``, on models of its own."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import Run, timed

GENERATE, ASSISTED = "transformers generate", "transformers assisted"


class TransformersGenerate:
    """Prompts one after the other, or all in one batch, which must then be of one length.

    ``generate`` has no batch with ``assistant_model``: a batch of prompts is then done one by one.
    """

    def __init__(self, target: Any, draft: Any | None, num_speculative_tokens: int) -> None:
        self.target, self.draft = target, draft
        self._num_passes = {"target": 0, "draft": 0}
        for name, model in (("target", target), ("draft", draft)):
            if model is None:
                continue
            # Nothing ends a sequence early: every variant does the same amount of work.
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
            model.register_forward_pre_hook(partial(self._count, name))
        if draft is not None:
            draft.generation_config.num_assistant_tokens = num_speculative_tokens
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0

    @classmethod
    def from_folders(
        cls, target: str, draft: str | None, num_speculative_tokens: int, device: str, dtype: torch.dtype
    ) -> "TransformersGenerate":
        def load(path: str) -> Any:
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()

        return cls(load(target), None if draft is None else load(draft), num_speculative_tokens)

    def _count(self, name: str, *_: Any) -> None:
        self._num_passes[name] += 1

    def run(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        temperature: float = 0.0,
        *,
        assisted: bool,
        batched: bool = False,
    ) -> Run:
        how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if temperature > 0:
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if assisted:
            how["assistant_model"] = self.draft
        batches = [list(prompts)] if batched and not assisted else [[prompt] for prompt in prompts]
        outputs: list[list[int]] = []
        self._num_passes = {"target": 0, "draft": 0}

        def work() -> None:
            for batch in batches:
                ids = torch.tensor(batch, device=self.target.device)
                output = self.target.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **how
                )
                outputs.extend(output[:, ids.shape[1] :].tolist())

        seconds = timed(work)
        num_tokens = sum(map(len, outputs))
        rounds, drafted = self._num_passes["target"], self._num_passes["draft"]
        if not drafted:
            return Run(num_tokens, seconds, token_ids=outputs)
        # Every pass of the target gives one token of its own; the others were accepted.
        return Run(num_tokens, seconds, rounds, drafted, num_tokens - rounds, outputs)

    def variants(
        self, prompts: Sequence[list[int]], max_tokens: int, temperature: float = 0.0
    ) -> dict[str, Callable[[], Run]]:
        run = partial(self.run, prompts, max_tokens, temperature)
        variants: dict[str, Callable[[], Run]] = {GENERATE: partial(run, assisted=False)}
        if self.draft is not None:
            variants[ASSISTED] = partial(run, assisted=True)
        return variants
