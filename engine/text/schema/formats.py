"""Turns what an output must match, in its user's words, into a grammar in llguidance's notation.

The server does this for requests, within limits; ``engine.llm`` for calls of the library.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from llguidance import LLMatcher

from truedraft.engine.text.schema.cleaning import Cleaner
from truedraft.engine.text.schema.demands import Placed
from truedraft.engine.text.schema.notation import Layout, layout_of
from truedraft.engine.text.schema.numbers import read_json
from truedraft.engine.text.schema.pattern import exact_regex
from truedraft.engine.text.schema.place import Place
from truedraft.engine.text.schema.writer import Options, Writer

Format = Literal["json", "regex", "choice", "grammar"]


def grammar_of(kind: Format, source: Any, name: str = "schema") -> str:
    """Returns the grammar; raises ``ValueError`` for parts of ``source`` that cannot be enforced, and for a
    schema ``SchemaError`` with the place in ``name``.

    ``source`` is a JSON schema as an object or written out, a regular expression of the whole text, a list of
    texts, or a grammar in Lark's notation.
    """
    match kind:
        case "json":
            schema = read_json(source) if isinstance(source, str) else source
            return schema_grammar(Placed(Cleaner(None).clean(schema, name), Place(name)))[0]
        case "regex":
            return LLMatcher.grammar_from_regex(exact_regex(source))
        case "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in source)
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case "grammar":
            return LLMatcher.grammar_from_lark(source)


def schema_grammar(placed: Placed, options: Options = Options()) -> tuple[str, Mapping[str, Place]]:  # noqa: B008
    """Returns the grammar of a schema, and what its rules are for. Without spaces and line ends between
    values all of a document's structure is certain."""
    written = Writer(*placed, layout_of(placed.schema, Layout()), "j", options).write()
    return "\n".join(["%llguidance {}", *written.lines, f"start: {written.start}"]), written.places
