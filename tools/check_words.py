"""Finds docstrings, comments, descriptions and names that break the rules of wording in CONTRIBUTING.md.

Every docstring and comment is a sentence with a subject and an early verb. A program cannot judge all of
that, so it reports what is certain: openings that only fragments have, noun phrases without a verb, and words
for which the project has another one. ``make check`` runs it.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = ("truedraft", "server", "engine", "loadtest", "tools", "benchmarks", "tests")

# Words that open a fragment: "Of the whole step.", "That it has not finished.", "For logs only."
OPENINGS = {"Of", "That", "As", "For", "Those", "Whether", "How", "By", "Until", "And", "But", "Or", "Also"}
OPENINGS |= {"Among", "Beside"}

# Descriptions in help and the OpenAPI document may be noun phrases or begin with "Whether". These openings
# leave out what is described.
EMPTY_OPENINGS = ("Of ", "That ", "Those ", "As ", "By ", "The same")

# Words that open a noun phrase, which has to reach its verb soon: within five words by the rule, and within
# eight for this program, so that it only reports what nobody can doubt.
DETERMINERS = {"The", "A", "An", "Its", "Their", "Our", "All", "Each", "Every", "Both", "Some", "Any", "No"}
DETERMINERS |= {"One", "Two", "Three"}
NUM_WORDS = 8

# Verbs that a word's ending does not show.
IRREGULAR = """
    am are be been can cannot could did do does had has have is may might must shall should was were will
    would became began broke brought built came chose cut drew fell felt found gave goes got grew held
    hit kept knew led left let lost made meant met put ran read said sat saw sent set shut spent stood
    stuck took taught thought told went won wrote
"""
VERBS = frozenset(IRREGULAR.split())

# Words that end like a verb and are none.
NO_VERBS = {"this", "thus", "his", "its", "less", "unless", "always", "besides", "across"}
NO_VERBS |= {"address", "process", "status"}

SERVERS = "(?:prox|server|link)"

# Pattern in prose -> what to write instead.
WORDS = {
    r"\blikeliest\b": "most likely",
    r"\bbeside\b": "in addition to, next to, outside",
    r"\bbehind (?:a|all|another|both|each|it|its|the|them|these|this|which)\b"
    rf"(?! (?:\w+ )?{SERVERS})": "after",
    r"\bspeculators?\b": "proposer",
    r"\bcandidate generators?\b": "proposer",
    r"\bhit rate\b": "acceptance rate",
    r"\bin force\b": "active",
    r"\bwhole rounds?\b": "multi-round step",
    r"\bin the mean\b": "on average",
    r"\brewinds?\b": "truncate",
    r"\bpatience\b": "timeout",
}

# The same for the words that names of variables, functions and classes are made of.
NAMES = {
    "likeliest": "most_likely",
    "speculator": "proposer",
    "gamma": "num_speculative_tokens",
    "rewind": "truncate",
    "crop": "truncate",
    "patience": "timeout",
    "mood": "machine noise",
    "job": "request",
}


class Finding(NamedTuple):
    path: Path
    line: int
    complaint: str


def main() -> int:
    files = [path.relative_to(ROOT) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    findings = [
        finding for path in files for finding in check(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    for path, line, complaint in findings:
        print(f"{path}:{line}: {complaint}")
    if findings:
        print(f"{len(findings)} findings; CONTRIBUTING.md says how docstrings and comments are written.")
    return 1 if findings else 0


def check(path: Path, source: str) -> Iterator[Finding]:
    tree = ast.parse(source)
    for line, text in docstrings(tree):
        yield from (Finding(path, line, complaint) for complaint in faults_of(text))
    for line, text in comments(source):
        yield from (Finding(path, line, complaint) for complaint in faults_of(text))
    for line, text in descriptions(tree):
        if text.startswith(EMPTY_OPENINGS):
            yield Finding(path, line, f"'{shortened(text)}' leaves out what it describes")
        yield from (Finding(path, line, complaint) for complaint in wrong_words(text))
    for line, text in errors(tree):
        yield from (Finding(path, line, complaint) for complaint in wrong_words(text))
    for line, name in names(tree):
        for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name):
            if (better := NAMES.get(word.lower())) is not None:
                yield Finding(path, line, f"the name '{name}': say '{better}'")


def faults_of(text: str) -> Iterator[str]:
    """Yields what is wrong with a docstring or a comment."""
    first, *_ = re.split(r"[.:;]\s", text, maxsplit=1)
    words = re.findall(r"[\w'`.-]+", first)
    if words and words[0].capitalize() in OPENINGS:
        yield f"'{shortened(text)}' opens with '{words[0]}': begin with a subject and its verb"
    elif words and words[0] in DETERMINERS and not any(map(may_be_verb, words[1:NUM_WORDS])):
        yield f"'{shortened(text)}' has no verb among its first words"
    yield from wrong_words(text)


def wrong_words(text: str) -> Iterator[str]:
    for pattern, better in WORDS.items():
        if (found := re.search(pattern, text, re.IGNORECASE)) is not None:
            yield f"'{found[0]}' in '{shortened(text[max(0, found.start() - 20) :])}': say '{better}'"


def may_be_verb(word: str) -> bool:
    """Judges by the ending, so that a plural may pass for a verb, and never the other way round."""
    plain = word.strip(".,`'").lower()
    looks_like_one = plain.endswith(("s", "ed")) and not plain.endswith(("'s", "ss", "ous"))
    return plain in VERBS or (looks_like_one and plain not in NO_VERBS)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields each comment with its line; lines below each other are one comment."""
    first = last = 0
    text = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        is_alone = token.line.lstrip().startswith("#")
        if text and is_alone and line == last + 1:
            text += " " + token.string.lstrip("# ")
        else:
            if text:
                yield first, text
            first, text = line, token.string.lstrip("# ")
        last = line if is_alone else 0
    if text:
        yield first, text


def descriptions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the texts that users read in help and in the OpenAPI document."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword("description" | "summary" | "help", ast.Constant(str(text)) as constant):
                yield constant.lineno, text


def errors(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the texts of exceptions, or their parts between values."""
    for statement in ast.walk(tree):
        for node in ast.walk(statement) if isinstance(statement, ast.Raise) else ():
            match node:
                case ast.Constant(str(text)):
                    yield node.lineno, text


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the names that are given here: of functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


if __name__ == "__main__":
    sys.exit(main())
