"""Predicted and measured times of single steps on this machine.

A step has `batch` streams that decode at `context` tokens, beside a chunk of `chunk` tokens of one
more prompt, whose last token sees as much as they do. Each point of the grid is run a few times in
a random order, and the least counts. Half of the points fit the few numbers of the machine; the
other half tells how far the predictions are off. Run it on an idle machine.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from octavo.config import EngineConfig
from octavo.cost.accounting import account
from octavo.cost.fitting import Step, error_of, fit_machine, predict_steps
from octavo.cost.hardware import Efficiency, Machine
from octavo.engine import clock
from octavo.engine.engine import Engine
from octavo.engine.kept import keep
from octavo.engine.start import start_engine
from octavo.native import library, why_missing
from octavo.planning.doctor import diagnose
from octavo.planning.machine import describe_machine
from octavo.planning.plan import prepared_for
from octavo.planning.probes import Prober
from octavo.planning.steps import num_blocks, step_of
from octavo.planning.subject import read_subject
from octavo.program.program import Chunk

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (16, 64, 256, 1024, 4096)
CHUNKS = (0, 32, 128, 512)
MOST_TOKENS = 140_000  # 3 GB of SmolLM2's keys and values
_NUM_HALVES = 10
Point = tuple[int, int, int]
Clock = Callable[[], float]


def grid() -> list[Point]:
    """Return every (batch, context, chunk) that a pool of `MOST_TOKENS` holds."""
    points = [(b, c, k) for b in BATCHES for c in CONTEXTS for k in CHUNKS]
    return [(b, c, k) for b, c, k in points if (b + (k > 0)) * max(c, k) <= MOST_TOKENS]


def chunks_of(point: Point) -> list[Chunk]:
    """Return a step's chunks."""
    batch, context, chunk = point
    prompt = [Chunk(chunk, max(context, chunk))] if chunk else []
    return [Chunk(1, context)] * batch + prompt


def measure(
    engine: Engine, points: list[Point], repeats: int, seconds_now: Clock, save: Path | None
) -> dict[Point, float]:
    """Return the least seconds of each point's step; write each to the file, a line of JSON."""
    executor: Any = engine.executor
    executor.pages[:] = 0x3F  # 0.75 everywhere: an untouched page would be read from one cache line
    least: dict[Point, float] = {}
    for repeat in range(repeats):
        order = random.Random(repeat).sample(points, len(points))
        for number, point in enumerate(order):
            batch = step_of(chunks_of(point), executor.block_size)
            for _ in range(2 if point[2] < 64 else 1):
                begun = seconds_now()
                executor.submit(batch).result()
                seconds = seconds_now() - begun
                least[point] = min(seconds, least.get(point, seconds))
                if save:
                    with save.open("a") as lines:
                        print(json.dumps({"point": point, "seconds": seconds}), file=lines)
            if number % 10 == 0:
                print(f"repeat {repeat + 1}, {number} of {len(points)}", file=sys.stderr)
    return least


def priced(model: str, points: dict[Point, float], machine: Machine) -> dict[Point, Step]:
    """Return each point's step with its operations."""
    config = EngineConfig.from_dict({"model": model})
    prepared = prepared_for(read_subject(model), machine, config)
    return {
        point: Step(
            account(prepared, chunks_of(point), len(chunks_of(point))),
            len(chunks_of(point)),
            seconds,
            prepared.step_weight_bytes,
        )
        for point, seconds in points.items()
    }


def halves(steps: Sequence[Step], seed: int) -> tuple[list[Step], list[Step]]:
    """Return two random halves."""
    order = random.Random(seed).sample(list(steps), len(steps))
    return order[::2], order[1::2]


def report(steps: dict[Point, Step], machine: Machine) -> dict[str, Any]:
    """Print how far predictions are off, and return the figures."""
    errors = []
    for seed in range(_NUM_HALVES):
        known, unknown = halves(list(steps.values()), seed)
        measured = np.array([step.measured for step in unknown])
        errors.append(error_of(predict_steps(unknown, fit_machine(known, machine)), measured))
    first, middle = errors[0], np.median(np.array(errors), axis=0)
    print(f"fitted on {len(steps) - len(steps) // 2} steps, tested on {len(steps) // 2} others:")
    print(f"  median {first.median:.1%}, 95th percentile {first.p95:.1%}")
    print(f"  medians of {_NUM_HALVES} ways to halve: {middle[0]:.1%}, {middle[1]:.1%}")
    fitted = fit_machine(list(steps.values()), machine)
    print(f"fitted on all: {fitted.efficiency}")
    print(f"  step {fitted.step_overhead * 1e6:.0f} us, row {fitted.row_overhead * 1e6:.1f} us")
    _print_worst(steps, fitted)
    return {"median": first.median, "p95": first.p95, "medians_of_halves": middle.tolist()}


def _print_worst(steps: dict[Point, Step], machine: Machine) -> None:
    predicted = predict_steps(list(steps.values()), machine)
    ratios = {p: t / s.measured - 1 for (p, s), t in zip(steps.items(), predicted, strict=True)}
    worst = sorted(ratios, key=lambda point: -abs(ratios[point]))[:12]
    print("furthest off (batch, context, chunk), measured in ms:")
    for point in worst:
        print(f"  {point!s:18} {steps[point].measured * 1e3:9.2f} {ratios[point]:+8.1%}")


def measured_machine(threads: int | None, seconds_now: Clock) -> Machine:
    """Return this machine's peaks as `octavo doctor` measures them."""
    machine = diagnose(library, why_missing, Prober(library, seconds_now), threads=threads).machine
    if machine is None:
        raise SystemExit(f"There is nothing to measure: {why_missing}.")
    return machine


def measured_steps(
    model: str, repeats: int, threads: int | None, seconds_now: Clock, save: Path | None
) -> dict[Point, float]:
    """Run the grid; the pool holds its largest step."""
    points = grid()
    config = EngineConfig.from_dict(
        {
            "model": model,
            "num_gpu_blocks_override": max(num_blocks(chunks_of(point), 32) for point in points),
            "max_num_batched_tokens": max(BATCHES) + max(CHUNKS),
            "num_threads": threads,
        }
    )
    return measure(start_engine(config).engine, points, repeats, seconds_now, save)


def loaded(file: Path) -> tuple[Machine, dict[Point, float]]:
    """Return what `--save` has written, also of a run that was broken off."""
    peaks, *rows = map(json.loads, file.read_text().splitlines())
    machine = Machine(**peaks | {"efficiency": Efficiency(*peaks["efficiency"])})
    least: dict[Point, float] = {}
    for row in rows:
        point = tuple(row["point"])
        least[point] = min(row["seconds"], least.get(point, row["seconds"]))
    return machine, least


def main() -> int:
    """Measure, fit one half, test on the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="run on one thread and count its CPU seconds, for a machine that is not idle",
    )
    parser.add_argument("--save", type=Path, help="write what is measured to this file")
    parser.add_argument("--load", type=Path, help="read them from there instead of measuring")
    parser.add_argument("--keep", action="store_true", help="let `octavo plan` use what is fitted")
    options = parser.parse_args()
    started = time.monotonic()
    if options.load:
        machine, times = loaded(options.load)
    else:
        threads = 1 if options.cpu_time else None
        seconds_now = time.process_time if options.cpu_time else clock.monotonic
        machine = measured_machine(threads, seconds_now)
        if options.save:
            options.save.write_text(json.dumps(asdict(machine)) + "\n")
        times = measured_steps(options.model, options.repeats, threads, seconds_now, options.save)
    print(f"{len(times)} steps in {time.monotonic() - started:.0f} s", file=sys.stderr)
    steps = priced(options.model, times, machine)
    figures = report(steps, machine)
    if options.keep:
        print(f"kept in {keep(fit_machine(list(steps.values()), machine))}")
    print(json.dumps({"machine": describe_machine(), "model": options.model, **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
