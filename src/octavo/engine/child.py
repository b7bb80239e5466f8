"""The process that computes: `python -m octavo.engine.child SOCKET PARENT`.

Decides how the process is tied to its parent: it dies with it, whatever way the parent goes, and
leaves ^C and SIGTERM to it. That comes first; then it imports the engine, reads its settings from
the socket, and runs.

Invariant: when the parent is gone, so is this process, within a step.
"""

import ctypes
import gc
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1
GC_THRESHOLD = 20_000  # see octavo/cli/main.py


def tie_to_parent(parent: int) -> None:
    """Die when the process `parent` dies; leave the signals of a terminal or service to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the tie was made
        sys.exit(0)


def main() -> None:
    """Run with the number of an open socket and of the parent process as arguments."""
    descriptor, parent = map(int, sys.argv[1:3])
    tie_to_parent(parent)
    gc.set_threshold(GC_THRESHOLD)
    # Nothing here multiplies with BLAS in threads, and those that wait for work spin.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from octavo.engine.port import SocketPort, serve

    try:
        serve(SocketPort(socket.socket(fileno=descriptor)))
    except EOFError:
        return


if __name__ == "__main__":
    main()
