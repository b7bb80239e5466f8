"""Exact flops and bytes of every operation."""

import math

import pytest

from octavo.cost.accounting import OperationCost, PreparedProgram, account
from octavo.executors.preparing import prepare
from octavo.program.fuse import fuse
from octavo.program.ops import Attention, Embed, Linear, Split, Traffic, WriteKV
from octavo.program.program import Chunk, Program
from tests.program.networks import FAMILIES, network

BATCHES = {
    "one token": ([Chunk(1, 1)], 1),
    "decodes": ([Chunk(1, 100), Chunk(1, 7), Chunk(1, 1000)], 3),
    "prompt beside decodes": ([Chunk(40, 40), Chunk(1, 90)], 2),
    "part of a prompt": ([Chunk(128, 512)], 0),
}
each_family = pytest.mark.parametrize("family", FAMILIES)
each_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)


def plainly(program: Program) -> PreparedProgram:
    """The plain program with every number as a float32."""
    sizes = {name: 4 * math.prod(shape) for name, shape in program.parameters.items()}
    matrices = {name: "bf16" for name, shape in program.parameters.items() if len(shape) == 2}
    return PreparedProgram(program, sizes, matrices)


def total(costs: list[OperationCost]) -> int:
    return sum(cost.flops for cost in costs)


@each_family
@each_batch
def test_fused_and_plain_program_have_equal_flops(
    family: str, batch: tuple[list[Chunk], int]
) -> None:
    plain = plainly(network(family))
    fused = PreparedProgram(fuse(plain.program), plain.weight_bytes, plain.formats)
    assert len(account(fused, *batch)) < len(account(plain, *batch))
    assert total(account(fused, *batch)) == total(account(plain, *batch))


@each_family
@each_batch
def test_costs_add_up_to_the_programs(family: str, batch: tuple[list[Chunk], int]) -> None:
    prepared = plainly(network(family))
    chunks, logit_rows = batch
    costs = account(prepared, chunks, logit_rows)
    moved = Traffic()
    for cost in costs:
        moved = moved.plus(cost.traffic)
    if logit_rows:
        assert total(costs) == prepared.program.flops(chunks, logit_rows)
        expected = prepared.program.traffic(chunks, logit_rows, prepared.sizes)
        assert moved == pytest.approx(expected)
    assert moved.kv_written == sum(c.rows for c in chunks) * prepared.kv_bytes_per_token


def test_a_token_takes_two_flops_per_parameter() -> None:
    """The 2P rule of Kaplan et al. 2020, where attention is small beside the products."""
    program = network(hidden_size=2048, intermediate_size=8192, vocab_size=32000)
    products = sum(
        math.prod(shape)
        for name, shape in program.parameters.items()
        if len(shape) == 2 and name != "embedding"
    )
    costs = account(plainly(program), [Chunk(1, 1)], 1)
    dense = sum(cost.flops for cost in costs if not isinstance(cost.operation, Attention))
    assert dense == pytest.approx(2 * products, rel=0.01)


def test_a_token_keeps_a_key_and_a_value_per_layer_and_head() -> None:
    prepared = plainly(network())
    assert prepared.kv_bytes_per_token == 2 * 7 * 2 * 16 * 2  # K and V, layers, heads, width, bf16
    (row,) = {
        cost.traffic.kv_written
        for cost in account(prepared, [Chunk(3, 3)], 0)
        if isinstance(cost.operation, WriteKV)
    }
    assert row * 7 == 3 * prepared.kv_bytes_per_token


def test_weights_are_read_once_however_many_chunks() -> None:
    prepared = plainly(network())
    one = account(prepared, [Chunk(1, 50)], 1)
    many = account(prepared, [Chunk(1, 50)] * 9, 9)
    for alone, together in zip(one, many, strict=True):
        if not isinstance(alone.operation, Embed):
            assert together.traffic.weights == alone.traffic.weights
        assert together.flops == 9 * alone.flops


def test_without_logits_the_head_does_not_run() -> None:
    prepared = plainly(network())
    kinds = {type(cost.operation).__name__ for cost in account(prepared, [Chunk(5, 5)], 0)}
    assert "SelectRows" not in kinds
    assert "Sample" not in kinds


def test_views_cost_nothing_and_are_left_out() -> None:
    prepared = plainly(fuse(network()))
    assert any(isinstance(op, Split) for op in prepared.program.operations)
    assert not any(
        isinstance(cost.operation, Split) for cost in account(prepared, [Chunk(1, 1)], 1)
    )


def test_a_tied_matrix_counts_once_in_memory_but_is_read_by_both() -> None:
    tied = plainly(network(tie_word_embeddings=True))
    free = plainly(network(tie_word_embeddings=False))
    assert free.total_weight_bytes - tied.total_weight_bytes == 4 * 300 * 64
    heads = [
        next(
            cost.traffic.weights
            for cost in reversed(account(each, [Chunk(1, 1)], 1))
            if isinstance(cost.operation, Linear)
        )
        for each in (tied, free)
    ]
    assert heads[0] == heads[1] == 4 * 300 * 64


def test_intensity_grows_with_the_batch() -> None:
    prepared = prepare(network(), lambda _: "BF16", "group")

    def intensity(rows: int) -> float:
        costs = account(prepared, [Chunk(1, 9)] * rows, rows)
        return next(c.intensity for c in costs if isinstance(c.operation, Linear))

    assert intensity(1) < intensity(8) < intensity(64)
    assert all(c.intensity == 0 for c in account(prepared, [Chunk(1, 1)], 0) if not c.flops)
