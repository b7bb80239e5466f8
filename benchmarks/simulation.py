"""A simulated run beside a real one, on this machine.

Requests have the lengths of lines drawn at random from a recorded trace, scaled down, and arrive at
random. One run is made to fit the machine's numbers: each of its steps is a measurement. Others,
with other lines and other arrivals, are first simulated with them and then really made. Run it on
an idle machine.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from octavo.config import EngineConfig
from octavo.cost.accounting import PreparedProgram, account
from octavo.cost.fitting import Step, error_of, fit_machine, predict_steps
from octavo.cost.hardware import Machine
from octavo.engine import clock
from octavo.engine.engine import Engine
from octavo.engine.start import start_engine
from octavo.executors.executor import Batch, StepResult
from octavo.native import library, why_missing
from octavo.planning.doctor import diagnose
from octavo.planning.load.traces import read_trace
from octavo.planning.load.work import IdRange, Replay, Session, at_times, gamma_arrivals
from octavo.planning.machine import describe_machine
from octavo.planning.plan import prepared_for
from octavo.planning.probes import Prober
from octavo.planning.simulation import Simulator
from octavo.planning.subject import Subject, read_subject
from octavo.program.program import Chunk
from octavo.request import SamplingParams

# Of the fitted steps, in the median: more is no error of the model.
MOST_OFF = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What both ways of running are compared by; medians in seconds."""

    tokens_per_second: float
    ttft: float
    itl: float
    end_to_end: float


class Recording:
    """An executor that keeps the batches it is given."""

    def __init__(self, executor: Any) -> None:
        self.inner = executor
        self.batch: Batch | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, batch: Batch) -> Future[StepResult]:
        """Keep the batch and hand it on."""
        self.batch = batch
        return self.inner.submit(batch)  # type: ignore[no-any-return]


class Wall:
    """Seconds on the wall since it was made."""

    def __init__(self) -> None:
        self._started = clock.monotonic()

    def __call__(self) -> float:
        """Return the present."""
        return clock.monotonic() - self._started

    def wait_until(self, moment: float) -> None:
        """Let time pass."""
        time.sleep(max(0.0, moment - self()))


class Worked(Wall):
    """CPU seconds of this process; waiting takes none, and is added. For one thread."""

    def __init__(self) -> None:
        self._started, self._waited = time.process_time(), 0.0

    def __call__(self) -> float:
        """Return the present."""
        return time.process_time() - self._started + self._waited

    def wait_until(self, moment: float) -> None:
        """Let time pass."""
        self._waited += max(0.0, moment - self())


@dataclass(slots=True)
class RealRun:
    """Serves sessions at their arrivals, as a clock tells them."""

    engine: Engine
    now: Wall
    steps: list[tuple[list[Chunk], int, float]] = field(default_factory=list)
    arrivals: dict[str, float] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)

    def serve(self, sessions: Sequence[Session]) -> Figures:
        """Return what happened; `steps` has every step's chunks, rows of logits and seconds."""
        recording = Recording(self.engine.executor)
        self.engine.executor = recording
        position = 0
        while position < len(sessions) or self.engine.has_unfinished:
            if not self.engine.has_unfinished:
                self.now.wait_until(sessions[position].arrival or 0.0)
            now = self.now()
            while position < len(sessions) and (sessions[position].arrival or 0.0) <= now:
                self._add(sessions[position], str(position))
                position += 1
            if self.engine.has_unfinished:
                self._step(recording)
        self.engine.executor = recording.inner
        return self._figures()

    @property
    def busy(self) -> float:
        """Share of the time in which a step ran."""
        seconds = max(times[-1] for times in self.times.values())
        return sum(step for *_, step in self.steps) / seconds

    def _add(self, session: Session, request_id: str) -> None:
        (turn,) = session.turns
        params = SamplingParams(
            max_tokens=turn.num_output_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        self.engine.add({"prompt_token_ids": turn.tokens.tolist()}, params, request_id=request_id)
        self.arrivals[request_id] = session.arrival or 0.0
        self.times[request_id] = []

    def _step(self, recording: Recording) -> None:
        begun = self.now()
        deltas = self.engine.step()
        ended = self.now()
        for delta in deltas:
            if delta.error is not None:
                raise delta.error
            self.times[delta.request_id].append(ended)
        batch = recording.batch
        assert batch is not None
        lengths, contexts = np.diff(batch.chunk_starts).tolist(), batch.context_lengths.tolist()
        chunks = [Chunk(*pair) for pair in zip(lengths, contexts, strict=True)]
        self.steps.append((chunks, len(batch.logit_rows), ended - begun))

    def _figures(self) -> Figures:
        gaps = np.concatenate([np.diff(times) for times in self.times.values()])
        seconds = max(times[-1] for times in self.times.values())
        pairs = [(times, self.arrivals[name]) for name, times in self.times.items()]
        return Figures(
            tokens_per_second=sum(map(len, self.times.values())) / seconds,
            ttft=float(np.median([times[0] - arrival for times, arrival in pairs])),
            itl=float(np.median(gaps)),
            end_to_end=float(np.median([times[-1] - arrival for times, arrival in pairs])),
        )


def drawn_sessions(options: argparse.Namespace, seed: int) -> list[Session]:
    """Return requests of random lines of the trace, at random arrivals."""
    lines = random.Random(seed).sample(read_trace(options.trace), options.requests)
    replay = Replay(length_scale=options.length_scale, max_tokens=options.max_tokens)
    sessions, _ = replay.sessions(lines, IdRange(), seed)
    return at_times(sessions, gamma_arrivals(len(sessions), options.rate, 1.0, seed))


def priced(
    prepared: PreparedProgram, steps: Sequence[tuple[list[Chunk], int, float]]
) -> list[Step]:
    """Return a run's steps with their operations."""
    return [
        Step(account(prepared, chunks, logit_rows), logit_rows, seconds, prepared.step_weight_bytes)
        for chunks, logit_rows, seconds in steps
    ]


def slowness(steps: Sequence[Step], machine: Machine) -> float:
    """Return how many times as long as predicted these very steps took, whatever else differs."""
    return sum(step.measured for step in steps) / float(predict_steps(steps, machine).sum())


def calibrated(
    prepared: PreparedProgram, peaks: Machine, steps: Sequence[tuple[list[Chunk], int, float]]
) -> Machine:
    """Return the machine with the numbers that a run's steps give."""
    known = priced(prepared, steps)
    measured = np.array([step.measured for step in known])
    machine = fit_machine(known, peaks, weights=measured)
    error = error_of(predict_steps(known, machine), measured)
    print(f"{len(steps)} steps: median {error.median:.1%}, 95 % {error.p95:.1%} off when fitted")
    if error.median > MOST_OFF:
        print("Equal steps took unequal times: the machine was not idle.", file=sys.stderr)
    return machine


def simulated(
    subject: Subject, machine: Machine, config: EngineConfig, sessions: Sequence[Session]
) -> Figures:
    """Return what the simulator says of the same run."""
    found = Simulator(subject, machine, config).run(sessions)
    return Figures(
        tokens_per_second=found.tokens_per_second,
        ttft=found.ttft.p50,
        itl=found.itl.p50,
        end_to_end=found.end_to_end.p50,
    )


def main() -> int:
    """Calibrate, simulate, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--trace", type=Path, required=True, help="Azure's or Mooncake's")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--length-scale", type=float, default=0.2)
    parser.add_argument("--max-tokens", type=int, default=1500)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3, 4], help="the first one's run calibrates"
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="run on one thread and count its CPU seconds, for a machine that is not idle",
    )
    options = parser.parse_args()
    threads, timed = (1, Worked) if options.cpu_time else (None, Wall)
    settings = {"model": options.model, "num_gpu_blocks_override": 2048, "num_threads": threads}
    config = EngineConfig.from_dict(settings)
    subject = read_subject(options.model)
    peaks = diagnose(library, why_missing, Prober(library, timed()), threads=threads).machine
    assert peaks is not None, why_missing
    prepared = prepared_for(subject, peaks, config)
    engine = start_engine(config).engine
    known, *others = (drawn_sessions(options, seed) for seed in options.seeds)
    RealRun(engine, timed()).serve(known[:2])  # weights and pages are touched once
    first = RealRun(engine, timed())
    engine.reset_prefix_cache()
    first.serve(known)
    machine = calibrated(prepared, peaks, first.steps)
    print(f"fitted: {machine.efficiency}, step {machine.step_overhead:.2g} s", file=sys.stderr)
    figures = {}
    for seed, sessions in zip(options.seeds[1:], others, strict=True):
        expected = simulated(subject, machine, config, sessions)
        run = RealRun(engine, timed())
        found = run.serve(sessions)
        slower = slowness(priced(prepared, run.steps), machine)
        print(
            f"seed {seed}: busy {run.busy:.0%} of the time, in steps that took {slower:.2f} times "
            "as long as predicted"
        )
        figures[seed] = compared(expected, found)
    print(json.dumps({"machine": describe_machine(), "model": options.model, "figures": figures}))
    return 0


def compared(expected: Figures, found: Figures) -> dict[str, dict[str, float]]:
    """Print both, and return them."""
    rows = {}
    print(f"{'':20} {'simulated':>12} {'real':>12}")
    for name in ("tokens_per_second", "ttft", "itl", "end_to_end"):
        pair = getattr(expected, name), getattr(found, name)
        rows[name] = {"simulated": pair[0], "real": pair[1], "off": pair[0] / pair[1] - 1}
        print(f"{name:20} {pair[0]:12.4f} {pair[1]:12.4f} {rows[name]['off']:+8.1%}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
