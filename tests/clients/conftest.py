"""Foreign clients against the real server process and the bundled pair; run with ``make test-clients``.

Not collected by ``make test``: the clients live in an environment of their own. Nothing here may need a
network, so what would look for one is switched off before any client is imported.
"""

import os
from pathlib import Path

import pytest

from tests.integration.conftest import Server, server

__all__ = ["Server", "server"]

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "engine" / "demo_pair" / "target"
MODEL = "truedraft-demo"

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture(autouse=True)
def no_proxy_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a developer's shell has set must not decide where requests go."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_ORG_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
