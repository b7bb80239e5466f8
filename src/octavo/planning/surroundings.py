"""What in a machine's set-up costs speed.

Decides what is worth saying about affinity, quotas, memory limits, huge pages, clock governors,
NUMA and load, and what to do about it. Reads the kernel's files and measures nothing.

Invariant: a file that is missing or unreadable says nothing.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.engine.machine import available_cpus, available_memory

GIB = 1 << 30
_CPUS = "sys/devices/system/cpu"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about the set-up. costs_speed: whether it does; `text` then says what to do."""

    text: str
    costs_speed: bool = False


def findings(root: Path = Path("/")) -> list[Finding]:
    """Return what the set-up says, worst first. root: where `proc` and `sys` are found."""
    found = [
        *_cpus(root),
        *_memory(root),
        *_huge_pages(root),
        *_governor(root),
        *_siblings(root),
        *_nodes(root),
        *_load(root),
    ]
    return sorted(found, key=lambda finding: not finding.costs_speed)


def _cpus(root: Path) -> Iterator[Finding]:
    allowed, usable = len(os.sched_getaffinity(0)), available_cpus(root)
    present = os.cpu_count() or allowed
    if allowed < present:
        yield Finding(f"affinity allows {allowed} of {present} CPUs")
    if usable < allowed:
        yield Finding(
            f"a CPU quota allows {usable} of {allowed} CPUs: threads beyond it are stopped in the "
            "middle of a step. Raise the quota, or leave num_threads as it is",
            costs_speed=True,
        )
    else:
        yield Finding(f"{usable} CPUs may be used, without a quota below that")


def _memory(root: Path) -> Iterator[Finding]:
    free = available_memory(root)
    total = _meminfo(root, "MemTotal:")
    yield Finding(f"{free / GIB:.1f} GiB of {total / GIB:.1f} GiB memory may still be used")
    if _meminfo(root, "SwapTotal:") and free < total / 10:
        yield Finding(
            "little memory is free and there is swap: weights or pages that are swapped out cost "
            "milliseconds each. Free memory",
            costs_speed=True,
        )


def _huge_pages(root: Path) -> Iterator[Finding]:
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        yield Finding(
            "transparent huge pages are off: streaming weights loses up to a quarter of the "
            "bandwidth. Write madvise to /sys/kernel/mm/transparent_hugepage/enabled",
            costs_speed=True,
        )
    elif chosen:
        yield Finding(f"transparent huge pages: {chosen}")


def _governor(root: Path) -> Iterator[Finding]:
    governor = _read(root / _CPUS / "cpu0/cpufreq/scaling_governor")
    if governor in ("powersave", "conservative", "ondemand"):
        yield Finding(
            f"the clock governor is {governor}: clocks rise late. Set it to performance",
            costs_speed=governor != "ondemand",
        )


def _siblings(root: Path) -> Iterator[Finding]:
    """Threads of one core share its arithmetic and gain little."""
    allowed = os.sched_getaffinity(0)
    cores = {_read(root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list") for cpu in allowed}
    if "" not in cores and len(cores) < len(allowed):
        yield Finding(
            f"{len(allowed)} CPUs are threads of {len(cores)} cores: products gain little from the "
            f"second thread of a core. Try --num-threads {len(cores)}"
        )


def _nodes(root: Path) -> Iterator[Finding]:
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) > 1:
        yield Finding(
            f"{len(nodes)} NUMA nodes: weights that lie at another node are read slower. Start one "
            "octavo per node, each with numactl --cpunodebind and --membind",
            costs_speed=True,
        )


def _load(root: Path) -> Iterator[Finding]:
    words = _read(root / "proc/loadavg").split()
    try:
        load = float(words[0])
    except (IndexError, ValueError):
        return
    if load > 0.5 * available_cpus(root):
        yield Finding(
            f"other programs are busy (load {load:.1f} on {available_cpus(root)} CPUs): the "
            "figures below are lower than this machine's. Measure again when it is idle",
            costs_speed=True,
        )


def _meminfo(root: Path, name: str) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
