"""Native executors beside each other, beside Python's threads, and at the end of a process."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.executors.checkpoints import TINY, Piece, batch
from tests.executors.native import (
    SETS,
    RandomWeights,
    bits,
    native,
    needs_library,
    network,
    token_ids,
)

pytestmark = needs_library
ROOT = TINY.parents[2]


def thread_ticks() -> dict[int, int]:
    """Return how long each thread of this process has computed, in the kernel's ticks."""
    found = {}
    for path in Path("/proc/self/task").iterdir():
        fields = (path / "stat").read_text().rpartition(")")[2].split()
        found[int(path.name)] = int(fields[11]) + int(fields[12])
    return found


class TestThreads:
    def test_engines_of_one_process_run_at_once_and_do_not_disturb_each_other(self):
        programs = [network(heads=4), network(heads=8, window=50)]
        runs = [native(p, RandomWeights(p), SETS[0], num_threads=2) for p in programs]
        step = batch(Piece(token_ids(200), 0, 200, range(7)))
        expected = [bits(run.logits(step)) for run in runs]
        start = threading.Barrier(2)

        def work(run: Any) -> list[bytes]:
            start.wait()
            return [bits(run.logits(step)) for _ in range(10)]

        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(work, runs))
        assert found == [[wanted] * 10 for wanted in expected]

    def test_an_engine_is_used_and_closed_in_other_threads_than_it_was_made_in(self):
        program = network()
        step = batch(Piece(token_ids(50), 0, 50, range(2)))
        results = []
        for _ in range(3):
            with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
                make = partial(native, program, RandomWeights(program), SETS[0], num_threads=3)
                run = one.submit(make).result()
                results.append(bits(another.submit(run.logits, step).result()))
                results.append(bits(run.logits(step)))
                one.submit(run.close).result()
        assert len(set(results)) == 1

    @pytest.mark.case("S80")
    @pytest.mark.skipif(sys.platform != "linux", reason="reads the threads' times from /proc")
    def test_threads_of_an_engine_that_waits_take_no_time(self):
        """Else two engines on the same CPUs would slow each other even while one has no work."""
        before = thread_ticks().keys()
        program = network()
        run = native(program, RandomWeights(program), SETS[0], num_threads=3)
        step = batch(Piece(token_ids(200), 0, 200, range(7)))
        run.logits(step)
        own = thread_ticks().keys() - before
        assert len(own) == 2  # and this thread
        for _ in range(100):  # they look for work for a moment before they sleep
            ticks = thread_ticks()
            time.sleep(0.1)
            now = thread_ticks()
            if all(now[thread] == ticks[thread] for thread in own):
                break
        else:
            pytest.fail("the threads never rest")
        run.close()

    def test_other_python_threads_run_during_a_step(self):
        """With switching as good as off, another thread gets on only where a step lets it."""
        program = network(width=256, inner=1024, layers=4)
        run = native(program, RandomWeights(program), SETS[-1])
        made = batch(Piece(token_ids(1000), 0, 1000, range(32)), rows=[999])
        step = run._step(made)
        start, ran = threading.Event(), threading.Event()
        other = threading.Thread(target=lambda: start.wait() and ran.set())
        other.start()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        try:
            start.set()
            for _ in range(50):  # once would do, were the machine idle
                run._tape.run(step, 0, run._select)
                if ran.is_set():
                    break
            assert ran.is_set()
        finally:
            sys.setswitchinterval(interval)
            other.join()

    @pytest.mark.parametrize("ending", ["", "engine.close()", "del engine", "raise SystemExit(0)"])
    def test_a_process_ends_cleanly_with_an_engine_left_open(self, ending):
        code = f"""
from octavo.executors.cpu import CPUExecutor
from tests.executors.checkpoints import Piece, batch
from tests.executors.native import RandomWeights, native, network, token_ids
program = network(layers=1)
engine = native(program, RandomWeights(program), {SETS[0]!r}, num_threads=3)
print(engine.logits(batch(Piece(token_ids(9), 0, 9, [0]))).shape, flush=True)
{ending}
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "(9, 200)\n", "")
