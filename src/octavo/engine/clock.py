"""The engine's sources of time: the only module that asks the machine for it.

Everything else is given a clock, so that a simulator can run the same engine on virtual time.
"""

import datetime
import time


def monotonic() -> float:
    """Return seconds on a clock that never goes back; differences are durations."""
    return time.monotonic()


def cpu_time() -> float:
    """Return the CPU seconds that this process has used, in all its threads."""
    return time.process_time()


def now() -> datetime.datetime:
    """Return the local date and time, for chat templates that show it."""
    return datetime.datetime.now().astimezone()
