"""Engine against itself and against transformers: python -m benchmarks.offline

For each temperature, in one process and interleaved: our engine without and with speculation at several
numbers of concurrent sequences, and transformers' ``generate`` without and with ``assistant_model`` one
prompt at a time, with the same constant draft length. Every variant makes exactly ``--max-tokens`` tokens for
each prompt (end-of-sequence is ignored). Greedy outputs are compared with the first variant's.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import (
    Run,
    Runs,
    interleave,
    machine,
    note,
    print_table,
    read_prompts,
    summary,
    timed,
    warn_if_busy,
    write_json,
)
from engine.config import EngineConfig
from engine.llm import LLM
from engine.messages import SamplingParams

Variants = dict[str, Callable[[], Run]]

GENERATE = "transformers generate"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="default: the bundled pair")
    parser.add_argument("--draft")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: as torch chooses")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=8, help="prompts of one run of one variant")
    parser.add_argument("--prompts", type=Path, help="file of prompts; default: story openings")
    parser.add_argument("--repeats", type=int, default=5, help="5 or more for numbers worth reporting")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--json", type=Path, help="also write everything here")
    return parser.parse_args()


def our_run(llm: LLM, prompts: list[list[int]], concurrency: int, params: SamplingParams) -> Run:
    """All prompts, ``concurrency`` at a time."""
    completions: list[Any] = []

    def work() -> None:
        for start in range(0, len(prompts), concurrency):
            completions.extend(llm.generate(prompts[start : start + concurrency], params))

    seconds = timed(work)
    return Run(
        num_tokens=sum(len(completion.token_ids) for completion in completions),
        seconds=seconds,
        num_rounds=sum(completion.num_rounds for completion in completions),
        num_draft_tokens=sum(completion.num_draft_tokens for completion in completions),
        num_accepted_tokens=sum(completion.num_accepted_tokens for completion in completions),
        token_ids=[list(completion.token_ids) for completion in completions],
    )


def variant_name(kind: str, concurrency: int) -> str:
    return f"{kind}, {concurrency} at a time"


def our_variants(
    llm: LLM, prompts: list[list[int]], arguments: argparse.Namespace, temperature: float
) -> Variants:
    variants: Variants = {}
    for concurrency in arguments.concurrency:
        for name, k in (("plain", 0), ("speculative", arguments.num_speculative_tokens)):
            params = SamplingParams(
                max_tokens=arguments.max_tokens,
                temperature=temperature,
                ignore_eos=True,
                num_speculative_tokens=k,
            )
            variants[variant_name(name, concurrency)] = partial(our_run, llm, prompts, concurrency, params)
    return variants


class Transformers:
    """The same pair through transformers' own ``generate``."""

    def __init__(self, config: EngineConfig, device: str, dtype: torch.dtype) -> None:
        self.device = device
        self.target = self._load(config.target, dtype)
        self.draft = self._load(config.draft, dtype) if config.draft else None
        if self.draft is not None:
            self.draft.generation_config.num_assistant_tokens = config.num_speculative_tokens
            self.draft.generation_config.num_assistant_tokens_schedule = "constant"
            self.draft.generation_config.assistant_confidence_threshold = 0.0

    def _load(self, path: str | None, dtype: torch.dtype) -> Any:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(self.device).eval()
        # No end-of-sequence: every variant does the same amount of work.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    def run(
        self, prompts: Sequence[list[int]], max_tokens: int, temperature: float, *, assisted: bool
    ) -> Run:
        how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if temperature > 0:
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if assisted:
            how["assistant_model"] = self.draft
        outputs: list[list[int]] = []

        def work() -> None:
            for prompt in prompts:
                ids = torch.tensor([prompt], device=self.device)
                output = self.target.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **how
                )
                outputs.append(output[0, len(prompt) :].tolist())

        seconds = timed(work)
        return Run(num_tokens=sum(map(len, outputs)), seconds=seconds, token_ids=outputs)

    def variants(
        self, prompts: Sequence[list[int]], arguments: argparse.Namespace, temperature: float
    ) -> Variants:
        run = partial(self.run, prompts, arguments.max_tokens, temperature)
        variants: Variants = {GENERATE: partial(run, assisted=False)}
        if self.draft is not None:
            variants["transformers assistant_model"] = partial(run, assisted=True)
        return variants


def baselines(variants: Variants, concurrency: Sequence[int]) -> dict[str, dict[str, str]]:
    """Ours is compared with plain decoding at the same concurrency, all with the peer's plain decoding."""
    to_plain = {name: next(iter(variants)) for name in variants}
    for number in concurrency:
        to_plain[variant_name("speculative", number)] = variant_name("plain", number)
        to_plain[variant_name("plain", number)] = variant_name("plain", number)
    columns = {"to_plain": to_plain}
    if GENERATE in variants:
        columns["to_generate"] = dict.fromkeys(variants, GENERATE)
    return columns


def same_as_first(runs: Runs) -> dict[str, str]:
    """How many greedy outputs are the first variant's, token by token."""
    (reference, *_), *_ = runs.values()
    found = {}
    for name, (first, *_) in runs.items():
        pairs = list(zip(first.token_ids, reference.token_ids, strict=True))
        found[name] = f"{sum(ours == theirs for ours, theirs in pairs)}/{len(pairs)}"
    return found


def main() -> None:
    arguments = parse_arguments()
    busy = warn_if_busy()
    given = {"target": arguments.target, "draft": arguments.draft}
    config = EngineConfig(
        **{key: value for key, value in given.items() if value},
        device=arguments.device,
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        num_speculative_tokens=arguments.num_speculative_tokens,
    )
    llm = LLM(**config.model_dump())
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype_name = arguments.dtype
    if dtype_name == "auto":
        dtype_name = "float32" if device == "cpu" else "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    texts = read_prompts(arguments.prompts)
    prompts = [tokenizer(texts[i % len(texts)]).input_ids for i in range(arguments.num_prompts)]
    peer = None if arguments.no_transformers else Transformers(config, device, getattr(torch, dtype_name))

    about = machine() | {
        "device": torch.cuda.get_device_name() if device != "cpu" else "CPU",
        "dtype": dtype_name,
        "torch": str(torch.__version__),
        "torch_threads": torch.get_num_threads(),
        "busy": busy,
    }
    results = []
    for temperature in arguments.temperature:
        variants = our_variants(llm, prompts, arguments, temperature)
        if peer is not None:
            variants |= peer.variants(prompts, arguments, temperature)
        note(f"Temperature {temperature:g}: one run of each to warm up")
        interleave(variants, 1)
        note(f"Temperature {temperature:g}: measuring")
        runs = interleave(variants, arguments.repeats)
        rows = summary(runs, baselines(variants, arguments.concurrency))
        if temperature == 0:
            for row, same in zip(rows, same_as_first(runs).values(), strict=True):
                row["same_text"] = same
        results.append({"temperature": temperature, "rows": rows})

    print("  ".join(f"{key}: {value}" for key, value in about.items()))
    print(f"target {config.target}  draft {config.draft}  k = {config.num_speculative_tokens}")
    print(
        f"{arguments.num_prompts} prompts x {arguments.max_tokens} tokens a run, "
        f"medians of {arguments.repeats} interleaved runs; ratios are taken within a repeat: "
        f"to plain decoding at the same concurrency (transformers: at the first), to {GENERATE}"
    )
    for result in results:
        print_table(result["rows"], f"Temperature {result['temperature']:g}")
    write_json(
        arguments.json,
        {"machine": about, "arguments": {k: str(v) for k, v in vars(arguments).items()}, "results": results},
    )


if __name__ == "__main__":
    main()
