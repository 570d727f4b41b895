"""The soak runs in its short form: one worker dies under mixed load."""

from pathlib import Path

from tests.faults.soak import MAX_GROWTH, Soak, compare_engines, memory_growth, random_cases, save, soak
from tests.faults.watched import watched


def test_a_short_soak(tmp_path: Path) -> None:
    result = Soak()
    compare_engines(range(1000, 1001), result)
    with watched(tmp_path, cases=random_cases(12)) as server:
        # It begins again where a busy machine has answered few requests.
        while not result.failed and min(result.outcomes["answered"] - 10, result.outcomes["left"]) < 1:
            result.samples.clear()
            soak(server, seconds=5, kill_every=2.5, num_clients=6, result=result)
    assert not result.failed, result
    save(result, tmp_path / "soak.json")
    assert (tmp_path / "soak.png").stat().st_size > 1000
    assert result.kills > 0
    assert result.outcomes["answered by random engines"] > 10


def test_growth_of_memory() -> None:
    flat = [100.0, 200.0] * 10 + [300.0] * 40
    assert memory_growth(flat) == 0
    assert memory_growth([*flat[:40], *(300.0 + number for number in range(60))]) > MAX_GROWTH
