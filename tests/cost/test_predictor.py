"""Steps priced while they are put together, corrected by what was measured, and accounted for."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cost.accounting import account
from octavo.cost.hardware import MACHINES, Efficiency
from octavo.cost.predictor import MAX_FACTOR, MAX_JUMP, StepPredictor
from octavo.cost.roofline import step_seconds
from octavo.cost.steps import StepTimes
from octavo.executors.preparing import prepare
from octavo.program.program import Chunk
from tests.program.networks import network

MACHINE = replace(MACHINES["xeon-8480"], step_overhead=1e-4, cache_bandwidth=1e12)
PREPARED = {
    family: prepare(network(family), lambda _: "Q4_1", "channel")
    for family in ("LlamaForCausalLM", "Gemma3ForCausalLM")
}
Spans = Sequence[tuple[int, int]]
spans_of = st.lists(
    st.tuples(st.integers(0, 3000), st.one_of(st.just(1), st.integers(1, 600))),
    min_size=1,
    max_size=8,
)
DECODES = [(100, 1)] * 8
PROMPT = [(0, 300)]


def predictor(family: str = "LlamaForCausalLM") -> StepPredictor:
    return StepPredictor(PREPARED[family], MACHINE)


UNTAUGHT = {family: predictor(family) for family in PREPARED}
TIMES = {family: StepTimes(prepared, MACHINE) for family, prepared in PREPARED.items()}


def chunks_of(spans: Spans) -> list[Chunk]:
    return [Chunk(length, start + length) for start, length in spans]


@pytest.mark.parametrize("family", PREPARED)
@settings(max_examples=40, deadline=None)
@given(spans=spans_of, logit_rows=st.integers(0, 8))
def test_a_price_is_the_predicted_time_of_its_chunks(
    family: str, spans: Spans, logit_rows: int
) -> None:
    expected = TIMES[family].of_chunks(chunks_of(spans), logit_rows)
    found = UNTAUGHT[family].price(spans, logit_rows)
    assert found.seconds == pytest.approx(expected, rel=1e-9)
    assert found.num_rows == sum(length for _, length in spans)


@pytest.mark.parametrize("family", PREPARED)
@settings(max_examples=40, deadline=None)
@given(spans=spans_of)
def test_a_step_put_together_chunk_by_chunk_costs_what_the_whole_does(
    family: str, spans: Spans
) -> None:
    prices = UNTAUGHT[family]
    price = prices.price([], 0)
    assert price.seconds == 0
    for start, length in spans:
        longer = price.plus(start, length, 1)
        assert longer.seconds > price.seconds
        price = longer
    whole = prices.price(spans, len(spans))
    assert (price.raw, price.pairs, price.positions) == (
        pytest.approx(whole.raw),
        whole.pairs,
        whole.positions,
    )


@pytest.mark.parametrize("family", PREPARED)
@settings(max_examples=40, deadline=None)
@given(spans=spans_of, logit_rows=st.integers(0, 8))
def test_an_account_adds_up_flops_and_bytes_of_all_operations(
    family: str, spans: Spans, logit_rows: int
) -> None:
    costs = account(PREPARED[family], chunks_of(spans), logit_rows)
    prices = UNTAUGHT[family]
    found = prices.account(prices.price(spans, logit_rows), 0.5)
    assert found.flops == sum(cost.flops for cost in costs)
    assert found.num_bytes == pytest.approx(sum(cost.traffic.total for cost in costs), abs=1)
    assert found.intensity == pytest.approx(found.flops / found.num_bytes)
    ideal = replace(MACHINE, efficiency=Efficiency(1, 1, 0), step_overhead=0, instruction_set=None)
    assert found.roofline_share == pytest.approx(step_seconds(costs, ideal) / 0.5)
    assert (found.measured, found.num_rows) == (0.5, sum(length for _, length in spans))


def test_what_bounds_a_step_depends_on_rows_and_machine() -> None:
    prepared = PREPARED["LlamaForCausalLM"]
    wide = replace(MACHINE, efficiency=Efficiency(1, 1, 0), step_overhead=0, cache_bandwidth=None)
    free = StepPredictor(prepared, wide)
    assert free.account(free.price([(5, 1)], 1), 1.0).bound == "memory"
    fast = StepPredictor(prepared, replace(wide, bandwidth=1e18))
    assert fast.account(fast.price(PROMPT, 1), 1.0).bound == "compute"
    slow = StepPredictor(prepared, replace(wide, efficiency=Efficiency(1, 1, 1.0)))
    assert slow.account(slow.price(PROMPT, 1), 1.0).bound == "overhead"


# --- learning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("slower", [0.2, 1.0, 1.4, 5.0])
def test_predictions_come_near_to_what_is_measured_within_a_few_steps(slower: float) -> None:
    prices = predictor()
    for _ in range(12):
        price = prices.price(DECODES, 8)
        prices.observe(price, price.raw * slower)
    assert prices.price(DECODES, 8).seconds == pytest.approx(price.raw * slower, rel=0.1)


def test_prompts_and_decodes_are_corrected_apart() -> None:
    free = replace(MACHINE, efficiency=Efficiency(0.7, 0.7, 0), step_overhead=0)
    prices = StepPredictor(PREPARED["LlamaForCausalLM"], free)
    for _ in range(20):
        alone, mixed = prices.price(DECODES, 8), prices.price([*DECODES, *PROMPT], 9)
        prices.observe(alone, alone.raw * 3)
        prices.observe(mixed, mixed.decodes * 3 + (mixed.raw - mixed.decodes) * 0.5)
    assert prices.price(DECODES, 8).seconds == pytest.approx(alone.raw * 3, rel=0.02)
    found = prices.price([*DECODES, *PROMPT], 9).seconds
    assert found == pytest.approx(mixed.decodes * 3 + (mixed.raw - mixed.decodes) / 2, rel=0.05)


@pytest.mark.parametrize(("seen", "unseen"), [(PROMPT, DECODES), (DECODES, PROMPT)])
def test_what_was_not_seen_is_as_far_off_as_what_was_until_it_is_seen(
    seen: Spans, unseen: Spans
) -> None:
    prices = predictor()
    first, second = prices.price(seen, 1), prices.price(unseen, 1)
    prices.observe(first, 1.5 * first.raw)
    assert prices.price(unseen, 1).seconds == pytest.approx(1.5 * second.raw)
    prices.observe(second, second.raw)
    prices.observe(first, 1.5 * first.raw)
    assert prices.price(seen, 1).seconds == pytest.approx(1.5 * first.raw)
    assert prices.price(unseen, 1).seconds == pytest.approx(second.raw)


def test_one_disturbed_step_hardly_moves_what_many_agree_on() -> None:
    prices = predictor()
    price = prices.price(DECODES, 8)
    for _ in range(30):
        prices.observe(price, price.raw)
    prices.observe(price, 1000 * price.raw)
    assert prices.price(DECODES, 8).seconds < 1.15 * price.raw


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(spans_of, st.floats(1e-9, 1e9)), max_size=10))
def test_predictions_stay_positive_and_bounded_and_repeat(
    steps: list[tuple[Spans, float]],
) -> None:
    first, second = predictor(), predictor()
    for spans, measured in steps:
        for prices in (first, second):
            before = prices.price(spans, 1)
            prices.observe(before, measured)
            after = prices.price(spans, 1).seconds
            assert before.seconds / MAX_JUMP <= after * 1.00001
            assert after <= before.seconds * MAX_JUMP * 1.00001
            assert before.raw / MAX_FACTOR <= after * 1.00001
            assert after <= before.raw * MAX_FACTOR * 1.00001
    assert first.price(DECODES, 8).seconds == second.price(DECODES, 8).seconds


@pytest.mark.parametrize("measured", [0.0, -1.0])
def test_what_no_clock_saw_is_no_observation(measured: float) -> None:
    prices = predictor()
    price = prices.price(DECODES, 8)
    prices.observe(price, measured)
    assert prices.price(DECODES, 8).seconds == price.raw
    assert prices.account(price, measured).roofline_share == 0


def test_noise_around_the_truth_leaves_predictions_near_it() -> None:
    prices, source = predictor(), random.Random(1)
    price = prices.price(DECODES, 8)
    for _ in range(200):
        prices.observe(price, price.raw * 1.7 * math.exp(source.gauss(0, 0.1)))
    assert prices.price(DECODES, 8).seconds == pytest.approx(price.raw * 1.7, rel=0.15)
