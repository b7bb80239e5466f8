"""Three fitted numbers against an A100 that nobody here has."""

import csv
import random
from pathlib import Path

import pytest

from octavo.cost.accounting import OperationCost
from octavo.cost.fitting import Sample, fit, fit_error, predict
from octavo.cost.hardware import MACHINES, PROFILED, Efficiency
from octavo.cost.roofline import memory_seconds
from octavo.program.ops import ElementSizes, Linear

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
                    memory_seconds(cost.traffic, machine) * machine.efficiency.memory,
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
    truth = Efficiency(0.61, 0.87, 3e-6)
    drawn = random.Random(0)
    peaks = [Sample(drawn.expovariate(1e4), drawn.expovariate(1e4), 1.0) for _ in range(200)]
    made = [
        sample._replace(measured=float(seconds))
        for sample, seconds in zip(peaks, predict(peaks, truth), strict=True)
    ]
    assert fit(made) == pytest.approx(truth, rel=1e-6)
    assert fit_error(made, truth) == pytest.approx((0, 0), abs=1e-9)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least three samples, not 2"):
        fit([Sample(1.0, 1.0, 1.0)] * 2)
