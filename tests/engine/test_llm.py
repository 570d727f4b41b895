"""The engine as a library: whatever a call has submitted is gone when it ends, however it ends."""

import gc
import signal
import threading
from collections.abc import Iterator
from copy import copy
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import pytest

from tests.server.test_text_stream import BYTE_IDS, TOKENIZERS
from truedraft import LLM, RequestError, SamplingParams
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.core.ranges import checked
from truedraft.engine.text.vocabulary import Vocabulary

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)
STORY = "Once upon a time"


@pytest.fixture(scope="module")
def loaded() -> LLM:
    return LLM(num_speculative_tokens=3, cache_memory="64MiB", num_threads=1)


@pytest.fixture
def llm(loaded: LLM) -> Iterator[LLM]:
    """It is to be empty after each test, and to say what it said before."""
    expected = loaded.generate(STORY, GREEDY)[0].token_ids
    yield loaded
    assert loaded.generate(STORY, GREEDY)[0].token_ids == expected
    assert not loaded.core.has_work
    assert loaded.core.scheduler.target_pool.usage == 0


@pytest.mark.parametrize(
    ("bad", "params", "words"),
    [
        ([1] * 2000, GREEDY, "2000 tokens"),
        ("", GREEDY, "no tokens"),
        ([1, 2**20], GREEDY, "token id"),
        ([1, -1], GREEDY, "token id"),
        ([1, "x"], GREEDY, "list of token ids"),
        (7, GREEDY, "list of token ids"),
        (STORY, SamplingParams(max_tokens=5000), "room for"),
        (STORY, SamplingParams(max_tokens=-5), "max_tokens is -5"),
        (STORY, SamplingParams(max_tokens=9, grammar="start: ("), "grammar"),
        (STORY, SamplingParams(max_tokens=9, method="prediction"), "prediction"),
        (STORY, SamplingParams(max_tokens=9, method="n-gram"), "n-gram"),
        (STORY, {"max_tokens": 9}, "SamplingParams"),
    ],
    ids=range(12),
)
def test_a_bad_prompt_fails_the_call_by_its_index(llm: LLM, bad: Any, params: Any, words: str) -> None:
    with pytest.raises(RequestError, match=f"^prompt 2: .*{words}"):
        llm.generate([STORY, "A fox", bad, "The sea"], [GREEDY, GREEDY, params, GREEDY])


def test_a_failure_on_the_way_names_its_index(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = llm.core.runner.run

    def run(plan: Any) -> Any:
        """The last row has no distribution."""
        result = honest(plan)
        result.rounds[-1].failed = [part is plan.rows[-1] for part in plan.rows]
        return result

    monkeypatch.setattr(llm.core.runner, "run", run)
    with pytest.raises(RequestError, match="^prompt 2: the model gave no distribution"):
        llm.generate([STORY, "A fox", "The sea"], GREEDY)
    monkeypatch.undo()


def test_numbers_of_prompts_and_params_must_agree(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts and 1 params"):
        llm.generate([STORY, STORY], [GREEDY])


def test_control_c_ends_the_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = EngineCore.step, 0

    def step(core: EngineCore) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            signal.raise_signal(signal.SIGINT)
        return honest(core)

    monkeypatch.setattr(EngineCore, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([STORY] * 40, LONG)
    assert calls == 3


# The last one is between taking a block from the pool and giving it to a table.
PLACES = ["runner.run", "scheduler.publish", "planner.observe", "scheduler.target_pool._forget"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_breaks_takes_nothing_along(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str, error: type[BaseException]
) -> None:
    """Wherever it breaks: what caches and tables hold then is forgotten."""
    part, _, name = place.rpartition(".")
    owner, calls = attrgetter(part)(llm.core), 0
    honest = getattr(owner, name)

    def breaks(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        result = honest(*arguments)
        if calls == 3:
            raise error
        return result

    stream = llm.stream("A fox", LONG)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, breaks)
        with pytest.raises(error):
            llm.generate([STORY, "The sea"], LONG)
    # The other call is told.
    with pytest.raises(RequestError, match="a step was ended"):
        list(stream)


def test_streams_and_calls_inside_of_each_other(llm: LLM) -> None:
    alone = [llm.generate(text, GREEDY)[0].token_ids for text in ("A fox", "The sea")]
    streams = [llm.stream(text, GREEDY) for text in ("A fox", "The sea")]
    texts: list[list[int]] = [[], []]
    for deltas in zip_longest(*streams):
        for text, delta in zip(texts, deltas, strict=True):
            text += delta.output.token_ids if delta else []
        llm.generate(STORY, GREEDY)
    assert texts == alone


def test_a_stream_that_is_left_is_aborted(llm: LLM) -> None:
    for _ in llm.stream(STORY, LONG):
        break
    stream = llm.stream(STORY, LONG)
    next(stream)
    stream.close()
    llm.generate("A fox", GREEDY)


def test_a_stream_that_ends_in_the_midst_of_a_step_is_aborted_later(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may end it there, in the thread that takes the step."""
    left = [llm.stream(STORY, LONG)]
    next(left[0])
    honest = EngineCore.step

    def step(core: EngineCore) -> Any:
        if left:
            left.pop()
            gc.collect()
        return honest(core)

    monkeypatch.setattr(EngineCore, "step", step)
    llm.generate("A fox", GREEDY)
    assert not left


def test_threads(llm: LLM) -> None:
    """Their requests are decoded together, and each gets its own answer."""
    texts = [f"{STORY} there {word} a" for word in ("was", "lived", "came", "stood")]
    expected = [llm.generate(text, GREEDY)[0].token_ids for text in texts]
    wrong: list[Any] = []

    def ask(place: int) -> None:
        for _ in range(6):
            try:
                found = [one.token_ids for one in llm.generate([texts[place], texts[place - 1]], GREEDY)]
                if found != [expected[place], expected[place - 1]]:
                    wrong.append(found)
                with pytest.raises(RequestError):
                    llm.generate([texts[place], [1] * 5000], GREEDY)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, but must be at least 1"),
        ({"max_tokens": "5"}, "max_tokens: expected `int"),
        ({"temperature": -0.1}, "temperature is -0.1, but must be 0 to 2"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0.0, but must be above 0 and at most 1"),
        ({"logit_bias": {3: 101}}, "logit_bias of 3 is 101"),
        ({"logit_bias": {"3": 1}}, "logit_bias: expected `int`"),
        ({"seed": 2**63}, "seed is"),
        ({"min_tokens": 6}, "at most 5 tokens will be generated"),
        ({"method": "none", "num_speculative_tokens": 2}, "drafts nothing"),
        ({"num_speculative_tokens": 33}, "0 to 32"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids has over 1024"),
    ],
    ids=str,
)
def test_params_are_checked_as_the_server_does(params: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        checked(SamplingParams(**{"max_tokens": 5, **params}))


def test_usual_ways_to_say_off() -> None:
    assert checked(SamplingParams(max_tokens=5, top_k=-1)).top_k == 0


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_text_goes_on_with_its_prompt(llm: LLM, is_cut: bool) -> None:
    """SentencePiece's decoder drops the space before the first word; a cut character is left out."""
    other = copy(llm)
    other._fast = TOKENIZERS["bpe"]._fast
    other._vocabulary = Vocabulary(other._fast)
    end = "" if is_cut else "\ufffd\ufffd"
    for before, start in (([3], " the"), ([], "the")):
        stream = other.text_stream(before)
        text = "".join(map(stream.step, [2, BYTE_IDS[0xE2], BYTE_IDS[0x82]])) + stream.flush(is_cut=is_cut)
        assert text == start + end
