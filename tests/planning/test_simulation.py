"""Traces on virtual time: the real engine, steps as long as they cost."""

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.cost.hardware import MACHINES
from octavo.cost.steps import StepTimes
from octavo.errors import BadRequestError
from octavo.planning.fleet import Limits
from octavo.planning.latency import Latency, Lengths
from octavo.planning.load.work import Session, Turn
from octavo.planning.simulation import Distribution, Simulation, Simulator
from tests.engines import assert_idle
from tests.planning.subjects import subject

L4 = MACHINES["l4"]
SUBJECT = subject()


def session(arrival: float, prompt: int = 600, output: int = 8, seed: int = 0) -> Session:
    tokens = np.random.default_rng(seed).integers(0, 32000, prompt, dtype=np.int32)
    return Session((Turn(tokens, output),), arrival)


def simulator(**settings: object) -> Simulator:
    return Simulator(SUBJECT, L4, EngineConfig.from_dict(settings))


def simulate(
    sessions: list[Session], limits: Limits | None = None, **settings: object
) -> Simulation:
    made = simulator(**settings)
    found = made.run(sessions, limits)
    assert_idle(made.engine)
    return found


def latency() -> Latency:
    prepared = SUBJECT.prepared("channel", quantization=None, kv_element=2.0)
    return Latency(StepTimes(prepared, L4), Lengths(prompt_tokens=600, output_tokens=8), 512)


def test_a_request_alone_takes_what_a_plan_says() -> None:
    found = simulate([session(3.0)])
    expected = latency()
    assert found.ttft.mean == pytest.approx(expected.first_token())
    assert found.itl.mean == pytest.approx(expected.decode(1), rel=0.01)
    assert found.queueing.most == 0
    assert found.end_to_end.mean == pytest.approx(found.ttft.mean + 7 * found.itl.mean)
    assert found.seconds == pytest.approx(3.0 + found.end_to_end.mean)
    assert (found.num_requests, found.num_output_tokens, found.num_prompt_tokens) == (1, 8, 600)


def test_the_first_request_at_time_zero_waits_for_nobody() -> None:
    assert simulate([session(0.0)]).queueing.most == 0


def test_a_machine_is_busy_only_while_steps_run() -> None:
    found = simulate([session(0.0), session(10.0, seed=1)])
    assert found.seconds > 10
    assert found.busy == pytest.approx(2 * found.end_to_end.mean / found.seconds)


def test_who_comes_at_once_queues_and_streams_share_steps() -> None:
    together = simulate([session(0.0, seed=s) for s in range(6)])
    apart = simulate([session(5.0 * s, seed=s) for s in range(6)])
    assert together.queueing.most > apart.queueing.most == 0
    assert together.ttft.p99 > apart.ttft.p99
    assert together.most_running == 6
    assert apart.most_running == 1
    assert together.num_steps < apart.num_steps


def test_only_so_many_run_as_may() -> None:
    found = simulate([session(0.0, seed=s) for s in range(6)], max_num_seqs=2)
    assert found.most_running == 2
    assert found.most_waiting >= 3


def test_equal_beginnings_are_found_in_the_cache() -> None:
    shared = [session(5.0 * number) for number in range(4)]
    found = simulate(shared)
    assert found.num_cached_tokens >= 3 * 576
    assert found.cache_hit_share == found.num_cached_tokens / 2400
    assert simulate(shared, enable_prefix_caching=False).num_cached_tokens == 0


def test_a_pool_too_small_for_all_preempts_and_computes_again() -> None:
    sessions = [session(0.0, 60, 300, seed) for seed in range(8)]
    found = simulate(sessions, num_gpu_blocks_override=30)
    assert found.num_preemptions > 0
    assert found.num_requests == 8
    assert found.num_output_tokens == 8 * 300


def test_the_same_trace_gives_the_same_simulation() -> None:
    sessions = [session(0.01 * s, 100 + 37 * s, 5 + s, s) for s in range(12)]
    assert simulate(sessions) == simulate(sessions[::-1])


def test_goodput_counts_what_kept_the_limits() -> None:
    sessions = [session(0.0, seed=s) for s in range(6)]
    free = simulate(sessions)
    assert free.goodput == pytest.approx(6 / free.seconds)
    middle = Limits(ttft=free.ttft.p50)
    assert simulate(sessions, middle).goodput == pytest.approx(3 / free.seconds, rel=0.4)
    assert simulate(sessions, Limits(itl=1e-9)).goodput == 0


def test_what_the_context_cannot_hold_is_refused_and_counted() -> None:
    found = simulate([session(0.0), session(0.1, prompt=9000, seed=1)])
    assert (found.num_requests, found.num_refused) == (1, 1)


def test_a_trace_of_which_nothing_fits_is_an_error_with_the_limit() -> None:
    with pytest.raises(BadRequestError, match=r"None of the 1 requests fits.*8,192 tokens"):
        simulate([session(0.0, prompt=9000)])


def test_progress_tells_arrivals() -> None:
    told: list[tuple[int, int]] = []
    simulator().run(
        [session(float(s), seed=s) for s in range(3)],
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_distributions_of_nothing_are_zero() -> None:
    assert Distribution.of([]) == Distribution()
    spread = Distribution.of([1.0, 2.0, 3.0, 4.0])
    assert (spread.mean, spread.p50, spread.most) == (2.5, 2.5, 4.0)
