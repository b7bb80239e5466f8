"""How tests make servers: in a thread of this process, or as `octavo serve` in its own."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

import httpx2

from octavo.config import EngineConfig, ServerConfig
from octavo.engine.client import ThreadClient
from octavo.engine.frames import HEADER_BYTES
from octavo.engine.messages import (
    Command,
    Event,
    decode_command,
    decode_event,
    encode,
)
from octavo.native import library
from octavo.server.app import Route, routes
from octavo.server.listening import listen
from octavo.server.run import http_server
from octavo.server.service import Service
from tests.engines import TINY

PATIENCE = 60.0


def engine_config(name: str = "llama", **settings: Any) -> EngineConfig:
    """Settings of a tiny model on one thread."""
    defaults: dict[str, Any] = {"num_gpu_blocks_override": 128, "block_size": 16}
    if library is not None:
        defaults["num_threads"] = 1
    return EngineConfig.from_dict({"model": str(TINY / name), **defaults, **settings})


class Calls(httpx2.Client):
    """An HTTP client that knows the two routes that generate."""

    def complete(self, prompt: Any = "The sky", **fields: Any) -> dict[str, Any]:
        """Return a whole completion."""
        return checked(self.post("/v1/completions", json=completion(prompt, **fields)))

    def stream(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As in httpx."""
        return super().stream(*args, **kwargs)

    def events(self, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks of a stream, which must end with [DONE]."""
        with self.stream("POST", path, json={**fields, "stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            events = list(read_events(reply))
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def refusal(self, path: str, fields: Any, status: int = 400) -> dict[str, Any]:
        """Return the error of a request that must be refused with `status`."""
        reply = self.post(path, json=fields)
        assert reply.status_code == status, reply.text
        error: dict[str, Any] = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def checked(reply: httpx2.Response) -> dict[str, Any]:
    """Return a good reply's JSON."""
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def read_events(reply: httpx2.Response) -> Iterator[str]:
    """Yield the content of each `data:` line."""
    for line in reply.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def completion(prompt: Any = "The sky", **fields: Any) -> dict[str, Any]:
    """A greedy completion of 8 tokens that no end token cuts short."""
    defaults = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return {**defaults, **fields}


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    """A greedy chat turn of 8 tokens that no end token cuts short."""
    messages = [{"role": "user", "content": text}]
    defaults = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return {**defaults, **fields}


class WireClient(ThreadClient):
    """A thread's engine whose messages take the form they have between processes."""

    def _send(self, command: Command) -> None:
        super()._send(decode_command(encode(command)[HEADER_BYTES:]))

    def _deliver(self, event: Event) -> None:
        super()._deliver(decode_event(encode(event)[HEADER_BYTES:]))


class ThreadServer:
    """A server in a thread, with its engine in another; `service` is what it serves."""

    def __init__(self, engine: EngineConfig | None = None, **settings: Any) -> None:
        self._engine = engine or engine_config()
        self._config = ServerConfig.from_dict({"served_model_name": "tiny", **settings})
        self._listener = listen("127.0.0.1", 0)
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.service: Service
        self.client: ThreadClient
        self.loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> str:
        """Where it listens."""
        host, port = self._listener.getsockname()
        return f"http://{host}:{port}"

    def calls(self, **options: Any) -> Calls:
        """Return a client for it."""
        return Calls(base_url=self.address, timeout=PATIENCE, trust_env=False, **options)

    @property
    def service_routes(self) -> list[Route]:
        """The table of its routes."""
        return routes(self.service)

    @property
    def engine(self) -> Any:
        """The engine inside; read it only while nothing runs."""
        return self.client._engine

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._is_up.wait(0.01):
            assert self._thread.is_alive(), "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._leave)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _leave(self) -> None:
        self._uvicorn.should_exit = True

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.client = WireClient(self._engine)
        self.service = Service(self.client, self._config)
        self._uvicorn = http_server(self.service)
        await self.client.start()
        serving = asyncio.create_task(self._uvicorn.serve([self._listener]))
        while not self._uvicorn.started:
            await asyncio.sleep(0.001)
        self._is_up.set()
        try:
            await serving
        finally:
            await self.client.close()
            self._listener.close()


class ProcessServer:
    """`octavo serve` in a process of its own, its engine in another."""

    def __init__(self, *options: str, reference: str = str(TINY / "llama")) -> None:
        self._command = [
            *(sys.executable, "-c", "from octavo.cli.main import main; main()"),
            *("serve", reference, "--port", "0", "--served-model-name", "tiny"),
            *("--num-gpu-blocks-override", "128", "--block-size", "16"),
            *(("--num-threads", "1") if library is not None else ()),
            *options,
        ]
        self.lines: list[str] = []
        self.address = ""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if found := re.search(r"Ready: .* at (https?://\S+)/v1", line):
                self.address = found[1]
                break
        if not self.address:
            self.process.wait(PATIENCE)
            self.process.stderr.close()
            raise AssertionError(self.lines)
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,))
        self._reader.start()
        return self

    def _read(self, stderr: Any) -> None:
        for line in stderr:
            self.lines.append(line.rstrip())

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def calls(self, **options: Any) -> Calls:
        """Return a client for it."""
        return Calls(base_url=self.address, timeout=PATIENCE, trust_env=False, **options)

    @property
    def child(self) -> int:
        """Process id of its engine."""
        (pid,) = children_of(self.process.pid)
        return pid

    def terminate(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


def children_of(pid: int) -> list[int]:
    """Return the child processes of one, on Linux."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += [int(word) for word in file.read().split()]
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Any, what: str) -> None:
    """Poll another process, which cannot tell this one."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        threading.Event().wait(0.02)
