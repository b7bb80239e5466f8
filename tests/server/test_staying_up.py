"""Queue bounds, deadlines, disconnects and the drain, with a slow or blocked engine."""

import asyncio
import json
import random
import socket
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from octavo.engine.outlook import Outlook
from octavo.errors import QueueFullError
from octavo.executors.executor import Batch, StepResult
from octavo.server.admission import Admission
from tests.engines import assert_idle
from tests.server.serving import (
    PATIENCE,
    ThreadServer,
    completion,
    engine_config,
    read_events,
)

PATH = "/v1/completions"


class Gated:
    """An executor whose steps wait until `open` is set."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.open = threading.Event()
        self.entered = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, batch: Batch) -> Future[StepResult]:
        self.entered.set()
        assert self.open.wait(PATIENCE)
        return self._inner.submit(batch)  # type: ignore[no-any-return]


def block(server: ThreadServer) -> Gated:
    """Hold the engine's steps back until the gate is opened."""
    gate = Gated(server.engine.executor)
    server.engine.executor = gate
    return gate


async def _until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.002)


def until(server: ThreadServer, condition: Any) -> None:
    """Wait, on the server's loop, until something holds."""
    asyncio.run_coroutine_threadsafe(_until(condition), server.loop).result(PATIENCE)


def until_idle(server: ThreadServer) -> None:
    """Wait until the server has nothing open and its engine nothing to do."""
    until(server, lambda: server.service.admission.num_open == 0)
    until(server, lambda: not server.engine.has_unfinished)
    assert_idle(server.engine)


# --- admission ----------------------------------------------------------------------------------


@pytest.mark.case("S61")
def test_surplus_beyond_the_queue_gets_429_at_once() -> None:
    config = engine_config(max_num_seqs=1, max_num_batched_tokens=64)
    with ThreadServer(config, max_waiting_requests=2) as server, server.calls() as calls:
        gate = block(server)
        with ThreadPoolExecutor(5) as pool:
            posts = [pool.submit(calls.post, PATH, json=completion()) for _ in range(5)]
            done = 0
            refused = []
            for post in posts:
                try:
                    refused.append(post.result(0.5))
                except TimeoutError:
                    done += 1
            assert (len(refused), done) == (2, 3)
            gate.open.set()
            replies = [post.result(PATIENCE) for post in posts]
        assert sorted(r.status_code for r in replies) == [200, 200, 200, 429, 429]
        for reply in refused:
            assert reply.status_code == 429
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"] == "queue_full"
        until_idle(server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_says_where_its_request_stood_in_the_queue(stream: bool) -> None:
    with ThreadServer(engine_config(max_num_seqs=1, max_num_batched_tokens=64)) as server:
        gate = block(server)
        with server.calls() as calls, ThreadPoolExecutor(3) as pool:
            posts = []
            for waiting in range(3):
                body = completion(stream=stream)
                posts.append(pool.submit(calls.post, PATH, json=body))
                until(server, lambda n=waiting: server.service.admission.num_waiting == n + 1)
            gate.open.set()
            replies = [post.result(PATIENCE) for post in posts]
    assert [reply.headers["x-octavo-queue-position"] for reply in replies] == ["1", "2", "3"]


def test_waiting_tokens_are_bounded() -> None:
    with ThreadServer(max_waiting_tokens=100) as server, server.calls() as calls:
        gate = block(server)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(calls.post, PATH, json=completion([5] * 90))
            until(server, lambda: server.service.admission.num_waiting_tokens == 90)
            calls.refusal(PATH, completion([6] * 90), 429)
            gate.open.set()
            assert first.result(PATIENCE).status_code == 200


def outlook(**changes: Any) -> Outlook:
    """Return what an idle engine predicts that computes 100 prompt tokens in a second."""
    idle: dict[str, Any] = {
        "decode_seconds": 0.5,
        "chunk_tokens": 100,
        "chunk_seconds": 1.0,
        "num_pending_tokens": 0,
        "num_free_seats": 4,
        "steps_per_seat": 0.0,
    }
    return Outlook(**{**idle, **changes})


def admission(predicted: Outlook | None, **limits: int) -> Admission:
    fields = {"max_requests": 10, "max_tokens": 10_000, "num_seats": 4, **limits}
    return Admission(outlook=lambda: predicted, **fields)


def test_retry_after_is_when_the_waiting_prompts_will_be_computed() -> None:
    queue = admission(outlook(num_pending_tokens=500))
    ticket = queue.enter()
    ticket.add_tokens(1500)
    assert queue.seconds_to_wait() == 20
    with pytest.raises(QueueFullError) as caught:
        queue.check_tokens(9000)
    assert caught.value.retry_after == 20
    assert "number 2 in the queue and begin in about 20 s" in str(caught.value)
    ticket.start()
    ticket.leave()
    ticket.leave()
    assert (queue.num_open, queue.num_waiting_tokens) == (0, 0)


def test_whoever_needs_a_seat_waits_until_answers_end() -> None:
    busy = outlook(num_free_seats=0, steps_per_seat=20.0)
    queue = admission(busy)
    queue.enter().add_tokens(100)
    # Two seats after 40 steps: one of them computes the prompt before, in a second.
    assert queue.seconds_to_wait() == 1.0 + 39 * 0.5


def test_seats_taken_since_the_engine_last_told_are_not_free() -> None:
    queue = admission(outlook(num_free_seats=4, steps_per_seat=20.0))
    for _ in range(4):
        queue.enter().start()
    assert queue.seconds_to_wait() == 20 * 0.5


@pytest.mark.parametrize(("tokens", "seconds"), [(10, 1.0), (149, 2.0), (10**9, 120.0)])
def test_retry_after_is_whole_seconds_within_bounds(tokens: int, seconds: float) -> None:
    queue = admission(outlook(), max_tokens=10**10)
    queue.enter().add_tokens(tokens)
    assert queue.retry_after() == seconds


def test_an_engine_that_predicts_nothing_still_says_when() -> None:
    queue = admission(None)
    queue.enter().add_tokens(3000)
    assert queue.retry_after() == 30


def test_places_in_the_queue_are_counted_from_one() -> None:
    queue = admission(outlook())
    assert [queue.enter().position for _ in range(3)] == [1, 2, 3]


def test_prompt_longer_than_the_token_limit_is_taken_alone() -> None:
    queue = admission(outlook(), max_tokens=100)
    queue.enter().add_tokens(500)
    with pytest.raises(QueueFullError):
        queue.enter().add_tokens(1)


def test_request_that_waits_too_long_gets_an_error_of_its_own() -> None:
    with ThreadServer(queue_timeout=0.05) as server, server.calls() as calls:
        gate = block(server)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(calls.post, PATH, json=completion())
            assert gate.entered.wait(PATIENCE)
            error = first.result(PATIENCE)
            assert error.status_code == 503
            assert error.json()["error"]["code"] == "queue_timeout"
            gate.open.set()
        until_idle(server)
        assert calls.complete()["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_ends_a_request(stream: bool) -> None:
    with ThreadServer() as server, server.calls() as calls:
        gate = block(server)
        threading.Timer(0.3, gate.open.set).start()
        fields = completion(timeout=0.05, max_tokens=900, stream=stream)
        assert calls.refusal(PATH, fields, 504)["code"] == "deadline_exceeded"
        gate.open.set()
        until_idle(server)


# --- disconnects --------------------------------------------------------------------------------


@pytest.mark.case("V50", "S56")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_client_that_leaves_ends_its_request(stream: bool, when: str) -> None:
    config = engine_config(max_num_seqs=1, max_num_batched_tokens=64)
    with ThreadServer(config) as server, server.calls() as other:
        gate = block(server)
        if when == "decode":
            gate.open.set()
        with ThreadPoolExecutor(1) as pool:
            if when == "queued":
                first = pool.submit(other.post, PATH, json=completion())
                assert gate.entered.wait(PATIENCE)
            prompt = [5] * (700 if when == "prefill" else 3)
            leave(completion(prompt, max_tokens=300, stream=stream), server)
            gate.open.set()
            if when == "queued":
                assert first.result(PATIENCE).status_code == 200
        until_idle(server)
        assert server.engine.stats().num_generated_tokens < 300 + 8


def leave(fields: dict[str, Any], server: ThreadServer, path: str = PATH) -> None:
    """Send a request and close the connection once the server has it."""
    address = urlsplit(server.address)
    body = json.dumps(fields).encode()
    before = server.service.admission.num_open
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(
            b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % (path.encode(), len(body)) + body
        )
        until(server, lambda: server.service.admission.num_open > before)


@pytest.mark.case("S57", "V50")
def test_random_cancels_leave_no_block_behind() -> None:
    config = engine_config(num_gpu_blocks_override=64, max_num_seqs=16, max_num_batched_tokens=64)
    with ThreadServer(config, keep_alive_seconds=0.2) as server, server.calls() as calls:
        num_free = server.engine.scheduler.blocks.pool.num_free
        stages = asyncio.run(_cancel_at_random(server.address, 500))
        assert all(stages[stage] > 20 for stage in ("queued", "prefill", "decode")), stages
        until_idle(server)
        assert server.engine.scheduler.blocks.pool.num_free == num_free
        assert calls.complete()["choices"]


async def _cancel_at_random(address: str, number: int) -> Counter[str]:
    """Leave `number` streams, and return in which stage each was."""
    chance = random.Random(0)
    stages: Counter[str] = Counter()

    async def one(client: httpx2.AsyncClient, seed: int) -> None:
        stage, num_events = "queued", chance.choice([1, 2, 3, 5, 20])
        fields = completion(
            [chance.randrange(256) for _ in range(chance.randint(1, 300))],
            max_tokens=200,
            stream=True,
            return_progress=True,
        )
        try:
            async with (
                asyncio.timeout(chance.choice([0.003, 0.03, PATIENCE])),
                client.stream("POST", PATH, json=fields) as reply,
            ):
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        stage = "prefill" if "prompt_progress" in line else "decode"
                        num_events -= 1
                    if not num_events:
                        break
        except TimeoutError:
            pass
        stages[stage] += 1

    limits = httpx2.Limits(max_connections=40)
    async with httpx2.AsyncClient(
        base_url=address, limits=limits, trust_env=False, timeout=PATIENCE
    ) as client:
        await asyncio.gather(*(one(client, seed) for seed in range(number)))
    return stages


# --- streams ------------------------------------------------------------------------------------


@pytest.mark.case("S55")
def test_silent_stream_is_kept_alive_by_comments() -> None:
    with ThreadServer(keep_alive_seconds=0.02) as server, server.calls() as calls:
        gate = block(server)
        with calls.stream("POST", PATH, json=completion(stream=True)) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith(":")
            gate.open.set()
            assert list(lines)[-2:] == ["data: [DONE]", ""]


@pytest.mark.case("S55")
def test_error_in_a_stream_is_one_event_and_no_done() -> None:
    with ThreadServer(keep_alive_seconds=0.01) as server, server.calls() as calls:
        gate = block(server)
        with calls.stream("POST", PATH, json=completion(stream=True)) as reply:
            server.loop.call_soon_threadsafe(server.client._die, RuntimeError("x"))
            (event,) = read_events(reply)
        assert json.loads(event)["error"]["code"] == "engine_dead"
        gate.open.set()


# --- health -------------------------------------------------------------------------------------


def test_health_is_told_while_a_step_runs() -> None:
    with ThreadServer() as server, server.calls() as calls:
        gate = block(server)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(calls.post, PATH, json=completion())
            assert gate.entered.wait(PATIENCE)
            for path in ("/livez", "/readyz", "/health", "/load", "/metrics"):
                assert calls.get(path).status_code == 200
            assert not running.done()
            gate.open.set()
            assert running.result(PATIENCE).status_code == 200


# --- the drain ----------------------------------------------------------------------------------


@pytest.mark.case("V57")
def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    with ThreadServer(shutdown_timeout=PATIENCE) as server, server.calls() as calls:
        gate = block(server)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(calls.post, PATH, json=completion())
            until(server, lambda: server.service.admission.num_open == 1)
            draining = asyncio.run_coroutine_threadsafe(server.service.drain(), server.loop)
            until(server, lambda: server.service.is_draining)
            assert calls.get("/readyz").status_code == 503
            assert calls.get("/livez").status_code == 200
            refused = calls.post(PATH, json=completion())
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert not draining.done()
            gate.open.set()
            assert running.result(PATIENCE).status_code == 200
        draining.result(PATIENCE)


def test_drain_ends_what_does_not_finish_in_time() -> None:
    with (
        ThreadServer(shutdown_timeout=0.01, keep_alive_seconds=0.01) as server,
        server.calls() as calls,
    ):
        gate = block(server)
        with calls.stream("POST", PATH, json=completion(stream=True)) as reply:
            draining = asyncio.run_coroutine_threadsafe(server.service.drain(), server.loop)
            (event,) = read_events(reply)
            assert "shut down" in json.loads(event)["error"]["message"]
        draining.result(PATIENCE)
        gate.open.set()
