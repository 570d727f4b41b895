"""Runs Gemma 4's assistants: small models whose layers look at keys and values that the target has stored.

An assistant's layers compute queries only. Those with a window look at the target's last layer with one,
the others at its last layer without. A draft begins with the target's last state, after the last norm, and
the embedding that the target has of the pending token; the output state stands for the next one. Meanwhile
the query stays at the pending token's position, and sees what the target would see from there, as far as
that is stored: what is drafted has no keys.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch

from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.layers.decoder import DecoderWeights
from truedraft.engine.layers.linear import DenseEmbeddings, Embeddings, Linear
from truedraft.engine.memory.batch import Span, states_of
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.models.base import ForwardOutput, Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.native.native_run import NativeKernels
from truedraft.engine.rows.lone import LoneText

# A pass that measures costs has up to this many tokens.
MEASURED = 128


@dataclass(frozen=True)
class Clusters:
    """Finds a token by the cluster that it is in: of ``token_ids`` [clusters, tokens] a token gets the logits
    of the ``chosen`` clusters with the highest scores, by the rows of ``embeddings``."""

    embeddings: Embeddings
    token_ids: torch.Tensor
    chosen: int

    def logits(self, scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [tokens, vocab] for ``scores`` of clusters. Tokens of other clusters get one less
        than the lowest: a bias may still raise them."""
        ids = self.token_ids[scores.topk(self.chosen, dim=-1).indices].flatten(1)
        rows = []
        for chosen, x in zip(ids, hidden, strict=True):
            found = (self.embeddings.look_up(chosen).to(x.dtype) @ x).float()
            rows.append((found.min() - 1).repeat(self.token_ids.numel()).scatter_(0, chosen, found))
        return torch.stack(rows) if rows else hidden.new_empty(0, self.token_ids.numel()).float()


@dataclass(frozen=True)
class Assistant:
    """Holds what an assistant's file has. ``places`` are the target's layers at which its layers look:
    their ``source`` counts these. ``before`` makes the first hidden states of an embedding and a state,
    ``after`` a state of the last norm's output. ``weights`` lack embeddings; with ``clusters`` the output
    layer scores these."""

    facts: ModelFacts
    weights: DecoderWeights
    target: FusedDecoder
    places: tuple[int, ...]
    before: Linear
    after: Linear
    clusters: Clusters | None

    def decoder(self, inputs: torch.Tensor) -> FusedDecoder:
        """Returns the layers as a model whose token i has the first hidden state ``inputs[i]``."""
        weights = replace(self.weights, embeddings=DenseEmbeddings(inputs))
        if isinstance(begin := self.target.begin, NativeKernels):
            return FusedDecoder(self.facts, weights, NativeKernels(begin.library))
        return FusedDecoder(self.facts, weights)


class AssistantRunner(ModelRunner):
    """Runs an assistant over the cache of its target's runner: ``forward`` takes the target's token ids and
    states, and gives logits and the next states, without storing anything. A pass has up to ``num_rows``
    tokens."""

    def __init__(self, assistant: Assistant, target: ModelRunner, num_rows: int) -> None:
        size, facts = assistant.weights.norm.size, assistant.facts
        inputs = torch.zeros(max(num_rows, MEASURED), size, dtype=facts.dtype, device=facts.device)
        model = assistant.decoder(inputs)
        cache = target.cache.shared(assistant.places)
        super().__init__(model, cache, model.fast_pass(cache))
        self.assistant = assistant
        self.inputs = inputs
        self.vocab_size = target.vocab_size

    def forward(
        self, spans: list[Span], ids_on_device: torch.Tensor | None = None, taps: Sequence[int] = ()
    ) -> ForwardOutput:
        """Returns the logits after each token, and the state that stands for the next one: all tokens need
        logits. A pass that only measures costs brings no states."""
        with torch.inference_mode():
            assistant, target = self.assistant, self.assistant.target
            ids = ids_on_device
            if ids is None:
                ids = torch.tensor([token for span in spans for token in span.token_ids], device=self.device)
            embedded, given = target.weights.embed(ids, target.dtype), states_of(spans)
            states = torch.zeros_like(embedded) if given is None else given
            count = len(ids)
            assert count <= len(self.inputs)
            self.inputs[:count] = assistant.before(torch.cat((embedded, states), -1))
            numbers = iter(range(count))
            rows = [
                Span(span.table, [next(numbers) for _ in span.token_ids], len(span.token_ids))
                for span in spans
            ]
            scores, hidden = super().forward(rows, None, (self.model.num_layers,))
            assert hidden is not None
            normed = hidden[:, 0]
            clusters = assistant.clusters
            logits = scores if clusters is None else clusters.logits(scores, normed)
            return ForwardOutput(logits, assistant.after(normed)[:, None])

    def next_token(
        self, tables: Sequence[BlockTable], ids: list[int] | torch.Tensor, states: Sequence[torch.Tensor]
    ) -> ForwardOutput:
        """Runs a pass over a token of each sequence, known or on the device, with the state [1, hidden size]
        before it. ``tables`` are the target's, which holds all tokens but the pending one."""
        known = ids if isinstance(ids, list) else [0] * len(tables)
        spans = [
            Span(_seen(table), [token], 1, None, state)
            for table, token, state in zip(tables, known, states, strict=True)
        ]
        return self.forward(spans, None if isinstance(ids, list) else ids)


def _seen(table: BlockTable) -> BlockTable:
    """Returns the table as it is seen from the last stored token: there is none at the query's position."""
    seen = copy(table)
    seen.num_computed_tokens -= 1
    return seen


class FreshAssistant:
    """Runs ``assistant`` over an empty cache of ``target``, both as they are loaded for serving: a text in,
    its drafts' distributions out, for replays of traces."""

    BLOCK_SIZE = 16

    def __init__(self, target: Model, assistant: Assistant) -> None:
        self.target = target
        self.assistant = assistant

    @torch.inference_mode()
    def following(self, text: LoneText, drafted: list[int], vocab_size: int) -> torch.Tensor:
        """Computes what ``FreshModel.following`` does; the text has two tokens or more."""
        *known, last = text.token_ids
        num_blocks = -(-len(known) // self.BLOCK_SIZE)
        target = ModelRunner.build(self.target, num_blocks, self.BLOCK_SIZE)
        table = BlockTable()
        table.block_ids = list(range(num_blocks))
        hidden = target.forward([Span(table, known, 1)], taps=(self.target.num_layers,)).hidden
        assert hidden is not None
        runner, state, rows = AssistantRunner(self.assistant, target, 1), hidden[-1], []
        for token in (last, *drafted):
            logits, found = runner.next_token([table], [token], [state])
            assert found is not None
            rows.append(logits[:, :vocab_size])
            state = found[0]
        return torch.cat(rows)
