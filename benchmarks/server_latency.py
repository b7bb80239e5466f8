"""How fast a server answers while it streams: /livez, and the first token of one more request.

A load client keeps streams running, each long enough for the whole measurement. Beside it, this
process asks for /livez at a steady pace, and sends short requests one after another. All of them
share the machine's CPUs, so what is measured includes their waiting for one.
"""

import argparse
import http.client
import json
import random
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from benchmarks.served import IDS, MODELS, Server
from octavo.planning.load.report import Spread
from octavo.planning.machine import describe_machine

LIVEZ_EVERY = 0.05  # seconds
PAUSE = 0.2  # between a probe's answer and the next probe
PROMPT_TOKENS, ANSWER_TOKENS = 128, 1500
PATIENCE = 60.0


class Probe(threading.Thread):
    """Calls something until it is told to stop, and keeps how long each call took, in seconds."""

    def __init__(self, call: Callable[[], None], pause: float, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.seconds: list[float] = []
        self._call, self._pause, self._stop_event = call, pause, stop

    def run(self) -> None:
        """Measure."""
        while not self._stop_event.wait(self._pause):
            start = time.perf_counter()
            self._call()
            self.seconds.append(time.perf_counter() - start)

    def spread(self) -> dict[str, Any] | None:
        """Return the distribution in milliseconds."""
        found = Spread.of(self.seconds)
        return found and {"calls": len(self.seconds), **found.as_ms()}


class Caller:
    """One kept connection to a server."""

    def __init__(self, server: Server) -> None:
        address = urlsplit(server.address)
        assert address.hostname is not None
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        low, high = map(int, IDS[server.model].split("-"))
        self._ids = range(low, high)

    def livez(self) -> None:
        """Ask whether the server is alive."""
        self._connection.request("GET", "/livez")
        reply = self._connection.getresponse()
        reply.read()
        assert reply.status == 200

    def first_token(self) -> None:
        """Send a prompt and wait for the only token of its answer."""
        prompt = random.choices(self._ids, k=32)
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        self._connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        reply = self._connection.getresponse()
        reply.read()
        assert reply.status == 200

    def num_running(self) -> int:
        """Return how many requests the server's engine works at."""
        self._connection.request("GET", "/load")
        return int(json.load(self._connection.getresponse())["num_running"])


def measure(server: Server, streams: int, seconds: float) -> dict[str, Any]:
    """Return both distributions, alone and beside `streams`."""
    alone = _probe(server, min(seconds, 3.0))
    command = server.load_command(streams, streams, PROMPT_TOKENS, ANSWER_TOKENS)
    client = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await_streams(server, streams)
        beside = _probe(server, seconds)
        still_running = Caller(server).num_running()
        assert still_running >= streams, f"only {still_running} streams were left at the end"
    finally:
        client.kill()
        client.wait()
    return {"alone": alone, f"beside {streams} streams": beside}


def _await_streams(server: Server, streams: int) -> None:
    """Wait until the engine works at every stream."""
    caller, end = Caller(server), time.monotonic() + PATIENCE
    while caller.num_running() < streams:
        assert time.monotonic() < end, "the streams did not start"
        time.sleep(0.1)


def _probe(server: Server, seconds: float) -> dict[str, Any]:
    stop = threading.Event()
    livez = Probe(Caller(server).livez, LIVEZ_EVERY, stop)
    ttft = Probe(Caller(server).first_token, PAUSE, stop)
    for probe in (livez, ttft):
        probe.start()
    time.sleep(seconds)
    stop.set()
    for probe in (livez, ttft):
        probe.join()
    return {"livez_ms": livez.spread(), "ttft_ms": ttft.spread()}


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with Server(options.model, "--kv-cache-memory-bytes", str(3 << 30)) as server:
        figures = measure(server, options.streams, options.seconds)
    print(json.dumps({"machine": describe_machine(), "model": options.model, **figures}))


if __name__ == "__main__":
    main()
