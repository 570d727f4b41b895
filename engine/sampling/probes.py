"""Has the parameters with which draws and verdicts in C and in Triton are compared with torch's at load."""

from typing import Any, Literal, NamedTuple

from truedraft.engine.messages import SamplingParams
from truedraft.engine.parameters import CUTS, FILLING, PENALTIES
from truedraft.engine.rows.columns import Rule

# The rows use no cut, each cut alone, all of them together, and every adjustment.
_EXAMPLES = {row.name: row.example for row in FILLING}
_CUTS = [{name: _EXAMPLES[name]} for name in CUTS]
PARAMS = [
    SamplingParams(max_tokens=1, **params)  # type: ignore[arg-type]
    for params in (
        {},
        *_CUTS,
        {"temperature": _EXAMPLES["temperature"]},
        {name: _EXAMPLES[name] for name in ("temperature", *CUTS)},
    )
]
PARAMS.append(
    SamplingParams(
        max_tokens=9,
        logit_bias={7: 2.0, 8: -100.0},
        min_tokens=3,
        **{name: _EXAMPLES[name] for name in PENALTIES},  # type: ignore[arg-type]
    )
)


class Check(NamedTuple):
    """Describes a row of the comparison on a device: its way of drawing, and its kind of logits."""

    rule: Rule
    params: SamplingParams
    logits: Literal["any", "equal", "with ties", "one", "few", "NaN", "none"] = "any"
    seed: int = 0


def _check(rule: Rule, logits: Any = "any", **params: float) -> Check:
    return Check(rule, SamplingParams(max_tokens=1, **params), logits)  # type: ignore[arg-type]


_CHECKS = (
    _check(Rule.EXACT_MATCH, "equal"),
    _check(Rule.EXACT_MATCH, "NaN"),
    _check(Rule.REJECTION, "with ties", temperature=0.6, top_k=5),
    _check(Rule.COUPLED, "with ties", temperature=1.7, top_k=9, top_p=0.7),
    _check(Rule.BLOCK, top_p=0.9),
    _check(Rule.REJECTION, "equal", top_p=0.5),
    _check(Rule.COUPLED, min_p=0.1),
    _check(Rule.BLOCK, "none"),
    _check(Rule.REJECTION, temperature=2.5, top_k=12, top_p=0.6),
    _check(Rule.BLOCK, "with ties", temperature=1.2, top_k=4),
    _check(Rule.COUPLED, "one", temperature=1e-30, top_p=0.95),
    _check(Rule.REJECTION, "few", temperature=3.0, top_k=20, top_p=0.99),
    *[_check(rule, "few", temperature=3.0) for rule in (Rule.BLOCK, Rule.REJECTION) * 3],
    _check(Rule.REJECTION, temperature=50.0, top_k=20),
    _check(Rule.REJECTION, temperature=50.0, top_p=0.7),
    *[_check(Rule.REJECTION, **cut) for cut in _CUTS],
)
CHECKS = tuple(check._replace(seed=seed) for seed, check in enumerate(_CHECKS))
