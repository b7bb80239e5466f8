"""Where each operation of prefill and decode stands under this machine's roofline.

Decides which steps are timed: decoding at batch sizes 1 to 64, and a prompt. Flops and bytes are
the cost model's, seconds are measured, an operation at a time.

Invariant: an operation's place on the x axis depends on the program alone, not on the machine.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from octavo.cost.accounting import OperationCost, PreparedProgram, account
from octavo.cost.hardware import Machine
from octavo.planning.steps import num_blocks, operation_seconds
from octavo.planning.study.experiment import (
    Axis,
    Experiment,
    Figure,
    Series,
    Table,
    Tick,
    number,
    tabulate,
    ticking,
)
from octavo.planning.study.workbench import Workbench
from octavo.program.program import Chunk

_LAYER = re.compile(r"layers\.\d+\.")


@dataclass(frozen=True, slots=True)
class Size:
    """batches: of decoding, at `context` positions. num_prompt: tokens of the prompt."""

    batches: tuple[int, ...]
    context: int
    num_prompt: int
    num_runs: int


FULL = Size((1, 2, 4, 8, 16, 32, 64), 256, 256, 2)
QUICK = Size((1, 8, 64), 64, 64, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Alike operations of all layers in one step. batch: of decoding; None for a prompt."""

    operation: str
    form: str
    batch: int | None
    count: int
    flops: float
    num_bytes: float
    seconds: float

    @property
    def step(self) -> str:
        """Its step's name."""
        return "prompt" if self.batch is None else f"batch {self.batch}"

    @property
    def intensity(self) -> float:
        """Flops per byte."""
        return self.flops / self.num_bytes

    @property
    def is_product(self) -> bool:
        """Whether its speed depends on a format."""
        return self.operation.startswith(("Linear", "Attention"))

    @property
    def rate(self) -> float:
        """Flops per second that were reached."""
        return self.flops / self.seconds

    @property
    def bandwidth(self) -> float:
        """Bytes per second that were reached."""
        return self.num_bytes / self.seconds


def points_of(
    costs: Sequence[OperationCost], seconds: Sequence[float], batch: int | None
) -> Iterator[Point]:
    """Sum what is alike in all layers; costs may have more than were timed."""
    timed = sorted(zip(costs, seconds, strict=False), key=lambda pair: name_of(pair[0]))
    for name, alike in groupby(timed, lambda pair: name_of(pair[0])):
        pairs = list(alike)
        yield Point(
            operation=name,
            form=pairs[0][0].form,
            batch=batch,
            count=len(pairs),
            flops=sum(cost.flops for cost, _ in pairs),
            num_bytes=sum(cost.traffic.total for cost, _ in pairs),
            seconds=sum(each for _, each in pairs),
        )


def name_of(cost: OperationCost) -> str:
    """Return an operation's kind and what tells it from others of its kind, without its layer."""
    op = cost.operation
    kind = type(op).__name__
    parameters = [_LAYER.sub("", parameter.name) for parameter in op.parameters]
    return f"{kind} {'+'.join(parameters)}" if parameters and kind == "Linear" else kind


def fitting(size: Size, max_tokens: int, max_blocks: int, block_size: int) -> list[list[Chunk]]:
    """Return the steps of the experiment that model and pool can hold, the prompt last."""
    decodes = [[Chunk(1, size.context)] * batch for batch in size.batches]
    steps = [*decodes, [Chunk(size.num_prompt, size.num_prompt)]]
    return [
        step
        for step in steps
        if step[0].context < max_tokens and num_blocks(step, block_size) <= max_blocks
    ]


def experiment(
    bench: Workbench, prepared: PreparedProgram, machine: Machine, size: Size, tick: Tick
) -> Experiment:
    """Time every operation of some steps, and compare with the machine's limits."""
    points: list[Point] = []
    executor = bench.executor
    steps = fitting(size, bench.max_tokens, executor.num_blocks, executor.block_size)
    for chunks in ticking(steps, tick):
        seconds = operation_seconds(executor, chunks, size.num_runs)  # type: ignore[arg-type]
        batch = len(chunks) if chunks[0].rows == 1 else None
        points += points_of(account(prepared, chunks, len(chunks)), seconds, batch)
    decodes = [point for point in points if point.batch is not None]
    prefills = [point for point in points if point.batch is None]
    return Experiment(
        title="The roofline of this machine",
        method=f"Every operation is timed by itself, in steps that decode {size.context:,} "
        f"positions behind a prompt and in the prefill of {size.num_prompt:,} tokens; the same "
        "operation of all layers is one point. The limits are those of "
        f"{machine.title}, {machine.source}. Values between operations come from a cache, so "
        "they may pass the limit of the memory.",
        finding=_finding(decodes, prefills, machine),
        figures=(
            _figure("Decode", decodes, machine),
            _figure(f"Prefill of {size.num_prompt:,} tokens", prefills, machine),
        ),
        table=_table(points),
    )


def _finding(decodes: Sequence[Point], prefills: Sequence[Point], machine: Machine) -> str:
    batches = tuple(dict.fromkeys(point.batch for point in decodes if point.batch is not None))
    alone = _products(point for point in decodes if point.batch == batches[0])
    crowd = _products(point for point in decodes if point.batch == batches[-1])
    prompt = _products(prefills)
    ridge = machine.ridge(alone.form)
    return (
        f"The weights' products of a step do {number(alone.intensity)} flops per byte at batch "
        f"{batches[0]}, {number(crowd.intensity)} at batch {batches[-1]} and "
        f"{number(prompt.intensity)} in the prompt; the ridge is at {number(ridge)}, so they wait "
        f"for {_limit(alone, ridge)}, {_limit(crowd, ridge)} and {_limit(prompt, ridge)}. They "
        f"reach {number(alone.rate / 1e9)}, {number(crowd.rate / 1e9)} and "
        f"{number(prompt.rate / 1e9)} GFLOP/s, and {number(alone.bandwidth / 1e9)} GB/s at batch "
        f"{batches[0]}."
    )


def _limit(point: Point, ridge: float) -> str:
    return "memory" if point.intensity < ridge else "arithmetic"


def _products(points: Iterator[Point] | Sequence[Point]) -> Point:
    """All products with weights of one step as one; its format is that of most of their flops."""
    chosen = [point for point in points if point.operation.startswith("Linear")]
    return Point(
        operation="Linear",
        form=max(chosen, key=lambda point: point.flops).form,
        batch=chosen[0].batch,
        count=sum(point.count for point in chosen),
        flops=sum(point.flops for point in chosen),
        num_bytes=sum(point.num_bytes for point in chosen),
        seconds=sum(point.seconds for point in chosen),
    )


def _figure(title: str, points: Sequence[Point], machine: Machine) -> Figure:
    computing = [point for point in points if point.flops]
    intensities = [point.intensity for point in computing]
    low, high = min(intensities) / 2, 2 * max(intensities)
    forms = sorted({point.form for point in computing if point.is_product})
    names = dict.fromkeys(point.operation for point in computing)
    return Figure(
        title=title,
        x=Axis(title="arithmetic intensity", unit="flops per byte", is_log=True),
        y=Axis(title="speed", unit="GFLOP/s", is_log=True),
        series=(
            *_roofs(forms, machine, low, high),
            *(_path([p for p in computing if p.operation == name]) for name in names),
        ),
    )


def _path(points: Sequence[Point]) -> Series:
    return Series(
        name=points[0].operation,
        x=tuple(point.intensity for point in points),
        y=tuple(point.rate / 1e9 for point in points),
        kind="line" if len(points) > 1 else "points",
        notes=tuple(point.step for point in points),
    )


def _roofs(forms: Sequence[str], machine: Machine, low: float, high: float) -> Iterator[Series]:
    """One roof per weight format, and the slope of values that lie in a cache."""
    share = machine.efficiency
    memory = machine.bandwidth * share.memory
    for form in forms:
        rate = machine.rate(form) * share.products
        yield _roof(f"limit with {form}", memory, rate, low, high)
    if machine.cache_bandwidth:
        highest = max(machine.rate(form) for form in forms) * share.products
        slope = machine.cache_bandwidth * share.memory
        yield _roof("limit from a cache", slope, highest, low, high)


def _roof(name: str, slope: float, rate: float, low: float, high: float) -> Series:
    x = sorted({low, min(max(rate / slope, low), high), high})
    y = tuple(min(slope * each, rate) / 1e9 for each in x)
    return Series(name=name, x=tuple(x), y=y, is_guide=True)


def _table(points: Sequence[Point]) -> Table:
    return tabulate(
        points,
        {
            "step": lambda point: point.step,
            "operation": lambda point: point.operation,
            "format": lambda point: point.form if point.is_product else "",
            "how many": lambda point: point.count,
            "time (us)": lambda point: 1e6 * point.seconds,
            "MFLOP": lambda point: point.flops / 1e6,
            "MB": lambda point: point.num_bytes / 1e6,
            "flops per byte": lambda point: point.intensity,
            "GFLOP/s": lambda point: point.rate / 1e9,
            "GB/s": lambda point: point.bandwidth / 1e9,
        },
    )
