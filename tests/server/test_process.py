"""`octavo serve` as processes: deaths, hangs, signals."""

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engines import greedy, only, tiny
from tests.server.serving import (
    PATIENCE,
    Calls,
    ProcessServer,
    children_of,
    completion,
    is_alive,
    read_events,
)

PATH = "/v1/completions"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
LONG = completion(max_tokens=1000, stream=True)


def wait_for(condition: Any, what: str) -> None:
    """Poll another process, which cannot tell this one."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        threading.Event().wait(0.02)


def is_ready(calls: Calls) -> bool:
    return calls.get("/readyz").status_code == 200


def run_streams(server: ProcessServer, number: int, disturb: Any) -> list[list[str]]:
    """Start streams, disturb the server once each has begun, and return their events."""
    begun = threading.Barrier(number + 1)

    def stream() -> list[str]:
        with server.calls() as calls, calls.stream("POST", PATH, json=LONG) as reply:
            events = read_events(reply)
            received = [next(events)]
            begun.wait(PATIENCE)
            return received + list(events)

    with ThreadPoolExecutor(number) as pool:
        streams = [pool.submit(stream) for _ in range(number)]
        begun.wait(PATIENCE)
        disturb()
        return [each.result(PATIENCE) for each in streams]


@pytest.mark.case("V51", "S63")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_engine_that_dies_or_hangs_is_replaced(number: signal.Signals) -> None:
    options = ("--step-timeout", "0.5", "--max-num-seqs", "16", "--num-gpu-blocks-override", "2048")
    with ProcessServer(*options) as server, server.calls() as calls:
        old = server.child
        # A stopped engine needs work to be seen to hang: streams of a thousand tokens are enough.
        streams = run_streams(server, 16, lambda: os.kill(old, number))
        for events in streams:
            *before, last = map(json.loads, events)
            assert last["error"]["code"] == "engine_dead"
            assert last["error"]["status"] == 503
            assert not any("error" in event for event in before)
        wait_for(lambda: is_ready(calls), "the engine comes back")
        assert not is_alive(old)
        assert children_of(server.process.pid) == [server.child]
        assert server.child != old
        assert calls.complete()["choices"][0]["text"]
        assert calls.get("/load").json()["num_restarts"] == 1


@pytest.mark.case("V51")
def test_server_without_an_engine_says_so_with_retry_after() -> None:
    with ProcessServer() as server, server.calls() as calls:
        old = server.child
        os.kill(old, signal.SIGKILL)
        replies = []
        wait_for(lambda: replies.append(calls.get("/readyz")) or replies[-1].status_code != 200, "")
        assert "retry-after" in replies[-1].headers
        assert calls.get("/livez").status_code == 200
        wait_for(lambda: is_ready(calls), "the engine comes back")


def test_engine_that_keeps_dying_is_given_up_with_a_reason() -> None:
    with ProcessServer() as server, server.calls() as calls:
        for _ in range(4):
            wait_for(lambda: is_ready(calls), "the engine comes back")
            os.kill(server.child, signal.SIGKILL)
            wait_for(lambda: not is_ready(calls), "its death is seen")
        wait_for(lambda: calls.get("/livez").status_code == 503, "the engine is given up")
        message = calls.refusal(PATH, completion(), 503)["message"]
        assert "restarted 3 times" in message
        assert "signal 9" in message
        assert children_of(server.process.pid) == []


def test_engine_dies_with_its_server() -> None:
    with ProcessServer() as server:
        child = server.child
        server.process.kill()
        server.process.wait(PATIENCE)
        wait_for(lambda: not is_alive(child), "the engine dies")


@pytest.mark.case("V57")
def test_sigterm_lets_streams_finish_and_exits_with_0() -> None:
    with ProcessServer("--num-gpu-blocks-override", "1024") as server:
        child = server.child
        streams = run_streams(server, 5, lambda: server.process.send_signal(signal.SIGTERM))
        assert all(events[-1] == "[DONE]" for events in streams)
        assert server.process.wait(PATIENCE) == 0
        assert not is_alive(child)


def test_sigterm_of_the_whole_group_still_drains() -> None:
    with ProcessServer("--num-gpu-blocks-override", "1024") as server:

        def disturb() -> None:
            os.kill(server.child, signal.SIGTERM)
            os.kill(server.child, signal.SIGINT)
            server.process.send_signal(signal.SIGTERM)

        streams = run_streams(server, 2, disturb)
        assert all(events[-1] == "[DONE]" for events in streams)
        assert server.process.wait(PATIENCE) == 0


def test_first_line_names_executor_and_settings() -> None:
    with ProcessServer() as server:
        # A start of seconds, as on a busy machine, tells the address before.
        first, *_ = [line for line in server.lines if "requests get 503" not in line]
        assert first.startswith("[llama on the ")
        assert first.endswith("executor]")
        assert server.terminate() == 0


def test_stream_equals_the_engine_in_process() -> None:
    with tiny(block_size=16) as llm:
        expected = only(llm, "The sky", greedy(60)).text
    with ProcessServer() as server, server.calls() as calls:
        chunks = calls.events(PATH, completion(max_tokens=60))
        assert "".join(c["choices"][0]["text"] for c in chunks) == expected
