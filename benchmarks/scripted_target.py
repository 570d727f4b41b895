"""A target that emits a given script, at the cost of a real one: for measuring drafts from known text.

No downloaded model is good at editing code, and the bundled one tells stories. So a random model of any shape
computes everything a target computes (``benchmarks.synthetic_pair``), and then its logits are replaced: at
every position of the output the script's next token has a high one and all others 0, whatever was emitted
before. It never hesitates and never rephrases, so acceptance is what a model that makes exactly these edits
would give; the time of a round is the real one of its shape.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.common import Run
from benchmarks.engine_runs import use_phases
from benchmarks.synthetic_pair import Shape, build, cycle, successors
from truedraft.engine.build import build_engine
from truedraft.engine.config import BUNDLED_PAIR, EngineConfig
from truedraft.engine.core.engine import EngineCore
from truedraft.engine.memory.batch import Span
from truedraft.engine.messages import Generate, SamplingParams, TokenOutput
from truedraft.engine.models.base import ForwardOutput

CONTEXT = 8192
# At temperature 1 the script's token then has a probability of about 0.99 in a vocabulary of 4096.
CERTAINTY = 13.0


class ScriptedEngine:
    """Runs an engine with a random target, and a draft if ``draft`` is given; one request at a time."""

    def __init__(self, target: Shape, draft: Shape | None = None, **config: object) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(BUNDLED_PAIR / "target"))
        vocab_size = len(self.tokenizer)
        self._script: list[int] = []
        with tempfile.TemporaryDirectory() as folder:
            paths = {}
            for name, shape in (("target", target), ("draft", draft)):
                if shape is not None:
                    model = build(shape, successors(cycle(vocab_size, 0)), seed=0)
                    model.config.max_position_embeddings = CONTEXT
                    model.save_pretrained(Path(folder) / name)
                    paths[name] = str(Path(folder) / name)
            self.core: EngineCore = build_engine(
                EngineConfig(
                    target=paths["target"],
                    draft=paths.get("draft", "none"),
                    max_num_sequences=1,
                    **config,  # type: ignore[arg-type]
                )
            )
        use_phases(self.core)  # every pass is scripted
        self._compute = self.core.target.forward
        self.core.target.forward = self._forward  # type: ignore[method-assign]

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def run(
        self, prompt: list[int], output: list[int], prediction: list[int] | None, params: SamplingParams
    ) -> Run:
        """Generates the output once; the clock starts at its first token: prompts cost the same anyway."""
        self._script = [*prompt, *output]
        self.core.add(Generate("r", prompt, params, prediction_token_ids=prediction))
        started = None
        token_ids: list[int] = []
        rounds = drafted = accepted = 0
        while self.core.has_work:
            for step in self.core.step():
                assert isinstance(step, TokenOutput)
                token_ids += step.token_ids
                if started is None:
                    started = time.perf_counter()
                    continue
                rounds += 1
                drafted += step.num_draft_tokens
                accepted += step.num_accepted_tokens
        assert started is not None
        seconds = time.perf_counter() - started
        return Run(len(token_ids) - 1, seconds, rounds, drafted, accepted, [token_ids])

    def _forward(self, spans: list[Span], taps: Sequence[int] = ()) -> ForwardOutput:
        ends = [span.table.num_computed_tokens + len(span.token_ids) for span in spans]
        logits = self._compute(spans).logits.clone()
        row = 0
        for span, end in zip(spans, ends, strict=True):
            for position in range(end - span.num_logits, end):
                following = self._script[position + 1] if position + 1 < len(self._script) else 0
                logits[row].zero_()
                logits[row, following] = CERTAINTY
                row += 1
        return ForwardOutput(logits)


def total(runs: Sequence[Run]) -> Run:
    """All texts of one pass as one run."""
    return Run(
        sum(run.num_tokens for run in runs),
        sum(run.seconds for run in runs),
        sum(run.num_rounds for run in runs),
        sum(run.num_draft_tokens for run in runs),
        sum(run.num_accepted_tokens for run in runs),
        [run.token_ids[0] for run in runs],
    )
