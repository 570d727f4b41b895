"""Loads without prompts of their own are made of these: openings of children's stories."""

import json
from pathlib import Path

STORY_OPENINGS = [
    "Once upon a time, there was a little girl who lived near the sea.",
    "One morning, Tom found a small blue box under his bed.",
    "The old tortoise walked slowly down to the river.",
    "Sara and her brother wanted to build a kite.",
    "It was raining, and the children had to stay inside.",
    "A farmer had a donkey that did not like to work.",
    "Ben was afraid of the dark, but he did not tell anyone.",
    "In a forest far away, a fox met a hungry lion.",
    "Mother baked a big cake for the whole village.",
    "The smallest bird in the nest could not fly yet.",
    "Every day after school, Amina fed the chickens.",
    "Two friends found a map in an old book.",
    "Grandfather had a secret, and only the cat knew it.",
    "There was a tree with golden leaves on the top of the hill.",
    "Lily lost her red shoe on the way to the market.",
    "The moon looked down and saw a boy who could not sleep.",
]


def read_prompts(path: Path | None) -> list[str]:
    """Reads a prompt per line, plain or JSON with a ``prompt`` or ``text`` key; else uses story openings."""
    if path is None:
        return STORY_OPENINGS
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            line = record.get("prompt") or record["text"]
        if line.strip():
            prompts.append(line)
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts
