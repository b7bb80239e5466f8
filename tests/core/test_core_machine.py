"""Any order of add, abort and step gives every request the tokens that it gets alone."""

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.errors import PoolTooSmallError
from octavo.request import Request
from tests.core.oracle import EVENTS, STOP_TOKEN, VOCABULARY, Driver, make_request

BLOCK_SIZES = (1, 2, 4, 7, 16)
NUM_BLOCKS = (4, 6, 9, 14, 30, 80)
BUDGETS = (4, 5, 8, 23, 64)
CHUNKS = (None, 1, 3, 16)
TARGETS = (None, None, 1.0, 6.0, 20.0, 40.0)  # seconds, of one for each token
SALTS = (None, None, None, "tenant")


def stream(beginning: int) -> list[int]:
    """Return one of the few beginnings that prompts share."""
    source = random.Random(beginning)
    return [source.randrange(VOCABULARY) for _ in range(100)]


STREAMS = [stream(i) for i in range(12)]


def build_driver(pick: Any) -> Driver:
    """Build a small engine; `pick` chooses one of a few values."""
    budget = pick(BUDGETS)
    return Driver.build(
        pick(NUM_BLOCKS),
        pick(BLOCK_SIZES),
        budget=budget,
        max_num_seqs=min(budget, pick((4, 8, 64))),
        max_chunk_tokens=pick(CHUNKS),
        policy=pick(("fcfs", "priority")),
        caching=pick((True, True, True, False)),
        target_itl=pick(TARGETS),
    )


def build_request(pick: Any, number: int, scale: int) -> Request:
    """Build a request whose prompt begins like others'; `scale` is about the pool's tokens."""
    shared = pick(range(max(1, scale // 2)))
    own = pick(range(1, 6))
    prompt = STREAMS[pick(range(3))][:shared] + STREAMS[pick(range(12))][:own]
    return make_request(
        prompt,
        request_id=str(number),
        n=pick((1, 1, 1, 2, 3, 4)),
        max_tokens=pick((1, 2, 5, 12, max(1, scale // 2), max(1, scale - len(prompt)))),
        seed=pick(range(3)),
        priority=pick((0, 0, 1, -1)),
        salt=pick(SALTS),
        prompt_logprobs=pick((None, None, None, 0)),
        stop_ids=pick(((), (), (STOP_TOKEN,))),
    )


class CoreMachine(RuleBasedStateMachine):
    """Adds, aborts and steps in any order; every check is the driver's."""

    driver: Driver

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.driver = build_driver(lambda values: data.draw(st.sampled_from(values)))

    @rule(data=st.data(), count=st.integers(1, 4))
    def add(self, data: st.DataObject, count: int) -> None:
        scale = self.driver.blocks.pool.num_blocks * self.driver.blocks.block_size
        for _ in range(count):
            request = build_request(
                lambda values: data.draw(st.sampled_from(values)),
                len(self.driver.requests),
                min(scale, 60),
            )
            try:
                self.driver.add(request)
            except PoolTooSmallError:
                needed = self.driver.blocks.blocks_for(request.max_length - 1)
                assert needed > self.driver.blocks.pool.num_blocks

    @precondition(lambda self: len(self.driver.scheduler))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driver.abort(data.draw(st.sampled_from(self.driver.unfinished())))

    @precondition(lambda self: len(self.driver.scheduler))
    @rule(count=st.sampled_from((1, 1, 2, 5, 20)))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run_to_end()


CoreMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCoreMachine = pytest.mark.case("S78")(CoreMachine.TestCase)


@pytest.mark.slow
@pytest.mark.case("S78")
def test_core_machine_for_long() -> None:
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            max_examples=300,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def drive(seed: int, num_rounds: int) -> Driver:
    """Do what the machine does, but chosen by a seeded generator."""
    source = random.Random(seed)

    def pick(values: Ordered[Any]) -> Any:
        return values[source.randrange(len(values))]

    driver = build_driver(pick)
    driver.chance = random.Random(seed)
    scale = min(60, driver.blocks.pool.num_blocks * driver.blocks.block_size)
    for _ in range(num_rounds):
        for _ in range(source.randrange(6)):
            request = build_request(pick, len(driver.requests), scale)
            if driver.blocks.blocks_for(request.max_length - 1) <= driver.blocks.pool.num_blocks:
                driver.add(request)
        for _ in range(source.randrange(10)):
            driver.step()
        if len(driver.scheduler) and source.random() < 0.4:
            driver.abort(pick(driver.unfinished()))
    driver.run_to_end()
    return driver


@pytest.mark.case("V08")
@pytest.mark.case("S78")
def test_every_kind_of_event_happens_and_changes_no_answer(
    record_property: Callable[[str, object], None],
) -> None:
    events: Counter[str] = Counter()
    for seed in range(80):
        driver = drive(seed, num_rounds=6)
        events.update(driver.events)
        events["requests"] += len(driver.requests)
        events["steps"] += driver.num_steps
    record_property("core_events", dict(events))
    missing = [name for name in EVENTS if not events[name]]
    assert not missing, f"never happened: {missing}"


@pytest.mark.slow
@pytest.mark.case("S78")
def test_long_service_changes_no_answer(
    record_property: Callable[[str, object], None],
) -> None:
    events: Counter[str] = Counter()
    for seed in range(1000, 1020):
        events.update(drive(seed, num_rounds=300).events)
    record_property("core_events", dict(events))


@pytest.mark.case("S57")
def test_disconnect_storm_returns_every_block() -> None:
    source = random.Random(57)
    driver = Driver.build(24, 4, budget=32, max_num_seqs=12)
    for number in range(500):
        shared = source.randrange(30)
        prompt = [*STREAMS[number % 3][:shared], source.randrange(VOCABULARY)]
        driver.add(make_request(prompt, request_id=str(number), n=1 + number % 3, max_tokens=20))
        for _ in range(source.randrange(3)):
            if len(driver.scheduler):
                driver.step()
        for sequence in source.sample(driver.unfinished(), min(2, len(driver.scheduler))):
            driver.abort(sequence)
    while len(driver.scheduler):
        driver.abort(driver.unfinished()[-1])
    assert driver.blocks.pool.num_free == 24
    assert driver.blocks.num_reserved == 0
    driver.check_answers()
