"""``truedraft top``: a live view of a running server in the terminal, by ``/metrics`` and ``/speculation``.

Read once a second or so; rates are differences between two readings. Where there is no terminal, or with
``--once``, one view is printed and that is all.
"""

import json
import math
import os
import select
import sys
import termios
import time
import tty
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from truedraft.engine.terminal import console, printable
from truedraft.loadtest.options import ClientOptions

TIMEOUT_SECONDS = 5.0
NUM_RATES = 60  # readings that the line of tokens per second shows
NUM_POSITIONS = 10
BAR_WIDTH = 30
PANEL_WIDTH = 100
TWO_PAIRS_WIDTH = 80
BESIDE_BAR = 36  # columns of the panel that a bar leaves to its figures
SPARKLINE_COLUMN = 38  # where the line of tokens per second starts, and the panel's edge
SPEED_COLUMN = 22  # where the first column of figures starts
SERVER_LABELS = ("model_name", "worker")  # over which values are summed
LEVELS = " ▁▂▃▄▅▆▇█"


class TopOptions(ClientOptions):
    """Watch a running server: requests, tokens per second, acceptance, speed-up."""

    interval: float = Field(1.0, ge=0, description="Seconds between readings.")
    once: bool = Field(False, description="Print one view and exit; this is the default without a terminal.")


class UnreachableError(Exception):
    """No answer, or none that this command understands."""


@dataclass(frozen=True)
class Reading:
    """``samples``: sums by metric name without prefix, and by (name, label value)."""

    time: float
    samples: dict[str, float]
    by_label: dict[tuple[str, str], float]
    speculation: dict[str, Any]
    version: dict[str, Any]

    def total(self, name: str) -> float:
        return self.samples.get(name, 0.0)

    def at(self, name: str, label: str) -> float:
        return self.by_label.get((name, label), 0.0)

    @property
    def num_workers(self) -> float:
        return max(1.0, self.total("worker_ready"))


@dataclass
class History:
    """The last two readings, and rates of those before."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RATES))
    last: Reading | None = None
    before: Reading | None = None

    def add(self, reading: Reading) -> None:
        self.before, self.last = self.last, reading
        if self.before is not None:
            self.rates.append(self.rate("generation_tokens_total"))

    def rate(self, name: str) -> float:
        """Growth per second; 0 before there are two readings, and after a restart."""
        if self.last is None or self.before is None:
            return 0.0
        grown = self.last.total(name) - self.before.total(name)
        return max(0.0, grown) / (self.last.time - self.before.time)

    def mean(self, histogram: str) -> float | None:
        """Returns the mean since the previous reading, or since the start if nothing has come since then."""
        assert self.last is not None
        for earlier in (self.before, None):
            total, count = (
                self.last.total(f"{histogram}_{part}")
                - (earlier.total(f"{histogram}_{part}") if earlier else 0)
                for part in ("sum", "count")
            )
            if count > 0:
                return total / count
        return None


class Client:
    def __init__(self, base_url: str, api_key: str) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    def read(self) -> Reading:
        samples: dict[str, float] = {}
        by_label: dict[tuple[str, str], float] = {}
        for name, labels, value in _samples(self._get("/metrics").decode()):
            samples[name] = samples.get(name, 0.0) + value
            for label in labels:
                by_label[name, label] = by_label.get((name, label), 0.0) + value
        speculation, version = (json.loads(self._get(path)) for path in ("/speculation", "/version"))
        return Reading(time.monotonic(), samples, by_label, speculation, version)

    def _get(self, path: str) -> bytes:
        url = f"{self._base_url}{path}"
        try:
            request = urllib.request.Request(url, headers=self._headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            hint = " (give a key with --api-key)" if error.code == 401 else ""
            raise UnreachableError(f"{url} answered with status {error.code}{hint}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UnreachableError(f"No server answers at {self._base_url}: {reason}") from error


def _samples(text: str) -> Iterator[tuple[str, list[str], float]]:
    """Names without the prefix, which is what stands before ``build_info``."""
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families if family.name.endswith("build_info")]
    prefix = names[0].removesuffix("build_info") if names else ""
    for family in families:
        for sample in family.samples:
            if sample.name.startswith(prefix):
                labels = [value for name, value in sample.labels.items() if name not in SERVER_LABELS]
                yield sample.name.removeprefix(prefix), labels, sample.value


def view(history: History, width: int = PANEL_WIDTH) -> RenderableType:
    """Lays the figures out for a terminal of that many columns."""
    assert history.last is not None
    now = history.last
    width = min(width, PANEL_WIDTH)
    return Group(
        _title(now),
        _panel("requests", _figures(history, width), width),
        _panel("acceptance by position", _positions(now, width), width),
        Text(printable(f"speculation {now.speculation['why']}"), "dim", no_wrap=False),
    )


def _panel(title: str, content: RenderableType, width: int) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim", width=width)


def _title(now: Reading) -> Text:
    version = now.version
    models = f"{version['target']}, draft {version['draft']}" if version["draft"] else str(version["target"])
    is_ready = now.total("ready") == 1
    title = Text.assemble(("● ", "green" if is_ready else "yellow"), ("truedraft ", "bold"))
    where = f"{version['device']}, {version['dtype']}" if version["device"] else "loading"
    return title.append(printable(f"{version['version']}  {version['model']}: {models}; {where}"))


def _figures(history: History, width: int) -> RenderableType:
    assert history.last is not None
    now = history.last
    speedup = now.speculation["speedup"]
    figures = Table.grid(padding=(0, 3))
    pairs_a_row = 2 if width >= TWO_PAIRS_WIDTH else 1
    for _ in range(pairs_a_row):
        figures.add_column(style="dim", no_wrap=True)
        figures.add_column(no_wrap=True)

    def pair(*texts: str | Text) -> None:
        for place in range(0, len(texts), 2 * pairs_a_row):
            figures.add_row(*texts[place : place + 2 * pairs_a_row])

    running, waiting = now.total("num_requests_running"), now.total("num_requests_waiting")
    pair("running", f"{running:8.0f}", "waiting", f"{waiting:8.0f}")
    first = _milliseconds(history.mean("time_to_first_token_seconds"))
    each = _milliseconds(history.mean("inter_token_latency_seconds"))
    pair("first token", first, "per token", each)
    pair("speed-up, predicted", _times(speedup["predicted"]), "achieved", _times(speedup["achieved"]))
    drafted = now.total("spec_decode_num_draft_tokens_total")
    accepted = now.total("spec_decode_num_accepted_tokens_total")
    rate = f"{accepted / drafted:8.0%}" if drafted else "       -"
    length = now.total("num_speculative_tokens") / now.num_workers
    pair("draft length", f"{length:8.1f}", "drafts accepted", rate)
    target, draft = (
        f"{now.at('kv_cache_usage_perc', model) / now.num_workers:8.0%}" for model in ("target", "draft")
    )
    pair("cache, target", target, "cache, draft", draft)
    errors, restarts = now.total("request_errors_total"), now.total("worker_restarts_total")
    pair("errors", f"{errors:8.0f}", "worker restarts", f"{restarts:8.0f}")
    tokens = Text.assemble(("tokens/s".ljust(SPEED_COLUMN), "dim"))
    tokens.append(f"{history.rate('generation_tokens_total'):8.1f}   ").append(
        sparkline([*history.rates][-(width - SPARKLINE_COLUMN) :]), "green"
    )
    return Group(tokens, figures)


def _positions(now: Reading, width: int) -> RenderableType:
    positions = now.speculation["acceptance_by_position"][:NUM_POSITIONS]
    if not positions:
        return Text("nothing has been drafted yet", "dim")
    bar_width = min(BAR_WIDTH, max(1, width - BESIDE_BAR))
    bars = Table.grid(padding=(0, 2))
    for one in positions:
        filled = round(min(1.0, one["rate"]) * bar_width)
        bar = Text("█" * filled, "green").append("░" * (bar_width - filled), "dim")
        bars.add_row(
            f"{one['position'] + 1:>2}", bar, f"{one['rate']:4.0%}", Text(f"of {one['drafted']:,}", "dim")
        )
    return bars


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """A character for each value, as high as its share of the largest."""
    most = max(values, default=0.0) or 1.0
    return "".join(LEVELS[math.ceil(value / most * (len(LEVELS) - 1))] for value in values)


def _milliseconds(seconds: float | None) -> str:
    return "       -" if seconds is None else f"{1000 * seconds:8.1f} ms"


def _times(ratio: float | None) -> str:
    return "       -" if ratio is None else f"{ratio:8.2f} times"


def _watch(client: Client, interval: float) -> int:
    """Shows views until q or Ctrl-C, and leaves the last one on the screen. A server that does not answer is
    waited for."""
    history, status = History(), 0
    last: RenderableType = Text()
    with _keys() as pressed, Live(console=console(), screen=True, auto_refresh=False) as live:
        try:
            while not pressed("q", interval):
                try:
                    history.add(client.read())
                    last = view(history, live.console.width)
                    shown: RenderableType = Group(last, Text("q: leave", "dim"))
                except UnreachableError as error:
                    shown = Text(printable(f"{error}; trying again. q: leave"), "yellow")
                live.update(shown, refresh=True)
        except KeyboardInterrupt:
            status = 130
    console().print(last)
    return status


@contextmanager
def _keys() -> Iterator[Callable[[str, float], bool]]:
    """Reads single keys of a terminal: ``pressed(key, seconds)`` waits for one. The first call does not."""
    is_terminal, is_first = sys.stdin.isatty(), True
    before = termios.tcgetattr(sys.stdin) if is_terminal else None

    def pressed(key: str, seconds: float) -> bool:
        nonlocal is_first
        timeout, is_first = 0.0 if is_first else seconds, False
        end = time.monotonic() + timeout
        if not is_terminal:
            time.sleep(timeout)
            return False
        while select.select([sys.stdin], [], [], max(0.0, end - time.monotonic()))[0]:
            typed = os.read(sys.stdin.fileno(), 64)
            if not typed or key.encode() in typed.lower():
                return True
        return False

    try:
        if is_terminal:
            tty.setcbreak(sys.stdin, termios.TCSADRAIN)
        yield pressed
    finally:
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def main(options: TopOptions) -> int:
    client = Client(options.base_url, options.key)
    try:
        if not options.once and sys.stdout.isatty():
            return _watch(client, max(0.1, options.interval))
        history = History()
        history.add(client.read())
        time.sleep(options.interval)
        history.add(client.read())
        out = console()
        out.print(view(history, out.width))
    except UnreachableError as error:
        print(f"truedraft top: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
