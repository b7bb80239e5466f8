"""What a step of this engine costs, here and now: predicted, and corrected by what was measured.

Decides how predictions are refined: one factor for sequences that compute one token each, and one
for what prompts add to a step. Prices a step while it is put together, and accounts for it
afterwards. Knows neither sequences nor clocks.

Invariant: the same observations in the same order give the same predictions; a factor stays within
`MAX_FACTOR` of 1, and no observation moves it by more than `MAX_JUMP`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from octavo.cost.accounting import OperationCost, PreparedProgram
from octavo.cost.hardware import Efficiency, Machine
from octavo.cost.roofline import Bound
from octavo.cost.steps import StepTimes, row_costs

MAX_FACTOR = 64.0
MAX_JUMP = 2.0
# The first observations are averaged; from then on this is the weight of each.
MIN_GAIN = 1 / 8
_MEAN_OF = 1 / MIN_GAIN - 1

Counts = tuple[int, ...]


class StepPrice(NamedTuple):
    """The chunks of a step together. seconds: predicted, corrected by what was observed so far.

    pairs, positions: that the rows see and read, for each kind of attention of the program. raw,
    decodes: uncorrected seconds of the whole, and of its chunks of one token without the others.
    """

    predictor: "StepPredictor"
    num_rows: int
    logit_rows: int
    pairs: Counts
    positions: Counts
    raw: float
    decodes: float
    seconds: float

    def plus(self, start: int, length: int, logit_rows: int) -> "StepPrice":
        """Return the step with the tokens [start, start + length) of one more sequence."""
        return self.predictor.extend(self, start, length, logit_rows)


class StepAccount(msgspec.Struct, frozen=True):
    """A step that was run. Times in seconds; flops and bytes of all its operations.

    predicted: of the whole step. measured: of what the executor did in it. bound: what most of the
    predicted time goes to. roofline_share: the least time that the machine's limits allow, as a
    share of the measured time; above 1 if the machine, which nobody measured, is faster than
    assumed.
    """

    num_rows: int
    predicted: float
    measured: float
    flops: int
    num_bytes: int
    bound: Bound
    roofline_share: float

    @property
    def intensity(self) -> float:
        """Flops per byte moved."""
        return self.flops / self.num_bytes


class StepPredictor:
    """Prices the steps of one program on one machine, and learns from those that ran."""

    def __init__(self, prepared: PreparedProgram, machine: Machine) -> None:
        self.prepared = prepared
        self.machine = machine
        self.times = StepTimes(prepared, machine)
        self._limits = StepTimes(prepared, _ideal(machine))
        self._totals = _Totals(prepared, self.times)
        self._decode, self._prompt = _Factor(), _Factor()

    # --- before a step --------------------------------------------------------------------------

    def price(self, chunks: Sequence[tuple[int, int]], logit_rows: int) -> StepPrice:
        """Return the price of chunks, each (first position, tokens)."""
        contexts = [start + 1 for start, length in chunks if length == 1]
        counts = tuple([op.count_decodes(contexts) for op in self.times.attention])
        if len(contexts) == len(chunks):
            return self._price(len(contexts), logit_rows, counts, counts, None)
        decode_rows = min(logit_rows, len(contexts))
        found = self._price(len(contexts), decode_rows, counts, counts, None)
        for start, length in chunks:
            if length > 1:
                found = self.extend(found, start, length, 0)
        return self.extend(found, 0, 0, logit_rows - decode_rows)

    def extend(self, step: StepPrice, start: int, length: int, logit_rows: int) -> StepPrice:
        """Return the price of `step` with one more chunk; see `StepPrice.plus`."""
        context, pairs, positions = start + length, [], []
        ops = self.times.attention
        for op, seen, read in zip(ops, step.pairs, step.positions, strict=True):
            pairs.append(seen + op.operation.seen(length, context))
            positions.append(read + op.operation.read(length, context))
        return self._price(
            step.num_rows + length,
            step.logit_rows + logit_rows,
            tuple(pairs),
            tuple(positions),
            step.decodes,
        )

    def _price(
        self, rows: int, logit_rows: int, pairs: Counts, positions: Counts, decodes: float | None
    ) -> StepPrice:
        raw = _seconds(self.times, rows, logit_rows, pairs, positions) if rows else 0.0
        decodes = raw if decodes is None else decodes
        seconds = decodes * self._decode.value + (raw - decodes) * self._prompt.value
        return StepPrice(self, rows, logit_rows, pairs, positions, raw, decodes, seconds)

    # --- after a step ---------------------------------------------------------------------------

    def observe(self, step: StepPrice, measured: float) -> None:
        """Learn from a step that took `measured` seconds; 0, which no clock saw, says nothing.

        They are of the whole step, what the engine does in it included, as predictions are. Steps
        without prompts teach what those cost; the others what prompts add to them, the less the
        smaller their share. What has not been seen yet is as far off as the other.
        """
        if measured <= 0 or step.raw <= 0:
            return
        if step.raw == step.decodes:
            moved = self._decode.move(measured / (step.raw * self._decode.value))
            self._prompt.follow(moved)
            return
        added = (step.raw - step.decodes) * self._prompt.value
        decodes = step.decodes * self._decode.value
        moved = self._prompt.move((measured - decodes) / added, weight=added / (added + decodes))
        self._decode.follow(moved)

    def account(self, step: StepPrice, measured: float) -> StepAccount:
        """Return what a step did in `measured` seconds."""
        flops, num_bytes = self._totals.of(step)
        limit = _seconds(self._limits, step.num_rows, step.logit_rows, step.pairs, step.positions)
        return StepAccount(
            num_rows=step.num_rows,
            predicted=step.seconds,
            measured=measured,
            flops=flops,
            num_bytes=num_bytes,
            bound=self._bound(step),
            roofline_share=limit / measured if measured > 0 else 0.0,
        )

    def _bound(self, step: StepPrice) -> Bound:
        seconds = dict(self.times.rows_bounds(step.num_rows, step.logit_rows))
        for op, pairs, positions in zip(
            self.times.attention, step.pairs, step.positions, strict=True
        ):
            bound, taken = op.bound(step.num_rows, pairs, positions)
            seconds[bound] += taken
        return max(seconds, key=seconds.__getitem__)


def _ideal(machine: Machine) -> Machine:
    """Reaches all that the machine's peaks allow: full tiles, and products beside all traffic."""
    return replace(
        machine,
        efficiency=Efficiency(1.0, 1.0, 0.0),
        step_overhead=0.0,
        row_overhead=0.0,
        instruction_set=None,
    )


class _Factor:
    """A running mean of measured over predicted seconds, in logarithms, robust and bounded."""

    def __init__(self) -> None:
        self.value = 1.0
        self._num_observed = 0.0

    def move(self, ratio: float, weight: float = 1.0) -> float:
        """Go towards `value * ratio`, at once at first, then by a share; return by what factor.

        A ratio beyond what one observation may do counts for nothing in the mean: it is either a
        disturbance, or says that the mean has far to go.
        """
        num_observed = self._num_observed
        gain = weight / (1 + num_observed) if num_observed < _MEAN_OF else weight * MIN_GAIN
        if 1 / MAX_JUMP <= ratio <= MAX_JUMP:
            self._num_observed = num_observed + weight
        else:
            ratio = MAX_JUMP if ratio > 1 else 1 / MAX_JUMP
        moved: float = ratio**gain
        self._multiply(moved)
        return moved

    def follow(self, moved: float) -> None:
        """Move as the other did, unless something of one's own has been counted."""
        if not self._num_observed:
            self._multiply(moved)

    def _multiply(self, factor: float) -> None:
        value = self.value * factor
        if not 1 / MAX_FACTOR <= value <= MAX_FACTOR:
            value = MAX_FACTOR if value > 1 else 1 / MAX_FACTOR
        self.value = value


class _Totals:
    """Flops and bytes of a step; those of all operations but attention grow with the rows."""

    def __init__(self, prepared: PreparedProgram, times: StepTimes) -> None:
        self._body = _linear(prepared, head=False)
        self._head = _linear(prepared, head=True)
        sizes = prepared.sizes
        self._attention = []  # of a pair, of a position, and of a row
        for each in times.attention:
            op, row = each.operation, each.operation.traffic(sizes, 1, 0).total
            position = op.traffic(sizes, 1, 1).total - row
            costs = (op.flops(1, 1), position, row)
            self._attention.append(tuple(each.count * cost for cost in costs))

    def of(self, step: StepPrice) -> tuple[int, int]:
        """Return flops and bytes."""
        flops, num_bytes = self._body(step.num_rows)
        if step.logit_rows:
            head_flops, head_bytes = self._head(step.logit_rows)
            flops, num_bytes = flops + head_flops, num_bytes + head_bytes
        for (pair, position, row), pairs, positions in zip(
            self._attention, step.pairs, step.positions, strict=True
        ):
            flops += pair * pairs
            num_bytes += position * positions + row * step.num_rows
        return round(flops), round(num_bytes)


def _linear(prepared: PreparedProgram, *, head: bool) -> Callable[[int], tuple[float, float]]:
    """Return a function from rows to the flops and bytes of all operations but attention."""
    (one_flops, one_bytes), (two_flops, two_bytes) = (
        _sum(row_costs(prepared, rows, head=head)) for rows in (1, 2)
    )
    each_flops, each_bytes = two_flops - one_flops, two_bytes - one_bytes
    return lambda rows: (
        one_flops + (rows - 1) * each_flops,
        one_bytes + (rows - 1) * each_bytes,
    )


def _sum(costs: Iterable[OperationCost]) -> tuple[float, float]:
    costs = list(costs)
    return sum(cost.flops for cost in costs), sum(cost.traffic.total for cost in costs)


def _seconds(
    times: StepTimes, rows: int, logit_rows: int, pairs: Counts, positions: Counts
) -> float:
    seconds = times.rows_seconds(rows, logit_rows)
    for op, seen, read in zip(times.attention, pairs, positions, strict=True):
        seconds += op.of_counts(rows, seen, read)
    return seconds
