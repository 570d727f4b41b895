"""This module finds what the process may use of its machine: processors and memory.

A container's limits are files of its control group, and of each one above that. Where control groups have a
namespace, the own one is the root of ``/sys/fs/cgroup``; else ``/proc/self/cgroup`` says where it is below.
Version 2 has one tree, version 1 one for each controller. Whatever is not there sets no limit.
"""

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
# What is assumed where nothing says how much there is.
USUAL_MEMORY = 8 << 30


def num_cpus(root: Path = ROOT) -> int:
    """Counts the processors that can be kept busy: those of the affinity mask, or whole ones of the quota."""
    quota = cpu_quota(root)
    num_allowed = _num_in_mask()
    return num_allowed if quota is None else max(1, min(num_allowed, int(quota)))


def cpu_limit(root: Path = ROOT) -> str:
    """Says why these are fewer than the machine has; empty if they are not."""
    num_installed, num_allowed, quota = os.cpu_count() or 1, _num_in_mask(), cpu_quota(root)
    if quota is not None and int(quota) < num_allowed:
        return f"the CPU quota is {quota:g} of {num_installed} processors"
    if num_allowed < num_installed:
        return f"the affinity mask has {num_allowed} of {num_installed} processors"
    return ""


def cpu_quota(root: Path = ROOT) -> float | None:
    """Returns how many processors' worth of time there is; None without a limit."""
    quotas = []
    for group in _groups("cpu", root):
        match _words(group / "cpu.max") or [
            *_words(group / "cpu.cfs_quota_us"),
            *_words(group / "cpu.cfs_period_us"),
        ]:
            case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period):
                quotas.append(int(quota) / int(period))  # else "max", or -1
    return min(quotas, default=None)


def total_memory(root: Path = ROOT) -> int:
    """Returns the bytes that the machine has, or that the control groups allow."""
    limits = [limit for limit, _ in _memory_limits(root)]
    return min([_meminfo("MemTotal", root) or _physical_memory(), *limits])


def free_memory(root: Path = ROOT) -> int:
    """Returns the bytes that can be had now without swapping, file caches of the machine included."""
    available = _meminfo("MemAvailable", root)
    left = [max(0, limit - used) for limit, used in _memory_limits(root)]
    return min([USUAL_MEMORY if available is None else available, *left])


def own_memory(root: Path = ROOT) -> int:
    """Returns the bytes that this process has in memory."""
    numbers = _words(root / "proc/self/statm")
    return int(numbers[1]) * os.sysconf("SC_PAGE_SIZE") if len(numbers) > 1 else 0


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields each limit with what is used of it."""
    for group in _groups("memory", root):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.high", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            match _words(group / limit):
                case [number] if number.isdecimal():
                    yield int(number), int((_words(group / used) or ["0"])[0])


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yields the folders of the process's own control group and of those above it, where they may be seen."""
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/", f"1:{controller}:/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            trees = [mounted, mounted / "unified"]
        elif controller in controllers.split(","):
            trees = [mounted / controller, mounted / controllers]
        else:
            continue
        for tree in trees:
            yield tree
            for name in path.split("/"):
                if name not in ("", ".."):
                    tree /= name
                    yield tree


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _meminfo(name: str, root: Path) -> int | None:
    words = _words(root / "proc/meminfo")
    return 1024 * int(words[words.index(f"{name}:") + 1]) if f"{name}:" in words else None


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return USUAL_MEMORY


def _num_in_mask() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
