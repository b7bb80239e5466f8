"""Measures this machine in a few seconds, and says what each number means for serving.

Decides which figures become the machine's limits: the bandwidth of the largest working set, the
product rates of the instruction set that would serve; that what steps reach of them is fitted on a
few real ones; and when figures disagree too much. Probes are `probes`', files `kept`'s.

Invariant: without the native library nothing is measured, and nothing is kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from octavo.cost.fitting import error_of, fit_machine, predict_steps
from octavo.cost.hardware import MEASURED, Machine
from octavo.engine.machine import available_cpus, available_memory, cpu_model
from octavo.planning.probes import FORMATS, WORKING_SETS, Prober, thread_counts
from octavo.planning.rehearsal import Rehearsal
from octavo.planning.surroundings import Finding, findings

Progress = Callable[[str], None]
# Of a small model, for the example.
_OPERATIONS = 300
# Figures beyond these are no machine's: errors of steps in the median, and of the same step twice.
MOST_ERROR, MOST_REPEATED = 0.1, 1.25
Rates = dict[str, dict[str, float]]
_Key = TypeVar("_Key", int, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found. Rates per second, times in seconds.

    instruction_sets: usable ones, best first; the first serves. bandwidth: by threads, then by
    bytes of the working set. products: flops by instruction set, then by weight format. error: of
    predicted steps, in the median, as a share. findings: on the set-up. machine: None without the
    native library, and `obstacle` then says why.
    """

    instruction_sets: tuple[str, ...] = ()
    num_threads: int = 1
    bandwidth: dict[int, dict[int, float]] = field(default_factory=dict)
    products: Rates = field(default_factory=dict)
    error: float = 0.0
    findings: tuple[Finding, ...] = ()
    machine: Machine | None = None
    obstacle: str = ""


def diagnose(
    library: Any,
    why_missing: str,
    prober: Prober,
    progress: Progress = lambda _: None,
    root: Path = Path("/"),
    threads: int | None = None,
) -> Diagnosis:
    """Measure this machine; progress: told what is measured next. threads: None uses all CPUs."""
    about = tuple(findings(root))
    if library is None:
        return Diagnosis(findings=about, obstacle=why_missing)
    sets, threads = tuple(library.instruction_sets()), threads or available_cpus(root)
    best = sets[0]
    bandwidth: dict[int, dict[int, float]] = {}
    for count in thread_counts(threads):
        progress(f"memory bandwidth with {count} threads")
        bandwidth[count] = {size: prober.bandwidth(best, count, size) for size in WORKING_SETS}
    products: Rates = {}
    for isa in sets:
        if isa != "generic" or isa == best:
            progress(f"products with {isa}")
            products[isa] = _rates(prober, isa, threads)
    progress("steps of small models")
    rehearsal = prober.rehearsal(best, threads)
    progress("memory bandwidth and products once more")
    again = {size: prober.bandwidth(best, threads, size) for size in WORKING_SETS}
    bandwidth[threads], moved = _better(bandwidth[threads], again)
    products[best], computed = _better(products[best], _rates(prober, best, threads))
    peaks = _machine(best, bandwidth[threads], products[best])
    machine, error = _fitted(peaks, rehearsal)
    about += tuple(_unrest(error, max(rehearsal.repeated, moved, computed)))
    return Diagnosis(
        instruction_sets=sets,
        num_threads=threads,
        bandwidth=bandwidth,
        products=products,
        error=error,
        findings=tuple(sorted(about, key=lambda finding: not finding.costs_speed)),
        machine=machine,
    )


def _rates(prober: Prober, isa: str, threads: int) -> dict[str, float]:
    """Return the flops per second of products in each format, and of attention."""
    rates = {form: prober.product_rate(isa, threads, form) for form in FORMATS}
    return {**rates, "attention": prober.attention_rate(isa, threads)}


def _better(first: dict[_Key, float], again: dict[_Key, float]) -> tuple[dict[_Key, float], float]:
    """Return the better of two rates of each, and how many times as high one was as the other."""
    best = {key: max(rate, again[key]) for key, rate in first.items()}
    return best, max(rate / min(first[key], again[key]) for key, rate in best.items())


def _machine(isa: str, rates: dict[int, float], products: dict[str, float]) -> Machine:
    """What single operations reached is the limit; shares of it are yet to be found."""
    _, near, some, far = (rates[size] for size in WORKING_SETS)
    return Machine(
        name="this",
        title=f"this machine ({cpu_model()}, {isa})",
        products=products,
        bandwidth=far,
        memory_bytes=available_memory(),
        source="measured by octavo doctor",
        efficiency=MEASURED,
        cache_bandwidth=max(near, far),
        cache_bytes=_cached(WORKING_SETS[2], near, some, far),
        instruction_set=isa,
    )


def _cached(size: int, near: float, rate: float, far: float) -> float:
    """Return how many of `size` bytes came from a cache, which were read at a rate between two."""
    if near <= far:
        return 0.0
    return size * min(max((1 / far - 1 / rate) / (1 / far - 1 / near), 0.0), 1.0)


def _unrest(error: float, repeated: float) -> Iterator[Finding]:
    """Say when figures disagree: steps with the peaks, or a figure with itself a second later."""
    if error > MOST_ERROR or repeated > MOST_REPEATED:
        yield Finding(
            "the figures disagree, so the machine was not idle or its clock changed: the same "
            f"work took up to {repeated:.1f} times as long a second apart, and steps of small "
            f"models are {error:.0%} off in the median. Measure again when it is idle",
            costs_speed=True,
        )


def _fitted(peaks: Machine, found: Rehearsal) -> tuple[Machine, float]:
    """Return the machine as steps see it, engine included, and the median error of theirs."""
    machine = fit_machine(found.steps, peaks)
    measured = np.array([step.measured for step in found.steps])
    error = error_of(predict_steps(found.steps, machine), measured).median
    step, row = machine.step_overhead + found.engine, machine.row_overhead + found.engine_row
    return replace(machine, step_overhead=step, row_overhead=row), error


def meanings(diagnosis: Diagnosis) -> Iterator[str]:
    """Say what the numbers mean for serving."""
    machine = diagnosis.machine
    if machine is None:
        return
    gigabyte = 1e9 / machine.bandwidth
    yield (
        f"Memory reads {machine.bandwidth / 1e9:.1f} GB/s: each GB of weights adds "
        f"{gigabyte * 1e3:.0f} ms to every decoding step, however many streams share it."
    )
    rate = machine.rate("bf16")
    yield (
        f"Products reach {rate / 1e9:,.0f} Gflop/s in bfloat16: a prompt for a model of 1 billion "
        f"weights is read at {rate / 2e9:,.0f} tokens per second."
    )
    yield (
        f"{machine.ridge():.0f} flops per byte are where products become the limit: up to about "
        f"{max(1.0, machine.ridge()):.0f} streams decode in bfloat16 in the time of one."
    )
    fastest = max(FORMATS, key=lambda form: machine.products.get(form, 0.0))
    yield f"Prompts are read fastest with weights in {fastest}; decoding with the fewest bytes."
    share = machine.efficiency
    floor = machine.step_overhead + _OPERATIONS * share.overhead
    yield (
        f"A step costs {_us(machine.step_overhead)}, most of it the engine's, and "
        f"{_us(share.overhead)} per operation: {_OPERATIONS} of them, some 30 layers, take at "
        f"least {_us(floor)}."
    )
    yield (
        f"Steps of small models reach {share.products:.0%} of the products, {share.memory:.0%} of "
        f"the memory. Predictions of them are {diagnosis.error:.0%} off in the median."
    )
    scaling = _scaling(diagnosis)
    if scaling is not None:
        yield scaling


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us"


def _scaling(diagnosis: Diagnosis) -> str | None:
    """Whether the last threads are worth it."""
    largest, most = WORKING_SETS[-1], diagnosis.num_threads
    by_threads = {count: sets[largest] for count, sets in diagnosis.bandwidth.items()}
    if most == 1:
        return None
    gain = by_threads[most] / by_threads[1]
    enough = min(count for count, rate in by_threads.items() if rate >= 0.95 * by_threads[most])
    if enough < most:
        return (
            f"{enough} of {most} threads read memory as fast as all: when few streams decode, "
            f"--num-threads {enough} leaves CPUs to others."
        )
    return f"{most} threads read memory {gain:.1f} times as fast as one."
