"""What `octavo doctor` measures and says, on a clock that a test sets."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count, product
from typing import Any

import pytest

from octavo.cost.accounting import account
from octavo.cost.fitting import Step
from octavo.cost.hardware import Efficiency, Machine
from octavo.cost.roofline import step_seconds
from octavo.executors.preparing import prepare
from octavo.native import library
from octavo.planning.doctor import Diagnosis, diagnose, meanings
from octavo.planning.probes import (
    FORMATS,
    WORKING_SETS,
    Probe,
    Prober,
    attention,
    matrix_bytes,
    thread_counts,
)
from octavo.planning.probes import product as matrix_product
from octavo.planning.rehearsal import Rehearsal
from octavo.program.program import Chunk
from tests.executors.native import needs_library
from tests.program.networks import network


def ticking(step: float = 1.0) -> Callable[[], float]:
    ticks = count()
    return lambda: next(ticks) * step


class SteadyProber(Prober):
    """Finds made-up figures without running anything."""

    def bandwidth(self, instruction_set: str, threads: int, num_bytes: int) -> float:
        return 10e9 * min(threads, 2) * (2 if num_bytes < WORKING_SETS[2] else 1)

    def product_rate(self, instruction_set: str, threads: int, form: str) -> float:
        return {"bf16": 4e11, "int4": 9e11}.get(form, 6e11)

    def attention_rate(self, instruction_set: str, threads: int) -> float:
        return 1e11

    def rehearsal(self, instruction_set: str, threads: int) -> Rehearsal:
        made = product((2, 7), (1, 3, 9, 40))
        steps = [s for layers, batch in made for s in made_steps(layers, batch, threads)]
        return Rehearsal(steps, engine=3e-4, engine_row=2e-5, repeated=1.02)


class CachingProber(SteadyProber):
    """A quarter of the bytes of a middling working set come at the double rate of the cache."""

    def bandwidth(self, instruction_set: str, threads: int, num_bytes: int) -> float:
        if num_bytes != WORKING_SETS[2]:
            return super().bandwidth(instruction_set, threads, num_bytes)
        return 10e9 * min(threads, 2) / (0.75 + 0.25 / 2)


class SlowedProber(SteadyProber):
    """The steps of one program were slowed by somebody."""

    def rehearsal(self, instruction_set: str, threads: int) -> Rehearsal:
        found = super().rehearsal(instruction_set, threads)
        half = len(found.steps) // 2
        slow = [step._replace(measured=2.5 * step.measured) for step in found.steps[:half]]
        return found._replace(steps=[*slow, *found.steps[half:]])


class WarmingProber(SteadyProber):
    """Products of one format are slow until it has looked at the clock twice."""

    def product_rate(self, instruction_set: str, threads: int, form: str) -> float:
        rate = super().product_rate(instruction_set, threads, form)
        return rate if form != "bf16" or self.clock() >= 2 else rate / 1.5


class UnsteadyProber(SteadyProber):
    """Steps took longer when they were repeated."""

    def rehearsal(self, instruction_set: str, threads: int) -> Rehearsal:
        return super().rehearsal(instruction_set, threads)._replace(repeated=1.6)


# What steps reach of the figures above.
REACHED = Efficiency(0.8, 0.6, 5e-7, attention=0.5, cache=0.3, unpacking=0.5)


def made_steps(num_layers: int, batch: int, threads: int) -> list[Step]:
    """Steps of a size that took exactly what such a machine takes."""
    machine = Machine(
        name="made up",
        title="made up",
        products={"bf16": 4e11, "int4": 9e11, "attention": 1e11},
        bandwidth=10e9 * min(threads, 2),
        cache_bandwidth=20e9 * min(threads, 2),
        memory_bytes=1,
        source="made up",
        efficiency=REACHED,
        step_overhead=1e-4,
        row_overhead=1e-5,
        instruction_set="amx",
    )
    program = network(hidden_size=512, vocab_size=8000, num_hidden_layers=num_layers)
    prepared = prepare(program, lambda _: "BF16", "group")
    steps = []
    for context, chunk in product((16, 3000), (0, 40, 400)):
        prompt = [Chunk(chunk, chunk)] if chunk else []
        chunks = [Chunk(1, context)] * batch + prompt
        costs = account(prepared, chunks, len(chunks))
        seconds = step_seconds(costs, machine, len(chunks))
        steps.append(Step(costs, len(chunks), seconds, prepared.step_weight_bytes))
    return steps


class TwoSets:
    """A library that has two instruction sets."""

    @staticmethod
    def instruction_sets() -> list[str]:
        return ["amx", "avx512", "generic"]


def found(**changes: Any) -> Diagnosis:
    return replace(diagnose(TwoSets, "", SteadyProber(TwoSets, ticking())), **changes)


def test_measured_rates_become_the_machines_limits() -> None:
    machine = found().machine
    assert machine is not None
    threads = found().num_threads
    assert machine.bandwidth == 10e9 * min(threads, 2)
    assert machine.cache_bandwidth == 2 * machine.bandwidth
    assert (machine.rate("bf16"), machine.rate("int4")) == (4e11, 9e11)
    assert machine.rate("attention") == 1e11
    assert machine.instruction_set == "amx"


def test_shares_of_the_limits_are_fitted_on_steps_and_the_engine_is_added() -> None:
    diagnosis = found()
    machine = diagnosis.machine
    assert machine is not None
    assert machine.efficiency.overhead == pytest.approx(REACHED.overhead, rel=0.2)
    assert diagnosis.error < 0.01
    assert tuple(machine.efficiency)[:2] == pytest.approx(tuple(REACHED)[:2], rel=0.1)
    assert machine.step_overhead == pytest.approx(1e-4 + 3e-4, rel=0.05)
    assert machine.row_overhead == pytest.approx(1e-5 + 2e-5, rel=0.1)


def test_bytes_that_come_faster_than_memory_came_from_a_cache() -> None:
    machine = diagnose(TwoSets, "", CachingProber(TwoSets, ticking())).machine
    assert machine is not None
    assert machine.cache_bytes == pytest.approx(WORKING_SETS[2] / 4)
    steady = found().machine
    assert steady is not None
    assert steady.cache_bytes == 0


@pytest.mark.parametrize("prober", [SlowedProber, UnsteadyProber, WarmingProber])
def test_figures_that_disagree_say_that_the_machine_was_not_idle(
    prober: type[SteadyProber],
) -> None:
    restless = diagnose(TwoSets, "", prober(TwoSets, ticking())).findings
    assert restless[0].costs_speed
    assert any("was not idle" in finding.text for finding in restless)
    assert not any("was not idle" in finding.text for finding in found().findings)


def test_of_two_rates_the_better_one_is_the_machines() -> None:
    machine = diagnose(TwoSets, "", WarmingProber(TwoSets, ticking())).machine
    assert machine is not None
    assert machine.rate("bf16") == 4e11


def test_every_fast_instruction_set_is_measured_in_every_format() -> None:
    products = found().products
    assert set(products) == {"amx", "avx512"}
    assert set(FORMATS) <= set(products["avx512"])


def test_without_the_library_nothing_is_measured_and_it_says_why() -> None:
    diagnosis = diagnose(None, "it was not built", Prober(None, ticking()))
    assert diagnosis.machine is None
    assert diagnosis.obstacle == "it was not built"
    assert list(meanings(diagnosis)) == []


def test_meanings_carry_the_numbers() -> None:
    diagnosis = found(
        num_threads=2, bandwidth={n: dict.fromkeys(WORKING_SETS, 1e10 * n) for n in (1, 2)}
    )
    text = "\n".join(meanings(diagnosis))
    assert diagnosis.machine is not None
    assert f"{diagnosis.machine.bandwidth / 1e9:.1f} GB/s" in text
    assert "200 tokens per second" in text
    assert "weights in int4" in text
    assert f"{diagnosis.machine.efficiency.overhead * 1e6:.2f} us per operation" in text
    assert "2 threads read memory 2.0 times as fast as one" in text


def test_threads_that_bring_nothing_are_named() -> None:
    flat = {n: dict.fromkeys(WORKING_SETS, 1e10) for n in (1, 2, 4)}
    text = "\n".join(meanings(found(num_threads=4, bandwidth=flat)))
    assert "--num-threads 1" in text


def test_the_best_of_several_runs_counts() -> None:
    runs: list[None] = []
    probe = Probe(lambda: runs.append(None), 1.0, 1.0)
    assert Prober(None, ticking(0.5), seconds=3.0).best(probe) == 0.5
    assert len(runs) >= 3  # one warms up


def test_threads_are_powers_of_two_and_all() -> None:
    assert thread_counts(1) == [1]
    assert thread_counts(6) == [1, 2, 4, 6]


@needs_library
@pytest.mark.parametrize("form", FORMATS)
def test_products_run_and_count_what_they_compute(form: str) -> None:
    isa = library.instruction_sets()[0]
    size = matrix_bytes(library, form)
    probe = matrix_product(library, isa, 1, form, 4, 2 * size)
    probe.run()
    assert probe.num_bytes == 2 * size
    assert probe.flops == 2 * 4 * 2 * 1024 * 1024
    small = matrix_product(library, isa, 1, form, 1, size // 8)
    assert small.num_bytes <= size // 8


@needs_library
def test_figures_are_work_over_time() -> None:
    isa = library.instruction_sets()[0]
    prober = Prober(library, ticking(0.25), seconds=0.0)
    size = WORKING_SETS[0]
    assert prober.bandwidth(isa, 1, size) == pytest.approx(4 * size, rel=0.5)
    assert prober.product_rate(isa, 1, "bf16") == 4 * 2 * 128 * 1024 * 1024
    attention(library, isa, 1).run()
