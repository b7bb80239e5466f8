"""How many tokens a step may take, so that it does not take too long.

Decides how much of a prompt is computed beside running streams: as much as keeps the step within a
target, but never so little that prompts stand still. Knows what a step costs only as a `StepCost`,
which the engine injects.

Invariant: tokens are granted in order, and once one is denied nobody later gets any. So the sum of
those granted, given as a budget, makes the same plan again without knowing any cost.
"""

from collections.abc import Sequence
from typing import Protocol

# Beside streams prompts get this share of each step's time, and so many tokens, even if the step
# then misses its target.
MIN_SHARE = 0.2
MIN_CHUNK = 4


class StepPrice(Protocol):
    """What the chunks of a step cost together."""

    @property
    def seconds(self) -> float:
        """The predicted time of the step."""
        ...

    def plus(self, start: int, length: int, logit_rows: int, /) -> "StepPrice":
        """Return the price with the tokens [start, start + length) of one more sequence."""
        ...


class StepCost(Protocol):
    """Predicts how long a step takes; more tokens never take less time."""

    def price(self, chunks: Sequence[tuple[int, int]], logit_rows: int, /) -> StepPrice:
        """Return the price of chunks, each (first position, tokens)."""
        ...


class Room:
    """What a step may still take: so many tokens, and no longer than a target.

    price: of what is planned already, or None where time does not matter. target: in seconds.
    """

    def __init__(self, budget: int, price: StepPrice | None = None, target: float = 0.0) -> None:
        self.num_left = budget
        self.num_granted = 0
        self.is_time_up = False
        self._price = price
        self._limit = target if price is None else max(target, price.seconds / (1 - MIN_SHARE))

    def take(self, start: int, wanted: int, pending: int) -> int:
        """Grant tokens of a sequence from `start` on: at most `wanted`, and at least one.

        pending: tokens that the sequence lacks; with the last of them it needs logits. Only without
        any token left it gets none.
        """
        length = min(wanted, self.num_left)
        if length <= 0:
            return 0
        if self._price is not None:
            length = self._fit(self._price, start, length, pending)
        self.num_left -= length
        self.num_granted += length
        if self.is_time_up:
            self.num_left = 0
        return length

    def _fit(self, price: StepPrice, start: int, most: int, pending: int) -> int:
        """Return how many of `most` tokens fit into the target, by bisection."""

        def priced(length: int) -> StepPrice:
            return price.plus(start, length, int(length == pending))

        fitting, low = most, min(most, max(1, MIN_CHUNK - self.num_granted))
        if priced(most).seconds > self._limit:
            fitting, beyond = low, most
            while beyond - fitting > 1:
                middle = (fitting + beyond) // 2
                if priced(middle).seconds <= self._limit:
                    fitting = middle
                else:
                    beyond = middle
        self._price = priced(fitting)
        # Whether one more token of anybody would fit.
        self.is_time_up = fitting < most or self._price.plus(0, 1, 0).seconds > self._limit
        return fitting
