"""The bounds that measured steps stand beside."""

import pytest

from benchmarks.growth import STEP, bound_seconds, prompt_steps, works
from octavo.config import EngineConfig
from octavo.cost.hardware import MACHINES, Machine
from octavo.planning.plan import prepared_for
from octavo.planning.subject import read_subject
from octavo.program.program import Chunk
from tests.engines import TINY


def machine(flops: float, bandwidth: float) -> Machine:
    return Machine(
        name="m",
        title="m",
        products={"bf16": flops},
        bandwidth=bandwidth,
        memory_bytes=1,
        source="",
    )


@pytest.fixture(scope="module")
def prepared():
    model = str(TINY / "llama")
    config = EngineConfig.from_dict({"model": model})
    return prepared_for(read_subject(model), MACHINES["epyc-9654"], config)


@pytest.mark.parametrize("length", [1, STEP - 1, STEP, STEP + 1, 3 * STEP])
def test_the_steps_of_a_prompt_compute_each_token_once(length):
    steps = prompt_steps(length)
    assert sum(chunk.rows for step in steps for chunk in step) == length
    assert steps[-1][0].context == length
    assert all(chunk.rows <= STEP for step in steps for chunk in step)


def test_without_limits_on_products_the_bound_is_the_bytes(prepared):
    bound = bound_seconds(prepared, [Chunk(1, 100)], machine(1e30, 1e9))
    pages = prepared.kv_bytes_per_token * 101  # read up to this token, and it is written
    weights = prepared.total_weight_bytes
    assert bound * 1e9 == pytest.approx(weights + pages, rel=1e-3)  # and one row of the table


def test_a_step_is_bound_by_the_slower_of_the_two(prepared):
    step = [Chunk(1, 100)] * 8
    slow = bound_seconds(prepared, step, machine(1e9, 1e9))
    assert slow >= bound_seconds(prepared, step, machine(1e30, 1e9))
    assert slow >= bound_seconds(prepared, step, machine(1e9, 1e30))
    assert slow == pytest.approx(2 * bound_seconds(prepared, step, machine(2e9, 2e9)))


def test_every_cell_fits_the_pool():
    assert {key[0] for key in works()} == {"decode", "prompt"}
    assert (
        max(sum(c.context for c in step) for each in works().values() for step in each) <= 140_000
    )
