"""From the final states of a prompt's tokens to one.

Decides the order and precision of their sum. Knows neither which rows are wanted nor what becomes
of the mean.

Invariant: the mean's bits do not depend on how the prompt was cut into chunks, or computed twice.
"""

import numpy as np
from numpy.typing import NDArray


class StatePool:
    """Adds up states, (rows, width), in the order of their positions, in float64."""

    def __init__(self) -> None:
        self._total: NDArray[np.float64] | None = None
        self._num_added = 0
        self._next = 0

    def add(self, position: int, states: NDArray[np.float32]) -> None:
        """Add the states from `position` on; a sequence that was preempted brings some again."""
        for state in states[max(0, self._next - position) :]:
            self._total = state.astype(np.float64) if self._total is None else self._total + state
            self._num_added += 1
        self._next = max(self._next, position + len(states))

    def mean(self) -> bytes | None:
        """Return the mean so far as little-endian float32, or None without any state."""
        if self._total is None:
            return None
        return (self._total / self._num_added).astype("<f4").tobytes()
