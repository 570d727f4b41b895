"""Defines a head, which drafts from hidden states of the target, by the parts of all kinds of heads.

A small decoder gets a token's embedding and the state before it, and its output state stands for the next
one. The first states are made of the target's states of a token in some layers.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers.linear import Linear, Linears, TorchLinears
from truedraft.engine.layers.norm import Norm
from truedraft.engine.messages import DraftVocabulary, HeadOutput, Method
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.heads.named_vocabulary import named
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.native.fusion import NativeFusion
from truedraft.engine.native.linears import NativeLinears
from truedraft.engine.native.mlp import native
from truedraft.engine.native.native_run import NativeKernels
from truedraft.engine.sampling.ops import in_width


@dataclass(frozen=True)
class Head:
    """Drafts from states. ``method`` is the name of drafting with it. ``model`` takes a state with each
    token; its logits are those of the tokens ``token_ids``, None: of all in order.

    ``taps`` are the target's layers whose outputs it reads, as in ``Proposer``: ``combine`` gets them normed
    together or one by one. Without ``combine`` there is one tap, whose output is the state. ``norm_output``:
    the next step gets the last norm's output instead of the norm's input.
    """

    method: Method
    model: FusedDecoder
    taps: tuple[int, ...]
    combine: Linear | None
    tap_norms: tuple[Norm, ...]
    joint_norm: Norm | None
    token_ids: torch.Tensor | None
    norm_output: bool
    # The output layer may be another one than the loaded one: a copy in four bits, or of some tokens.
    drafts_with: HeadOutput = "own"
    vocabulary: DraftVocabulary | None = None

    @property
    def output(self) -> int:
        """Returns the tap of ``model`` that stands for the next token's state."""
        num_layers = self.model.num_layers
        return num_layers if self.norm_output else num_layers - 1

    @property
    def hidden_size(self) -> int:
        """Returns the size of a state."""
        return self.model.weights.norm.size

    @cached_property
    def fusion(self) -> NativeFusion | None:
        """Returns the function that makes states in C, for rounds there, if ``model`` is computed in C."""
        if not isinstance(begin := self.model.begin, NativeKernels):
            return None
        num_taps = len(self.taps)
        width = num_taps * self.hidden_size if self.combine is None else native(self.combine).in_features
        return NativeFusion(
            begin.library, num_taps, width // num_taps, self.combine, self.tap_norms, self.joint_norm
        )

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Makes states [tokens, hidden size] of the target's ``hidden`` [tokens, taps, its hidden size]."""
        if self.fusion is not None:
            return self.fusion(hidden)
        if self.joint_norm is not None:
            hidden = self.joint_norm(hidden.flatten(1)).view_as(hidden)
        if self.tap_norms:
            normed = [norm(x) for norm, x in zip(self.tap_norms, hidden.unbind(1), strict=True)]
            hidden = torch.stack(normed, 1)
        return hidden.squeeze(1) if self.combine is None else self.combine(hidden.flatten(1))

    def in_width(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Returns ``logits`` of the drafted tokens in the target's width: others have probability zero."""
        if self.token_ids is None:
            return in_width(logits, vocab_size)
        wide = logits.new_full((len(logits), vocab_size), -torch.inf)
        return wide.index_copy_(1, self.token_ids, logits)

    def drafting(self, token_ids: torch.Tensor | None, output: Linear, in_four_bits: bool) -> "Head":
        """Returns the head with another output layer, which has a row for each of ``token_ids``."""
        weights = replace(self.model.weights, head=output)
        model = FusedDecoder(self.model.facts, weights, self.model.begin)
        model.keep_cache_in(self.model.cache_dtype)
        on_device = None if token_ids is None else token_ids.to(model.device)
        return replace(
            self,
            model=model,
            token_ids=on_device,
            drafts_with="int4" if in_four_bits else "own",
            vocabulary=None if token_ids is None else named(token_ids.cpu().numpy()),
        )


def check_target(path: str, target: Model) -> FusedDecoder:
    """Returns the target if a head can read its states; else raises ``ModelLoadError``."""
    if not isinstance(target, FusedDecoder):
        raise ModelLoadError(
            f"no head of {path} can draft: heads read states inside of the target, a "
            f"{target.config.model_type} model that is not served by fused layers; take a draft model instead"
        )
    return target


def linears_for(model: FusedDecoder, options: LoadOptions) -> Linears:
    """Returns an object that makes further linear layers for the backend of ``model``."""
    if isinstance(model.begin, NativeKernels):
        return NativeLinears(model.begin.library, options.compact_weights, bf16=model.bf16_linears)
    return TorchLinears()
