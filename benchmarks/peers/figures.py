"""What was seen of a run becomes figures; figures of repeats become a median with its range.

Decides what a rate and a latency are, for answers that came over HTTP or from an engine in its
process alike. Invariant: seconds of all answers of a run are of one clock.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. first, last: when its first and last tokens came; None if none did."""

    sent: float
    first: float | None
    last: float | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A run of requests. cut: it ended at its limit of time, before all answers were whole."""

    answers: tuple[Answer, ...]
    seconds: float
    cut: bool = False

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Seen":
        """Read what a worker wrote."""
        answers = tuple(Answer(**answer) for answer in values["answers"])
        return cls(answers, values["seconds"], values["cut"])


def figures_of(seen: Seen) -> Figures:
    """Return tokens per second, and medians of TTFT and of time per token after it, in ms.

    A latency that no answer shows is left out. Of a run that was cut, the tokens that came count.
    """
    answers = seen.answers
    figures = {
        "seconds": seen.seconds,
        "output_tokens": float(sum(answer.tokens for answer in answers)),
        "output_tokens_per_s": sum(answer.tokens for answer in answers) / seen.seconds,
    }
    waits = [answer.first - answer.sent for answer in answers if answer.first is not None]
    gaps = [
        (answer.last - answer.first) / (answer.tokens - 1)
        for answer in answers
        if answer.first is not None and answer.last is not None and answer.tokens > 1
    ]
    if waits:
        figures["ttft_p50_ms"] = 1e3 * statistics.median(waits)
    if gaps:
        figures["tpot_p50_ms"] = 1e3 * statistics.median(gaps)
    return figures


class Spread(NamedTuple):
    """A figure over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        """Return the median, and the range if there is one at this precision."""
        median, low, high = (f"{value:,.{digits}f}" for value in self)
        return median if low == high else f"{median} ({low}-{high})"
