"""The limits of control groups are read from trees of files like those of real containers."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from truedraft.engine.config import EngineConfig
from truedraft.engine.machine import limits as machine
from truedraft.engine.native.threads import thread_limit, usual_num_threads

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n"
UNLIMITED = "9223372036854771712"
# What a tree has: files below the root, then processors (None: no quota), memory and free memory.
CASES: dict[str, tuple[dict[str, str], float | None, int, int]] = {
    "nothing at all": ({}, None, 16 * GIB, 8 * GIB),
    "no control groups": ({"proc/self/cgroup": ""}, None, 16 * GIB, 8 * GIB),
    "version 2, a namespace": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory.high": "max\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
        },
        1.5,
        4 * GIB,
        3 * GIB,
    ),
    "version 2, the machine's own root": (
        {"proc/self/cgroup": "0::/user.slice/session-1.scope\n", "sys/fs/cgroup/cgroup.procs": ""},
        None,
        16 * GIB,
        8 * GIB,
    ),
    "version 2, a service without a namespace": (
        {
            "proc/self/cgroup": "0::/system.slice/truedraft.service\n",
            "sys/fs/cgroup/system.slice/truedraft.service/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/system.slice/truedraft.service/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/system.slice/truedraft.service/memory.current": f"{3 * GIB}\n",
        },
        2.0,
        2 * GIB,
        0,
    ),
    "version 2, a limit further up": (
        {
            "proc/self/cgroup": "0::/pods/pod-1/container-1\n",
            "sys/fs/cgroup/pods/cpu.max": "100000 100000\n",
            "sys/fs/cgroup/pods/pod-1/container-1/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pods/pod-1/memory.max": f"{6 * GIB}\n",
            "sys/fs/cgroup/pods/pod-1/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/pods/pod-1/container-1/memory.max": "max\n",
        },
        1.0,
        6 * GIB,
        GIB,
    ),
    "version 2, a limit above which it is slowed down": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.high": f"{3 * GIB}\n"},
        None,
        3 * GIB,
        3 * GIB,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{UNLIMITED}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "1000\n",
        },
        0.5,
        GIB,
        GIB - 1000,
    ),
    "version 1, only its own part of the tree can be seen": (
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu:/docker/abc\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        },
        3.0,
        GIB,
        GIB,
    ),
    "both versions, no limits": (
        {
            "proc/self/cgroup": "4:memory:/\n1:cpu:/\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{UNLIMITED}\n",
            "sys/fs/cgroup/unified/cpu.max": "max 100000\n",
        },
        None,
        16 * GIB,
        8 * GIB,
    ),
    "a parent outside of the namespace": (
        {"proc/self/cgroup": "0::/../../other\n", "sys/fs/cgroup/other/cpu.max": "100000 50000\n"},
        2.0,
        16 * GIB,
        8 * GIB,
    ),
}


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("case", CASES)
def test_limits(case: str, tmp_path: Path) -> None:
    files, quota, total, free = CASES[case]
    root = tree(tmp_path, files)
    assert machine.cpu_quota(root) == quota
    assert machine.total_memory(root) == total
    assert machine.free_memory(root) == free


@pytest.mark.parametrize(
    ("quota", "in_mask", "num_cpus", "limit"),
    [
        ("max", 8, 8, ""),
        ("50000", 8, 1, "the CPU quota is 0.5 of 8 processors"),
        ("150000", 8, 1, "the CPU quota is 1.5 of 8 processors"),
        ("200000", 8, 2, "the CPU quota is 2 of 8 processors"),
        ("800000", 8, 8, ""),
        ("max", 3, 3, "the affinity mask has 3 of 8 processors"),
        ("600000", 3, 3, "the affinity mask has 3 of 8 processors"),
        ("200000", 3, 2, "the CPU quota is 2 of 8 processors"),
    ],
)
def test_threads_follow_quota_and_mask(
    quota: str, in_mask: int, num_cpus: int, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(tmp_path, {"sys/fs/cgroup/cpu.max": f"{quota} 100000"})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(in_mask)), raising=False)
    assert machine.num_cpus(root) == num_cpus
    assert machine.cpu_limit(root) == limit


def test_the_usual_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(machine, "cpu_limit", lambda: "limited")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert usual_num_threads() == 2
    assert thread_limit(EngineConfig()) == "limited"
    assert thread_limit(EngineConfig(num_threads=3)) == ""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert usual_num_threads() == 1
    # Whoever sets it knows better.
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert usual_num_threads() == 5
    assert thread_limit(EngineConfig()) == ""


def test_this_machine() -> None:
    assert 1 <= machine.num_cpus() <= (os.cpu_count() or 1)
    assert 1 << 20 < machine.free_memory() <= machine.total_memory() < 1 << 50
    assert 1 << 20 < machine.own_memory() < machine.total_memory()


def topology(cores: Mapping[int, int], packages: int = 1) -> dict[str, str]:
    """Returns files that say in which core, and package, each processor is."""
    folder, half = "sys/devices/system/cpu", len(set(cores.values())) // packages
    return {
        f"{folder}/cpu{cpu}/topology/{name}": f"{value}\n"
        for cpu, core in cores.items()
        for name, value in (("core_id", core % half), ("physical_package_id", core // half))
    }


def capacities(*numbers: int) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{i}/cpu_capacity": f"{n}\n" for i, n in enumerate(numbers)}


CORES: dict[str, tuple[dict[str, str], int, int]] = {
    "nothing is known": ({}, 6, 6),
    "two processors a core": (topology({cpu: cpu % 8 for cpu in range(16)}), 16, 8),
    "two packages": (topology({cpu: cpu % 16 for cpu in range(32)}, packages=2), 32, 16),
    "one core of a virtual machine": (topology({0: 0, 1: 0}), 2, 2),
    "three cores": (topology({cpu: cpu // 2 for cpu in range(6)}), 6, 4),
    "a part of the processors": (topology({cpu: cpu % 8 for cpu in range(16)}), 8, 8),
    "fast cores listed": (
        topology({cpu: cpu // 2 if cpu < 12 else cpu for cpu in range(20)})
        | {"sys/devices/cpu_core/cpus": "0-11\n", "sys/devices/cpu_atom/cpus": "12-19\n"},
        20,
        6,
    ),
    "fast cores by capacity": (capacities(300, 300, 300, 300, 760, 760, 760, 1024), 8, 4),
    "equal capacities": (capacities(*[1024] * 6), 6, 6),
    "a quota": (
        topology({cpu: cpu % 8 for cpu in range(16)}) | {"sys/fs/cgroup/cpu.max": "500000 100000\n"},
        16,
        5,
    ),
}


@pytest.mark.parametrize("case", CORES)
def test_cores_that_are_worth_a_thread(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, in_mask, expected = CORES[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_mask", lambda: set(range(in_mask)))
    assert machine.num_cores(tmp_path) == expected
