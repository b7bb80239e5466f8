"""The life of each request, stage by stage: where its time went, in sums that add up.

Decides in which stage a request is and what is kept of it. Owns the record of every open request
and the totals of all steps. Knows no text and no clock: it is told the time.

Invariant: the parts of a life add up to the time from its arrival to its end. A decoding request
takes part in every step, so its figures are differences of the totals: it costs a step nothing.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice
from operator import add, sub
from typing import Literal, NamedTuple

from octavo.core.lookup import CacheLookup
from octavo.core.scheduler import LOOK_AHEAD, Chunk, StepPlan
from octavo.cost.predictor import StepPrice
from octavo.request import Request, Sequence, SequenceStatus

Stage = Literal["grammar", "queued", "prefill", "decode", "preempted", "recompute"]
PartName = Literal[Stage, "sat out", "mask", "between"]
_FILLING = ("prefill", "recompute")
_RUNNING = (*_FILLING, "decode")
NOISE = 1e-9  # seconds that a difference of sums may be off
# Steps that are summed up together, unless somebody asks before: one after another that takes a
# tenth of the time that it takes between two steps, whose weights have filled the caches.
_SUMMED_TOGETHER = 32


class Work(NamedTuple):
    """What some steps did together. seconds: on the engine's clock.

    num_chunks: sequences that advanced, summed over the steps. Of the steps that the cost model
    accounts for: flops, num_bytes; compute, memory, overhead: their measured seconds, by what bound
    them; limit: the least seconds that the machine's limits allow for them.
    """

    num_steps: int = 0
    seconds: float = 0.0
    num_chunks: int = 0
    flops: float = 0.0
    num_bytes: float = 0.0
    limit: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    overhead: float = 0.0

    def plus(self, other: "Work") -> "Work":
        """Return both together."""
        return Work._make(map(add, self, other))

    def minus(self, other: "Work") -> "Work":
        """Return what is left without `other`, a part of it."""
        return Work._make(map(sub, self, other))

    @property
    def priced(self) -> float:
        """Seconds of the steps that the cost model accounts for."""
        return self.compute + self.memory + self.overhead

    @property
    def bound(self) -> str | None:
        """What bound the steps for most of their time; None if none was priced."""
        if not self.priced:
            return None
        times = {"compute": self.compute, "memory": self.memory, "overhead": self.overhead}
        return max(times, key=times.__getitem__)

    @property
    def roofline_share(self) -> float | None:
        """Share of the machine's limits that was reached; None if no step was priced."""
        return self.limit / self.priced if self.priced else None

    @property
    def intensity(self) -> float:
        """Flops per byte moved."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0


NO_WORK = Work()


class _Step(NamedTuple):
    """One step, as it is told of."""

    num_chunks: int
    seconds: float
    price: StepPrice | None
    measured: float

    def work(self) -> Work:
        """Return what it did."""
        if self.price is None:
            return Work(1, self.seconds, self.num_chunks)
        figures = self.price.predictor.account(self.price, self.measured)
        by_bound = {figures.bound: self.measured}
        return Work(
            1,
            self.seconds,
            self.num_chunks,
            figures.flops,
            figures.num_bytes,
            figures.roofline_share * self.measured,
            by_bound.get("compute", 0.0),
            by_bound.get("memory", 0.0),
            by_bound.get("overhead", 0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some seconds of a life that went to one thing.

    name: a stage, or within the running ones "sat out" (steps whose budget others used),
    "mask" (a structured output's mask was not ready), "between" (outside steps: planning, text,
    messages). reason: what it waited for. work: of the steps that it took part in. Where those
    filled its cache: num_tokens, computed of it; num_beside, decoding sequences beside it, summed
    over the steps.
    """

    name: PartName
    reason: str = ""
    seconds: float = 0.0
    work: Work = NO_WORK
    num_tokens: int = 0
    num_beside: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What happened to one request so far. Times are in seconds on the engine's clock.

    until: its end, or now; finish_reason: None while it goes on. admitted_at: when it first ran.
    cache: what the prefix cache had of its prompt. num_generated_tokens: of all its samples.
    num_recovered_tokens: lost by preemption and found in the cache; num_recomputed_tokens: lost and
    computed again.
    """

    request_id: str
    arrival_time: float
    until: float
    num_prompt_tokens: int
    num_samples: int
    is_pooled: bool
    parts: tuple[Part, ...]
    num_generated_tokens: int = 0
    finish_reason: str | None = None
    admitted_at: float | None = None
    cache: CacheLookup | None = None
    num_preemptions: int = 0
    num_recovered_tokens: int = 0
    num_recomputed_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Open:
    """A life that goes on.

    total, waited: of the engine as its stage began. own: of the steps that filled its cache in this
    stage; held: of those in which it waited for a mask. lost: of samples that were preempted, by
    index, how many tokens they had once computed.
    """

    request: Request
    sequences: Mapping[int, Sequence]
    stage: Stage
    reason: str
    since: float
    total: Work = NO_WORK
    waited: float = 0.0
    own: Work = NO_WORK
    held: Work = NO_WORK
    num_tokens: int = 0
    num_beside: int = 0
    lost: dict[int, int] = field(default_factory=dict)
    parts: dict[tuple[PartName, str], Part] = field(default_factory=dict)
    admitted_at: float | None = None
    cache: CacheLookup | None = None
    num_preemptions: int = 0
    num_recovered: int = 0
    num_recomputed: int = 0

    @property
    def runs(self) -> bool:
        return any(s.status is SequenceStatus.RUNNING for s in self.sequences.values())

    def current(self, now: float, total: Work, waited: float) -> Iterable[Part]:
        """Return the parts of the stage that it is in, up to `now`."""
        seconds = now - self.since
        if self.stage not in _RUNNING:
            yield Part(name=self.stage, reason=self.reason, seconds=seconds)
            return
        passed, idle = total.minus(self.total), waited - self.waited
        others = passed.minus(self.held)
        own = self.own if self.stage in _FILLING else others
        yield Part(
            name=self.stage,
            seconds=own.seconds,
            work=own,
            num_tokens=self.num_tokens,
            num_beside=self.num_beside,
        )
        yield Part(name="sat out", seconds=others.seconds - own.seconds)
        yield Part(name="mask", seconds=self.held.seconds + idle)
        yield Part(name="between", seconds=seconds - passed.seconds - idle)

    def merged(self, now: float, total: Work, waited: float) -> dict[tuple[PartName, str], Part]:
        """Return all parts up to `now`, in the order in which they first came."""
        parts = dict(self.parts)
        for part in self.current(now, total, waited):
            key = (part.name, part.reason)
            before = parts.get(key)
            if before is not None:
                parts[key] = _joined(before, part)
            elif abs(part.seconds) > NOISE or part.work.num_steps:
                parts[key] = part
        return parts


class LifeRecorder:
    """Watches one engine. max_kept: lives kept after their end, until taken; 0 records none."""

    def __init__(self, max_kept: int) -> None:
        self.is_on = max_kept > 0
        self._total = self._last = NO_WORK
        self._steps: list[_Step] = []  # not in the total yet
        self._waited = 0.0
        self._open: dict[str, _Open] = {}
        # Sequences whose cache is being filled, for the first time or after a preemption.
        self._filling: dict[Sequence, _Open] = {}
        self._ended: deque[Life] = deque(maxlen=max_kept)
        # Requests that lost a sample since the last plan: only now are all their others known.
        self._thinned: list[str] = []

    # --- what is told to whom asks --------------------------------------------------------------

    @property
    def total(self) -> Work:
        """What all steps did."""
        self._sum_up()
        return self._total

    @property
    def last(self) -> Work:
        """What the last step did."""
        self._sum_up()
        return self._last

    def take_ended(self) -> list[Life]:
        """Return the lives that ended since the last call; the oldest are gone if too many did."""
        lives = list(self._ended)
        self._ended.clear()
        return lives

    def life_of(self, request_id: str, now: float) -> Life | None:
        """Return the life so far of an open request, or one that ended and was not taken."""
        opened = self._open.get(request_id)
        if opened is not None:
            return self._life(opened, now)
        ended = reversed(self._ended)
        return next((life for life in ended if life.request_id == request_id), None)

    # --- a request's turns ----------------------------------------------------------------------

    def begin(self, request: Request, sequences: Mapping[int, Sequence], *, compiles: bool) -> None:
        """A request has arrived. sequences: those it has so far, by index, kept up by the owner."""
        if not self.is_on:
            return
        stage: Stage = "grammar" if compiles else "queued"
        reason = "" if compiles else "new"
        opened = _Open(request, sequences, stage, reason, request.arrival_time)
        self._open[request.request_id] = opened

    def compiled(self, request_id: str, now: float) -> None:
        """The request's grammar is ready: it queues."""
        if (opened := self._open.get(request_id)) is not None:
            self._enter(opened, "queued", "new", now)

    def sample_ended(self, request_id: str) -> None:
        """One of several samples has ended; those left may all be waiting."""
        self._thinned.append(request_id)

    def end(self, request_id: str, now: float, finish_reason: str) -> None:
        """The request's last delta has been made."""
        opened = self._open.pop(request_id, None)
        if opened is None:
            return
        for sequence in opened.sequences.values():
            self._filling.pop(sequence, None)
        self._ended.append(self._life(opened, now, finish_reason))

    # --- steps ----------------------------------------------------------------------------------

    def planned(self, plan: StepPlan, waiting: list[Sequence], now: float) -> None:
        """A step has been planned at `now`; `waiting` is the queue that it left."""
        thinned, self._thinned = self._thinned, []
        if not self.is_on:
            return
        for request_id in thinned:
            self._settle(request_id, now)
        for sequence in plan.preempted:
            self._preempt(sequence, now)
        for sequence, lookup in zip(plan.admitted, plan.lookups, strict=True):
            self._admit(sequence, lookup, now)
        # The scheduler tries no others, so theirs is the reason that they had.
        for sequence in islice(waiting, LOOK_AHEAD):
            opened, reason = self._open[sequence.request.request_id], sequence.why_waiting
            if opened.reason != reason and opened.stage in ("queued", "preempted"):
                self._enter(opened, opened.stage, reason, now)

    def stepped(
        self,
        plan: StepPlan,
        held: Set[Sequence],
        seconds: float,
        price: StepPrice | None,
        measured: float,
        now: float,
    ) -> None:
        """A plan was computed, in `seconds` to `now`; the executor alone took `measured`.

        held: sequences that it had to leave out. price: None where the step has none.
        """
        self._steps.append(_Step(len(plan.chunks), seconds, price, measured))
        if len(self._steps) >= _SUMMED_TOGETHER:
            self._sum_up()
        if held and self.is_on:
            self._hold(held, self.last)
        if self._filling:
            self._fill(plan, self.last, now)

    def _sum_up(self) -> None:
        for step in self._steps:
            self._last = step.work()
            self._total = self._total.plus(self._last)
        self._steps.clear()

    def waited(self, seconds: float) -> None:
        """No step could be planned: every running sequence waited for its mask."""
        self._waited += seconds

    # --- the stages -----------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence, now: float) -> None:
        opened = self._open[sequence.request.request_id]
        self._filling.pop(sequence, None)
        opened.num_preemptions += 1
        before = opened.lost.get(sequence.index, 0)
        opened.lost[sequence.index] = max(before, sequence.num_lost)
        if not opened.runs:
            self._enter(opened, "preempted", sequence.why_waiting, now)

    def _settle(self, request_id: str, now: float) -> None:
        opened = self._open.get(request_id)
        if opened is not None and opened.stage in _RUNNING and not opened.runs:
            self._enter(opened, "preempted", "preempted", now)

    def _admit(self, sequence: Sequence, lookup: CacheLookup, now: float) -> None:
        opened = self._open[sequence.request.request_id]
        if opened.admitted_at is None:
            opened.admitted_at, opened.cache = now, lookup
        found, lost = lookup.num_tokens, opened.lost.get(sequence.index, 0)
        opened.num_recovered += min(found, lost)
        stage: Stage = "recompute" if found < lost else "prefill"
        if found >= max(lost, sequence.num_prompt_tokens):
            stage = "decode"
        else:
            self._filling[sequence] = opened
        if opened.stage not in _RUNNING:  # else other samples of it run
            self._enter(opened, stage, "", now)

    def _fill(self, plan: StepPlan, step: Work, now: float) -> None:
        filling, found = self._filling, []
        for chunk in reversed(plan.chunks):  # prompts come last in a plan
            if (opened := filling.get(chunk.sequence)) is not None:
                found.append((chunk, opened))
                if len(found) == len(filling):
                    break
        num_beside = len(plan.chunks) - len(found)
        counted: set[_Open] = set()
        for chunk, opened in found:
            if opened not in counted:
                counted.add(opened)
                opened.own = opened.own.plus(step)
                opened.num_beside += num_beside
            self._fill_one(opened, chunk, now)

    def _fill_one(self, opened: _Open, chunk: Chunk, now: float) -> None:
        lost, end = opened.lost.get(chunk.sequence.index, 0), chunk.start + chunk.length
        opened.num_tokens += chunk.length
        opened.num_recomputed += max(0, min(end, lost) - chunk.start)
        if chunk.num_samples:
            del self._filling[chunk.sequence]
            if opened.stage in _FILLING:
                self._enter(opened, "decode", "", now)
        elif opened.stage == "recompute" and end >= lost:
            self._enter(opened, "prefill", "", now)

    def _hold(self, held: Set[Sequence], step: Work) -> None:
        for opened in {self._open[s.request.request_id] for s in held}:
            running = [s for s in opened.sequences.values() if s.status is SequenceStatus.RUNNING]
            if running and held >= set(running):
                opened.held = opened.held.plus(step)

    def _enter(self, opened: _Open, stage: Stage, reason: str, now: float) -> None:
        opened.parts = opened.merged(now, self.total, self._waited)
        opened.stage, opened.reason, opened.since = stage, reason, now
        opened.total, opened.waited = self.total, self._waited
        opened.own = opened.held = NO_WORK
        opened.num_tokens = opened.num_beside = 0

    def _life(self, opened: _Open, now: float, finish_reason: str | None = None) -> Life:
        request = opened.request
        return Life(
            request_id=request.request_id,
            arrival_time=request.arrival_time,
            until=now,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_samples=request.params.n,
            is_pooled=request.pooling is not None,
            parts=tuple(opened.merged(now, self.total, self._waited).values()),
            num_generated_tokens=sum(s.num_output_tokens for s in opened.sequences.values()),
            finish_reason=finish_reason,
            admitted_at=opened.admitted_at,
            cache=opened.cache,
            num_preemptions=opened.num_preemptions,
            num_recovered_tokens=opened.num_recovered,
            num_recomputed_tokens=opened.num_recomputed,
        )


def _joined(a: Part, b: Part) -> Part:
    return Part(
        name=a.name,
        reason=a.reason,
        seconds=a.seconds + b.seconds,
        work=a.work.plus(b.work),
        num_tokens=a.num_tokens + b.num_tokens,
        num_beside=a.num_beside + b.num_beside,
    )
