"""Each experiment where its outcome is known: on virtual time, or counted by hand."""

import re

import pytest

from octavo.cost.accounting import account
from octavo.cost.steps import StepTimes
from octavo.planning.load.traces import TraceLine
from octavo.planning.steps import step_of
from octavo.planning.study import (
    batching,
    cache_gain,
    chunking,
    paging,
    predictions,
    prefixes,
    roofline,
)
from octavo.planning.study.experiment import Experiment, no_tick
from octavo.program.program import Chunk
from tests.executors.native import needs_library
from tests.planning.study.benches import MACHINE, SUBJECT, prepared, real, tiny_subject, virtual


def column(found: Experiment, name: str) -> list[object]:
    index = found.table.columns.index(name)
    return [row[index] for row in found.table.rows]


# --- the KV cache -------------------------------------------------------------------------------


def test_projections_grow_linearly_with_the_cache_and_quadratically_without() -> None:
    program = SUBJECT.program
    for num_new in (32, 64):
        cached, twice = (
            cache_gain.gigaflops(program, cache_gain.cached_steps(1, n))["projections"]
            for n in (num_new, 2 * num_new)
        )
        assert twice == pytest.approx(2 * cached, rel=1e-6)
        uncached, twice = (
            cache_gain.gigaflops(program, cache_gain.uncached_steps(1, n))["projections"]
            for n in (num_new, 2 * num_new)
        )
        assert 3.8 < twice / uncached < 4.0


def test_flops_are_those_that_the_program_counts() -> None:
    steps = cache_gain.cached_steps(20, 5)
    counted = sum(SUBJECT.program.flops([step], 1) for step in steps)
    found = cache_gain.gigaflops(SUBJECT.program, steps)
    assert sum(found.values()) == pytest.approx(counted / 1e9)


def test_both_ways_generate_the_same_tokens() -> None:
    size = cache_gain.Size(40, (3, 9))
    with real() as bench:
        found = cache_gain.experiment(bench, tiny_subject().program, size, no_tick)
        assert bench.base.stats().num_computed_tokens == 0  # the engine under them serves nothing
    assert found.finding.endswith("The tokens are the same.")
    assert column(found, "tokens") == [3, 9]


def test_different_tokens_are_called_a_fault() -> None:
    way = cache_gain.Way(flops={"projections": 1.0}, seconds=1.0)
    row = cache_gain.Row(num_new=3, cached=way, uncached=way, is_same=False)
    assert "which is a fault" in cache_gain._finding(5, row, False)


def test_on_virtual_time_the_time_without_a_cache_is_that_of_its_steps() -> None:
    bench, steps = virtual(), StepTimes(prepared(), MACHINE)
    row = cache_gain.compare(bench.engine(), SUBJECT.program, [5] * 300, 4, bench.clock)
    cached = cache_gain.cached_steps(300, 4)
    uncached = cache_gain.uncached_steps(300, 4)
    for way, chunks in ((row.cached, cached), (row.uncached, uncached)):
        assert way.seconds == pytest.approx(sum(steps.of_chunks([c], 1) for c in chunks))


# --- the roofline -------------------------------------------------------------------------------


def test_points_add_up_to_the_step() -> None:
    chunks = [Chunk(1, 100)] * 3
    costs = account(prepared(), chunks, 3)[:-1]  # without the draw
    points = list(roofline.points_of(costs, [0.5] * len(costs), 3))
    assert sum(point.flops for point in points) == sum(cost.flops for cost in costs)
    assert sum(p.num_bytes for p in points) == pytest.approx(sum(c.traffic.total for c in costs))
    assert sum(point.seconds for point in points) == pytest.approx(len(costs) / 2)
    attention = next(point for point in points if point.operation == "Attention")
    assert attention.count == 16
    assert len({point.operation for point in points}) == len(points)


def test_products_are_told_apart_by_their_weights() -> None:
    costs = account(prepared(), [Chunk(1, 10)], 1)
    names = {roofline.name_of(cost) for cost in costs}
    assert {"Linear q+k+v", "Linear o", "Linear gate+up", "Linear down", "Attention"} <= names


@needs_library
def test_every_operation_of_prefill_and_decode_is_on_the_roofline() -> None:
    subject = tiny_subject()
    chosen = subject.prepared("group", quantization=None, kv_element=2.0)
    size = roofline.Size((1, 8), 32, 64, 1)
    with real() as bench:
        found = roofline.experiment(bench, chosen, MACHINE, size, no_tick)
    assert set(column(found, "step")) == {"batch 1", "batch 8", "prompt"}
    kinds = {type(op).__name__ for op in chosen.program.operations} - {"Sample", "Split"}
    assert {str(name).split()[0] for name in column(found, "operation")} == kinds
    limits = [s.name for s in found.figures[0].series if s.is_guide]
    assert all(name.startswith("limit") for name in limits)
    assert limits


def test_the_finding_says_what_the_products_wait_for() -> None:
    def point(batch: int | None, intensity: float) -> roofline.Point:
        return roofline.Point(
            operation="Linear o", form="bf16", batch=batch, count=1,
            flops=intensity * 1e6, num_bytes=1e6, seconds=1e-3,
        )  # fmt: skip

    ridge = MACHINE.ridge()
    text = roofline._finding(
        [point(1, ridge / 2), point(64, ridge * 2)], [point(None, ridge / 3)], MACHINE
    )
    assert "they wait for memory, arithmetic and memory" in text
    assert "at batch 64" in text


def test_steps_that_the_pool_cannot_hold_are_left_out() -> None:
    size = roofline.Size((1, 2, 4), 64, 128, 1)
    steps = roofline.fitting(size, max_tokens=100, max_blocks=4, block_size=32)
    assert [len(step) for step in steps] == [1, 2]  # neither four of them nor the prompt


# --- paging -------------------------------------------------------------------------------------


def test_waste_is_what_can_be_counted_by_hand() -> None:
    # Alone, 20 prompt tokens and 3 steps: 20, 21 and 22 slots hold something after them, the last
    # of them of a request that has ended and left.
    lines = [TraceLine(0.0, 20, 3)]
    rows = {
        kind: paging.measure(kind, 64, lines).waste
        for kind in ("blocks of 32", paging.FINAL, paging.LONGEST)
    }
    assert rows["blocks of 32"] == pytest.approx(1 - (20 + 21) / (32 + 32))
    assert rows[paging.FINAL] == rows[paging.LONGEST] == pytest.approx(1 - (20 + 21) / (23 + 23))


def test_pages_hold_more_requests_than_buffers_in_the_same_memory() -> None:
    lines = paging.drawn_lines(60, seed=3)
    small, large, final, longest = (
        paging.measure(kind, 40_000, lines)
        for kind in ("blocks of 16", "blocks of 128", paging.FINAL, paging.LONGEST)
    )
    assert small.waste < large.waste < longest.waste
    assert final.waste < longest.waste
    assert small.running > longest.running
    assert longest.running <= 40_000 // max(s.num_prompt_tokens for s in lines)


def test_drawn_lengths_are_those_of_requests() -> None:
    lines = paging.drawn_lines(500, seed=1)
    assert lines == paging.drawn_lines(500, seed=1)
    assert all(1 <= line.num_prompt_tokens <= 4096 for line in lines)
    assert all(1 <= line.num_output_tokens <= 1024 for line in lines)


def test_the_experiment_tells_of_every_kind_of_memory() -> None:
    shares: list[float] = []
    found = paging.experiment(paging.Size(40, 30_000, (16, 64)), shares.append)
    kinds = ["blocks of 16", "blocks of 64", paging.FINAL, paging.LONGEST]
    assert column(found, "memory") == kinds
    assert found.finding.startswith("With blocks of 16 tokens")
    assert shares == [0.25, 0.5, 0.75, 1.0]


# --- batching -----------------------------------------------------------------------------------


def test_continuous_batching_fills_more_seats_and_takes_less_time() -> None:
    bench = virtual()
    engine = bench.engine()
    jobs = batching.drawn_jobs(engine, 24, batching.Size((8,), 3, 16, 48))
    continuous, static = (
        batching.measure(engine, jobs, 8, way, bench.clock) for way in batching.WAYS
    )
    assert continuous.filled > static.filled
    assert continuous.tokens_per_second > static.tokens_per_second
    assert continuous.mean_end < static.mean_end
    assert len(continuous.ends) == len(static.ends) == 24
    assert max(count for _, count in continuous.busy) == 8


def test_answers_are_of_very_different_lengths() -> None:
    engine = virtual().engine()
    jobs = batching.drawn_jobs(engine, 48, batching.Size((16,), 3, 16, 64))
    lengths = [job.num_output for job in jobs]
    assert min(lengths) >= 2
    assert max(lengths) > 4 * sorted(lengths)[12]
    assert len({tuple(job.prompt) for job in jobs}) == 48


def test_both_ways_have_a_row_for_each_number_of_seats() -> None:
    found = batching.experiment(virtual(), batching.Size((2, 4), 2, 8, 12), no_tick)
    assert column(found, "seats") == [2, 2, 4, 4]
    assert column(found, "batching") == ["continuous", "static"] * 2
    assert found.finding.startswith("With 4 seats")


# --- prefixes -----------------------------------------------------------------------------------


def test_shared_blocks_are_held_once() -> None:
    size = prefixes.Size((64,), 4, 8, 2)
    found = prefixes.experiment(virtual(), 1000, size, no_tick)
    # The beginning has two blocks of 32, and everyone's own tokens another.
    assert column(found, "keys and values (MB)") == [6 * 32e-3, 12 * 32e-3]
    assert column(found, "prompt tokens from the cache") == [4 * 64, 0]
    shared, alone = column(found, "first token, mean (ms)")
    assert shared < alone  # type: ignore[operator]


def test_prefixes_beyond_the_context_are_left_out() -> None:
    size = prefixes.Size((0, 64, 512), 2, 16, 8)
    assert size.fitting(512) == (0, 64)
    assert size.fitting(536) == (0, 64, 512)


# --- chunked prefill ----------------------------------------------------------------------------


def test_smaller_steps_shorten_the_longest_wait() -> None:
    bench, size = virtual(), chunking.Size(1024, 4, ())
    rows = [
        chunking.measure(
            bench.engine(max_num_batched_tokens=budget, max_num_seqs=8), size, bench.clock
        )
        for budget in (1032, 256, 64)
    ]
    longest = [row.longest for row in rows]
    assert longest == sorted(longest, reverse=True)
    assert len(set(longest)) == 3
    # The streams take four tokens of each step.
    steps = [sum(moment <= row.ttft for moment in row.moments) for row in rows]
    assert steps == [1, -(-1024 // 252), -(-1024 // 60)]


def test_the_prompt_is_halved_until_the_model_holds_it() -> None:
    size = chunking.Size(1024, 4, (512, 256, 64))
    assert size.fitting(2048) == size
    assert size.fitting(1024) == chunking.Size(512, 4, (256, 64))


def test_the_finding_compares_the_whole_prompt_with_the_best_budget() -> None:
    found = chunking.experiment(virtual(), chunking.Size(512, 2, (128, 32)), no_tick)
    budgets = column(found, "tokens per step")
    assert budgets == [516, 128, 32]
    assert re.search(r"in steps of 32 tokens they wait \S+ ms at most", found.finding)


# --- predictions --------------------------------------------------------------------------------


def test_a_machine_that_does_what_it_costs_is_predicted_without_error() -> None:
    times = StepTimes(prepared(), MACHINE)
    size = predictions.Size((1, 8), (64, 300), (32, 100), (0, 64), 1)
    found = predictions.experiment(virtual(), times, size, no_tick)
    assert len(found.table.rows) == 4 + 8
    assert column(found, "error (%)") == pytest.approx([0.0] * 12, abs=1e-6)
    assert "half are predicted within 0" in found.finding


def test_a_prediction_of_half_the_time_is_half_too_short() -> None:
    rows = [
        predictions.Row(kind="decode", about=f"{n}", predicted=n, measured=2.0 * n)
        for n in (1.0, 2.0, 3.0)
    ]
    assert rows[0].error == pytest.approx(-0.5)
    text = predictions._finding(rows)
    assert "within 50.0 %" in text
    assert "50.0 % too short" in text


def test_steps_beyond_context_or_pool_are_left_out() -> None:
    with real() as bench:
        times = StepTimes(
            tiny_subject().prepared("group", quantization=None, kv_element=2), MACHINE
        )
        size = predictions.Size((1, 64), (64, 1024), (32,), (0,), 1)
        found = predictions.experiment(bench, times, size, no_tick)
    # 128 blocks of 32: 64 sequences of 64 tokens just fit; no sequence has 1,024.
    assert column(found, "sequences")[:2] == ["1 at 64", "64 at 64"]
    assert len(found.table.rows) == 4


def test_the_chunks_priced_are_the_chunks_run() -> None:
    for _, chunks in predictions.steps_of(predictions.QUICK):
        batch = step_of(chunks, 32)
        assert batch.context_lengths.tolist() == [chunk.context for chunk in chunks]
