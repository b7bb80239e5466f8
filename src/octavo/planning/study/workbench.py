"""Where experiments run: one executor with a model, engines over it, a clock, and prompts.

Decides how an engine is driven: who is added when. Leaves steps to the engine. Each experiment gets
an engine with a scheduler and blocks of its own, so that weights are loaded once.

Invariant: one engine at a time uses the executor, and begins with an empty cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from octavo.core.blocks import BlockManager
from octavo.core.scheduler import Scheduler
from octavo.engine.engine import Engine
from octavo.engine.outputs import OutputDelta
from octavo.executors.executor import Executor
from octavo.planning.throughput import Load
from octavo.request import RequestMetrics, SamplingParams

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Workbench:
    """A started engine, which itself serves nothing. clock: seconds, that of its engine."""

    base: Engine
    clock: Clock

    @property
    def executor(self) -> Executor:
        """What computes the steps of every engine."""
        return self.base.executor

    @property
    def max_tokens(self) -> int:
        """Most tokens of one sequence."""
        return self.base.intake.max_model_len

    def engine(
        self,
        *,
        enable_prefix_caching: bool = False,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
    ) -> Engine:
        """Return an engine over the same executor; None is as the base has it."""
        executor, scheduler = self.executor, self.base.scheduler
        blocks = BlockManager(
            executor.num_blocks,
            executor.block_size,
            fingerprint=executor.fingerprint,
            enable_prefix_caching=enable_prefix_caching,
        )
        return Engine(
            executor=executor,
            scheduler=Scheduler(
                blocks,
                max_num_batched_tokens=max_num_batched_tokens or scheduler.max_num_batched_tokens,
                max_num_seqs=max_num_seqs or scheduler.max_num_seqs,
            ),
            intake=self.base.intake,
            decoder=self.base.decoder,
            clock=self.clock,
        )


@dataclass(frozen=True, slots=True)
class Job:
    """One request of an experiment, answered greedily and to its full length."""

    prompt: list[int]
    num_output: int

    @property
    def params(self) -> SamplingParams:
        """How it is answered."""
        return SamplingParams(
            temperature=0.0, max_tokens=self.num_output, ignore_eos=True, detokenize=False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token. now: seconds on the engine's clock, at the end of its step."""

    request_id: str
    token_id: int
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of some jobs. busy: pairs of time and requests in flight, one per step.

    most_blocks: most blocks of the pool in use after a step.
    """

    metrics: list[RequestMetrics]
    tokens: list[Token]
    busy: list[tuple[float, int]]
    most_blocks: int


def prompts(
    engine: Engine, count: int, length: int, seed: object, shared: int = 0
) -> list[list[int]]:
    """Return prompts of random ids, of which the first `shared` are the same in all."""
    load = Load(streams=1, prompt_tokens=length, output_tokens=1, shared_prefix=shared)
    return load.prompts(count, engine.intake.vocab_size, seed)[1]


def warm_up(engine: Engine, num_prompt: int) -> None:
    """Touch weights and pages once, and let nobody find what that computed."""
    (prompt,) = prompts(engine, 1, num_prompt, "warm-up")
    serve(engine, [Job(prompt, 4)], lambda: 0.0)
    engine.reset_prefix_cache()


def serve(
    engine: Engine,
    jobs: Sequence[Job],
    clock: Clock,
    *,
    seats: int | None = None,
    is_static: bool = False,
) -> Served:
    """Answer every job and return what happened; raises what a request fails with.

    seats: requests in flight, all by default. is_static: start the next requests only when all in
    flight have ended, as a static batch does.
    """
    waiting, in_flight = iter(jobs), 0
    served = _Record()
    room = seats or len(jobs)

    def fill() -> int:
        return sum(add(engine, job) for job in islice(waiting, room - in_flight))

    in_flight += fill()
    while in_flight:
        begun = clock()
        deltas = engine.step()
        served.note(deltas, begun, clock(), in_flight, engine.stats().num_used_blocks)
        in_flight -= sum(delta.is_last for delta in deltas)
        if not (is_static and in_flight):
            in_flight += fill()
    return served.result()


def add(engine: Engine, job: Job) -> bool:
    """Queue a job; it counts as one."""
    engine.add({"prompt_token_ids": job.prompt}, job.params)
    return True


class _Record:
    def __init__(self) -> None:
        self._metrics: dict[str, RequestMetrics] = {}
        self._tokens: list[Token] = []
        self._busy: list[tuple[float, int]] = []
        self._most_blocks = 0

    def note(
        self, deltas: list[OutputDelta], begun: float, now: float, in_flight: int, blocks: int
    ) -> None:
        self._busy.append((begun, in_flight))
        self._most_blocks = max(self._most_blocks, blocks)
        for delta in deltas:
            if delta.error is not None:
                raise delta.error
            assert delta.metrics is not None
            self._metrics[delta.request_id] = delta.metrics
            self._tokens += [
                Token(request_id=delta.request_id, token_id=token, now=now)
                for token in delta.token_ids
            ]

    def result(self) -> Served:
        return Served(
            metrics=list(self._metrics.values()),
            tokens=self._tokens,
            busy=self._busy,
            most_blocks=self._most_blocks,
        )
