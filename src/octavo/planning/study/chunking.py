"""Chunked prefill: how long streams wait for their next token while a prompt is read.

Decides the moment: some streams are decoding when a long prompt arrives. The size of a step's
budget decides into how many chunks the prompt is cut.

Invariant: whatever the budget, the same streams decode beside the same prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.engine import Engine
from octavo.planning.study.experiment import (
    Axis,
    Experiment,
    Figure,
    Series,
    Tick,
    number,
    tabulate,
    ticking,
)
from octavo.planning.study.workbench import Clock, Job, Workbench, add, prompts

# Steps before the prompt arrives, and after its first token.
_BEFORE, _AFTER = 4, 6


@dataclass(frozen=True, slots=True)
class Size:
    """budgets: tokens of a step; the first number is that of the whole prompt."""

    num_prompt: int
    streams: int
    budgets: tuple[int, ...]

    def fitting(self, max_tokens: int) -> "Size":
        """Return the experiment with half the prompt, until a model can hold it."""
        size = self
        while size.num_prompt + 2 > max_tokens:
            half = size.num_prompt // 2
            size = Size(half, size.streams, tuple(b for b in size.budgets if b < half))
        return size


FULL = Size(1024, 4, (256, 128, 64))
QUICK = Size(128, 2, (32,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One budget. moments, gaps: seconds; when a step gave the streams a token after the prompt
    arrived, and how long that was after the one before. ttft: of the prompt, in seconds.
    """

    budget: int
    moments: tuple[float, ...]
    gaps: tuple[float, ...]
    ttft: float

    @property
    def longest(self) -> float:
        """Longest wait for a token."""
        return max(self.gaps)

    @property
    def num_steps(self) -> int:
        """Steps until the prompt was read."""
        return sum(moment <= self.ttft for moment in self.moments)


def measure(engine: Engine, size: Size, clock: Clock) -> Row:
    """Let a prompt arrive among streams; return when they got their tokens."""
    budget = engine.scheduler.max_num_batched_tokens
    most_steps = _BEFORE + _AFTER + -(-size.num_prompt // max(1, budget - size.streams)) + 8
    for text in prompts(engine, size.streams, 8, "streams"):
        add(engine, Job(text, most_steps))
    for _ in range(_BEFORE):
        engine.step()
    (text,) = prompts(engine, 1, size.num_prompt, "prompt")
    last = arrived = clock()
    request = engine.add({"prompt_token_ids": text}, Job(text, 1).params)
    moments: list[float] = []
    gaps: list[float] = []
    first, after = None, 0
    while after < _AFTER:
        deltas = engine.step()
        now = clock()
        if any(delta.request_id != request.request_id for delta in deltas):
            moments.append(now - arrived)
            gaps.append(now - last)
            last = now
        if first is None and any(d.request_id == request.request_id for d in deltas):
            first = now - arrived
        after += first is not None
    assert first is not None
    return Row(budget=budget, moments=tuple(moments), gaps=tuple(gaps), ttft=first)


def experiment(bench: Workbench, size: Size, tick: Tick) -> Experiment:
    """Let the same prompt arrive with several budgets, the whole prompt's first."""
    size = size.fitting(bench.max_tokens)
    whole = size.num_prompt + 2 * size.streams
    budgets = (whole, *size.budgets)
    rows: list[Row] = []
    for budget in ticking(budgets, tick):
        engine = bench.engine(
            max_num_batched_tokens=budget, max_num_seqs=min(budget, 2 * size.streams)
        )
        rows.append(measure(engine, size, bench.clock))
    return Experiment(
        title="Chunked prefill",
        method=f"{size.streams} streams are decoding when a prompt of {size.num_prompt:,} tokens "
        "arrives. A step may compute so many tokens; what the streams leave of them goes to the "
        "prompt.",
        finding=_finding(size, rows),
        figures=_figures(rows),
        table=tabulate(
            rows,
            {
                "tokens per step": lambda row: row.budget,
                "longest time between tokens (ms)": lambda row: 1e3 * row.longest,
                "steps until the prompt is read": lambda row: row.num_steps,
                "first token of the prompt (ms)": lambda row: 1e3 * row.ttft,
            },
        ),
    )


def _finding(size: Size, rows: Sequence[Row]) -> str:
    whole, least = rows[0], min(rows[1:], key=lambda row: row.longest)
    return (
        f"While a prompt of {size.num_prompt:,} tokens is read in one step, {size.streams} streams "
        f"wait {number(1e3 * whole.longest)} ms for their next token; in steps of {least.budget:,} "
        f"tokens they wait {number(1e3 * least.longest)} ms at most. The prompt's own first token "
        f"comes after {number(1e3 * least.ttft)} ms instead of {number(1e3 * whole.ttft)} ms."
    )


def _figures(rows: Sequence[Row]) -> tuple[Figure, ...]:
    gaps = tuple(
        Series(
            name=_name(row, rows),
            x=tuple(1e3 * moment for moment in row.moments),
            y=tuple(1e3 * gap for gap in row.gaps),
        )
        for row in rows
    )
    budgets = tuple(f"{row.budget}" for row in rows)
    waits = (
        ("streams: longest time between tokens", tuple(1e3 * row.longest for row in rows)),
        ("prompt: time to first token", tuple(1e3 * row.ttft for row in rows)),
    )
    return (
        Figure(
            title="Time between tokens",
            x=Axis(title="time since the prompt arrived", unit="ms"),
            y=Axis(title="time between tokens", unit="ms", is_log=True),
            series=gaps,
        ),
        Figure(
            title="What a smaller step costs",
            x=Axis(title="budget of a step", unit="tokens"),
            y=Axis(title="wait", unit="ms"),
            series=tuple(Series(name=n, x=budgets, y=y, kind="bars") for n, y in waits),
        ),
    )


def _name(row: Row, rows: Sequence[Row]) -> str:
    return "whole prompt" if row is rows[0] else f"{row.budget} tokens per step"
