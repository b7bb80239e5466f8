"""`make bench`: reads what is wanted, installs it, runs it and prints the record."""

import argparse
import asyncio
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.peers.comparison import Comparison
from benchmarks.peers.install import UnavailableError
from benchmarks.peers.llama import LlamaServer
from benchmarks.peers.octavo import Octavo, OctavoServer
from benchmarks.peers.openvino import OpenVINO
from benchmarks.peers.peer import Peer
from benchmarks.peers.record import Record, RecordError
from benchmarks.peers.table import render
from benchmarks.peers.vllm import VLLM
from benchmarks.peers.work import WORKS
from octavo.errors import OctavoError, nearest
from octavo.native import library
from octavo.planning.machine import describe_machine

_CACHE = Path("~/.cache/octavo-bench").expanduser()
_LIMIT_SECONDS = 60.0
_REPEATS = 3


class UsageError(Exception):
    """What was asked for cannot be; the message says what can."""


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


def choose(named: Sequence[N], wanted: str, what: str) -> list[N]:
    """Return those of the names in "a,b" or "a b", in the order of `named`; all if none is named.

    Raises UsageError for a name that is not there.
    """
    names = wanted.replace(",", " ").split()
    known = [each.name for each in named]
    for name in names:
        if name not in known:
            raise UsageError(
                f"There is no {what} {name!r}.{nearest(name, known)} Known: {', '.join(known)}."
            )
    return [each for each in named if not names or each.name in names]


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Return Octavo's settings from NAME=VALUE; a value is JSON where it can be, else text."""
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"A setting is NAME=VALUE, not {pair!r}.")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


@contextmanager
def timing_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of all timed runs on this machine; raises UsageError if another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "timing.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise UsageError(
                f"Process {lock.read().strip() or '(unknown)'} is timing on this machine. Wait "
                "until it ends."
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def install(peers: Sequence[Peer]) -> dict[str, str | None]:
    """Install engines; return for each why it is missing, or None if it is there."""
    missing: dict[str, str | None] = {}
    for peer in peers:
        print(f"[{peer.name}: installing, if it is not there yet]", file=sys.stderr)
        try:
            peer.install()
            missing[peer.name] = None
        except (UnavailableError, OctavoError, OSError) as error:
            missing[peer.name] = str(error)
            print(f"[{peer.name} is missing: {error}]", file=sys.stderr)
    return missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; returns 2 for a wrong question, 1 if a run of Octavo failed."""
    options = _parser().parse_args(arguments)
    try:
        return _compare(options)
    except (UsageError, RecordError) as error:
        print(error, file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("Stopped. The same command goes on from here.", file=sys.stderr)
        return 130


def _compare(options: argparse.Namespace) -> int:
    cache: Path = options.cache
    settings = parse_settings(options.setting)
    works = choose(WORKS, options.work, "work")
    known: list[Peer] = [
        Octavo(cache, settings),
        OctavoServer(cache, settings),
        LlamaServer(cache),
        OpenVINO(cache),
        VLLM(cache),
    ]
    peers = choose(known, options.peers, "peer")
    path = options.record or cache / ("quick.json" if options.quick else "record.json")
    if options.fresh:
        path.unlink(missing_ok=True)
    if options.install:
        return int(any(install(peers).values()))
    begun = {
        **describe_machine(),
        "instruction_set": library.instruction_sets()[0] if library else "none",
        "limit_s": options.limit,
        "settings": settings,
    }
    record = Record.open(path, begun)
    missing = install(peers)
    for peer in peers:
        why = missing[peer.name]
        record.describe_peer(peer.name, peer.title, {} if why else peer.versions(), why)
    ready = [peer for peer in peers if missing[peer.name] is None]
    started = time.perf_counter()
    with timing_lock(cache):
        comparison = Comparison(record, ready, limit=options.limit, logs=cache / "logs")
        asyncio.run(_until_told(comparison.run(works, 1 if options.quick else _REPEATS)))
    print(f"[{(time.perf_counter() - started) / 60:.1f} minutes; {path}]", file=sys.stderr)
    print(render(record, works))
    if options.json:
        print(json.dumps(record.as_json()))
    return int(any(run.error and run.peer.startswith("octavo") for run in record.runs))


async def _until_told(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end, or until a signal says to stop: engines are ended in either case."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await task


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    add = parser.add_argument
    add("--work", default="", help=f"some of: {' '.join(work.name for work in WORKS)}")
    add("--peers", default="", help="some of: octavo octavo-http llama openvino vllm")
    add("--quick", action="store_true", help="one repeat, in a record of its own")
    add("--fresh", action="store_true", help="forget the runs of an earlier, unfinished go")
    add("--install", action="store_true", help="install the engines and stop")
    add("--json", action="store_true", help="print the record too")
    add("--record", type=Path, help="the file to go on with")
    add("--limit", type=float, default=_LIMIT_SECONDS, help="seconds after which a run is cut")
    add("--setting", action="append", default=[], help="NAME=VALUE for Octavo, repeatable")
    add("--cache", type=Path, default=_CACHE, help="where engines and models are kept")
    return parser


if __name__ == "__main__":
    sys.exit(main())
