"""The oracle has plain and speculative decoding as the papers write them, with no cache and no batch.

A model is a plain function: ``model(ids)[i]`` is the distribution of the token that follows
``ids[: i + 1]``. The decoders leave every random decision to ``choose(probs) -> index``, so the same code
runs both ways: ``sampler(rng)`` draws, and ``outcomes`` follows every path and adds up its probability.

Speculative sampling is Algorithm 1 of Leviathan et al. (arXiv:2211.17192), which is Algorithm 2 of
Chen et al. (arXiv:2302.01318).
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Ids = list[int]
Probs = NDArray[np.float64]  # [vocab] or [tokens, vocab]
Model = Callable[[Ids], Probs]  # ids -> probs [len(ids), vocab]
Choose = Callable[[Probs], int]  # probs [outcomes] -> index of one outcome


def decode(target: Model, prompt: Ids, max_tokens: int, choose: Choose, eos: int | None = None) -> Ids:
    """Plain decoding: one target call for each token. An ``eos`` token ends the output and is part of it."""
    output: Ids = []
    while len(output) < max_tokens and eos not in output:
        output.append(choose(target(prompt + output)[-1]))
    return output


def speculative_decode(
    target: Model,
    draft: Model,
    num_speculative_tokens: int,
    prompt: Ids,
    max_tokens: int,
    choose: Choose,
    eos: int | None = None,
) -> Ids:
    """Speculative decoding: one target call for each round of 1 to ``num_speculative_tokens`` + 1 tokens."""
    output: Ids = []
    while len(output) < max_tokens and eos not in output:
        # A round may give one token more than it drafts: near the end draft less, never overshoot.
        num_draft_tokens = min(num_speculative_tokens, max_tokens - len(output) - 1)
        # 1. Draft tokens one by one; keep the distribution that each was drawn from.
        drafted, draft_probs = propose(draft, prompt + output, num_draft_tokens, choose)
        # 2. One target call scores every drafted token and the place after the last.
        target_probs = target(prompt + output + drafted)[-(len(drafted) + 1) :]
        # 3. and 4. Keep a prefix of the draft and draw one more token.
        for token in verify(target_probs, draft_probs, drafted, choose):
            output.append(token)
            if token == eos:
                break
    return output


def propose(draft: Model, ids: Ids, num_draft_tokens: int, choose: Choose) -> tuple[Ids, list[Probs]]:
    """Step 1. A deterministic draft is no special case: its distributions are one-hot."""
    drafted: Ids = []
    draft_probs: list[Probs] = []  # each [vocab]
    for _ in range(num_draft_tokens):
        draft_probs.append(draft(ids + drafted)[-1])
        drafted.append(choose(draft_probs[-1]))
    return drafted, draft_probs


def verify(target_probs: Probs, draft_probs: Sequence[Probs], drafted: Ids, choose: Choose) -> Ids:
    """Steps 3 and 4: the accepted tokens and one more. target_probs [len(drafted) + 1, vocab]."""
    # 3. Accept from the left, each token with probability min(1, target / draft), until one is rejected.
    num_accepted = 0
    for token, target_row, draft_row in zip(drafted, target_probs, draft_probs, strict=False):
        accept = accept_probability(target_row, draft_row, token)
        if choose(np.array([1.0 - accept, accept])) == 0:
            break
        num_accepted += 1
    # 4. Draw one more. After a rejection: the recovered token, from what the draft left of the target.
    #    After full acceptance: the bonus token, from the target itself.
    if num_accepted < len(drafted):
        last_row = residual(target_probs[num_accepted], draft_probs[num_accepted])
    else:
        last_row = target_probs[num_accepted]
    return drafted[:num_accepted] + [choose(last_row)]


def block_verify(target_probs: Probs, draft_probs: Sequence[Probs], drafted: Ids, choose: Choose) -> Ids:
    """Replaces ``verify`` by block verification (Sun et al., arXiv:2403.10444)."""
    # weights[i]: the probability that at least the first i drafted tokens stand, given what they are.
    weights = [1.0]
    for token, target_row, draft_row in zip(drafted, target_probs, draft_probs, strict=False):
        weights.append(min(1.0, weights[-1] * float(target_row[token] / draft_row[token])))
    # Keep the longest prefix whose own coin says yes.
    num_accepted = 0
    for length in range(len(drafted), 0, -1):
        accept = weights[length]
        if length < len(drafted):
            mass = np.maximum(weights[length] * target_probs[length] - draft_probs[length], 0.0).sum()
            accept = mass / (mass + 1.0 - weights[length]) if weights[length] < 1.0 else 1.0
        if choose(np.array([1.0 - accept, accept])) == 1:
            num_accepted = length
            break
    last_row = target_probs[num_accepted]
    if num_accepted < len(drafted):
        last_row = residual(weights[num_accepted] * last_row, draft_probs[num_accepted])
    return drafted[:num_accepted] + [choose(last_row)]


def accept_probability(target_row: Probs, draft_row: Probs, token: int) -> float:
    """min(1, target / draft); ``token`` was drawn from the draft, so its draft probability is positive."""
    return min(1.0, float(target_row[token] / draft_row[token]))


def residual(target_row: Probs, draft_row: Probs) -> Probs:
    """The positive part of target - draft, scaled to sum 1."""
    difference: Probs = np.maximum(target_row - draft_row, 0.0)
    if not difference.any():
        return target_row  # equal rows are never rejected; only rounding comes here
    difference /= difference.sum()
    return difference


def with_temperature(logits: Callable[[Ids], Probs], temperature: float) -> Model:
    """A model from logits. Temperature 0 is one-hot at the highest logit, the lowest index among equals."""

    def model(ids: Ids) -> Probs:
        rows = np.asarray(logits(ids), dtype=np.float64)
        if temperature == 0.0:
            return np.asarray(np.eye(rows.shape[-1])[rows.argmax(axis=-1)])
        weights = np.exp((rows - rows.max(axis=-1, keepdims=True)) / temperature)
        return np.asarray(weights / weights.sum(axis=-1, keepdims=True))

    return model


def sampler(rng: np.random.Generator) -> Choose:
    """Decide by drawing."""
    return lambda probs: int(rng.choice(len(probs), p=probs))


def outcomes(program: Callable[[Choose], Ids]) -> Iterator[tuple[Ids, float]]:
    """Run ``program(choose)`` once for each path through its decisions: its result and the probability."""

    def run(script: Ids) -> tuple[Ids, float]:
        path: Ids = []
        probability = 1.0

        def choose(probs: Probs) -> int:
            nonlocal probability
            if len(path) == len(script):  # a decision not met before: take the first branch, queue the others
                first, *others = (int(index) for index in np.flatnonzero(probs))
                script.append(first)
                unexplored.extend([*path, index] for index in others)
            path.append(script[len(path)])
            probability *= float(probs[path[-1]])
            return path[-1]

        return program(choose), probability

    unexplored: list[Ids] = [[]]
    while unexplored:
        yield run(unexplored.pop())


def joint_distribution(target: Model, prompt: Ids, num_tokens: int) -> Probs:
    """The probability of every continuation, [vocab] * num_tokens, straight from the definition."""
    vocab_size = target(prompt).shape[-1]
    joint = np.empty([vocab_size] * num_tokens)
    for tokens in np.ndindex(joint.shape):
        rows = target([*prompt, *tokens])[-num_tokens - 1 : -1]
        joint[tokens] = np.prod([row[token] for row, token in zip(rows, tokens, strict=True)])
    return joint


def speculative_joint_distribution(
    target: Model, draft: Model, num_speculative_tokens: int, prompt: Ids, num_tokens: int
) -> Probs:
    """The same for what ``speculative_decode`` emits: the sum over all its drafts and verdicts."""
    joint = np.zeros([target(prompt).shape[-1]] * num_tokens)
    for tokens, probability in outcomes(
        lambda choose: speculative_decode(target, draft, num_speculative_tokens, prompt, num_tokens, choose)
    ):
        joint[tuple(tokens)] += probability
    return joint
