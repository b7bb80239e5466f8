"""How long the server answers nothing else while it takes in a large body of each kind.

Bodies go to an idle server one after another. Beside them this process asks for /livez without a
pause; the longest of its replies is the stall, which includes the wait for a CPU.
"""

import argparse
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from benchmarks.served import MODELS, Server
from octavo.planning.machine import describe_machine

PATHS = {"input": "/v1/embeddings", "messages": "/v1/chat/completions", "tokens": "/detokenize"}


def kinds(number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a name and the fields of each kind of body, with about `number` values."""
    names = {str(i): 1.5 for i in range(number)}
    yield "ids", {"prompt": [7] * number}
    yield "ids, the last a text", {"prompt": [7] * (number - 1) + ["x"]}
    yield "texts", {"prompt": ["x"] * number}
    yield "lists of one id", {"prompt": [[7]] * (number // 2)}
    yield "floats", {"prompt": [1.5] * number}
    yield "objects", {"prompt": [{}] * (number // 2)}
    yield "inputs", {"input": ["x"] * number}
    yield "tokens, none of them an id", {"tokens": ["x"] * number}
    yield "tokens", {"tokens": [7] * number}
    yield "messages", {"messages": [{"role": "user"}] * (number // 3)}
    yield "parts", {"messages": [{"role": "user", "content": [{"type": "text"}] * (number // 3)}]}
    yield "tools", {"messages": [{"role": "user", "content": "x"}], "tools": [{}] * (number // 2)}
    yield "biases", {"prompt": "x", "logit_bias": names}
    yield "biases of texts", {"prompt": "x", "logit_bias": dict.fromkeys(names, "x")}
    yield "allowed ids", {"prompt": "x", "allowed_token_ids": [7] * number}
    yield "bad words", {"prompt": "x", "bad_words": ["x y"] * number}
    yield "choices", {"prompt": "x", "structured_outputs": {"choice": ["x"] * number}}
    yield "schema", {"prompt": "x", "structured_outputs": {"json": {"enum": [7] * number}}}
    yield "unknown fields", {"prompt": "x", **{f"x{name}": 1 for name in names}}
    yield "one long text", {"prompt": "Hello, world. " * number}
    yield "one long salt", {"prompt": "x", "cache_salt": "Hello, world. " * number}
    yield "one long message", {"messages": [{"role": "user", "content": "a, b. " * number}]}


class Pulse(threading.Thread):
    """Asks for /livez again and again, and keeps the longest time that one took, in seconds."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.longest = 0.0
        self._connection = connect(server)
        self._stop_event = threading.Event()

    def run(self) -> None:
        """Measure."""
        while not self._stop_event.is_set():
            start = time.perf_counter()
            self._connection.request("GET", "/livez")
            self._connection.getresponse().read()
            self.longest = max(self.longest, time.perf_counter() - start)

    def stop(self) -> None:
        """End."""
        self._stop_event.set()
        self.join()


def connect(server: Server) -> http.client.HTTPConnection:
    """Return a connection to a server."""
    address = urlsplit(server.address)
    assert address.hostname is not None
    return http.client.HTTPConnection(address.hostname, address.port, timeout=120)


def stall(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    """Send one body; return its size, what came of it, and the longest wait for /livez."""
    path = next((PATHS[name] for name in PATHS if name in fields), "/v1/completions")
    body = json.dumps({**fields, "max_tokens": 1}, separators=(",", ":"))
    connection, pulse = connect(server), Pulse(server)
    pulse.start()
    connection.request("POST", path, body, {"content-type": "application/json"})
    reply = connection.getresponse()
    reply.read()
    pulse.stop()
    return {
        "mb": round(len(body) / 1e6, 1),
        "status": reply.status,
        "stall_ms": round(1e3 * pulse.longest, 1),
    }


def main() -> None:
    """Print one JSON document; a kind of body per line on the way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--values", type=int, nargs="+", default=[75_000, 145_000, 1_000_000])
    options = parser.parse_args()
    rows = []
    with Server(options.model) as server:
        for number in options.values:
            for name, fields in kinds(number):
                rows.append({"kind": name, "values": number, **stall(server, fields)})
                print(json.dumps(rows[-1]), flush=True)
    longest = max(row["stall_ms"] for row in rows)
    print(json.dumps({"machine": describe_machine(), "longest_ms": longest}))


if __name__ == "__main__":
    main()
