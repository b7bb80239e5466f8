"""When a waiting request will begin."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.outlook import USUAL_OUTPUT_TOKENS, Outlook
from tests.engine.test_steering import MACHINE, engine
from tests.engines import greedy, tokens

outlooks = st.builds(
    Outlook,
    decode_seconds=st.floats(1e-6, 1),
    chunk_tokens=st.integers(1, 512),
    chunk_seconds=st.floats(1e-6, 2),
    num_pending_tokens=st.integers(0, 10_000),
    num_free_seats=st.integers(0, 64),
    steps_per_seat=st.sampled_from((0.0, 0.3, 7.0, 100.0)),
)


@given(outlooks, st.integers(0, 10_000), st.integers(0, 100))
def test_more_work_before_a_request_never_makes_it_begin_sooner(
    outlook: Outlook, num_tokens: int, num_requests: int
) -> None:
    outlook = replace(outlook, chunk_seconds=outlook.decode_seconds + outlook.chunk_seconds)
    found = outlook.seconds_until(num_tokens, num_requests)
    assert found >= 0
    margin = found * (1 - 1e-9)
    assert outlook.seconds_until(num_tokens + 100, num_requests) >= margin
    assert outlook.seconds_until(num_tokens, num_requests + 1) >= margin
    fewer = replace(outlook, num_free_seats=max(0, outlook.num_free_seats - 1))
    assert fewer.seconds_until(num_tokens, num_requests) >= margin


def test_an_idle_engine_begins_at_once() -> None:
    outlook = engine(None, MACHINE, MACHINE).stats().outlook
    assert outlook is not None
    assert outlook.seconds_until(0, 0) == 0
    assert outlook.seconds_until(5120, 0) == pytest.approx(10 * outlook.chunk_seconds)


def test_prompts_that_run_come_before_those_that_wait() -> None:
    made = engine(None, MACHINE, MACHINE)
    made.add(tokens(1500), greedy(4))
    made.step()
    outlook = made.stats().outlook
    assert outlook is not None
    assert outlook.num_pending_tokens == 1500 - 512
    assert outlook.seconds_until(0, 0) > 0


def test_a_target_makes_prompts_take_longer_and_the_outlook_says_so() -> None:
    made = engine(None, MACHINE, MACHINE)
    for number in range(16):
        made.add(tokens(8, seed=number), greedy(100))
    made.step()
    free = made.stats().outlook
    made.scheduler.target_itl = 2 * made.stats().outlook.decode_seconds  # type: ignore[union-attr]
    steered = made.stats().outlook
    assert free is not None
    assert steered is not None
    assert steered.chunk_tokens < free.chunk_tokens == 512 - 16
    assert steered.chunk_seconds <= made.scheduler.target_itl
    assert steered.seconds_until(10_000, 0) > free.seconds_until(10_000, 0)


def test_seats_come_free_as_answers_end() -> None:
    made = engine(None, MACHINE, MACHINE)
    made.scheduler.max_num_seqs = 2
    for number, length in enumerate((1000, 30, 1000)):
        made.add(tokens(8, seed=number), greedy(length))
    made.step()
    outlook = made.stats().outlook
    assert outlook is not None
    assert outlook.num_free_seats == 0
    assert outlook.steps_per_seat == (USUAL_OUTPUT_TOKENS + 30) / 2 / 2
    for _ in range(40):
        made.step()  # the one of 30 tokens ends, the third begins
    outlook = made.stats().outlook
    assert outlook is not None
    assert outlook.steps_per_seat == 30 / 2


def test_a_request_that_waits_for_blocks_leaves_no_seat_free() -> None:
    made = engine(None, MACHINE, MACHINE)
    for number in range(10):
        made.add(tokens(3500, seed=number), greedy(500))
    while made.scheduler.waiting and made.scheduler.waiting[0].why_waiting != "blocks":
        made.step()
    outlook = made.stats().outlook
    assert outlook is not None
    assert outlook.num_free_seats == 0
