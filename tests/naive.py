"""Sampling parameters by their definitions: one row at a time, float64, loops. The oracle for the engine's.

Order: logit_bias, repetition, frequency and presence penalties, min_tokens, temperature, top-k, top-p, min-p.
Repetition looks at prompt and output, frequency and presence at the output alone.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from truedraft.engine.messages import SamplingParams

Row = NDArray[np.float64]  # [vocab]


def adjusted(
    logits: Row, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int]
) -> Row:
    """Logits after everything that comes before temperature."""
    logits = np.array(logits, dtype=np.float64)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in {*prompt, *output}:
        if logits[token] > 0:
            logits[token] /= params.repetition_penalty
        else:
            logits[token] *= params.repetition_penalty
    for token, count in Counter(output).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    if len(output) < params.min_tokens:
        logits[list(stop_ids)] = -np.inf
    return logits


def distribution(
    logits: Row,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
) -> Row:
    """What the next token is drawn from."""
    logits = adjusted(logits, params, prompt, output, stop_ids)
    if params.temperature == 0 or params.top_k == 1:
        return np.asarray(np.eye(len(logits))[logits.argmax()])
    weights = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    kept = order[: params.top_k] if params.top_k else order
    if params.top_p < 1:
        mass = weights[kept] / weights[kept].sum()
        kept = kept[: int((mass.cumsum() - mass < params.top_p).sum())]
    if params.min_p > 0:
        kept = kept[weights[kept] >= params.min_p * weights.max()]
    probs = np.zeros_like(weights)
    probs[kept] = weights[kept]
    return np.asarray(probs / probs.sum())


def joint(
    next_logits: Callable[[list[int]], Row],
    params: SamplingParams,
    prompt: Sequence[int],
    num_tokens: int,
    vocab_size: int,
    stop_ids: Sequence[int] = (),
) -> NDArray[np.float64]:
    """Exact distribution of the next ``num_tokens`` tokens: [vocab] * num_tokens."""
    table = np.empty([vocab_size] * num_tokens)
    for tokens in np.ndindex(table.shape):
        probability = 1.0
        for i, token in enumerate(tokens):
            if probability == 0:
                break
            logits = next_logits([*prompt, *tokens[:i]])
            probability *= float(distribution(logits, params, prompt, tokens[:i], stop_ids)[token])
        table[tokens] = probability
    return table
