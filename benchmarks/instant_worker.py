"""A worker that answers at once: what is left of a request's time is the front end's.

Speaks ``engine.messages`` like ``engine.process.worker``, but has no model: each step gives every sequence
the next tokens of a fixed list. Started by ``benchmarks.front_end``.
"""

import argparse
import time
from collections import deque
from dataclasses import dataclass

from truedraft.engine.messages import (
    Abort,
    DraftCounts,
    FromWorker,
    Generate,
    Ready,
    Shutdown,
    Stats,
    StepOutput,
    TokenOutput,
    decode_to_worker,
)
from truedraft.engine.process.connection import Connection

# The bundled pair has as many. The ids are ordinary words and word parts.
VOCAB_SIZE = 2048
TOKEN_IDS = list(range(300, 1300))

IDLE_MILLISECONDS = 1000


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pause after a step, 0 for none")
    return parser.parse_args()


@dataclass
class Sequence:
    request_id: str
    index: int
    max_tokens: int
    num_tokens: int = 0

    def step(self, limit: int) -> TokenOutput:
        start = self.num_tokens
        self.num_tokens = min(start + limit, self.max_tokens)
        token_ids = [TOKEN_IDS[number % len(TOKEN_IDS)] for number in range(start, self.num_tokens)]
        is_over = self.num_tokens == self.max_tokens
        return TokenOutput(
            self.request_id, self.index, token_ids, "length" if is_over else None, 4, len(token_ids) - 1
        )


class InstantWorker:
    def __init__(self, options: argparse.Namespace, connection: Connection) -> None:
        self.options = options
        self.connection = connection
        self.sequences: deque[Sequence] = deque()
        self.num_rounds = 0

    def run(self) -> None:
        while self.take_messages(wait=not self.sequences):
            if self.sequences:
                self.step()
                if self.options.step_seconds and self.sequences:
                    time.sleep(self.options.step_seconds)

    def take_messages(self, *, wait: bool) -> bool:
        """Handle everything in the inbox; False when it has to leave."""
        while arrived := self.connection.receive(IDLE_MILLISECONDS if wait else 0):
            wait = False
            for message in map(decode_to_worker, arrived):
                match message:
                    case Generate() as request:
                        self.sequences += [
                            Sequence(request.request_id, index, request.params.max_tokens)
                            for index in range(request.n)
                        ]
                    case Abort() as abort:
                        self.sequences = deque(s for s in self.sequences if s.request_id != abort.request_id)
                    case Shutdown():
                        return False
        return True

    def step(self) -> None:
        outputs = [sequence.step(self.options.tokens_per_step) for sequence in self.sequences]
        finished = {(output.request_id, output.index) for output in outputs if output.finish_reason}
        self.sequences = deque(s for s in self.sequences if (s.request_id, s.index) not in finished)
        self.num_rounds += len(outputs)
        self.send(StepOutput(outputs, self.stats()))

    def send(self, message: FromWorker) -> None:
        self.connection.send(message)

    def stats(self) -> Stats:
        """Reports as many numbers as the real worker."""
        return Stats(
            num_running=len(self.sequences),
            num_waiting=0,
            num_speculative_tokens=4,
            cache_usage={"target": 0.5, "draft": 0.5},
            num_preemptions=0,
            num_prefix_queries=self.num_rounds,
            num_prefix_hits=self.num_rounds,
            drafts={"draft_model": DraftCounts(self.num_rounds, 4 * self.num_rounds, self.num_rounds)},
            draft_tokens_per_position=[self.num_rounds] * 4,
            accepted_tokens_per_position=[self.num_rounds] * 4,
            phase_seconds={phase: time.monotonic() for phase in ("draft", "score", "verify", "host")},
        )


def main() -> None:
    options = parse_arguments()
    worker = InstantWorker(options, Connection(options.socket))
    worker.send(
        Ready(
            target="instant",
            draft="instant",
            device="none",
            dtype="none",
            vocab_size=VOCAB_SIZE,
            max_model_len=4096,
            num_target_blocks=1 << 16,
            num_draft_blocks=1 << 16,
            block_size=16,
            methods=["draft_model", "ngram"],
            method="draft_model",
        )
    )
    worker.run()


if __name__ == "__main__":
    main()
