"""What the JSON-Schema-Test-Suite says of schemas as the server reads them, keyword by keyword, as a table.

    python -m tests.integration.json_schema_suite json/tests/draft2020-12 [--tools]

The folder is that of one draft, optional tests and formats included. The source distribution of the Python
package ``jsonschema`` has it. A schema is written or refused. Of one that is written, a test has *passed* if
the grammar says of its instance what the suite says. A valid instance that the grammar does not write is
*narrowed*; an invalid one that it writes is *wrong*. With ``--tools`` each schema is that of a parameter of a
tool that is not strict, which is never refused: an invalid instance is wrong unless something was reported.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from truedraft.engine.sampling.grammar_compiler import compile_grammar
from truedraft.engine.text.schema.formats import grammar_of
from truedraft.engine.text.schema.numbers import WrittenFloat, read_json
from truedraft.server.leniency import Leniency
from truedraft.server.schemas.tools import FunctionDefinition
from truedraft.server.text.families import CALL_FORMATS
from truedraft.server.text.grammar.tool_calls import call_grammar
from truedraft.server.text.grammar.tool_schemas import ANY_OBJECT, cleaned, placed

COLUMNS = ("written", "refused", "passed", "narrowed", "wrong", "reported")
HERMES = next(form for form in CALL_FORMATS if form.name == "hermes")


def text_of(value: Any, comma: str = ",", colon: str = ":") -> str:
    """Returns JSON as a grammar writes it, each number with its own text."""
    if isinstance(value, list):
        return f"[{comma.join(text_of(each, comma, colon) for each in value)}]"
    if isinstance(value, dict):
        pairs = (
            f"{json.dumps(k, ensure_ascii=False)}{colon}{text_of(v, comma, colon)}" for k, v in value.items()
        )
        return f"{{{comma.join(pairs)}}}"
    return value.text if isinstance(value, WrittenFloat) else json.dumps(value, ensure_ascii=False)


class Plain:
    """It takes a schema as that of a response format."""

    def read(self, tokenizer: LLTokenizer, schema: Any) -> tuple[LLMatcher, bool]:
        return compile_grammar(tokenizer, grammar_of("json", schema)), False

    def text(self, value: Any) -> str:
        return text_of(value)


class Tool:
    """It takes a schema as that of a tool's parameter."""

    def read(self, tokenizer: LLTokenizer, schema: Any) -> tuple[LLMatcher, bool]:
        parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
        if isinstance(schema, dict):
            parameters |= {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        leniency = Leniency(strict=False)
        definition = FunctionDefinition(name="f", parameters=parameters)
        try:
            function = cleaned(definition, "p", HERMES, leniency)
            grammar = call_grammar(
                [placed(function, "p", leniency)], HERMES, {}, required=True, parallel=False
            )
            matcher = compile_grammar(tokenizer, str(grammar))
        except ValueError:
            leniency.ignore("p")
            whole = definition.model_copy(update={"parameters": ANY_OBJECT})
            grammar = call_grammar([placed(whole, "p", leniency)], HERMES, {}, required=True, parallel=False)
            matcher = compile_grammar(tokenizer, str(grammar))
        return matcher, bool(leniency.headers())

    def text(self, value: Any) -> str:
        written = text_of({"v": value}, ", ", ": ")
        before = HERMES.trigger + HERMES.first.removeprefix(HERMES.trigger)
        return f"{before}f{HERMES.before_arguments}{written}{HERMES.end}{HERMES.last}"


def judge(tokenizer: LLTokenizer, path: Path, way: Plain | Tool) -> tuple[Counter[str], list[str]]:
    """Counts of a keyword's cases, and what is refused, narrowed or wrong."""
    counts: Counter[str] = Counter()
    notes = []
    for case in read_json(path.read_text()):
        try:
            matcher, is_reported = way.read(tokenizer, case["schema"])
        except ValueError as error:
            counts["refused"] += 1
            notes.append(f"refused: {case['description']}: {str(error).splitlines()[0][:150]}")
            continue
        counts["written"] += 1
        for test in case["tests"]:
            ids = [*way.text(test["data"]).encode(errors="surrogatepass")]
            trial = matcher.deep_copy()
            is_written = trial.try_consume_tokens(ids) == len(ids) and trial.is_accepting()
            kind = "passed"
            if is_written != test["valid"]:
                kind = "narrowed" if test["valid"] else "reported" if is_reported else "wrong"
                if kind != "reported":
                    notes.append(f"{kind}: {case['description']}: {test['description']}")
            counts[kind] += 1
    return counts, notes


def main(folder: Path, way: Plain | Tool, say: Callable[[str], None] = print) -> Counter[str]:
    tokenizer = LLTokenizer("byte")
    say(f"| tests of | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    total: Counter[str] = Counter()
    remarks: list[str] = []
    for path in sorted(folder.rglob("*.json")):
        counts, notes = judge(tokenizer, path, way)
        total += counts
        name = path.relative_to(folder).with_suffix("")
        remarks += [f"{name}: {note}" for note in notes]
        say(f"| {name} | {' | '.join(str(counts[column]) for column in COLUMNS)} |")
    say(f"| all | {' | '.join(str(total[column]) for column in COLUMNS)} |")
    say("\n".join(["", *remarks]))
    return total


if __name__ == "__main__":
    main(Path(sys.argv[1]), Tool() if "--tools" in sys.argv else Plain())
