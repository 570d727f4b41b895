"""Agents and the libraries under them go through a streamed turn with a tool, to its end.

The server is the real front end; its worker says what a script wants, so that each client gets a call of a
tool that it offers, and then an answer. A client has understood the call if it comes back with what the tool
returned.
``make test-clients`` installs them into folders of their own, outside this environment.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import TARGET
from tests.server.running import MODEL, RunningServer, run_server
from tests.server.tiny_tokenizer import write_tokenizer
from truedraft.server.text.tokenizer import load_tokenizer

AGENTS = Path(__file__).parent / "agents"
TOOLS = Path(os.environ.get("CLIENTS_TOOLS", sys.prefix))
PYTHON, NODE = TOOLS / "agents" / "bin", TOOLS / "node" / "node_modules" / ".bin"
TIMEOUT_SECONDS = 180

# What the tool returns, and its call cannot: only a client that has run it knows.
PROOF = "truedraft-42"
COMMAND = "echo truedraft-$((40+2))"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@dataclass(frozen=True)
class Scripted:
    server: RunningServer
    replies: Path

    def say(self, *replies: tuple[str, str]) -> None:
        """Takes pairs of a mark in the prompt and the answer to it; the first one counts."""
        self.replies.write_text(json.dumps(replies))

    def call(self, name: str, **arguments: Any) -> None:
        """Calls a tool, and ends the turn once it has returned."""
        call = json.dumps({"name": name, "arguments": arguments})
        self.say((PROOF, "Done."), ("", f"I call.\n<tool_call>\n{call}\n</tool_call>"))

    def answered(self, route: str) -> dict[str, float]:
        """Returns how many requests of a route had which status."""
        name = "truedraft_http_requests_total"
        statuses = ("200", "400", "404", "500")
        return {status: self.server.metric(name, route=route, status=status) for status in statuses}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """Its context is long enough for what agents say of themselves; a token is a byte here."""
    template = (TARGET / "chat_template.jinja").read_text()
    folder = write_tokenizer(tmp_path_factory.mktemp("models") / MODEL, chat_template=template)
    log = tmp_path_factory.mktemp("log")
    replies = log / "replies.json"
    replies.write_text("[]")
    options = ("--replies", str(replies), "--once", "--max-model-len", "1000000")
    with run_server(folder, load_tokenizer(str(folder)), log, *options) as server:
        yield Scripted(server, replies)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Its user has never used any of them, and has a repository of her own."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    (tmp_path / "project").mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path / "project", check=True)
    return tmp_path


def run(home: Path, program: Path, *arguments: str, **environment: str) -> str:
    """Returns what it prints. The test is skipped if it is not installed."""
    if not program.exists():
        pytest.skip(f"{program.name} is not installed in {program.parent}")
    path = os.pathsep.join([str(NODE), os.environ.get("PATH", "")])
    kept = {name: os.environ[name] for name in ("LANG", "NO_PROXY") if name in os.environ}
    ours = {"HOME": str(home), "PATH": path, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_COLOR": "1"}
    done = subprocess.run(
        [program, *arguments],
        cwd=home / "project",
        env={**kept, **ours, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def needs_node() -> None:
    node = shutil.which("node")
    version = subprocess.run([node, "--version"], capture_output=True, text=True).stdout if node else "v0"
    if int(version.lstrip("v").partition(".")[0]) < 22:
        pytest.skip(f"Node.js 22 or newer is needed, and this is {version.strip()}")


def check_turn(scripted: Scripted, route: str, before: dict[str, float], *, at_least: int = 2) -> None:
    after = scripted.answered(route)
    assert after["200"] - before["200"] >= at_least
    assert {status: after[status] - before[status] for status in ("400", "404", "500")} == {
        "400": 0,
        "404": 0,
        "500": 0,
    }


def test_codex(scripted: Scripted, home: Path) -> None:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "truedraft"\n[model_providers.truedraft]\nname = "Truedraft"\n'
        f'base_url = "{scripted.server.url}/v1"\nwire_api = "responses"\nrequest_max_retries = 0\n'
        "stream_max_retries = 0\n"
    )
    scripted.call("exec_command", cmd=COMMAND)
    before = scripted.answered(RESPONSES)
    options = ("exec", "--skip-git-repo-check", "--json", "--sandbox", "danger-full-access")
    printed = run(home, NODE / "codex", *options, "Say it.")
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert f"{PROOF}\n" in [item.get("aggregated_output") for item in items]
    assert items[-1]["text"] == "Done."
    assert events[-1]["type"] == "turn.completed"
    check_turn(scripted, RESPONSES, before)


def test_claude_code(scripted: Scripted, home: Path) -> None:
    scripted.call("Bash", command=COMMAND, description="Says it.")
    before = scripted.answered(MESSAGES)
    printed = run(
        home,
        NODE / "claude",
        *("--print", "Say it.", "--output-format", "stream-json", "--verbose"),
        *("--allowedTools", "Bash"),
        **of_claude_code(scripted),
    )
    events = [json.loads(line) for line in printed.splitlines()]
    results = [event["tool_use_result"]["stdout"] for event in events if "tool_use_result" in event]
    assert results == [PROOF]
    last = events[-1]
    assert (last["subtype"], last["is_error"], last["result"]) == ("success", False, "Done.")
    check_turn(scripted, MESSAGES, before)


def of_claude_code(scripted: Scripted) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": scripted.server.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def test_sessions_of_claude_code_begin_with_the_same_prompt(scripted: Scripted, home: Path) -> None:
    """Its instructions and tools are computed once: two prompts differ first in what the user says."""
    scripted.say(("", "Done."))
    asked = ("Say it.", "What is here?")
    num_before = len(scripted.server.messages_to_worker("Generate"))
    for text in asked:
        run(home, NODE / "claude", "--print", text, **of_claude_code(scripted))
    sent = scripted.server.messages_to_worker("Generate")[num_before:]
    ids = [json.loads(line.partition("prompt_token_ids=")[2].partition("]")[0] + "]") for line in sent]
    prompts = [scripted.server.post("/detokenize", {"tokens": each}).json()["prompt"] for each in ids]
    first, second = (next(each for each in prompts if text in each) for text in asked)
    shared = len(os.path.commonprefix([first, second]))
    assert first[shared:].startswith(asked[0])
    assert second[shared:].startswith(asked[1])
    assert shared > 10_000


@pytest.mark.parametrize(
    ("package", "route"), [("@ai-sdk/openai-compatible", CHAT), ("@ai-sdk/anthropic", MESSAGES)]
)
def test_opencode(scripted: Scripted, home: Path, package: str, route: str) -> None:
    provider = {
        "npm": package,
        "name": "Truedraft",
        "options": {"baseURL": f"{scripted.server.url}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 900_000, "output": 1000}}},
    }
    model = f"truedraft/{MODEL}"
    settings = {"provider": {"truedraft": provider}, "model": model, "small_model": model}
    settings |= {"autoupdate": False, "share": "disabled", "permission": "allow"}
    (home / ".config" / "opencode").mkdir(parents=True)
    (home / ".config" / "opencode" / "opencode.json").write_text(json.dumps(settings))
    scripted.call("bash", command=COMMAND, description="Says it.")
    before = scripted.answered(route)
    options = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}
    printed = run(home, NODE / "opencode", "run", "--format", "json", "Say it.", **options)
    parts = [json.loads(line)["part"] for line in printed.splitlines()]
    (ran,) = [part["state"] for part in parts if part["type"] == "tool"]
    assert (ran["status"], ran["output"].strip()) == ("completed", PROOF)
    assert [part["text"] for part in parts if part["type"] == "text"] == ["I call.", "Done."]
    check_turn(scripted, route, before)


@pytest.mark.parametrize(
    ("kind", "route"),
    [("chat", CHAT), ("responses", RESPONSES), ("compatible", CHAT), ("messages", MESSAGES)],
)
def test_vercel_ai(scripted: Scripted, home: Path, kind: str, route: str) -> None:
    needs_node()
    if not (TOOLS / "node" / "node_modules" / "ai").exists():
        pytest.skip("ai is not installed")
    script = shutil.copy(AGENTS / "vercel.mjs", TOOLS / "node")  # next to what it imports
    scripted.call("add", a=1)
    before = scripted.answered(route)
    node = Path(shutil.which("node") or "node")
    printed = json.loads(run(home, node, script, scripted.server.url, kind))
    assert printed == {"text": "I call.Done.", "ran": 1}
    check_turn(scripted, route, before)


@pytest.mark.parametrize(
    ("script", "kind", "route", "num_requests"),
    [
        ("openai_agents.py", "responses", RESPONSES, 2),
        ("openai_agents.py", "chat", CHAT, 2),
        ("pydantic_ai_turn.py", "chat", CHAT, 2),
        ("pydantic_ai_turn.py", "responses", RESPONSES, 2),
        ("instructor_turn.py", "chat", CHAT, 1),
        ("instructor_turn.py", "responses", RESPONSES, 1),
        ("instructor_turn.py", "messages", MESSAGES, 1),
        ("litellm_bridge.py", "bridge", MESSAGES, 1),
        ("litellm_bridge.py", "chat", MESSAGES, 1),
    ],
)
def test_libraries(
    scripted: Scripted, home: Path, script: str, kind: str, route: str, num_requests: int
) -> None:
    scripted.call("add", a=1)
    before = scripted.answered(route)
    printed = run(home, PYTHON / "python", str(AGENTS / script), scripted.server.url, kind)
    assert json.loads(printed) == {"text": "Done.", "ran": 1}
    check_turn(scripted, route, before, at_least=num_requests)


def test_llm(scripted: Scripted, home: Path) -> None:
    model = {"model_id": "t", "model_name": MODEL, "api_base": f"{scripted.server.url}/v1"}
    (home / "extra-openai-models.yaml").write_text(json.dumps([model | {"supports_tools": True}]))
    scripted.call("add", a=1)
    before = scripted.answered(CHAT)
    options = ("--model", "t", "--functions", str(AGENTS / "tools_of_llm.py"), "Add.")
    printed = run(home, PYTHON / "llm", *options, LLM_USER_PATH=str(home), OPENAI_API_KEY="none")
    assert "Done." in printed
    check_turn(scripted, CHAT, before)


def test_aider(scripted: Scripted, home: Path) -> None:
    """It has no tools: it edits what the text says."""
    file = home / "project" / "hello.py"
    file.write_text('print("a")\n')
    edit = '<<<<<<< SEARCH\nprint("a")\n=======\nprint("b")\n>>>>>>> REPLACE'
    scripted.say(("", f"hello.py\n```python\n{edit}\n```\n"))
    before = scripted.answered(CHAT)
    run(
        home,
        TOOLS / "aider" / "bin" / "aider",
        *("--model", f"openai/{MODEL}", "--edit-format", "diff", "--message", "Change it."),
        *("--yes-always", "--no-auto-commits", "--no-check-update", "--no-analytics", "--no-gitignore"),
        *("--no-show-model-warnings", "--map-tokens", "0", "hello.py"),
        OPENAI_API_KEY="none",
        OPENAI_API_BASE=f"{scripted.server.url}/v1",
    )
    assert file.read_text() == 'print("b")\n'
    check_turn(scripted, CHAT, before, at_least=1)
