"""Prints each round of a text: drafted tokens, both models' probabilities, and the tokens that were kept.

``truedraft generate --rounds`` uses it. The rounds come from the engine's own trace.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from truedraft.engine.llm import LLM
from truedraft.engine.messages import DRAFT_MODEL, HEADS, RoundTrace
from truedraft.engine.terminal import printable, table

SOURCES = {
    DRAFT_MODEL: "the draft model",
    **dict.fromkeys(HEADS, "the head"),
    "ngram": "n-grams",
    "grammar": "the grammar",
    "none": "nobody",
}


class RoundPrinter:
    """Prints a table for each round of a text that continues ``prompt``."""

    def __init__(self, llm: LLM, prompt: str, out: Console) -> None:
        self._llm = llm
        self._out = out
        self._stream = llm.text_stream(llm.tokenizer.encode(prompt))
        self._prompt, self._text = prompt, ""
        self._num_rounds = 0

    def print(self, round_: RoundTrace, token_ids: Sequence[int]) -> None:
        """Prints one round; ``token_ids`` are those that it added to the text."""
        self._num_rounds += 1
        self._text += "".join(map(self._stream.step, token_ids))
        num_drafted, kept = len(round_.draft_ids), round_.num_accepted
        source = SOURCES.get(round_.source, round_.source) if num_drafted else "nobody"
        tokens = "1 token" if len(token_ids) == 1 else f"{len(token_ids)} tokens"
        title = Text(f"Round {self._num_rounds}", "bold")
        title.append(
            f"  {num_drafted} drafted by {source}, {kept} kept; {tokens} gained"
            if num_drafted
            else f"  nothing drafted; {tokens} gained",
            "not bold",
        )
        self._out.print(title, soft_wrap=False)
        rows = table(["token", "text", "verdict", "draft's probability", "target's"], num_left=3)
        for place, token_id in enumerate(round_.draft_ids):
            verdict = "kept" if place < kept else "rejected" if place == kept else "not judged"
            rows.add_row(
                *self._cells(token_id),
                Text(verdict, "green" if place < kept else "red" if place == kept else "dim"),
                f"{round_.draft_probs[place]:.1%}",
                f"{round_.target_probs[place]:.1%}",
            )
        if len(token_ids) > kept:
            chance = round_.next_target_prob
            own = "recovered" if kept < num_drafted else "bonus" if num_drafted else "not drafted"
            rows.add_row(*self._cells(round_.next_token), own, "", "" if chance is None else f"{chance:.1%}")
        self._out.print(rows)
        text = Text.assemble((printable(self._prompt), "dim"), printable(self._text))
        self._out.print(text, soft_wrap=False)
        self._out.print()

    def _cells(self, token_id: int) -> tuple[str, str]:
        return str(token_id), printable(repr(self._llm.decode([token_id])))
