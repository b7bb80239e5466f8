"""How long operations take on a machine, and what limits them.

Decides the model of time: the roofline of Williams, Waterman and Patterson 2009 (Communications of
the ACM 52, 4), where an operation takes as long as the slower of its products and its traffic, plus
a fixed overhead. Knows neither models nor schedules.

Invariant: more flops, more bytes or a slower machine never take less time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from octavo.cost.accounting import OperationCost
from octavo.cost.hardware import Machine
from octavo.program.ops import Traffic

Bound = Literal["compute", "memory", "overhead"]


@dataclass(frozen=True, slots=True)
class OperationTime:
    """Predicted seconds of one operation: those of its products, its bytes and its overhead."""

    compute: float
    memory: float
    overhead: float

    @property
    def seconds(self) -> float:
        """Products and traffic overlap; the overhead does not."""
        return max(self.compute, self.memory) + self.overhead

    @property
    def bound(self) -> Bound:
        """What takes most of the time."""
        parts: dict[Bound, float] = {
            "compute": self.compute,
            "memory": self.memory,
            "overhead": self.overhead,
        }
        return max(parts, key=parts.__getitem__)


def operation_time(cost: OperationCost, machine: Machine) -> OperationTime:
    """Return the time of an operation on a machine."""
    efficiency = machine.efficiency
    return OperationTime(
        compute=cost.flops / (machine.rate(cost.form) * efficiency.products),
        memory=memory_seconds(cost.traffic, machine),
        overhead=efficiency.overhead,
    )


def memory_seconds(traffic: Traffic, machine: Machine) -> float:
    """Return how long bytes move: activations through a cache, where the machine has a rate."""
    share = machine.efficiency.memory
    near = machine.cache_bandwidth or machine.bandwidth
    far = traffic.total - traffic.activations
    return far / (machine.bandwidth * share) + traffic.activations / (near * share)


def step_seconds(costs: Iterable[OperationCost], machine: Machine) -> float:
    """Return how long a step of these operations takes."""
    return machine.step_overhead + sum(operation_time(cost, machine).seconds for cost in costs)
