"""`octavo bench serve` against a scripted server: the table, the JSON, and what goes wrong."""

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests.cli.conftest import Octavo
from tests.planning.load.fakes import Reply, Script, ScriptedServer

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,40,3
2023-11-16 18:17:03.9899600,900,8
2023-11-16 18:17:03.9999600,20,2
"""


def instant(_: int, body: dict[str, object]) -> Reply:
    """An answer of full length without any delay."""
    count = body["max_tokens"]
    assert isinstance(count, int)
    return Reply([0.0] * count, num_cached=3)


@contextmanager
def listening(script: Script) -> Iterator[tuple[ScriptedServer, str]]:
    """A scripted server in a thread of its own, and its address."""
    server, loop, ready = ScriptedServer(script), asyncio.new_event_loop(), threading.Event()
    addresses: list[str] = []
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=0.0)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        addresses.append(f"http://{host}:{port}")

    def serve() -> None:
        loop.run_until_complete(start())
        loop.call_soon(ready.set)  # not before it can be stopped
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(30)
        yield server, addresses[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def server() -> Iterator[tuple[ScriptedServer, str]]:
    with listening(instant) as found:
        yield found


Server = tuple[ScriptedServer, str]
QUICK = ("--prompt-tokens", "6", "--output-tokens", "4", "--requests", "5")


def test_table_has_rates_latencies_and_what_the_client_cost(octavo: Octavo, server: Server) -> None:
    done = octavo("bench", "serve", "--base-url", server[1], *QUICK, "--goodput", "ttft:60000")
    assert (done.code, done.err) == (0, "")
    first, *table = done.out.splitlines()
    assert first == f"scripted at {server[1]}: 1 stream; 6 / 4 tokens"
    text = "\n".join(table)
    for pattern in (
        r"requests +│ +5 ",
        r"failed +│ +0 ",
        r"output tokens +│ +20 ",
        r"prompt tokens +│ +30 ",
        r"of them from the cache +│ +15 ",
        r"within ttft 60000 ms +│ +5 \(100.0%\)",
        r"client's CPU seconds +│ +\d+\.\d\d \(\d+%\)",
        r"latency +┃ +mean ┃ +median ┃ +p90 ┃ +p99 ┃ +max",
        r"TTFT, ms +│ +[\d.]+ ",
        r"TPOT, ms per token +│ +[\d.]+ ",
        r"ITL, ms between chunks +│ +[\d.]+ ",
        r"E2E, ms +│ +[\d.]+ ",
    ):
        assert re.search(pattern, text), pattern


def test_warm_up_is_not_measured(octavo: Octavo, server: Server) -> None:
    octavo("bench", "serve", "--base-url", server[1], *QUICK, "--num-warmups", "2")
    assert len(server[0].bodies) == 2 + 5
    octavo("bench", "serve", "--base-url", server[1], *QUICK, "--num-warmups", "0")
    assert len(server[0].bodies) == 7 + 5


def test_json_has_settings_figures_and_details(
    octavo: Octavo, server: Server, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    options = ("--json", str(file), "--details", "--model", "mine", "--extra-body", '{"min_p": 0}')
    done = octavo("bench", "serve", "--base-url", server[1], *QUICK, *options)
    assert done.out.startswith("mine at ")
    found = json.loads(file.read_text())
    assert (found["requests"], found["failed"], found["output_tokens"]) == (5, 0, 20)
    assert found["settings"]["model"] == "mine"
    assert found["settings"]["prompt_tokens"] == 6
    assert len(found["details"]) == 5
    assert "cpu" in found["machine"]
    assert {"mean", "p50", "p90", "p95", "p99", "max"} == set(found["ttft_ms"])
    assert {body["model"] for body in server[0].bodies} == {"mine"}
    assert {body["min_p"] for body in server[0].bodies} == {0}


def test_json_on_stdout_stands_alone(octavo: Octavo, server: Server) -> None:
    done = octavo("bench", "serve", "--base-url", server[1], *QUICK, "--json", "-")
    assert json.loads(done.out)["settings"]["model"] == "scripted"
    assert "details" not in json.loads(done.out)


def test_same_seed_sends_the_same_prompts_and_another_does_not(
    octavo: Octavo, server: Server
) -> None:
    for seed in ("0", "0", "1"):
        octavo("bench", "serve", "--base-url", server[1], *QUICK, "--seed", seed)
    prompts = [body["prompt"] for body in server[0].bodies]
    assert prompts[:6] == prompts[6:12]
    assert not any(prompt in prompts[:6] for prompt in prompts[12:])


def test_shared_prefix_and_turns(octavo: Octavo, server: Server) -> None:
    options = ("--shared-prefix", "10", "--turns", "2", "--requests", "2", "--concurrency", "2")
    done = octavo("bench", "serve", "--base-url", server[1], *QUICK, *options)
    assert done.out.startswith(f"scripted at {server[1]}: 2 streams; 10 shared + 6 / 4 tokens, 2")
    lengths = sorted(len(body["prompt"]) for body in server[0].bodies)
    assert lengths == [10, 16, 16, 16, 26, 26]


def test_open_loop_says_its_rate(octavo: Octavo, server: Server) -> None:
    options = ("--request-rate", "1000", "--burstiness", "0.5", "--concurrency", "3")
    done = octavo("bench", "serve", "--base-url", server[1], *QUICK, *options)
    assert "1000 per second, burstiness 0.5, at most 3 at once" in done.out


@pytest.mark.parametrize(
    ("options", "pace"),
    [
        ((), "as trace.csv says"),
        (("--trace-speed", "2"), "as trace.csv says, 2 times as fast"),
        (("--closed", "--concurrency", "2"), "2 streams"),
        (("--request-rate", "500"), "500 per second, burstiness 1"),
    ],
)
def test_trace_is_replayed(
    octavo: Octavo, server: Server, tmp_path: Path, options: tuple[str, ...], pace: str
) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)
    given = ("--trace", str(file), "--trace-max-tokens", "100", *options)
    done = octavo("bench", "serve", "--base-url", server[1], *given)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0].endswith(f"{pace}; of trace.csv, 1 left out as too long")
    bodies = server[0].bodies[1:]
    assert sorted((len(b["prompt"]), b["max_tokens"]) for b in bodies) == [(20, 2), (40, 3)]


def test_errors_are_shown_with_their_number_and_the_exit_code_is_1(octavo: Octavo) -> None:
    def script(number: int, body: dict[str, object]) -> Reply:
        return Reply(status=429) if number in (2, 3) else instant(number, body)

    with listening(script) as (_, url):
        done = octavo("bench", "serve", "--base-url", url, *QUICK)
    assert done.code == 1
    assert re.search(r"failed +│ +2 ", done.out)
    assert '2 x HTTP 429: {"error": {"message": "refused"}}' in done.out


def test_progress_is_live_on_a_terminal(
    octavo: Octavo, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = octavo("bench", "serve", "--base-url", server[1], *QUICK)
    assert "Loading" in done.err
    assert "in flight, 0 failed" in done.err
    assert "Loading" not in done.out


def test_key_is_sent_and_never_shown(
    octavo: Octavo, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    done = octavo("bench", "serve", "--base-url", server[1], *QUICK, "--json", "-")
    assert {h["Authorization"] for h in server[0].headers} == {"Bearer sk-very-secret"}
    assert "secret" not in done.out + done.err


# --- what the user gets wrong -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--goodput", "speed:5"], ["goodput", "ttft, tpot, itl, e2e"]),
        (["--requests", "0"], ["requests", "at least 1"]),
        (["--concurrency", "0"], ["concurrency", "at least 1"]),
        (["--num-warmups", "-1"], ["num_warmups", "at least 0"]),
        (["--seed", "-1"], ["seed", "at least 0"]),
        (["--prompt-tokens", "0"], ["prompt_tokens"]),
        (["--output-tokens", "0"], ["output_tokens"]),
        (["--turns", "0"], ["turns"]),
        (["--shared-prefix", "-1"], ["shared_prefix"]),
        (["--request-rate", "0"], ["request_rate"]),
        (["--request-rate", "1", "--burstiness", "0"], ["burstiness"]),
        (["--request-rate", "1", "--closed"], ["closed", "request_rate", "exclude"]),
        (["--trace", "x.csv", "--turns", "2"], ["trace", "turns", "exclude"]),
        (["--trace", "/no/such/trace"], ["/no/such/trace"]),
        (["--token-ids", "5"], ["token_ids", "1000-40000"]),
        (["--token-ids", "9-5"], ["token_ids"]),
        (["--extra-body", "[]"], ["extra_body", "JSON object"]),
        (["--extra-body", "{"], ["extra_body"]),
        (["--base-url", "localhost:8000"], ["base_url", "http"]),
        (["--timeout", "0"], ["timeout"]),
    ],
)
def test_mistake_is_told_before_the_server_is_looked_for(
    octavo: Octavo, options: list[str], parts: list[str]
) -> None:
    done = octavo("bench", "serve", *options)
    assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
    assert all(part in done.err for part in parts)


def test_nobody_at_the_address(octavo: Octavo) -> None:
    with listening(instant) as (_, url):
        pass
    done = octavo("bench", "serve", "--base-url", url)
    assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
    assert f"No server answers at {url}" in done.err
    assert "--base-url" in done.err


def test_server_that_refuses_the_work_is_told_before_it_is_sent(octavo: Octavo) -> None:
    with listening(lambda *_: Reply(status=400)) as (server, url):
        done = octavo("bench", "serve", "--base-url", url)
    assert (done.code, done.out) == (1, "")
    assert "fails in the warm-up: HTTP 400" in done.err
    assert len(server.bodies) == 1


def test_figures_that_cannot_be_written_are_an_error(
    octavo: Octavo, server: Server, tmp_path: Path
) -> None:
    target = str(tmp_path / "missing" / "figures.json")
    done = octavo("bench", "serve", "--base-url", server[1], *QUICK, "--json", target)
    assert done.code == 1
    assert "output tokens/s" in done.out  # the run is not lost
    assert target in done.err


def test_without_aiohttp_it_says_what_to_install(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    done = octavo("bench", "serve")
    assert (done.code, done.out) == (1, "")
    assert "pip install 'octavo[bench]'" in done.err
