"""Compares speculation with plain decoding and transformers on an encoder-decoder pair, in one process.

    python -m benchmarks.encoder_decoder [--acceptance 0.8 --lengths 2 4 8 --concurrency 1 4]

The pair is synthetic: decoders of flan-T5's shapes (large as target, small as draft by default) with random
weights, residual branches scaled to almost nothing and a head that maps each embedding to one successor. The
draft has another successor for a share of the tokens. Greedy; the text must be the same in every variant.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from benchmarks.common import Run, interleave, note, print_table, summary, timed
from benchmarks.synthetic_pair import RESIDUAL_SCALE, mistaken, successors
from truedraft.engine.build import build_engine
from truedraft.engine.commands.check_exactness import run as run_core
from truedraft.engine.config import EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import SamplingParams

VOCAB_SIZE = 32128
# Encoders only make the prompt slow; a few of their layers are enough here.
ENCODER_LAYERS = 2
TARGET = {"d_model": 1024, "d_ff": 2816, "num_heads": 16, "d_kv": 64, "num_decoder_layers": 24}
DRAFT = {"d_model": 512, "d_ff": 1024, "num_heads": 6, "d_kv": 64, "num_decoder_layers": 8}


@torch.no_grad()
def build(shape: dict[str, int], following: torch.Tensor, seed: int) -> T5ForConditionalGeneration:
    """A flan-T5 that greedily says ``following[token]`` after each token, whatever the prompt."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCAB_SIZE,
        **shape,
        num_layers=ENCODER_LAYERS,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    model = T5ForConditionalGeneration(config)
    model.shared.weight.normal_()
    model.lm_head.weight[following] = model.shared.weight
    for name, parameter in model.decoder.named_parameters():
        if name.endswith((".o.weight", ".wo.weight")):
            parameter.mul_(RESIDUAL_SCALE)
    return model


def save_pair(folder: Path, acceptance: float) -> tuple[str, str]:
    following = successors(VOCAB_SIZE, seed=0)
    for name, shape, says in (
        ("target", TARGET, following),
        ("draft", DRAFT, mistaken(following, acceptance, seed=0)),
    ):
        build(shape, says, seed=1).save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "draft")


def engine_run(core: EngineCore, prompts: list[list[int]], in_flight: int, length: int, tokens: int) -> Run:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, num_speculative_tokens=length)
    done: list[Any] = []

    def work() -> None:
        for first in range(0, len(prompts), in_flight):
            done.extend(run_core(core, prompts[first : first + in_flight], params))

    seconds = timed(work)
    return Run(
        num_tokens=sum(len(completion.token_ids) for completion in done),
        seconds=seconds,
        num_rounds=sum(completion.num_rounds for completion in done),
        num_draft_tokens=sum(completion.num_draft_tokens for completion in done),
        num_accepted_tokens=sum(completion.num_accepted_tokens for completion in done),
        token_ids=[completion.token_ids for completion in done],
    )


def transformers_run(model: Any, prompts: list[list[int]], tokens: int, **options: Any) -> Run:
    said: list[list[int]] = []

    def work() -> None:
        for prompt in prompts:
            output = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=tokens, eos_token_id=None, **options
            )
            said.append(output[0, 1:].tolist())

    seconds = timed(work)
    return Run(sum(map(len, said)), seconds, token_ids=said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--transformers", action="store_true", help="also generate() without and with a draft"
    )
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(VOCAB_SIZE, (args.num_prompts, args.prompt_tokens), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        target, draft = save_pair(Path(folder), args.acceptance)
        core = build_engine(EngineConfig(target=target, draft=draft, dtype="float32", device="cpu"))
        models = [
            AutoModelForSeq2SeqLM.from_pretrained(path) for path in (target, draft) if args.transformers
        ]
    variants: dict[str, Callable[[], Run]] = {}
    base_of: dict[str, str] = {}
    for in_flight in args.concurrency:
        plain = f"plain, {in_flight} at a time"
        for length in (0, *args.lengths):
            name = f"{length} drafted, {in_flight} at a time" if length else plain
            base_of[name] = plain
            variants[name] = lambda n=in_flight, k=length: engine_run(  # type: ignore[misc]
                core, prompts, n, k, args.max_tokens
            )
    if models:
        options = {"transformers": {}, "transformers, assisted": {"assistant_model": models[1]}}
        for name, option in options.items():
            base_of[name] = f"plain, {args.concurrency[0]} at a time"
            variants[name] = lambda o=option: transformers_run(  # type: ignore[misc]
                models[0], prompts, args.max_tokens, **o
            )
    note("warming up")
    for variant in variants.values():
        variant()
    runs = interleave(variants, args.repeats)
    texts = {str(run.token_ids) for repeats in runs.values() for run in repeats}
    print_table(summary(runs, {"x plain": base_of}), "Encoder-decoder pair, greedy")
    print("greedy text identical in all variants" if len(texts) == 1 else "GREEDY TEXT DIFFERS")


if __name__ == "__main__":
    main()
