"""A token's logits follow from its position and the tokens before it: not from neighbours, chunks, prefix
hits or drafts, on either side of every boundary that a config names (windows, original contexts, scales).

The planted bug is transformers' own behaviour: rotary factors of the longest text in the batch for all of it.
The gate, the check at load and ``truedraft check`` each notice it.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families import CONTEXT, FAMILIES, ORIGINAL, VOCAB_SIZE
from tests.models import make_engine, run_engine
from truedraft.engine.checkpoints.facts import ModelFacts
from truedraft.engine.commands import check
from truedraft.engine.commands.check_exactness import GreedyResult
from truedraft.engine.commands.check_positions import PositionsResult, long_texts
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.layers import rotary as rotary_module
from truedraft.engine.memory.batch import Span
from truedraft.engine.memory.block_table import BlockTable
from truedraft.engine.messages import SamplingParams
from truedraft.engine.models import architecture, probe_texts
from truedraft.engine.models.base import Model
from truedraft.engine.models.decoder import FusedDecoder
from truedraft.engine.models.hf.fresh import FreshModel
from truedraft.engine.models.hf.module import load_causal_model
from truedraft.engine.models.load import load_model
from truedraft.engine.models.model_runner import ModelRunner
from truedraft.engine.models.options import LoadOptions
from truedraft.engine.models.positions import boundaries
from truedraft.server.cli.settings_sources import read_options

pytestmark = pytest.mark.usefixtures("packs_small_layers")

Patch = pytest.MonkeyPatch
Folder = Callable[[str], str]

LONGROPE = ["Phi-3, longrope", "Phi-3, longrope in C", "Phi-MoE, longrope", "MiniCPM3, longrope"]
BLOCK_SIZE = 4
NUM_DRAFTED = 4


def random_ids(length: int, seed: int = 5) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


# --- The gate ----------------------------------------------------------------------------------------------


def table_of(number: int) -> BlockTable:
    """Returns room for a whole context, its blocks from the last one on."""
    table, num_blocks = BlockTable(), CONTEXT // BLOCK_SIZE
    table.block_ids = list(range((number + 1) * num_blocks - 1, number * num_blocks - 1, -1))
    return table


def alone(model: Model, ids: list[int]) -> torch.Tensor:
    runner = ModelRunner.build(model, CONTEXT // BLOCK_SIZE, BLOCK_SIZE)
    return runner.forward([Span(table_of(0), ids, len(ids))]).logits


def pieces(length: int, changes: list[int], first: int = 0) -> Iterator[tuple[int, int, bool]]:
    """Yields chunks, and single tokens around changes; drafted tokens follow the latter."""
    singles = {place for change in changes for place in range(change - 3, change + 3)}
    while first < length:
        end = first + 1
        if first not in singles:
            while end < length and end not in singles and end < first + 37:
                end += 1
        yield first, end, first in singles
        first = end


def beside(model: Model, texts: list[list[int]], changes: list[int]) -> list[torch.Tensor]:
    """Computes texts together, piece by piece; drafted tokens, which are wrong, are taken back."""
    runner = ModelRunner.build(model, len(texts) * CONTEXT // BLOCK_SIZE, BLOCK_SIZE)
    tables = [table_of(number) for number in range(len(texts))]
    left = [list(pieces(len(ids), changes)) for ids in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(left):
        members = [number for number, each in enumerate(left) if each]
        cuts = [left[number].pop(0) for number in members]
        spans = []
        for number, (start, end, is_drafted) in zip(members, cuts, strict=True):
            drafted = [(token + 1) % VOCAB_SIZE for token in texts[number][end : end + NUM_DRAFTED]]
            new = texts[number][start:end] + (drafted if is_drafted else [])
            spans.append(Span(tables[number], new, len(new)))
        parts = torch.split(runner.forward(spans).logits, [span.num_logits for span in spans])
        for number, (start, end, _), part in zip(members, cuts, parts, strict=True):
            found[number].append(part[: end - start])
            tables[number].num_computed_tokens = end
    return [torch.cat(parts) for parts in found]


def after_a_hit(model: Model, ids: list[int], num_blocks: int) -> torch.Tensor:
    """Computes what follows the first blocks, which another sequence has computed next to a longer one."""
    runner = ModelRunner.build(model, 3 * CONTEXT // BLOCK_SIZE, BLOCK_SIZE)
    first, other, second = (table_of(number) for number in range(3))
    runner.forward([Span(first, ids, 0), Span(other, random_ids(CONTEXT, seed=9), 1)])
    second.block_ids[:num_blocks] = first.block_ids[:num_blocks]
    second.num_computed_tokens = num_blocks * BLOCK_SIZE
    rest = ids[second.num_computed_tokens :]
    return runner.forward([Span(second, rest, len(rest))]).logits


def gate(model: Model, reference: Any) -> None:
    """Raises ``AssertionError`` if a text's logits depend on anything but the text."""

    def same(ours: torch.Tensor, expected: torch.Tensor, *, to_the_bit: bool) -> None:
        if to_the_bit:
            assert torch.equal(ours, expected)
        else:
            scale = float(expected.abs().max())
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3 * scale)

    changes = boundaries(model.config)
    lengths = [5, *(change + 9 for change in changes), CONTEXT - NUM_DRAFTED]
    texts = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    expected = [alone(model, ids) for ids in texts]
    with torch.inference_mode():
        for ids, logits in zip(texts, expected, strict=True):
            theirs = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            same(logits, theirs, to_the_bit=False)
    for logits, ours in zip(expected, beside(model, texts, changes), strict=True):
        same(ours, logits, to_the_bit=model.is_native)
    for ids, logits in zip(texts[1:], expected[1:], strict=True):
        for num_blocks in {1, len(ids) // (2 * BLOCK_SIZE), (len(ids) - 1) // BLOCK_SIZE}:
            ours = after_a_hit(model, ids, num_blocks)
            same(ours, logits[num_blocks * BLOCK_SIZE :], to_the_bit=model.is_native)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_follow_from_the_text_alone(family_folder: Folder, family: str) -> None:
    path = family_folder(family)
    model = load_model(path, LoadOptions())
    assert model.is_native == family.endswith("in C") or isinstance(model, FusedDecoder)
    gate(model, load_causal_model(path, LoadOptions(), "eager"))


@pytest.mark.parametrize("family", ["Phi-3, longrope in C", "Llama, YaRN in C", "Gemma 2 in C"])
def test_logits_of_torch_follow_from_the_text_alone(family_folder: Folder, family: str) -> None:
    path, options = family_folder(family), LoadOptions(native_kernels=False)
    model = load_model(path, options)
    assert isinstance(model, FusedDecoder)
    assert not model.is_native
    gate(model, load_causal_model(path, options, "eager"))


def test_boundaries_of_the_families(family_folder: Folder) -> None:
    def of(family: str) -> list[int]:
        return boundaries(AutoConfig.from_pretrained(family_folder(family)))

    assert of("Llama") == []
    assert of("Gemma 2") == of("Gemma 3") == of("Mistral, sliding window") == of("Cohere 2") == [8]
    assert of("Phi-3, longrope") == of("Llama, YaRN in C") == [ORIGINAL]
    assert of("Ministral 3, attention temperature") == [16]


# --- Longrope: one set of factors for a server -------------------------------------------------------------


@pytest.mark.parametrize("family", LONGROPE)
@pytest.mark.parametrize("length", [ORIGINAL, ORIGINAL + 1])
def test_factors_are_transformers_own_for_texts_of_the_length_that_is_served(
    family_folder: Folder, family: str, length: int
) -> None:
    path, ids = family_folder(family), random_ids(length)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    logits = {served: alone(load_model(path, LoadOptions(max_model_len=served)), ids) for served in (64, 65)}
    scale = float(expected.abs().max())
    torch.testing.assert_close(logits[length], expected, rtol=0, atol=1e-3 * scale)
    other = ORIGINAL + ORIGINAL + 1 - length
    assert (logits[other] - expected).abs().max() > 0.05 * scale


@pytest.mark.parametrize("family", LONGROPE[:2])
def test_a_text_is_the_same_beside_a_longer_one(family_folder: Folder, family: str) -> None:
    path = family_folder(family)
    short, long = random_ids(12), random_ids(150, seed=6)
    for params in (SamplingParams(max_tokens=80, temperature=0), SamplingParams(max_tokens=80, seed=7)):
        (expected,) = run_engine(make_engine(path, None, max_model_len=CONTEXT), [short], params)
        core = make_engine(path, path, num_speculative_tokens=4)
        for _ in range(2):  # then with prefix hits
            assert run_engine(core, [short, long], params)[0] == expected
        # The model as its own draft, across the original context; rounding may move a uniform number's place.
        assert core.stats.num_accepted_tokens >= core.stats.num_draft_tokens - 2 * (params.temperature != 0)
        assert core.scheduler.num_prefix_hits > 0


# --- The planted bug ---------------------------------------------------------------------------------------


def factors_of_the_longest_text(patch: Patch) -> None:
    """Factors are chosen as transformers does it, in each forward."""
    patch.setattr(architecture, "choose_rotary_factors", lambda *_: None)
    patch.setattr(rotary_module, "MAX_TABLE_POSITIONS", 0)
    patch.setattr(rotary_module, "MAX_TABLE_NUMBERS", 0)


@pytest.mark.parametrize("native", [True, False])
def test_the_gate_notices(family_folder: Folder, monkeypatch: Patch, native: bool) -> None:
    path, options = family_folder("Phi-3, longrope in C"), LoadOptions(native_kernels=native)
    model = load_model(path, options)
    assert isinstance(model, FusedDecoder)
    assert model.is_native == native
    factors_of_the_longest_text(monkeypatch)
    reference = load_causal_model(path, options, "eager")
    module = type(model.rotary.module)(config=reference.config)
    model.rotary = rotary_module.Rotary(module, reference.config, model.rotary.like)
    model.weights = replace(model.weights, rotary=model.rotary)
    with pytest.raises(AssertionError):
        gate(model, reference)


@pytest.mark.parametrize("family", LONGROPE)
def test_the_gate_notices_in_transformers_layers(
    family_folder: Folder, monkeypatch: Patch, family: str
) -> None:
    factors_of_the_longest_text(monkeypatch)
    model = load_model(family_folder(family), LoadOptions(self_check=False))
    with pytest.raises(AssertionError):
        gate(model, load_causal_model(family_folder(family), LoadOptions(), "eager"))


@pytest.mark.parametrize(
    "family",
    [
        *("Phi-3, longrope in C", "Phi-MoE, longrope", "Ministral 3, attention temperature"),
        *("Gemma 2 in C", "Gemma 3", "GPT-OSS, attention sinks"),
    ],
)
def test_models_too_large_for_long_texts_are_tried_with_late_positions(
    family_folder: Folder, monkeypatch: Patch, family: str
) -> None:
    monkeypatch.setattr(probe_texts, "MAX_MULTIPLICATIONS", {"cpu": 0})
    model = load_model(family_folder(family), LoadOptions())
    assert isinstance(model, FusedDecoder) == model.config.model_type.startswith(("phi3", "gemma", "gpt_oss"))
    facts = ModelFacts(model.config, None, model.num_parameters, model.dtype, model.device)
    _, late = probe_texts.probe_texts(facts)
    assert [text.first_position for text in late[1:]] == [each - 6 for each in boundaries(model.config)]


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("family", LONGROPE)
def test_loading_notices(family_folder: Folder, monkeypatch: Patch, family: str, is_small: bool) -> None:
    if not is_small:
        monkeypatch.setattr(probe_texts, "MAX_MULTIPLICATIONS", {"cpu": 0})
    factors_of_the_longest_text(monkeypatch)
    with pytest.raises(ModelLoadError, match="deviate by"):
        load_model(family_folder(family), LoadOptions())


def run_check(path: str, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    """Runs a quick one, with the model as its own draft."""
    quick = ["--device", "cpu", "--samples", "100", "--seconds", "1e-9", "--repeats", "1", "--json"]
    options = ["--target", path, "--draft", path, *quick, *more]
    code = check.main(read_options(check.CheckSettings, options))
    return code, json.loads(capsys.readouterr().out)


def test_check_notices(family_folder: Folder, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    family = "Phi-3, longrope in C"
    code, report = run_check(family_folder(family), capsys)
    assert code == check.EXACT
    positions = report["positions"]
    assert (positions["crossed"], positions["skipped"]) == ([ORIGINAL], [])
    assert positions["num_scored"] > ORIGINAL
    assert positions["largest_gap"] < 1e-3
    factors_of_the_longest_text(monkeypatch)
    code, report = run_check(family_folder(family), capsys, "--no-self-check")
    assert code == check.NOT_EXACT
    assert "a text beside others differs" in report["verdict"]
    assert report["positions"]["greedy"]["differences"]


def test_check_says_what_there_was_no_time_for(family_folder: Folder) -> None:
    target = FreshModel(family_folder("Phi-3, longrope"), LoadOptions())
    texts = long_texts(target, None, seconds=1e-9)
    assert (texts.crossed, texts.skipped) == ([], [ORIGINAL])
    words = PositionsResult(GreedyResult(), texts.crossed, texts.skipped, "the reference").in_words
    assert words.endswith("; not beyond 64: see --long-seconds")
