"""Shows a speculative decoder of one's own: a drafter and a scorer, each with a key-value cache.

    python examples/drafter_and_scorer.py [TARGET DRAFT]

``decode`` runs one round. How the drafter draws and how the target verifies can be paired freely. Three
cases for the caches follow from a round: nothing kept, something kept, everything kept. ``crop`` covers
all three: the cache is cut to the tokens that stand, and the next pass is given whatever it lacks. At the
end the text is compared with the engine's own.
"""

import argparse
from typing import Literal, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.utils import logging

from truedraft import LLM, SamplingParams

Strategy = Literal["greedy", "sample"]
Verification = Literal["greedy_match", "speculative_sampling"]


class CachedModel:
    """A model with the cache of one sequence: the drafter is one, and so is the scorer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.cache = model, DynamicCache()

    @torch.no_grad()
    def probs(self, token_ids: list[int], count: int) -> torch.Tensor:
        """Returns the distributions after the last ``count`` tokens: [count, vocabulary]."""
        known = min(self.cache.get_seq_length(), len(token_ids) - count)
        self.crop(known)  # the pass has to give something for each of the last tokens
        logits = self.model(torch.tensor([token_ids[known:]]), past_key_values=self.cache).logits[0]
        return logits[-count:].softmax(-1)

    def crop(self, length: int) -> None:
        if length < self.cache.get_seq_length():
            self.cache.crop(length - self.cache.get_seq_length())  # negative: tokens to leave out


class Round(NamedTuple):
    token_ids: list[int]
    num_accepted_tokens: int


class SpeculativeDecoder:
    def __init__(self, drafter: CachedModel, scorer: CachedModel) -> None:
        self.drafter, self.scorer = drafter, scorer

    def decode(
        self, token_ids: list[int], num_draft_tokens: int, draw: Strategy, verify: Verification
    ) -> Round:
        drafted: list[int] = []
        draft_probs = []
        for _ in range(num_draft_tokens):
            probs = self.drafter.probs(token_ids + drafted, 1)[0]
            if draw == "greedy":  # the draft's distribution is then a single token
                probs = torch.nn.functional.one_hot(probs.argmax(), len(probs)).float()
            draft_probs.append(probs)
            drafted.append(int(probs.multinomial(1)))
        target_probs = self.scorer.probs(token_ids + drafted, len(drafted) + 1)
        kept = 0
        for token, p, q in zip(drafted, target_probs, draft_probs, strict=False):
            is_kept = (
                int(p.argmax()) == token if verify == "greedy_match" else torch.rand(()) < p[token] / q[token]
            )
            if not is_kept:
                break
            kept += 1
        rest = target_probs[kept]
        if verify == "greedy_match":
            last = int(rest.argmax())
        else:
            rest = rest if kept == len(drafted) else (rest - draft_probs[kept]).clamp(min=0)
            last = int(rest.multinomial(1))
        self.drafter.crop(len(token_ids) + kept)
        self.scorer.crop(len(token_ids) + kept)
        return Round([*drafted[:kept], last], kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="TARGET DRAFT", help="default: the bundled pair")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--drafted", type=int, default=4)
    args = parser.parse_args()
    logging.disable_progress_bar()
    engine = LLM(*args.models[:1], draft=args.models[1] if args.models else None)
    paths = str(engine.config.target), str(engine.config.draft)
    tokenizer = AutoTokenizer.from_pretrained(paths[0])
    target, draft = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in paths)
    torch.manual_seed(0)
    prompt = tokenizer.encode(args.prompt)
    pairs: list[tuple[Strategy, Verification]] = [
        ("greedy", "greedy_match"),
        ("sample", "greedy_match"),
        ("sample", "speculative_sampling"),
        ("greedy", "speculative_sampling"),
    ]
    for draw, verify in pairs:
        decoder = SpeculativeDecoder(CachedModel(draft), CachedModel(target))
        token_ids, rounds, accepted = list(prompt), 0, 0
        while len(token_ids) < len(prompt) + args.tokens:
            room = len(prompt) + args.tokens - len(token_ids)
            step = decoder.decode(token_ids, min(args.drafted, room - 1), draw, verify)
            token_ids += step.token_ids
            rounds, accepted = rounds + 1, accepted + step.num_accepted_tokens
        print(f"draft {draw}, {verify}: {args.tokens} tokens in {rounds} rounds, {accepted} of them drafted")
        if verify == "greedy_match":
            params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
            same = engine.generate(args.prompt, params)[0].token_ids == token_ids[len(prompt) :]
            print(f"  the same tokens as the engine's: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
