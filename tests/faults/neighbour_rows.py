"""Attacks as data, for ``tests.faults.neighbours``: small valid requests that have frozen the server once.

A row is added for every request that does. Nothing in a row depends on the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MODEL = "truedraft-demo"
COMPLETIONS = "/v1/completions"
LONG_STOPS = ("--max-stop-characters", "1000000")
PUBLIC = ("--config", "configs/public.yaml")


@dataclass(frozen=True)
class Row:
    """``body`` is sent to ``path`` as often as ``times`` says, all at once, by the hostile key.

    The clients leave after ``leave_after`` seconds if that is given. ``settings`` are those of the server;
    rows with the same ones share a server.
    """

    name: str
    body: dict[str, Any]
    path: str = COMPLETIONS
    times: int = 1
    leave_after: float | None = None
    settings: Sequence[str] = ()


END = 0  # <|endoftext|>, a special token without text
WORD = " understanding"
WORD_ID = 1360


def stop_strings(words: int, count: int = 64) -> list[str]:
    """Returns strings of which only the last is written: it holds the text in which all are looked for."""
    return [*(f"x{number:02}" + WORD * words for number in range(count - 1)), WORD * words]


def silent(times: int, prompts: int = 1, **more: Any) -> dict[str, Any]:
    return {"prompt": [[END] * times] * prompts, "max_tokens": 1, "temperature": 0} | more


def held(stop: list[str], **more: Any) -> dict[str, Any]:
    always = {"logit_bias": {str(WORD_ID): 100}, "ignore_eos": True, "temperature": 0, "max_tokens": 990}
    return {"prompt": "x", "stop": stop} | always | more


ROWS = (
    # Finding 1: a prompt without text, read once for each choice.
    Row("1,000 ordinary ids, n = 16", {"prompt": [[7] * 1000], "max_tokens": 1, "n": 16}),
    Row("1,000 special, n = 1", silent(1000)),
    Row("1,000 special, n = 16", silent(1000, n=16)),
    Row("1,000 special, n = 16, echo alone", silent(1000, n=16) | {"max_tokens": 0, "echo": True}),
    Row("1,000 special, n = 128", silent(1000, n=128)),
    Row("8 x 1,000 special, n = 128", silent(1000, 8, n=128), settings=PUBLIC),
    # Finding 2: long stop strings.
    Row("400 words, no match", held([f"z{number}" + WORD * 400 for number in range(64)])),
    Row("64 stops of 400 words", held(stop_strings(400))),
    Row("64 stops of 1,000 words", held(stop_strings(1000)), settings=PUBLIC),
    Row("64 stops of 1,000 words, n = 8", held(stop_strings(1000), n=8), settings=PUBLIC),
    Row("64 stops of 18 words, n = 32", held(stop_strings(18), n=32)),
    Row("4 stops of 1,000 words", held(stop_strings(1000, 4))),
    Row("4 stops of 290 words, n = 32", held(stop_strings(290, 4), n=32)),
    Row(
        "64 stops of 1,000 words, allowed",
        held(stop_strings(1000)),
        settings=LONG_STOPS,
    ),
    Row(
        "64 stops of 1,000 words, allowed, n = 8",
        held(stop_strings(1000), n=8),
        settings=LONG_STOPS,
    ),
    # Finding 8: an answer without text.
    Row("answers of special tokens, n = 32", held([], n=32) | {"logit_bias": {str(END): 100}, "stop": None}),
)
