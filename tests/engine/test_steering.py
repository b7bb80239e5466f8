"""A target between tokens, held on virtual time by the real engine and scheduler."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.core.blocks import BlockManager
from octavo.core.scheduler import Scheduler, StepPlan
from octavo.cost.hardware import MACHINES, Machine
from octavo.cost.predictor import StepPredictor
from octavo.cost.steps import StepTimes
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.executors.batch import MaskOf
from octavo.executors.executor import Batch
from octavo.executors.preparing import prepare
from octavo.executors.simulated import SimulatedExecutor, VirtualClock, build_lengths
from tests.engines import greedy, tokens
from tests.planning.subjects import SHAPE
from tests.program.networks import network

PREPARED = prepare(network(**SHAPE), lambda _: "BF16", "channel")
MACHINE = MACHINES["ryzen-7950x"]
NUM_STREAMS = 16


def slower(machine: Machine, factor: float) -> Machine:
    """Return a machine on which everything takes `factor` times as long."""
    efficiency = machine.efficiency
    return replace(
        machine,
        efficiency=efficiency._replace(
            products=efficiency.products / factor,
            memory=efficiency.memory / factor,
            overhead=efficiency.overhead * factor,
        ),
    )


def engine(target: float | None, predicted: Machine, real: Machine, beside: float = 0.0) -> Engine:
    """Return a simulated engine that runs on one machine and believes in another.

    beside: seconds that it takes itself in each step.
    """
    clock = VirtualClock()
    executor = SimulatedExecutor(
        StepTimes(PREPARED, real), clock, num_blocks=2000, block_size=16, spells=7
    )
    predictor = StepPredictor(PREPARED, predicted)

    def build(plan: StepPlan, mask_of: MaskOf) -> Batch:
        clock.advance_to(clock.now + beside)
        return build_lengths(plan, mask_of)

    return Engine(
        executor=executor,
        scheduler=Scheduler(
            BlockManager(2000, 16), max_num_batched_tokens=512, cost=predictor, target_itl=target
        ),
        intake=Intake(
            tokenizer=None, vocab_size=300, max_model_len=4096, max_pool_tokens=32000, seed=0
        ),
        decoder=None,
        clock=clock,
        build=build,
        predictor=predictor,
    )


def steps(made: Engine, until: str) -> list[float]:
    """Step until a request ends; return the seconds of each step."""
    seconds = []
    while True:
        before = made._clock()
        deltas = made.step()
        seconds.append(made._clock() - before)
        if any(delta.request_id == until and delta.is_last for delta in deltas):
            return seconds


def gaps(target_factor: float | None, predicted: Machine, real: Machine) -> tuple[float, list]:
    """Return the seconds of a step of the streams alone, and of those while prompts come."""
    made = engine(None, predicted, real)
    for number in range(NUM_STREAMS):
        made.add(tokens(8, seed=number), greedy(3000), request_id=f"stream {number}")
    for _ in range(30):
        made.step()
    alone = made.stats().step_time
    if target_factor is not None:
        made.scheduler.target_itl = target_factor * alone
    for number in range(3):
        made.add(tokens(2000, seed=100 + number), greedy(1), request_id=f"prompt {number}")
    return alone, steps(made, "prompt 2")


def test_on_the_predicted_machine_no_step_misses_the_target() -> None:
    alone, found = gaps(3.0, MACHINE, MACHINE)
    assert max(found) <= 3.0 * alone * (1 + 1e-9)
    assert np.median(found) > 2.7 * alone, "the time is used"


def test_without_a_target_prompts_make_streams_wait() -> None:
    alone, found = gaps(None, MACHINE, MACHINE)
    assert max(found) > 3.0 * alone


@pytest.mark.parametrize("factor", [0.4, 2.5, 8.0])
def test_on_another_machine_than_predicted_measured_steps_bring_the_target_back(
    factor: float,
) -> None:
    alone, found = gaps(3.0, MACHINE, slower(MACHINE, factor))
    assert np.percentile(found, 95) <= 1.3 * 3.0 * alone
    assert np.median(found) > 2.4 * alone


def test_what_the_engine_takes_itself_is_learnt_too() -> None:
    alone = engine(None, MACHINE, MACHINE)
    own = 5 * alone.predictor.price([(8, 1)], 1).seconds
    made = engine(None, MACHINE, MACHINE, beside=own)
    made.add(tokens(8), greedy(60), request_id="a")
    found = steps(made, "a")
    assert found[-1] > own
    learnt = made.predictor.price([(8 + 59, 1)], 1).seconds
    assert learnt == pytest.approx(found[-1], rel=0.01)


def test_an_engine_accounts_for_its_last_step() -> None:
    made = engine(None, MACHINE, MACHINE)
    predictor = made.predictor
    assert predictor is not None
    assert made.lives.last.num_steps == 0
    made.add(tokens(50), greedy(2), request_id="a")
    for chunk in ((0, 50), (50, 1)):
        price = predictor.price([chunk], 1)
        made.step()
        last, seconds = made.lives.last, made.stats().step_time
        assert seconds == pytest.approx(price.seconds)
        assert last.num_steps == 1
        assert last.priced == seconds
        assert last.flops == predictor.account(price, seconds).flops
