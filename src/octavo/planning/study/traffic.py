"""Traffic through the real scheduler in fixed steps, and what memory holds after each.

Decides which kinds of memory are compared: the real block manager, and contiguous buffers. Nothing
is computed: every drawn token is the same, and a sequence ends at the length it is known to have.

Invariant: slots in use are those of running sequences; what is empty of them is counted each step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat
from types import SimpleNamespace

from octavo.core.blocks import NO_MATCH, BlockCopy, BlockManager, PrefixMatch
from octavo.core.lookup import CacheLookup
from octavo.core.scheduler import Scheduler
from octavo.planning.load.traces import TRACE_BLOCK, TraceLine
from octavo.request import Request, SamplingParams, Sequence

STEP_SECONDS = 0.02
ANY_TOKEN = 2**32 - 1
# More waiting requests than the scheduler ever looks at.
BACKLOG = 64
_GREEDY = SamplingParams(max_tokens=None)


def request_of(line: TraceLine) -> Request:
    """Build a trace's request; a hash id becomes as many distinct tokens as it stands for."""
    prompt = [0] * line.num_prompt_tokens
    if line.block_hashes:
        prompt = [
            token_id
            for block in line.block_hashes
            for token_id in range(block * TRACE_BLOCK, (block + 1) * TRACE_BLOCK)
        ][: line.num_prompt_tokens]
    return Request(
        request_id="",
        prompt_token_ids=prompt,
        params=_GREEDY,
        max_tokens=line.num_output_tokens,
        seed=0,
    )


class PagedMemory(BlockManager):
    """The real block manager, which also says how many slots stand in tables."""

    @property
    def num_allocated_slots(self) -> int:
        """Token slots of all blocks in use."""
        return (self.pool.num_blocks - self.pool.num_free) * self.block_size


class ContiguousMemory:
    """One unbroken buffer per request, as before paging; ideal, for it never fragments.

    buffer: slots per request; None is exactly its final length, which nobody knows in advance.
    """

    block_size = 1

    def __init__(self, num_slots: int, buffer: int | None) -> None:
        self.pool = SimpleNamespace(num_blocks=num_slots)
        self.buffer = buffer
        self.num_allocated_slots = 0

    def _size(self, sequence: Sequence) -> int:
        return self.buffer or sequence.request.max_length

    def blocks_for(self, num_tokens: int) -> int:
        """A block is one slot."""
        return num_tokens

    def searches(self, request: Request) -> bool:
        """Whether anything could be found: buffers are not shared."""
        return False

    def match(self, sequence: Sequence) -> PrefixMatch:
        """Find nothing: buffers are not shared."""
        return NO_MATCH

    def admit(self, sequence: Sequence, match: PrefixMatch, length: int, headroom: int) -> bool:
        """Give `sequence` its whole buffer, or return False."""
        size = self._size(sequence)
        if self.num_allocated_slots + size > self.pool.num_blocks:
            return False
        self.num_allocated_slots += size
        sequence.capacity = size
        return True

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Do nothing: the buffer is as long as it can need to be."""
        return length <= sequence.capacity

    def free(self, sequence: Sequence, *, publish: bool = True) -> None:
        """Take the buffer back."""
        self.num_allocated_slots -= self._size(sequence)
        sequence.num_computed = sequence.capacity = 0

    def publish(self, sequence: Sequence, first: int, end: int) -> None:
        """Do nothing."""

    def drain_copies(self) -> list[BlockCopy]:
        """Return nothing: buffers are never copied."""
        return []

    def drain_lookups(self) -> list[CacheLookup]:
        """Return nothing: there is no cache."""
        return []


@dataclass(slots=True)
class Usage:
    """What was read after each step: slots in use, how many hold nothing, and who ran."""

    num_steps: int = 0
    num_empty: int = 0
    num_allocated: int = 0
    shares: list[float] = field(default_factory=list)
    num_running: int = 0
    num_backlog_steps: int = 0
    most_running: int = 0
    most_allocated: int = 0

    @property
    def mean_share(self) -> float:
        """Empty over allocated slots, both summed over time."""
        return self.num_empty / self.num_allocated

    def quantile(self, q: float) -> float:
        """Return the share of empty slots that a part `q` of the steps does not exceed."""
        return sorted(self.shares)[min(len(self.shares) - 1, int(q * len(self.shares)))]

    @property
    def mean_running(self) -> float:
        """Sequences that ran at once while others waited."""
        return self.num_running / self.num_backlog_steps if self.num_backlog_steps else 0.0


def run(
    scheduler: Scheduler, lines: Iterable[TraceLine], *, as_backlog: bool, measure: bool = True
) -> Usage:
    """Serve a trace to its end, by its own clock or with everyone waiting from the start.

    measure: count empty slots, which needs that no two sequences share a block.
    """
    usage, memory = Usage(), scheduler.blocks
    source = iter(lines)
    following = next(source, None)
    num_held, now = 0, 0.0
    while following is not None or len(scheduler):
        if not len(scheduler) and not as_backlog and following is not None:
            now = max(now, following.arrival)
        while following is not None and (
            len(scheduler.waiting) < BACKLOG if as_backlog else following.arrival <= now
        ):
            scheduler.add(request_of(following))
            following = next(source, None)
        plan = scheduler.schedule()
        num_held -= sum(sequence.num_lost for sequence in plan.preempted)
        advanced = scheduler.commit(plan, repeat(ANY_TOKEN))
        now += STEP_SECONDS
        usage.num_steps += 1
        if scheduler.waiting:
            usage.num_running += len(scheduler.running)
            usage.num_backlog_steps += 1
        usage.most_running = max(usage.most_running, len(scheduler.running))
        if measure:
            num_held += plan.num_tokens
            # The last token of a finished sequence was drawn, but never computed.
            num_held -= sum(len(s.token_ids) - 1 for s in advanced if s.finish_reason is not None)
            _note(usage, scheduler, memory.num_allocated_slots, num_held)  # type: ignore[attr-defined]
    return usage


def _note(usage: Usage, scheduler: Scheduler, num_allocated: int, num_held: int) -> None:
    if not num_allocated:
        return
    num_empty = num_allocated - num_held
    usage.num_empty += num_empty
    usage.num_allocated += num_allocated
    usage.most_allocated = max(usage.most_allocated, num_allocated)
    usage.shares.append(num_empty / num_allocated)
    if usage.num_steps % 4096 == 0 and isinstance(scheduler.blocks, BlockManager):
        counted = scheduler.blocks.num_empty_slots(scheduler.running)
        assert counted == num_empty, "the running sum of empty slots has drifted"
