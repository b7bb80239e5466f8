"""Who advances in the next step, by how many tokens, and who yields.

There is no prefill phase and no decode phase: every sequence lets `num_computed` catch up with its
tokens. Running sequences that lack one token come first, so that no long prompt stops a stream; the
rest of the token budget goes to prompts, in order. Knows no text, and of cost only what `steering`
does.

Invariant: a running sequence holds or has reserved the blocks for every token it had when it was
admitted, so only newly generated tokens can make another sequence yield.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal

from octavo.core.blocks import BlockCopy, BlockManager
from octavo.core.lookup import CacheLookup
from octavo.core.steering import Room, StepCost
from octavo.errors import InvalidParameterError, PoolTooSmallError
from octavo.request import FinishReason, Request, Sequence, SequenceStatus

# How many waiting sequences are tried when the first does not fit, and how many may pass it.
LOOK_AHEAD = 8
MAX_PASSES = 64
# A sequence preempted so often is admitted next with all blocks that it can ever need.
MAX_PREEMPTIONS = 3

_by_order = attrgetter("order")


@dataclass(slots=True)  # frozen, it would take four times as long to make, for every token
class Chunk:
    """Compute the tokens [start, start + length) of `sequence`, then draw `num_samples` tokens.

    Nobody changes one.
    """

    sequence: Sequence
    start: int
    length: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `copies` run first, in order. The chunks use `num_tokens` of `budget`.

    budget: most tokens that the step could take, by count or by time; with the same sequences,
    `schedule(budget=...)` makes the same plan again, whatever steps cost then.
    lookups: what the prefix cache had of each of `admitted`, in their order.
    """

    chunks: list[Chunk]
    copies: list[BlockCopy]
    num_tokens: int
    budget: int
    admitted: list[Sequence]
    preempted: list[Sequence]
    lookups: list[CacheLookup] = field(default_factory=list)

    def without(self, request_ids: Set[str]) -> "StepPlan":
        """Return the plan without the chunks of some requests, which have been finished."""
        kept = [c for c in self.chunks if c.sequence.request.request_id not in request_ids]
        return replace(self, chunks=kept)


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start, in tokens or events. num_finished_tokens: those of answers that ran
    to their end.
    """

    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_queried_tokens: int = 0
    num_reused_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_forks: int = 0
    num_finished: int = 0
    num_finished_tokens: int = 0


class Scheduler:
    """Owns every sequence from `add` until it finishes.

    max_num_batched_tokens: tokens per step, at least max_num_seqs. max_num_seqs: sequences that run
    at once. max_chunk_tokens: longest chunk of one sequence in a step; None is the whole budget.
    policy: "fcfs", or "priority": lower `Request.priority` first, then by arrival. target_itl:
    seconds that a step may take while sequences generate, as `cost` predicts; None is any time.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        max_chunk_tokens: int | None = None,
        policy: Literal["fcfs", "priority"] = "fcfs",
        cost: StepCost | None = None,
        target_itl: float | None = None,
    ) -> None:
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_chunk_tokens = max_chunk_tokens or max_num_batched_tokens
        self.policy = policy
        self.cost = cost
        self.target_itl = target_itl
        self.running: list[Sequence] = []  # both lists are sorted by `order`
        self.waiting: list[Sequence] = []
        self.counters = SchedulerCounters()
        self._num_arrived = 0
        self._num_seats = 0  # running sequences, and the forks that they will become
        self._num_openings = 0  # times that somebody left, or finished a prompt others may share

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def num_free_seats(self) -> int:
        """Sequences that may begin before another has finished; 0 while one waits for blocks."""
        if any(s.why_waiting == "blocks" for s in self.waiting[:LOOK_AHEAD]):
            return 0
        return self.max_num_seqs - self._num_seats

    # --- entering and leaving -------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        """Raise unless the request, alone on the machine, is certain to finish.

        PoolTooSmallError: one of its sequences can outgrow the pool. InvalidParameterError: it asks
        for more sequences than may run.
        """
        if request.params.n > self.max_num_seqs:
            allowed = f"at most max_num_seqs, which is {self.max_num_seqs}"
            raise InvalidParameterError("n", request.params.n, allowed)
        # The last token of a sequence is never computed, so it needs no slot.
        needed = self.blocks.blocks_for(request.max_length - 1)
        num_blocks = self.blocks.pool.num_blocks
        if needed > num_blocks:
            raise PoolTooSmallError(
                f"The request cannot fit: {len(request.prompt_token_ids):,} prompt tokens and "
                f"{request.max_tokens:,} to generate need {needed:,} blocks, the pool has "
                f"{num_blocks:,}. Lower max_tokens, shorten the prompt, or start octavo with more "
                "memory for the KV cache."
            )

    def add(self, request: Request) -> Sequence:
        """Queue a request and return its first sequence; raises like `check_fits`."""
        self.check_fits(request)
        priority = request.priority if self.policy == "priority" else 0
        sequence = Sequence(request, 0, (priority, self._num_arrived, 0))
        self._num_arrived += 1
        insort(self.waiting, sequence, key=_by_order)
        return sequence

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence wherever it stands and free its blocks. Does nothing if it has ended.

        Between `schedule` and `commit` only for requests that the committed plan is `without`. With
        `ERROR` the last step's writes are in doubt, so only what was published before it stays
        findable.
        """
        if sequence.status is SequenceStatus.FINISHED:
            return
        self._num_openings += 1
        if reason not in (FinishReason.ABORT, FinishReason.ERROR):
            self._count_finished(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._num_seats -= sequence.num_samples
            self.blocks.free(sequence, publish=reason is not FinishReason.ERROR)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    # --- planning a step ------------------------------------------------------------------------

    def schedule(self, held: Set[Sequence] = frozenset(), *, budget: int | None = None) -> StepPlan:
        """Plan the next step. Unless nothing is left to do, the plan has at least one chunk.

        held: sequences that keep their place and their blocks but get no tokens in this step.
        budget: of a recorded plan, which is to be made again; then no time limits the step.
        """
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        prefilling = self._schedule_decodes(chunks, preempted, held)
        num_decodes = len(chunks)
        most = self.max_num_batched_tokens if budget is None else budget
        # Only prompts take room, and only streams make its time matter.
        has_prompts, has_streams = prefilling or self.waiting, len(self.running) > len(prefilling)
        is_timed = bool(budget is None and has_prompts and has_streams)
        room = self.room(
            ((c.start, c.length) for c in chunks), most - num_decodes, is_timed=is_timed
        )
        for sequence in prefilling:
            self._schedule_prefill(sequence, room, chunks)
        admitted: list[Sequence] = []
        if self.waiting and room.num_left > 0 and not preempted:
            for sequence in self._admit(held):
                admitted.append(sequence)
                self._schedule_prefill(sequence, room, chunks)
                if room.num_left <= 0:
                    break
        num_tokens = num_decodes + room.num_granted
        return StepPlan(
            chunks,
            self.blocks.drain_copies(),
            num_tokens,
            num_tokens if room.is_time_up else most,
            admitted,
            preempted,
            self.blocks.drain_lookups(),
        )

    def room(self, decodes: Iterable[tuple[int, int]], budget: int, *, is_timed: bool) -> Room:
        """Return what prompts may take of a step beside `decodes`, each (first position, tokens).

        is_timed: whether the target counts, since somebody generates.
        """
        if self.cost is None or self.target_itl is None or not is_timed:
            return Room(budget)
        spans = list(decodes)
        return Room(budget, self.cost.price(spans, len(spans)), self.target_itl)

    def _schedule_decodes(
        self, chunks: list[Chunk], preempted: list[Sequence], held: Set[Sequence]
    ) -> list[Sequence]:
        """Give one token to each running sequence that lacks one; return those that lack more."""
        prefilling: list[Sequence] = []
        add_chunk = chunks.append
        for sequence in tuple(self.running):  # those who yield leave it
            computed = sequence.num_computed
            if (held and sequence in held) or (preempted and sequence in preempted):
                continue
            if len(sequence.token_ids) - computed > 1:
                prefilling.append(sequence)
            elif computed < sequence.capacity or self._grow_or_preempt(sequence, preempted):
                add_chunk(Chunk(sequence, computed, 1, sequence.num_samples))
        return prefilling

    def _schedule_prefill(self, sequence: Sequence, room: Room, chunks: list[Chunk]) -> None:
        """Plan the next chunk of a prompt (or of a resumed sequence), if there is room."""
        computed = sequence.num_computed
        pending = len(sequence.token_ids) - computed
        length = room.take(computed, min(pending, self.max_chunk_tokens), pending)
        if length <= 0:
            return
        grown = self.blocks.grow(sequence, computed + length)
        assert grown, f"{sequence} had reserved its blocks"
        num_samples = sequence.num_samples if length == pending else 0
        chunks.append(Chunk(sequence, computed, length, num_samples))

    def _grow_or_preempt(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Make room for one token of `sequence`; whoever comes last in order yields for it.

        Returns False if that is `sequence` itself.
        """
        while not self.blocks.grow(sequence, sequence.num_computed + 1):
            victim = next(s for s in reversed(self.running) if not s.is_protected)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._num_seats -= sequence.num_samples
        self._num_openings += 1
        self.counters.num_preemptions += 1
        sequence.num_lost = sequence.num_computed
        self.blocks.free(sequence)
        sequence.num_preemptions += 1
        sequence.is_protected = sequence.num_preemptions >= MAX_PREEMPTIONS
        sequence.status = SequenceStatus.WAITING
        sequence.why_waiting = "preempted"
        insort(self.waiting, sequence, key=_by_order)

    def _admit(self, held: Set[Sequence]) -> Iterator[Sequence]:
        """Move waiting sequences that fit to `running`, in order, and yield each.

        Small ones may pass the first that does not fit, but only `MAX_PASSES` times.
        """
        blocked: Sequence | None = None
        position = 0
        while position < min(len(self.waiting), LOOK_AHEAD):
            sequence = self.waiting[position]
            if sequence in held:
                position += 1
                continue
            obstacle = self._try_admit(sequence)
            if obstacle is None:
                del self.waiting[position]
                if blocked is not None:
                    blocked.num_passed += 1
                yield sequence
            else:
                sequence.why_waiting = obstacle
                blocked = blocked or sequence
                position += 1
            if blocked is not None and blocked.num_passed >= MAX_PASSES:
                return

    def _try_admit(self, sequence: Sequence) -> str | None:
        """Start a waiting sequence, or return what it waits for."""
        if sequence.num_openings_seen == self._num_openings:
            return sequence.why_waiting  # nothing has changed to its good since the last try
        sequence.num_openings_seen = self._num_openings
        if self._num_seats + sequence.num_samples > self.max_num_seqs:
            return "max_num_seqs"
        match = self.blocks.match(sequence)
        is_protected = sequence.is_protected
        length = sequence.request.max_length - 1 if is_protected else len(sequence.token_ids)
        # One block for each that runs, so that a newcomer does not soon make another yield.
        if not self.blocks.admit(sequence, match, length, headroom=len(self.running)):
            return "blocks"
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = match.num_tokens
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
            if self.blocks.searches(sequence.request):
                self.counters.num_queried_tokens += sequence.num_prompt_tokens
            self.counters.num_reused_tokens += match.num_tokens
        else:
            num_recomputed = max(0, sequence.num_lost - match.num_tokens)
            self.counters.num_recomputed_tokens += num_recomputed
        sequence.status = SequenceStatus.RUNNING
        self._num_seats += sequence.num_samples
        insort(self.running, sequence, key=_by_order)
        return None

    # --- after a step ---------------------------------------------------------------------------

    def commit(self, plan: StepPlan, token_ids: Iterable[int]) -> list[Sequence]:
        """Record that `plan` was computed and drew `token_ids`, `num_samples` per chunk in order.

        Returns the sequences that the tokens went to, parallel to `token_ids`; forks are new ones.
        """
        drawn = iter(token_ids)
        advanced: list[Sequence] = []
        finished: list[Sequence] = []
        size = self.blocks.block_size
        for chunk in plan.chunks:
            sequence, start, length = chunk.sequence, chunk.start, chunk.length
            num_samples = chunk.num_samples
            sequence.num_computed = computed = start + length
            if start % size + length >= size:
                self.blocks.publish(sequence, start // size, computed // size)
            if length > 1:
                self._num_openings += num_samples > 0
            if num_samples == 1:
                advanced.append(sequence)
                if sequence.append(next(drawn)) is not None:
                    finished.append(sequence)
            elif num_samples:
                takers = self._fork(sequence, num_samples)
                advanced += takers
                finished += [taker for taker in takers if taker.append(next(drawn)) is not None]
        self._retire(finished)
        self.counters.num_computed_tokens += plan.num_tokens
        self.counters.num_generated_tokens += len(advanced)
        return advanced

    def _fork(self, sequence: Sequence, num_samples: int) -> list[Sequence]:
        """Split a sequence whose prompt is computed into its samples, which share its blocks."""
        family = [sequence]
        for index in range(1, num_samples):
            child = Sequence(sequence.request, index, (*sequence.order[:2], index))
            self.blocks.fork(sequence, child)
            child.num_samples = 1
            child.num_cached_tokens = sequence.num_cached_tokens
            child.status = SequenceStatus.RUNNING
            insort(self.running, child, key=_by_order)
            family.append(child)
        sequence.num_samples = 1
        self.counters.num_forks += num_samples - 1
        return family

    def _retire(self, finished: list[Sequence]) -> None:
        if not finished:
            return
        self._num_openings += len(finished)
        for sequence in finished:
            self._count_finished(sequence)
            sequence.status = SequenceStatus.FINISHED
            self._num_seats -= sequence.num_samples
            self.blocks.free(sequence)
        self.running = [s for s in self.running if s.status is SequenceStatus.RUNNING]

    def _count_finished(self, sequence: Sequence) -> None:
        self.counters.num_finished += 1
        self.counters.num_finished_tokens += sequence.num_output_tokens

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold; for tests and for idle engines."""
        self.blocks.check(self.running)
        for queue, status in (
            (self.running, SequenceStatus.RUNNING),
            (self.waiting, SequenceStatus.WAITING),
        ):
            assert all(s.status is status for s in queue), "a sequence stands in the wrong queue"
            assert queue == sorted(queue, key=_by_order), "a queue is out of order"
        assert self._num_seats == sum(s.num_samples for s in self.running), "seats differ"
        assert self._num_seats <= self.max_num_seqs, "more sequences run than may"
