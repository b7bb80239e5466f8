"""The `octavo` command: what comes before its menu is imported, and how it ends.

Imports next to nothing, so that a server's engine starts first: its process imports and loads while
this one imports the menu and the server.

Invariant: however a command ends, a process that was started here has ended.
"""

import gc
import os
import signal
import sys

from octavo.engine.launch import LaunchedChild, start_child

# Starting makes hundreds of thousands of objects that stay: looking for garbage among them every
# 700 would take a tenth of the time.
GC_THRESHOLD = 20_000


def main() -> None:
    """Run the command line; the exit code is 0, 1 for an error, 2 for wrong usage, 130 for ^C."""
    gc.set_threshold(GC_THRESHOLD)
    # Nothing here multiplies with BLAS in threads, and those that wait for work spin.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    arguments = sys.argv[1:] or ["--help"]
    # A ^C waits until the process is known that has to be ended, which never gets one itself.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    launched = _launch(arguments)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        from octavo.cli.commands import run_line

        code = run_line(arguments, launched)
    except KeyboardInterrupt:
        code = 130
    finally:
        if launched is not None:
            launched.kill()
    sys.exit(code)


def _launch(arguments: list[str]) -> LaunchedChild | None:
    """Start the engine's process of a server whose arguments nobody has checked yet."""
    if arguments[0] != "serve" or {"--help", "--no-engine-process"} & set(arguments):
        return None
    try:
        return start_child()
    except OSError:
        return None  # it is tried again, and told, when an engine is really needed
