"""Measures how long ``/health`` stalls while the server handles inputs that are made to be expensive.

    python -m tests.faults.hostile_inputs [attacks]

Starts the real server with the bundled pair, sends one input after the other and then one attack after the
other, or these alone, and prints a table: the answer, how long it took, the longest stall of ``/health`` over
new connections, and memory: the front end's afterwards and at most, and the worker's. Exit code 1 if a stall
is over the limit.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.faults.attacks import MODEL, attacks
from tests.integration.conftest import Server, serving

LIMIT_SECONDS = 0.3
SIZE = 7_900_000  # bytes of a body, below max_body_size

# The probe is a process of its own: this one is busy sending.
PROBE = """
import http.client, select, sys, time
def ask():
    connection = http.client.HTTPConnection(sys.argv[1], timeout=600)
    connection.request("GET", "/health")
    connection.getresponse().read()
    connection.close()
ask()
print("started", flush=True)
worst = 0.0
while not select.select([sys.stdin], [], [], 0.02)[0]:
    started = time.perf_counter()
    ask()
    worst = max(worst, time.perf_counter() - started)
print(worst)
"""

T = TypeVar("T")


def body(field: str, value: str, **more: Any) -> bytes:
    head = json.dumps({"model": MODEL} | more)[:-1]
    return f'{head}, "{field}": {value}}}'.encode()


def inputs() -> Iterator[tuple[str, str, bytes]]:
    completions = "/v1/completions"

    def filled(item: str) -> str:
        return "[" + ",".join([item] * (SIZE // (len(item) + 1) - 20)) + "]"

    yield "wrong types in a list", completions, body("prompt", "[1," + filled('"a"')[1:])
    yield "token ids", completions, body("prompt", filled("1"))
    yield "five-digit token ids", completions, body("prompt", filled("12345"))
    yield "lists of lists", completions, body("prompt", filled("[1]"))
    yield "empty objects", completions, body("prompt", filled("{}"))
    yield "strings", completions, body("prompt", filled('"a"'))
    text = json.dumps("a b c " * (SIZE // 6))
    yield "a text", completions, body("prompt", text)
    yield "a text, truncated", completions, body("prompt", text[:3_900_000] + '"', truncate_prompt_tokens=5)
    yield (
        "a text in a message",
        "/v1/chat/completions",
        body("messages", f'[{{"role":"user","content":{text}}}]'),
    )
    yield "tokenize", "/tokenize", body("prompt", text[:3_900_000] + '"', return_token_strs=True)
    yield "detokenize", "/detokenize", body("tokens", filled("1234"))
    bias = "{" + ",".join(f'"{number}":"x"' for number in range(90_000)) + "}"
    yield "logit_bias of strings", completions, body("logit_bias", bias, prompt="x")
    bias = "{" + ",".join(f'"{number}":1' for number in range(90_000)) + "}"
    yield "logit_bias", completions, body("logit_bias", bias, prompt="x")
    unknown = ",".join(f'"x{number}":1' for number in range(90_000))
    yield "unknown keys", completions, f'{{"model":"{MODEL}","prompt":"x","max_tokens":1,{unknown}}}'.encode()
    prompts = json.dumps([[5 + number % 900] * 450 for number in range(64)])
    yield (
        "prompt_logprobs, 64 prompts",
        completions,
        body("prompt", prompts, prompt_logprobs=20, max_tokens=1),
    )
    prompts = json.dumps([[5 + number % 900] * 450 for number in range(1000)])
    yield "prompt_logprobs, 1000 prompts", completions, body("prompt", prompts, prompt_logprobs=20)
    many = ["x"] * 1000
    yield (
        "stop token ids of 1000 prompts",
        completions,
        body("stop_token_ids", filled("1"), prompt=many, max_tokens=1),
    )
    word = json.dumps("x" * (SIZE - 10_000))
    yield "a salt of 1000 prompts", completions, body("cache_salt", word, prompt=many, max_tokens=1)
    stops = json.dumps([letter * (SIZE // 4 - 100) for letter in "abcd"])
    yield "long stop strings", completions, body("stop", stops, prompt="x", max_tokens=200, stream=True)
    message = '{"role":"user","content":"x"},'
    messages = f"[{(message * 33_000)[:-1]}]"
    yield "messages", "/v1/chat/completions", body("messages", messages)
    yield "items", "/v1/responses", body("input", messages)
    nested = '{"type":"object","properties":{"a":' * 40 + "{}" + "}}" * 40
    tool = f'{{"type":"function","function":{{"name":"NAME","parameters":{nested}}}}}'
    tools = ",".join(tool.replace("NAME", f"f{number}") for number in range(128))
    asked = json.dumps([{"role": "user", "content": "x"}])
    yield "tools", "/v1/chat/completions", body("tools", f"[{tools}]", messages=json.loads(asked))
    for name, kind, value in (
        ("nested repetitions", "regex", "((a{1,200}){1,200}){1,200}"),
        ("a long pattern", "regex", "(a|b)*c" * 9000),
        ("many choices", "choice", [f"choice {number}" for number in range(3000)]),
        ("a large schema", "json", {"enum": [f"{number:x}" for number in range(8000)]}),
        ("an ambiguous grammar", "grammar", "start: x\nx: x x | x x x | /[a-z]+/ | /[a-z]*b/"),
    ):
        yield (
            name,
            completions,
            body("structured_outputs", json.dumps({kind: value}), prompt="x", max_tokens=20),
        )
    echoed = json.dumps([7] * 1000)
    yield (
        "echo with logprobs",
        completions,
        body("prompt", echoed, echo=True, logprobs=5, max_tokens=1, stream=True),
    )


def measured(url: str, send: Callable[[], T]) -> tuple[T, float, float]:
    """Returns the answer, its time, and the longest that ``/health`` took meanwhile."""
    with subprocess.Popen(
        [sys.executable, "-c", PROBE, url.removeprefix("http://")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as probe:
        assert probe.stdout is not None
        probe.stdout.readline()
        time.sleep(0.2)
        started = time.perf_counter()
        answer = send()
        seconds = time.perf_counter() - started
        stall, _ = probe.communicate("\n")
    return answer, seconds, float(stall)


def memory(pid: int) -> tuple[float, float]:
    """GB of the front end now, and at most since the last look."""
    status = Path(f"/proc/{pid}/status").read_text()
    now, peak = (int(re.findall(rf"{name}:\s+(\d+)", status)[0]) / 1e6 for name in ("VmRSS", "VmHWM"))
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    return now, peak


def worker_memory(server: Server) -> float:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    lines = [Path(f"/proc/{child}/statm").read_text() for child in children]
    return max((int(line.split()[1]) * 4096 / 1e9 for line in lines), default=0.0)


def main() -> int:
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "x"}, timeout=600)
        print(f"{'input':32}{'MB':>6} {'status':20}{'MB':>7}", end="")
        print(f"{'s':>8}{'stall s':>9}{'GB':>7}{'peak':>7}{'worker':>8}")

        def row(name: str, size: int, status: str, answer: int, seconds: float, stall: float) -> None:
            now, peak = memory(server.pid)
            print(
                f"{name:32}{size / 1e6:6.1f} {status:20}{answer / 1e6:7.2f}{seconds:8.2f}{stall:9.3f}"
                f"{now:7.2f}{peak:7.2f}{worker_memory(server):8.2f}",
                flush=True,
            )

        for name, path, content in inputs() if "attacks" not in sys.argv else ():
            headers = {"content-type": "application/json"}

            def send(path: str = path, content: bytes = content, headers: Any = headers) -> httpx.Response:
                return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=600)

            answer, seconds, stall = measured(server.url, send)
            worst = max(worst, stall)
            row(name, len(content), str(answer.status_code), len(answer.content), seconds, stall)
        for name, attack in attacks():
            status, seconds, stall = measured(server.url, partial(attack, server))
            worst = max(worst, stall)
            row(name, 0, status, 0, seconds, stall)
    print(f"longest stall: {worst:.3f} s")
    return worst > LIMIT_SECONDS


if __name__ == "__main__":
    sys.exit(main())
