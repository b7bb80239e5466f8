"""What this process may use, on machines described by files."""

import os
import platform
import subprocess
import sys

import pytest

from octavo.engine.machine import GIB, available_cpus, available_memory, give_back_memory


class TestAvailableMemory:
    """A machine of 64 GiB, of which 40 are free."""

    @pytest.fixture
    def root(self, tmp_path):
        write(tmp_path / "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {40 << 20} kB\n")
        return tmp_path

    def test_what_the_machine_has_free_without_a_limit(self, root):
        assert available_memory(root) == 40 * GIB
        write(root / "proc/self/cgroup", "0::/user\n")
        write(root / "sys/fs/cgroup/user/memory.max", "max\n")
        assert available_memory(root) == 40 * GIB

    @pytest.mark.case("V13")
    def test_a_cgroup_of_4_gib_counts_less_what_it_uses(self, root):
        write(root / "proc/self/cgroup", "0::/pod/own\n")
        folder = root / "sys/fs/cgroup/pod/own"
        write(folder / "memory.max", f"{4 * GIB}\n")
        write(folder / "memory.current", f"{3 * GIB}\n")
        write(folder / "memory.stat", f"anon 5\ninactive_file {GIB}\n")
        assert available_memory(root) == 2 * GIB

    @pytest.mark.case("V13")
    def test_a_limit_further_up_counts_too(self, root):
        write(root / "proc/self/cgroup", "0::/pod/own\n")
        write(root / "sys/fs/cgroup/pod/own/memory.max", "max")
        folder = root / "sys/fs/cgroup/pod"
        write(folder / "memory.max", f"{4 * GIB}\n")
        write(folder / "memory.current", f"{GIB}\n")
        write(folder / "memory.stat", "inactive_file 0\n")
        assert available_memory(root) == 3 * GIB

    @pytest.mark.case("V13")
    def test_cgroups_of_version_1_count_too(self, root):
        write(root / "proc/self/cgroup", "5:cpu:/\n4:cpuset,memory:/own\n0::/\n")
        folder = root / "sys/fs/cgroup/memory/own"
        write(folder / "memory.limit_in_bytes", f"{4 * GIB}\n")
        write(folder / "memory.usage_in_bytes", f"{3 * GIB}\n")
        write(folder / "memory.stat", f"total_inactive_file {GIB}\n")
        assert available_memory(root) == 2 * GIB

    def test_a_limit_that_is_used_up_leaves_nothing(self, root):
        write(root / "proc/self/cgroup", "0::/\n")
        write(root / "sys/fs/cgroup/memory.max", f"{GIB}\n")
        write(root / "sys/fs/cgroup/memory.current", f"{2 * GIB}\n")
        write(root / "sys/fs/cgroup/memory.stat", "")
        assert available_memory(root) == 0

    def test_files_that_are_missing_or_strange_are_passed_over(self, tmp_path):
        assert available_memory(tmp_path) == 4 * GIB
        write(tmp_path / "proc/meminfo", "MemAvailable: lots kB\n")
        write(tmp_path / "proc/self/cgroup", "0::/../..\n4:memory:/x\n")
        write(tmp_path / "sys/fs/cgroup/memory/x/memory.limit_in_bytes", "none")
        assert available_memory(tmp_path) == 4 * GIB

    def test_this_machine_has_something_free(self):
        assert available_memory() > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and needs glibc")
def test_freed_memory_goes_back_to_the_machine():
    """In a process of its own, whose heap nothing else has used. 100 MB in pieces, every 50th of
    which stays, so that the heap cannot just be cut short."""
    program = """
import os
from octavo.engine.machine import give_back_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

pieces = [bytes(10_000) for _ in range(10_000)]
kept = pieces[::50]
full = resident()
del pieces
give_back_memory()
print(full - resident())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    if platform.libc_ver()[0] == "glibc":
        assert int(done.stdout) > 80_000_000


def test_memory_can_be_given_back_at_any_time():
    give_back_memory()
    give_back_memory()


class TestAvailableCpus:
    """A process that may run on four CPUs."""

    @pytest.fixture(autouse=True)
    def four_cpus(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})

    def test_affinity_counts_without_a_quota(self, tmp_path):
        assert available_cpus(tmp_path) == 4
        write(tmp_path / "proc/self/cgroup", "0::/pod\n")
        write(tmp_path / "sys/fs/cgroup/pod/cpu.max", "max 100000\n")
        assert available_cpus(tmp_path) == 4

    @pytest.mark.case("S80")
    @pytest.mark.parametrize(
        ("quota", "cpus"), [(50_000, 1), (100_000, 1), (250_000, 2), (900_000, 4)]
    )
    def test_a_quota_counts_in_whole_cpus_and_at_least_one(self, tmp_path, quota, cpus):
        write(tmp_path / "proc/self/cgroup", "0::/pod/own\n")
        write(tmp_path / "sys/fs/cgroup/pod/cpu.max", f"{quota} 100000\n")
        assert available_cpus(tmp_path) == cpus

    def test_a_quota_of_version_1_counts_too(self, tmp_path):
        write(tmp_path / "proc/self/cgroup", "3:cpu,cpuacct:/own\n")
        folder = tmp_path / "sys/fs/cgroup/cpu/own"
        write(folder / "cpu.cfs_quota_us", "200000\n")
        write(folder / "cpu.cfs_period_us", "100000\n")
        assert available_cpus(tmp_path) == 2
        write(folder / "cpu.cfs_quota_us", "-1\n")
        assert available_cpus(tmp_path) == 4

    def test_files_that_are_strange_are_passed_over(self, tmp_path):
        write(tmp_path / "proc/self/cgroup", "0::/\n")
        write(tmp_path / "sys/fs/cgroup/cpu.max", "lots\n")
        assert available_cpus(tmp_path) == 4


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
