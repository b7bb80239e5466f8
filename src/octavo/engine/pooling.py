"""From the final states of a prompt's tokens to one, and from that to a vector.

Decides the order and precision of their sum, and what cutting and normalising mean. Knows not which
rows are wanted.

Invariant: the mean's bits do not depend on how the prompt was cut into chunks, or computed twice.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.errors import InvalidParameterError

Floats = NDArray[np.float32]


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


def as_vector(state: bytes, *, dimensions: int | None, normalize: bool) -> Floats:
    """Return a pooled state, cut to its first `dimensions` numbers and then scaled to length 1."""
    vector = np.frombuffer(state, "<f4").astype(np.float32)
    if dimensions is not None:
        if not 1 <= dimensions <= len(vector):
            allowed = f"an integer from 1 to {len(vector)}, which is the model's width"
            raise InvalidParameterError("dimensions", dimensions, allowed)
        vector = vector[:dimensions]
    if not normalize:
        return vector
    exact = vector.astype(np.float64)
    length = np.sqrt(exact @ exact)
    return (exact / length).astype(np.float32) if length else vector


@dataclass(slots=True, kw_only=True)
class EmbeddingOutput:
    """One prompt's vector, float32; None while it runs, and if it failed, with `error` set."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: Floats | None = None
    num_cached_tokens: int = 0
    error: Exception | None = field(default=None, repr=False)
