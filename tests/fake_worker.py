"""A worker without a model speaks ``engine.messages`` and says what it is told to.

Sequence tokens are bytes of ``--text``, repeated for ever, several per step; ids are the bytes themselves,
as in the tests' byte-level tokenizer. Log-probabilities follow from the position (``logprob_at``). Prompts
are taken over from earlier ones as from a prefix cache. Options make it fail; a file of orders stops
it after so many steps, or kills it, whenever a test wants (``tests.server.orders``). Spawned by the server's
tests.
"""

import argparse
import json
import os
import signal
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from os.path import commonprefix
from pathlib import Path

from tests.server.orders import DIE, HANG
from truedraft.engine.core.prediction import Prediction, PredictionCursor
from truedraft.engine.machine.lifeline import end_with_parent
from truedraft.engine.messages import (
    Abort,
    Cleared,
    ClearPrefixes,
    DraftCounts,
    DraftVocabulary,
    Embed,
    Embedded,
    EmbeddingFacts,
    Failed,
    FinishReason,
    FromWorker,
    Generate,
    Loading,
    PredictionUse,
    Ready,
    RoundOrigin,
    RoundTrace,
    SamplingParams,
    Shutdown,
    Source,
    Stats,
    StepOutput,
    Text,
    TokenLogprob,
    TokenOutput,
    decode_to_worker,
)
from truedraft.engine.process.connection import Connection
from truedraft.engine.process.heartbeat import Heartbeats
from truedraft.engine.process.spawned import FOR_THE_FRONT_END

VOCAB_SIZE = 260
EOS_TOKEN_ID = 256
MAX_MODEL_LEN = 512
BLOCK_SIZE = 16
NUM_DRAFTED = 3  # unless the request says otherwise
QUEUE_SECONDS = 0.25
DRAWN_SEED = 1000  # the seed that a request without one gets
POLL_MILLISECONDS = 10  # an idle worker notices an order within this time

# Vectors of a worker that makes some.
VECTORS = EmbeddingFacts(4, {"query": "Q:", "document": "D:"}, dimensions=[2, 3], shortens=True)

# What `logprob_at` says of every tenth token: as good as impossible.
IMPOSSIBLE = float("-inf")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--text", default="Hello, wörld 😀! ", help="what every sequence says")
    parser.add_argument("--replies", default="", help="JSON file of pairs; see FakeWorker.reply_to")
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--once", action="store_true", help="say it once, then end with the eos token")
    parser.add_argument("--tokens-per-step", type=int, default=4)
    parser.add_argument("--fail-at-start", default="", help="message of a failed load")
    parser.add_argument("--crash-on", default="", help="die of a request with this prompt")
    parser.add_argument("--max-running", type=int, default=1000, help="sequences that take part in a step")
    parser.add_argument("--orders", default="", help="file that holds back or kills; see tests.server.orders")
    parser.add_argument("--refuse", default="", help="answer every request with this error message")
    parser.add_argument("--refusal-code", default="context_length_exceeded")
    parser.add_argument("--sources", default="", help="what drafts here, by turns")
    parser.add_argument("--troubled", action="store_true", help="report preemptions, and no accepted draft")
    parser.add_argument("--worker-bytes", type=int, default=0, help="memory that it says to take")
    parser.add_argument("--task", default="generate", help="what the worker says that it is for")
    parser.add_argument("--log", default="", help="file that gets one line per received message")
    return parser.parse_args()


def logprob_at(position: int) -> float:
    """Returns the log-probability of the token at ``position`` in prompt plus output."""
    return IMPOSSIBLE if position % 10 == 9 else -position / 8


def given_logprob(token_id: int, position: int) -> float:
    """Returns the log-probability of a token that ``logprob_token_ids`` names."""
    return -1 - token_id % 7 - position / 8


def scored(token_id: int, position: int, num_top: int, given_ids: list[int] | None = None) -> TokenLogprob:
    """The token itself is the second most likely one; the ids after it are the others."""
    chosen = logprob_at(position)
    others = [((token_id + offset) % VOCAB_SIZE, chosen - offset) for offset in range(1, VOCAB_SIZE)]
    most_likely = ((token_id + VOCAB_SIZE - 1) % VOCAB_SIZE, -0.0625)
    given = [(one, given_logprob(one, position)) for one in given_ids or []]
    return TokenLogprob(token_id, chosen, [most_likely, (token_id, chosen), *others][:num_top], 2, given)


@dataclass
class FakeSequence:
    source: Source
    request_id: str
    index: int
    params: SamplingParams
    prompt: list[int]
    script: Iterator[int]
    num_cached_tokens: int
    priority: tuple[int, int]
    output: list[int] = field(default_factory=list)
    prediction: PredictionCursor | None = None

    def step(self, limit: int) -> TokenOutput:
        params, start = self.params, len(self.prompt) + len(self.output)
        token_ids = list(islice(self.script, min(limit, params.max_tokens - len(self.output))))
        is_first = not self.output
        self.output += token_ids
        length = params.num_speculative_tokens
        drafted = NUM_DRAFTED if length is None else length
        accepted = min(drafted, len(token_ids) - 1)
        return TokenOutput(
            self.request_id,
            self.index,
            token_ids,
            self.finish_reason(),
            drafted,
            accepted,
            num_cached_tokens=self.num_cached_tokens,
            queue_seconds=QUEUE_SECONDS if is_first else None,
            seed=(DRAWN_SEED if params.seed is None else params.seed) + self.index,
            logprobs=self.logprobs(token_ids, start),
            prompt_logprobs=self.prompt_logprobs() if is_first else None,
            trace=self.trace(token_ids, start, drafted, accepted) if params.trace else None,
            prediction=self.use_prediction(token_ids, drafted),
            origins=[RoundOrigin(self.source, drafted, accepted, len(token_ids))] if params.origins else None,
        )

    def use_prediction(self, token_ids: list[int], drafted: int) -> PredictionUse | None:
        if self.prediction is None:
            return None
        first, expected = self.prediction.place, self.prediction.expected(drafted)
        return PredictionUse(self.prediction.follow(token_ids), first, len(expected))

    def finish_reason(self) -> FinishReason | None:
        if self.output[-1] == EOS_TOKEN_ID:
            return "stop"
        return "length" if len(self.output) == self.params.max_tokens else None

    def logprobs(self, token_ids: list[int], start: int) -> list[TokenLogprob] | None:
        num_top = self.params.logprobs
        if num_top is None:
            return None
        given_ids = self.params.logprob_token_ids
        return [
            scored(token_id, position, num_top, given_ids)
            for position, token_id in enumerate(token_ids, start)
        ]

    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        num_top = self.params.prompt_logprobs
        if num_top is None or len(self.prompt) == 1:
            return None
        first = max(1, self.params.prompt_logprobs_start)
        rest = enumerate(self.prompt[first:], start=first)
        return [*[None] * first, *(scored(token_id, position, num_top) for position, token_id in rest)]

    def trace(self, token_ids: list[int], position: int, drafted: int, accepted: int) -> RoundTrace:
        rejected = [0] * (drafted - accepted)
        return RoundTrace(
            position=position,
            source="draft_model",
            rule=self.params.verification or "rejection",
            draft_ids=token_ids[:accepted] + rejected,
            target_probs=[0.5] * drafted,
            draft_probs=[0.25] * drafted,
            num_accepted=accepted,
            next_token=token_ids[accepted],
            next_target_prob=0.75,
            vocabulary=DraftVocabulary("ab", b"\x05\x80" if position == len(self.prompt) else None),
        )


class FakeWorker:
    def __init__(self, options: argparse.Namespace, connection: Connection) -> None:
        self.options = options
        self.connection = connection
        self.sequences: list[FakeSequence] = []
        self.embeds: list[Embed] = []
        self.known_prompts: list[tuple[str, list[int]]] = []  # with their salts
        self.heartbeats = Heartbeats()
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_steps = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def send(self, message: FromWorker) -> None:
        self.connection.send(message)

    def load(self) -> bool:
        """Loads for as long as the orders want; returns False when told to leave. It hears nothing else."""
        while self.order() == DIE:
            if self.connection.receive(POLL_MILLISECONDS):
                return False
        return True

    def run(self) -> None:
        order = self.order()
        while self.take_messages(0 if self.may_step(order) else POLL_MILLISECONDS):
            self.heartbeats.beat()
            before, order = order, self.order()
            if order != before:
                continue  # What was sent before the order is heard before the order is obeyed.
            while self.order() == HANG:
                time.sleep(0.01)
            if order == DIE:
                os._exit(7)
            if self.may_step(order):
                self.step()

    def order(self) -> str:
        try:
            with open(self.options.orders) as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def may_step(self, order: str) -> bool:
        has_work = bool(self.sequences or self.embeds)
        return has_work and (not order.isdecimal() or self.num_steps < int(order))

    def take_messages(self, milliseconds: int) -> bool:
        """Handle everything in the inbox, or what comes within that time; False when told to leave."""
        while arrived := self.connection.receive(milliseconds):
            milliseconds = 0
            for message in map(decode_to_worker, arrived):
                self.log(message)
                match message:
                    case Generate():
                        self.add(message)
                    case Embed():
                        self.embeds.append(message)
                    case ClearPrefixes():
                        self.known_prompts.clear()
                        self.send(Cleared())
                    case Abort():
                        self.embeds = [each for each in self.embeds if each.request_id != message.request_id]
                        self.abort(message)
                    case Shutdown():
                        return False
        return True

    def add(self, request: Generate) -> None:
        if str(request.prompt_token_ids) == self.options.crash_on:
            os._exit(7)
        if self.options.refuse:
            self.send(Failed(request.request_id, self.options.refusal_code, self.options.refuse))
            return
        for index in range(request.n):
            self.sequences.append(
                FakeSequence(
                    "draft_model",
                    request.request_id,
                    index,
                    request.params,
                    request.prompt_token_ids,
                    self.script(self.reply_to(request), ignore_eos=request.params.ignore_eos),
                    self.take_over(request),
                    (request.priority, request.place),
                    prediction=_cursor(request),
                )
            )
        self.sequences.sort(key=lambda sequence: sequence.priority)  # a request's own keep their order

    def take_over(self, request: Generate) -> int:
        """Tokens of the prompt that earlier ones of the same salt began with, in whole blocks."""
        if not request.cache_prompt:
            return 0
        salt, prompt = request.cache_salt, request.prompt_token_ids
        shared = [
            len(commonprefix([prompt, known]))
            for known_salt, known in self.known_prompts
            if known_salt == salt
        ]
        found = min(max(shared, default=0), len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        self.known_prompts.append((salt, prompt))
        self.num_prefix_queries += len(prompt)
        self.num_prefix_hits += found
        return found

    def abort(self, message: Abort) -> None:
        """Aborts a request and, like the real worker, says so when that leaves nothing to compute."""
        was_busy = bool(self.sequences)
        self.sequences = [s for s in self.sequences if not is_meant(message, s)]
        if was_busy and not self.sequences:
            self.send(StepOutput([], self.stats()))

    def reply_to(self, request: Generate) -> str:
        """Returns what the file pairs with the first of its marks in the prompt, or what every one says."""
        text = str(self.options.text)
        if not self.options.replies:
            return text
        prompt = bytes(token for token in request.prompt_token_ids if token < 256).decode(errors="replace")
        replies = json.loads(Path(self.options.replies).read_text())
        return str(next((reply for mark, reply in replies if mark in prompt), text))

    def script(self, text: str, *, ignore_eos: bool) -> Iterator[int]:
        while True:
            yield from text.encode()
            if self.options.once and not ignore_eos:
                yield EOS_TOKEN_ID
                return

    def step(self) -> None:
        for embed in self.embeds:
            self.send(Embedded(embed.request_id, [self.vector(embed, text) for text in embed.texts]))
        self.embeds = []
        running = self.sequences[: self.options.max_running]
        sources: list[Source] = self.options.sources.split(",") if self.options.sources else ["draft_model"]
        for sequence in running:
            sequence.source = sources[self.num_steps % len(sources)]
        outputs = [sequence.step(self.options.tokens_per_step) for sequence in running]
        finished = {(o.request_id, o.index) for o in outputs if o.finish_reason}
        self.sequences = [s for s in self.sequences if (s.request_id, s.index) not in finished]
        self.num_steps += 1
        self.num_drafts += sum(output.num_draft_tokens > 0 for output in outputs)
        self.num_draft_tokens += sum(output.num_draft_tokens for output in outputs)
        if not self.options.troubled:
            self.num_accepted_tokens += sum(output.num_accepted_tokens for output in outputs)
        self.send(StepOutput(outputs, self.stats()))

    def vector(self, embed: Embed, text: Text) -> bytes:
        """Returns the number of tokens and their sum, or the sum as a score, so that texts can be told
        apart."""
        if self.options.refuse:
            return b""
        found = [float(len(text.token_ids)), float(sum(text.token_ids)), float(text.second_from or 0), 1.0]
        if self.options.task == "rerank":
            found = [sum(text.token_ids) / 1000]
        if embed.normalizes:
            found = [number / sum(each * each for each in found) ** 0.5 for number in found]
        return array("f", found[: embed.dimensions]).tobytes()

    def stats(self) -> Stats:
        return Stats(
            num_running=len(self.sequences),
            num_waiting=0,
            num_speculative_tokens=NUM_DRAFTED,
            cache_usage={"target": len(self.sequences) / 4, "draft": len(self.sequences) / 8},
            num_preemptions=self.num_steps if self.options.troubled else 0,
            num_prefix_queries=self.num_prefix_queries,
            num_prefix_hits=self.num_prefix_hits,
            drafts={
                "draft_model": DraftCounts(self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens)
            },
            draft_tokens_per_position=[self.num_drafts] * 3,
            accepted_tokens_per_position=[self.num_accepted_tokens, 0, 0],
            phase_seconds={"draft": 0.5, "score": 1.0, "verify": 0.1, "host": 0.1},
        )

    def log(self, message: object) -> None:
        if self.options.log:
            with open(self.options.log, "a") as file:
                file.write(f"{message}\n")


def _cursor(request: Generate) -> PredictionCursor | None:
    if request.prediction_token_ids is None or request.params.method not in (None, "prediction"):
        return None
    return PredictionCursor(Prediction(request.prediction_token_ids))


def is_meant(abort: Abort, sequence: FakeSequence) -> bool:
    return abort.request_id == sequence.request_id and abort.index in (None, sequence.index)


def main() -> None:
    end_with_parent()
    for number in FOR_THE_FRONT_END:
        signal.signal(number, signal.SIG_IGN)
    options = parse_arguments()
    connection = Connection(options.socket)
    worker = FakeWorker(options, connection)
    worker.heartbeats.start(connection)
    worker.send(Loading("the fake model"))
    if options.fail_at_start:
        worker.send(Failed("", "load_failed", options.fail_at_start))
        sys.exit(3)
    if not worker.load():
        return
    num_blocks = max(64, options.max_model_len // BLOCK_SIZE)
    worker.send(
        Ready(
            target="fake-target",
            draft="fake-draft",
            device="cpu",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=options.max_model_len,
            num_target_blocks=num_blocks,
            num_draft_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            methods=options.sources.split(",") if options.sources else ["draft_model", "ngram", "prediction"],
            method="auto" if options.sources else "draft_model",
            forward="fused layers in C",
            weights=["Q4_1", "float32"],
            fingerprint="fake",
            worker_bytes=options.worker_bytes,
            task=options.task,
            embedding=None if options.task == "generate" else VECTORS,
        )
    )
    worker.run()


if __name__ == "__main__":
    main()
