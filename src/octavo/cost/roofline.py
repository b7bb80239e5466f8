"""How long operations take on a machine, and what limits them.

Decides the model of time: the roofline of Williams, Waterman and Patterson 2009 (Communications of
the ACM 52, 4), where an operation takes as long as the slower of its products and its traffic, plus
a fixed overhead. A CPU's cores, which both multiply and fetch, overlap the two only in part: there
the roof has no edge. Knows neither models nor schedules.

Invariant: more flops, more bytes or a slower machine never take less time.
"""

from collections.abc import Iterable
from math import hypot
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.cost.accounting import OperationCost
from octavo.cost.hardware import Machine
from octavo.program.ops import Attention, Linear, Traffic

Bound = Literal["compute", "memory", "overhead"]
Floats = NDArray[np.float64]


class OperationTime(msgspec.Struct, frozen=True, gc=False):
    """Predicted seconds of one operation: those of its products, its bytes and its overhead.

    near: of what does not overlap with the products, as values in a cache. is_core: whether what
    multiplies also fetches.
    """

    compute: float
    memory: float
    overhead: float
    near: float = 0.0
    is_core: bool = False

    @property
    def seconds(self) -> float:
        """Products and memory overlap; the cache, which both need, and the overhead do not."""
        overlap = hypot if self.is_core else max
        return overlap(self.compute, self.memory) + self.near + self.overhead

    @property
    def bound(self) -> Bound:
        """What takes most of the time."""
        parts: dict[Bound, float] = {
            "compute": self.compute,
            "memory": self.memory + self.near,
            "overhead": self.overhead,
        }
        return max(parts, key=parts.__getitem__)


def operation_time(cost: OperationCost, machine: Machine) -> OperationTime:
    """Return the time of an operation on a machine."""
    far, near = moved_bytes(cost.traffic, machine)
    return OperationTime(
        compute=cost.flops * product_factor(cost, machine) / product_rate(cost, machine),
        memory=far / (machine.bandwidth * machine.efficiency.memory),
        overhead=machine.efficiency.overhead,
        near=near_seconds(near, machine),
        is_core=machine.is_cpu,
    )


def overlapped(compute: Floats, memory: Floats, machine: Machine) -> Floats:
    """Return the seconds of operations whose products and bytes take so long, without the rest."""
    return np.hypot(compute, memory) if machine.is_cpu else np.maximum(compute, memory)


def product_rate(cost: OperationCost, machine: Machine) -> float:
    """Return the flops per second that an operation's products reach."""
    efficiency = machine.efficiency
    is_attention = isinstance(cost.operation, Attention)
    return machine.rate(cost.form) * (efficiency.attention if is_attention else efficiency.products)


def product_factor(cost: OperationCost, machine: Machine) -> float:
    """Return the work of an operation over its flops: more where tiles are not full.

    Of attention, one tile of each chunk is not.
    """
    if isinstance(cost.operation, Attention):
        return 1.0 + cost.positions * idle_flops(cost.operation, machine) / max(cost.flops, 1)
    if not isinstance(cost.operation, Linear) or not cost.rows:
        return 1.0
    return machine.worked_rows(cost.rows) / cost.rows


def idle_flops(op: Attention, machine: Machine) -> float:
    """Return what the empty rows of a tile would compute with one position."""
    group = op.heads // op.kv_heads
    return op.flops(1, 1) * machine.idle_rows(group) / group


def moved_bytes(traffic: Traffic, machine: Machine) -> tuple[float, float]:
    """Return the bytes that move from memory, and those through a cache."""
    near = traffic.activations if machine.cache_bandwidth else 0.0
    return traffic.total - near - (1 - machine.far_weights) * traffic.weights, near


def near_seconds(num_bytes: float, machine: Machine) -> float:
    """Return how long bytes move through the cache."""
    rate = machine.cache_bandwidth
    return num_bytes / (rate * machine.efficiency.cache) if rate else 0.0


def step_seconds(costs: Iterable[OperationCost], machine: Machine, logit_rows: int = 0) -> float:
    """Return how long a step of these operations takes."""
    beside = machine.step_overhead + logit_rows * machine.row_overhead
    return beside + sum(operation_time(cost, machine).seconds for cost in costs)
