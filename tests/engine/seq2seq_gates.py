"""What must hold of encoder-decoder pairs, as functions that raise ``AssertionError``.

``test_encoder_decoder`` calls them on the engine as it is, ``test_encoder_decoder_mutants`` on engines with a
planted bug.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM, LogitsProcessorList
from transformers.generation.logits_process import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from tests.engine.simulation import chi_square
from tests.models import make_engine, run_engine
from tests.seq2seq_models import EOS, generated
from truedraft.engine.messages import SamplingParams

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
SIGNIFICANCE = 1e-5
TEMPERATURE, NUM_SAMPLED = 0.8, 3


@dataclass(frozen=True)
class Pair:
    """``draft`` is the target with noise: accepted often, not always."""

    target: str
    draft: str


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 33, 7, 16, 2]
    return [[*torch.randint(3, 24, (n,), generator=generator).tolist(), EOS] for n in lengths]


@cache
def expected(target: str, repetition_penalty: float = 1.0) -> list[list[int]]:
    model = AutoModelForSeq2SeqLM.from_pretrained(target, dtype=torch.float32)
    return [
        generated(model, prompt, NUM_TOKENS, repetition_penalty=repetition_penalty) for prompt in prompts()
    ]


def greedy_is_generate(pair: Pair, lengths: range, in_flight: int) -> None:
    """Requests arrive while others run."""
    core = make_engine(pair.target, pair.draft, max_num_sequences=in_flight)
    for k in lengths:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, num_speculative_tokens=k)
        arrivals = [2 * i for i in range(len(prompts()))]
        assert run_engine(core, prompts(), params, arrivals) == expected(pair.target)
    assert core.scheduler.cache_usage() == {"target": 0, "draft": 0}
    assert 0 < core.stats.num_accepted_tokens < core.stats.num_draft_tokens


def self_draft_is_always_accepted(pair: Pair) -> None:
    core = make_engine(pair.target, pair.target, num_speculative_tokens=5)
    run_engine(core, prompts(), SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True))
    assert core.stats.num_accepted_tokens == core.stats.num_draft_tokens > 0


def repetition_penalty_is_generates(pair: Pair) -> None:
    """It sees what the decoder has said, not what the encoder has read."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, repetition_penalty=1.3)
    core = make_engine(pair.target, pair.draft)
    assert run_engine(core, prompts(), params) == expected(pair.target, 1.3)


def preempted_is_undisturbed(pair: Pair) -> None:
    """A cache that holds about two of the sequences at once."""
    core = make_engine(pair.target, pair.draft, cache_memory=2 * 23 * 4 * bytes_per_token(pair.target))
    assert run_engine(core, prompts(), GREEDY) == expected(pair.target)
    assert core.scheduler.num_preemptions > 0
    assert core.scheduler.cache_usage() == {"target": 0, "draft": 0}


@cache
def bytes_per_token(target: str) -> int:
    return make_engine(target, None).target.model.cache_bytes_per_token


def sampled_is_the_targets(pair: Pair, verification: str, in_flight: int, num_samples: int) -> None:
    """Three tokens' joint histogram against the product of the target's conditionals, by chi-square."""
    prompt = [3, 5, 4, EOS]
    core = make_engine(
        pair.target,
        pair.draft,
        num_speculative_tokens=2,
        max_num_sequences=in_flight,
        verification=verification,
    )
    params = [
        SamplingParams(max_tokens=NUM_SAMPLED, temperature=TEMPERATURE, seed=seed, ignore_eos=True)
        for seed in range(num_samples)
    ]
    joint = enumerated(pair.target, tuple(prompt))
    counts = np.zeros_like(joint)
    for tokens, count in Counter(map(tuple, run_engine(core, [prompt] * num_samples, params))).items():
        counts[tokens] = count
    assert (joint * num_samples >= 5).sum() > 10  # cells that can tell
    assert chi_square(counts.ravel(), joint.ravel()) > SIGNIFICANCE


@cache
def enumerated(target: str, prompt: tuple[int, ...]) -> np.ndarray:
    """Exact distribution of the first tokens, in float64, without cache or batch, under transformers' own
    versions of the checkpoint's rules."""
    model = AutoModelForSeq2SeqLM.from_pretrained(target, dtype=torch.float64)
    config = model.generation_config
    processors = LogitsProcessorList()
    if config.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.bad_words_ids:
        processors.append(NoBadWordsLogitsProcessor(config.bad_words_ids, config.eos_token_id))
    start = [config.decoder_start_token_id]
    if config.forced_bos_token_id is not None:
        start.append(config.forced_bos_token_id)
    joint = np.ones([model.config.vocab_size] * NUM_SAMPLED)
    for tokens in np.ndindex(joint.shape[:-1]):
        written = torch.tensor([[*start, *tokens]])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=written).logits[0]
        for place in range(NUM_SAMPLED):
            seen = written[:, : len(start) + place]
            row = processors(seen, logits[None, len(start) - 1 + place])[0]
            row = (row / TEMPERATURE).softmax(-1).numpy()
            joint[tokens] *= row if place == NUM_SAMPLED - 1 else row[tokens[place]]
    return joint
