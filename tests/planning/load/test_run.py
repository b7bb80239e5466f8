"""Loops and outcomes against a scripted server on virtual time: every figure is known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidParameterError, OctavoError
from octavo.planning.load.client import Target
from octavo.planning.load.report import Report
from octavo.planning.load.run import NOT_SENT, LoadGenerator, Run, connect, first_model
from octavo.planning.load.work import IdRange, Session, Shape, at_times
from tests.planning.load.fakes import Reply, Script, ScriptedServer, event, run_virtually, steady

IDS = IdRange()
URL = "http://127.0.0.1:8000"
NO_PREFIX = IDS.draw(0)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., tuple[Run, ScriptedServer]]:
    """A function that runs sessions against a script, and returns the run and the server."""

    def run(
        script: Script,
        sessions: list[Session],
        concurrency: int | None = None,
        timeout: float = 600.0,
        **extra: Any,
    ) -> tuple[Run, ScriptedServer]:
        server = ScriptedServer(script)

        async def main() -> Run:
            async with (
                server.at(tmp_path / "socket") as connector,
                connect(connector=connector, timeout=timeout) as client,
            ):
                target = Target(url=f"{URL}/v1/completions", model="scripted", extra=extra)
                return await LoadGenerator(client, target).run(sessions, concurrency)

        return run_virtually(main), server

    return run


Load = Callable[..., tuple[Run, ScriptedServer]]


def sessions(count: int, output_tokens: int = 5, **fields: Any) -> list[Session]:
    shape = Shape(prompt_tokens=8, output_tokens=output_tokens, **fields)
    return shape.sessions(count, IDS, seed=0)


# --- pace ---------------------------------------------------------------------------------------


def test_closed_loop_keeps_its_streams_busy_and_no_more(load: Load) -> None:
    run, server = load(steady(0.5, 0.1), sessions(6), concurrency=2)
    assert run.most_in_flight == 2
    assert run.seconds == pytest.approx(3 * 0.9)
    assert server.times == pytest.approx([0, 0, 0.9, 0.9, 1.8, 1.8])


def test_open_loop_sends_when_due_though_the_server_lags(load: Load) -> None:
    run, server = load(steady(10, 1), at_times(sessions(3), [0.0, 1.0, 1.5]))
    assert server.times == pytest.approx([0, 1, 1.5])
    assert run.most_in_flight == 3
    assert [outcome.late for outcome in run.outcomes] == pytest.approx([0, 0, 0])


def test_limit_of_an_open_loop_makes_requests_late_and_says_so(load: Load) -> None:
    due = at_times(sessions(3), [0.0, 0.5, 1.0])
    run, server = load(steady(0.6, 0.1), due, concurrency=1)
    assert run.most_in_flight == 1
    assert server.times == pytest.approx([0, 1, 2])
    assert [outcome.late for outcome in run.outcomes] == pytest.approx([0, 0.5, 1])
    # Latency begins when a request is sent.
    assert [outcome.ttft for outcome in run.outcomes] == pytest.approx([0.6] * 3)


def test_concurrency_below_one_is_refused(load: Load) -> None:
    with pytest.raises(InvalidParameterError, match="concurrency"):
        load(steady(), sessions(1), concurrency=0)


# --- what is asked and seen ---------------------------------------------------------------------


def test_request_asks_for_greedy_ids_of_full_length(load: Load) -> None:
    _, server = load(steady(), sessions(1), min_p=0.5, ignore_eos=None)
    (body,) = server.bodies
    assert len(body["prompt"]) == 8
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (5, 0, True)
    assert body["stream_options"] == {"include_usage": True}
    assert body["min_p"] == 0.5
    assert "ignore_eos" not in body
    assert "return_token_ids" not in body


def test_latencies_of_an_answer(load: Load) -> None:
    run, _ = load(steady(0.5, 0.1, num_cached=6), sessions(1))
    (outcome,) = run.outcomes
    assert outcome.ttft == pytest.approx(0.5)
    assert outcome.gaps == pytest.approx([0.1] * 4)
    assert outcome.tpot == pytest.approx(0.1)
    assert outcome.e2e == pytest.approx(0.9)
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (8, 5)
    assert outcome.num_cached_tokens == 6


def test_time_per_token_counts_tokens_and_not_chunks(load: Load) -> None:
    """Three chunks of two tokens: five tokens after the first, in two gaps."""
    run, _ = load(lambda *_: Reply([1.0, 0.5, 0.5], tokens_per_chunk=2), sessions(1, 6))
    (outcome,) = run.outcomes
    assert outcome.num_output_tokens == 6
    assert outcome.tpot == pytest.approx(1.0 / 5)


def test_server_without_usage_has_its_chunks_counted(load: Load) -> None:
    run, _ = load(steady(has_usage=False), sessions(1))
    (outcome,) = run.outcomes
    assert (outcome.num_output_tokens, outcome.num_cached_tokens) == (5, None)
    assert outcome.is_good
    assert not outcome.is_short


def test_one_token_has_no_time_per_token(load: Load) -> None:
    run, _ = load(steady(), sessions(1, 1))
    assert (run.outcomes[0].tpot, run.outcomes[0].gaps) == (None, [])


def test_short_answer_is_good_and_told(load: Load) -> None:
    run, _ = load(lambda *_: Reply([0.1, 0.1]), sessions(1))
    assert run.outcomes[0].is_good
    assert Report(run, {}).num_short == 1


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(status=429), "HTTP 429"),
        (Reply(status=500), "refused"),
        (Reply([]), "no token came"),
        (Reply([0.1, 0.1], breaks=True), "Error"),
        (Reply(raw=event({"choices": [{"text": "a"}]})), "broke off"),
        (Reply(raw=b""), "broke off"),
        (Reply(raw=event({"error": {"message": "out of memory"}})), "out of memory"),
        (Reply(raw=event({"error": "gone"})), "gone"),
        (Reply(raw=b"data: {broken\n\n"), "JSONDecodeError"),
        (Reply(raw=b"data: [1]\n\n"), "not an event"),
        (Reply(raw=event({"choices": 5})), "TypeError"),
        (Reply(raw=event({"choices": ["a"]})), "AttributeError"),
        (Reply(raw=b"data: \xff\xff\n\n"), "UnicodeDecodeError"),
    ],
)
def test_failed_request_is_an_outcome_and_the_others_go_on(
    load: Load, reply: Reply, words: str
) -> None:
    def script(number: int, body: dict[str, Any]) -> Reply:
        return reply if number == 1 else steady()(number, body)

    run, _ = load(script, sessions(3))
    assert [outcome.is_good for outcome in run.outcomes] == [True, False, True]
    assert words in run.outcomes[1].error
    report = Report(run, {})
    assert (report.num_failed, sum(report.errors.values())) == (1, 1)


def test_request_that_takes_too_long_times_out(load: Load) -> None:
    run, _ = load(steady(first=20), sessions(2), timeout=3)
    assert [outcome.error for outcome in run.outcomes] == ["timed out"] * 2
    assert run.seconds == pytest.approx(6)


def test_long_error_pages_are_cut(load: Load) -> None:
    run, _ = load(lambda *_: Reply(raw=event({"error": "x" * 10_000})), sessions(1))
    assert len(run.outcomes[0].error) == 300


# --- turns --------------------------------------------------------------------------------------


def test_each_turn_has_all_before_it_with_the_servers_own_answer(load: Load) -> None:
    run, server = load(steady(ids=True), sessions(1, 3, shared_prefix=4, turns=3))
    prompts = [body["prompt"] for body in server.bodies]
    assert [len(prompt) for prompt in prompts] == [12, 12 + 3 + 8, 23 + 3 + 8]
    assert prompts[1][:15] == [*prompts[0], 7000, 7001, 7002]
    assert prompts[2][:26] == [*prompts[1], 7000, 7001, 7002]
    assert all(body["return_token_ids"] for body in server.bodies)
    assert [outcome.is_good for outcome in run.outcomes] == [True] * 3


def test_answer_whose_ids_are_not_told_counts_with_its_length(load: Load) -> None:
    _, server = load(steady(), sessions(1, 20, turns=2))
    first, second = (body["prompt"] for body in server.bodies)
    assert second[:8] == first
    assert len(second) == 8 + 20 + 8


def test_turns_of_a_session_follow_each_other_and_sessions_run_side_by_side(load: Load) -> None:
    run, server = load(steady(0.5, 0.1), sessions(2, turns=2), concurrency=2)
    assert server.times == pytest.approx([0, 0, 0.9, 0.9])
    assert [outcome.late for outcome in run.outcomes] == [0] * 4


def test_turns_after_a_failed_one_are_counted_as_not_sent(load: Load) -> None:
    run, server = load(lambda *_: Reply(status=503), sessions(1, turns=3))
    assert len(server.bodies) == 1
    errors = [outcome.error for outcome in run.outcomes]
    assert "HTTP 503" in errors[0]
    assert errors[1:] == [NOT_SENT] * 2


# --- before the run -----------------------------------------------------------------------------


def in_client(tmp_path: Path, script: Script, body: Callable[..., Any]) -> ScriptedServer:
    server = ScriptedServer(script)

    async def main() -> None:
        async with (
            server.at(tmp_path / "socket") as connector,
            connect(connector=connector, headers={"Authorization": "Bearer k"}) as client,
        ):
            await body(client)

    run_virtually(main)
    return server


def test_warm_up_sends_few_tokens_at_once_and_then_the_prefix(tmp_path: Path) -> None:
    shape = Shape(prompt_tokens=8, output_tokens=50, shared_prefix=20)

    async def body(client: Any) -> None:
        generator = LoadGenerator(client, Target(url=f"{URL}/v1/completions", model="m"))
        await generator.warm_up(shape.sessions(2, IDS, 0), shape.prefix(IDS, 0))

    server = in_client(tmp_path, steady(), body)
    assert [b["max_tokens"] for b in server.bodies] == [8, 8, 1]
    assert [len(b["prompt"]) for b in server.bodies] == [28, 28, 20]
    assert server.times[0] == server.times[1] < server.times[2]
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer k"}


def test_failed_warm_up_ends_it_with_the_servers_words(tmp_path: Path) -> None:
    async def body(client: Any) -> None:
        generator = LoadGenerator(client, Target(url=f"{URL}/v1/completions", model="m"))
        with pytest.raises(OctavoError, match=r"fails in the warm-up: HTTP 400: .*refused"):
            await generator.warm_up(sessions(1), NO_PREFIX)

    in_client(tmp_path, lambda *_: Reply(status=400), body)


def test_first_model_is_asked_of_the_server(tmp_path: Path) -> None:
    async def body(client: Any) -> None:
        assert await first_model(client, URL) == "scripted"
        with pytest.raises(OctavoError, match=r"HTTP 404.*--model"):
            await first_model(client, f"{URL}/elsewhere")

    in_client(tmp_path, steady(), body)


def test_progress_is_told_at_each_begin_and_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    async def body(client: Any) -> None:
        target = Target(url=f"{URL}/v1/completions", model="m")
        generator = LoadGenerator(
            client, target, lambda run: seen.append((run.num_in_flight, len(run.outcomes)))
        )
        await generator.run(sessions(2), 2)

    in_client(tmp_path, steady(), body)
    assert seen == [(1, 0), (2, 0), (1, 1), (0, 2)]
