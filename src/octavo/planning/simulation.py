"""A trace on virtual time: real engines and schedulers, and steps as long as they cost.

Decides when requests arrive, and at which machine. Arrivals during a step are seen after it, as a
server sees them. What is kept of a run is `outcome`'s, the choice of a machine `routing`'s.

Invariant: every request of the trace ends exactly once, as finished or as refused, on one machine.
"""

import gc
import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from octavo.config import EngineConfig
from octavo.core.blocks import BlockManager
from octavo.core.scheduler import Scheduler, StepPlan
from octavo.cost.hardware import Machine
from octavo.cost.predictor import StepPredictor
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.errors import BadRequestError
from octavo.executors.batch import MaskOf
from octavo.executors.executor import Batch
from octavo.executors.simulated import SimulatedExecutor, VirtualClock, build_lengths
from octavo.planning.capacity import Capacity, capacity
from octavo.planning.fleet import Limits
from octavo.planning.load.work import Session, Turn
from octavo.planning.outcome import Record, Simulation, summarize
from octavo.planning.plan import prepared_for
from octavo.planning.routing import Candidate, Ledger, Router, round_robin
from octavo.planning.subject import Subject
from octavo.request import Request, SamplingParams
from octavo.request import Sequence as Tokens

Progress = Callable[[int, int], None]


class Replica:
    """One machine of a fleet: an engine on a clock of its own."""

    def __init__(
        self, predictor: StepPredictor, vocab_size: int, found: Capacity, config: EngineConfig
    ) -> None:
        self.clock = VirtualClock()
        self.record = Record()
        self.ledger = Ledger()
        self.engine = _engine(self, predictor, vocab_size, found, config)

    def add(self, turn: Turn, prompt: list[int], request_id: str, arrival: float) -> None:
        """Queue a request; one longer than the context or the pool counts as refused."""
        if not self.engine.has_unfinished:
            self.clock.advance_to(arrival)
        params = SamplingParams(
            max_tokens=turn.num_output_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        try:
            self.engine.add(
                {"prompt_token_ids": prompt}, params, request_id=request_id, is_quiet=True
            )
        except BadRequestError:
            self.record.num_refused += 1
        else:
            self.record.arrivals[request_id] = arrival
            self.ledger.send(len(prompt) + turn.num_output_tokens)

    def step(self) -> None:
        """Run one step."""
        engine, clock, record = self.engine, self.clock, self.record
        scheduler, started = engine.scheduler, clock.now
        num_drawn = scheduler.counters.num_generated_tokens
        deltas = engine.step()
        num_drawn = scheduler.counters.num_generated_tokens - num_drawn
        record.note_step(started, clock.now, num_drawn)
        for delta in deltas:
            done = record.note_end(delta)
            self.ledger.end(done.last_token, delta.num_prompt_tokens + done.num_tokens)
        record.most_running = max(record.most_running, len(scheduler.running))
        record.most_waiting = max(record.most_waiting, len(scheduler.waiting))

    def build(self, plan: StepPlan, mask_of: MaskOf) -> Batch:
        """Return a plan's lengths, and keep of it what the times of tokens need."""
        self.record.note_plan(plan)
        return build_lengths(plan, mask_of)

    def found(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt the cache holds now."""
        request = Request(request_id="", prompt_token_ids=prompt, params=_ANY, max_tokens=1, seed=0)
        return self.engine.scheduler.blocks.match(Tokens(request, 0, (0, 0, 0))).num_tokens

    def candidate(self, now: float) -> Candidate:
        """Return what a router knows of this machine."""
        self.ledger.settle(now)
        return Candidate(self.ledger.outstanding, self.found)


_ANY = SamplingParams()


class Simulator:
    """One model on simulated machines of one kind. Raises like `capacity` if it does not fit."""

    def __init__(
        self,
        subject: Subject,
        machine: Machine,
        config: EngineConfig,
        *,
        num_machines: int = 1,
        router: Router = round_robin,
    ) -> None:
        prepared = prepared_for(subject, machine, config)
        # The pool is that of the machine, whatever one request needs.
        self.capacity: Capacity = capacity(prepared, machine, config, 2)
        vocab_size = subject.program.vocab_size
        # Each steers by its own predictor, which follows the steps that it measures.
        self.replicas = [
            Replica(StepPredictor(prepared, machine), vocab_size, self.capacity, config)
            for _ in range(num_machines)
        ]
        self._router = router

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
        order = sorted(sessions, key=_arrival)
        with _without_collector():
            self._serve(order, progress)
        if not any(replica.record.finished for replica in self.replicas):
            raise BadRequestError(
                f"None of the {len(order):,} requests fits: the longest may have "
                f"{self.capacity.longest_context:,} tokens. Plan with a larger machine or "
                "--kv-cache-memory-bytes, or leave long lines out with --trace-max-tokens."
            )
        return self._summary(self.replicas, limits or Limits())

    def each(self, limits: Limits | None = None) -> list[Simulation]:
        """Return what happened on each machine that has finished a request."""
        busy = [replica for replica in self.replicas if replica.record.finished]
        return [self._summary([replica], limits or Limits()) for replica in busy]

    def _serve(self, order: Sequence[Session], progress: Progress) -> None:
        """Let whoever is furthest behind make a step, once all who came before have arrived."""
        behind: list[tuple[float, int]] = []  # a heap of the machines that have work
        position, total = 0, len(order)
        while behind or position < total:
            if position < total and (not behind or _arrival(order[position]) <= behind[0][0]):
                chosen = self._send(order[position], position)
                replica = self.replicas[chosen]
                if all(index != chosen for _, index in behind) and replica.engine.has_unfinished:
                    heapq.heappush(behind, (replica.clock.now, chosen))
                position += 1
                progress(position, total)
                continue
            index = behind[0][1]
            replica = self.replicas[index]
            replica.step()
            if replica.engine.has_unfinished:
                heapq.heapreplace(behind, (replica.clock.now, index))
            else:
                heapq.heappop(behind)

    def _send(self, session: Session, number: int) -> int:
        """Add a request to the machine that the router chooses, and return which."""
        (turn,) = session.turns
        prompt, now = turn.tokens.tolist(), _arrival(session)
        candidates = [replica.candidate(now) for replica in self.replicas]
        chosen = self._router(number, prompt, candidates)
        self.replicas[chosen].add(turn, prompt, str(number), now)
        return chosen

    def _summary(self, replicas: Sequence[Replica], limits: Limits) -> Simulation:
        counters = [replica.engine.scheduler.counters for replica in replicas]
        seconds = max(replica.clock.now for replica in self.replicas)
        return summarize([replica.record for replica in replicas], counters, seconds, limits)


def _arrival(session: Session) -> float:
    return session.arrival or 0.0


@contextmanager
def _without_collector() -> Iterator[None]:
    """Nothing in a replay makes cycles, and looking for them takes a tenth of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _engine(
    replica: Replica,
    predictor: StepPredictor,
    vocab_size: int,
    found: Capacity,
    config: EngineConfig,
) -> Engine:
    executor = SimulatedExecutor(
        predictor.times, replica.clock, num_blocks=found.num_blocks, block_size=found.block_size
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
        vocab_size=vocab_size,
        max_model_len=found.longest_context,
        max_pool_tokens=found.num_blocks * found.block_size,
        seed=config.seed,
    )
    return Engine(
        executor=executor,
        scheduler=scheduler,
        intake=intake,
        decoder=None,
        clock=replica.clock,
        build=replica.build,
    )
