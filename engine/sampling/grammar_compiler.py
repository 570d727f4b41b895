"""Compiles a grammar's text to llguidance's parser, within limits. The front end tries it, the worker uses
it.
"""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from truedraft.engine.machine.deep_stack import on_deep_stack

# The parser gives up beyond them, while it compiles or later. They bound its memory and its steps, but not
# the time of a step, which grows without bound where many expressions have to match at once.
# Errors are for clients and must not repeat the grammar.
LIMITS = LLParserLimits(
    max_grammar_size=100_000, max_lexer_states=50_000, initial_lexer_fuel=100_000, verbose_errors=False
)


class GrammarError(ValueError):
    """The grammar cannot be compiled, or allows no output."""


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Returns a parser at its start; raises ``GrammarError`` if nothing matches the grammar."""
    parser = on_deep_stack(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS))
    if not parser.is_error():
        parser.compute_bitmask()  # This finds out whether anything is allowed.
        if "NoExtension" in parser.get_error():
            raise GrammarError("no text of this model's tokens matches it")
    if parser.is_error():
        raise GrammarError(error_of(parser))
    return parser


def error_of(parser: LLMatcher) -> str:
    """Returns the parser's error without the parts for its own developers."""
    return str(parser.get_error()).partition("<backtrace>")[0].removesuffix("<non-verbose/>").strip()
