"""Runs Truedraft's own engine in this process: plain, speculative, and as it decides for itself."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.common import Run
from benchmarks.engine_runs import decode_params, run_engine
from truedraft.engine.build import build_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.process.worker import keep_loaded

PLAIN, SPECULATIVE, DEFAULT = "Truedraft plain", "Truedraft speculative", "Truedraft default"


class Truedraft:
    """One engine does all: plain decoding is its step with no drafts. ``auto``: there is a variant that
    leaves drafting to the engine, with n-grams where there is no draft model. ``note`` is added to the names
    of variants of a further engine, which has none without drafts."""

    def __init__(
        self,
        target: str,
        draft: str | None,
        num_speculative_tokens: int,
        num_threads: int,
        device: str,
        dtype: str,
        *,
        auto: bool = False,
        note: str = "",
        **others: Any,
    ) -> None:
        # Repeats see the same prompts: what an earlier one computed must not help.
        config = EngineConfig(
            target=target,
            draft=draft,
            num_speculative_tokens="auto" if auto else num_speculative_tokens,
            num_threads=num_threads,
            device=device,
            dtype=dtype,  # type: ignore[arg-type]
            prefix_caching=False,
            **others,
        )
        self.lengths: dict[str, int | None] = {DEFAULT: None} if auto else {}
        if draft is not None:
            self.lengths[SPECULATIVE] = num_speculative_tokens
        if note:
            self.lengths = {f"{name}, {note}": length for name, length in self.lengths.items()}
        else:
            self.lengths[PLAIN] = 0
        self.core = build_engine(config)
        keep_loaded()
        self.num_threads = torch.get_num_threads()

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
            for name, k in self.lengths.items()
        }
