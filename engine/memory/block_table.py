"""Says where one sequence's keys, values and states are: plain integers, no tensors of its own."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from truedraft.engine.memory.pictures import PromptPictures

BlockHash = bytes


class BlockTable:
    """Holds the blocks of one sequence in one pool; the first ``num_computed_tokens`` of its ids are stored
    there.

    ``hashes`` are those of its first blocks, as far as they are published or taken over, and ``beginning``
    those of its text's first blocks, as far as files were asked for them. The first
    ``num_encoder_tokens`` of the ids are an encoder's; the decoder's cross-attention reads what is stored for
    them. ``state_slot`` has the sequence's states in recurrent layers, which are folded over its first
    ``num_folded_tokens``; later ones of the computed tokens may be taken back. The newest beginning that is
    kept for other texts, with a snapshot of the states, has ``num_kept_tokens``. Another text shares the
    first ``num_shared_tokens``; 0 if there is a kept beginning near by. Blocks have been taken away
    ``num_cuts`` times; others are only added at the end. ``adapter`` is the number of the adapter that the
    model has for the sequence; -1 if it has none. ``pictures`` are those that the model sees in the
    sequence's prompt, if there are some.

    Where layers with a window have blocks of their own, ``window_ids`` has as many entries as ``block_ids``.
    Those from ``first_window_block`` on, up to ``end_window_block``, are there: earlier ones have been let
    go, as no token will look at them any more, and later ones are not written to yet. All other entries name
    a block that belongs to nobody. ``num_promised`` blocks are promised to it (``WindowBlocks``).
    """

    def __init__(
        self, num_encoder_tokens: int = 0, adapter: int = -1, pictures: "PromptPictures | None" = None
    ) -> None:
        self.num_encoder_tokens = num_encoder_tokens
        self.block_ids: list[int] = []
        self.num_computed_tokens = 0
        self.hashes: list[BlockHash] = []
        self.beginning: list[BlockHash] = []
        self.state_slot: int | None = None
        self.num_folded_tokens = 0
        self.num_kept_tokens = 0
        self.num_shared_tokens = 0
        self.num_cuts = 0
        self.adapter = adapter
        self.pictures = pictures
        self.window_ids: list[int] | None = None
        self.first_window_block = 0
        self.end_window_block = 0
        self.num_promised = 0

    @property
    def is_past_pictures(self) -> bool:
        """Tells whether what is not computed yet has no picture, so that positions are shifted indices."""
        return self.pictures is None or self.num_computed_tokens >= self.pictures.end

    @property
    def shift(self) -> int:
        """Returns what is added to the index of a token after the pictures for its position."""
        return 0 if self.pictures is None else self.pictures.shift

    def ids_of(self, has_window: bool) -> list[int]:
        """Returns the blocks of layers with a window, or of the others."""
        return self.window_ids if has_window and self.window_ids is not None else self.block_ids

    @property
    def entries(self) -> list[int]:
        """Returns the ids as C reads them: each block's, followed by that of layers with a window if they
        have their own."""
        if self.window_ids is None:
            return self.block_ids
        entries = [0] * (2 * len(self.block_ids))
        entries[::2], entries[1::2] = self.block_ids, self.window_ids
        return entries
