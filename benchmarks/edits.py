"""Texts with their edited versions: what predictions and n-grams are good for.

A file has one JSON object a line with ``instruction``, ``input``, ``expected`` and optionally ``prediction``
(default: the input). Without a file, small programs and articles are made up, the same ones every time.
"""

import json
import random
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    """The model reads instruction and input and is to say ``expected``; ``prediction`` is the client's."""

    instruction: str
    input: str
    expected: str
    prediction: str


NAMES = ["count", "total", "result", "value", "item", "limit", "score", "index", "buffer", "offset"]
VERBS = ["update", "check", "merge", "collect", "measure", "select"]
WHO = ["The farmer", "A young girl", "The old captain", "Her brother", "The village", "A small dog"]
DID = ["walked to the river", "found a letter", "built a boat", "lost the key", "met a friend", "sang a song"]
WHEN = ["in the morning", "after the storm", "before the market opened", "on the last day", "at night"]


def read_edits(path: Path | None, limit: int) -> list[Edit]:
    if path is None:
        return [_program(random.Random(number)) for number in range(limit)]
    records = [json.loads(line) for line in path.read_text().splitlines()[:limit]]
    return [
        Edit(
            record["instruction"],
            record["input"],
            record["expected"],
            record.get("prediction", record["input"]),
        )
        for record in records
    ]


def summaries(limit: int) -> list[Edit]:
    """Extracts: every third sentence of a made-up article, some with another time."""
    return [_summary(random.Random(1000 + number)) for number in range(limit)]


def _program(chance: random.Random) -> Edit:
    """A few functions; one name is replaced everywhere and one line is added."""
    lines = []
    names = chance.sample(NAMES, 4)
    for verb in chance.sample(VERBS, 3):
        first, second, third, _ = names
        lines += [
            f"def {verb}_{first}({second}, {third}):",
            f"    {first} = {chance.randint(0, 9)}",
            f"    for entry in {second}:",
            f"        if entry > {third}:",
            f"            {first} = {first} + entry * {chance.randint(2, 9)}",
            f"    return {first}",
            "",
        ]
    text = "\n".join(lines)
    old, new = names[1], names[3]
    edited = text.replace(old, new).split("\n")
    edited.insert(chance.randrange(1, 6), f'    print("{new}", len({new}))')
    return Edit(f"Rename {old} to {new} and print its length.\n", text, "\n".join(edited), text)


def _summary(chance: random.Random) -> Edit:
    sentences = [
        f"{chance.choice(WHO)} {chance.choice(DID)} {chance.choice(WHEN)} and {chance.choice(DID)}."
        for _ in range(24)
    ]
    chosen = [
        sentence.replace("in the morning", "early one morning") if chance.random() < 0.3 else sentence
        for sentence in sentences[::3]
    ]
    article, summary = " ".join(sentences), " ".join(chosen)
    return Edit("Summarise with the article's own sentences.\n", article, summary, article)
