"""Prompts beside streams: as much as fits into the target, never nothing, and repeatable."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.scheduler import StepPlan
from octavo.core.steering import MIN_CHUNK, MIN_SHARE, Room
from octavo.request import Sequence
from tests.core.oracle import Cost, Driver, Price, make_request
from tests.core.test_core_machine import drive


def streaming(num_streams: int, target: float | None, cost: Cost | None = None) -> Driver:
    """Return a driver whose streams have computed their prompts."""
    driver = Driver.build(
        400, 4, budget=512, max_num_seqs=64, target_itl=target, cost=cost, caching=False
    )
    for number in range(num_streams):
        driver.add(make_request([number] * 3, request_id=f"stream {number}", max_tokens=300))
    while driver.scheduler.waiting or any(
        s.num_computed < s.num_prompt_tokens for s in driver.scheduler.running
    ):
        driver.step()
    return driver


def lengths(plan: StepPlan, name: str = "prompt") -> list[int]:
    return [c.length for c in plan.chunks if c.sequence.request.request_id.startswith(name)]


def add_prompt(driver: Driver, length: int, name: str = "prompt") -> None:
    driver.add(make_request([9] * length, request_id=name))


# --- the room of a step -------------------------------------------------------------------------


@given(
    target=st.floats(0, 200),
    per_position=st.sampled_from((0.0, 0.01)),
    used=st.integers(0, 60),
    budget=st.integers(1, 300),
    wanted=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 100)), max_size=6),
)
def test_what_is_granted_is_the_most_that_fits_in_order(
    target: float, per_position: float, used: int, budget: int, wanted: list[tuple[int, int]]
) -> None:
    price = Price(float(used), per_position)
    room, total, is_over = Room(budget, price, target), 0, False
    target = max(target, used / (1 - MIN_SHARE))
    for start, length in wanted:
        granted = room.take(start, length, length)
        assert not (is_over and granted), "nobody gets what another was denied"
        most = min(length, budget - total)
        assert granted <= most
        if granted < most and not is_over:
            is_over = True
            more = price.plus(start, granted + 1, 0).seconds
            assert more > target, "one more would have fitted"
        is_over = is_over or granted == 0
        total += granted
        least = total <= MIN_CHUNK or granted <= 1
        price = price.plus(start, granted, 0)
        assert price.seconds <= target or least
    assert room.num_granted == total


def test_without_a_price_only_the_count_limits() -> None:
    room = Room(100)
    assert [room.take(0, wanted, 999) for wanted in (60, 60, 60)] == [60, 40, 0]
    assert not room.is_time_up


# --- plans --------------------------------------------------------------------------------------


@pytest.mark.case("S60")
def test_a_prompt_beside_streams_takes_what_the_target_leaves() -> None:
    driver = streaming(8, 100.0)
    add_prompt(driver, 300)
    plans = [driver.step() for _ in range(4)]
    assert [lengths(plan) for plan in plans] == [[92], [92], [92], [24]]
    assert [plan.budget for plan in plans] == [100, 100, 100, 512]
    driver.run_to_end()


@pytest.mark.case("S60")
def test_a_target_that_streams_alone_miss_leaves_prompts_a_share() -> None:
    driver = streaming(40, 5.0)
    add_prompt(driver, 32)
    plans = [driver.step() for _ in range(4)]
    assert [lengths(plan) for plan in plans] == [[10], [10], [10], [2]]
    assert plans[0].num_tokens * MIN_SHARE == 10
    driver.run_to_end()


def test_a_few_tokens_of_a_prompt_go_on_beside_whatever_streams() -> None:
    driver = streaming(2, 1.0)
    add_prompt(driver, 2 * MIN_CHUNK + 1)
    found = [lengths(driver.step()) for _ in range(3)]
    assert found == [[MIN_CHUNK], [MIN_CHUNK], [1]]
    driver.run_to_end()


def test_prompts_alone_take_the_whole_budget() -> None:
    driver = streaming(0, 1.0)
    add_prompt(driver, 600, "prompt a")
    add_prompt(driver, 600, "prompt b")
    assert lengths(driver.step()) == [512]
    assert lengths(driver.step()) == [88, 424]
    driver.run_to_end()


def test_without_a_target_prompts_take_the_whole_budget_beside_streams() -> None:
    driver = streaming(8, None)
    add_prompt(driver, 600)
    plan = driver.step()
    assert (lengths(plan), plan.budget) == ([504], 512)


def test_several_prompts_share_the_time_in_order() -> None:
    driver = streaming(4, 64.0)
    for name in ("a", "b", "c"):
        add_prompt(driver, 50, f"prompt {name}")
    plan = driver.step()
    assert lengths(plan) == [50, 10]
    assert [s.request.request_id for s in plan.admitted] == ["prompt a", "prompt b"]
    assert plan.budget == plan.num_tokens == 64


def test_later_chunks_are_shorter_where_positions_cost() -> None:
    driver = streaming(4, 100.0, Cost(per_position=0.01))
    add_prompt(driver, 400)
    found = [lengths(driver.step())[0] for _ in range(5)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]
    driver.run_to_end()


@pytest.mark.parametrize("seed", range(30))
def test_a_recorded_budget_makes_the_same_plan_without_a_cost(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_shortened = 0
    original = Driver.plan

    def plan_twice(driver: Driver) -> StepPlan:
        twin = copy.deepcopy(driver.scheduler)
        plan = original(driver)
        twin.cost = None
        again = twin.schedule(budget=plan.budget)
        assert shape(again) == shape(plan)
        nonlocal num_shortened
        num_shortened += plan.budget < driver.scheduler.max_num_batched_tokens
        return plan

    monkeypatch.setattr(Driver, "plan", plan_twice)
    drive(seed, num_rounds=3)


def shape(plan: StepPlan) -> list[object]:
    """Return all that a plan says, with sequences by name."""

    def names(sequences: list[Sequence]) -> list[tuple[str, int]]:
        return [(s.request.request_id, s.index) for s in sequences]

    chunks = [(*names([c.sequence]), c.start, c.length, c.num_samples) for c in plan.chunks]
    return [chunks, plan.copies, names(plan.admitted), names(plan.preempted), plan.budget]
