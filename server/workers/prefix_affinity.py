"""Guesses which worker has computed the beginning of a prompt, without asking the workers.

Each worker has a prefix cache of its own. A prompt is known by the hashes of its first 32, 64, 128 ...
tokens, and a worker by the hashes of the prompts that it got lately. Used by ``server.workers.worker_pool``.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from truedraft.engine.messages import Generate

SHORTEST, LONGEST = 32, 8192  # tokens; a longer prompt is looked up by its first ones
MAX_HASHES = 20_000  # some megabytes for each worker


class Prefix(NamedTuple):
    num_tokens: int
    hash: int


def prefixes_of(request: Generate) -> list[Prefix]:
    """Shortest first; none of a request that shares nothing."""
    if not request.cache_prompt:
        return []
    prefixes, length = [], SHORTEST
    adapter = request.adapter.digest if request.adapter is not None else ""
    while length <= min(len(request.prompt_token_ids), LONGEST):
        beginning = tuple(request.prompt_token_ids[:length])
        prefixes.append(Prefix(length, hash((adapter, request.cache_salt, beginning))))
        length *= 2
    return prefixes


class KnownPrefixes:
    """The beginnings of the prompts that one worker got lately."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def longest(self, prefixes: Sequence[Prefix]) -> int:
        """Tokens that the worker has probably computed."""
        return max((prefix.num_tokens for prefix in prefixes if prefix.hash in self._hashes), default=0)

    def add(self, prefixes: Sequence[Prefix]) -> None:
        for prefix in prefixes:
            self._hashes[prefix.hash] = None
            self._hashes.move_to_end(prefix.hash)
        while len(self._hashes) > MAX_HASHES:
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        self._hashes.clear()
