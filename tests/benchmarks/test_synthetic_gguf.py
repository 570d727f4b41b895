"""Files of random weights say what was asked for, in every shape and type."""

from pathlib import Path

import pytest

from benchmarks import synthetic_gguf
from benchmarks.synthetic_gguf import COMMON, COMMON_SHARE, Shape, ensure, uneven_cycle
from benchmarks.synthetic_pair import cycle, successors
from tests.models import make_engine, run_engine
from truedraft.engine.messages import SamplingParams

SHAPES = {
    "qwen": (Shape("qwen35", 256, 4, 2, 1, 32, 256, 300, interval=4, value_heads=16), "Q8_0"),
    "lfm2": (Shape("lfm2", 256, 3, 4, 2, 64, 256, 300, attention=(1,)), "Q4_0"),
    "experts": (Shape("qwen3moe", 256, 2, 4, 2, 64, 256, 300, experts=(8, 2)), "Q4_K"),
}


@pytest.mark.parametrize(("name", "mtp"), [*((name, False) for name in SHAPES), ("qwen", True)])
def test_a_pair_says_the_cycle(name: str, mtp: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, kind = SHAPES[name]
    monkeypatch.setitem(synthetic_gguf.SHAPES, name, shape)
    monkeypatch.setattr(synthetic_gguf, "COMMON", 64)
    method, order = ("mtp", uneven_cycle) if mtp else ("draft_model", cycle)
    target, draft = ensure(tmp_path, name, kind, acceptance=0.8, mtp=mtp)
    core = make_engine(target, draft, method=method, num_speculative_tokens=3, max_model_len=64)
    expected, following = [27], successors(order(shape.vocab_size, 0))
    for _ in range(40):
        expected.append(int(following[expected[-1]]))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (text,) = run_engine(core, [expected[:1]], params)
    assert text == expected[1:]
    assert 0.2 < core.stats.num_accepted_tokens / core.stats.num_draft_tokens < 0.9


def test_a_text_has_mostly_low_ids() -> None:
    order = uneven_cycle(4 * COMMON, 0)
    assert sorted(order.tolist()) == list(range(4 * COMMON))
    for start in range(0, COMMON, COMMON // 4):
        is_low = order[start : start + COMMON // 4] < COMMON
        assert is_low.float().mean().item() == pytest.approx(COMMON_SHARE, abs=0.01)
