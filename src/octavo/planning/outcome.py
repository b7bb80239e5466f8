"""What is kept of a simulated run, and what it adds up to.

Decides how times are kept without a note for each token: between two steps everyone who decodes
waits equally long, so a step is one gap with a weight. Knows no engine and no clock.

Invariant: the weights of all gaps are the tokens that follow another of their request.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.scheduler import SchedulerCounters, StepPlan
from octavo.engine.outputs import OutputDelta
from octavo.planning.fleet import Limits
from octavo.request import Sequence as Tokens

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds: mean, percentiles and the most. All 0 if nothing was measured."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    most: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float] | Floats) -> "Distribution":
        """Return the distribution of some values."""
        if not len(values):
            return cls()
        p50, p90, p95, p99 = (float(rank) for rank in np.percentile(values, (50, 90, 95, 99)))
        return cls(float(np.mean(values)), p50, p90, p95, p99, float(np.max(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What happened in the simulated time, in seconds and tokens.

    queueing: from arrival to the first step. ttft: to the first token. itl: between two tokens of a
    request. end_to_end: to the last. goodput: requests per second that kept both limits, the mean
    of a request's own gaps counting; equal to all finished ones without limits. busy: share of the
    time in which a step ran. Of several machines, busy is their mean, and the most that ran or
    waited is that of any one.
    """

    seconds: float
    num_requests: int
    num_refused: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    queueing: Distribution
    ttft: Distribution
    itl: Distribution
    end_to_end: Distribution
    goodput: float
    busy: float
    most_running: int
    most_waiting: int

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def cache_hit_share(self) -> float:
        """Prompt tokens found in the cache, of all."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)


class Finished(NamedTuple):
    """A request's moments in seconds, and how many tokens it was answered."""

    arrival: float
    first_scheduled: float
    first_token: float
    last_token: float
    num_tokens: int


@dataclass(slots=True)
class Record:
    """What one machine's run leaves. ends, drawn: of each step, its end and its tokens.

    late: gaps of those who were preempted in between. arrivals: of requests that still run.
    """

    arrivals: dict[str, float] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    num_refused: int = 0
    busy: float = 0.0
    most_running: int = 0
    most_waiting: int = 0
    _preempted: dict[Tokens, float] = field(default_factory=dict)
    _returning: list[float] = field(default_factory=list)

    def note_plan(self, plan: StepPlan) -> None:
        """Note who is preempted after a token, and who draws again after that."""
        for sequence in plan.preempted:
            if sequence.num_output_tokens:
                self._preempted.setdefault(sequence, self.ends[-1])
        if self._preempted:
            drawing = [chunk.sequence for chunk in plan.chunks if chunk.num_samples]
            found = (self._preempted.pop(sequence, None) for sequence in drawing)
            self._returning = [last for last in found if last is not None]

    def note_step(self, started: float, ended: float, num_drawn: int) -> None:
        """Note a step that drew so many tokens, one for each sequence."""
        self.busy += ended - started
        self.ends.append(ended)
        self.drawn.append(num_drawn - len(self._returning))
        if self._returning:
            self.late += [ended - last for last in self._returning]
            self._returning = []

    def note_end(self, delta: OutputDelta) -> Finished:
        """Note a request's only delta; raises what it failed of."""
        if delta.error is not None:
            raise delta.error
        times = delta.metrics
        assert times is not None
        assert times.first_scheduled_time is not None
        assert times.first_token_time is not None
        assert times.finished_time is not None
        done = Finished(
            self.arrivals.pop(delta.request_id),
            times.first_scheduled_time,
            times.first_token_time,
            times.finished_time,
            len(delta.token_ids),
        )
        self.finished.append(done)
        return done

    def gaps(self) -> Floats:
        """Return the seconds before each token that is not its request's first."""
        ends = np.array(self.ends)
        weights = np.array(self.drawn, np.int64)
        firsts = np.searchsorted(ends, [done.first_token for done in self.finished])
        np.subtract.at(weights, firsts, 1)
        steady = np.repeat(np.diff(ends, prepend=0.0), weights)
        return np.concatenate([steady, self.late])


def summarize(
    records: Sequence[Record],
    counters: Iterable[SchedulerCounters],
    seconds: float,
    limits: Limits,
) -> Simulation:
    """Return what the machines did together until `seconds`."""
    done = [times for record in records for times in record.finished]
    kept = sum(_keeps(times, limits) for times in done)
    totals = list(counters)
    return Simulation(
        seconds=seconds,
        num_requests=len(done),
        num_refused=sum(record.num_refused for record in records),
        num_steps=sum(len(record.ends) for record in records),
        num_prompt_tokens=sum(each.num_prompt_tokens for each in totals),
        num_cached_tokens=sum(each.num_reused_tokens for each in totals),
        num_output_tokens=sum(each.num_generated_tokens for each in totals),
        num_recomputed_tokens=sum(each.num_recomputed_tokens for each in totals),
        num_preemptions=sum(each.num_preemptions for each in totals),
        queueing=Distribution.of([t.first_scheduled - t.arrival for t in done]),
        ttft=Distribution.of([t.first_token - t.arrival for t in done]),
        itl=Distribution.of(np.concatenate([record.gaps() for record in records])),
        end_to_end=Distribution.of([t.last_token - t.arrival for t in done]),
        goodput=kept / seconds if seconds else 0.0,
        busy=sum(r.busy for r in records) / len(records) / seconds if seconds else 0.0,
        most_running=max(record.most_running for record in records),
        most_waiting=max(record.most_waiting for record in records),
    )


def _keeps(times: Finished, limits: Limits) -> bool:
    """Whether a request's first token and the mean of its gaps came within the limits."""
    is_prompt = limits.ttft is None or times.first_token - times.arrival <= limits.ttft
    mean_gap = (times.last_token - times.first_token) / max(1, times.num_tokens - 1)
    return is_prompt and (limits.itl is None or mean_gap <= limits.itl)
