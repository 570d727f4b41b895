"""Measures what a grammar costs with a model, and whether drafts change constrained text, for ``check``."""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher

from truedraft.engine.commands.check_exactness import GreedyResult, Resolution, check_greedy
from truedraft.engine.core.admission import RequestError
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.messages import Generate, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["name", "kind", "tags", "age"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), defaults={"whitespace_flexible": False})


@dataclass(frozen=True)
class GrammarResult:
    """Holds the findings. ``mask_microseconds`` are the median and the maximum of one token's mask;
    ``reason`` says why there are no findings."""

    greedy: GreedyResult
    mask_microseconds: tuple[float, float]
    reason: str = ""

    @property
    def failure(self) -> str:
        return self.greedy.failure

    @property
    def in_words(self) -> str:
        median, most = self.mask_microseconds
        return self.reason or f"{self.greedy.in_words}; a mask in {median:.0f} µs, {most:.0f} µs at most"


def check_grammar(
    core: EngineCore,
    prompts: list[list[int]],
    lengths: Sequence[int],
    max_tokens: int,
    resolution: Resolution,
) -> GrammarResult:
    """Compares greedy JSON of a schema, with forced and looked-up tokens drafted, with JSON without
    drafts."""
    params = SamplingParams(max_tokens=max_tokens, grammar=GRAMMAR)
    try:
        core.admission.sequences(Generate("", prompts[0], params))
    except RequestError as error:
        return GrammarResult(GreedyResult(), (0.0, 0.0), str(error))
    greedy = check_greedy(core, prompts, lengths, max_tokens, resolution, GRAMMAR)
    assert core.admission.grammars is not None
    matcher = core.admission.grammars.matcher(GRAMMAR)
    # These texts are walked token by token, and each mask is timed.
    ids = core.admission.grammars.tokenizer.tokenize_str('{"name":"Rex","kind":"dog","tags":["big"],"age":3')
    seconds = []
    for token_id in ids:
        start = time.perf_counter()
        matcher.masks([])
        seconds.append(time.perf_counter() - start)
        matcher.advance([token_id])
    return GrammarResult(greedy, (1e6 * statistics.median(seconds), 1e6 * max(seconds)))
