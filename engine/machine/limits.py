"""Finds what the process may use of its machine: processors and memory.

A container's limits are files of its control group, and of each one above that. Where control groups have a
namespace, the own one is the root of ``/sys/fs/cgroup``; else ``/proc/self/cgroup`` says where it is below.
Version 2 has one tree, version 1 one for each controller. A missing file sets no limit.
"""

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
# This much memory is assumed where nothing says how much there is.
USUAL_MEMORY = 8 << 30
# Below this many cores their second processors count, too. A core with less than this share of a fast core's
# capacity is a slow one.
LEAST_CORES, SHARE_OF_FASTEST = 4, 0.6


def num_cpus(root: Path = ROOT) -> int:
    """Counts the processors that can be kept busy: those of the affinity mask, or the quota rounded to whole
    ones."""
    quota = cpu_quota(root)
    num_allowed = _num_in_mask()
    return num_allowed if quota is None else max(1, min(num_allowed, int(quota)))


def num_cores(root: Path = ROOT) -> int:
    """Counts the cores that are worth a thread each: of the processors that the process may use, those of the
    fast kind where there are two, one of each core, and no more than the quota. Few processors count as they
    are: two of a virtual machine may be both halves of one core."""
    allowed = _mask()
    fast = _fast(allowed, root)
    cores = {_core(cpu, root) for cpu in fast}
    number = len(cores) if len(cores) >= LEAST_CORES else min(len(allowed), max(len(cores), LEAST_CORES))
    return min(number, num_cpus(root))


def _fast(allowed: set[int], root: Path) -> set[int]:
    """Returns the performance cores' processors: Intel lists them, Arm gives each a capacity."""
    listed = _listed(root / "sys/devices/cpu_core/cpus") & allowed
    if listed:
        return listed
    folder = root / "sys/devices/system/cpu"
    found = {cpu: _words(folder / f"cpu{cpu}/cpu_capacity") for cpu in allowed}
    capacities = {cpu: int(words[0]) for cpu, words in found.items() if words and words[0].isdecimal()}
    most = max(capacities.values(), default=0)
    return {cpu for cpu in allowed if capacities.get(cpu, most) >= SHARE_OF_FASTEST * most}


def _core(cpu: int, root: Path) -> tuple[str, ...]:
    """Returns a value that processors of the same core share."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    words = [*_words(topology / "physical_package_id"), *_words(topology / "core_id")]
    return tuple(words) if len(words) == 2 else ("processor", str(cpu))


def _listed(path: Path) -> set[int]:
    """Reads a list such as 0-7,16."""
    numbers: set[int] = set()
    for part in (_words(path) or [""])[0].split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            numbers |= set(range(int(first), int(last if last.isdecimal() else first) + 1))
    return numbers


def cpu_limit(root: Path = ROOT) -> str:
    """Says why there are fewer processors than the machine has; empty if there are not."""
    num_installed, num_allowed, quota = os.cpu_count() or 1, _num_in_mask(), cpu_quota(root)
    if quota is not None and int(quota) < num_allowed:
        return f"the CPU quota is {quota:g} of {num_installed} processors"
    if num_allowed < num_installed:
        return f"the affinity mask has {num_allowed} of {num_installed} processors"
    return ""


def cpu_quota(root: Path = ROOT) -> float | None:
    """Returns the number of processors whose time the quota allows; None without a limit."""
    quotas = []
    for group in _groups("cpu", root):
        match _words(group / "cpu.max") or [
            *_words(group / "cpu.cfs_quota_us"),
            *_words(group / "cpu.cfs_period_us"),
        ]:
            case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period):
                quotas.append(int(quota) / int(period))  # Without a limit this is "max", or -1.
    return min(quotas, default=None)


def total_memory(root: Path = ROOT) -> int:
    """Returns the bytes that the machine has, or that the control groups allow."""
    limits = [limit for limit, _ in _memory_limits(root)]
    return min([_meminfo("MemTotal", root) or _physical_memory(), *limits])


def free_memory(root: Path = ROOT) -> int:
    """Returns the bytes that can be allocated now without swapping; the machine's file caches count as
    free."""
    available = _meminfo("MemAvailable", root)
    left = [max(0, limit - used) for limit, used in _memory_limits(root)]
    return min([USUAL_MEMORY if available is None else available, *left])


def own_memory(root: Path = ROOT) -> int:
    """Returns the bytes that this process has in memory."""
    numbers = _words(root / "proc/self/statm")
    return int(numbers[1]) * os.sysconf("SC_PAGE_SIZE") if len(numbers) > 1 else 0


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields each limit and how much of it is used."""
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
    return len(_mask())


def _mask() -> set[int]:
    """Returns the processors that the process may use."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))
