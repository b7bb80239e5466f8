"""The whole study: which experiments run, in which order, and what is known before they do.

Decides what a model and a machine must have to be studied. Writes nothing.

Invariant: what cannot be studied is an error before any experiment runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from octavo.config import EngineConfig
from octavo.cost.accounting import PreparedProgram
from octavo.cost.hardware import Machine
from octavo.cost.steps import StepTimes
from octavo.engine import clock
from octavo.engine.backend import choose_backend
from octavo.engine.kept import read_kept, this_machine
from octavo.engine.machine import available_cpus
from octavo.engine.start import start_engine
from octavo.errors import SettingError
from octavo.native import library, why_missing
from octavo.planning.doctor import diagnose
from octavo.planning.machine import describe_machine
from octavo.planning.plan import prepared_for
from octavo.planning.probes import Prober
from octavo.planning.study import (
    batching,
    cache_gain,
    chunking,
    paging,
    predictions,
    prefixes,
    roofline,
)
from octavo.planning.study.experiment import Experiment, Tick
from octavo.planning.study.workbench import Workbench, warm_up
from octavo.planning.subject import Subject, read_subject

# Told what runs, and the share of the whole study that is done.
Progress = Callable[[str, float], None]
# The shortest context in which the experiments mean anything; of a longer one they use so much.
MIN_CONTEXT, MAX_CONTEXT = 512, 4096
# Most tokens of a step: a whole prompt and the streams beside it.
MAX_STEP = 1280


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What was found. about: machine, versions, commit. notes: what a reader should know."""

    model: str
    about: dict[str, str | int]
    notes: tuple[str, ...]
    is_quick: bool
    seconds: float
    experiments: tuple[Experiment, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """One experiment. weight: about how many seconds of a whole study it takes."""

    name: str
    weight: float
    run: Callable[[Tick], Experiment]


def open_subject(config: EngineConfig) -> Subject:
    """Return the model to study; raises an `OctavoError` if it cannot be studied here."""
    subject = read_subject(config.model)
    backend = choose_backend(config, subject.program)
    if backend.instruction_set is None:
        raise SettingError(
            f"A study times the operations of the native library, which cannot run here: "
            f"{backend.reason or 'the reference executor was asked for'}."
        )
    held = subject.program.max_context
    if held < MIN_CONTEXT:
        raise SettingError(
            f"A study needs a context of {MIN_CONTEXT} tokens, but that of {config.model} has "
            f"{held:,}. Choose another model."
        )
    return subject


def measured_machine() -> Machine:
    """Return this machine as `octavo doctor` left it, or measure it now in a few seconds."""
    if read_kept() is not None:
        return this_machine()
    found = diagnose(library, why_missing, Prober(library, clock.monotonic)).machine
    assert found is not None, "open_subject has made sure of the library"
    return replace(found, source="measured just now")


def run_study(
    config: EngineConfig, subject: Subject, *, is_quick: bool, progress: Progress
) -> Study:
    """Run every experiment. progress: see `Progress`."""
    started = clock.monotonic()
    progress("limits of the machine", 0.0)
    machine = measured_machine()
    prepared = prepared_for(subject, machine, config)
    with opened(config, min(subject.program.max_context, MAX_CONTEXT)) as bench:
        warm_up(bench.engine(), 64)
        parts = list(_parts(bench, subject, prepared, machine, is_quick=is_quick))
        experiments = tuple(_run(parts, progress))
    return Study(
        model=config.model,
        about=describe_machine(),
        notes=tuple(_notes(machine)),
        is_quick=is_quick,
        experiments=experiments,
        seconds=clock.monotonic() - started,
    )


@contextmanager
def opened(config: EngineConfig, max_model_len: int) -> Iterator[Workbench]:
    """Load a model for experiments; close its engine in the end, however that comes."""
    chosen = replace(config, max_model_len=max_model_len, max_num_batched_tokens=MAX_STEP)
    engine = start_engine(chosen).engine
    try:
        yield Workbench(engine, clock.monotonic)
    finally:
        engine.close()


def _run(parts: list[_Part], progress: Progress) -> Iterator[Experiment]:
    total, done = sum(part.weight for part in parts), 0.0
    for part in parts:
        name, weight, before = part.name, part.weight, done

        def tick(
            share: float, name: str = name, weight: float = weight, before: float = before
        ) -> None:
            progress(name, (before + share * weight) / total)

        tick(0.0)
        yield part.run(tick)
        done += weight
    progress("", 1.0)


def _parts(
    bench: Workbench,
    subject: Subject,
    prepared: PreparedProgram,
    machine: Machine,
    *,
    is_quick: bool,
) -> Iterator[_Part]:
    """The experiments in the order of the page; each needs what it is given and no more."""
    modules = (cache_gain, roofline, paging, batching, prefixes, chunking, predictions)
    gain, roof, pages, batch, prefix, chunk, steps = (
        module.QUICK if is_quick else module.FULL for module in modules
    )
    program, kv_bytes = subject.program, prepared.kv_bytes_per_token
    step_times = StepTimes(prepared, machine)
    yield _Part("the KV cache", 16, lambda t: cache_gain.experiment(bench, program, gain, t))
    yield _Part("roofline", 4, lambda t: roofline.experiment(bench, prepared, machine, roof, t))
    yield _Part("paging", 5, lambda t: paging.experiment(pages, t))
    yield _Part("batching", 20, lambda t: batching.experiment(bench, batch, t))
    yield _Part("prefixes", 16, lambda t: prefixes.experiment(bench, kv_bytes, prefix, t))
    yield _Part("chunked prefill", 14, lambda t: chunking.experiment(bench, chunk, t))
    yield _Part("predictions", 12, lambda t: predictions.experiment(bench, step_times, steps, t))


def _notes(machine: Machine) -> Iterator[str]:
    num_cpus = available_cpus()
    if num_cpus == 1:
        yield (
            "One CPU may be used, so one thread computes and schedules: other programs on it show "
            "in every figure, and batches gain by sharing the weights' way from memory alone."
        )
    yield f"Limits of the machine: {machine.source}."
