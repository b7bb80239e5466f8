"""Steps on virtual time."""

from types import SimpleNamespace

import numpy as np
import pytest

from octavo.core.blocks import BlockManager
from octavo.core.scheduler import Chunk as Planned
from octavo.core.scheduler import Scheduler
from octavo.cost.hardware import MACHINES
from octavo.cost.steps import StepTimes
from octavo.executors.batch import build_batch
from octavo.executors.preparing import prepare
from octavo.executors.simulated import SimulatedExecutor, VirtualClock, build_lengths
from octavo.program.program import Chunk
from octavo.request import Request, SamplingParams
from tests.program.networks import network

STEPS = StepTimes(prepare(network(), lambda _: "BF16", "channel"), MACHINES["a100"])


def scheduler() -> Scheduler:
    made = Scheduler(BlockManager(64, 16), max_num_batched_tokens=40, max_num_seqs=8)
    for number, length in enumerate((50, 3, 20)):
        params = SamplingParams(max_tokens=4, temperature=0)
        ids = list(range(number, number + length))
        made.add(
            Request(
                request_id=str(number),
                prompt_token_ids=ids,
                params=params,
                max_tokens=4,
                seed=0,
            )
        )
    return made


def test_lengths_are_those_of_the_whole_batch() -> None:
    made = scheduler()
    for _ in range(4):
        plan = made.schedule()
        whole, short = build_batch(plan), build_lengths(plan, lambda _: None)
        assert np.array_equal(whole.chunk_starts, short.chunk_starts)
        assert np.array_equal(whole.context_lengths, short.context_lengths)
        assert len(whole.logit_rows) == len(whole.samples) == len(short.logit_rows)
        made.commit(plan, [1] * len(short.logit_rows))


def test_the_clock_advances_by_the_predicted_seconds_and_every_row_draws() -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(STEPS, clock, num_blocks=64, block_size=16, spells=7)
    plan = scheduler().schedule()
    result = executor.submit(build_lengths(plan, lambda _: None)).result()
    expected = STEPS.of_chunks([Chunk(c.length, c.start + c.length) for c in plan.chunks], 0)
    assert clock.now == result.duration == pytest.approx(expected)
    assert result.token_ids == []
    chunks = [Planned(None, 0, 3, 1), Planned(None, 5, 1, 2)]
    drawing = SimpleNamespace(chunks=chunks, num_tokens=4)
    assert executor.submit(build_lengths(drawing, lambda _: None)).result().token_ids == [7] * 3


def test_time_never_goes_back() -> None:
    clock = VirtualClock()
    clock.advance_to(5.0)
    clock.advance_to(3.0)
    clock.advance(0.5)
    assert clock() == 5.5


def test_blocks_that_hold_nothing_are_not_exchanged() -> None:
    executor = SimulatedExecutor(STEPS, VirtualClock(), num_blocks=4, block_size=16)
    with pytest.raises(NotImplementedError, match="no blocks to export"):
        executor.export_blocks([0])
    with pytest.raises(NotImplementedError, match="no blocks to fill"):
        executor.import_blocks([0], b"")
