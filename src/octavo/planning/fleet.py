"""How many machines a load needs within limits on latency.

Decides how a load is parted: evenly, each machine with Poisson arrivals. A prompt waits for those
before it as in an M/D/1 queue (Pollaczek 1930, Khinchine 1932). Knows no routing.

Invariant: the smallest number that meets every limit, or an error that says which one cannot be.
"""

import math
from dataclasses import dataclass

from octavo.errors import BadRequestError, InvalidParameterError
from octavo.planning.latency import Latency

# A machine busier than this has queues that no mean tells.
MOST_BUSY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is promised, in seconds; None promises nothing."""

    ttft: float | None = None
    itl: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Machines for a load, and what each then does. Times in seconds, means.

    batch: streams at once on each machine. busy: share of what it could do at its largest batch.
    """

    num_machines: int
    requests_per_second: float
    batch: int
    ttft: float
    inter_token: float
    busy: float


def plan_fleet(
    latency: Latency, max_batch: int, requests_per_second: float, limits: Limits
) -> Fleet:
    """Return the fewest machines that serve a load within the limits.

    max_batch: most streams that a machine can hold. Raises `BadRequestError` if no number would do.
    """
    if not (requests_per_second > 0 and math.isfinite(requests_per_second)):
        raise InvalidParameterError("requests_per_second", requests_per_second, "above 0")
    _check_reachable(latency, limits)
    # On so many machines each request is alone; there the limits hold, or nowhere.
    alone = math.ceil(requests_per_second * latency.residence(1) / MOST_BUSY) * 64
    low, high = 1, max(1, alone)
    while low < high:
        middle = (low + high) // 2
        if _serves(latency, max_batch, requests_per_second / middle, limits):
            high = middle
        else:
            low = middle + 1
    found = _machine(latency, max_batch, requests_per_second / low)
    if found is None:
        raise BadRequestError("No number of machines serves this load. Raise the limits.")
    batch, ttft, inter_token, busy = found
    return Fleet(
        num_machines=low,
        requests_per_second=requests_per_second,
        batch=batch,
        ttft=ttft,
        inter_token=inter_token,
        busy=busy,
    )


def _check_reachable(latency: Latency, limits: Limits) -> None:
    for name, limit, least in (
        ("time to first token", limits.ttft, latency.first_token()),
        ("time between tokens", limits.itl, latency.inter_token(1)),
    ):
        if limit is not None and limit < least:
            raise BadRequestError(
                f"A {name} of {limit * 1e3:,.1f} ms cannot be met on {latency.steps.machine.title}:"
                f" a request alone takes {least * 1e3:,.1f} ms. Raise the limit, quantise, or plan "
                "with a faster machine."
            )


def _serves(latency: Latency, max_batch: int, rate: float, limits: Limits) -> bool:
    found = _machine(latency, max_batch, rate)
    if found is None:
        return False
    _, ttft, inter_token, _ = found
    return (limits.ttft is None or ttft <= limits.ttft) and (
        limits.itl is None or inter_token <= limits.itl
    )


def _machine(
    latency: Latency, max_batch: int, rate: float
) -> tuple[int, float, float, float] | None:
    """Return batch, TTFT, inter-token time and busyness of a machine at `rate`, if it keeps up."""
    batch = _batch_for(latency, max_batch, rate)
    if batch is None:
        return None
    prompt = latency.first_token(batch - 1)
    load = rate * prompt
    if load >= 1:
        return None
    waiting = load * prompt / (2 * (1 - load))
    busy = rate / latency.requests_per_second(max_batch)
    return batch, waiting + prompt, latency.inter_token(batch), busy


def _batch_for(latency: Latency, max_batch: int, rate: float) -> int | None:
    """Return the fewest streams that finish `rate` requests per second, with room to spare."""
    needed = rate / MOST_BUSY
    if latency.requests_per_second(max_batch) < needed:
        return None
    low, high = 1, max_batch
    while low < high:
        middle = (low + high) // 2
        if latency.requests_per_second(middle) >= needed:
            high = middle
        else:
            low = middle + 1
    return low
