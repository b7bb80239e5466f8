"""What this process may use of the machine it runs on, and what it gives back.

Reads what the kernel says of memory and CPUs, limits of control groups included; decides nothing.
Invariant: an answer is never more than any of the limits that apply.
"""

import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

GIB = 1 << 30


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still use, cgroup limits included.

    root: where `proc` and `sys` are found.
    """
    return max(0, min([_free_in_machine(root), *_free_in_cgroups(root)]))


def give_back_memory() -> None:
    """Return freed memory to the machine, where the C library would keep it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_cpus(root: Path = Path("/")) -> int:
    """Return how many threads can compute at once: affinity and CPU quota, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *(int(quota) for quota in _cpu_quotas(root))]))


def cpu_model() -> str:
    """Return the CPU's name as the kernel tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the CPUs that each limit allows on average."""
    for folder in _cgroups(root, "cpu"):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text()
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)
        except (OSError, ValueError):
            continue


def _free_in_machine(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 4 * GIB  # a machine that does not say


def _free_in_cgroups(root: Path) -> Iterator[int]:
    """Yield what each memory limit leaves."""
    for folder in _cgroups(root, "memory"):
        is_v2 = (folder / "memory.max").exists()
        limit, used, cached = _V2_NAMES if is_v2 else _V1_NAMES
        try:
            text = (folder / limit).read_text().strip()
            if text != "max":
                free = int(text) - int((folder / used).read_text())
                yield free + _reclaimable(folder / "memory.stat", cached)
        except (OSError, ValueError):
            continue


_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_NAMES = ("memory.max", "memory.current", "inactive_file")


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's control group and those above it, of both versions: each may limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if not controllers:  # version 2
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = top / own.lstrip("/")
        yield from (p for p in (folder, *folder.parents) if p.is_relative_to(top))


def _reclaimable(stat: Path, name: str) -> int:
    """Return the bytes of cached files that the kernel gives back under pressure."""
    for line in stat.read_text().splitlines():
        if line.startswith(name + " "):
            return int(line.split()[1])
    return 0
