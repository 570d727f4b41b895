"""The checker of docstrings, comments and names finds what breaks the rules, and nothing else."""

from pathlib import Path

import pytest

from tools.check_words import Finding, check

FILE = Path("server/x.py")


def complaints(source: str) -> list[str]:
    return [finding.complaint for finding in check(FILE, source)]


@pytest.mark.parametrize(
    "text",
    [
        "Of the whole step.",
        "That it has not finished.",
        "For what they do to the items.",
        "Whether it is drafted.",
        "As zod writes them.",
        "by worker",
        "The status of an answer.",
        "A single character.",
        "The front end's side of one worker: it is kept alive.",
        "Returns the likeliest token.",
        "Stands beside the usage.",
        "Returns the token behind the arguments.",
    ],
)
def test_fragments_and_words_are_found(text: str) -> None:
    assert len(complaints(f'"""{text}"""\n')) == 1
    assert len(complaints(f"x = 1  # {text}\n")) == 1
    assert len(complaints(f"# {text}\n# It goes on.\nx = 1\n")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Returns the needs of the whole step.",
        "A row keeps its place until it ends.",
        "The most likely token of the target wins.",
        "The server cannot start.",
        "No text is held back.",
        "Workers behind this server share its port.",
        "A process that it left behind may hold the file.",
        "The policy behind ``default`` learns from all rows.",
        "Forward passes are timed.",
        "Besides, it is cheap.",
    ],
)
def test_sentences_are_left_alone(text: str) -> None:
    assert complaints(f'"""{text}"""\n') == complaints(f"x = 1  # {text}\n") == []


@pytest.mark.parametrize(
    "source",
    [
        "class Job: ...",
        "def likeliest() -> None: ...",
        "def f(patience: float) -> None: ...",
        "MAX_PATIENCE = 1",
        "class A:\n    def __init__(self) -> None:\n        self.job_id = 1",
        "for gamma in range(3): ...",
    ],
)
def test_names_are_found(source: str) -> None:
    assert len(complaints(source)) == 1


def test_names_of_others_are_left_alone() -> None:
    assert complaints("import signal\nx = flow.jobs.gamma(patience=3)\njobless = 1") == []


@pytest.mark.parametrize("text", ["The same.", "That it has not finished.", "Of the tool.", "The likeliest."])
def test_descriptions_are_read(text: str) -> None:
    assert len(complaints(f'x = Field(None, description="{text}")')) == 1
    assert complaints('x = Field(None, description="Whether to reason, for chat templates.")') == []


def test_errors_are_read() -> None:
    assert len(complaints('raise ValueError(f"a {kind} beside another one")')) == 1
    assert complaints('x = f"a {kind} beside another one"') == []


def test_places_are_named() -> None:
    findings = list(check(FILE, '"""It is."""\n\n\ndef f() -> None:\n    """Of f."""\n'))
    assert [(path, line) for path, line, _ in findings] == [(FILE, 5)]
    assert isinstance(findings[0], Finding)
