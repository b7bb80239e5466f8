"""Three fitted numbers against an A100 that nobody here has."""

import csv
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from octavo.cost.accounting import OperationCost, account
from octavo.cost.fitting import (
    Sample,
    Step,
    fit,
    fit_error,
    fit_machine,
    predict,
    predict_steps,
)
from octavo.cost.hardware import MACHINES, PROFILED, Efficiency, Machine
from octavo.cost.roofline import moved_bytes, step_seconds
from octavo.executors.preparing import prepare
from octavo.program.ops import ElementSizes, Linear
from octavo.program.program import Chunk
from tests.program.networks import network

HALVES = ElementSizes(weight=lambda _: 2.0, activation=2.0, kv=2.0)
FILE = Path(__file__).parent / "a100_linear_layers.csv"


def measured_layers() -> list[Sample]:
    """Each line as an operation of the set, priced at the peaks of the table."""
    machine = MACHINES["a100"]
    samples = []
    with FILE.open() as lines:
        for line in csv.DictReader(lines):
            inputs, outputs = int(line["in_features"]), int(line["out_features"])
            op = Linear("x", "y", ("w",), inputs, (outputs,), (None,))
            rows = int(line["tokens"])
            cost = OperationCost(op, "bf16", op.flops(rows), op.traffic(HALVES, rows))
            samples.append(
                Sample(
                    cost.flops / machine.rate("bf16"),
                    moved_bytes(cost.traffic, machine)[0] / machine.bandwidth,
                    float(line["median_ms"]) / 1e3,
                )
            )
    return samples


@pytest.mark.parametrize("seed", range(5))
def test_an_a100_fitted_on_half_of_its_layers_foretells_the_other_half(seed: int) -> None:
    samples = measured_layers()
    random.Random(seed).shuffle(samples)
    error = fit_error(samples[::2], fit(samples[1::2]))
    assert error.median < 0.05
    assert error.p95 < 0.12


def test_layers_of_one_model_foretell_those_of_another() -> None:
    with FILE.open() as lines:
        models = [line["model"] for line in csv.DictReader(lines)]
    samples = list(zip(models, measured_layers(), strict=True))
    fitted = fit([sample for model, sample in samples if "Llama-3" in model])
    others = [sample for model, sample in samples if "Llama-3" not in model]
    error = fit_error(others, fitted)
    assert error.median < 0.06


def test_the_table_keeps_what_all_layers_give() -> None:
    assert fit(measured_layers()) == pytest.approx(PROFILED, rel=0.01)


def test_numbers_that_made_the_times_are_found_again() -> None:
    truth = Efficiency(0.61, 0.87, 3e-6, attention=0.61)
    drawn = random.Random(0)
    peaks = [Sample(drawn.expovariate(1e4), drawn.expovariate(1e4), 1.0) for _ in range(200)]
    made = [
        sample._replace(measured=float(seconds))
        for sample, seconds in zip(peaks, predict(peaks, truth), strict=True)
    ]
    assert fit(made) == pytest.approx(truth, rel=1e-6)
    assert fit_error(made, truth) == pytest.approx((0, 0), abs=1e-9)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="3 numbers need at least as many samples, not 2"):
        fit([Sample(1.0, 1.0, 1.0)] * 2)


# --- whole steps ----------------------------------------------------------------------------------

PEAKS = Machine(
    name="this",
    title="made up",
    products={"bf16": 1e11, "int4": 3e11, "attention": 5e10},
    bandwidth=2e10,
    memory_bytes=1,
    source="made up",
    efficiency=Efficiency(1.0, 1.0, 1e-6),
    cache_bandwidth=1e11,
    cache_bytes=10e6,
    instruction_set="avx2",
)
TRUTH = replace(
    PEAKS,
    efficiency=Efficiency(0.8, 0.6, 4e-6, attention=0.3, cache=0.05, unpacking=1.5),
    step_overhead=2e-4,
    row_overhead=3e-5,
)


def made_steps(machine: Machine) -> list[Step]:
    """Steps of all sizes, in two depths, that took exactly what a machine's numbers say."""
    steps = []
    shape = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8000}
    for num_layers in (2, 9):
        program = network(**shape, num_hidden_layers=num_layers)
        prepared = prepare(program, lambda _: "Q4_1", "group")
        held = machine.holding(prepared.step_weight_bytes)
        for batch, context, chunk in product((1, 3, 17, 64), (16, 700, 4000), (0, 40, 500)):
            prompt = [Chunk(chunk, max(chunk, context))] if chunk else []
            chunks = [Chunk(1, context)] * batch + prompt
            costs = account(prepared, chunks, len(chunks))
            seconds = step_seconds(costs, held, len(chunks))
            steps.append(Step(costs, len(chunks), seconds, prepared.step_weight_bytes))
    return steps


def test_predicted_steps_are_those_of_the_roofline() -> None:
    steps = made_steps(TRUTH)
    measured = [step.measured for step in steps]
    assert predict_steps(steps, TRUTH) == pytest.approx(measured, rel=1e-9)


def test_numbers_that_made_whole_steps_are_found_again() -> None:
    found = fit_machine(made_steps(TRUTH), PEAKS)
    assert tuple(found.efficiency) == pytest.approx(tuple(TRUTH.efficiency), rel=0.02)
    assert found.step_overhead == pytest.approx(TRUTH.step_overhead, rel=0.02)
    assert found.row_overhead == pytest.approx(TRUTH.row_overhead, rel=0.02)


def test_steps_that_weigh_nothing_are_not_heard() -> None:
    steps = made_steps(TRUTH)
    wrong = [step._replace(measured=10 * step.measured) for step in steps[::5]]
    weights = np.array([1.0] * len(steps) + [1e-9] * len(wrong))
    found = fit_machine(steps + wrong, PEAKS, weights)
    assert tuple(found.efficiency) == pytest.approx(tuple(TRUTH.efficiency), rel=0.02)
    assert fit_machine(steps + wrong, PEAKS).step_overhead != pytest.approx(2e-4, rel=0.02)


@pytest.mark.parametrize("factor", [0.2, 0.5])
def test_no_share_of_a_peak_is_above_one_whatever_was_measured(factor: float) -> None:
    fast = [step._replace(measured=factor * step.measured) for step in made_steps(TRUTH)]
    found = fit_machine(fast, PEAKS).efficiency
    shares = [found.products, found.memory, found.attention, found.cache]
    assert all(0 < share <= 1 for share in shares)
    assert max(shares) > 0.95


def test_a_machine_whose_steps_are_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match="8 numbers need at least as many samples, not 7"):
        fit_machine(made_steps(TRUTH)[:7], PEAKS)
