"""What the JSON-Schema-Test-Suite says of schemas as the server reads them, keyword by keyword, as a table.

    python -m tests.integration.json_schema_suite /usr/share/json-schema-test-suite/tests/draft7

The folder is that of one draft; Debian's package ``json-schema-test-suite`` has them. A schema is compiled or
refused. Of one that is compiled, a valid instance is *missed* if the grammar does not accept it as Python
writes it, and an invalid one is *let through* if it does.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from truedraft.engine.sampling.grammar import Grammars
from truedraft.engine.text.schema.cleaning import Cleaner
from truedraft.engine.text.schema.formats import JSON_OPTIONS
from truedraft.engine.text.schema.pattern import read_schema


def accepts(tokenizer: LLTokenizer, grammar: str, instance: Any) -> bool:
    text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    return bool(matcher.consume_tokens(tokenizer.tokenize_str(text))) and matcher.is_accepting()


def judge(tokenizer: LLTokenizer, path: Path) -> tuple[Counter[str], list[str]]:
    """Counts of a keyword's cases, and why schemas are refused."""
    counts: Counter[str] = Counter()
    reasons = []
    for case in json.loads(path.read_text()):
        try:
            schema = read_schema(Cleaner(None).clean(case["schema"], "schema"))
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_OPTIONS)
            Grammars(lambda: tokenizer).matcher(grammar)
        except ValueError as error:
            counts["refused"] += 1
            reasons.append(f"{case['description']}: {str(error).splitlines()[0]}")
            continue
        counts["compiled"] += 1
        for test in case["tests"]:
            kind = "valid" if test["valid"] else "invalid"
            counts[kind] += 1
            if accepts(tokenizer, grammar, test["data"]) != test["valid"]:
                counts["missed" if test["valid"] else "let through"] += 1
    return counts, reasons


def main(folder: Path) -> None:
    tokenizer = LLTokenizer("byte")
    columns = ("compiled", "refused", "valid", "missed", "invalid", "let through")
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    total: Counter[str] = Counter()
    refusals: list[str] = []
    for path in sorted(folder.glob("*.json")):
        counts, reasons = judge(tokenizer, path)
        total += counts
        refusals += [f"{path.stem}: {reason}" for reason in reasons]
        print(f"| {path.stem} | {' | '.join(str(counts[column]) for column in columns)} |")
    print(f"| all | {' | '.join(str(total[column]) for column in columns)} |")
    print("", *refusals, sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
