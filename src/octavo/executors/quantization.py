"""Quantises float weights while they are loaded, and says what that costs.

Decides which matrices get how many bits: all of a network's, save that the table and the head keep
8, since every token passes through them. Groups of 32 inputs get a scale and a minimum for 4 bits.

Invariant: what is reported as lost was measured on the weights as they are computed with.
"""

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.program import ops
from octavo.program.program import Program

Floats = NDArray[np.float32]
Quantization = Literal["int8", "int4"]

GROUP = 32
# How much of a group's range is kept: cutting a far outlier makes all other steps finer.
_KEPT = (1.0, 0.95, 0.9, 0.85, 0.8)


def tables_of(program: Program) -> frozenset[str]:
    """Return the matrices that every token passes through: the embedding table and the head."""
    logits = program.operations[-1].inputs[0].name
    names = {op.table for op in program.operations if isinstance(op, ops.Embed)}
    for op in program.operations:
        if isinstance(op, ops.Linear) and op.out == logits:
            names.update(op.weights)
    return frozenset(names)


def split_floats(rows: Floats) -> tuple[NDArray[np.uint8], Any, Any]:
    """Return nibbles (rows, groups, 32), scales and minima (rows, groups) as halves.

    weight ~ scale * nibble + minimum. Of a few ranges each group takes the one with the least
    squared error. The last group is filled up with its last weight.
    """
    missing = -rows.shape[1] % GROUP
    groups = np.pad(rows, ((0, 0), (0, missing)), mode="edge").reshape(len(rows), -1, GROUP)
    best: tuple[NDArray[np.uint8], Any, Any] | None = None
    least = np.full(groups.shape[:2], np.inf, np.float32)
    for kept in _KEPT:
        nibbles, scales, minima = _rounded(groups, kept)
        restored = nibbles * scales[..., None].astype(np.float32)
        error = np.square(restored + minima[..., None].astype(np.float32) - groups).sum(axis=-1)
        better = error < least
        if best is None:
            best = nibbles, scales, minima
        else:
            for found, new in zip(best, (nibbles, scales, minima), strict=True):
                found[better] = new[better]
        least = np.minimum(error, least)
    assert best is not None
    return best


def _rounded(groups: Floats, kept: float) -> tuple[NDArray[np.uint8], Any, Any]:
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    middle, half = (low + high) / 2, (high - low) / 2 * np.float32(kept)
    # Round with the numbers as they will be read, not as they would have been.
    minima = (middle - half).astype(np.float16)
    scales = (half / np.float32(7.5)).astype(np.float16)
    step = scales.astype(np.float32)
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
    steps = (groups - minima.astype(np.float32)[..., None]) * inverse[..., None]
    return np.clip(np.rint(steps), 0, 15).astype(np.uint8), scales, minima


class Losses:
    """What quantising took from each matrix: root mean square error over root mean square."""

    def __init__(self) -> None:
        self._errors: dict[str, tuple[float, float]] = {}

    def add(self, name: str, exact: Floats, found: Floats) -> None:
        """Note some rows of a matrix before and after."""
        difference = found.astype(np.float64) - exact
        self._errors[name] = (
            float(np.square(difference).sum()),
            float(np.square(exact, dtype=np.float64).sum()),
        )

    def describe(self, quantization: Quantization) -> Iterable[str]:
        """Yield a line about all of them, if there are any."""
        if not self._errors:
            return
        worst = max(self._errors, key=lambda name: self._relative([name]))
        yield (
            f"Quantised {len(self._errors)} matrices to {quantization} while loading: their "
            f"weights are {self._relative(self._errors):.2%} off (root mean square), those of "
            f"{worst} {self._relative([worst]):.2%}"
        )

    def _relative(self, names: Iterable[str]) -> float:
        errors, sizes = np.sum([self._errors[name] for name in names], axis=0)
        return float(np.sqrt(errors / sizes)) if sizes else 0.0
