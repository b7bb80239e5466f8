import asyncio
import os
import signal
import sys

import pytest

from benchmarks.peers.process import (
    ProcessTree,
    Stat,
    busy_ticks,
    descendants,
    other_cpu_seconds,
    pss_bytes,
)

ROLLUP = "00400000-7fff [rollup]\nRss:  1200 kB\nPss:    321 kB\nPss_Dirty:  7 kB\n"


def test_pss_is_the_line_of_that_name_in_bytes():
    assert pss_bytes(ROLLUP) == 321 * 1024


@pytest.mark.parametrize("text", ["", "Rss: 1 kB\nPss_Dirty: 7 kB\n", "Pss: 3 MB\n", "Pss: x kB\n"])
def test_a_rollup_without_a_pss_in_kilobytes_is_refused(text):
    with pytest.raises(ValueError):
        pss_bytes(text)


def test_parent_and_start_are_found_behind_a_name_with_blanks_and_brackets():
    text = "12 (a) b (c) S 7 " + " ".join(map(str, range(5, 53)))
    assert Stat.of(text) == Stat("S", 7, 22, 14 + 15 + 16 + 17)


def test_a_tree_has_children_and_theirs_and_no_one_else():
    parents = {1: 0, 10: 1, 11: 10, 12: 11, 20: 1}
    assert descendants(10, parents) == [10, 11, 12]


NESTED = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], {options})
print(child.pid, flush=True)
time.sleep(600)
"""


def start(tmp_path, code):
    argv = [sys.executable, "-c", code]
    return ProcessTree.start(argv, {}, tmp_path / "log", piped=True)


def state_of(process):
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def is_running(process):
    try:
        return state_of(process) not in "ZX"
    except FileNotFoundError:
        return False


async def until(holds):
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def test_stopping_ends_the_children_too(tmp_path):
    async def go():
        tree = await start(tmp_path, NESTED.format(options=""))
        child = int(await tree.read_line())
        assert child in tree.members()
        assert tree.pss() > 0
        tree.pause()
        await until(lambda: state_of(child) == "T")
        tree.resume()
        await until(lambda: state_of(child) != "T")
        await tree.stop()
        return child, tree

    child, tree = asyncio.run(go())
    assert not is_running(child)
    assert tree.members() == []
    assert tree.pss() == 0


def test_a_process_that_ignores_the_request_to_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.peers.process._GRACE_SECONDS", 0.1)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print(flush=True); time.sleep(600)"
    )

    async def go():
        tree = await start(tmp_path, deaf)
        await tree.read_line()
        await tree.stop()
        return tree.returncode

    assert asyncio.run(go()) == -signal.SIGKILL


def test_what_has_ended_can_be_paused_weighed_and_stopped(tmp_path):
    async def go():
        tree = await start(tmp_path, "pass")
        assert await tree.read_line() == ""
        await tree.stop()
        tree.pause()
        tree.resume()
        return tree.pss()

    assert asyncio.run(go()) == 0


def test_a_child_in_a_session_of_its_own_is_ended_too(tmp_path):
    async def go():
        tree = await start(tmp_path, NESTED.format(options="start_new_session=True"))
        child = int(await tree.read_line())
        assert os.getsid(child) == child
        await tree.stop()
        return child

    assert not is_running(asyncio.run(go()))


def test_busy_is_all_but_idle_and_waiting():
    assert busy_ticks("cpu  1 2 4 1000 2000 8 16 32 5 5\ncpu0 1 1 1 1 1 1 1 1\n") == 63


@pytest.mark.parametrize(
    "text", ["", "cpu0 1 2 3 4 5 6 7 8\n", "cpu 1 2 3\n", "cpu a b c d e f g h\n"]
)
def test_a_sum_of_all_cpus_that_is_not_there_is_refused(text):
    with pytest.raises(ValueError):
        busy_ticks(text)


SPIN = """
import time
input()
while time.process_time() < 1: pass
print(flush=True)
input()
"""


def test_an_engines_own_work_is_not_that_of_others(tmp_path):
    """One of two processes works for a second: only to the other one is that the work of others."""

    async def go():
        busy, idle = await start(tmp_path, SPIN), await start(tmp_path, SPIN)
        before = other_cpu_seconds(busy), other_cpu_seconds(idle)
        await busy.write_line("")
        await busy.read_line()
        own, seen = other_cpu_seconds(busy) - before[0], other_cpu_seconds(idle) - before[1]
        await busy.stop()
        await idle.stop()
        return own, seen

    own, seen = asyncio.run(go())
    assert seen - own == pytest.approx(1.0, abs=0.2)
