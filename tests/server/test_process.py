"""`octavo serve` as processes: deaths, hangs, signals."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.engines import TINY, greedy, only, tiny
from tests.server.serving import (
    PATIENCE,
    Calls,
    ProcessServer,
    chat,
    children_of,
    completion,
    is_alive,
    read_events,
    wait_for,
)

PATH = "/v1/completions"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
LONG = completion(max_tokens=1000, stream=True)


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


def test_sigterm_ends_a_server_whose_log_nobody_reads_any_more() -> None:
    command = [sys.executable, "-c", "from octavo.cli.main import main; main()", "serve"]
    with subprocess.Popen(
        [*command, str(TINY / "llama"), "--port", "0"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert any("Ready" in line for line in process.stderr)
            process.stderr.close()
            process.terminate()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_a_tokenizer_with_damaged_merges_ends_the_server_before_it_is_ready(tmp_path: Path) -> None:
    shutil.copytree(TINY / "llama", tmp_path, dirs_exist_ok=True)
    text = json.loads((tmp_path / "tokenizer.json").read_text())
    text["model"]["merges"] = [["nobody's", "token"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    command = [sys.executable, "-c", "from octavo.cli.main import main; main()", "serve"]
    done = subprocess.run(
        [*command, str(tmp_path), "--port", "0"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert "Ready" not in done.stderr
    assert "damaged" in done.stderr


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


# --- load and idleness --------------------------------------------------------------------------


@pytest.mark.case("V51")
def test_health_is_told_under_full_load() -> None:
    options = ("--max-num-seqs", "16", "--num-gpu-blocks-override", "2048")
    with ProcessServer(*options) as server, server.calls() as calls:
        seconds: list[float] = []

        def probe() -> None:
            before = calls.get("/load").json()
            for path in ("/livez", "/readyz") * 10:
                start = time.monotonic()
                assert calls.get(path).status_code == 200
                seconds.append(time.monotonic() - start)
            after = calls.get("/load").json()
            # All of it was told before any stream had its thousand tokens.
            assert before["num_running"] == after["num_running"] == 16

        streams = run_streams(server, 16, probe)
        assert all(events[-1] == "[DONE]" for events in streams)
        print(f"/livez and /readyz beside 16 streams: at most {max(seconds) * 1000:.0f} ms")


def cpu_seconds(pid: int) -> float:
    """Return the time that all threads of a process have computed."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_nothing_spins_while_output_waits_to_be_sent() -> None:
    with ProcessServer() as server, server.calls() as calls:
        fields = chat(max_tokens=900, n=4, logprobs=True, top_logprobs=20, stream=True)
        with open_unread(server, fields):
            wait_for(lambda: calls.get("/load").json()["num_running"] == 1, "it runs")
            wait_for(lambda: calls.get("/load").json()["kv_cache_usage"] == 0, "it is computed")
            assert calls.get("/load").json()["server_load"] == 1, "output waits"
            pids = [server.process.pid, server.child]
            before = [cpu_seconds(pid) for pid in pids]
            threading.Event().wait(1.0)
            spent = [cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True)]
            assert calls.get("/load").json()["server_load"] == 1
        assert max(spent) < 0.4, spent
        wait_for(lambda: calls.get("/load").json()["server_load"] == 0, "the client has gone")


def open_unread(server: ProcessServer, fields: dict[str, Any]) -> socket.socket:
    """Send a request whose reply nobody reads."""
    address = urlsplit(server.address)
    body = json.dumps(fields).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((address.hostname, address.port))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    return connection
