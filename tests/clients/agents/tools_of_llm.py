"""This tool is given to ``llm --functions``."""


def add(a: int) -> str:
    """Adds."""
    return f"truedraft-{a + 41}"
