"""What the set-up of a machine says, from files as a kernel writes them."""

import os
from pathlib import Path

import pytest

from octavo.planning.surroundings import findings

ALLOWED = sorted(os.sched_getaffinity(0))


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def said(root: Path, *, costs_speed: bool | None = None) -> str:
    return "\n".join(
        f.text for f in findings(root) if costs_speed is None or f.costs_speed == costs_speed
    )


def test_a_machine_that_says_nothing_costs_nothing(tmp_path: Path) -> None:
    assert said(tmp_path, costs_speed=True) == ""


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]", "huge pages"),
        ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n", "performance"),
        ("proc/loadavg", "900.5 3 2 1/100 7", "900.5"),
    ],
)
def test_what_costs_speed_is_said_with_what_to_do(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    write(tmp_path, name, text)
    assert words in said(tmp_path, costs_speed=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never"),
        ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance"),
        ("proc/loadavg", "0.00 0 0 1/1 1"),
        ("proc/loadavg", "nonsense"),
        ("proc/loadavg", ""),
    ],
)
def test_a_good_or_unreadable_set_up_costs_nothing(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, name, text)
    assert said(tmp_path, costs_speed=True) == ""


def test_a_cpu_quota_is_named(tmp_path: Path) -> None:
    if len(ALLOWED) < 2:
        pytest.skip("a quota below one CPU cannot be told from one CPU")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "100000 100000")
    assert f"allows 1 of {len(ALLOWED)} CPUs" in said(tmp_path, costs_speed=True)


def test_threads_of_one_core_are_named(tmp_path: Path) -> None:
    for cpu in ALLOWED:
        write(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", "0-99")
    is_named = "--num-threads 1" in said(tmp_path)
    assert is_named == (len(ALLOWED) > 1)


def test_several_nodes_are_named_first(tmp_path: Path) -> None:
    for node in ("node0", "node1"):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
    assert "2 NUMA nodes" in findings(tmp_path)[0].text
    assert findings(tmp_path)[0].costs_speed


def test_swap_beside_little_memory_costs_speed(tmp_path: Path) -> None:
    write(
        tmp_path,
        "proc/meminfo",
        "MemTotal: 16000000 kB\nMemAvailable: 1000 kB\nSwapTotal: 4000000 kB\n",
    )
    assert "swap" in said(tmp_path, costs_speed=True)
