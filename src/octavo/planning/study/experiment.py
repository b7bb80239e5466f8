"""What an experiment brings home: a finding, figures with units, and the numbers.

Decides how numbers are written in findings and tables. Draws nothing.

Invariant: every axis has a title and a unit, and every row of a table a cell for each column.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Item = TypeVar("Item")
Kind = Literal["line", "steps", "points", "bars"]
Cell = str | int | float
# Told the share of an experiment that is done, from 0 to 1.
Tick = Callable[[float], None]


def no_tick(_: float) -> None:
    """Tell nobody."""


def ticking(
    items: Sequence[Item], tick: Tick, weight: Callable[[Item], float] = lambda _: 1.0
) -> Iterator[Item]:
    """Yield the items of an experiment; tell what share of their weights is done after each."""
    total, done = sum(map(weight, items)), 0.0
    for item in items:
        yield item
        done += weight(item)
        tick(done / total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis. unit: of its numbers; of names, what they are names of. ticks: where it is marked,
    if not everywhere.
    """

    title: str
    unit: str
    is_log: bool = False
    ticks: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (self.title and self.unit):
            raise ValueError(f"an axis needs a title and a unit: {self.title!r}, {self.unit!r}")

    @property
    def label(self) -> str:
        """What stands beside the axis."""
        return f"{self.title} ({self.unit})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one kind, in order. notes: what each point is, one per point, or none.

    is_guide: a limit to compare with, and not a measurement.
    """

    name: str
    x: tuple[Cell, ...]
    y: tuple[float, ...]
    kind: Kind = "line"
    notes: tuple[str, ...] = ()
    is_guide: bool = False

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.notes) not in (0, len(self.x)):
            counts = f"{len(self.x)} x, {len(self.y)} y, {len(self.notes)} notes"
            raise ValueError(f"{self.name}: {counts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One plot."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Numbers as they were measured; a column's name tells its unit."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{row} has not the columns {self.columns}")


def tabulate(items: Iterable[Item], columns: Mapping[str, Callable[[Item], Cell]]) -> Table:
    """Return a table with a row for each item, of what each column reads from it."""
    return Table(
        columns=tuple(columns),
        rows=tuple(tuple(read(item) for read in columns.values()) for item in items),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What was found. method: what was done, in a sentence or two. finding: made of the numbers."""

    title: str
    method: str
    finding: str
    figures: tuple[Figure, ...]
    table: Table


def number(value: Cell) -> str:
    """Write a number with three digits that count, or all of those before the point."""
    if isinstance(value, str):
        return value
    size = abs(value)
    if isinstance(value, int) or size >= 100:
        return f"{value:,.0f}"
    if size == 0:
        return "0"
    decimals = 2
    while size < 1 and decimals < 7:
        size, decimals = size * 10, decimals + 1
    return f"{value:,.{decimals - (size >= 10)}f}"


def times(value: float, other: float) -> str:
    """Write how often `other` goes into `value`."""
    return f"{number(value / other)} times" if other else "beyond measure"


def listed(values: tuple[Cell, ...]) -> str:
    """Write "1, 2 and 3"."""
    words = [number(value) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def counted(count: int, noun: str) -> str:
    """Write "1 stream" or "2 streams"."""
    return f"{count:,} {noun}" + "s"[: count != 1]
