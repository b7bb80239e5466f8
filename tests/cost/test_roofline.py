"""The time of an operation, and what limits it."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.cost.accounting import OperationCost
from octavo.cost.hardware import MACHINES, Efficiency, Machine
from octavo.cost.roofline import operation_time, overlapped, product_rate, step_seconds
from octavo.program.ops import Add, Attention, Linear, Traffic

PLAIN = Machine(
    name="plain",
    title="plain",
    products={"bf16": 1000.0, "int4": 4000.0},
    bandwidth=100.0,
    memory_bytes=1,
    source="made up",
    efficiency=Efficiency(0.5, 0.8, 0.25),
)


def cost(flops: int, weights: float = 0.0, form: str = "bf16", **moved: float) -> OperationCost:
    return OperationCost(Add("x", "y", "z", 1), form, flops, Traffic(weights, **moved))


def test_the_slower_of_products_and_traffic_counts_and_the_overhead_on_top() -> None:
    time = operation_time(cost(1000, weights=80), PLAIN)
    assert (time.compute, time.memory, time.overhead) == pytest.approx((2.0, 1.0, 0.25))
    assert time.seconds == pytest.approx(2.25)


@pytest.mark.parametrize(
    ("flops", "weights", "bound"),
    [(1000, 80, "compute"), (100, 80, "memory"), (10, 0.8, "overhead")],
)
def test_the_bound_is_what_takes_longest(flops: int, weights: float, bound: str) -> None:
    assert operation_time(cost(flops, weights), PLAIN).bound == bound


def test_formats_have_rates_of_their_own() -> None:
    assert operation_time(cost(1000, form="int4_group"), PLAIN).compute == pytest.approx(0.5)


def test_values_between_operations_move_at_the_rate_of_the_cache_where_it_is_known() -> None:
    moved = cost(0, weights=80, activations=80)
    assert operation_time(moved, PLAIN).seconds == pytest.approx(2.0 + 0.25)
    near = replace(PLAIN, cache_bandwidth=1000.0)
    assert operation_time(moved, near).seconds == pytest.approx(1.0 + 0.08 + 0.25)
    slow = replace(near, efficiency=near.efficiency._replace(cache=0.5))
    assert operation_time(moved, slow).near == pytest.approx(0.16)


def test_cores_overlap_products_and_traffic_in_part() -> None:
    core = replace(PLAIN, instruction_set="generic")
    time = operation_time(cost(1500, weights=320), core)
    assert (time.compute, time.memory) == pytest.approx((3.0, 4.0))
    assert time.seconds == pytest.approx(5.0 + 0.25)
    assert overlapped(np.array([3.0]), np.array([4.0]), core) == pytest.approx([5.0])
    assert overlapped(np.array([3.0]), np.array([4.0]), PLAIN) == pytest.approx([4.0])


def test_weights_that_stay_in_a_cache_come_at_its_rate_and_nothing_else_does() -> None:
    machine = replace(PLAIN, cache_bandwidth=400.0, cache_bytes=60)
    half = machine.holding(120)
    assert operation_time(cost(0, weights=120), half).memory == pytest.approx(
        (60 / 400 + 60 / 100) / 0.8
    )
    assert operation_time(cost(0, kv_read=120.0), half).memory == pytest.approx(120 / 100 / 0.8)
    assert operation_time(cost(0, weights=40), machine.holding(40)).memory == pytest.approx(
        40 / 400 / 0.8
    )
    assert half.holding(40) == machine.holding(40)
    assert PLAIN.holding(40) == PLAIN


def test_attention_has_a_share_of_its_own() -> None:
    machine = replace(PLAIN, efficiency=PLAIN.efficiency._replace(attention=0.1))
    op = Attention("q", "out", 0, 1, 1, 16, 1.0)
    attending = OperationCost(op, "attention", 1000, Traffic(), 1)
    assert operation_time(attending, machine).compute == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("isa", "rows", "worked"),
    [
        ("avx2", 1, 1 + 2), ("avx2", 2, 4 + 2), ("avx2", 4, 4 + 2), ("avx2", 5, 5 + 4),
        ("avx2", 7, 8 + 4), ("avx2", 8, 8 + 4), ("avx512", 5, 8 + 2), ("avx512_bf16", 16, 16 + 4),
        ("avx512_bf16", 17, 20 + 10), ("avx512", 33, 36 + 18), ("amx", 33, 48 + 6),
    ],
)  # fmt: skip
def test_a_tile_costs_its_rows_and_its_weights_whether_full_or_not(
    isa: str, rows: int, worked: float
) -> None:
    tiled = replace(PLAIN, instruction_set=isa, efficiency=PLAIN.efficiency._replace(unpacking=2.0))
    op = Linear("x", "y", ("w",), 10, (5,), (None,))
    product = OperationCost(op, "bf16", op.flops(rows), Traffic(), rows)
    assert operation_time(product, PLAIN).compute == pytest.approx(rows * 100 / 500)
    assert operation_time(product, tiled).compute == pytest.approx(worked * 100 / 500)


@pytest.mark.parametrize(
    ("instruction_set", "kv_heads", "worked"),
    [(None, 4, 1), ("avx512", 4, 8 / 3), ("avx512", 12, 8), ("avx2", 4, 1), ("generic", 3, 1)],
)
def test_a_token_attends_at_the_cost_of_a_whole_tile_of_rows(
    instruction_set: str | None, kv_heads: int, worked: float
) -> None:
    op = Attention("q", "out", 0, 12, kv_heads, 16, 1.0)
    machine = replace(PLAIN, instruction_set=instruction_set)
    one = OperationCost(op, "attention", op.flops(1, 50), Traffic(), 1, positions=50)
    alone = op.flops(1, 50) / product_rate(one, machine)
    assert operation_time(one, machine).compute == pytest.approx(worked * alone)


@pytest.mark.parametrize("change", [{"flops": 2000}, {"weights": 8000}, {"kv_read": 8000.0}])
def test_more_work_never_takes_less_time(change: dict[str, float]) -> None:
    less = {"flops": 1000, "weights": 80}
    assert (
        operation_time(cost(**{**less, **change}), PLAIN).seconds
        >= operation_time(cost(**less), PLAIN).seconds
    )


def test_a_step_is_its_operations_and_what_it_costs_beside_them() -> None:
    slow = replace(PLAIN, step_overhead=10.0)
    assert step_seconds([cost(1000)] * 3, slow) == pytest.approx(10 + 3 * 2.25)


def test_a_better_machine_is_faster() -> None:
    large = cost(10**12, weights=10**9)
    times = [operation_time(large, MACHINES[name]).seconds for name in ("h200", "a100", "l4")]
    assert times == sorted(times)
