"""An engine at the end of a socket: its port, and its life from settings to the end.

Decides that the settings are the first frame. Knows nothing of processes.

Invariant: every command that arrives is handed over once, in order.
"""

import gc
import select
import socket

import msgspec

from octavo.config import EngineConfig
from octavo.engine import clock
from octavo.engine.frames import HEADER_BYTES, FrameBuffer
from octavo.engine.loop import EngineLoop, describe_ready
from octavo.engine.messages import (
    Command,
    Event,
    Loading,
    StartFailed,
    decode_command,
    encode,
)
from octavo.engine.start import start_engine
from octavo.errors import OctavoError

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


def serve(port: SocketPort) -> None:
    """Start the engine that the first frame describes, and run it to the end of the port."""
    config = port.read_config()
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
