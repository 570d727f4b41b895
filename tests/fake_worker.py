"""A worker without a model: speaks ``engine.messages`` and says what it is told to.

Sequence tokens are bytes of ``--text``, repeated for ever, several per step; ids are the bytes themselves,
as in the tests' byte-level tokenizer. Options make it slow, fail, or crash. Spawned by the server's tests.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import zmq

from engine.messages import (
    Abort,
    Failed,
    FinishReason,
    FromWorker,
    Generate,
    Ready,
    Shutdown,
    Stats,
    StepOutput,
    TokenOutput,
    decode_to_worker,
    encode,
)

VOCAB_SIZE = 260
EOS_TOKEN_ID = 256
MAX_MODEL_LEN = 512


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--text", default="Hello, wörld 😀! ", help="what every sequence says")
    parser.add_argument("--once", action="store_true", help="say it once, then end with the eos token")
    parser.add_argument("--tokens-per-step", type=int, default=4)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--fail-at-start", default="", help="message of a failed load")
    parser.add_argument("--crash-after", type=int, default=0, help="die after that many tokens")
    parser.add_argument("--crash-once", default="", help="crash only if this file does not exist yet")
    parser.add_argument("--refuse", default="", help="answer every request with this error message")
    parser.add_argument("--log", default="", help="file that gets one line per received message")
    return parser.parse_args()


@dataclass
class FakeSequence:
    request_id: str
    index: int
    max_tokens: int
    num_speculative_tokens: int
    script: Iterator[int]
    num_tokens: int = 0

    def step(self, limit: int) -> TokenOutput:
        token_ids = list(islice(self.script, min(limit, self.max_tokens - self.num_tokens)))
        self.num_tokens += len(token_ids)
        finish_reason: FinishReason | None = None
        if token_ids[-1] == EOS_TOKEN_ID:
            finish_reason = "stop"
        elif self.num_tokens == self.max_tokens:
            finish_reason = "length"
        drafted = self.num_speculative_tokens
        accepted = min(drafted, len(token_ids) - 1)
        return TokenOutput(self.request_id, self.index, token_ids, finish_reason, drafted, accepted)


class FakeWorker:
    def __init__(self, options: argparse.Namespace, socket: "zmq.Socket[bytes]") -> None:
        self.options = options
        self.socket = socket
        self.sequences: list[FakeSequence] = []
        self.num_tokens = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def send(self, message: FromWorker) -> None:
        self.socket.send(encode(message))

    def run(self) -> None:
        while self.take_messages(wait=not self.sequences):
            if self.sequences:
                time.sleep(self.options.step_seconds)
                self.step()

    def take_messages(self, *, wait: bool) -> bool:
        """Handle everything in the inbox; False when told to leave."""
        while wait or self.socket.poll(0):
            message = decode_to_worker(self.socket.recv())
            wait = False
            self.log(message)
            match message:
                case Generate():
                    self.add(message)
                case Abort():
                    self.sequences = [s for s in self.sequences if not is_meant(message, s)]
                case Shutdown():
                    return False
        return True

    def add(self, request: Generate) -> None:
        if self.options.refuse:
            self.send(Failed(request.request_id, "context_length_exceeded", self.options.refuse))
            return
        params = request.params
        length = 3 if params.num_speculative_tokens is None else params.num_speculative_tokens
        for index in range(request.n):
            script = self.script(ignore_eos=params.ignore_eos)
            self.sequences.append(FakeSequence(request.request_id, index, params.max_tokens, length, script))

    def script(self, *, ignore_eos: bool) -> Iterator[int]:
        while True:
            yield from self.options.text.encode()
            if self.options.once and not ignore_eos:
                yield EOS_TOKEN_ID
                return

    def step(self) -> None:
        outputs = [sequence.step(self.options.tokens_per_step) for sequence in self.sequences]
        finished = {(o.request_id, o.index) for o in outputs if o.finish_reason}
        self.sequences = [s for s in self.sequences if (s.request_id, s.index) not in finished]
        self.num_tokens += sum(len(output.token_ids) for output in outputs)
        self.num_drafts += sum(output.num_draft_tokens > 0 for output in outputs)
        self.num_draft_tokens += sum(output.num_draft_tokens for output in outputs)
        self.num_accepted_tokens += sum(output.num_accepted_tokens for output in outputs)
        self.send(StepOutput(outputs, self.stats()))
        if self.options.crash_after and self.num_tokens >= self.options.crash_after and self.may_crash():
            time.sleep(0.05)  # let the tokens leave
            os._exit(7)

    def may_crash(self) -> bool:
        marker = self.options.crash_once
        if not marker:
            return True
        if os.path.exists(marker):
            return False
        with open(marker, "w"):
            return True

    def stats(self) -> Stats:
        return Stats(
            num_running=len(self.sequences),
            num_waiting=0,
            num_speculative_tokens=3,
            cache_usage={"target": 0.25, "draft": 0.125},
            num_preemptions=0,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            draft_tokens_per_position=[self.num_drafts] * 3,
            accepted_tokens_per_position=[self.num_accepted_tokens, 0, 0],
            phase_seconds={"draft": 0.5, "score": 1.0, "verify": 0.1, "host": 0.1},
        )

    def log(self, message: object) -> None:
        if self.options.log:
            with open(self.options.log, "a") as file:
                file.write(f"{message}\n")


def is_meant(abort: Abort, sequence: FakeSequence) -> bool:
    return abort.request_id == sequence.request_id and abort.index in (None, sequence.index)


def main() -> None:
    options = parse_arguments()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(options.socket)
        time.sleep(options.load_seconds)
        worker = FakeWorker(options, socket)
        if options.fail_at_start:
            worker.send(Failed("", "load_failed", options.fail_at_start))
            time.sleep(0.05)
            sys.exit(3)
        worker.send(
            Ready("fake-target", "fake-draft", "cpu", "float32", VOCAB_SIZE, MAX_MODEL_LEN, 64, 64, 16)
        )
        worker.run()


if __name__ == "__main__":
    main()
