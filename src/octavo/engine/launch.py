"""Starting the process that computes.

Decides how it gets its settings: as the first frame on a socket pair. Imports next to nothing, so
that a server can start its engine before it knows its own settings, and import itself meanwhile.

Invariant: a launched child belongs to one owner, who kills it; it never outlives this process.
"""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from octavo.engine import clock
from octavo.engine.frames import framed

if TYPE_CHECKING:
    from octavo.config import EngineConfig


class LaunchedChild(NamedTuple):
    """A process that imports its engine, and starts it once it is configured.

    connection: our end of the socket; nothing is read yet. launched_at: seconds on the clock of
    `engine.clock`.
    """

    process: "subprocess.Popen[bytes]"
    connection: socket.socket
    launched_at: float

    def configure(self, config: "EngineConfig") -> None:
        """Send the settings; one that has ended already is found out by who reads from it."""
        from dataclasses import asdict

        import msgspec

        with suppress(BrokenPipeError):
            self.connection.sendall(framed(msgspec.msgpack.encode(asdict(config))))
        self.connection.setblocking(False)

    def kill(self) -> None:
        """End and reap it; does nothing if somebody has."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def launch_child(config: "EngineConfig") -> LaunchedChild:
    """Start a process with these settings. The calling thread must be one that lasts."""
    child = start_child()
    child.configure(config)
    return child


def start_child() -> LaunchedChild:
    """Start a process that waits for its settings. The calling thread must be one that lasts."""
    ours, theirs = socket.socketpair()
    launched_at, number = clock.monotonic(), theirs.fileno()
    command = [sys.executable, "-m", "octavo.engine.child", str(number), str(os.getpid())]
    with theirs:
        process = subprocess.Popen(
            command, pass_fds=[number], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
    return LaunchedChild(process, ours, launched_at)
