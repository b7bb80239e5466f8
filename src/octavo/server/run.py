"""Serving until a signal: the engine, uvicorn, and the way out.

Decides the order of starting and stopping. Knows neither routes nor bodies.

Invariant: when `serve` returns or raises, no engine that it started is left running.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from octavo.config import EngineConfig, ServerConfig
from octavo.engine.client import EngineClient, ThreadClient
from octavo.engine.launch import LaunchedChild
from octavo.engine.machine import give_back_memory
from octavo.engine.supervisor import ChildClient
from octavo.errors import OctavoError
from octavo.server.app import create_app
from octavo.server.service import Service

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 60  # longer than clients keep idle connections, so that none meets its end
LOADING_SECONDS = 3.0  # a start that takes longer says what it is doing
SETTLING_SECONDS = (
    0.5  # the first requests often come at once, and no thread should be in their way
)
Tell = Callable[[str], None]


def serve(
    engine: EngineConfig,
    server: ServerConfig,
    listener: socket.socket,
    tell: Tell,
    launched: LaunchedChild | None = None,
) -> None:
    """Serve a model at `listener` until SIGTERM or ^C; `tell` hears what happens, line by line.

    launched: the engine's process, where it runs already. Raises a `StartupError` or
    ModelNotFoundError where the engine cannot start.
    """
    client = make_client(engine, server, launched)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_Serving(client, server, listener, tell).run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    return uvloop.new_event_loop


class _Server(uvicorn.Server):
    """uvicorn without its own signals: `_Serving` drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def http_server(service: Service) -> uvicorn.Server:
    """Return what serves the application over HTTP; it leaves signals alone."""
    config = service.config
    return _Server(
        uvicorn.Config(
            create_app(service),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            http="httptools",
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=2,
            root_path=config.root_path,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
        )
    )


class _Serving:
    """One run of the server."""

    def __init__(
        self, client: EngineClient, server: ServerConfig, listener: socket.socket, tell: Tell
    ) -> None:
        self._config = server
        self._listener = listener
        self._tell = tell
        self._client = client
        self._service = Service(self._client, server)
        self._stopping: asyncio.Task[None] | None = None
        self._uvicorn = http_server(self._service)

    async def run(self) -> None:
        """Serve to the end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        serving = asyncio.create_task(self._uvicorn.serve([self._listener]))
        starting = asyncio.create_task(self._start())
        try:
            await asyncio.wait([serving, starting], return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not starting.cancelled():
                starting.result()
            await serving
        finally:
            starting.cancel()
            self._uvicorn.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(starting, return_exceptions=True)
            await self._client.close()
            await serving

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        patience = loop.call_later(LOADING_SECONDS, self._tell_loading)
        # Beside the engine's load: no first text waits for it, and damage shows before it is ready.
        encoding = asyncio.create_task(asyncio.to_thread(self._prepare_encoding))
        try:
            await self._client.start()
            await encoding
        finally:
            patience.cancel()
        give_back_memory()
        for reason in self._client.reasons:
            self._tell(reason)
        names = ", ".join(self._service.model_names)
        self._tell(f"Ready: {names} at {self._address()}/v1, its pages at {self._address()}/docs")
        await asyncio.sleep(SETTLING_SECONDS)
        await asyncio.to_thread(self._prepare)
        gc.freeze()  # what lives as long as the server need not be looked at again

    def _prepare_encoding(self) -> None:
        """Build what turns text into tokens; a ModelFileError if the tokenizer is damaged."""
        if self._client.face.tokenizer is not None:
            self._client.face.tokenizer.prepare()

    def _prepare(self) -> None:
        """Make what takes so long that no later request should wait for it.

        A request that comes before makes what it needs itself.
        """
        app, face = self._uvicorn.config.app, self._client.face
        assert isinstance(app, FastAPI)
        app.openapi()
        for with_tools in (False, True):
            with contextlib.suppress(OctavoError):  # it is told to who wants to chat
                face.chat.source(with_tools=with_tools)

    def _tell_loading(self) -> None:
        why = self._client.status.reason
        self._tell(f"Listening at {self._address()}; requests get 503 for now: {why}.")

    def _address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._config.ssl_certfile else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def _stop(self, number: int) -> None:
        """Drain at the first signal, leave at the second."""
        if self._stopping is not None:
            self._uvicorn.should_exit = self._uvicorn.force_exit = True
            self._stopping.cancel()
            return
        # First: whoever read what is told may be gone, and telling fail.
        self._stopping = asyncio.get_running_loop().create_task(self._drain())
        num_open = self._service.admission.num_open
        self._tell(
            f"{signal.Signals(number).name}: no new requests; {num_open} running have "
            f"{self._config.shutdown_timeout:g} s to finish."
        )

    async def _drain(self) -> None:
        await self._service.drain()
        self._uvicorn.should_exit = True


def make_client(
    engine: EngineConfig, server: ServerConfig, launched: LaunchedChild | None = None
) -> EngineClient:
    """Return the client that the settings ask for, not yet started."""
    if not server.engine_process:
        return ThreadClient(engine)
    return ChildClient(engine, step_timeout=server.step_timeout, launched=launched)


def log_to_stderr() -> None:
    """Send the server's log lines to standard error, with a time."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for name, level in (("octavo", logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.addHandler(handler)
        log.setLevel(level)
        log.propagate = False
