"""Machines for a load."""

import pytest

from octavo.cost.hardware import MACHINES
from octavo.cost.steps import StepTimes
from octavo.errors import BadRequestError, InvalidParameterError
from octavo.planning.fleet import MOST_BUSY, Fleet, Limits, plan_fleet
from octavo.planning.latency import Latency, Lengths
from tests.planning.subjects import subject

PREPARED = subject().prepared("channel", quantization=None, kv_element=2.0)
LATENCY = Latency(
    StepTimes(PREPARED, MACHINES["l4"]), Lengths(prompt_tokens=512, output_tokens=128), 512
)
MAX_BATCH = 64


def fleet(rate: float, ttft: float | None = None, itl: float | None = None) -> Fleet:
    return plan_fleet(LATENCY, MAX_BATCH, rate, Limits(ttft=ttft, itl=itl))


def test_a_small_load_needs_one_machine() -> None:
    found = fleet(0.01)
    assert (found.num_machines, found.batch) == (1, 1)
    assert found.inter_token == LATENCY.inter_token(1)


def test_twice_the_load_needs_about_twice_the_machines() -> None:
    ten, twenty = fleet(100).num_machines, fleet(200).num_machines
    assert ten > 1
    assert 2 * ten - 1 <= twenty <= 2 * ten


def test_no_machine_is_busier_than_it_may_be_and_one_fewer_would_be() -> None:
    found = fleet(100)
    assert found.busy <= MOST_BUSY
    each = 100 / (found.num_machines - 1)
    assert each / LATENCY.requests_per_second(MAX_BATCH) > MOST_BUSY


def test_limits_are_kept_and_cost_machines() -> None:
    free = fleet(100)
    limit = LATENCY.inter_token(1) * 1.5
    kept = fleet(100, itl=limit)
    assert free.inter_token > limit >= kept.inter_token
    assert kept.num_machines > free.num_machines
    prompt = LATENCY.first_token() * 1.2
    quick = fleet(100, ttft=prompt)
    assert quick.ttft <= prompt < free.ttft


@pytest.mark.parametrize(("name", "words"), [("ttft", "first token"), ("itl", "between tokens")])
def test_a_limit_that_no_request_meets_alone_is_an_error_with_the_least(
    name: str, words: str
) -> None:
    with pytest.raises(BadRequestError, match=rf"{words} of 0\.0 ms cannot.*alone takes \d"):
        fleet(1, **{name: 1e-6})


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    with pytest.raises(InvalidParameterError, match="requests_per_second must be above 0"):
        fleet(rate)


def test_streams_finish_at_the_rate_of_littles_law() -> None:
    for batch in (1, 7, 64):
        residence = LATENCY.residence(batch)
        assert LATENCY.requests_per_second(batch) * residence == pytest.approx(batch)


def test_the_time_of_an_answer_is_its_prompt_and_its_tokens() -> None:
    own = LATENCY.first_token() + 128 * LATENCY.decode(1)
    assert LATENCY.residence(1) == pytest.approx(own)
