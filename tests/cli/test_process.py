"""The command as a process: signals, closed pipes, exit codes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cli.conftest import SMALL, TINY

COMMAND = [sys.executable, "-c", "from octavo.cli.main import main; main()"]
ENDLESS = [
    *COMMAND,
    "generate",
    "Hello",
    "--raw",
    "--model",
    str(TINY),
    *SMALL,
    # Slow enough to be interrupted amid its answer.
    "--executor",
    "reference",
    "--temperature",
    "1",
]


@contextmanager
def answering() -> Iterator[subprocess.Popen[bytes]]:
    """Start a long answer and wait for its first byte."""
    options = ["--seed", "1", "--max-tokens", "1000"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*ENDLESS, *options], stdout=pipe, stderr=pipe, bufsize=0) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.read(1)
            yield process
        finally:
            process.kill()


def test_interrupt_exits_with_130_and_no_traceback() -> None:
    with answering() as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        assert process.returncode == 130
    assert b"Traceback" not in err


def test_closed_pipe_ends_quietly() -> None:
    with answering() as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait() == 1
    assert all(line.startswith(b"[") for line in err.splitlines()), err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["version"], 0), (["rm", "no-such-model"], 1), (["no-such-command"], 2)],
)
def test_exit_code(arguments: list[str], code: int) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert bool(done.stderr) == bool(code)
    assert len(done.stderr.splitlines()) <= 1
