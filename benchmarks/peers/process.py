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
from typing import NamedTuple

_PROC = Path("/proc")
_GRACE_SECONDS = 15.0
_POLL_SECONDS = 0.02
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


class Stat(NamedTuple):
    """What a `stat` says of a process: state, parent, when it started, and CPU time, in ticks.

    The time of children that ended and were waited for, such as a compiler's, is the parent's.

    An id and its start together are one process for ever; an id alone is used again.
    """

    state: str
    parent: int
    started: int
    ticks: int

    @classmethod
    def of(cls, text: str) -> "Stat":
        """Read a `stat`; the name in it may hold anything."""
        fields = text.rpartition(")")[2].split()
        return cls(fields[0], int(fields[1]), int(fields[19]), sum(map(int, fields[11:15])))


def busy_ticks(stat: str) -> int:
    """Return the CPU time that all processes have used, from the text of /proc/stat.

    Its first line: user, nice, system, idle, waiting, interrupts, soft interrupts, stolen, ...
    Raises ValueError if it is not there.
    """
    name, *numbers = stat.partition("\n")[0].split()
    if name != "cpu" or len(numbers) < 8:
        raise ValueError("there is no sum of all CPUs")
    user, nice, system, _, _, interrupts, soft, stolen = map(int, numbers[:8])
    return user + nice + system + interrupts + soft + stolen


def other_cpu_seconds(tree: "ProcessTree | None") -> float:
    """Return the CPU time that all have used but for an engine and this process.

    The difference of two calls is what disturbed the engine in between; before it starts, None.
    """
    total = busy_ticks((_PROC / "stat").read_text()) / os.sysconf("SC_CLK_TCK")
    return total - sum(os.times()[:2]) - (tree.cpu_seconds() if tree else 0.0)


def descendants(root: int, parents: Mapping[int, int]) -> list[int]:
    """Return `root` and all that descend from it, parents first."""
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def _stat(process: int) -> Stat | None:
    try:
        stat = Stat.of((_PROC / str(process) / "stat").read_text())
    except OSError:
        return None
    return None if stat.state in "ZX" else stat


def _running() -> dict[int, Stat]:
    names = [entry.name for entry in _PROC.iterdir() if entry.name.isdigit()]
    stats = {int(name): _stat(int(name)) for name in names}
    return {process: stat for process, stat in stats.items() if stat is not None}


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
        return list(self._members())

    def _members(self) -> dict[int, Stat]:
        root, running = self._process.pid, _running()
        if self.returncode is not None or root not in running:
            return {}
        parents = {process: stat.parent for process, stat in running.items()}
        return {process: running[process] for process in descendants(root, parents)}

    def pss(self) -> int:
        """Return the memory of all its processes in bytes; shared pages count once in all."""
        total = 0
        for process in self.members():
            with contextlib.suppress(OSError):
                total += pss_bytes((_PROC / str(process) / "smaps_rollup").read_text())
        return total

    def cpu_seconds(self) -> float:
        """Return the CPU time that its processes have used."""
        return sum(stat.ticks for stat in self._members().values()) / os.sysconf("SC_CLK_TCK")

    def pause(self) -> None:
        """Stop all its processes where they are: an idle engine may still spin."""
        _signal(self.members(), signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        _signal(self.members(), signal.SIGCONT)

    async def stop(self) -> None:
        """End all its processes, by force if they take their time."""
        members = self._members()
        _signal(members, signal.SIGTERM)
        _signal(members, signal.SIGCONT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                while _same(members):
                    await asyncio.sleep(_POLL_SECONDS)
        _signal(_same(members), signal.SIGKILL)
        await self._process.wait()


def _same(members: Mapping[int, Stat]) -> list[int]:
    """Return those that run still, though their parent may have ended."""
    stats = {process: _stat(process) for process in members}
    return [p for p, stat in stats.items() if stat and stat.started == members[p].started]


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
