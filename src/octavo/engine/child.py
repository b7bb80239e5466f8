"""The process that computes: `python -m octavo.engine.child SOCKET PARENT`.

Decides how the process is tied to its parent: it dies with it, whatever way the parent goes, and
leaves ^C and SIGTERM to it. Starts the engine and runs its loop over a socket.

Invariant: when the parent is gone, so is this process, within a step.
"""

import ctypes
import gc
import os
import select
import signal
import socket
import sys

import msgspec

from octavo.config import EngineConfig
from octavo.engine.frames import HEADER_BYTES, FrameBuffer
from octavo.engine.messages import (
    Command,
    Event,
    Loading,
    StartFailed,
    decode_command,
    encode,
)
from octavo.errors import OctavoError

PR_SET_PDEATHSIG = 1
RECEIVE_BYTES = 1 << 20


class SocketPort:
    """A stream socket as the port of an engine loop."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameBuffer()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def read_config(self) -> EngineConfig:
        """Return the settings, which are the first frame."""
        size = int.from_bytes(self._read_exactly(HEADER_BYTES), "little")
        return EngineConfig.from_dict(msgspec.msgpack.decode(self._read_exactly(size)))

    def receive(self, *, wait: bool) -> list[Command]:
        """See `Port`."""
        commands: list[Command] = []
        while True:
            if not self._poll.poll(None if wait and not commands else 0):
                return commands
            received = self._connection.recv(RECEIVE_BYTES)
            if not received:
                raise EOFError
            commands += map(decode_command, self._frames.push(received))

    def send(self, event: Event) -> None:
        """See `Port`; waits while the parent does not read."""
        try:
            self._connection.sendall(encode(event))
        except OSError:
            raise EOFError from None

    def _read_exactly(self, size: int) -> bytes:
        content = self._connection.recv(size, socket.MSG_WAITALL)
        if len(content) < size:
            raise EOFError
        return content


def tie_to_parent(parent: int) -> None:
    """Die when the process `parent` dies; leave the signals of a terminal or service to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the tie was made
        sys.exit(0)


def serve(port: SocketPort) -> None:
    """Start the engine that the first frame describes, and run it to the end of the port."""
    config = port.read_config()
    port.send(Loading("the engine is being imported"))
    # These take a while, and the parent wants to hear from the process first.
    from octavo.engine import clock
    from octavo.engine.loop import EngineLoop, describe_ready
    from octavo.engine.start import start_engine

    port.send(Loading("the weights are being read and packed"))
    try:
        started = start_engine(config, encodes=False)
    except OctavoError as error:
        port.send(StartFailed(error))
        return
    gc.freeze()  # what lives as long as the process need not be looked at again
    port.send(describe_ready(started))
    try:
        EngineLoop(started.engine, port, clock.monotonic).run()
    finally:
        started.engine.close()


def main() -> None:
    """Run with the number of an open socket and of the parent process as arguments."""
    descriptor, parent = map(int, sys.argv[1:3])
    tie_to_parent(parent)
    try:
        serve(SocketPort(socket.socket(fileno=descriptor)))
    except EOFError:
        return


if __name__ == "__main__":
    main()
