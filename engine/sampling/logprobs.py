"""Computes log-probabilities for the client: of the target's raw logits, before any sampling parameter."""

import torch

from truedraft.engine.messages import TokenLogprob


def token_logprobs(
    logits: torch.Tensor, token_ids: list[int], num_top: int, given_ids: list[int] | None = None
) -> list[TokenLogprob]:
    """Returns one entry per token: ``logits`` [tokens, V] are the rows that predicted ``token_ids``. Each
    entry also has the log-probabilities of ``given_ids``."""
    logprobs = logits.float().log_softmax(-1)
    ids = torch.tensor(token_ids, device=logits.device)
    chosen = logprobs.gather(-1, ids[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    top = logprobs.topk(min(num_top, logits.shape[-1]))
    given_ids = given_ids or []
    given = logprobs[:, torch.tensor(given_ids, dtype=torch.long, device=logits.device)]
    return [
        TokenLogprob(
            token_id,
            logprob,
            list(zip(ids, values, strict=True)),
            rank,
            list(zip(given_ids, given_values, strict=True)),
        )
        for token_id, logprob, ids, values, rank, given_values in zip(
            token_ids,
            chosen.squeeze(-1).tolist(),
            top.indices.tolist(),
            top.values.tolist(),
            ranks.tolist(),
            given.tolist(),
            strict=True,
        )
    ]
