"""Which outputs wait in the worker, and that none is lost, doubled, overtaken or held without need."""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraft.engine.core.step import StepResult
from truedraft.engine.messages import (
    Abort,
    DraftCounts,
    Failed,
    FinishReason,
    FromWorker,
    Generate,
    SamplingParams,
    Shutdown,
    Stats,
    StepOutput,
    TokenOutput,
    ToWorker,
    encode,
)
from truedraft.engine.process.outbox import Outbox
from truedraft.engine.process.worker import Worker

LONG = 1e9
SEQUENCES = [("a", 0), ("a", 1), ("b", 0)]


def output(
    sequence: tuple[str, int], token_id: int, *, first: bool = False, end: FinishReason | None = None
) -> TokenOutput:
    request_id, index = sequence
    return TokenOutput(request_id, index, [token_id], end, 0, 0, queue_seconds=0.0 if first else None)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[float, list[TokenOutput]]]:
    """Steps: how long each takes and what it gives. Sequences come and go."""
    steps = []
    token_id = 0
    unstarted, running = list(SEQUENCES), []
    for _ in range(draw(st.integers(1, 12))):
        outputs = []
        if unstarted and draw(st.booleans()):
            running.append(unstarted.pop())
            outputs.append(output(running[-1], token_id, first=True))
        for sequence in list(running):
            token_id += 1
            is_last = draw(st.integers(0, 5)) == 0
            outputs.append(output(sequence, token_id, end="stop" if is_last else None))
            if is_last:
                running.remove(sequence)
        steps.append((draw(st.sampled_from([0.0, 1.0, 3.0, 20.0])), outputs))
    return steps


def of(sequence: tuple[str, int], outputs: list[TokenOutput]) -> list[int]:
    return [token_id for output in outputs if output.sequence == sequence for token_id in output.token_ids]


@given(history=histories(), interval=st.sampled_from([0.0, 1.0, 5.0, 10.0]))
def test_outputs_leave_once_in_order_and_in_time(
    history: list[tuple[float, list[TokenOutput]]], interval: float
) -> None:
    clock = Clock()
    outbox = Outbox(interval, clock)
    put: list[TokenOutput] = []
    sent: list[TokenOutput] = []
    last_time = clock.now - interval  # when everything left
    for seconds, outputs in history:
        clock.now += seconds
        put += outputs
        now = outbox.put(outputs)
        sent += now
        for each in outputs:
            if each.is_first or each.finish_reason:
                assert each in now
        if clock.now - last_time >= interval:
            assert len(sent) == len(put)
            last_time = clock.now
        else:  # whoever has neither begun nor ended waits
            assert {each.sequence for each in now} == {
                each.sequence for each in outputs if each.is_first or each.finish_reason
            }
        for sequence in SEQUENCES:
            assert of(sequence, sent) == of(sequence, put)[: len(of(sequence, sent))]
    sent += outbox.empty()
    assert all(of(sequence, sent) == of(sequence, put) for sequence in SEQUENCES)
    assert outbox.empty() == []


@pytest.mark.parametrize(("index", "kept"), [(0, [("a", 1), ("b", 0)]), (None, [("b", 0)])])
def test_what_nobody_wants_is_forgotten(index: int | None, kept: list[tuple[str, int]]) -> None:
    outbox = Outbox(LONG, Clock())
    outbox.put([])
    assert outbox.put([output(sequence, 1) for sequence in SEQUENCES]) == []
    outbox.forget("a", index)
    assert [output.sequence for output in outbox.empty()] == kept


class ScriptedCore:
    """Gives a list of results for each step and has work as long as there are some, unless aborted."""

    def __init__(self, steps: "list[list[TokenOutput | Failed] | Exception]") -> None:
        self.steps = steps
        self.has_work = False
        self.runner: object = None
        self.admission = SimpleNamespace(seeing=lambda _: None, grammars=None)

    def add(self, request: Generate, pictures: object = None) -> None:
        self.has_work = True

    def abort(self, request_id: str, index: int | None) -> None:
        self.has_work = False

    def step(self) -> list[TokenOutput | Failed]:
        step = self.steps.pop(0)
        self.has_work = bool(self.steps)
        if isinstance(step, Exception):
            raise step
        return step

    def snapshot(self) -> Stats:
        counts = {"none": DraftCounts()}
        return Stats(int(self.has_work), 0, 0, {}, 0, 0, 0, counts, [], [], {})

    def speculation(self) -> dict[str, object]:
        return {}


class ScriptedConnection:
    """Gives the worker one message before each step, or none, and keeps what the worker sends."""

    def __init__(self, messages: list[ToWorker | None]) -> None:
        self.messages = messages
        self.sent: list[FromWorker | Literal["waits"]] = []

    def receive(self, milliseconds: int) -> list[bytes]:
        if milliseconds and self.sent:
            self.sent.append("waits")
        message = self.messages.pop(0) if self.messages else None
        return [] if message is None else [encode(message)]

    def send(self, message: FromWorker) -> None:
        self.sent.append(message)


A = ("a", 0)
GENERATE = Generate("a", [1], SamplingParams(max_tokens=9))
FIRST, SECOND, THIRD = output(A, 1, first=True), output(A, 2), output(A, 3)


def run(
    steps: "list[list[TokenOutput | Failed] | Exception]",
    *messages: ToWorker | None,
    interval: float = LONG,
) -> list[list[int] | str]:
    """What the worker sent: the token ids of each message, or what failed; and when it waited for work.

    Its clock stands still.
    """
    connection = ScriptedConnection([*messages])
    outbox = Outbox(interval, Clock())
    outbox.empty()  # something has just been sent
    worker = Worker(ScriptedCore(steps), connection, outbox)  # type: ignore[arg-type]
    with suppress(ZeroDivisionError):
        worker.run()
    return [
        [token_id for output in message.outputs for token_id in output.token_ids]
        if isinstance(message, StepOutput)
        else message.code
        if isinstance(message, Failed)
        else message
        for message in connection.sent
        if isinstance(message, StepOutput | Failed | str)
    ]


END = output(A, 4, end="stop")
# A message is looked for once before each step and once more after each that came: None ends the looking.
ONE, TWO, THREE = ([GENERATE, *[None] * number] for number in (1, 2, 3))


class Launching:
    """Is a runner that launches."""

    def __init__(self) -> None:
        self.when_launched: Callable[[], None] = lambda: None

    def run(self, plan: object) -> StepResult:
        raise AssertionError("the core is scripted")


def test_a_message_is_sent_when_the_next_step_is_launched() -> None:
    """The device does not wait for the host to encode it; where no step follows, it is sent at once."""
    core, connection = ScriptedCore([[FIRST], [SECOND], [], [END]]), ScriptedConnection([GENERATE])
    core.runner = runner = Launching()
    worker = Worker(core, connection, Outbox(0))  # type: ignore[arg-type]
    seen: list[list[int]] = []

    def sent() -> list[int]:
        steps = [message for message in connection.sent if isinstance(message, StepOutput)]
        return [token_id for step in steps for output in step.outputs for token_id in output.token_ids]

    step = core.step

    def launched() -> list[TokenOutput | Failed]:
        seen.append(sent())
        if len(core.steps) != 2:  # one step launches nothing
            runner.when_launched()
        seen.append(sent())
        worker.running = len(core.steps) > 1
        return step()

    core.step = launched  # type: ignore[method-assign]
    worker.run()
    assert seen == [[], [], [], [1], [1], [1], [1, 2], [1, 2]]
    assert sent() == [1, 2, 4]


def test_many_streams_are_sent_less_often() -> None:
    """A front end would not keep up; with few streams the setting is kept to, and 0 always is."""
    for interval, num_streams, expected in (
        (0.01, 60, 0.01),
        (0.01, 200, 0.03),
        (0.01, 9000, 0.05),
        (0, 9, 0),
    ):
        clock = Clock()
        outbox = Outbox(interval, clock)
        outbox.empty()
        outputs = [output((str(number), 0), 1) for number in range(num_streams)]
        clock.now = 0.999 * expected
        assert bool(outbox.put(outputs)) == (expected == 0)
        clock.now = 1.001 * expected
        assert outbox.put(outputs)


def test_without_an_interval_every_step_is_sent() -> None:
    steps = [[FIRST], [SECOND], [THIRD], [END]]
    assert run(steps, *THREE, None, Shutdown(), interval=0) == [[1], [2], [3], [4], "waits"]


def test_first_and_last_tokens_do_not_wait() -> None:
    assert run([[FIRST], [SECOND], [THIRD], [END]], *THREE, None, Shutdown()) == [[1], [2, 3, 4], "waits"]


def test_nothing_is_held_when_no_step_follows() -> None:
    """The last step says nothing of an end here, so only the lack of work can let its tokens out."""
    assert run([[FIRST], [SECOND], [THIRD]], *THREE, Shutdown()) == [[1], [2, 3], "waits"]


def test_a_failure_takes_along_what_was_held() -> None:
    failed = Failed("b", "broken", "It broke.")
    steps = [[FIRST], [SECOND], [failed], [END]]
    assert run(steps, *THREE, None, Shutdown()) == [[1], [2], "broken", [4], "waits"]
    # It tells what is in use now even if nothing was held.
    assert run([[failed]], *ONE, Shutdown()) == [[], "broken", "waits"]


def test_an_error_of_the_engine_leaves_nothing_behind() -> None:
    assert run([[FIRST], [SECOND], ZeroDivisionError()], *THREE) == [[1], [2]]


def test_leaving_in_the_middle_leaves_nothing_behind() -> None:
    assert run([[FIRST], [SECOND], [THIRD], [END]], *TWO, Shutdown()) == [[1], [2, 3]]


def test_an_abort_ends_the_outputs_of_its_sequence() -> None:
    assert run([[FIRST], [SECOND], [THIRD]], *TWO, Abort("a"), None, Shutdown()) == [[1], [], "waits"]
