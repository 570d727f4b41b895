"""What ``serve`` prints when the models are loaded, and what follows from the cache's size."""

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from truedraft.engine.messages import DefaultMethod, EncoderDecoderLengths, Ready
from truedraft.server.cli.launch import DRAFTERS, capacity
from truedraft.server.errors import ContextLengthError
from truedraft.server.generation.sampling_params import build_sampling_params, longest_request
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.completion import CompletionRequest
from truedraft.server.settings import RequestSettings, Settings
from truedraft.server.text.tokenizer import load_tokenizer

LENIENT = Leniency(strict=False)
WORKER = Ready(
    target="target",
    draft="draft",
    device="cuda:0",
    dtype="bfloat16",
    vocab_size=100,
    max_model_len=4000,
    num_target_blocks=2000,
    num_draft_blocks=2000,
    block_size=16,
    methods=["draft_model", "ngram"],
    method="draft_model",
    weights=["bfloat16", "float32"],
)


def worker(**fields: Any) -> Ready:
    return msgspec.structs.replace(WORKER, **fields)


def test_the_way_is_said() -> None:
    said = capacity(Settings(), worker(forward="transformers' layers"))[0]
    assert said == "Ready on cuda:0 in bfloat16, transformers' layers."


def test_capacity() -> None:
    assert capacity(Settings(), WORKER) == [
        "Ready on cuda:0 in bfloat16.",
        "  weights   bfloat16, float32",
        "  drafting  length auto; source: the draft model",
        "  cache     2,000 blocks of 16 tokens: 32,000 tokens for each model",
        "  requests  up to 4,000 tokens, prompt and output together; 8 of that length at once",
    ]


def test_states_are_said() -> None:
    hybrid = worker(num_state_slots=5, state_bytes=25 << 20)
    assert capacity(Settings(), hybrid)[4:] == [
        "  states    5 of 25.0MiB, records included: for what runs, and for beginnings that are kept",
        "  requests  up to 4,000 tokens, prompt and output together; 5 of that length at once",
    ]


def test_memory_is_said() -> None:
    sizes = {"weight_bytes": 98 << 20, "cache_bytes": 3 << 30, "worker_bytes": 420 << 20}
    lines = capacity(Settings(), worker(cache_dtype="float16", **sizes))
    assert lines[3].endswith("32,000 tokens for each model, in float16")
    assert lines[4] == "  memory    weights 98.0MiB, caches up to 3.0GiB; the worker has 420.0MiB now"


def test_a_quota_is_said() -> None:
    limited = worker(num_threads=1, thread_limit="the CPU quota is 1.5 of 8 processors")
    assert capacity(Settings(), limited)[2] == "  threads   1: the CPU quota is 1.5 of 8 processors"


def test_cache_smaller_than_the_context() -> None:
    small = worker(num_target_blocks=100, num_draft_blocks=100)
    assert capacity(Settings(), small)[-1] == (
        "  requests  up to 1,600 tokens, prompt and output together "
        "(the model could take 4,000: raise cache_memory); 1 of that length at once"
    )
    assert longest_request(small) == 1600
    request = CompletionRequest(model="m", prompt="p", max_tokens=601)
    with pytest.raises(ContextLengthError, match=r"cache holds 1600 tokens .*but 1000 .* and 601"):
        build_sampling_params(
            request,
            num_prompt_tokens=1000,
            worker=small,
            limits=RequestSettings(),
            leniency=Leniency(strict=False),
        )


def test_requests_at_once_are_limited_by_the_setting_too() -> None:
    assert capacity(Settings(), worker(max_num_sequences=3))[-1].endswith("; 3 of that length at once")


@pytest.mark.parametrize(
    ("length", "fields", "words"),
    [
        (1, {"method": "ngram"}, "length 1; source: n-grams of the text so far"),
        (
            2,
            {"method": "auto", "methods": ["grammar", "ngram"]},
            "length 2; source: n-grams of the text so far",
        ),
        (2, {"method": "auto", "methods": ["grammar"]}, "length 2; source: none"),
        (
            2,
            {"method": "auto", "methods": ["eagle", "grammar", "ngram"]},
            "length 2; source: the head on the target's states or n-grams of the text so far, "
            "by expected speed",
        ),
        (0, {}, "off, unless a request asks for it"),
        (4, {"method": "none"}, "off, unless a request asks for it"),
        (4, {"method": "none", "methods": []}, "off"),
    ],
)
def test_who_drafts(length: int, fields: dict[str, Any], words: str) -> None:
    lines = capacity(Settings(num_speculative_tokens=length), worker(**fields))
    assert lines[2] == f"  drafting  {words}"


def test_every_source_that_settings_name_has_words() -> None:
    assert set(DRAFTERS) == {*get_args(DefaultMethod)} - {"auto", "none"}


def test_folder_without_a_tokenizer_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no tokenizer. Copy tokenizer.json") as refused:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(refused.value)


ENCODER_DECODER = EncoderDecoderLengths(max_prompt_len=512, max_output_len=511, num_start_tokens=1)


def output_room(num_prompt_tokens: int, *, num_target_blocks: int = 2000, **fields: Any) -> int:
    """``max_tokens`` as an encoder-decoder worker gets it."""
    request = CompletionRequest.model_validate({"model": "m", "prompt": "p"} | fields)
    ready = worker(encoder_decoder=ENCODER_DECODER, num_target_blocks=num_target_blocks)
    params = build_sampling_params(
        request,
        num_prompt_tokens=num_prompt_tokens,
        worker=ready,
        limits=RequestSettings(),
        leniency=Leniency(strict=False),
    )
    return params.max_tokens


def test_an_encoder_decoder_bounds_prompt_and_output_each() -> None:
    assert output_room(512, max_tokens=511) == 511
    with pytest.raises(ContextLengthError, match="at most 512 tokens, but the prompt has 513"):
        output_room(513)
    with pytest.raises(ContextLengthError, match="at most 511 tokens, but 512"):
        output_room(1, max_tokens=512)


def test_a_small_cache_bounds_both_together() -> None:
    """160 tokens, one for the decoder's start."""
    assert output_room(100, num_target_blocks=10, max_tokens=59) == 59
    with pytest.raises(ContextLengthError, match="holds 160 tokens"):
        output_room(100, num_target_blocks=10, max_tokens=60)
    with pytest.raises(ContextLengthError, match="at least 2 more"):
        output_room(159, num_target_blocks=10)


def test_capacity_of_an_encoder_decoder() -> None:
    *_, requests = capacity(Settings(), worker(encoder_decoder=ENCODER_DECODER, max_model_len=1024))
    assert "up to 1,024 tokens, prompts up to 512 and outputs up to 511; 31 of that length" in requests
