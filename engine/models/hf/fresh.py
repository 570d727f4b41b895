"""Runs models without cache, batch or any attention of ours: one text in, all of its logits out.

``engine.commands.replay`` and ``engine.commands.check`` compare the engine with them. They are slow on
purpose: every call computes the whole text anew. Some kernels round numbers that transformers' layers do not:
for such a model our own pass over an empty cache is the reference, which loading has compared with
transformers' layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from truedraft.engine.core.sequence import is_greedy
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models.base import ForwardOutput, Model, known_ends
from truedraft.engine.models.hf.generation_rules import decoder_start_ids, generation_rules
from truedraft.engine.models.hf.module import load_causal_model
from truedraft.engine.models.load import load_if_rounded
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.rows.columns import Rule
from truedraft.engine.rows.lone import LoneText
from truedraft.engine.sampling.processors import SamplingTensors, to_probs
from truedraft.engine.sampling.rules import NO_RULES, GenerationRules


class FreshModel:
    """Computes texts. ``served`` is the engine's model if our kernels round its layers' inputs; else None."""

    def __init__(self, path: str, options: LoadOptions) -> None:
        self.served = load_if_rounded(path, options)
        self.model: Any = self.served or load_causal_model(
            path, replace(options, device_map=None), attention="eager"
        )
        self.device = options.device
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        self.eos_token_ids = known_ends(self.model.generation_config, self.model.config, self.vocab_size)
        self.has_encoder = bool(self.model.config.is_encoder_decoder)

    def begin(self, prompt: list[int]) -> list[int]:
        """Returns the prompt's ids as a sequence holds them: an encoder's are followed by the decoder's
        start."""
        return [*prompt, *decoder_start_ids(self.model)] if self.has_encoder else list(prompt)

    @property
    def rules(self) -> GenerationRules:
        """Returns the checkpoint's rules, by which this target's engine forbids or forces tokens."""
        return generation_rules(self.model) if self.has_encoder else NO_RULES

    def text(
        self, params: SamplingParams, prompt: list[int], output: list[int], stop_token_ids: frozenset[int]
    ) -> LoneText:
        """Returns the text on which the token after ``prompt`` and ``output`` depends in this target's
        engine."""
        begun = self.begin(prompt)
        return LoneText(
            params,
            Rule.EXACT_MATCH if is_greedy(params) else Rule.REJECTION,
            token_ids=begun + output,
            num_prompt_tokens=len(begun),
            num_encoder_tokens=len(prompt) if self.has_encoder else 0,
            stop_token_ids=stop_token_ids,
            has_rules=bool(self.rules),
        )

    def stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Returns the tokens that end a sequence of this target, as the engine decides it."""
        asked = frozenset(params.stop_token_ids)
        return asked if params.ignore_eos else asked | self.eos_token_ids

    @torch.inference_mode()
    def logits(self, token_ids: list[int], vocab_size: int, num_encoder_tokens: int = 0) -> torch.Tensor:
        """Returns float32 [tokens, vocab_size]: the last row predicts the token after ``token_ids``, the row
        before it the last of them, and so on. ``num_encoder_tokens`` at the beginning have no rows.

        Ids that only the other model of a pair knows have probability zero here.
        """
        # An id that this model does not know has no embedding; only a draft can meet one.
        ids = torch.tensor([token_ids], device=self.device).clamp(max=self.vocab_size - 1)
        if self.served is not None:
            logits = from_empty_cache(self.served, ids[0].tolist()).logits
        elif self.has_encoder:
            read, written = ids[:, :num_encoder_tokens], ids[:, num_encoder_tokens:]
            logits = self.model(input_ids=read, decoder_input_ids=written, use_cache=False).logits[0].float()
        else:
            logits = self.model(input_ids=ids, use_cache=False).logits[0].float()
        return F.pad(logits, (0, vocab_size - logits.shape[-1]), value=-torch.inf)

    def following(self, text: LoneText, drafted: list[int], vocab_size: int) -> torch.Tensor:
        """Returns logits [drafted tokens + 1, vocab_size]: row j predicts what follows ``drafted[:j]``."""
        token_ids = text.token_ids + drafted
        found = self.logits(token_ids, vocab_size, num_encoder_tokens=text.num_encoder_tokens)
        return found[-len(drafted) - 1 :]


@torch.inference_mode()
def from_empty_cache(
    model: Model, token_ids: list[int], taps: Sequence[int] = (), states: torch.Tensor | None = None
) -> ForwardOutput:
    """Computes a text with one of our models, and the logits of all of its tokens. ``states`` are for a
    head's model, one for each token."""
    table = BlockTable()
    table.block_ids, table.state_slot = [0], 0
    runner = ModelRunner.build(model, num_blocks=1, block_size=len(token_ids), num_state_slots=1)
    return runner.forward([Span(table, token_ids, len(token_ids), states=states)], taps=taps)


def processed(adjusted_logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Returns the distributions that tokens are drawn from: float32 [positions, V]."""
    return to_probs(adjusted_logits[None], SamplingTensors.build([params], adjusted_logits.device))[0]
