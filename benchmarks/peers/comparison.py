"""Runs works by engines, in turns, into a record.

Decides the order: repeat by repeat, and within one engine after engine, so that a machine that
slows down slows all alike. Engines stay loaded between their turns and are stopped in their tracks
meanwhile. Invariant: while one engine works no other runs; at the end none is left.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.engines import Command, Engine, EngineError, now
from benchmarks.peers.figures import Figures, figures_of
from benchmarks.peers.peer import Peer
from benchmarks.peers.process import other_cpu_seconds
from benchmarks.peers.record import Record, RunResult
from benchmarks.peers.work import VOCABULARY, Work
from octavo.planning.throughput import Load

_WARM_TOKENS = 8
# What a fresh process is asked: a question for the first token, then one to touch its memory.
_FIRST = Load(streams=1, prompt_tokens=16, output_tokens=1, num_requests=1)
_SECOND = Load(streams=1, prompt_tokens=128, output_tokens=16, num_requests=1)


class _Loaded(NamedTuple):
    command: Command
    engine: Engine


class Comparison:
    """One go at a record; what is in it already is not run again.

    limit: seconds after which a run is cut, and beyond which none is repeated. logs: folder for
    what the engines print.
    """

    def __init__(self, record: Record, peers: Sequence[Peer], *, limit: float, logs: Path) -> None:
        self._record = record
        self._peers = peers
        self._limit = limit
        self._logs = logs
        self._loaded: dict[str, _Loaded] = {}
        self._given_up: set[tuple[str, str | Command]] = set()

    async def run(self, works: Sequence[Work], repeats: int) -> None:
        """Make every run that the record needs."""
        try:
            for work in works:
                for repeat in range(1, repeats + 1):
                    for peer in self._peers:
                        if self._is_due(work, peer, repeat):
                            await self._run_one(work, peer, repeat)
        finally:
            await self._unload_all()

    def _is_due(self, work: Work, peer: Peer, repeat: int) -> bool:
        is_hopeless = (peer.name, work.name) in self._given_up
        return not is_hopeless and self._record.needs(work.name, peer.name, repeat, self._limit)

    async def _run_one(self, work: Work, peer: Peer, repeat: int) -> None:
        try:
            figures, cut = await self._measure(work, peer, repeat)
            result = RunResult(
                work=work.name, peer=peer.name, repeat=repeat, figures=figures, cut=cut
            )
        except EngineError as error:
            await self._unload(peer.name)
            self._given_up.add((peer.name, work.name))
            result = RunResult(work=work.name, peer=peer.name, repeat=repeat, error=str(error))
        self._record.add(result)
        _tell(work, result)

    async def _measure(self, work: Work, peer: Peer, repeat: int) -> tuple[Figures, bool]:
        command = peer.command(work)
        self._record.keep_command(peer.name, work.name, str(command))
        if (peer.name, command) in self._given_up:
            raise EngineError("it did not start before")
        if work.load is None:
            await self._unload_all()  # pages of a file count by half while two have it
            return await self._measure_start(peer, command), False
        engine = await self._load(peer, command)
        engine.tree.resume()
        figures, cut = await self._measure_load(engine, work, work.load, repeat)
        engine.tree.pause()
        return figures, cut

    async def _load(self, peer: Peer, command: Command) -> Engine:
        """Return the peer's engine, started with this command now or for an earlier work."""
        loaded = self._loaded.get(peer.name)
        if loaded is not None and loaded.command == command:
            return loaded.engine
        await self._unload(peer.name)
        engine = await self._start(peer, command)
        self._loaded[peer.name] = _Loaded(command, engine)
        return engine

    async def _start(self, peer: Peer, command: Command) -> Engine:
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            return await Engine.start(command, self._logs / f"{peer.name}.log")
        except EngineError:
            self._given_up.add((peer.name, command))
            raise

    async def _unload(self, name: str) -> None:
        loaded = self._loaded.pop(name, None)
        if loaded is not None:
            await loaded.engine.stop()

    async def _unload_all(self) -> None:
        for name in list(self._loaded):
            await self._unload(name)

    async def _measure_load(
        self, engine: Engine, work: Work, load: Load, repeat: int
    ) -> tuple[Figures, bool]:
        shared, prompts = work.prompts(repeat)
        _, warm = load.prompts(1, VOCABULARY, f"{work.name}/{repeat}/warm")
        tokens = min(_WARM_TOKENS, load.output_tokens)
        await engine.run(warm, streams=1, output_tokens=tokens, limit=self._limit)
        if shared:  # its blocks are in the cache from here on
            await engine.run([shared], streams=1, output_tokens=1, limit=self._limit)
        before = other_cpu_seconds(engine.tree)
        seen = await engine.run(
            prompts, streams=load.streams, output_tokens=load.output_tokens, limit=self._limit
        )
        others = max(0.0, other_cpu_seconds(engine.tree) - before) / seen.seconds
        return {**figures_of(seen), "other_cpus": others}, seen.cut

    async def _measure_start(self, peer: Peer, command: Command) -> Figures:
        begun, before = now(), other_cpu_seconds(None)
        engine = await self._start(peer, command)
        try:
            ready = now()
            loaded = engine.tree.pss()
            weighing = now() - ready
            first = (await self._answer(engine, _FIRST))[0]
            await self._answer(engine, _SECOND)
            seconds = now() - begun
            return {
                "seconds": seconds,
                "other_cpus": max(0.0, other_cpu_seconds(engine.tree) - before) / seconds,
                "ready_s": ready - begun,
                "start_s": first - begun - weighing,
                "loaded_gb": loaded / 1e9,
                "answered_gb": engine.tree.pss() / 1e9,
            }
        finally:
            await engine.stop()

    async def _answer(self, engine: Engine, load: Load) -> list[float]:
        """Return when first tokens came; workers' clocks are the system's, as ours is."""
        _, prompts = load.prompts(1, VOCABULARY, "start")
        seen = await engine.run(
            prompts, streams=1, output_tokens=load.output_tokens, limit=self._limit
        )
        found = [answer.first for answer in seen.answers if answer.first is not None]
        if not found:
            raise EngineError(f"no token after {self._limit:.0f} s")
        return found


def _tell(work: Work, result: RunResult) -> None:
    shown = result.error or ", ".join(
        f"{row.figure} {result.figures[row.figure]:,.{row.digits}f}"
        for row in work.rows
        if row.figure in result.figures
    )
    cut = " (cut)" if result.cut else ""
    cut += " (disturbed)" if result.was_disturbed else ""
    print(f"[{work.name} {result.repeat}: {result.peer}: {shown}{cut}]", file=sys.stderr)
