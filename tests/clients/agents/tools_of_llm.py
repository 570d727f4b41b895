"""The tool of ``llm --functions``."""


def add(a: int) -> str:
    """Adds."""
    return f"truedraft-{a + 41}"
