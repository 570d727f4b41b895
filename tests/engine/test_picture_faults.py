"""Bugs of pictures, planted one by one, each noticed by a test; and what disturbs a request with some."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import test_pictures as gates
from tests.engine.test_outbox import ScriptedConnection
from tests.engine.test_prefix_files import written as settle
from tests.models import make_engine
from tests.pictures import SIZES, Oracle, Shown, pixels, save_seeing
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.memory.pictures import PromptPictures
from truedraft.engine.messages import Abort, Failed, Generate, Picture, SamplingParams, StepOutput, ToWorker
from truedraft.engine.models import vision
from truedraft.engine.process.outbox import Outbox
from truedraft.engine.process.worker import Worker

Patch = pytest.MonkeyPatch
Gate = Callable[[str], None]
Rows = tuple[Any, torch.Tensor]
ONE = Shown([5, 6], pixels(0, SIZES[0]), [7])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("faults"))


def prefixes(target: str) -> None:
    gates.test_prefixes_are_those_of_the_same_pictures(target)


def neighbours(target: str) -> None:
    gates.test_what_follows_pictures_is_computed_in_c(target)


def chunks(target: str) -> None:
    gates.test_chunks_change_nothing(target, 7)


def transformers(target: str) -> None:
    gates.check(make_engine(target, None), Oracle(target), gates.PROMPTS["interleaved"])


def no_picture_in_the_prefix(patch: Patch) -> None:
    patch.setattr(vision, "identity", lambda digest: 90)


def a_picture_without_its_shape(patch: Patch) -> None:
    def digest(self: vision.Tower, picture: Picture) -> bytes:
        return vision.blake2b(picture.pixels, digest_size=16).digest()

    patch.setattr(vision.Tower, "_digest", digest)


def a_neighbours_shift(patch: Patch) -> None:
    """All rows with pictures have the shift of the first one that was asked."""
    first: list[int] = []

    def shift(self: BlockTable) -> int:
        if self.pictures is not None:
            first.append(self.pictures.shift)
        return first[0] if first else 0

    patch.setattr(BlockTable, "shift", property(shift))


def features_from_the_border_of_a_chunk(patch: Patch) -> None:
    def rows(self: PromptPictures, first: int, end: int) -> Rows:
        begin, stop = np.searchsorted(self.places, (first, end))
        return self.places[begin:stop] - first, self.features[: stop - begin]

    patch.setattr(PromptPictures, "rows", rows)


def features_one_place_late(patch: Patch) -> None:
    rows = PromptPictures.rows

    def late(self: PromptPictures, first: int, end: int) -> Rows:
        places, features = rows(self, first, end)
        return places, features.roll(1, 0)

    patch.setattr(PromptPictures, "rows", late)


def no_deepstack(patch: Patch) -> None:
    rows = PromptPictures.rows

    def alone(self: PromptPictures, first: int, end: int) -> Rows:
        places, features = rows(self, first, end)
        return places, features[:, :1]

    patch.setattr(PromptPictures, "rows", alone)


def positions_of_a_text(patch: Patch) -> None:
    def axes(self: PromptPictures, first: int, end: int) -> Any:
        return np.arange(first, end)[None].repeat(3, 0)

    patch.setattr(PromptPictures, "axes_of", axes)


def rows_and_columns_exchanged(patch: Patch) -> None:
    axes_of = PromptPictures.axes_of
    patch.setattr(PromptPictures, "axes_of", lambda *given: axes_of(*given)[[0, 2, 1]])


MUTANTS: dict[str, tuple[Callable[[Patch], None], Gate]] = {
    made.__name__: (made, gate)
    for made, gate in (
        (no_picture_in_the_prefix, prefixes),
        (a_picture_without_its_shape, prefixes),
        (a_neighbours_shift, neighbours),
        (features_from_the_border_of_a_chunk, chunks),
        (features_one_place_late, transformers),
        (no_deepstack, transformers),
        (positions_of_a_text, transformers),
        (rows_and_columns_exchanged, transformers),
    )
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_noticed(target: str, name: str, monkeypatch: Patch) -> None:
    plant, gate = MUTANTS[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        gate(target)


def picture(**more: Any) -> Picture:
    (given,) = ONE.pictures
    fields = {"first": given.first, "height": given.height, "width": given.width, "pixels": given.pixels}
    return Picture(**(fields | more))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([picture(first=2)], "no place"),
        ([picture(first=60)], "no place"),
        ([picture(height=23)], "no pixels"),
        ([picture(pixels=b"\0" * 5)], "no pixels"),
        ([picture(height=0, pixels=b"")], "no pixels"),
        ([picture(), picture()], "no place"),
        ([picture()] * 9, "max_images"),
        ([picture(height=8 * 40, width=16, pixels=bytes(8 * 40 * 16 * 3))], "more pixels"),
    ],
)
def test_pictures_without_places_are_refused(target: str, given: list[Picture], words: str) -> None:
    core = make_engine(target, None)
    with pytest.raises(RequestError, match=words):
        core.add(Generate("x", ONE.token_ids, SamplingParams(max_tokens=3), pictures=given))


def test_a_model_without_its_tower_refuses_pictures(target: str) -> None:
    core = make_engine(target, None, max_images=0)
    with pytest.raises(RequestError, match="does not see pictures"):
        core.add(ONE.request("x", SamplingParams(max_tokens=3)))


class Waiting(ScriptedConnection):
    """Ends the worker once it has nothing to do. ``seen`` is set once the text alone is over."""

    def __init__(self, messages: list[ToWorker | None], seen: Event) -> None:
        super().__init__(messages)
        self.seen = seen
        self.worker: Worker | None = None

    def receive(self, milliseconds: int) -> list[bytes]:
        assert self.worker is not None
        if milliseconds and not self.messages:
            self.seen.set()
            self.worker.running = bool(self.worker.preparing)
        return super().receive(0)


def run(core: EngineCore, monkeypatch: Patch, *messages: ToWorker | None) -> list[str]:
    """Returns requests by the order in which they end or fail. Pictures are looked at once the others have
    ended."""
    seen, features = Event(), vision.Tower._features

    def look(*given: Any) -> torch.Tensor:
        assert seen.wait(60)
        return features(*given)

    monkeypatch.setattr(vision.Tower, "_features", look)
    connection = Waiting([*messages], seen)
    connection.worker = Worker(core, connection, Outbox(0.0))  # type: ignore[arg-type]
    connection.worker.run()
    ended: list[str] = []
    for message in connection.sent:
        if isinstance(message, Failed):
            ended.append(f"{message.request_id} failed")
        if isinstance(message, StepOutput):
            ended += [each.request_id for each in message.outputs if each.finish_reason]
    return ended


def test_others_go_on_while_pictures_are_looked_at(target: str, monkeypatch: Patch) -> None:
    params = SamplingParams(max_tokens=5, temperature=0)
    text = Generate("text", [3, 4, 5], params)
    wrong = Generate("wrong", [3, 4, 5], params, pictures=ONE.pictures)
    core = make_engine(target, None)
    assert run(core, monkeypatch, ONE.request("seen", params), wrong, text) == [
        "wrong failed",
        "text",
        "seen",
    ]
    gone = ONE.request("gone", params)
    assert run(core, monkeypatch, gone, Abort("gone"), ONE.request("seen", params), Abort("gone"), text) == [
        "text",
        "seen",
    ]
    assert not core.has_work


def test_features_wait_for_room(target: str, monkeypatch: Patch) -> None:
    """A worker looks at the next pictures once requests with others have ended."""
    core = make_engine(target, None)
    monkeypatch.setattr(vision, "MOST_OPEN_BYTES", 1)
    params = SamplingParams(max_tokens=5, temperature=0)
    requests = [ONE.request(str(number), params) for number in range(3)]
    assert run(core, monkeypatch, *requests) == ["0", "1", "2"]


def test_files_tell_pictures_apart(target: str, tmp_path: Path) -> None:
    """A later engine finds in files what was computed of the same picture, and of no other."""
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=0)
    first, second = (Shown([*range(30, 43)], pixels(n, SIZES[0]), [1, 2, 3]) for n in (0, 1))
    expected = gates.written(make_engine(target, None), [first, second], params)
    for number in range(2):
        core = make_engine(target, None, prefix_cache_dir=str(tmp_path))
        outputs = [gates.told(core, [shown], params)[0] for shown in (first, second)]
        found = [
            [(one.token_id, one.logprob) for each in told for one in each.logprobs or []] for told in outputs
        ]
        assert found == expected
        assert [told[0].num_cached_tokens for told in outputs] == ([32, 32] if number else [0, 12])
        settle(core)
