"""The figures of a run: rates, latencies, goodput, errors, and what the client itself cost.

Decides which requests count where: rates and latencies are of answered requests, goodput of those
among them within the limits. Knows nothing of how they were sent.

Invariant: good + failed = all requests, and every failed one is counted under its error.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.planning.load.client import Outcome
from octavo.planning.load.run import Run

PERCENTILES = (50, 90, 95, 99)

# What a limit is compared with. itl: the request's longest gap between two chunks.
_VALUES: dict[str, Callable[[Outcome], float | None]] = {
    "ttft": lambda outcome: outcome.ttft,
    "tpot": lambda outcome: outcome.tpot,
    "itl": lambda outcome: max(outcome.gaps, default=None),
    "e2e": lambda outcome: outcome.e2e,
}


@dataclass(frozen=True, slots=True)
class Spread:
    """One latency over requests or tokens, in seconds."""

    mean: float
    percentiles: dict[int, float]
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """Return the spread of some values, or None if there are none.

        Percentiles are interpolated linearly between the two nearest values.
        """
        found = np.fromiter(values, float)
        if not found.size:
            return None
        ranks = np.percentile(found, PERCENTILES)
        return cls(
            float(found.mean()),
            dict(zip(PERCENTILES, ranks.tolist(), strict=True)),
            float(found.max()),
        )

    def as_ms(self) -> dict[str, float]:
        """Return the values in milliseconds, by name."""
        ranks = {f"p{rank}": value for rank, value in self.percentiles.items()}
        named = {"mean": self.mean, **ranks, "max": self.most}
        return {name: round(1e3 * value, 3) for name, value in named.items()}


def meets(outcome: Outcome, limits: dict[str, float]) -> bool:
    """Whether an answered request kept every limit; what it does not have it cannot exceed."""
    values = {name: _VALUES[name](outcome) for name in limits}
    return all(value is None or value <= limits[name] for name, value in values.items())


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one run. Limits in seconds; without limits there is no goodput."""

    run: Run
    limits: dict[str, float]

    @property
    def good(self) -> list[Outcome]:
        """Requests that were answered."""
        return [outcome for outcome in self.run.outcomes if outcome.is_good]

    @property
    def errors(self) -> Counter[str]:
        """How often each error came."""
        return Counter(o.error for o in self.run.outcomes if not o.is_good)

    @property
    def num_failed(self) -> int:
        """Requests that were not answered."""
        return len(self.run.outcomes) - len(self.good)

    @property
    def num_short(self) -> int:
        """Answers with another number of tokens than was asked for."""
        return sum(outcome.is_short for outcome in self.run.outcomes)

    @property
    def num_within(self) -> int | None:
        """Answered requests within the limits."""
        return sum(meets(o, self.limits) for o in self.good) if self.limits else None

    def tokens(self, name: str) -> int:
        """Return a sum over answered requests."""
        return sum(getattr(outcome, name) or 0 for outcome in self.good)

    def rate(self, amount: float) -> float:
        """Return an amount per second of the run."""
        return amount / self.run.seconds if self.run.seconds else 0.0

    def spreads(self) -> dict[str, Spread | None]:
        """Return each latency: ttft, tpot and e2e over requests, itl over gaps between chunks."""
        good = self.good
        return {
            "ttft": Spread.of(_known(o.ttft for o in good)),
            "tpot": Spread.of(_known(o.tpot for o in good)),
            "itl": Spread.of(gap for o in good for gap in o.gaps),
            "e2e": Spread.of(_known(o.e2e for o in good)),
        }

    def late(self) -> Spread | None:
        """Return how long after they were due requests were sent."""
        return Spread.of(outcome.late for outcome in self.run.outcomes)

    def as_json(self) -> dict[str, Any]:
        """Return all figures; latencies in milliseconds, times in seconds."""
        run, late = self.run, self.late()
        prompt, output = self.tokens("num_prompt_tokens"), self.tokens("num_output_tokens")
        figures: dict[str, Any] = {
            "requests": len(run.outcomes),
            "failed": self.num_failed,
            "short": self.num_short,
            "errors": dict(self.errors.most_common()),
            "seconds": round(run.seconds, 6),
            "prompt_tokens": prompt,
            "cached_tokens": self.tokens("num_cached_tokens"),
            "output_tokens": output,
            "requests_per_s": round(self.rate(len(self.good)), 4),
            "prompt_tokens_per_s": round(self.rate(prompt), 3),
            "output_tokens_per_s": round(self.rate(output), 3),
            "most_in_flight": run.most_in_flight,
            "late_ms": late and late.as_ms(),
            "client_cpu_seconds": round(run.cpu_seconds, 3),
        }
        for name, spread in self.spreads().items():
            figures[f"{name}_ms"] = spread and spread.as_ms()
        if self.num_within is not None:
            figures["goodput"] = {
                "limits_ms": {name: 1e3 * limit for name, limit in self.limits.items()},
                "requests": self.num_within,
                "share": self.num_within / len(run.outcomes) if run.outcomes else 0.0,
                "requests_per_s": round(self.rate(self.num_within), 4),
            }
        return figures

    def requests_json(self) -> list[dict[str, Any]]:
        """Return each request with its times in seconds, in the order in which they ended."""
        return [_request_json(outcome) for outcome in self.run.outcomes]


def _known(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)


def _request_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "sent": round(outcome.sent, 6),
        "late": round(outcome.late, 6),
        "ttft": outcome.ttft,
        "tpot": outcome.tpot,
        "e2e": outcome.e2e,
        "prompt_tokens": outcome.num_prompt_tokens,
        "cached_tokens": outcome.num_cached_tokens,
        "output_tokens": outcome.num_output_tokens,
        "error": outcome.error or None,
    }
