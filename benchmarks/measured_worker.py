"""The real worker, whose engine can also be run without the server, while that has no request for it.

So both are measured in one process: of two processes with the same model one may read its memory faster. Runs
that are asked for at ``--control``, the path of a socket, are answered with their tokens per second. Started
by ``benchmarks.online``.
"""

import argparse
import sys
from multiprocessing.connection import Client
from typing import Any

from benchmarks.common import OfflineRun
from benchmarks.engine_runs import decode_params, run_engine
from truedraft.engine.config import EngineConfig
from truedraft.engine.machine.lifeline import end_with_parent
from truedraft.engine.process import worker
from truedraft.engine.proposers.translated.pairing import load_tokenizer


class MeasuredWorker(worker.Worker):
    tokenizer: Any
    control: Any

    def _drain_inbox(self) -> None:
        super()._drain_inbox()
        if not self.core.has_work and self.control.poll():
            self.control.send(self._run_offline(self.control.recv()))

    def _run_offline(self, run: OfflineRun) -> float:
        prompts = [list(self.tokenizer.encode(prompt)) for prompt in run.prompts]
        params = decode_params(run.max_tokens, run.temperature)
        return run_engine(self.core, prompts, params, run.concurrency).tokens_per_second


def main() -> int:
    end_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", required=True)
    parser.add_argument("--config", required=True)
    options, others = parser.parse_known_args()
    sys.argv[1:] = ["--config", options.config, *others]
    MeasuredWorker.tokenizer = load_tokenizer(str(EngineConfig.model_validate_json(options.config).target))
    MeasuredWorker.control = Client(options.control, "AF_UNIX")
    worker.Worker = MeasuredWorker  # type: ignore[misc]
    worker.IDLE_POLL_MILLISECONDS = 10
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
