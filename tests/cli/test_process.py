"""The command as a process: signals, closed pipes, exit codes."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cli.conftest import SMALL, TINY, Octavo
from tests.server.serving import children_of, is_alive, wait_for

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


# --- the engine's process, which starts before anything of `serve` is checked --------------------


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--no-such-flag"], 2, "no-such-flag"),
        (["--port", "many"], 2, "--port"),
        (["--block-size", "17"], 1, "block_size"),
        (["no-such-model"], 1, "Unknown model"),
        (["no/such/model"], 1, "There is no file or folder"),
        (["-h"], 2, "-h"),
        (["--help"], 0, ""),
    ],
)
def test_a_server_that_cannot_start_leaves_no_engine(
    octavo: Octavo, arguments: list[str], code: int, told: str
) -> None:
    before = set(children_of(os.getpid()))
    done = octavo("serve", "--port", "0", *arguments)
    assert (done.code, told in done.err) == (code, True), done.err
    assert set(children_of(os.getpid())) <= before


def test_a_port_in_use_is_told_and_leaves_no_engine(octavo: Octavo) -> None:
    before = set(children_of(os.getpid()))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = octavo("serve", str(TINY), "--host", "127.0.0.1", "--port", port)
    assert done.code == 1
    assert "Cannot listen" in done.err
    assert set(children_of(os.getpid())) <= before


def test_interrupt_while_a_server_starts_ends_both_processes_quietly() -> None:
    command = [*COMMAND, "serve", str(TINY), "--port", "0", *SMALL]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            wait_for(lambda: children_of(process.pid), "the engine's process starts")
            (child,) = children_of(process.pid)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate()
        finally:
            process.kill()
    assert process.returncode in (0, 130)  # 0 once it serves
    assert b"Traceback" not in err
    assert not is_alive(child)
