"""From measured times to the three numbers of an `Efficiency`.

Decides how they are fitted: least squares on the logarithm of predicted over measured time, so
that an error of 10 % weighs the same on 20 microseconds as on 20 milliseconds.

Invariant: the fitted numbers are positive, since their logarithms are fitted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.cost.hardware import Efficiency

Floats = NDArray[np.float64]
_MAX_STEPS = 200
_TOLERANCE = 1e-10


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
    return _predict(np.asarray(samples, float), np.log(efficiency))


def fit(samples: Sequence[Sample]) -> Efficiency:
    """Return the efficiency that predicts the samples best, by Levenberg and Marquardt's method.

    Marquardt 1963 (SIAM J. Appl. Math. 11, 2). Raises `ValueError` for fewer samples than numbers.
    """
    if len(samples) < 3:
        raise ValueError(f"three numbers need at least three samples, not {len(samples)}")
    table = np.asarray(samples, float)
    point = np.log([0.7, 0.7, max(float(table[:, 2].min()) / 4, 1e-9)])
    damping, residual = 1e-3, _residual(table, point)
    for _ in range(_MAX_STEPS):
        slopes = _jacobian(table, point)
        step = _damped_step(slopes, residual, damping)
        tried = _residual(table, point + step)
        if tried @ tried < residual @ residual:
            point, residual, damping = point + step, tried, damping / 3
        else:
            damping *= 4
        if np.abs(step).max() < _TOLERANCE:
            break
    return Efficiency(*(float(number) for number in np.exp(point)))


def fit_error(samples: Sequence[Sample], efficiency: Efficiency) -> FitError:
    """Return how far predictions are from what was measured."""
    measured = np.asarray(samples, float)[:, 2]
    errors = np.abs(predict(samples, efficiency) / measured - 1)
    return FitError(float(np.median(errors)), float(np.percentile(errors, 95)))


def _predict(table: Floats, point: Floats) -> Floats:
    products, memory, overhead = np.exp(point)
    seconds: Floats = np.maximum(table[:, 0] / products, table[:, 1] / memory) + overhead
    return seconds


def _residual(table: Floats, point: Floats) -> Floats:
    residual: Floats = np.log(_predict(table, point) / table[:, 2])
    return residual


def _jacobian(table: Floats, point: Floats) -> Floats:
    """Slopes of the residual: each sample has one limit, beside the overhead."""
    products, memory, overhead = np.exp(point)
    compute, traffic = table[:, 0] / products, table[:, 1] / memory
    total, is_compute = np.maximum(compute, traffic) + overhead, compute > traffic
    columns = (
        np.where(is_compute, -compute, 0) / total,
        np.where(is_compute, 0, -traffic) / total,
        overhead / total,
    )
    return np.stack(columns, axis=1)


def _damped_step(slopes: Floats, residual: Floats, damping: float) -> Floats:
    """Solve the damped normal equations as a longer least-squares problem."""
    scale = np.sqrt(damping) * np.maximum(np.linalg.norm(slopes, axis=0), 1e-6)
    rows = np.vstack([slopes, np.diag(scale)])
    wanted = np.concatenate([-residual, np.zeros(len(scale))])
    step: Floats = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return step
