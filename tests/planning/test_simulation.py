"""Traces on virtual time: the real engine, steps as long as they cost."""

from types import SimpleNamespace

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.core.scheduler import Chunk
from octavo.cost.hardware import MACHINES
from octavo.cost.steps import StepTimes
from octavo.errors import BadRequestError
from octavo.planning.fleet import Limits
from octavo.planning.latency import Latency, Lengths
from octavo.planning.load.work import Session, Turn
from octavo.planning.outcome import Distribution, Record, Simulation
from octavo.planning.routing import ROUTERS, Router, least_loaded, prefix_aware, round_robin
from octavo.planning.simulation import Simulator
from octavo.request import Request, SamplingParams, Sequence
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
    for replica in made.replicas:
        assert_idle(replica.engine)
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


# --- times of tokens, kept by the step ----------------------------------------------------------


def gaps_token_by_token(sessions: list[Session], **settings: object) -> list[float]:
    """The plain way: the engine tells of each token, and somebody writes its time down."""
    made = simulator(**settings)
    (replica,) = made.replicas
    last: dict[str, float] = {}
    gaps = []
    for number, each in enumerate(sessions):
        (turn,) = each.turns
        params = SamplingParams(
            max_tokens=turn.num_output_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": turn.tokens.tolist()}
        replica.engine.add(prompt, params, request_id=str(number))
    while replica.engine.has_unfinished:
        replica.record.ends.append(replica.clock.now)
        for delta in replica.engine.step():
            if delta.request_id in last:
                gaps.append(replica.clock.now - last[delta.request_id])
            last[delta.request_id] = replica.clock.now
    return sorted(gaps)


@pytest.mark.parametrize(
    "settings", [{}, {"num_gpu_blocks_override": 30}, {"max_num_seqs": 3}], ids=str
)
def test_gaps_kept_by_the_step_are_those_kept_by_the_token(settings: dict[str, int]) -> None:
    sessions = [session(0.0, 60 + 50 * s, 3 + 40 * s, s) for s in range(8)]
    made = simulator(**settings)
    made.run(sessions)
    (replica,) = made.replicas
    expected = gaps_token_by_token(sessions, **settings)
    assert sorted(replica.record.gaps()) == pytest.approx(expected)
    assert bool(replica.record.late) == ("num_gpu_blocks_override" in settings)


def test_who_is_preempted_twice_waits_since_the_last_token_it_drew() -> None:
    request = Request(
        request_id="0", prompt_token_ids=[1], params=SamplingParams(), max_tokens=9, seed=0
    )
    sequence, record = Sequence(request, 0, (0, 0, 0)), Record()
    sequence.append(5)

    def step(ended: float, *, preempted: bool = False, drawn: int = 0) -> None:
        chunks = [Chunk(sequence, 0, 1, 1)] * drawn
        plan = SimpleNamespace(preempted=[sequence] * preempted, chunks=chunks)
        record.note_plan(plan)  # type: ignore[arg-type]
        record.note_step(ended - 1, ended, drawn)

    step(1.0, drawn=1)
    step(2.0, preempted=True)
    step(3.0, preempted=True)
    step(4.0, drawn=1)
    assert record.late == [3.0]
    assert record.drawn == [1, 0, 0, 0]


# --- several machines ---------------------------------------------------------------------------


def fleet(sessions: list[Session], number: int, router: Router = round_robin) -> Simulator:
    made = Simulator(SUBJECT, L4, EngineConfig(), num_machines=number, router=router)
    made.run(sessions)
    for replica in made.replicas:
        assert_idle(replica.engine)
    return made


def served(made: Simulator) -> list[int]:
    return [len(replica.record.finished) for replica in made.replicas]


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_every_request_ends_once_on_one_machine(router: Router) -> None:
    sessions = [session(0.01 * s, 100 + 37 * s, 5 + s, s) for s in range(12)]
    made = fleet(sessions, 3, router)
    assert sum(served(made)) == 12
    again = fleet(sessions, 3, router)
    assert made.each() == again.each()


def test_one_machine_of_a_fleet_is_a_machine() -> None:
    sessions = [session(0.01 * s, 100 + 37 * s, 5 + s, s) for s in range(12)]
    alone = simulator().run(sessions)
    (one,) = fleet(sessions, 1, prefix_aware).each()
    assert one == alone


def test_machines_run_beside_each_other() -> None:
    sessions = [session(0.0, seed=s) for s in range(2)]
    made = fleet(sessions, 2)
    alone = simulate([session(0.0)])
    assert max(replica.clock.now for replica in made.replicas) == pytest.approx(alone.seconds)
    assert made.each()[0].ttft == alone.ttft


def test_more_machines_make_nobody_wait_longer() -> None:
    sessions = [session(0.0, seed=s) for s in range(12)]
    times = [
        Simulator(SUBJECT, L4, EngineConfig(), num_machines=n).run(sessions).ttft.p99
        for n in (1, 2, 4)
    ]
    assert times == sorted(times, reverse=True)
    assert times[2] < times[0]


def test_the_least_loaded_machine_gets_the_next_and_endings_count() -> None:
    long, short = session(0.0, 64, 300, 1), session(0.0, 600, 8, 2)
    made = fleet([long, short, session(1.0, 64, 8, 3)], 2, least_loaded)
    assert served(made) == [1, 2]


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    again = [session(5.0 * number, seed=number % 2) for number in range(6)]
    assert fleet(again, 2, prefix_aware).each()[0].num_requests == 6  # idle ones are taken in order
    busy = [session(0.0, 600, 300, 0), session(0.0, 600, 300, 1)]
    repeat = [session(0.2, 600, 8, 1), session(0.2, 600, 8, 0)]
    made = fleet(busy + repeat, 2, prefix_aware)
    cached = [replica.engine.scheduler.counters.num_reused_tokens for replica in made.replicas]
    assert served(made) == [2, 2]
    assert min(cached) >= 576
