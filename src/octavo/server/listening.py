"""The port of a server, held before anything slow happens.

Imports little. Invariant: a port that is in use is told in one line.
"""

import socket

from octavo.errors import SettingError


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that holds a port, before anything slow happens."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise SettingError(
            f"Cannot listen at {host}:{port}: {error.strerror or error}. Choose another --port."
        ) from None
    return listener
