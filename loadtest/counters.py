"""A server's own counts of drafted and accepted tokens, before and after a load.

Truedraft and vLLM publish them as Prometheus counters under the same names but for the prefix. A server
without them is measured all the same; its answers may still tell (see ``client``).
"""

import re
from dataclasses import dataclass
from typing import Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

_COUNTER = re.compile(r"(?:truedraft_|vllm:)spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total")


@dataclass(frozen=True)
class DraftCounters:
    """Since the server started: rounds that drafted, their tokens, and those that were accepted."""

    drafts: float = 0
    draft_tokens: float = 0
    accepted_tokens: float = 0

    def __sub__(self, earlier: Self) -> "DraftCounters":
        return DraftCounters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
        )

    def __add__(self, other: Self) -> "DraftCounters":
        return DraftCounters(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted_tokens + other.accepted_tokens,
        )


async def read_counters(session: aiohttp.ClientSession, base_url: str) -> DraftCounters | None:
    """Returns None if the server has no ``/metrics`` or counts no drafts there."""
    try:
        async with session.get(f"{base_url.removesuffix('/v1')}/metrics") as response:
            if response.status != 200:
                return None
            text = await response.text()
    except aiohttp.ClientError:
        return None
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if match := _COUNTER.fullmatch(sample.name):
                    sums[match[1]] = sums.get(match[1], 0.0) + sample.value
    except ValueError:  # not Prometheus text
        return None
    return DraftCounters(**sums) if sums else None
