"""Streamed completions as they come and go on a server that many use; every variant gets the same ones.

32 to 256 tokens; a third each greedy, at temperature 0.8, and at 0.8 with a seed; one in ten with a penalty,
log-probabilities or biases. All is drawn from the block's key, the client and the request's number.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from benchmarks.closed_loop import Request
from benchmarks.http_load import post

SHORTEST, LONGEST = 32, 256  # answers, in tokens
ONE_IN = 10  # requests that have one of the extras
EXTRAS: Sequence[Mapping[str, Any]] = (
    {"frequency_penalty": 0.5},
    {"logprobs": 2},
    {"logit_bias": {"300": 2.0, "301": -2.0, "302": -100.0}},
)


def requests(
    model: str, prompts: Sequence[list[int]], fields: Mapping[str, Any], key: str, client: int
) -> Iterator[Request]:
    """Yields requests of one client in one block, without end; ``fields`` are added to each.

    The first one is shorter, or all clients would begin and end in step. Kinds of sampling and extras come by
    turns, from another beginning for each key: drawn, a short block could have any number of them.
    """
    start = random.Random(key).randrange(3 * ONE_IN)
    for number in count():
        draw = random.Random(f"{key} {client} {number}")
        turn = start + client + number
        num_tokens = draw.randint(SHORTEST, LONGEST)
        if number == 0:
            num_tokens = draw.randint(1, num_tokens)
        sampling: Sequence[Mapping[str, Any]] = (
            {"temperature": 0.0},
            {"temperature": 0.8},
            {"temperature": 0.8, "seed": draw.getrandbits(31)},
        )
        body = {
            "model": model,
            "prompt": draw.choice(prompts),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **sampling[turn % 3],
            **(draw.choice(EXTRAS) if turn % ONE_IN == 0 else {}),
            **fields,
        }
        yield Request(post("/v1/completions", body), num_tokens)
