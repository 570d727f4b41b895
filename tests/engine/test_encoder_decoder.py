"""Encoder-decoder pairs are as exact as decoder pairs: T5, flan-T5, BART, Marian and their relatives."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from tests.engine import seq2seq_gates as gates
from tests.engine.seq2seq_gates import GREEDY, NUM_TOKENS, Pair, expected, prompts
from tests.models import make_engine, outputs_by_choice, run_engine, save_random_llama, stepped
from tests.seq2seq_models import FAMILIES, save_perturbed_seq2seq, save_random_seq2seq
from truedraft import LLM
from truedraft.engine.commands import check
from truedraft.engine.core.admission import RequestError
from truedraft.engine.errors import ModelLoadError
from truedraft.engine.messages import Generate, SamplingParams
from truedraft.server.cli.settings_sources import read_options

MAIN = ["t5", "flan-t5", "bart", "marian"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    root: Path = tmp_path_factory.mktemp("seq2seq")
    made = {}
    for family in FAMILIES:
        target = save_random_seq2seq(root / family, family, seed=1)
        made[family] = Pair(target, save_perturbed_seq2seq(root / f"{family}-draft", target, 2, noise=0.01))
    return made


@pytest.fixture(scope="module")
def t5(pairs: dict[str, Pair]) -> Pair:
    return pairs["t5"]


def test_prompts_matter(pairs: dict[str, Pair]) -> None:
    """Else all that follows would also hold of a decoder that ignores its encoder."""
    for pair in pairs.values():
        assert len({tuple(tokens[:8]) for tokens in expected(pair.target)}) >= 3


@pytest.mark.parametrize("family", MAIN)
def test_greedy_is_generate(pairs: dict[str, Pair], family: str) -> None:
    gates.greedy_is_generate(pairs[family], range(7), in_flight=4)


@pytest.mark.parametrize("family", ["t5", "marian"])
def test_greedy_one_at_a_time(pairs: dict[str, Pair], family: str) -> None:
    gates.greedy_is_generate(pairs[family], range(0, 7, 3), in_flight=1)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(MAIN)))
def test_their_relatives_too(pairs: dict[str, Pair], family: str) -> None:
    gates.greedy_is_generate(pairs[family], range(4, 5), in_flight=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_self_draft_is_always_accepted(pairs: dict[str, Pair], family: str) -> None:
    gates.self_draft_is_always_accepted(pairs[family])


@pytest.mark.parametrize("family", MAIN)
def test_repetition_penalty_is_generates(pairs: dict[str, Pair], family: str) -> None:
    gates.repetition_penalty_is_generates(pairs[family])


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_preemption_changes_nothing(pairs: dict[str, Pair], family: str) -> None:
    gates.preempted_is_undisturbed(pairs[family])


def test_an_unrelated_draft_with_a_padded_vocabulary(t5: Pair, tmp_path: Path) -> None:
    draft = save_random_seq2seq(tmp_path, "flan-t5", seed=3, vocab_size=28, hidden=16, layers=1)
    core = make_engine(t5.target, draft)
    assert run_engine(core, prompts(), GREEDY) == expected(t5.target)


def test_drafts_copied_from_the_prompt(t5: Pair) -> None:
    """n-grams are looked up in what the encoder has read and the decoder has said."""
    core = make_engine(t5.target, None, method="ngram", ngram_min_match=1)
    assert run_engine(core, prompts(), GREEDY) == expected(t5.target)
    assert 0 < core.stats.num_accepted_tokens < core.stats.num_draft_tokens
    # Told to say 8, it drafts what follows the 8 of the prompt.
    params = SamplingParams(max_tokens=9, temperature=0, logit_bias={8: 100.0}, trace=True)
    core.add(Generate("r", [6, 7, 8, 9, 10, 1], params))
    stepped(core)
    trace = stepped(core)[0].trace
    assert trace is not None
    assert trace.draft_ids[:3] == [9, 10, 1]


def test_automatic_draft_length(t5: Pair) -> None:
    core = make_engine(t5.target, t5.draft, num_speculative_tokens="auto")
    assert run_engine(core, prompts(), GREEDY) == expected(t5.target)
    assert core.scheduler.cache_usage() == {"target": 0, "draft": 0}


@pytest.mark.parametrize("family", ["t5", "marian"])
def test_with_a_seed_the_draft_changes_nothing(pairs: dict[str, Pair], family: str) -> None:
    pair = pairs[family]
    params = [SamplingParams(max_tokens=20, seed=seed, top_p=0.9) for seed in range(len(prompts()))]
    plain = run_engine(make_engine(pair.target, None, max_num_sequences=1), prompts(), params)
    for draft, method in ((pair.draft, "auto"), (pair.target, "auto"), (None, "ngram")):
        core = make_engine(pair.target, draft, method=method, ngram_min_match=1)
        assert run_engine(core, prompts(), params) == plain


# Each family and each rule comes once: what they do together is in the greedy text of each family.
@pytest.mark.parametrize(
    ("family", "verification"),
    [("t5", "block"), ("bart", "rejection"), ("marian", "coupled")],
)
def test_sampled_is_the_targets(tiny_pairs: dict[str, Pair], family: str, verification: str) -> None:
    gates.sampled_is_the_targets(tiny_pairs[family], verification, in_flight=32, num_samples=1200)


def test_sampled_one_at_a_time(tiny_pairs: dict[str, Pair]) -> None:
    gates.sampled_is_the_targets(tiny_pairs["t5"], "rejection", in_flight=1, num_samples=1000)


@pytest.fixture(scope="module")
def tiny_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return save_tiny_pairs(tmp_path_factory.mktemp("tiny"))


def save_tiny_pairs(root: Path) -> dict[str, Pair]:
    """Six tokens, so that all continuations can be enumerated; unrelated drafts, so that much is rejected."""

    def save(family: str, seed: int) -> str:
        return save_random_seq2seq(
            root / f"{family}-{seed}", family, seed, vocab_size=6, hidden=16, layers=1, context=32
        )

    return {family: Pair(save(family, 11), save(family, 12)) for family in ("t5", "bart", "marian")}


def test_choices_of_one_request(t5: Pair) -> None:
    core = make_engine(t5.target, t5.draft)
    params = SamplingParams(max_tokens=20, seed=3)
    core.add(Generate("r", prompts()[1], params, n=3))
    choices = outputs_by_choice(core)
    assert choices["r", 0] == run_engine(core, prompts()[1:2], params)[0]
    assert len(set(map(tuple, choices.values()))) == 3


def test_abort_frees_both_caches(t5: Pair) -> None:
    core = make_engine(t5.target, t5.draft)
    core.add(Generate("r", prompts()[1], GREEDY))
    core.step()
    core.step()
    assert min(core.scheduler.cache_usage().values()) > 0
    core.abort("r")
    assert core.scheduler.cache_usage() == {"target": 0, "draft": 0}


def test_prefixes_are_not_shared(t5: Pair) -> None:
    core = make_engine(t5.target, t5.draft, prefix_caching=True)
    prompt = prompts()[1]
    longer = [*prompt[:-1], 9, 9, 1]
    run_engine(core, [prompt], GREEDY)
    assert run_engine(core, [longer], GREEDY) == run_engine(make_engine(t5.target, None), [longer], GREEDY)
    assert core.scheduler.num_prefix_hits == 0


def test_logprobs_are_the_targets(t5: Pair) -> None:
    core = make_engine(t5.target, t5.draft)
    prompt = prompts()[3]
    core.add(Generate("r", prompt, SamplingParams(max_tokens=12, temperature=0, logprobs=2)))
    scored = []
    while core.has_work:
        for output in stepped(core):
            assert output.logprobs is not None
            scored += output.logprobs
    model = AutoModelForSeq2SeqLM.from_pretrained(t5.target, dtype=torch.float32)
    said = expected(t5.target)[3][:12]
    assert [token.token_id for token in scored] == said
    with torch.no_grad():
        written = torch.tensor([[0, *said[:-1]]])
        logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=written).logits[0]
    want = logits.log_softmax(-1).gather(-1, torch.tensor(said)[:, None]).squeeze(-1)
    assert [token.logprob for token in scored] == pytest.approx(want.tolist(), abs=1e-4)


def test_a_forced_end_says_that_the_length_ended_it(pairs: dict[str, Pair]) -> None:
    core = make_engine(pairs["bart"].target, None)
    core.add(Generate("r", prompts()[1], SamplingParams(max_tokens=4, temperature=0)))
    outputs = []
    while core.has_work:
        outputs += stepped(core)
    assert outputs[-1].token_ids == [1]
    assert outputs[-1].finish_reason == "length"


def test_limits_of_prompt_and_output(t5: Pair) -> None:
    core = make_engine(t5.target, t5.draft, max_model_len=20, max_num_batched_tokens=8)
    longest = [*range(3, 22), 1]
    with pytest.raises(RequestError, match="21 tokens, the encoder reads at most 20"):
        core.add(Generate("r", [2, *longest], GREEDY))
    with pytest.raises(RequestError, match="prompt_logprobs"):
        core.add(Generate("r", longest, SamplingParams(max_tokens=1, prompt_logprobs=0)))
    # The longest prompt is read in one pass although a step has 8 tokens; the output has its own limit.
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    assert len(run_engine(core, [longest], params)[0]) == 19


def test_a_request_that_never_fits_is_refused(t5: Pair) -> None:
    core = make_engine(t5.target, None, cache_memory=10 * 4 * gates.bytes_per_token(t5.target))
    with pytest.raises(RequestError, match="do not fit into the cache"):
        core.add(Generate("r", prompts()[1], SamplingParams(max_tokens=10)))
    assert len(run_engine(core, prompts()[1:2], SamplingParams(max_tokens=5, ignore_eos=True))[0]) == 5


def test_what_cannot_be_served_is_said(pairs: dict[str, Pair], tmp_path: Path) -> None:
    llama = save_random_llama(tmp_path / "llama", seed=1, vocab_size=24)
    with pytest.raises(ModelLoadError, match="target is an encoder-decoder model, the draft a decoder only"):
        make_engine(pairs["t5"].target, llama)
    with pytest.raises(ModelLoadError, match="target is a decoder only, the draft an encoder-decoder model"):
        make_engine(llama, pairs["t5"].target)
    short = save_random_seq2seq(tmp_path / "short", "bart", seed=1, context=64)
    with pytest.raises(ModelLoadError, match="the draft reads and writes only 64"):
        make_engine(pairs["bart"].target, short)
    make_engine(pairs["bart"].target, short, max_model_len=64)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("bad_words_ids", [[3, 4]]), ("encoder_no_repeat_ngram_size", 3), ("guidance_scale", 2.0)],
)
def test_generation_configs_that_cannot_be_honoured(
    t5: Pair, tmp_path: Path, setting: str, value: object
) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(t5.target)
    setattr(model.generation_config, setting, value)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=setting):
        make_engine(str(tmp_path), None)
    make_engine(t5.target, str(tmp_path))  # a draft's are nobody's business


def test_truedraft_check(t5: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--device", "cpu", "--samples", "300", "--seconds", "1e-9", "--repeats", "1", "--json"]
    assert (
        check.main(read_options(check.CheckSettings, ["--target", t5.target, "--draft", t5.draft, *quick]))
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["exact"]
    assert report["greedy"]["differences"] == []
    assert all(0 < result["acceptance_rate"] < 1 for result in report["sampling"])


def test_the_librarys_texts_do_not_go_on_with_what_the_encoder_reads(t5: Pair) -> None:
    """A decoder that drops a space before the first word of a text then does so."""
    llm = LLM(t5.target, max_model_len=32)
    prompt, first = llm.tokenizer.encode("a b"), llm.tokenizer.encode("a")[:1]
    assert llm.text_stream(prompt).step(first[0]) == llm.text_stream().step(first[0])
