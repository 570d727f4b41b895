"""Says where one sequence's keys, values and states are: plain integers, no tensors."""

BlockHash = bytes


class BlockTable:
    """Blocks of one sequence in one pool; the first ``num_computed_tokens`` of its ids are stored there.

    ``hashes`` are those of its first blocks, as far as they are published or taken over. The first
    ``num_encoder_tokens`` of the ids are an encoder's: what is stored for them is what the decoder's
    cross-attention looks at. ``state_slot`` is where recurrent layers keep the sequence's states, which are
    folded over its first ``num_folded_tokens``; later ones of the computed tokens may be taken back. The
    newest snapshot of the states is good for the first ``num_kept_tokens``; another text was found to have
    the first ``num_shared_tokens``, or 0 if there is a snapshot near by. Blocks have been taken away
    ``num_cuts`` times; others are only added at the end. The model has the adapter of the number ``adapter``
    for the sequence, or -1: none.
    """

    def __init__(self, num_encoder_tokens: int = 0, adapter: int = -1) -> None:
        self.num_encoder_tokens = num_encoder_tokens
        self.block_ids: list[int] = []
        self.num_computed_tokens = 0
        self.hashes: list[BlockHash] = []
        self.state_slot: int | None = None
        self.num_folded_tokens = 0
        self.num_kept_tokens = 0
        self.num_shared_tokens = 0
        self.num_cuts = 0
        self.adapter = adapter
