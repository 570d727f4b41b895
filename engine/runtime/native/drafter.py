"""A drafter inside rounds in C (``rounds.h``) is a draft model, or a head on the target's states."""

from array import array
from ctypes import addressof

import torch

from truedraft.engine.core.sequence import Sequence
from truedraft.engine.core.step import MAX_CATCH_UP_TOKENS
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.pointers import PointerError, address
from truedraft.engine.models.heads.head import Head
from truedraft.engine.native.decoder import NativeDecoder
from truedraft.engine.native.library import Drafter
from truedraft.engine.proposers.draft_model import DraftModelProposer
from truedraft.engine.proposers.heads.proposer import HeadProposer
from truedraft.engine.proposers.heads.waiting import Waiting


class NativeDrafter:
    """``proposer`` drafts for ``target``; its model has a pass in C, too (``drafts_in_c``). C reads
    ``struct``."""

    def __init__(self, proposer: DraftModelProposer | HeadProposer, target: NativeDecoder) -> None:
        self.target = target
        self.proposer = proposer
        self.head = proposer if isinstance(proposer, HeadProposer) else None
        self.need, self.max_len = proposer.need, proposer.max_len
        self._describe()
        if self.head is not None:
            self.head.followers.append(lambda head: self._describe())

    def _describe(self) -> None:
        model = _pass_of(self.proposer)
        assert model is not None
        self.model = model
        self.struct = Drafter(model=addressof(model.decoder))
        if self.head is not None:
            self._describe_head(self.head.head)

    def _describe_head(self, head: Head) -> None:
        """Fills in what only heads have."""
        fusion, struct, target = head.fusion, self.struct, self.target
        num_layers, token_ids = target.decoder.num_layers, head.token_ids
        if fusion is None or (fusion.tap_size, fusion.size) != (target.hidden_size, self.model.hidden_size):
            raise PointerError("C does not make this head's states")
        if not all(0 <= tap <= num_layers for tap in head.taps):
            raise PointerError(f"there are {num_layers} layers, and no states after {list(head.taps)}")
        self._taps = array("q", head.taps)
        struct.fusion = addressof(fusion.struct)
        struct.taps = address(self._taps, torch.int64, (fusion.num_taps,))
        struct.output = head.output
        struct.max_waiting = MAX_CATCH_UP_TOKENS
        if token_ids is not None:
            if not ((token_ids >= 0) & (token_ids < target.vocab_size)).all():
                raise PointerError(f"a head drafts tokens that are none of the target's {target.vocab_size}")
            struct.token_ids = address(token_ids, torch.int64, (self.model.vocab_size,))

    def table(self, sequence: Sequence) -> BlockTable:
        """Returns that of the sequence in the drafter's cache."""
        return self.proposer.cache.table(sequence)

    def waiting(self, sequence: Sequence, num_told: int) -> Waiting | None:
        """Returns the states that wait for a head, if one follows the sequence: those of its first
        ``num_told`` tokens."""
        if self.head is None or not sequence.is_followed_by(self.head.name):
            return None
        return self.head.waiting(sequence, num_told)


def _pass_of(proposer: DraftModelProposer | HeadProposer) -> NativeDecoder | None:
    runner = proposer.runner if isinstance(proposer, HeadProposer) else proposer.model
    return runner.fast_pass if isinstance(runner.fast_pass, NativeDecoder) else None


def drafts_in_c(proposer: DraftModelProposer | HeadProposer) -> bool:
    """Tells whether the proposer's model has a pass in C."""
    return _pass_of(proposer) is not None
