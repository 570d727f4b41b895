"""Metadata in front of a prompt is left out and reported, so that sessions begin with the same tokens."""

import re
from typing import Any

import pytest

from tests.server.refusals import CHAT
from tests.server.running import RunningServer
from tests.server.test_leniency import ignored, speaking
from tests.server.test_tools import prompt_of
from truedraft.server.text import front_metadata

__all__ = ["speaking"]

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER: dict[str, Any] = {"role": "user", "content": "x"}

# The system blocks of Claude Code 2.1.332, as two sessions of it sent them; the last one is shortened.
BILLING = "x-anthropic-billing-header: cc_version=2.1.332.{}; cc_entrypoint=sdk-cli;"
BLOCKS = [
    "You are a Claude agent, built on Anthropic's Claude Agent SDK.",
    "\nYou are an agent working with the user toward their goals, using your own judgment along the way.",
]


def session(suffix: str) -> dict[str, Any]:
    texts = [BILLING.format(suffix), *BLOCKS]
    return {"system": [{"type": "text", "text": text} for text in texts], "messages": [USER], "max_tokens": 9}


def test_sessions_begin_with_the_same_tokens(speaking: RunningServer) -> None:
    first, second = (prompt_of(speaking, MESSAGES, session(suffix)) for suffix in ("99f", "93d"))
    assert first == second
    assert "billing" not in first
    assert all(block in first for block in BLOCKS)
    assert ignored(speaking, MESSAGES, session("99f")) == "system.0"
    counted = {name: value for name, value in session("93d").items() if name != "max_tokens"}
    response = speaking.post(f"{MESSAGES}/count_tokens", counted)
    assert response.headers["x-truedraft-ignored"] == "system.0"


LINE = BILLING.format("abc")
BOTH = f"{LINE}\nBe brief."
PARTS = [{"type": "text", "text": LINE}, {"type": "text", "text": "Be brief."}]


def spoken(*contents: Any, role: str = "system") -> dict[str, Any]:
    return {
        "messages": [*({"role": role, "content": content} for content in contents), USER],
        "max_tokens": 9,
    }


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (MESSAGES, spoken() | {"system": BOTH}, "system"),
        (MESSAGES, spoken() | {"system": PARTS}, "system.0"),
        (MESSAGES, spoken(BOTH), "messages.0.content"),
        (CHAT, spoken(BOTH), "messages.0.content"),
        (CHAT, spoken(PARTS, role="developer"), "messages.0.content.0"),
        (CHAT, spoken(LINE, "Be brief."), "messages.0.content"),
        (CHAT, spoken(f"cch=1f2e3;\n{LINE}\n\nBe brief."), "messages.0.content"),
        (CHAT, spoken("X-Anthropic-Client: a\ncc_version=2.1\nBe brief."), "messages.0.content"),
        (RESPONSES, {"instructions": BOTH, "input": "x"}, "instructions"),
        (RESPONSES, {"input": [{"role": "developer", "content": BOTH}, USER]}, "input.0.content"),
    ],
)
def test_wherever_it_stands(speaking: RunningServer, path: str, body: dict[str, Any], name: str) -> None:
    assert prompt_of(speaking, path, body) == "system:Be brief.;user:x;a:"
    assert ignored(speaking, path, body) == name


@pytest.mark.parametrize(
    "text",
    ["Explain this:\nx-anthropic-billing-header: a", "x-anthropic-billing-header is a header.", "cchannel=1"],
)
def test_what_only_speaks_of_it_stays(speaking: RunningServer, text: str) -> None:
    body = {"messages": [{"role": "system", "content": text}, USER]}
    assert prompt_of(speaking, CHAT, body) == f"system:{text};user:x;a:"
    said = {"messages": [USER | {"content": LINE}]}
    assert prompt_of(speaking, CHAT, said) == f"user:{LINE};a:"
    assert ignored(speaking, CHAT, said) == ""


def test_the_test_can_fail(speaking: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_metadata, "METADATA", re.compile("(?!)"))
    with pytest.raises(AssertionError):
        test_sessions_begin_with_the_same_tokens(speaking)
