"""Traces driven through the real `core/` in virtual time, and what is read from each step.

Nothing is computed: every drawn token is the same, and a sequence ends at the length of its trace.
Every step takes `STEP_SECONDS`.
"""

import csv
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice, repeat
from pathlib import Path
from types import SimpleNamespace

from octavo.core.blocks import NO_MATCH, BlockCopy, BlockManager, PrefixMatch
from octavo.core.lookup import CacheLookup
from octavo.core.scheduler import Scheduler
from octavo.request import Request, SamplingParams, Sequence

STEP_SECONDS = 0.02
TRACE_BLOCK = 512  # tokens per hash id of the Mooncake trace
ANY_TOKEN = 2**32 - 1
BACKLOG = 64  # more waiting requests than the scheduler ever looks at
_GREEDY = SamplingParams(max_tokens=None)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: seconds from its start, tokens, and hash ids of shared blocks."""

    time: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()

    def request(self) -> Request:
        """Build the request; a hash id becomes as many distinct tokens as it stands for."""
        prompt = [0] * self.num_prompt_tokens
        if self.hash_ids:
            prompt = [
                token_id
                for hash_id in self.hash_ids
                for token_id in range(hash_id * TRACE_BLOCK, (hash_id + 1) * TRACE_BLOCK)
            ][: self.num_prompt_tokens]
        return Request(
            request_id="",
            prompt_token_ids=prompt,
            params=_GREEDY,
            max_tokens=self.num_output_tokens,
            seed=0,
        )


def read_azure(path: Path) -> list[Arrival]:
    """Read an Azure LLM inference trace: arrivals, prompt and output lengths."""
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        Arrival(
            (at - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"])
        )
        for at, row in zip(times, rows, strict=True)
    ]


def read_mooncake(path: Path) -> list[Arrival]:
    """Read a Mooncake trace, whose requests name their prompt's blocks of 512 tokens."""
    with path.open() as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Arrival(
            row["timestamp"] / 1000,
            row["input_length"],
            row["output_length"],
            tuple(row["hash_ids"]),
        )
        for row in rows
    ]


def endless_share(arrivals: Iterable[Arrival]) -> float:
    """Return the share of prompt tokens that a cache without end would serve, at once."""
    seen: set[int] = set()
    num_served = num_tokens = 0
    for arrival in arrivals:
        known = 0
        while known < len(arrival.hash_ids) and arrival.hash_ids[known] in seen:
            known += 1
        # The last token is always computed, since somebody must draw from it.
        num_served += min(known * TRACE_BLOCK, arrival.num_prompt_tokens - 1)
        num_tokens += arrival.num_prompt_tokens
        seen.update(arrival.hash_ids)
    return num_served / num_tokens


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
    scheduler: Scheduler, arrivals: Iterable[Arrival], *, as_backlog: bool, measure: bool = True
) -> Usage:
    """Serve a trace to its end, by its own clock or with everyone waiting from the start.

    measure: count empty slots, which needs that no two sequences share a block.
    """
    usage, memory = Usage(), scheduler.blocks
    source = iter(arrivals)
    following = next(source, None)
    num_held, now = 0, 0.0
    while following is not None or len(scheduler):
        if not len(scheduler) and not as_backlog and following is not None:
            now = max(now, following.time)
        while following is not None and (
            len(scheduler.waiting) < BACKLOG if as_backlog else following.time <= now
        ):
            scheduler.add(following.request())
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


def decode_times(num_seqs: int, *, num_repetitions: int, block_size: int = 32) -> Iterator[float]:
    """Yield CPU seconds per sequence and step of `schedule` and `commit` in steady decode.

    Lengths are staggered, so that in every step the same share of sequences fills a block.
    """
    num_steps = max(block_size, 4096 // num_seqs)
    max_tokens = num_steps * (num_repetitions + 1) + 2
    length = 512 + block_size + max_tokens
    blocks = BlockManager(num_seqs * -(-length // block_size), block_size)
    scheduler = Scheduler(blocks, max_num_batched_tokens=2**30, max_num_seqs=num_seqs)
    for i in range(num_seqs):
        prompt = [i] * (512 + i % block_size)
        request = Request(
            request_id=str(i),
            prompt_token_ids=prompt,
            params=_GREEDY,
            max_tokens=max_tokens,
            seed=0,
        )
        scheduler.add(request)
    while scheduler.waiting or any(s.num_output_tokens == 0 for s in scheduler.running):
        scheduler.commit(scheduler.schedule(), repeat(0))
    for _ in range(num_repetitions):
        start = time.process_time()
        for _ in range(num_steps):
            scheduler.commit(scheduler.schedule(), repeat(0))
        yield (time.process_time() - start) / (num_steps * num_seqs)
        assert len(scheduler.running) == num_seqs, "a sequence ended in the measured window"


def first(arrivals: list[Arrival], count: int | None) -> list[Arrival]:
    """Return the trace's first `count` arrivals, or all."""
    return list(islice(arrivals, count))
