"""`octavo plan`: what a model needs and does on a machine, from its configuration alone.

Decides how a plan looks on a terminal and as JSON; `planning.plan` makes it. Invariant: standard
output carries the plan alone.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.cost.hardware import Machine, machine_named
from octavo.cost.steps import StepTimes
from octavo.engine import clock
from octavo.engine.kept import this_machine
from octavo.errors import BadRequestError, InvalidParameterError
from octavo.planning.fleet import Fleet, Limits
from octavo.planning.latency import Lengths
from octavo.planning.load.traces import read_trace
from octavo.planning.load.work import IdRange, Replay
from octavo.planning.outcome import Simulation
from octavo.planning.plan import Plan, make_plan, prepared_for
from octavo.planning.routing import router_named
from octavo.planning.simulation import Simulator
from octavo.planning.subject import Subject, read_subject
from octavo.planning.verify import VerifiedRow, verify

GIB = 1 << 30


_OF_TRACES = ("trace_speed", "trace_length_scale", "trace_limit", "machines", "router")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked beside model and machine; None was not given."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    requests_per_second: float | None = None
    max_ttft_ms: float | None = None
    max_itl_ms: float | None = None
    trace: Path | None = None
    trace_speed: float | None = None
    trace_length_scale: float | None = None
    trace_limit: int | None = None
    machines: int | None = None
    router: str | None = None
    verify: bool = False

    def check(self) -> None:
        """Raise `BadRequestError` for an option that would be ignored."""
        for name in ("trace_limit", "machines"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise InvalidParameterError(name, number, "at least 1")
        if self.trace is None:
            self._refuse(_OF_TRACES, "needs --trace")
            if self.requests_per_second is None:
                needs = "needs a load: --requests-per-second or --trace"
                self._refuse(("max_ttft_ms", "max_itl_ms"), needs)
        else:
            brings = "is what --trace brings: leave one of them out"
            self._refuse(("prompt_tokens", "output_tokens", "requests_per_second"), brings)
            if self.verify:
                raise BadRequestError("--verify runs planned lengths: leave --trace out.")
            if self.router is not None and (self.machines or 1) == 1:
                raise BadRequestError("--router needs --machines: one machine leaves no choice.")

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise BadRequestError(f"--{name.replace('_', '-')} {why}.")

    @property
    def lengths(self) -> Lengths:
        """The lengths to plan."""
        return Lengths(
            prompt_tokens=self.prompt_tokens or 512, output_tokens=self.output_tokens or 128
        )

    @property
    def limits(self) -> Limits:
        """The limits, in seconds."""
        return Limits(ttft=_from_ms(self.max_ttft_ms), itl=_from_ms(self.max_itl_ms))

    @property
    def replay(self) -> Replay:
        """How the trace is changed."""
        return Replay(
            speed=1.0 if self.trace_speed is None else self.trace_speed,
            length_scale=1.0 if self.trace_length_scale is None else self.trace_length_scale,
            limit=self.trace_limit,
        )


def _from_ms(number: float | None) -> float | None:
    return None if number is None else number / 1e3


def choose_machine(name: str | None, memory_gib: float | None) -> Machine:
    """Return a machine of the table, or this one; with another size of memory if one is given."""
    machine = this_machine() if name is None else machine_named(name)
    if memory_gib is None:
        return machine
    if not memory_gib > 0:
        raise InvalidParameterError("memory_gib", memory_gib, "above 0")
    return replace(machine, memory_bytes=int(memory_gib * GIB))


def run_plan(
    settings: dict[str, Any],
    machine: str | None,
    memory_gib: float | None,
    asked: Asked,
    *,
    as_json: bool,
) -> None:
    """Print a plan, or the simulation of a trace if there is one.

    settings: of the engine. machine: its name, or None for this one.
    """
    asked.check()
    if asked.verify and (machine is not None or memory_gib is not None):
        raise BadRequestError(
            "--verify runs the engine on this machine: leave --machine and --memory-gib out."
        )
    config = EngineConfig.from_dict(settings)
    where, subject = choose_machine(machine, memory_gib), read_subject(config.model)
    if asked.trace is not None:
        _run_simulation(config, where, subject, asked.trace, asked, as_json=as_json)
        return
    plan = make_plan(
        subject,
        where,
        config,
        asked.lengths,
        requests_per_second=asked.requests_per_second,
        limits=asked.limits,
    )
    verified = _verified(config, where, subject, asked.lengths) if asked.verify else []
    if as_json:
        rows = [{**asdict(row), "error": row.error} for row in verified]
        print(json.dumps(plan_json(plan) | ({"verified": rows} if asked.verify else {})))
        return
    for line in _lines(plan):
        print(line)
    if verified:
        print()
        for line in _verification(verified):
            print(line)


def _verified(
    config: EngineConfig, machine: Machine, subject: Subject, lengths: Lengths
) -> list[VerifiedRow]:
    """Start the engine and run it."""
    # Imported late: a plan that runs nothing needs none of it.
    from octavo.engine.start import start_engine

    steps = StepTimes(prepared_for(subject, machine, config), machine)
    engine = start_engine(config).engine
    if engine.executor.name.startswith("reference"):
        engine.close()
        raise BadRequestError("The reference executor is not predicted: verify the CPU executor.")
    try:
        return verify(engine, steps, lengths, clock.monotonic, _say)
    finally:
        engine.close()


def _say(what: str) -> None:
    print(f"running {what} ...", file=sys.stderr)


def _verification(rows: Sequence[VerifiedRow]) -> Iterator[str]:
    yield "Verified on the spot (above 0 % the engine is faster than predicted)"
    cells = [(row.name, _ms(row.predicted), _ms(row.measured), f"{row.error:+.0%}") for row in rows]
    yield from _table(("", "predicted", "measured", "off by"), cells)


def _run_simulation(
    config: EngineConfig,
    machine: Machine,
    subject: Subject,
    trace: Path,
    asked: Asked,
    *,
    as_json: bool,
) -> None:
    """Serve a trace on virtual time and print what happened."""
    ids = IdRange(0, subject.program.vocab_size)
    sessions, _ = asked.replay.sessions(read_trace(trace), ids, config.seed)
    number, router = asked.machines or 1, router_named(asked.router or "round-robin")
    fleet = Simulator(subject, machine, config, num_machines=number, router=router)
    simulation = fleet.run(sessions, asked.limits, _report)
    if as_json:
        derived = {
            "tokens_per_second": simulation.tokens_per_second,
            "cache_hit_share": simulation.cache_hit_share,
        }
        about = {"model": config.model, "machine": machine_json(machine), "trace": trace.name}
        each = [asdict(one) for one in fleet.each(asked.limits)]
        print(json.dumps({**about, **asdict(simulation), **derived, "machines": each}))
        return
    several = f"{number:,} machines: " if number > 1 else ""
    print(f"{trace.name} with {config.model} on {several}{machine.title}, simulated")
    for line in _simulation(simulation, asked.limits):
        print(line)
    if number > 1:
        print()
        for line in _each(fleet.each(asked.limits)):
            print(line)


def _report(done: int, total: int) -> None:
    """Say how far the trace has come, on a terminal and not too often."""
    if sys.stderr.isatty() and (done % 200 == 0 or done == total):
        end = "\n" if done == total else ""
        print(f"\r{done:,} of {total:,} requests have arrived", end=end, file=sys.stderr)


def machine_json(machine: Machine) -> dict[str, Any]:
    """Return a machine as plain values."""
    return {**asdict(machine), "efficiency": machine.efficiency._asdict()}


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values; times in seconds, sizes in bytes."""
    return {**asdict(plan), "machine": machine_json(plan.machine)}


def _lines(plan: Plan) -> Iterator[str]:
    yield from _head(plan)
    yield ""
    yield from _formats(plan)
    yield ""
    yield from _batches(plan)
    yield ""
    yield from _block_sizes(plan)
    if plan.fleet is not None:
        yield ""
        yield from _fleet(plan, plan.fleet)


def _head(plan: Plan) -> Iterator[str]:
    machine, found, lengths = plan.machine, plan.capacity, plan.lengths
    yield f"{plan.model} on {machine.title}"
    yield f"  limits: {_rates(machine)}, {machine.bandwidth / 1e9:,.0f} GB/s ({machine.source})"
    yield f"  weights: {_size(found.weight_bytes)}"
    yield (
        f"  KV cache: {found.kv_bytes_per_token:,} bytes per token; a pool of "
        f"{_size(found.pool_bytes)} has {found.num_blocks:,} blocks of {found.block_size} tokens"
    )
    yield f"  longest context: {found.longest_context:,} tokens"
    yield (
        f"  requests of {lengths.prompt_tokens:,} + {lengths.output_tokens:,} tokens at once: "
        f"{found.requests_at_once:,} by memory, {plan.max_batch:,} with max_num_seqs"
    )
    yield f"  time to first token when idle: {_ms(plan.ttft)}"


def _rates(machine: Machine) -> str:
    tera = (f"{name} {rate / 1e12:,.3g}" for name, rate in machine.products.items())
    return f"{', '.join(tera)} Tflop/s"


def _formats(plan: Plan) -> Iterator[str]:
    yield "Weight formats"
    rows = [
        (
            row.name,
            _size(row.weight_bytes),
            "does not fit" if row.pool_tokens is None else f"{row.pool_tokens:,}",
            _or_blank(row.requests_at_once, "{:,}"),
            "" if row.inter_token is None else _ms(row.inter_token),
            _or_blank(row.tokens_per_second, "{:,.0f}"),
        )
        for row in plan.formats
    ]
    headings = ("format", "weights", "pool tokens", "requests", "alone per token", "most tok/s")
    yield from _table(headings, rows)


def _batches(plan: Plan) -> Iterator[str]:
    yield "Batch sizes (* is the knee: most throughput per latency)"
    headings = ("batch", "step", "per token", "tok/s", "req/s", "bound by", "flops/byte", "of GB/s")
    yield from _table(
        headings,
        (
            (
                f"{row.batch}{'*' if row.is_knee else ' '}",
                _ms(row.decode_seconds),
                _ms(row.inter_token),
                f"{row.tokens_per_second:,.0f}",
                f"{row.requests_per_second:,.2f}",
                row.bound,
                f"{row.intensity:.1f}",
                f"{row.bandwidth_share:.0%}",
            )
            for row in plan.rows
        ),
    )


def _block_sizes(plan: Plan) -> Iterator[str]:
    yield "Block sizes"
    yield from _table(
        ("block", "blocks", "empty slots per request", "requests"),
        (
            (
                str(row.block_size),
                f"{row.num_blocks:,}",
                f"{row.wasted_tokens:,}",
                f"{row.requests_at_once:,}",
            )
            for row in plan.block_sizes
        ),
    )


def _fleet(plan: Plan, fleet: Fleet) -> Iterator[str]:
    several = "machine" if fleet.num_machines == 1 else "machines"
    yield (
        f"{fleet.requests_per_second:,g} requests per second need {fleet.num_machines:,} {several}"
        f" ({plan.machine.name})"
    )
    yield (
        f"  each: {fleet.batch:,} streams, {_ms(fleet.ttft)} to the first token, "
        f"{_ms(fleet.inter_token)} per token, {fleet.busy:.0%} of what it can do"
    )


def _simulation(found: Simulation, limits: Limits) -> Iterator[str]:
    refused = f", {found.num_refused:,} refused as too long" if found.num_refused else ""
    yield (
        f"  {found.num_requests:,} requests in {found.seconds:,.1f} s and {found.num_steps:,} steps"
        f"{refused}; busy {found.busy:.0%} of the time"
    )
    yield (
        f"  {found.num_output_tokens:,} tokens generated, {found.tokens_per_second:,.0f} a second; "
        f"{found.num_prompt_tokens:,} of prompts, {found.cache_hit_share:.1%} from the cache"
    )
    yield (
        f"  {found.num_preemptions:,} preemptions, {found.num_recomputed_tokens:,} tokens computed "
        f"again; at most {found.most_running:,} ran and {found.most_waiting:,} waited"
    )
    kept = " within the limits" if limits != Limits() else ""
    yield f"  goodput: {found.goodput:,.2f} requests per second{kept}"
    yield ""
    rows = [
        (name, *(_ms(seconds) for seconds in astuple(spread)))
        for name, spread in (
            ("waiting", found.queueing),
            ("first token", found.ttft),
            ("between tokens", found.itl),
            ("whole request", found.end_to_end),
        )
    ]
    yield from _table(("", "mean", "p50", "p90", "p95", "p99", "most"), rows)


def _each(machines: Sequence[Simulation]) -> Iterator[str]:
    yield "Each machine that was sent a request"
    rows = [
        (
            f"{number}",
            f"{one.num_requests:,}",
            f"{one.num_output_tokens:,}",
            f"{one.busy:.0%}",
            f"{one.cache_hit_share:.1%}",
            _ms(one.ttft.p50),
            _ms(one.itl.p50),
        )
        for number, one in enumerate(machines, 1)
    ]
    headings = ("", "requests", "tokens", "busy", "from cache", "first token, p50", "between, p50")
    yield from _table(headings, rows)


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    lines = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        yield "  " + "  ".join(cells).rstrip()


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def _or_blank(number: float | None, form: str) -> str:
    return "" if number is None else form.format(number)
