"""Whole steps, priced fast."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cost.accounting import account
from octavo.cost.hardware import MACHINES, Efficiency
from octavo.cost.roofline import step_seconds
from octavo.cost.steps import StepTimes
from octavo.executors.preparing import prepare
from octavo.program.program import Chunk
from tests.program.networks import network

MACHINE = replace(
    MACHINES["epyc-9654"],
    step_overhead=1e-4,
    row_overhead=1e-5,
    cache_bandwidth=1e12,
    cache_bytes=30e3,
    efficiency=Efficiency(0.7, 0.8, 1e-6, attention=0.3, cache=0.1, unpacking=2.5),
)
PREPARED = {
    family: prepare(network(family), lambda _: "Q4_1", "channel")
    for family in ("LlamaForCausalLM", "Gemma3ForCausalLM")
}
chunks_of = st.lists(
    st.tuples(st.integers(1, 600), st.integers(0, 3000)).map(lambda c: Chunk(c[0], sum(c))),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("family", PREPARED)
@settings(deadline=None)
@given(chunks=chunks_of, logit_rows=st.integers(0, 8))
def test_a_step_takes_as_long_as_its_operations(
    family: str, chunks: Sequence[Chunk], logit_rows: int
) -> None:
    prepared = PREPARED[family]
    held = MACHINE.holding(prepared.step_weight_bytes)
    assert held.far_weights < 1
    expected = step_seconds(account(prepared, chunks, logit_rows), held, logit_rows)
    found = StepTimes(prepared, MACHINE).of_chunks(list(chunks), logit_rows)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("family", PREPARED)
@given(contexts=st.lists(st.integers(1, 5000), min_size=1, max_size=9))
def test_decodes_take_as_long_from_a_list_as_from_arrays(family: str, contexts: list[int]) -> None:
    times = StepTimes(PREPARED[family], MACHINE)
    chunks = [Chunk(1, context) for context in contexts]
    assert times.of_decodes(contexts, len(contexts)) == times.of_chunks(chunks, len(contexts))


def test_longer_contexts_and_more_rows_take_longer() -> None:
    steps = StepTimes(PREPARED["LlamaForCausalLM"], MACHINE)
    near, far = (steps.of_chunks([Chunk(1, context)] * 4, 4) for context in (10, 10_000))
    more = steps.of_chunks([Chunk(1, 10)] * 400, 400)
    assert near < far
    assert near < more
