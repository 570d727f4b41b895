"""Mixed load for a long time, with clients that leave and workers that die; every answer is compared.

    python -m tests.faults.soak [--engines 300] [--seconds 600] [--kill-every 60] [--save soak.json]

Random engines under random requests come first, in this process (``tests.engine.random_runs``). Then it
starts the real server with the bundled pair. Requests have random parameters; their answers without drafts,
one at a time, are the references. Then each client sends one of them after the other, drafted in random ways,
whole or as a stream, and leaves a part of the streams. An answer is wrong if it differs from the reference,
and lost if it ends without a result and without the error that a worker's death allows. Prints a summary,
writes it and a plot of the memory, and exits with 1 if anything was wrong, lost or leaked.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.faults.watched import MODEL, ServerError, Watched, descriptors, path_of, watched

# Errors of requests that a worker's death ends, and of those that come while the next one loads.
AROUND_RESTARTS = ("worker_lost", "not_ready")
RETRY_SECONDS = 1.0
LEAVING_SHARE = 0.15
SAMPLE_SECONDS = 1.0
# The server's memory may grow by this share between the second and the last third of the time.
MAX_GROWTH = 0.05

Case = dict[str, Any]

NUM_CASES = 150
TEXTS = (
    *("Once upon a time", "The old man looked at the sea", "In the morning", "Two birds", "A"),
    *("The cat sat. " * 60, "One day a girl found a key. She went to the door and", "Tom had a red ball."),
)
# Each is part of a case with probability ``OPTION_SHARE``.
OPTIONS: dict[str, Sequence[Any]] = {
    "top_p": (0.5, 0.9),
    "top_k": (1, 20),
    "min_p": (0.05, 0.3),
    "presence_penalty": (-0.5, 1.0),
    "frequency_penalty": (0.5,),
    "repetition_penalty": (1.2,),
    "logit_bias": ({"5": -100}, {"300": 3, "301": 2.5}),
    "stop": (["."], ["the", "\n"], ["xyz", " a"]),
    "stop_token_ids": ([300, 301, 302],),
    "n": (2, 3),
    "cache_prompt": (False,),
    "truncate_prompt_tokens": (3,),
}
OPTION_SHARE = 0.12
GRAMMARS = (
    {"regex": "[A-Z][a-z]{2,9}( [a-z]{1,8}){2,20}\\."},
    {"choice": ["yes", "no", "perhaps it is"]},
    {"json": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
)
# A request may be drafted in these ways: none of them changes an answer.
WAYS: tuple[dict[str, Any], ...] = (
    *({}, {}, {}, {"method": "none"}, {"method": "ngram"}, {"num_speculative_tokens": 8}),
    *({"method": "draft_model", "num_speculative_tokens": number} for number in (1, 3, 5)),
    *({"origins": "sources"}, {"origins": True, "num_speculative_tokens": 2}),
)


def random_cases(number: int) -> list[Case]:
    """Requests with one right answer each: greedy or seeded."""
    drawn = random.Random(number)
    return [_random_case(drawn) for _ in range(number)]


def _random_case(drawn: random.Random) -> Case:
    is_chat = drawn.random() < 0.3
    case: Case = {"max_tokens": drawn.randint(8, 120)}
    if is_chat:
        case["messages"] = [{"role": "user", "content": drawn.choice(TEXTS)}]
    else:
        case["prompt"] = drawn.choice((*TEXTS, ["One day", "The dog"]))
    case |= {"temperature": 0} if drawn.random() < 0.4 else {"seed": drawn.randrange(2**31)}
    if "seed" in case:
        case["temperature"] = drawn.choice((0.4, 0.8, 1.0, 1.4))
    case |= {name: drawn.choice(values) for name, values in OPTIONS.items() if drawn.random() < OPTION_SHARE}
    if drawn.random() < OPTION_SHARE:
        case["structured_outputs"] = drawn.choice(GRAMMARS)
    elif drawn.random() < 2 * OPTION_SHARE:
        case |= drawn.choice(({"ignore_eos": True}, {"min_tokens": 8}))
    if drawn.random() < OPTION_SHARE:
        case |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    return case


@dataclass
class Sample:
    second: float
    server_mb: float
    worker_mb: float
    descriptors: int


@dataclass
class Soak:
    """What was counted; ``wrong``, ``lost`` and ``leaks`` have to stay empty.

    A request refused around a restart says so by its code. ``lost`` are those that end in any other way
    without an answer.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    kills: int = 0
    samples: list[Sample] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        sizes = [sample.server_mb for sample in self.samples]
        workers = [sample.worker_mb for sample in self.samples]
        return {
            "answered": self.outcomes["answered"],
            "answered_by_random_engines": self.outcomes["answered by random engines"],
            "left": self.outcomes["left"],
            "refused_around_restarts": {code: self.outcomes[code] for code in AROUND_RESTARTS},
            "wrong": len(self.wrong),
            "lost": len(self.lost),
            "leaks": self.leaks,
            "kills": self.kills,
            "server_mb": [round(min(sizes)), round(max(sizes))] if sizes else [],
            "worker_mb_max": round(max(workers, default=0)),
            "server_growth": round(memory_growth(sizes), 4),
        }

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.lost or self.leaks)


def soak(server: Watched, seconds: float, kill_every: float, num_clients: int, result: Soak) -> None:
    """Load ``server`` and sample its memory; afterwards everything that was taken has to be given back."""
    stop = threading.Event()
    clients = [
        threading.Thread(target=_client, args=(server, random.Random(number), result, stop))
        for number in range(num_clients)
    ]
    started = time.monotonic()
    next_kill = kill_every
    for client in clients:
        client.start()
    try:
        while (passed := time.monotonic() - started) < seconds:
            time.sleep(SAMPLE_SECONDS)
            with suppress(OSError, ValueError):  # between two workers there is none
                worker = server.worker
                result.samples.append(_sample(server.server.pid, worker, passed))
                if passed > next_kill:
                    os.kill(worker, signal.SIGKILL)
                    result.kills += 1
                    next_kill += kill_every
    finally:
        stop.set()
        for client in clients:
            client.join()
    try:
        server.assert_intact()
    except (AssertionError, ServerError) as error:
        result.leaks.append(str(error) or "not intact")
    growth = memory_growth([sample.server_mb for sample in result.samples])
    if growth > MAX_GROWTH:
        result.leaks.append(f"the server's memory grew by {growth:.1%}")


def memory_growth(sizes: Sequence[float]) -> float:
    """Returns the growth of the median from the second third to the last one; the first is warm-up."""
    third = len(sizes) // 3
    if third < 10:
        return 0.0
    return statistics.median(sizes[2 * third :]) / statistics.median(sizes[third : 2 * third]) - 1


def _client(server: Watched, drawn: random.Random, result: Soak, stop: threading.Event) -> None:
    while not stop.is_set():
        number = drawn.randrange(len(server.cases))
        case = server.cases[number] | {"speculation": drawn.choice(WAYS)}
        name = f"case {number}, {case}"
        try:
            if drawn.random() < LEAVING_SHARE:
                _leave(server, case, drawn)
                result.outcomes["left"] += 1
                continue
            texts = server.ask(case, stream=drawn.random() < 0.5)
        except ServerError as error:
            result.outcomes[str(error)] += 1
            if str(error) not in AROUND_RESTARTS:
                result.lost.append(f"{name}: {error}")
            time.sleep(RETRY_SECONDS)
        except httpx.HTTPError as error:
            result.lost.append(f"{name}: {error!r}")
        else:
            result.outcomes["answered"] += 1
            if texts != server.references[number]:
                result.wrong.append(name)


def _leave(server: Watched, case: Case, drawn: random.Random) -> None:
    """Close the connection after some lines of the stream, or before the first one."""
    with server.server.stream(path_of(case), case | {"model": MODEL}) as response:
        for _ in zip(range(drawn.randrange(6)), response.iter_lines(), strict=False):
            pass


def _sample(server: int, worker: int, second: float) -> Sample:
    return Sample(second, _resident_mb(server), _resident_mb(worker), descriptors(server))


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def plot(samples: Sequence[Sample], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    seconds = [sample.second for sample in samples]
    axes.plot(seconds, [sample.server_mb for sample in samples], label="server")
    axes.plot(seconds, [sample.worker_mb for sample in samples], label="worker (killed now and then)")
    axes.set(xlabel="seconds", ylabel="resident memory, MB", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def save(result: Soak, path: Path) -> None:
    """Saves everything as JSON, and the plot next to it."""
    details = {"wrong_cases": result.wrong, "lost_cases": result.lost}
    samples = [asdict(sample) for sample in result.samples]
    path.write_text(json.dumps(result.summary() | details | {"samples": samples}, indent=1))
    plot(result.samples, path.with_suffix(".png"))


def compare_engines(seeds: Sequence[int], result: Soak) -> None:
    """One for each of ``seeds``, with any settings and requests; what is wrong is named by its seed."""
    from tests.engine.random_runs import Pair, check, random_run

    with tempfile.TemporaryDirectory() as folder:
        pair = Pair.make(Path(folder))
        for seed in seeds:
            try:
                result.outcomes["answered by random engines"] += check(pair, random_run(seed))
            except Exception as error:
                result.wrong.append(f"random_run({seed}): {error!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--engines", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="The first random engine's.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--kill-every", type=float, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--save", type=Path, default=Path("soak.json"))
    options = parser.parse_args()
    result = Soak()
    compare_engines(range(options.seed, options.seed + options.engines), result)
    with (
        tempfile.TemporaryDirectory() as folder,
        watched(Path(folder), "--max-worker-restarts", "1000", cases=random_cases(NUM_CASES)) as server,
    ):
        soak(server, options.seconds, options.kill_every, options.clients, result)
    print(json.dumps(result.summary(), indent=2))
    save(result, options.save)
    return int(result.failed)


if __name__ == "__main__":
    sys.exit(main())
