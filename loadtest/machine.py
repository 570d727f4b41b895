"""Describes the machine that numbers come from, and whether it had anything else to do meanwhile."""

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# More of the processors than this, used by others, and ratios of medians begin to move.
BUSY_SHARE = 0.05
BUSY_LOAD = 0.3  # runnable processes per core before anything was started


def machine() -> dict[str, Any]:
    """A figure without this is worth nothing."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def is_busy() -> bool:
    """Is true if the machine already has work, by its load average."""
    return os.getloadavg()[0] > BUSY_LOAD * (os.cpu_count() or 1)


class CpuWatch:
    """The processors' time that others used since this was made: not this process, not ``process_ids``."""

    def __init__(self, process_ids: Sequence[int] = ()) -> None:
        self._process_ids = process_ids
        self._started = time.perf_counter()
        self._before = self._seconds()

    def others_share(self) -> float | None:
        """Share of all cores, 0 to 1; None where the system does not say."""
        if self._before is None:
            return None
        after = self._seconds()
        assert after is not None
        elapsed = (time.perf_counter() - self._started) * (os.cpu_count() or 1)
        return max(0.0, after - self._before) / elapsed

    def _seconds(self) -> float | None:
        """Busy seconds of all cores less those of the watched processes."""
        try:
            total = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        # user nice system idle iowait irq softirq steal: what was not idle, work of other machines included.
        busy = sum(int(ticks) for index, ticks in enumerate(total[:8]) if index not in (3, 4))
        own = os.times()
        children = sum(_ticks(process_id) for process_id in self._process_ids)
        return (busy - children) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def _ticks(process_id: int) -> int:
    """User and system time of one process, all its threads."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
