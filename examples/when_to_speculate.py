"""Shows when to speculate: the surer the draft is of its next token, the likelier the target keeps it.

    python examples/when_to_speculate.py [TARGET DRAFT] [--svg FILE]

Texts are drawn from the target. At each of their places both models give a distribution, p and q. A token
drawn from q is kept with probability sum(min(p, q)). The plot has it by the draft's largest probability,
which is known before a token is drawn: a draft that stops where it is unsure wastes less, and changes
nothing of the output.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from truedraft import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The old tortoise", "A fox", "The sea", "One day the king", "In the garden"]
BINS = 10


@torch.no_grad()
def confidence_and_acceptance(
    target: str, draft: str, texts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the draft's largest probability and the chance to be kept at each place of the texts."""
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (target, draft)
    ]
    largest, kept = [], []
    for token_ids in texts:
        p, q = (model(torch.tensor([token_ids])).logits[0].softmax(-1) for model in models)
        largest.append(q.amax(-1))
        kept.append(torch.minimum(p, q).sum(-1))
    return torch.cat(largest), torch.cat(kept)


def svg(rows: list[tuple[float, float, int]], threshold: float) -> str:
    """Draws the bars of acceptance, and a line where a drafted token begins to pay."""
    bars = "".join(
        f'<rect x="{50 + 50 * number}" y="{260 - 240 * kept:.0f}" width="44" height="{240 * kept:.0f}" '
        f'fill="{"#2a7" if kept > threshold else "#c55"}"><title>{kept:.0%} of {count}</title></rect>'
        for number, (_, kept, count) in enumerate(rows)
    )
    labels = "".join(
        f'<text x="{50 + 50 * number}" y="278">{number / BINS:.1f}</text>' for number in range(len(rows) + 1)
    )
    height = 260 - 240 * threshold
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 310" font-size="12">'
        f'<rect width="600" height="310" fill="white"/>{bars}{labels}'
        f'<path d="M40 {height:.0f}H560" stroke="black" stroke-dasharray="4"/>'
        f'<text x="44" y="{height - 5:.0f}">a drafted token costs this share of a plain one</text>'
        '<text x="200" y="300">largest probability of the draft</text>'
        '<text x="15" y="200" transform="rotate(-90 15 200)">chance to be kept</text></svg>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="TARGET DRAFT", help="default: the bundled pair")
    parser.add_argument("--tokens", type=int, default=120, help="of each text")
    parser.add_argument("--svg", type=Path, help="also draw the plot into this file")
    args = parser.parse_args()
    logging.disable_progress_bar()
    llm = LLM(*args.models[:1], draft=args.models[1] if args.models else None)
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    completions = llm.generate(prompts, SamplingParams(max_tokens=args.tokens, seed=1))
    texts = [prompt + completion.token_ids for prompt, completion in zip(prompts, completions, strict=True)]
    largest, kept = confidence_and_acceptance(str(llm.config.target), str(llm.config.draft), texts)
    costs = llm.speculation()["costs"]
    # What a drafted token costs: a pass of the draft, and what the target takes longer for one token more.
    scored = costs["score_ms_by_tokens"]
    threshold = min(
        1.0, (costs["draft_ms_by_tokens"]["draft_model"]["1"] + (scored["5"] - scored["1"]) / 4) / scored["1"]
    )

    print("largest probability   chance that the target keeps a token")
    rows = []
    for number in range(BINS):
        inside = (largest >= number / BINS) & (largest <= (number + 1) / BINS)
        count = int(inside.sum())
        mean = float(kept[inside].mean()) if count else 0.0
        rows.append((number / BINS, mean, count))
        bar = "#" * round(40 * mean)
        print(f"{number / BINS:.1f} to {(number + 1) / BINS:.1f} {mean:>13.0%}  {bar} ({count} places)")
    print(
        f"\nAll places: {float(kept.mean()):.0%} kept. A drafted token costs {threshold:.2f} of a plain one"
    )
    print("on this machine: where the chance is below that, it is better not to draft.")
    if args.svg:
        args.svg.write_text(svg(rows, threshold), encoding="utf-8")
        print(f"The plot is in {args.svg}.")


if __name__ == "__main__":
    main()
