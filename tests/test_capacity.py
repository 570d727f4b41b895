"""tools/capacity.py against queues whose answers are known."""

import math

import pytest

from tools.capacity import Server, main, predict, replicas, speedup


def test_one_request_at_a_time_is_the_queue_m_m_1() -> None:
    # Throughput does not grow with streams: latency = service time / (1 - utilisation).
    server = Server({1: 100.0, 8: 100.0})
    load = predict(server, tokens=50, rate=1.2)
    assert load.utilisation == pytest.approx(0.6)
    assert load.latency == pytest.approx(0.5 / 0.4, rel=1e-6)
    assert load.running == pytest.approx(1.5, rel=1e-6)
    assert 1 - 0.6**load.running_at_most < 0.99 <= 1 - 0.6 ** (load.running_at_most + 1)


def test_streams_that_cost_nothing_do_not_wait() -> None:
    server = Server({n: 100.0 * n for n in (1, 2, 1000)})
    assert predict(server, tokens=50, rate=20).latency == pytest.approx(0.5, rel=1e-6)


def test_too_much_load_never_ends() -> None:
    assert predict(Server({1: 100.0}), tokens=100, rate=1).latency == math.inf


def test_prompts_take_their_time() -> None:
    assert predict(Server({1: 100.0}, prompt_seconds=0.5), tokens=50, rate=1e-9).latency == pytest.approx(1.0)


@pytest.mark.parametrize("rate", [1, 10, 100, 4000])
def test_the_fewest_replicas_that_do(rate: float) -> None:
    server = Server({1: 100.0, 16: 400.0})
    needed = replicas(server, tokens=100, rate=rate, latency=3.0, utilisation=0.7)
    load = predict(server, 100, rate / needed)
    assert load.latency <= 3.0
    assert load.utilisation <= 0.7
    if needed > 1 and needed < 100:
        fewer = predict(server, 100, rate / (needed - 1))
        assert fewer.latency > 3.0 or fewer.utilisation > 0.7


def test_replicas_cannot_make_one_request_faster() -> None:
    with pytest.raises(SystemExit):
        replicas(Server({1: 100.0}), tokens=100, rate=1, latency=0.5, utilisation=0.7)


def test_the_speed_up_by_speculation() -> None:
    assert speedup(0.0, 4, draft_cost=0.1, score_cost=1.1) == pytest.approx(1 / 1.5)
    assert speedup(1.0, 4, draft_cost=0.0, score_cost=1.0) == 5
    assert speedup(0.6, 4, draft_cost=0.1, score_cost=1.0) == pytest.approx(1.65, abs=0.005)


def test_drafts_and_memory_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "capacity --throughput 1:100 --tokens 100 --rate 0.5 --speculation 1 1 0 1 --memory 10 900 1e6"
    monkeypatch.setattr("sys.argv", line.split())
    main()
    shown = dict(row.split(maxsplit=1) for row in capsys.readouterr().out.splitlines())
    assert shown["speed-up"] == "2.00 of plain decoding"
    assert shown["latency"] == "0.67 s"  # half a second of work at utilisation 0.25
    # At most three run at a time, 99 % of the time (1 - 0.25**4); weights and libraries are 11 GB.
    assert shown["memory"] == "14.0 GB on each, 14 GB together"
