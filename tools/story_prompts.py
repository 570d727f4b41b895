"""Fifty story openings for checks and measurements: five beginnings for each of ten heroes."""

HEROES = [
    "a little girl named Lily",
    "a boy named Tim",
    "a small brown dog",
    "an old elephant",
    "two best friends",
    "a clever fox",
    "a tiny bird",
    "a kind teacher",
    "a red truck",
    "a brave mouse",
]
BEGINNINGS = [
    "Once upon a time, there was {}.",
    "One sunny day, {} went to the park.",
    "In a big forest lived {}.",
    "There once was {} who wanted to learn how to swim.",
    "It was raining, and {} had nothing to do.",
]  # fmt: skip


def story_prompts() -> list[str]:
    return [beginning.format(hero) for beginning in BEGINNINGS for hero in HEROES]
