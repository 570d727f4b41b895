"""``generate --rounds``: what is printed of each round adds up to the text, and fits the terminal."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from truedraft import LLM, SamplingParams
from truedraft.engine.commands.rounds import RoundPrinter
from truedraft.engine.messages import RoundTrace

STORY = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_speculative_tokens=3, cache_memory="64MiB", num_threads=1)


def printed(llm: LLM, width: int) -> tuple[str, list[RoundTrace], str]:
    out = io.StringIO()
    printer = RoundPrinter(llm, STORY, Console(file=out, width=width, color_system=None, soft_wrap=True))
    traces, text = [], ""
    for delta in llm.stream(STORY, SamplingParams(max_tokens=40, seed=3, trace=True)):
        assert delta.output.trace is not None
        traces.append(delta.output.trace)
        text += delta.text
        printer.print(delta.output.trace, delta.output.token_ids)
    return out.getvalue(), traces, text


def test_rounds_add_up_to_the_text(llm: LLM) -> None:
    shown, traces, text = printed(llm, 400)
    blocks = shown.strip().split("\n\n")
    assert len(blocks) == len(traces)
    assert blocks[-1].endswith(f"{STORY}{text}".splitlines()[-1])
    gained = [int(number) for number in re.findall(r"(\d+) tokens? gained", shown)]
    assert sum(gained) == 40
    for block, trace in zip(blocks, traces, strict=True):
        kept = trace.num_accepted
        assert block.count("  kept  ") == kept
        assert block.count("  rejected  ") == (kept < len(trace.draft_ids))
        for token_id in [*trace.draft_ids, trace.next_token]:
            assert re.search(rf"^{token_id} ", block, re.MULTILINE)
            assert repr(llm.decode([token_id])) in block
    assert {"recovered", "bonus"} <= {word for word in ("recovered", "bonus") if word in shown}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_rounds_fit(llm: LLM, width: int) -> None:
    shown, _, _ = printed(llm, width)
    assert max(map(cell_len, shown.splitlines())) <= width
    assert "…" not in shown
