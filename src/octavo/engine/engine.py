"""The synchronous heart: add, abort, step.

Decides when a step runs and what each request hears of it. Owns the scheduler, the executor and the
text of every active sequence; leaves order to the scheduler and arithmetic to the executor.

Invariant: every added request gets exactly one last delta, whether it finished, was aborted or
failed, and from then on holds no block.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import compress

from octavo.core.scheduler import Scheduler, StepPlan
from octavo.cost.predictor import StepPredictor, StepPrice
from octavo.engine.constraints import Constraints
from octavo.engine.grammar import GrammarCompiler
from octavo.engine.intake import Intake, Prompt
from octavo.engine.lives import Life, LifeRecorder
from octavo.engine.outlook import look_ahead
from octavo.engine.outputs import OutputDelta, PromptLogprobs, PromptProgress, to_logprobs
from octavo.engine.pooling import StatePool
from octavo.engine.stats import EngineStats, take_snapshot
from octavo.engine.text import OutputText, TokenBytes, token_display
from octavo.errors import BadRequestError, InvalidParameterError, OctavoError
from octavo.executors.batch import MaskOf, build_batch
from octavo.executors.executor import Batch, Executor, StepResult, TokenLogprobs
from octavo.request import (
    FinishReason,
    Logprob,
    Pooling,
    Request,
    RequestMetrics,
    SamplingParams,
    Sequence,
)

Clock = Callable[[], float]
Announce = Callable[[float], None]
# Seconds that a step with nothing to compute waits for a grammar or a mask.
_IDLE_WAIT = 0.02


@dataclass(slots=True)
class _ActiveRequest:
    """What the engine keeps of a request until its last delta.

    sequences: by index; none before its grammar is compiled, if it has one. is_quiet: nothing is
    heard of a token that is not a sequence's last.
    """

    request: Request
    metrics: RequestMetrics
    texts: dict[int, OutputText] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    prompt_logprobs: PromptLogprobs | None = None
    pool: StatePool | None = None
    num_finished: int = 0
    is_quiet: bool = False


class Engine:
    """Runs requests in continuous batches over one executor.

    clock: seconds on the engine's time line; the only source of time. A virtual clock makes the
    same engine a simulator. compiler: of grammars; without it, structured outputs are refused.
    build: makes a plan's arrays, for the executor. predictor: prices each step and learns from it.
    lives: watches what happens; by default it keeps totals alone.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        scheduler: Scheduler,
        intake: Intake,
        decoder: TokenBytes | None,
        clock: Clock,
        compiler: GrammarCompiler | None = None,
        build: Callable[[StepPlan, MaskOf], Batch] = build_batch,
        predictor: StepPredictor | None = None,
        lives: LifeRecorder | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.intake = intake
        self.decoder = decoder
        self._clock = clock
        self._build = build
        self.predictor = predictor
        self.lives = lives or LifeRecorder(0)
        self._constraints = Constraints(compiler)
        self._active: dict[str, _ActiveRequest] = {}
        self._num_added = 0
        self._num_steps = 0
        self._last_step_time = 0.0
        self._pending: list[OutputDelta] = []
        self._is_closed = False

    # --- requests -------------------------------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        pooling: Pooling | None = None,
        is_quiet: bool = False,
    ) -> Request:
        """Queue a prompt, whose deltas `step` returns; a `BadRequestError` queues nothing.

        is_quiet: one delta at the end of each sequence has all its tokens; only for requests
        without text, log-probabilities or grammar.
        """
        if self._is_closed:
            raise OctavoError("The engine is closed. Start another one.")
        if request_id is None:
            request_id = str(self._num_added)
        if request_id in self._active:
            raise InvalidParameterError("request_id", request_id, "one that is not in use")
        now = self._clock()
        request = self.intake.build(
            prompt,
            params,
            request_id=request_id,
            number=self._num_added,
            arrival_time=now,
            priority=priority,
            pooling=pooling,
        )
        self.scheduler.check_fits(request)
        active = _ActiveRequest(request, RequestMetrics(arrival_time=now))
        active.is_quiet = is_quiet and _check_quiet(request)
        compiles = self._constraints.compile(request)
        self._num_added += 1
        if pooling is not None:
            active.pool = StatePool()
        if params.prompt_logprobs is not None:
            active.prompt_logprobs = [None] * len(request.prompt_token_ids)
        self._active[request_id] = active
        self.lives.begin(request, active.sequences, compiles=compiles)
        if not compiles:
            active.sequences[0] = self.scheduler.add(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks; its last delta comes with the next `step`.

        An unknown or finished id is ignored, since an abort and the last token may cross.
        """
        active = self._active.get(request_id)
        if active is not None:
            self._end(active, FinishReason.ABORT)

    @property
    def has_unfinished(self) -> bool:
        """Whether another `step` would bring anything."""
        return bool(self._active or self._pending)

    def reset_prefix_cache(self) -> None:
        """Let no later request find a block that was computed so far."""
        self.scheduler.blocks.forget()

    def life_of(self, request_id: str) -> Life | None:
        """Return what happened to a request, so far if it goes on; None if nothing is kept."""
        return self.lives.life_of(request_id, self._clock())

    def prompt_progress(self) -> list[PromptProgress]:
        """Return how far the running requests have come whose prompts are not computed yet."""
        return [
            PromptProgress(s.request.request_id, s.num_computed, s.num_cached_tokens or 0)
            for s in self.scheduler.running
            if s.num_computed < len(s.request.prompt_token_ids)
        ]

    # --- the step -------------------------------------------------------------------------------

    def step(self, announce: Announce = lambda seconds: None) -> list[OutputDelta]:
        """Run one step and return what it added, in no promised order between requests.

        announce: told before the step is computed how long it will take, where that is predicted.
        Without anything to compute it waits a moment for a grammar, if one is being worked at.
        """
        self.scheduler.blocks.now = begun = self._clock()
        self._settle_grammars()
        held = self._constraints.held
        plan = self.scheduler.schedule(held)
        start = self._clock()
        self.lives.planned(plan, self.scheduler.waiting, start)
        if plan.chunks:
            price = self._run(plan, held, start, announce)
            if price is not None:  # it is of all that a step takes, not of the executor alone
                price.predictor.observe(price, self._clock() - begun)
        elif held or self._constraints.num_compiling:
            self._constraints.wait(_IDLE_WAIT)
            self.lives.waited(self._clock() - start)
        deltas, self._pending = self._pending, []
        return deltas

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine between two steps."""
        return take_snapshot(
            self.scheduler,
            num_compiling=self._constraints.num_compiling,
            step=self._num_steps,
            step_time=self._last_step_time,
            outlook=None if self.predictor is None else look_ahead(self.scheduler, self.predictor),
            last_step=self.lives.last,
            all_steps=self.lives.total,
        )

    def close(self) -> None:
        """Abort what runs and release the executor; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for active in list(self._active.values()):
            self._end(active, FinishReason.ABORT)
        self._constraints.close()
        self.executor.close()

    def _run(
        self, plan: StepPlan, held: Set[Sequence], start: float, announce: Announce
    ) -> StepPrice | None:
        """Compute a plan, and return its price where there is one.

        Whatever breaks it, each request in it hears so, and the others go on.
        """
        try:
            self._note_first_scheduled(plan, start)
            batch = self._build(plan, self._constraints.mask_of)
            price = self._price(plan, batch)
            if price is not None:
                announce(price.seconds)
            result = self.executor.submit(batch).result()
        except Exception as error:
            self._fail(plan, error)
            return None
        except BaseException:  # an interrupt: the plan's block copies may not have happened
            self._fail(plan, OctavoError("The step was interrupted."))
            raise
        now = self._clock()
        self.lives.stepped(plan, held, now - start, price, result.duration, now)
        self.scheduler.blocks.now = now
        self._commit(plan, batch, result, now)
        return price

    def _price(self, plan: StepPlan, batch: Batch) -> StepPrice | None:
        if self.predictor is None:
            return None
        return self.predictor.price(
            [(chunk.start, chunk.length) for chunk in plan.chunks], len(batch.logit_rows)
        )

    def _note_first_scheduled(self, plan: StepPlan, now: float) -> None:
        for sequence in plan.admitted:
            metrics = self._active[sequence.request.request_id].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now

    def _commit(self, plan: StepPlan, batch: Batch, result: StepResult, now: float) -> None:
        self._num_steps += 1
        self._last_step_time = result.duration
        if batch.prompt_rows:
            self._keep_prompt_logprobs(batch, result)
        if batch.state_spans:
            self._pool_states(batch, result)
        token_ids, logprobs = result.token_ids, result.logprobs
        if result.errors:
            # What a failed request computed is in doubt: it leaves before anything is published.
            for request_id, error in result.errors.items():
                self._end(self._active[request_id], FinishReason.ERROR, error)
            is_sound = [row.request.request_id not in result.errors for row in batch.samples]
            token_ids, logprobs = [*compress(token_ids, is_sound)], [*compress(logprobs, is_sound)]
            plan = plan.without(result.errors.keys())
        advanced = self.scheduler.commit(plan, token_ids)
        for sequence, token_id, found in zip(advanced, token_ids, logprobs, strict=True):
            active = self._active[sequence.request.request_id]
            active.sequences[sequence.index] = sequence
            if sequence.finish_reason is None:
                if active.is_quiet:
                    if active.metrics.first_token_time is None:
                        active.metrics.first_token_time = now
                    continue
                self._constraints.advance(sequence, token_id)
            self._emit_token(active, sequence, token_id, found, now)

    def _keep_prompt_logprobs(self, batch: Batch, result: StepResult) -> None:
        for row, found in zip(batch.prompt_rows, result.prompt_logprobs, strict=True):
            kept = self._active[row.request_id].prompt_logprobs
            if kept is not None and found is not None:
                kept[row.position] = to_logprobs(found, self._text_of())

    def _pool_states(self, batch: Batch, result: StepResult) -> None:
        first = 0
        for span in batch.state_spans:
            pool = self._active[span.request_id].pool
            assert pool is not None
            assert result.states is not None
            pool.add(span.position, result.states[first : first + span.length])
            first += span.length

    def _emit_token(
        self,
        active: _ActiveRequest,
        sequence: Sequence,
        token_id: int,
        logprobs: TokenLogprobs | None,
        now: float,
    ) -> None:
        is_first = active.metrics.first_token_time is None
        if is_first:
            active.metrics.first_token_time = now
        text, stop = self._advance_text(active, sequence, token_id)
        stop_reason: int | str | None = stop
        is_forced = False
        if stop is not None:
            self.scheduler.finish(sequence, FinishReason.STOP)
            sequence.finish_reason = FinishReason.STOP
        elif sequence.finish_reason is not None:
            text += self._finish_text(active, sequence)
            stop_reason = self._stop_token(active.request.params, sequence)
            is_length = sequence.finish_reason is FinishReason.LENGTH
            is_forced = is_length and self._constraints.is_forced(sequence)
        is_shown = active.pool is None  # else it was drawn for nobody
        self._emit(
            active,
            sequence,
            text=text if is_shown else "",
            token_ids=[token_id] if is_shown else [],
            logprobs=None if logprobs is None else [to_logprobs(logprobs, self._text_of())],
            stop_reason=stop_reason,
            prompt_logprobs=active.prompt_logprobs if is_first else None,
            is_ending_forced=is_forced,
        )

    def _stop_token(self, params: SamplingParams, sequence: Sequence) -> int | None:
        """Return the stop token to report: the caller's own, as vLLM does, and not the model's."""
        asked = params.stop_token_ids or ()
        return sequence.stop_token if sequence.stop_token in asked else None

    # --- grammars -------------------------------------------------------------------------------

    def _settle_grammars(self) -> None:
        """Queue what has been compiled; end what cannot be, and what its grammar has completed."""
        if self._constraints.is_settled:
            return
        now = self._clock()
        for request, error in self._constraints.compiled(now):
            active = self._active[request.request_id]
            if error is not None:
                self._end(active, FinishReason.ERROR, as_exception(error))
                continue
            active.sequences[0] = self.scheduler.add(request)
            self._constraints.add(active.sequences[0])
            self.lives.compiled(request.request_id, now)
        for sequence, outcome in self._constraints.settle():
            active = self._active[sequence.request.request_id]
            if isinstance(outcome, BaseException):
                self._end(active, FinishReason.ERROR, as_exception(outcome))
            elif sequence.finish_reason is None:  # the other samples of a failed one have ended
                reason = FinishReason.LENGTH if outcome.is_forced else FinishReason.STOP
                self.scheduler.finish(sequence, reason)
                text = self._finish_text(active, sequence)
                self._emit(active, sequence, text=text, is_ending_forced=outcome.is_forced)

    # --- text -----------------------------------------------------------------------------------

    def _text_of(self) -> Callable[[int], str] | None:
        decoder = self.decoder
        return None if decoder is None else lambda token: token_display(decoder.token_bytes(token))

    def _advance_text(
        self, active: _ActiveRequest, sequence: Sequence, token_id: int
    ) -> tuple[str, str | None]:
        """Return the text that is certain after `token_id`, and the stop string it completed."""
        params = active.request.params
        if self.decoder is None or not params.detokenize:
            return "", None
        text = active.texts.get(sequence.index)
        if text is None:
            text = active.texts[sequence.index] = OutputText(self.decoder, params)
        if token_id == sequence.stop_token and not params.include_stop_str_in_output:
            return "", None
        return text.push([token_id])

    def _finish_text(self, active: _ActiveRequest, sequence: Sequence) -> str:
        text = active.texts.get(sequence.index)
        return text.finish() if text is not None else ""

    # --- endings --------------------------------------------------------------------------------

    def _emit(
        self,
        active: _ActiveRequest,
        sequence: Sequence,
        *,
        text: str = "",
        token_ids: list[int] | None = None,
        logprobs: list[dict[int, Logprob]] | None = None,
        stop_reason: int | str | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        error: Exception | None = None,
        is_ending_forced: bool = False,
    ) -> None:
        """Queue one delta; a sequence that has ended is forgotten with it."""
        request, reason = active.request, sequence.finish_reason
        is_last = reason is not None and self._note_end(active, sequence, reason)
        self._pending.append(
            OutputDelta(
                request_id=request.request_id,
                index=sequence.index,
                text=text,
                token_ids=sequence.output_token_ids if active.is_quiet else token_ids or [],
                logprobs=logprobs,
                finish_reason=None if reason is None else reason.value,
                stop_reason=stop_reason,
                is_last=is_last,
                prompt_logprobs=prompt_logprobs,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=sequence.num_cached_tokens or 0,
                metrics=active.metrics,
                error=error,
                is_ending_forced=is_ending_forced,
                pooled=active.pool.mean() if active.pool and is_last and not error else None,
            )
        )

    def _note_end(self, active: _ActiveRequest, sequence: Sequence, reason: FinishReason) -> bool:
        """Forget a sequence, and its request with the last of them; return whether it is."""
        request = active.request
        self._constraints.drop(sequence)
        active.num_finished += 1
        if active.num_finished < request.params.n:
            self.lives.sample_ended(request.request_id)
            return False
        now = active.metrics.finished_time = self._clock()
        self.lives.end(request.request_id, now, str(reason))
        active.metrics.num_preemptions = sum(s.num_preemptions for s in active.sequences.values())
        self._constraints.forget(request)
        del self._active[request.request_id]
        return True

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        for request_id in dict.fromkeys(c.sequence.request.request_id for c in plan.chunks):
            self._end(self._active[request_id], FinishReason.ERROR, error)

    def _end(
        self, active: _ActiveRequest, reason: FinishReason, error: Exception | None = None
    ) -> None:
        """Finish every sequence of a request that still runs; samples not yet forked end too."""
        first = active.sequences.get(0)
        for index in range(active.request.params.n):
            sequence = active.sequences.get(index)
            if sequence is None:
                sequence = Sequence(active.request, index, (0, 0, index))
                sequence.num_cached_tokens = None if first is None else first.num_cached_tokens
            elif sequence.finish_reason is not None:
                continue
            else:
                self.scheduler.finish(sequence, reason)
            sequence.finish_reason = reason
            self._emit(active, sequence, text=self._finish_text(active, sequence), error=error)


def _check_quiet(request: Request) -> bool:
    """Return True; raise where something is wanted of each token."""
    params = request.params
    wanted = (params.logprobs, params.prompt_logprobs, params.structured_outputs, request.pooling)
    if params.detokenize or any(value is not None for value in wanted):
        raise BadRequestError("A quiet request has no text, log-probabilities, grammar or state.")
    return True


def as_exception(error: BaseException) -> Exception:
    """Return what broke a request as something that can be handed on."""
    return error if isinstance(error, Exception) else OctavoError(f"It was broken off: {error}.")
