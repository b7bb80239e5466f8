"""A started engine, over HTTP or in a worker's process: start, run, weigh, stop.

Decides how long to wait and what a first token is. The two kinds of engine differ in how they are
asked, and in nothing else. Knows no engine by name.

Invariant: whoever starts one stops it; a failed start leaves no process behind.
"""

import asyncio
import json
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import client
from benchmarks.peers.figures import Seen
from benchmarks.peers.install import last_line
from benchmarks.peers.process import ProcessTree

# vLLM compiles for minutes when it starts for the first time.
START_SECONDS = 400.0
_POLL_SECONDS = 0.01
# Beyond a run's limit, until a worker that does not answer is given up.
_PATIENCE_SECONDS = 60.0

Prompts = Sequence[list[int]]


class EngineError(Exception):
    """An engine that did not start, or did not do what it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How to start an engine.

    argv: "{port}" in it becomes the port. model: what requests call the model; None for a worker,
    which is told its prompts through a pipe. ready: the path that answers 200 when it is. As text
    it is what a shell takes, with port 8000 and without the folders of this machine.
    """

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    model: str | None = None
    ready: str = "/health"

    def __str__(self) -> str:
        settings = [f"{name}={value}" for name, value in self.environment]
        argv = [part.replace("{port}", "8000") for part in self.argv]
        shown = shlex.join([*settings, *argv])
        return shown.replace(f"{Path.cwd()}/", "").replace(str(Path.home()), "~")


@dataclass(slots=True)
class Engine:
    """A running engine. `about` is what it told of itself when it was ready."""

    command: Command
    tree: ProcessTree
    port: int
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    async def start(cls, command: Command, log: Path) -> "Engine":
        """Start an engine and wait until it is ready; raises EngineError."""
        port = _free_port()
        argv = [part.replace("{port}", str(port)) for part in command.argv]
        is_worker = command.model is None
        tree = await ProcessTree.start(argv, dict(command.environment), log, piped=is_worker)
        engine = cls(command, tree, port)
        try:
            async with asyncio.timeout(START_SECONDS):
                await (engine._hear_ready() if is_worker else engine._poll_ready())
        except TimeoutError:
            await tree.stop()
            raise EngineError(f"not ready after {START_SECONDS:.0f} s (see {log})") from None
        except BaseException:
            await tree.stop()
            raise
        return engine

    async def _hear_ready(self) -> None:
        self.about = (await self._read()).get("about", {})

    async def _poll_ready(self) -> None:
        while not await client.is_ready(self.port, self.command.ready):
            if self.tree.returncode is not None:
                raise self._ended()
            await asyncio.sleep(_POLL_SECONDS)

    async def _read(self) -> dict[str, Any]:
        line = await self.tree.read_line()
        if not line:
            raise self._ended()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineError(reply["error"])
        return reply

    def _ended(self) -> EngineError:
        return EngineError(f"its process ended: {last_line(self.tree.log)} (see {self.tree.log})")

    async def run(
        self, prompts: Prompts, *, streams: int, output_tokens: int, limit: float
    ) -> Seen:
        """Answer all prompts, `streams` at a time; raises EngineError."""
        asked = {"streams": streams, "output_tokens": output_tokens, "limit": limit}
        try:
            async with asyncio.timeout(limit + _PATIENCE_SECONDS):
                if self.command.model is None:
                    await self.tree.write_line(json.dumps({"prompts": list(prompts), **asked}))
                    return Seen.from_json(await self._read())
                return await client.run_streams(
                    self.port,
                    self.command.model,
                    prompts,
                    streams=streams,
                    output_tokens=output_tokens,
                    limit=limit,
                )
        except TimeoutError:
            raise EngineError(f"no answer after {limit + _PATIENCE_SECONDS:.0f} s") from None
        except (client.ReplyError, OSError) as error:
            raise EngineError(f"{type(error).__name__}: {error}") from None

    async def stop(self) -> None:
        """End it."""
        await self.tree.stop()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((client.HOST, 0))
        port: int = found.getsockname()[1]
        return port


def now() -> float:
    """Return seconds on the clock of the comparison."""
    return time.perf_counter()
