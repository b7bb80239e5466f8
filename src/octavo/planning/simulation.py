"""A trace on virtual time: the real engine and scheduler, and steps as long as they cost.

Decides when requests arrive and what is kept of each: times of its tokens, not their texts.
Arrivals during a step are seen after it, as a server sees them.

Invariant: every request of the trace ends exactly once, as finished or as refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.config import EngineConfig
from octavo.core.blocks import BlockManager
from octavo.core.scheduler import Scheduler
from octavo.cost.hardware import Machine
from octavo.cost.predictor import StepPredictor
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.engine.outputs import OutputDelta
from octavo.errors import BadRequestError
from octavo.executors.simulated import SimulatedExecutor, VirtualClock, build_lengths
from octavo.planning.capacity import Capacity, capacity
from octavo.planning.fleet import Limits
from octavo.planning.load.work import Session
from octavo.planning.plan import prepared_for
from octavo.planning.subject import Subject
from octavo.request import SamplingParams

Progress = Callable[[int, int], None]


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
    def of(cls, values: Sequence[float]) -> "Distribution":
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
    time in which a step ran.
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


@dataclass(slots=True)
class _Times:
    """What is kept of one request."""

    arrival: float
    last: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    num_tokens: int = 0


@dataclass(slots=True)
class _Record:
    """What is kept of a run. gaps: between tokens, of all requests."""

    active: dict[str, _Times] = field(default_factory=dict)
    finished: list[_Times] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_refused: int = 0
    busy: float = 0.0
    num_steps: int = 0
    most_running: int = 0
    most_waiting: int = 0

    def note(self, deltas: list[OutputDelta], now: float) -> None:
        """Record one step's deltas, which all came at `now`."""
        active, add_gap = self.active, self.gaps.append
        for delta in deltas:
            times = active[delta.request_id]
            if times.num_tokens:
                add_gap(now - times.last)
            else:
                times.first_token = now
            times.num_tokens += 1
            times.last = now
            if delta.is_last:
                if delta.error is not None:
                    raise delta.error
                assert delta.metrics is not None
                started = delta.metrics.first_scheduled_time
                assert started is not None
                times.first_scheduled = started
                self.finished.append(active.pop(delta.request_id))


class Simulator:
    """One model on one simulated machine. Raises like `capacity` if it does not fit."""

    def __init__(self, subject: Subject, machine: Machine, config: EngineConfig) -> None:
        prepared = prepared_for(subject, machine, config)
        # The pool is that of the machine, whatever one request needs.
        self.capacity: Capacity = capacity(prepared, machine, config, 2)
        self.clock = VirtualClock()
        self.engine = _engine(subject, StepPredictor(prepared, machine), self, config)

    def run(
        self,
        sessions: Sequence[Session],
        limits: Limits | None = None,
        progress: Progress = lambda done, total: None,
    ) -> Simulation:
        """Serve sessions of one turn each at their arrivals, and return what happened.

        progress: told how many requests have arrived, of how many. Raises `BadRequestError` if
        every request is refused.
        """
        record = _Record()
        engine, clock = self.engine, self.clock
        order = sorted(sessions, key=lambda session: session.arrival or 0.0)
        position = 0
        while position < len(order) or engine.has_unfinished:
            if not engine.has_unfinished:
                clock.advance_to(order[position].arrival or 0.0)
            arrived = position
            while position < len(order) and (order[position].arrival or 0.0) <= clock.now:
                self._add(order[position], position, record)
                position += 1
            if position != arrived:
                progress(position, len(order))
            if engine.has_unfinished:
                self._step(record)
        if not record.finished:
            raise BadRequestError(
                f"None of the {len(order):,} requests fits: the longest may have "
                f"{self.capacity.longest_context:,} tokens. Plan with a larger machine or "
                "--kv-cache-memory-bytes, or leave long lines out with --trace-max-tokens."
            )
        return _summary(record, engine, clock.now, limits or Limits())

    def _add(self, session: Session, number: int, record: _Record) -> None:
        (turn,) = session.turns
        request_id, arrival = str(number), session.arrival or 0.0
        params = SamplingParams(
            max_tokens=turn.num_output_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        try:
            self.engine.add(
                {"prompt_token_ids": turn.tokens.tolist()}, params, request_id=request_id
            )
        except BadRequestError:  # longer than the context or the pool
            record.num_refused += 1
        else:
            record.active[request_id] = _Times(arrival)

    def _step(self, record: _Record) -> None:
        scheduler, before = self.engine.scheduler, self.clock.now
        deltas = self.engine.step()
        now = self.clock.now
        record.note(deltas, now)
        record.busy += now - before
        record.num_steps += 1
        record.most_running = max(record.most_running, len(scheduler.running))
        record.most_waiting = max(record.most_waiting, len(scheduler.waiting))


def _engine(
    subject: Subject, predictor: StepPredictor, simulator: Simulator, config: EngineConfig
) -> Engine:
    found, clock = simulator.capacity, simulator.clock
    executor = SimulatedExecutor(
        predictor.times, clock, num_blocks=found.num_blocks, block_size=found.block_size
    )
    blocks = BlockManager(
        found.num_blocks,
        found.block_size,
        fingerprint=executor.fingerprint,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    scheduler = Scheduler(
        blocks,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_chunk_tokens=config.long_prefill_token_threshold,
        policy=config.scheduling_policy,
        cost=predictor,
        target_itl=None if config.target_itl_ms is None else config.target_itl_ms / 1e3,
    )
    intake = Intake(
        tokenizer=None,
        vocab_size=subject.program.vocab_size,
        max_model_len=found.longest_context,
        max_pool_tokens=found.num_blocks * found.block_size,
        seed=config.seed,
    )
    return Engine(
        executor=executor,
        scheduler=scheduler,
        intake=intake,
        decoder=None,
        clock=clock,
        build=build_lengths,
    )


def _summary(record: _Record, engine: Engine, seconds: float, limits: Limits) -> Simulation:
    done, counters = record.finished, engine.scheduler.counters
    kept = sum(_keeps(times, limits) for times in done)
    return Simulation(
        seconds=seconds,
        num_requests=len(done),
        num_refused=record.num_refused,
        num_steps=record.num_steps,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_cached_tokens=counters.num_reused_tokens,
        num_output_tokens=counters.num_generated_tokens,
        num_recomputed_tokens=counters.num_recomputed_tokens,
        num_preemptions=counters.num_preemptions,
        queueing=Distribution.of([t.first_scheduled - t.arrival for t in done]),
        ttft=Distribution.of([t.first_token - t.arrival for t in done]),
        itl=Distribution.of(record.gaps),
        end_to_end=Distribution.of([t.last - t.arrival for t in done]),
        goodput=kept / seconds if seconds else 0.0,
        busy=record.busy / seconds if seconds else 0.0,
        most_running=record.most_running,
        most_waiting=record.most_waiting,
    )


def _keeps(times: _Times, limits: Limits) -> bool:
    """Whether a request's first token and the mean of its gaps came within the limits."""
    is_prompt = limits.ttft is None or times.first_token - times.arrival <= limits.ttft
    mean_gap = (times.last - times.first_token) / max(1, times.num_tokens - 1)
    return is_prompt and (limits.itl is None or mean_gap <= limits.itl)
