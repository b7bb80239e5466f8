"""Starting the process that computes.

Decides how it gets its settings: as the first frame on a socket pair. Imports little, so that a
server can start its engine first and import itself meanwhile.

Invariant: a launched child belongs to one owner, who kills it; it never outlives this process.
"""

import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass

import msgspec

from octavo.config import EngineConfig
from octavo.engine import clock
from octavo.engine.frames import framed


@dataclass(frozen=True, slots=True)
class LaunchedChild:
    """A process that starts its engine. connection: our end of the socket; nothing is read yet.

    launched_at: seconds on the clock of `engine.clock`.
    """

    process: subprocess.Popen[bytes]
    connection: socket.socket
    launched_at: float

    def kill(self) -> None:
        """End and reap it; does nothing if somebody has."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def launch_child(config: EngineConfig) -> LaunchedChild:
    """Start a process with these settings. The calling thread must be one that lasts."""
    ours, theirs = socket.socketpair()
    launched_at, number = clock.monotonic(), theirs.fileno()
    command = [sys.executable, "-m", "octavo.engine.child", str(number), str(os.getpid())]
    with theirs:
        process = subprocess.Popen(
            command, pass_fds=[number], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
    ours.sendall(framed(msgspec.msgpack.encode(asdict(config))))
    ours.setblocking(False)
    return LaunchedChild(process, ours, launched_at)
