"""A device that takes no time: what remains of a round over captured passes is the host's work.

``host_cost --device null`` measures with it. Nothing is computed: passes, draws and verdicts are empty, and
every row is told that ``ACCEPTED`` of its drafts stand, or all of them if it has fewer. Copies of logits,
which are the device's work, are small.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from truedraft.engine.build import build_engine
from truedraft.engine.config import BUNDLED_PAIR, EngineConfig
from truedraft.engine.core import engine as engine_module
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.memory.batch import Span
from truedraft.engine.messages import Generate, SamplingParams, StepOutput, TokenOutput, encode
from truedraft.engine.models.base import ForwardOutput, Model
from truedraft.engine.proposers.draft_model import DraftModelProposer
from truedraft.engine.rounds.capture import graphs, plan
from truedraft.engine.rounds.capture.shapes import MAX_TOKENS
from truedraft.engine.rounds.round import RoundRunner

DRAFTS, ACCEPTED = 4, 2
PROMPT = list(range(1, 40))
PARTS = ("schedule", "run", "commit", "message")


class NoMark:
    """Is every moment."""

    def elapsed_time(self, later: "NoMark") -> float:
        return 0.01


class NullCapture:
    """Records nothing, and sends nothing."""

    def __init__(self, device: torch.device) -> None:
        pass

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def send(self, numbers: torch.Tensor, host: torch.Tensor) -> Callable[[], None]:
        return lambda: None

    def launch(self, function: Callable[[], object]) -> None:
        pass

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def mark(self) -> NoMark:
        return NoMark()

    def free_memory(self) -> int:
        return 0


class NullSampling:
    """Draws nothing, and has ``num_accepted`` drafts of each row stand."""

    def __init__(self, num_accepted: int) -> None:
        self.num_accepted = num_accepted

    def draw_drafts(self, *_: torch.Tensor) -> None:
        pass

    def judge(
        self, logits: torch.Tensor, draft_probs: torch.Tensor, numbers: torch.Tensor, verdicts: torch.Tensor
    ) -> None:
        verdicts[:, 0] = self.num_accepted


def empty_forward(self: Model, spans: list[Span], *_: Any) -> ForwardOutput:
    """Takes the place of ``Model.forward``."""
    return ForwardOutput(torch.zeros(sum(span.num_logits for span in spans), self.vocab_size))


@contextmanager
def null_engine(num_sequences: int, num_drafts: int) -> Iterator[EngineCore]:
    """Makes an engine of the bundled pair whose rounds are captured on it."""
    config = EngineConfig(
        target=str(BUNDLED_PAIR / "target"),
        draft=str(BUNDLED_PAIR / "draft") if num_drafts else "none",
        device="cpu",
        native_kernels=False,
        max_num_sequences=num_sequences,
        num_speculative_tokens=num_drafts,
        cache_memory="1GiB",
        prefix_caching=False,
    )
    with (
        mock.patch.object(plan, "make_capture", NullCapture),
        mock.patch.object(plan, "_can_be_captured", return_value=True),
        mock.patch.object(graphs, "_is_right", return_value=True),
        mock.patch.object(plan, "find_sampling", return_value=NullSampling(min(ACCEPTED, num_drafts))),
    ):
        core = build_engine(config)
    assert isinstance(core.runner, RoundRunner)
    captured = core.runner.graphs
    assert captured is not None, "nothing was captured"
    # Copies of logits are the device's work: there are few tokens.
    vocab_size = max(PROMPT) + 1
    captured.logits = torch.zeros(len(captured.logits), vocab_size)
    captured.draft_logits = torch.zeros(len(captured.draft_logits), vocab_size)
    core.target.vocab_size = vocab_size
    for proposer in core.scheduler.proposers:
        assert isinstance(proposer, DraftModelProposer)
        proposer.vocab_size = vocab_size
    with mock.patch.object(Model, "forward", empty_forward):
        yield core


def microseconds(core: EngineCore, num_rows: int, num_rounds: int, prompt: list[int]) -> dict[str, float]:
    """Returns the host's time by part, of one of the fastest rounds in ten where all of ``num_rows`` decode:
    whatever else runs only adds to it."""
    params = SamplingParams(max_tokens=(num_rounds + 8) * (ACCEPTED + 1), temperature=0, ignore_eos=True)
    for number in range(num_rows):
        core.add(Generate(str(number), prompt, params))
    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            seconds[name] = time.perf_counter() - started
            return result

        return call

    rounds: list[dict[str, float]] = []
    with (
        mock.patch.object(core.scheduler, "schedule", timed("schedule", core.scheduler.schedule)),
        mock.patch.object(core.runner, "run", timed("run", core.runner.run)),
        mock.patch.object(engine_module, "commit", timed("commit", engine_module.commit)),
    ):
        send = timed("message", lambda outputs: encode(StepOutput(outputs, core.snapshot())))
        while core.has_work:
            seconds.clear()
            outputs = [output for output in core.step() if isinstance(output, TokenOutput)]
            send(outputs)
            if len(outputs) == num_rows and all(output.finish_reason is None for output in outputs):
                rounds.append({part: 1e6 * seconds[part] for part in PARTS})
    times = {part: sorted(each[part] for each in rounds)[len(rounds) // 10] for part in PARTS}
    return times | {"sum": sum(times.values())}


def measure(num_rows: Sequence[int], num_rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Returns the least of each part over the repeats."""
    rows: list[dict[str, Any]] = []
    for drafts in (0, DRAFTS):
        # More rows than a pass holds would go in halves.
        for number in [number for number in num_rows if number * (drafts + 1) <= MAX_TOKENS]:
            with null_engine(number, drafts) as core:
                times = [microseconds(core, number, num_rounds, PROMPT) for _ in range(repeats)]
            least = {part: min(each[part] for each in times) for part in (*PARTS, "sum")}
            rows.append({"rows": number, "drafts": drafts} | {k: round(v) for k, v in least.items()})
    return rows
