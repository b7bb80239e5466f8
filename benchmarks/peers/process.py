"""A process and all that it started: to start, to pause, to weigh and to end.

Decides who belongs to an engine: the process, its children and theirs, whatever session they are
in. Invariant: only processes that were started here are ever signalled.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_PROC = Path("/proc")
_GRACE_SECONDS = 15
# Of one line of a worker's reply.
_LINE_BYTES = 1 << 26


def pss_bytes(rollup: str) -> int:
    """Return the proportional set size from the text of a `smaps_rollup`.

    Raises ValueError if it does not tell one.
    """
    for line in rollup.splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss":
            number, unit = rest.split()
            if unit != "kB":
                raise ValueError(f"PSS in {unit}")
            return int(number) * 1024
    raise ValueError("there is no Pss")


def parent_of(stat: str) -> int:
    """Return the parent's id from the text of a `stat`; the name before it may hold anything."""
    return int(stat.rpartition(")")[2].split()[1])


def descendants(root: int, parents: Mapping[int, int]) -> list[int]:
    """Return `root` and all that descend from it, parents first."""
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def _parents() -> dict[int, int]:
    parents = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it may have ended
                parents[int(entry.name)] = parent_of((entry / "stat").read_text())
    return parents


class ProcessTree:
    """One engine's processes. `log` has what they printed."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    async def start(
        cls, argv: Sequence[str], environment: Mapping[str, str], log: Path, *, piped: bool
    ) -> "ProcessTree":
        """Start a command. piped: its stdin and stdout are for `write_line` and `read_line`."""
        pipe = asyncio.subprocess.PIPE
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=pipe if piped else asyncio.subprocess.DEVNULL,
                stdout=pipe if piped else output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
                limit=_LINE_BYTES,
            )
        return cls(process, log)

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.returncode

    async def write_line(self, line: str) -> None:
        """Send a line to stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        await self._process.stdin.drain()

    async def read_line(self) -> str:
        """Return the next line of stdout, "" if there will be none."""
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode()

    def members(self) -> list[int]:
        """Return the ids of its processes, none if it ended."""
        return [] if self.returncode is not None else descendants(self._process.pid, _parents())

    def pss(self) -> int:
        """Return the memory of all its processes in bytes; shared pages count once in all."""
        total = 0
        for process in self.members():
            with contextlib.suppress(OSError):
                total += pss_bytes((_PROC / str(process) / "smaps_rollup").read_text())
        return total

    def pause(self) -> None:
        """Stop all its processes where they are: an idle engine may still spin."""
        _signal(self.members(), signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        _signal(self.members(), signal.SIGCONT)

    async def stop(self) -> None:
        """End all its processes, by force if they take their time."""
        members = self.members()
        _signal(members, signal.SIGTERM)
        _signal(members, signal.SIGCONT)
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._process.wait()
        except TimeoutError:
            pass
        _signal(self._still_running(members), signal.SIGKILL)
        await self._process.wait()

    def _still_running(self, members: Iterable[int]) -> list[int]:
        """Return those that live on; of an ended parent, children that were its members count."""
        session = self._process.pid
        alive = []
        for process in members:
            with contextlib.suppress(OSError):
                if process == session or os.getsid(process) == session:
                    alive.append(process)
        return alive


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
