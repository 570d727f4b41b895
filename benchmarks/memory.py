"""What a server's processes have in memory, idle and after a long prompt.

    python -m benchmarks.memory model.gguf --prompt-length 8000 -- --cache-dtype float32

Prints MiB of the front end, the worker and the process that renders templates: resident, and private, which
is what each would give back. What follows ``--`` goes to ``truedraft serve``.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

START_SECONDS, ANSWER_SECONDS = 600, 3600
# The tokenizer of grammars is loaded by then, and what was freed has been given back.
QUIET_SECONDS = 10
NAMES = {
    "engine.process": "worker",
    "template_renderer": "templates",
    "llama-server": "llama-server",
    "serve": "front end",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt-length", type=int, default=8000)
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's program, measured with the same file")
    parser.add_argument("settings", nargs="*", help="of truedraft serve, after --")
    arguments = parser.parse_args()
    program = Path(sys.executable).with_name("truedraft")
    measure([str(program), "serve", arguments.model, *arguments.settings], "/ready", arguments.prompt_length)
    if arguments.llama_server is not None:
        context = ["--ctx-size", str(arguments.prompt_length + 64), "--parallel", "1"]
        command = [str(arguments.llama_server), "--model", arguments.model, *context]
        measure(command, "/health", arguments.prompt_length)


def measure(command: list[str], ready: str, prompt_length: int) -> None:
    """Prints what the server that ``command`` starts has before and after a prompt."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*command, "--port", str(port)])
    try:
        until_ready(port, ready)
        show("idle", server.pid)
        # Ids that repeat nothing, so that no draft is sure of them.
        prompt = [300 + (7 * i * i + 3 * i) % 30_000 for i in range(prompt_length)]
        (model,) = ask(port, "/v1/models")["data"]
        ask(port, "/v1/completions", model=model["id"], prompt=prompt, max_tokens=16, temperature=0)
        show(f"after a prompt of {len(prompt)} tokens", server.pid)
    finally:
        server.terminate()
        server.wait()


def until_ready(port: int, path: str) -> None:
    for _ in range(START_SECONDS):
        time.sleep(1)
        with suppress(OSError):
            ask(port, path)
            return
    raise SystemExit("The server does not become ready.")


def ask(port: int, path: str, **body: Any) -> Any:
    data = json.dumps(body).encode() if body else None
    request = Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)


def show(when: str, pid: int) -> None:
    time.sleep(QUIET_SECONDS)
    for process in family(pid):
        command = Path(f"/proc/{process}/cmdline").read_text()
        name = next((name for part, name in NAMES.items() if part in command), "another")
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
        kilobytes = {key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines)}
        private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
        print(f"{when}: {name} {kilobytes['Rss'] >> 10} MiB, private {private >> 10} MiB", flush=True)


def family(pid: int) -> Iterator[int]:
    yield pid
    children = Path(f"/proc/{pid}/task").glob("*/children")
    for child in {int(child) for file in children for child in file.read_text().split()}:
        yield from family(child)


if __name__ == "__main__":
    main()
