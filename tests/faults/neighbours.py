"""Measures what one client's hostile requests cost another one: attacks of ``tests.faults.neighbour_rows``.

    python -m tests.faults.neighbours [--list] [part of a row's name ...]

Starts the real server with the bundled pair and two keys, for each group of rows that want the same settings.
For each row, a process of its own asks ``/health`` over a new connection every 20 ms and reads one greedy
stream after the other with the second key, while the first key attacks. Prints a table: the answers, their
time, the longest ``/health``, the neighbour's longest gap between two events and its longest time to a first
one, in seconds, and the front end's memory at most. The exit code is 1 if one is over its limit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx

from tests.faults.hostile_inputs import memory
from tests.faults.neighbour_rows import MODEL, ROWS, Row
from tests.integration.conftest import Server, serving

ROOT = Path(__file__).parents[2]
HOSTILE, NEIGHBOUR = "alpha", "beta"
ATTACK_SECONDS = 100.0
# Limits in seconds and MB.
LIMITS = {"stall": 0.2, "gap": 0.3, "first": 1.0, "MB": 512}

PROBE = """
import http.client, json, select, sys, threading, time
host, key, model = sys.argv[1:]
seen = {"stall": 0.0, "gap": 0.0, "first": 0.0, "failed": 0}
has_ended = threading.Event()
def ask_health():
    while not has_ended.wait(0.02):
        started = time.perf_counter()
        try:
            connection = http.client.HTTPConnection(host, timeout=30)
            connection.request("GET", "/health")
            connection.getresponse().read()
            connection.close()
        except OSError:
            seen["failed"] += 1
        seen["stall"] = max(seen["stall"], time.perf_counter() - started)
def read_streams():
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 200, "temperature": 0,
        "ignore_eos": True, "stream": True, "speculation": {"method": "none"}}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    while not has_ended.is_set():
        last, name = time.perf_counter(), "first"
        try:
            connection = http.client.HTTPConnection(host, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                seen["failed"] += 1
                time.sleep(0.1)
                continue
            for line in answer:
                if line.startswith(b"data:"):
                    now = time.perf_counter()
                    seen[name] = max(seen[name], now - last)
                    last, name = now, "gap"
            connection.close()
        except OSError:
            seen["failed"] += 1
            seen[name] = max(seen[name], time.perf_counter() - last)
threads = [threading.Thread(target=target) for target in (ask_health, read_streams)]
for thread in threads:
    thread.start()
time.sleep(0.5)
seen.update(stall=0.0, gap=0.0, first=0.0, failed=0)
print("started", flush=True)
sys.stdin.readline()
has_ended.set()
for thread in threads:
    thread.join()
print(json.dumps(seen))
"""


def attack(server: Server, row: Row) -> str:
    """Returns the statuses of the answers."""
    content = json.dumps({"model": MODEL} | row.body)
    headers = {"authorization": f"Bearer {HOSTILE}", "content-type": "application/json"}
    timeout = row.leave_after or ATTACK_SECONDS

    def send(_: int) -> str:
        try:
            answer = httpx.post(f"{server.url}{row.path}", content=content, headers=headers, timeout=timeout)
        except httpx.TimeoutException:
            return "left"
        except httpx.TransportError as error:
            return type(error).__name__
        return str(answer.status_code)

    with ThreadPoolExecutor(row.times) as threads:
        counts = Counter(threads.map(send, range(row.times)))
    return " ".join(f"{number}x{status}" for status, number in sorted(counts.items()))


def measured(server: Server, row: Row) -> dict[str, Any]:
    memory(server.pid)
    command = [sys.executable, "-c", PROBE, server.url.removeprefix("http://"), NEIGHBOUR, MODEL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        assert probe.stdout is not None
        probe.stdout.readline()
        started = time.perf_counter()
        statuses = attack(server, row)
        seconds = time.perf_counter() - started
        time.sleep(0.5)
        seen, _ = probe.communicate("\n")
    _, peak = memory(server.pid)
    size = len(json.dumps({"model": MODEL} | row.body))
    return {
        "name": row.name,
        "KB": size / 1e3,
        "answers": statuses,
        "s": seconds,
        **json.loads(seen),
        "MB": peak * 1e3,
    }


def rows_named(parts: Sequence[str]) -> list[Row]:
    return [row for row in ROWS if not parts or any(part in row.name for part in parts)]


def results(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for settings, group in groupby(sorted(rows, key=lambda row: row.settings), lambda row: row.settings):
        given = [str(ROOT / each) if each.startswith("configs/") else each for each in settings]
        keys = ("--api-keys", f"{HOSTILE},{NEIGHBOUR}", "--host", "127.0.0.1", "--num-threads", "1")
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *given, *keys) as server:
            attack(server, Row("warm up", {"prompt": "x"}))
            for row in group:
                yield {"settings": " ".join(settings)} | measured(server, row)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", help="parts of names; all rows if there are none")
    parser.add_argument("--list", action="store_true", help="only list the rows")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    arguments = parser.parse_args()
    rows = rows_named(arguments.rows)
    if arguments.list:
        print(*(row.name for row in rows), sep="\n")
        return 0
    columns = ("KB", "s", "stall", "gap", "first", "failed", "MB")
    print(f"{'row':44}{'answers':14}" + "".join(f"{column:>9}" for column in columns))
    found = []
    for result in results(rows):
        figures = "".join(f"{result[column]:9.2f}" for column in columns)
        print(f"{result['name']:44}{result['answers']:14}{figures}  {result['settings']}", flush=True)
        found.append(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    is_over = any(result[name] > limit for result in found for name, limit in LIMITS.items())
    return int(is_over or any(result["failed"] for result in found))


if __name__ == "__main__":
    sys.exit(main())
