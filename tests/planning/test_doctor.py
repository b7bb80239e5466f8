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
    additions,
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

    def overheads(self, instruction_set: str, threads: int) -> tuple[float, float]:
        return 2e-6, 5e-7

    def rehearsal(self, instruction_set: str, threads: int) -> Rehearsal:
        steps = [s for batch in (1, 3, 9, 40) for s in made_steps(batch, threads)]
        return Rehearsal(steps, engine=3e-4, engine_row=2e-5)


# What steps reach of the figures above.
REACHED = Efficiency(0.8, 0.6, 5e-7, attention=0.5, cache=0.3, unpacking=0.5)


def made_steps(batch: int, threads: int) -> list[Step]:
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
    prepared = prepare(network(hidden_size=512, vocab_size=8000), lambda _: "BF16", "group")
    steps = []
    for context, chunk in product((16, 3000), (0, 40, 400)):
        prompt = [Chunk(chunk, chunk)] if chunk else []
        chunks = [Chunk(1, context)] * batch + prompt
        costs = account(prepared, chunks, len(chunks))
        steps.append(Step(costs, len(chunks), step_seconds(costs, machine, len(chunks))))
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
    assert machine.efficiency.overhead == 5e-7
    assert diagnosis.error < 0.01
    assert tuple(machine.efficiency)[:2] == pytest.approx(tuple(REACHED)[:2], rel=0.1)
    assert machine.step_overhead == pytest.approx(1e-4 + 3e-4, rel=0.05)
    assert machine.row_overhead == pytest.approx(1e-5 + 2e-5, rel=0.1)


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
    assert "2.00 us for its call" in text
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
    assert additions(library, isa, 1, 3).flops == 48
    call, each = prober.overheads(isa, 1)
    assert call > 0 < each
