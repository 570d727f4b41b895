"""Measure the trained pair with the engine and write its model card.

    python tools/write_model_card.py --pair engine/demo_pair --log runs/demo/log.jsonl

Acceptance is measured on the fifty openings of ``story_prompts``, plain rejection rule, at temperature 0
and 1; the samples are the first ones drawn, unedited.
"""

import argparse
import json
import time
from pathlib import Path

from story_prompts import story_prompts
from transformers.utils import logging

from truedraft.engine.llm import LLM, Completion
from truedraft.engine.messages import SamplingParams

NUM_SPECULATIVE_TOKENS = 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True, help="log.jsonl of train_demo_pair.py")
    return parser.parse_args()


def last_rows(log: Path) -> dict[str, dict[str, float]]:
    """Returns the final measurement of each model."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return {row["model"]: row for row in rows}


def acceptance(llm: LLM, temperature: float) -> list[Completion]:
    params = SamplingParams(max_tokens=128, temperature=temperature, verification="rejection")
    return llm.generate(story_prompts(), params)


def forward_ratio(llm: LLM) -> float:
    """Seconds per plain token of the draft over the target's, each decoding alone."""
    seconds = {}
    for name in ("target", "draft"):
        model = LLM(target=str(Path(str(llm.config.target)).parent / name), draft="none", num_threads=1)
        params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
        model.generate(["Once"], params)
        times = []
        for _ in range(5):
            started = time.perf_counter()
            model.generate(["Once"], params)
            times.append(time.perf_counter() - started)
        seconds[name] = sorted(times)[2]
    return seconds["draft"] / seconds["target"]


def describe(name: str, completions: list[Completion]) -> str:
    drafted = sum(c.num_draft_tokens for c in completions)
    accepted = sum(c.num_accepted_tokens for c in completions)
    tokens, rounds = sum(len(c.token_ids) for c in completions), sum(c.num_rounds for c in completions)
    return f"| {name} | {accepted / drafted:.3f} ({accepted} of {drafted}) | {tokens / rounds:.2f} |"


def parameters(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    per_layer = 4 * hidden * hidden + 3 * hidden * mlp + 2 * hidden
    return int(config["num_hidden_layers"] * per_layer + config["vocab_size"] * hidden + hidden)


def main() -> None:
    args = parse_arguments()
    logging.disable_progress_bar()
    rows = last_rows(args.log)
    llm = LLM(
        target=str(args.pair / "target"),
        draft=str(args.pair / "draft"),
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
        method="draft_model",
    )
    greedy, sampled = acceptance(llm, 0.0), acceptance(llm, 1.0)
    params = [SamplingParams(max_tokens=200, temperature=0.7, seed=seed) for seed in range(10)]
    samples = llm.generate(story_prompts()[:10], params)
    ratio = forward_ratio(llm)
    target, draft = rows["target"], rows["draft"]
    lines = [
        "# The bundled demo pair",
        "",
        "Two small Llama-shaped models that tell simple stories in English: enough to try the server on a",
        "laptop without a download. They know nothing else and are no assistants.",
        "",
        "| | target | draft |",
        "|---|---|---|",
        f"| parameters | {parameters(args.pair / 'target'):,} | {parameters(args.pair / 'draft'):,} |",
        f"| training tokens | {target['tokens']:,} | {draft['tokens']:,} (distilled from the target) |",
        f"| training minutes, two busy CPU cores | {target['minutes']:.0f} | {draft['minutes']:.0f} |",
        "| validation loss, nats per token "
        f"| {target['validation_loss']:.3f} | {draft['validation_loss']:.3f} |",
        f"| mean overlap with the target, 1 - TV | | {draft['overlap']:.3f} |",
        f"| seconds per plain token, draft / target | | {ratio:.3f} |",
        "",
        "Trained by `tools/train_demo_pair.py`, with the arguments in `arguments.json`. The draft starts as",
        "the target's first layer and had a run of its own (`draft_arguments.json`), on the corpus and on",
        "9,216 stories by the target (`tools/sample_stories.py`). Byte-level BPE of 2,048 tokens with",
        "`<|endoftext|>`, `<|im_start|>`, `<|im_end|>`; weights in float16 on disk. This card:",
        "`tools/write_model_card.py`.",
        "",
        f"Acceptance, {NUM_SPECULATIVE_TOKENS} speculative tokens, rejection rule, 50 story openings, "
        "128 tokens each:",
        "",
        "| | acceptance rate | tokens per round |",
        "|---|---|---|",
        describe("temperature 0", greedy),
        describe("temperature 1", sampled),
        "",
        "## Data",
        "",
        "10,010 simple English stories (264 more for validation): excerpts of TinyStories V1",
        "(CDLA-Sharing-1.0), African Storybook and Pratham Books (CC-BY 4.0, credits in `ATTRIBUTION.tsv`),",
        "TinyFabulist (MIT). Part of them was wrapped as chat turns. See also `NOTICE`.",
        "",
        "## Ten samples, unedited",
        "",
        "Temperature 0.7, seeds 0 to 9, at most 200 tokens; the opening is in italics.",
    ]
    for prompt, sample in zip(story_prompts(), samples, strict=False):
        lines += ["", f"> *{prompt}*" + sample.text.rstrip().replace("\n", "\n> ")]
    (args.pair / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
