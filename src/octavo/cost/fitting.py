"""From measured times to the few numbers of an `Efficiency`.

Decides how they are fitted: least squares on the logarithm of predicted over measured time, so
that an error of 10 % weighs the same on 20 microseconds as on 20 milliseconds. The formula is that
of `roofline`. Invariant: the fitted numbers are positive, since their logarithms are fitted, and
no share of a measured peak is above 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.cost.accounting import OperationCost
from octavo.cost.hardware import Efficiency, Machine
from octavo.cost.roofline import moved_bytes, overlapped, product_factor
from octavo.program.ops import Attention, Linear

Floats = NDArray[np.float64]
Predict = Callable[[Floats], Floats]
_MAX_STEPS = 200
_TOLERANCE = 1e-10
_NUDGE = 1e-6
# What the numbers of whole steps start from, may be at most, and how much each is drawn back.
_START = Efficiency(0.8, 0.8, 2e-6, attention=0.8, cache=0.4, unpacking=0.5)
_STEP, _ROW = 2e-5, 1e-6
_MOST = np.array([1.0, 1.0, np.inf, 1.0, 1.0, np.inf, np.inf, np.inf])
_PULL = 1e-3


class Sample(NamedTuple):
    """A measured operation: seconds that its products and its bytes take at the machine's peaks,
    and those that it took.
    """

    compute: float
    memory: float
    measured: float


class FitError(NamedTuple):
    """Relative errors of predictions: half lie below `median`, 95 % below `p95`."""

    median: float
    p95: float


def predict(samples: Sequence[Sample], efficiency: Efficiency) -> Floats:
    """Return the predicted seconds of each sample."""
    table = np.asarray(samples, float)
    slower = np.maximum(table[:, 0] / efficiency.products, table[:, 1] / efficiency.memory)
    seconds: Floats = slower + efficiency.overhead
    return seconds


def fit(samples: Sequence[Sample]) -> Efficiency:
    """Return the shares and the overhead that predict single products best.

    Raises `ValueError` for fewer samples than numbers.
    """
    measured = np.asarray([sample.measured for sample in samples])
    start = np.array([0.7, 0.7, max(float(measured.min()) / 4, 1e-9)])
    found = least_squares(lambda numbers: predict(samples, _three(numbers)), measured, start)
    return _three(found)


def fit_error(samples: Sequence[Sample], efficiency: Efficiency) -> FitError:
    """Return how far predictions are from what was measured."""
    measured = np.asarray([sample.measured for sample in samples])
    return error_of(predict(samples, efficiency), measured)


def error_of(predicted: Floats, measured: Floats) -> FitError:
    """Return the relative errors of some predictions."""
    errors = np.abs(predicted / measured - 1)
    return FitError(float(np.median(errors)), float(np.percentile(errors, 95)))


def _three(numbers: Floats) -> Efficiency:
    products, memory, overhead = map(float, numbers)
    return Efficiency(products, memory, overhead, attention=products)


# --- whole steps ---------------------------------------------------------------------------------


class Step(NamedTuple):
    """A measured step: its operations, rows of logits, seconds, and the bytes of weights that
    every step of its program reads.
    """

    costs: Sequence[OperationCost]
    logit_rows: int
    measured: float
    weights: float


def fit_machine(steps: Sequence[Step], machine: Machine, weights: Floats | None = None) -> Machine:
    """Return the machine with the shares and overheads that predict whole steps best.

    weights: of the steps' errors; equal by default. In a run, where most steps are short, their
    seconds are what makes its length come out right.

    Only programs of several depths tell what an operation costs from what a step does. Raises
    `ValueError` for fewer steps than numbers.
    """
    measured = np.asarray([step.measured for step in steps])
    table = _StepTable(steps, machine)
    start = np.array([*_START, _STEP, _ROW])
    shares = np.ones(len(measured)) if weights is None else weights / weights.mean()
    found = least_squares(table.seconds, measured, start, _PULL, np.sqrt(shares), _MOST)
    *efficiency, step, row = map(float, found)
    return replace(
        machine, efficiency=Efficiency(*efficiency), step_overhead=step, row_overhead=row
    )


def predict_steps(steps: Sequence[Step], machine: Machine) -> Floats:
    """Return the predicted seconds of each step."""
    numbers = [*machine.efficiency, machine.step_overhead, machine.row_overhead]
    return _StepTable(steps, machine).seconds(np.asarray(numbers))


class _StepTable:
    """The operations of many steps at a machine's peaks, as columns; one row for each operation."""

    def __init__(self, steps: Sequence[Step], machine: Machine) -> None:
        self._machine = bare = replace(machine, efficiency=Efficiency(1.0, 1.0, 0.0))
        rows = []
        for step in steps:
            seen = bare.holding(step.weights)
            rows += [_columns(cost, seen) for cost in step.costs]
        columns = np.asarray(rows, float).T
        self._flops, self._attention, self._tiles, self._far, self._near = columns
        self._firsts = np.cumsum([0, *(len(step.costs) for step in steps)])[:-1]
        self._num_operations = np.asarray([len(step.costs) for step in steps])
        self._logit_rows = np.asarray([step.logit_rows for step in steps])

    def seconds(self, numbers: Floats) -> Floats:
        """Return each step's seconds: `roofline.operation_time` for all operations at once."""
        products, memory, overhead, attention, cache, unpacking, step, row = numbers
        compute = (self._flops + unpacking * self._tiles) / products + self._attention / attention
        each = overlapped(compute, self._far / memory, self._machine) + self._near / cache
        sums = np.add.reduceat(each, self._firsts) + self._num_operations * overhead
        seconds: Floats = sums + step + self._logit_rows * row
        return seconds


def _columns(cost: OperationCost, bare: Machine) -> tuple[float, ...]:
    """Return seconds at the peaks: of products, of attention, of one row for each tile, of memory,
    of the cache.
    """
    far, near = moved_bytes(cost.traffic, bare)
    seconds = cost.flops / bare.rate(cost.form)
    memory, cached = far / bare.bandwidth, near / (bare.cache_bandwidth or np.inf)
    if isinstance(cost.operation, Attention):
        return 0.0, seconds * product_factor(cost, bare), 0.0, memory, cached
    if not isinstance(cost.operation, Linear) or not cost.rows:
        return seconds, 0.0, 0.0, memory, cached
    row, padded = seconds / cost.rows, bare.worked_rows(cost.rows)
    return padded * row, 0.0, bare.num_tiles(cost.rows) * row, memory, cached


# --- least squares -------------------------------------------------------------------------------


def least_squares(
    predicted: Predict,
    measured: Floats,
    start: Floats,
    pull: float = 0.0,
    scales: Floats | float = 1.0,
    most: Floats | float = np.inf,
) -> Floats:
    """Return the positive numbers whose predictions are nearest, by Levenberg and Marquardt.

    pull: weight of each number's distance from where it starts, so that one of which the times say
    nothing stays there. scales: of the errors. most: what the numbers stay below.

    Marquardt 1963 (SIAM J. Appl. Math. 11, 2). Raises `ValueError` for fewer times than numbers.
    """
    if len(measured) < len(start):
        raise ValueError(f"{len(start)} numbers need at least as many samples, not {len(measured)}")
    point = point_of_start = -np.log(1 / start - 1 / most)
    damping = 1e-3

    def numbers(at: Floats) -> Floats:
        bounded: Floats = np.exp(-np.logaddexp(-at, -np.log(most)))  # 1 / (exp(-at) + 1 / most)
        return bounded

    def residual(at: Floats) -> Floats:
        found = scales * np.log(predicted(numbers(at)) / measured)
        return np.concatenate([found, pull * (at - point_of_start)])

    current = residual(point)
    for _ in range(_MAX_STEPS):
        slopes = _slopes(residual, point, current)
        step = _damped_step(slopes, current, damping)
        tried = residual(point + step)
        if tried @ tried < current @ current:
            point, current, damping = point + step, tried, damping / 3
        else:
            damping *= 4
        if np.abs(step).max() < _TOLERANCE:
            break
    return numbers(point)


def _slopes(residual: Predict, point: Floats, current: Floats) -> Floats:
    nudges = _NUDGE * np.eye(len(point))
    return np.stack([(residual(point + each) - current) / _NUDGE for each in nudges], axis=1)


def _damped_step(slopes: Floats, residual: Floats, damping: float) -> Floats:
    """Solve the damped normal equations as a longer least-squares problem."""
    scale = np.sqrt(damping) * np.maximum(np.linalg.norm(slopes, axis=0), 1e-6)
    rows = np.vstack([slopes, np.diag(scale)])
    wanted = np.concatenate([-residual, np.zeros(len(scale))])
    step: Floats = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return step
