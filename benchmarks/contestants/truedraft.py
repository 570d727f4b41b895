"""Truedraft's own engine, in this process, plain and speculative."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.common import Run
from benchmarks.engine_runs import decode_params, run_engine
from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.process.worker import keep_loaded

PLAIN, SPECULATIVE = "Truedraft plain", "Truedraft speculative"


class Truedraft:
    """One engine does both: plain decoding is its step with no drafts."""

    def __init__(
        self,
        target: str,
        draft: str | None,
        num_speculative_tokens: int,
        num_threads: int,
        device: str,
        dtype: str,
        **others: Any,
    ) -> None:
        # Repeats see the same prompts: what an earlier one computed must not help.
        config = EngineConfig(
            target=target,
            draft=draft,
            num_speculative_tokens=num_speculative_tokens,
            num_threads=num_threads,
            device=device,
            dtype=dtype,  # type: ignore[arg-type]
            prefix_caching=False,
            **others,
        )
        self.has_draft = draft is not None
        self.core = build_engine(config)
        keep_loaded()
        self.num_threads = torch.get_num_threads()
        self.num_speculative_tokens = num_speculative_tokens

    def variants(
        self, prompts: Sequence[list[int]], max_tokens: int, concurrency: int = 1
    ) -> dict[str, Callable[[], Run]]:
        return {
            name: partial(
                run_engine,
                self.core,
                prompts,
                decode_params(max_tokens, num_speculative_tokens=k),
                concurrency,
            )
            for name, k in ((PLAIN, 0), (SPECULATIVE, self.num_speculative_tokens))
            if name == PLAIN or self.has_draft
        }
