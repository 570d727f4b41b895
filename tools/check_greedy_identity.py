"""Greedy text of the engine against transformers' ``generate`` on the same weights, at length.

    python tools/check_greedy_identity.py [--target FOLDER --draft FOLDER] [--prompts 50] [--tokens 128]

Every prompt, for 0 to 8 speculative tokens and 1, 3 and 8 sequences in flight, which join and leave at
different times. Exit code 1 if one token differs. The default is the bundled pair.
"""

import argparse
import sys

import torch
from story_prompts import story_prompts
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from truedraft.engine.core.engine import EngineCore
from truedraft.engine.llm import LLM
from truedraft.engine.messages import Generate, SamplingParams


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128)
    return parser.parse_args()


def expected_outputs(folder: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in tqdm(prompts, desc="transformers generate"):
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


def engine_outputs(
    core: EngineCore, prompts: list[list[int]], params: SamplingParams, in_flight: int
) -> tuple[list[list[int]], int, int]:
    """Outputs, drafted and accepted tokens; a new request joins every fifth step while there is room."""
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))
    num_drafted = num_accepted = num_steps = 0
    while waiting or core.has_work:
        if waiting and len(core.scheduler.running) < in_flight and (num_steps % 5 == 0 or not core.has_work):
            index, prompt = waiting.pop(0)
            core.add(Generate(request_id=str(index), prompt_token_ids=prompt, params=params))
        for output in core.step():
            outputs[int(output.request_id)] += output.token_ids
            num_drafted += output.num_draft_tokens
            num_accepted += output.num_accepted_tokens
        num_steps += 1
    return outputs, num_drafted, num_accepted


def main() -> int:
    args = parse_arguments()
    logging.disable_progress_bar()
    llm = LLM(target=args.target, draft=args.draft, device="cpu", dtype="float32", num_speculative_tokens=8)
    prompts = [llm.tokenizer.encode(prompt) for prompt in story_prompts()[: args.prompts]]
    expected = expected_outputs(str(llm.config.target), prompts, args.tokens)
    num_tokens = sum(map(len, expected))
    failed = False
    for in_flight in (1, 3, 8):
        for k in range(9):
            params = SamplingParams(max_tokens=args.tokens, temperature=0, num_speculative_tokens=k)
            outputs, num_drafted, num_accepted = engine_outputs(llm.core, prompts, params, in_flight)
            num_wrong = sum(got != want for got, want in zip(outputs, expected, strict=True))
            failed |= num_wrong > 0
            print(
                f"in flight {in_flight}, {k} speculative tokens: {len(prompts) - num_wrong} of {len(prompts)}"
                f" texts identical, {num_accepted} of {num_drafted} drafted tokens accepted",
                flush=True,
            )
    print(f"{len(prompts)} prompts, {num_tokens} tokens each time: {'DIFFERENT' if failed else 'identical'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
