"""Shows every round of greedy speculative sampling with T5, and that the engine's answer is the same.

    python examples/translation_loop.py google/flan-t5-xl google/flan-t5-large \\
        --prompt "Translate to German: Battle not with monsters, lest ye become a monster."

The loop has no cache and no batch: the draft model writes K tokens, the target model gives its own choice
after each of them, and the text goes on with the choices up to the first that differs. It also takes
decoder-only models; without arguments it continues a story with the bundled pair.
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.utils import logging

from truedraft import LLM, SamplingParams


class Chooser:
    """Gives a model's most likely token after each token of a text; ``prompt`` is what an encoder reads."""

    def __init__(self, path: str, prompt: list[int]) -> None:
        self.is_encoder_decoder = AutoConfig.from_pretrained(path).is_encoder_decoder
        kind = AutoModelForSeq2SeqLM if self.is_encoder_decoder else AutoModelForCausalLM
        self.model = kind.from_pretrained(path, dtype=torch.float32).eval()
        self.prompt = torch.tensor([prompt])

    @torch.no_grad()
    def __call__(self, token_ids: list[int]) -> list[int]:
        ids = torch.tensor([token_ids])
        inputs = (
            {"input_ids": self.prompt, "decoder_input_ids": ids}
            if self.is_encoder_decoder
            else {"input_ids": ids}
        )
        return [int(token_id) for token_id in self.model(**inputs).logits[0].argmax(-1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="TARGET DRAFT", help="default: the bundled pair")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--drafted", type=int, default=5)
    args = parser.parse_args()
    logging.disable_progress_bar()
    engine = LLM(*args.models[:1], draft=args.models[1] if args.models else None)
    prompt = engine.tokenizer.encode(args.prompt)
    target, draft = (Chooser(str(path), prompt) for path in (engine.config.target, engine.config.draft))
    start = [target.model.config.decoder_start_token_id] if target.is_encoder_decoder else prompt
    ends = target.model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}

    text, num_rounds = list(start), 0
    while len(text) < len(start) + args.tokens and not ends & set(text[len(start) :]):
        num_rounds += 1
        drafted: list[int] = []
        for _ in range(min(args.drafted, len(start) + args.tokens - len(text) - 1)):
            drafted.append(draft(text + drafted)[-1])
        choices = target(text + drafted)[len(text) - 1 :]  # after the text, and after each drafted token
        kept = 0
        while kept < len(drafted) and drafted[kept] == choices[kept]:
            kept += 1
        gained = choices[: kept + 1]
        for place, token_id in enumerate(gained):
            if token_id in ends:
                gained = gained[: place + 1]
                break
        text += gained
        print(f"========== round {num_rounds} ==========")
        print(f"draft tokens:   {drafted}\ndraft text:     {engine.decode(drafted)!r}")
        print(f"target tokens:  {choices}\ntarget text:    {engine.decode(choices)!r}")
        print(
            f"validated text: {engine.decode(text[len(start) :])!r}\ngained:         {len(gained)} tokens\n"
        )

    output = text[len(start) :]
    params = SamplingParams(
        max_tokens=args.tokens, temperature=0, method="draft_model", num_speculative_tokens=args.drafted
    )
    (answer,) = engine.generate(args.prompt, params)
    print(f"the loop:   {engine.decode(output)!r} in {num_rounds} passes of the target")
    print(f"the engine: {answer.text!r} in {answer.num_rounds}")
    print(f"the same tokens: {'yes' if answer.token_ids == output else 'NO'}")


if __name__ == "__main__":
    main()
