"""Describes attention to a short vector of each token in place of keys and values (arXiv 2405.04434).

In multi-head latent attention a head's keys and values are linear functions of one vector of a token, its
latent vector. The function that makes a head's keys can as well be transposed and applied to the head's
queries, and the one that makes values can be applied to the attention's output. So all heads share one key,
the latent vector after the rotated numbers, which is also its value, and nothing else is stored for a token.
"""

from dataclasses import dataclass

import torch

from truedraft.engine.layers.linear import Linear
from truedraft.engine.layers.mlp import HeadLinears, MlpRun
from truedraft.engine.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """Computes the inputs of attention for a token, and the input of its output layer.

    ``down`` makes the queries' latent vector, or queries themselves, then the latent vector, then the
    ``num_turned`` rotated numbers with which the key begins, as queries do. ``query_up`` makes queries of the
    first vector after its norm. A head's ``key_up`` turns those numbers of its queries that are not rotated
    into queries for latent vectors; its ``value_up`` makes values of latent vectors.
    """

    down: Linear
    norm: Norm
    key_up: HeadLinears
    value_up: HeadLinears
    query_size: int
    num_turned: int
    value_size: int
    query_norm: Norm | None = None
    query_up: Linear | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        queries = () if self.query_up is None else (self.query_up,)
        return self.down, *queries, *self.key_up.linears, *self.value_up.linears

    @property
    def num_heads(self) -> int:
        return len(self.key_up.linears)

    @property
    def key_size(self) -> int:
        return self.num_turned + self.norm.size

    @property
    def num_queries(self) -> int:
        """Returns the size of the queries' latent vector, or of the queries."""
        return self.num_heads * self.query_size if self.query_norm is None else self.query_norm.size

    def working_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns the bytes that a pass needs for a token at once: queries twice, queries for latent vectors
        and the key, and as much again, for these queries or for the attention's output."""
        numbers = 2 * (self.num_heads + 1) * self.key_size + 2 * self.num_heads * self.query_size
        return numbers * dtype.itemsize

    def __call__(self, x: torch.Tensor, run: MlpRun) -> torch.Tensor:
        """Returns [tokens, (heads + 1) * size of the key]."""
        sizes = self.num_queries, self.norm.size, self.num_turned
        queries, latent, turned = run.linear(self.down, x).split_with_sizes(sizes, 1)
        if self.query_norm is not None:
            assert self.query_up is not None
            queries = run.linear(self.query_up, run.norm(self.query_norm, queries.contiguous()))
        heads = queries.reshape(len(x), self.num_heads, -1)
        joined = x.new_empty(len(x), self.num_heads + 1, self.key_size)
        attending, key = joined[:, :-1], joined[:, -1]
        attending[..., : self.num_turned] = heads[..., : self.num_turned]
        attending[..., self.num_turned :] = run.by_head(self.key_up, heads[..., self.num_turned :])
        key[:, : self.num_turned] = turned
        key[:, self.num_turned :] = run.norm(self.norm, latent.contiguous())
        return joined.flatten(1)

    def values(self, attended: torch.Tensor, run: MlpRun) -> torch.Tensor:
        """Returns [tokens, heads * value size] for the attention's output, [tokens, heads * size]: the last
        numbers of each head are a mixture of latent vectors."""
        heads = attended.view(len(attended), self.num_heads, -1)
        return run.by_head(self.value_up, heads[..., -self.norm.size :]).flatten(1)
