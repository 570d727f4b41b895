"""Measures what one key's load costs another one: full queues, full places, long prompts, busy threads.

    python -m tests.faults.tenants [--light] [--model FILE.gguf] [part of a row's name ...]

Rows are measured as those of ``tests.faults.neighbours`` are. ``--light`` instead asks again and again for
four tokens with a second key, while the first one does nothing, or has a load open, and prints the median and
the 99th percentile of the time to the first token by the light client's own clock. Rows of long prompts need
``--model``, a real model with a context of 4,096 tokens or more.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from tests.faults.neighbour_rows import COMPLETIONS, MODEL, PUBLIC, Row
from tests.faults.neighbours import HOSTILE, LIMITS, NEIGHBOUR, results
from tests.integration.conftest import Server, serving

LIGHT_SECONDS = 12.0

ENDLESS = {"temperature": 0, "ignore_eos": True, "speculation": {"method": "none"}}
STORY = "Once upon a time there was a little girl. "


def prompts_of(times: int, length: int, **more: Any) -> dict[str, Any]:
    """Returns a request of ``times`` prompts of so many tokens, all of them different."""
    prompts = [[1 + (number + place) % 1000 for place in range(length)] for number in range(times)]
    return {"prompt": prompts} | ENDLESS | more


TEXT = "word " * 98_000
ROWS = (
    Row("12 x /tokenize of 490,000 characters", {"prompt": TEXT}, "/tokenize", 12, leave_after=20),
    Row("2 x n = 128", {"prompt": STORY, "n": 128, "max_tokens": 60} | ENDLESS, times=2, leave_after=20),
    Row(
        "2 x n = 100, 900 tokens",
        {"prompt": STORY, "n": 100, "max_tokens": 900} | ENDLESS,
        times=2,
        leave_after=20,
    ),
    Row("64 prompts of 900 tokens", prompts_of(64, 900, max_tokens=100), leave_after=20),
)
LONG = (Row("1 prompt of 4,000 tokens", prompts_of(1, 4000, max_tokens=2), leave_after=20),)

LOADS: dict[str, Row | None] = {
    "alone": None,
    "64 long prompts": Row("", prompts_of(64, 900, max_tokens=100)),
    "n = 128": Row("", {"prompt": STORY, "n": 128, "max_tokens": 900} | ENDLESS),
    "256 requests": Row("", {"prompt": STORY, "max_tokens": 900} | ENDLESS, times=256),
}


@contextmanager
def loaded(server: Server, row: Row | None) -> Iterator[None]:
    """Keeps a load of the hostile key open; what ends is sent again."""
    has_ended = threading.Event()
    headers = {"authorization": f"Bearer {HOSTILE}"}

    def send() -> None:
        assert row is not None
        with httpx.Client(timeout=300, verify=False) as client:
            while not has_ended.is_set():
                body = {"model": MODEL, "stream": True} | row.body
                url = f"{server.url}{row.path}"
                with (
                    suppress(httpx.HTTPError),
                    client.stream("POST", url, json=body, headers=headers) as answer,
                ):
                    for _ in answer.iter_raw():
                        if has_ended.is_set():
                            break

    threads = [threading.Thread(target=send) for _ in range(row.times if row else 0)]
    for thread in threads:
        thread.start()
    time.sleep(3.0 if row else 0.0)
    try:
        yield
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()


def light_times(server: Server, seconds: float) -> list[float]:
    """Returns the seconds to the first event of each of the light key's requests."""
    times, until = [], time.monotonic() + seconds
    body = {"model": MODEL, "prompt": "The cat", "max_tokens": 4, "stream": True} | ENDLESS
    headers = {"authorization": f"Bearer {NEIGHBOUR}"}
    with httpx.Client(timeout=120) as client:
        while time.monotonic() < until:
            asked = time.perf_counter()
            with client.stream("POST", f"{server.url}{COMPLETIONS}", json=body, headers=headers) as answer:
                is_first = True
                for line in answer.iter_lines():
                    if is_first and line.startswith("data:"):
                        times.append(time.perf_counter() - asked if answer.status_code == 200 else 999.0)
                        is_first = False
                if is_first:
                    times.append(999.0)  # refused
            time.sleep(0.02)
    return times


def measure_light(
    settings: Sequence[str], loads: dict[str, Row | None], parts: Sequence[str]
) -> Iterator[dict[str, Any]]:
    given = ("--api-keys", f"{HOSTILE},{NEIGHBOUR}", "--host", "127.0.0.1", "--num-threads", "1", *settings)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *given) as server:
        light_times(server, 1.0)
        for name, row in loads.items():
            if not all(part in name for part in parts):
                continue
            with loaded(server, row):
                times = light_times(server, LIGHT_SECONDS)
            yield {
                "load": name,
                "number": len(times),
                "p50": statistics.median(times),
                "p99": sorted(times)[int(0.99 * (len(times) - 1))],
                "most": max(times),
            }
            time.sleep(2.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", help="parts of names; all rows if there are none")
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--model", help="a real model, for long prompts")
    parser.add_argument("--public", action="store_true", help="with configs/public.yaml")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    arguments = parser.parse_args()
    settings, loads, rows = PUBLIC if arguments.public else (), LOADS, ROWS
    if arguments.model:
        named = ("--target", arguments.model, "--draft", "none", "--served-model-name", MODEL)
        settings, loads, rows = (*settings, *named), {"alone": None, LONG[0].name: LONG[0]}, LONG
    found = []
    if arguments.light:
        for result in measure_light(settings, loads, arguments.rows):
            print(
                "{load:20} {number:5} requests  p50 {p50:.3f}  p99 {p99:.3f}  most {most:.3f}".format(
                    **result
                )
            )
            found.append(result)
    else:
        named_rows = [row for row in rows if all(part in row.name for part in arguments.rows)]
        chosen = [replace(row, settings=settings) for row in named_rows]
        for result in results(chosen):
            figures = " ".join(f"{name} {result[name]:.2f}" for name in ("s", *LIMITS, "failed"))
            print(f"{result['name']:40} {result['answers']:14} {figures}", flush=True)
            found.append(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
