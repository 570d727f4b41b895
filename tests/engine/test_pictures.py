"""Pictures in the engine: transformers' answers, wherever chunks, prefixes, drafts and neighbours lie."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.models import make_engine, stepped
from tests.pictures import FAMILIES, IMAGE, SIZES, Oracle, Shown, pixels, save_seeing, seeing_config
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import SamplingParams, TokenOutput

LENGTH = 12
TEXTS = [[5, 6, 7, 8], [11], [20, 21, 22, 23, 24, 25], [3, 4]]
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, logprobs=0)
BACKENDS: dict[str, dict[str, Any]] = {
    "C": {},
    "torch": {"native_kernels": False},
    "C, 16 bits": {"dtype": "auto"},
}
PROMPTS = {
    "one": Shown(TEXTS[0], pixels(0, SIZES[0]), TEXTS[1]),
    "first and last": Shown(pixels(1, SIZES[2])),
    "several": Shown(TEXTS[1], *(pixels(n, size) for n, size in enumerate(SIZES)), TEXTS[0]),
    "interleaved": Shown(
        TEXTS[2], pixels(5, SIZES[3]), TEXTS[0], pixels(6, SIZES[1]), TEXTS[1], pixels(5, SIZES[3]), TEXTS[3]
    ),
    "none": Shown(TEXTS[2] * 3),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def oracle(target: str) -> Oracle:
    return Oracle(target)


def told(
    core: EngineCore, prompts: Sequence[Shown], params: SamplingParams, **more: Any
) -> list[list[TokenOutput]]:
    """Runs prompts together; returns the outputs of each."""
    outputs: list[list[TokenOutput]] = [[] for _ in prompts]
    for number, shown in enumerate(prompts):
        core.add(shown.request(str(number), params, **more))
    while core.has_work:
        for output in stepped(core):
            outputs[int(output.request_id)].append(output)
    return outputs


def written(core: EngineCore, prompts: Sequence[Shown], params: SamplingParams, **more: Any) -> list[Any]:
    """Returns the tokens of each, with their log-probabilities to the bit."""
    return [
        [(one.token_id, one.logprob) for output in each for one in output.logprobs or []]
        for each in told(core, prompts, params, **more)
    ]


def tokens(answer: list[Any]) -> list[int]:
    return [token for token, _ in answer]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROMPTS)
def test_answers_are_those_of_transformers(target: str, oracle: Oracle, name: str, backend: str) -> None:
    check(make_engine(target, None, **BACKENDS[backend]), oracle, PROMPTS[name])


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"qwen3_vl"}))
def test_other_families_answer_as_transformers(family: str, tmp_path: Path) -> None:
    """Prompts are computed in chunks, and found again."""
    target = save_seeing(tmp_path, 2, seeing_config(family=family))
    core, oracle = make_engine(target, None, max_num_batched_tokens=16), Oracle(target)
    for shown in PROMPTS.values():
        check(core, oracle, shown)
        again = told(core, [shown], GREEDY)[0]
        assert [token for output in again for token in output.token_ids] == oracle.greedy(shown, LENGTH)


def check(core: EngineCore, oracle: Oracle, shown: Shown) -> None:
    """Compares greedy tokens, and the log-probabilities of prompt and answer."""
    params = SamplingParams(max_tokens=LENGTH, temperature=0, logprobs=0, prompt_logprobs=0)
    (outputs,) = told(core, [shown], params)
    expected = oracle.greedy(shown, LENGTH)
    assert [token for output in outputs for token in output.token_ids] == expected
    # transformers would look for another picture where the model has written a placeholder.
    texts = [*shown.token_ids, *(expected[: expected.index(IMAGE)] if IMAGE in expected else expected)]
    whole = Shown(texts)
    whole.arrays = shown.arrays
    logprobs = oracle.logprobs(whole)
    known = [
        *(outputs[0].prompt_logprobs or [])[1:],
        *(one for each in outputs for one in each.logprobs or []),
    ][: len(texts) - 1]
    assert len(known) == len(texts) - 1
    got = torch.tensor([one.logprob for one in known if one is not None])
    deviation = (got - logprobs[range(len(known)), texts[1:]]).abs().max()
    assert deviation < 1e-3, deviation


def test_neighbours_and_seeds_change_nothing(target: str) -> None:
    """Rows with other pictures, or none, stand next to each other; some begin later."""
    params = SamplingParams(max_tokens=LENGTH, seed=7, logprobs=0)
    alone = [written(make_engine(target, None), [shown], params)[0] for shown in PROMPTS.values()]
    assert written(make_engine(target, None, step_seconds=0.05), [*PROMPTS.values()], params) == alone
    core = make_engine(target, None)
    outputs: dict[str, list[Any]] = {name: [] for name in PROMPTS}
    waiting = list(PROMPTS)
    while waiting or core.has_work:
        if waiting:
            name = waiting.pop()
            core.add(PROMPTS[name].request(name, params))
        for output in stepped(core):
            outputs[output.request_id] += [(one.token_id, one.logprob) for one in output.logprobs or []]
    assert list(outputs.values()) == alone


def test_what_follows_pictures_is_computed_in_c(target: str) -> None:
    """The loop in C adds to indices what positions are shifted by, each row's own."""
    plain = make_engine(target, None, native_kernels=False)
    params = SamplingParams(max_tokens=LENGTH, temperature=0)
    expected = [
        [id for output in each for id in output.token_ids]
        for each in told(plain, [*PROMPTS.values()], params)
    ]
    for more in ({}, {"step_seconds": 0.05}):
        core = make_engine(target, None, **more)
        found = [
            [id for output in each for id in output.token_ids]
            for each in told(core, [*PROMPTS.values()], params)
        ]
        assert found == expected
        assert core.snapshot().num_rows["c"] >= (LENGTH - 1) * len(PROMPTS)


@pytest.mark.parametrize("num_tokens", [1, 3, 7, 40])
def test_chunks_change_nothing(target: str, num_tokens: int) -> None:
    """A chunk may begin and end within a picture."""
    for method in ("none", "ngram"):
        core = make_engine(target, None, max_num_batched_tokens=num_tokens, method=method)
        whole = make_engine(target, None, method=method)
        for shown in PROMPTS.values():
            assert written(core, [shown], GREEDY) == written(whole, [shown], GREEDY)


def test_prefixes_are_those_of_the_same_pictures(target: str) -> None:
    """Two pictures of one size have the same tokens, and share what comes before them alone."""
    core = make_engine(target, None)
    before = [*range(30, 43)]
    one, two = (Shown(before, pixels(n, SIZES[0]), TEXTS[0]) for n in (0, 1))
    longer = Shown(before, pixels(0, SIZES[0]), TEXTS[0], pixels(1, SIZES[2]), TEXTS[1])
    turned = Shown(before, pixels(0, SIZES[0]).reshape(5 * 8, 3 * 8, 3), TEXTS[0])
    assert one.token_ids == two.token_ids == turned.token_ids
    # Blocks have 4 tokens: 12 before the pictures, 32 of the whole prompt but its last token.
    for shown, num_cached in (
        (one, 0),
        (one, 32),
        (two, 12),
        (two, 32),
        (turned, 12),
        (longer, 32),
        (one, 32),
    ):
        fresh = told(make_engine(target, None), [shown], GREEDY)[0]
        (found,) = told(core, [shown], GREEDY)
        assert found[0].num_cached_tokens == num_cached
        assert [one.logprobs for one in found] == [one.logprobs for one in fresh]


def test_what_is_seen_is_kept_for_the_same_salt(target: str) -> None:
    """A key could tell by how soon an answer comes that another one has sent the same picture."""
    core = make_engine(target, None)
    tower: Any = core.admission.vision
    looks, forward = list[Any](), tower._module.forward

    def look(*given: Any, **named: Any) -> Any:
        looks.append(given)
        return forward(*given, **named)

    tower._module.forward = look
    request = Shown(pixels(0, SIZES[0]), TEXTS[0]).request("0", GREEDY)

    def num_looks(**more: Any) -> int:
        before = len(looks)
        tower.see(msgspec.structs.replace(request, **more)).result()
        return len(looks) - before

    assert [num_looks(cache_salt=salt) for salt in ("a", "a", "b", "a")] == [1, 0, 1, 0]
    assert [num_looks(cache_salt="a", cache_prompt=False) for _ in range(2)] == [1, 1]
    core.forget_prefixes()
    assert num_looks(cache_salt="a") == 1


def test_an_installation_without_pillow_serves_texts() -> None:
    code = "import sys; sys.modules['PIL'] = None; import truedraft.engine.build"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_preemption_sees_again(target: str) -> None:
    prompts = [Shown(TEXTS[2], pixels(n, SIZES[0]), TEXTS[0]) for n in range(4)]
    params = SamplingParams(max_tokens=40, temperature=0, logprobs=0)
    alone = [written(make_engine(target, None), [shown], params)[0] for shown in prompts]
    core = make_engine(target, None, cache_memory="128KiB", max_num_sequences=4)
    assert written(core, prompts, params) == alone
    assert core.snapshot().num_preemptions


@pytest.mark.parametrize("draft", [None, "self:int8"])
def test_drafts_change_nothing(target: str, draft: str | None) -> None:
    """A draft model sees no pictures: n-grams draft for rows with some."""
    plain = make_engine(target, None, num_speculative_tokens=0)
    core = make_engine(target, draft, method="auto" if draft else "ngram", ngram_min_match=1)
    for params in (
        SamplingParams(max_tokens=40, temperature=0, logprobs=0),
        SamplingParams(max_tokens=40, temperature=0.3, seed=3, logprobs=0),  # verified by coupling
    ):
        expected = written(plain, [*PROMPTS.values()], params)
        assert written(core, [*PROMPTS.values()], params) == expected
    drafts = core.snapshot().drafts
    assert drafts["ngram"].num_accepted_tokens
    if draft:
        assert drafts["draft_model"].num_accepted_tokens


def test_a_draft_sees_no_pictures(target: str) -> None:
    core = make_engine(target, "self:int8", method="draft_model")
    params = SamplingParams(max_tokens=10, temperature=0)
    told(core, [PROMPTS["several"]], params)
    assert "draft_model" not in core.snapshot().drafts
    with pytest.raises(RequestError, match="no draft sees pictures"):
        told(core, [PROMPTS["several"]], SamplingParams(max_tokens=10, method="draft_model"))
    told(core, [PROMPTS["none"]], params)
    assert core.snapshot().drafts["draft_model"].num_draft_tokens
