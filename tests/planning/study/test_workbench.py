"""Jobs through an engine, continuously and in static batches, on virtual time."""

import pytest

from octavo.errors import ContextLengthError, OctavoError
from octavo.planning.study.workbench import Job, Workbench, prompts, serve, warm_up
from tests.engines import FailingExecutor, assert_idle
from tests.planning.study.benches import real, virtual


def jobs(*lengths: int) -> list[Job]:
    return [Job([seed] * 4, length) for seed, length in enumerate(lengths, 1)]


def in_flight(bench: Workbench, *, is_static: bool) -> list[int]:
    engine = bench.engine()
    served = serve(engine, jobs(2, 6, 2, 6), bench.clock, seats=2, is_static=is_static)
    assert len(served.tokens) == 16
    assert len(served.metrics) == 4
    assert_idle(engine)
    return [count for _, count in served.busy]


def test_a_free_seat_is_taken_at_once() -> None:
    assert in_flight(virtual(), is_static=False) == [2] * 6 + [1] * 4


def test_a_static_batch_waits_for_its_longest_answer() -> None:
    assert in_flight(virtual(), is_static=True) == [2, 2, 1, 1, 1, 1] * 2


def test_without_seats_all_run_at_once() -> None:
    bench = virtual()
    served = serve(bench.engine(), jobs(3, 3, 3), bench.clock)
    assert [count for _, count in served.busy] == [3, 3, 3]


def test_engines_of_one_bench_find_nothing_of_each_other() -> None:
    with real() as bench:
        text = prompts(bench.base, 1, 96, "same")[0]
        found = []
        for is_caching in (True, True, False):
            engine = bench.engine(enable_prefix_caching=is_caching)
            served = serve(engine, [Job(text, 5), Job(text, 5)], bench.clock, seats=1)
            found.append([token.token_id for token in served.tokens])
            reused = engine.stats().num_reused_tokens
            assert reused == (95 if is_caching else 0)
    assert found[0] == found[1] == found[2]


def test_warming_up_leaves_nothing_to_find() -> None:
    with real() as bench:
        engine = bench.engine(enable_prefix_caching=True)
        warm_up(engine, 64)
        serve(engine, [Job(prompts(engine, 1, 64, "warm-up")[0], 1)], bench.clock)
        assert engine.stats().num_reused_tokens == 0


def test_what_a_request_fails_with_is_raised() -> None:
    with real() as bench:
        engine = bench.engine()
        engine.executor = FailingExecutor(engine.executor, {3}, OctavoError("broken"))  # type: ignore[assignment]
        with pytest.raises(OctavoError, match="broken"):
            serve(engine, jobs(9, 9), bench.clock)


def test_a_job_beyond_the_context_is_refused() -> None:
    with real() as bench, pytest.raises(ContextLengthError, match="1,024"):
        serve(bench.engine(), [Job([1] * 1020, 100)], bench.clock)
