"""A worker that computes nothing and knows everything: the oracle of `core/`.

A cache slot stores a hash of the tokens up to and including its position. So a chunk that may read
another sequence's past, a slot written twice, a block written while it stands in two tables, or
wrong content that can still be found, is an error at once, and not an odd token later. The drawn
tokens are a function of what the last slot holds: the answer of a request that ran in company must
be equal to `run_alone`.
"""

import random
import zlib
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from octavo.core.blocks import BlockManager
from octavo.core.scheduler import MAX_PREEMPTIONS, Chunk, Scheduler, StepPlan
from octavo.core.steering import MIN_CHUNK, MIN_SHARE
from octavo.request import FinishReason, Request, SamplingParams, Sequence

Spans = Ordered[tuple[int, int]]
VOCABULARY = 8
STOP_TOKEN = 7
POISON = -1
EVENTS = (
    "preempted",
    "forked",
    "adopted_full_blocks",
    "adopted_part_by_copy",
    "copied_on_write",
    "evicted",
    "aborted_waiting",
    "aborted_running",
    "passed",
    "protected",
    "shortened",
)


def make_request(
    prompt: Iterable[int],
    *,
    request_id: str = "0",
    n: int = 1,
    max_tokens: int = 1,
    seed: int = 0,
    priority: int = 0,
    salt: str | None = None,
    prompt_logprobs: int | None = None,
    stop_ids: Iterable[int] = (),
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams(n=n, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
        max_tokens=max_tokens,
        seed=seed,
        stop_ids=frozenset(stop_ids),
        priority=priority,
        extra_keys=() if salt is None else (salt,),
    )


def past_of(request: Request) -> int:
    """Return what stands before the first position: the extra keys."""
    return zlib.crc32("/".join(request.extra_keys).encode())


def extend(past: int, token_id: int) -> int:
    """Return what the slot of `token_id` stores after `past`."""
    return hash((past, token_id))


def draw(request: Request, index: int, past: int) -> int:
    """Return the token that sample `index` of the request draws after `past`."""
    return random.Random(hash((request.seed, index, past))).randrange(VOCABULARY)


def run_alone(request: Request) -> list[list[int]]:
    """Return the output tokens of each sample, computed without any of `core/`."""
    outputs = []
    for index in range(request.params.n):
        past = past_of(request)
        for token_id in request.prompt_token_ids:
            past = extend(past, token_id)
        output: list[int] = []
        while len(output) < request.max_tokens:
            output.append(draw(request, index, past))
            past = extend(past, output[-1])
            if output[-1] in request.stop_ids:
                break
        outputs.append(output)
    return outputs


class OracleWorker:
    """Executes plans on slots of hashes and refuses whatever a real cache would spoil."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.slots = [[POISON] * blocks.block_size for _ in range(blocks.pool.num_blocks)]
        self.num_computed_tokens = 0
        self._pasts: dict[tuple[str, int], list[int]] = {}
        self._past_of_hash: dict[bytes, int] = {}

    def run(self, plan: StepPlan, running: list[Sequence]) -> list[int]:
        """Execute one plan and return the tokens drawn, as `Scheduler.commit` wants them."""
        tables = Counter(block for sequence in running for block in sequence.block_table)
        for source, destination in plan.copies:
            assert tables[destination] == 1, f"copy into block {destination}, which others read"
            self.slots[destination] = list(self.slots[source])
        for chunk in plan.chunks:
            assert any(chunk.sequence is s for s in running), f"{chunk.sequence} does not run"
            assert chunk.start == chunk.sequence.num_computed, "a chunk leaves a gap"
            self._check_past(chunk, chunk.start)
        written: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            self._write(chunk, tables, written)
        for chunk in plan.chunks:  # no write of this step may have spoilt another chunk's past
            self._check_past(chunk, chunk.start + chunk.length)
        self.num_computed_tokens += sum(chunk.length for chunk in plan.chunks)
        return [token_id for chunk in plan.chunks for token_id in self._draw(chunk)]

    def poison_unfindable(self, blocks: Iterable[int]) -> None:
        """Overwrite those of `blocks` that are free, but for what the cache still finds there."""
        entries = self.blocks.cache._entries
        for block in blocks:
            if self.blocks.pool.is_free(block):
                kept = len(entries[block].tokens) // 4 if block in entries else 0
                self.slots[block][kept:] = [POISON] * (self.blocks.block_size - kept)

    def check_findable(self) -> None:
        """Raise AssertionError if the cache would hand out a block that holds something else."""
        for block, entry in self.blocks.cache._entries.items():
            past = self._past_of_hash[entry.parent]
            for slot, token_id in zip(
                self.slots[block], memoryview(entry.tokens).cast("I"), strict=False
            ):
                past = extend(past, token_id)
                assert slot == past, f"block {block} can be found but holds something else"

    def learn_hashes(self, sequence: Sequence) -> None:
        """Note which past each of the sequence's block hashes stands for."""
        pasts, size = self._pasts_of(sequence), self.blocks.block_size
        root = self.blocks.cache.root(sequence.request.extra_keys)
        self._past_of_hash[root] = past_of(sequence.request)
        for i, block_hash in enumerate(sequence.block_hashes):
            self._past_of_hash[block_hash] = pasts[(i + 1) * size - 1]

    def _pasts_of(self, sequence: Sequence) -> list[int]:
        key = (sequence.request.request_id, sequence.index)
        pasts = self._pasts.setdefault(key, [])
        for token_id in sequence.token_ids[len(pasts) :]:
            pasts.append(extend(pasts[-1] if pasts else past_of(sequence.request), token_id))
        return pasts

    def _check_past(self, chunk: Chunk, end: int) -> None:
        sequence, size = chunk.sequence, self.blocks.block_size
        pasts = self._pasts_of(sequence)
        held = [slot for block in sequence.block_table for slot in self.slots[block]]
        assert held[:end] == pasts[:end], f"{sequence} would read a past that is not its own"
        assert len(held) >= end, f"{sequence} has no slot at {end - 1} (blocks of {size})"

    def _write(self, chunk: Chunk, tables: Counter[int], written: set[tuple[int, int]]) -> None:
        sequence, start, length = chunk.sequence, chunk.start, chunk.length
        assert length >= 1, f"{sequence} computes nothing"
        assert start + length <= len(sequence.token_ids), f"{sequence} computes an unknown token"
        size, pasts = self.blocks.block_size, self._pasts_of(sequence)
        for position in range(start, start + length):
            block, offset = sequence.block_table[position // size], position % size
            assert tables[block] == 1, f"{sequence} writes block {block}, which others read"
            assert not self.blocks.cache.holds(block), f"{sequence} writes a findable block"
            assert (block, offset) not in written, f"two tokens for slot {offset} of {block}"
            if position == start or offset == 0:
                self.slots[block][offset:] = [POISON] * (size - offset)
            written.add((block, offset))
            self.slots[block][offset] = pasts[position]

    def _draw(self, chunk: Chunk) -> list[int]:
        sequence, start, length = chunk.sequence, chunk.start, chunk.length
        num_samples = chunk.num_samples
        is_last = start + length == len(sequence.token_ids)
        assert num_samples == (sequence.num_samples if is_last else 0), f"{sequence}: samples"
        block, offset = divmod(start + length - 1, self.blocks.block_size)
        past = self.slots[sequence.block_table[block]][offset]
        first = sequence.index
        return [draw(sequence.request, first + i, past) for i in range(num_samples)]


@dataclass(frozen=True)
class Price:
    """Seconds of a step: one for each token, and so many for each position that it sees."""

    seconds: float
    per_position: float

    def plus(self, start: int, length: int, logit_rows: int) -> "Price":
        seen = length * start + length * (length + 1) // 2
        return Price(self.seconds + length + self.per_position * seen, self.per_position)


@dataclass(frozen=True)
class Cost:
    """A `StepCost` in which a token takes a second."""

    per_position: float = 0.0

    def price(self, chunks: Spans, logit_rows: int) -> Price:
        price = Price(0.0, self.per_position)
        for start, length in chunks:
            price = price.plus(start, length, 0)
        return price


@dataclass
class Driver:
    """Runs a scheduler on the oracle, checks every step, and counts what happened."""

    scheduler: Scheduler
    events: Counter[str] = field(default_factory=Counter)
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    requests: dict[str, Request] = field(default_factory=dict)
    sequences: dict[str, dict[int, Sequence]] = field(default_factory=dict)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.blocks = self.scheduler.blocks
        self.worker = OracleWorker(self.blocks)

    @classmethod
    def build(
        cls,
        num_blocks: int,
        block_size: int,
        *,
        budget: int = 64,
        max_num_seqs: int = 16,
        max_chunk_tokens: int | None = None,
        policy: str = "fcfs",
        caching: bool = True,
        target_itl: float | None = None,
        cost: Cost | None = None,
    ) -> "Driver":
        blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=caching)
        return cls(
            Scheduler(
                blocks,
                max_num_batched_tokens=budget,
                max_num_seqs=max_num_seqs,
                max_chunk_tokens=max_chunk_tokens,
                policy=policy,  # type: ignore[arg-type]
                cost=cost or Cost(),
                target_itl=target_itl,
            )
        )

    # --- acting ---------------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        sequence = self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.sequences[request.request_id] = {0: sequence}
        return sequence

    def abort(self, sequence: Sequence) -> None:
        self.events[f"aborted_{sequence.status.value}"] += 1
        self.scheduler.finish(sequence, FinishReason.ABORT)
        self.check()

    def unfinished(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def plan(self) -> StepPlan:
        """Schedule one step, check the plan, and count its events."""
        free = [b for b in range(len(self.worker.slots)) if self.chance.random() < 0.5]
        self.worker.poison_unfindable(free)
        num_evicted, size = self.blocks.num_evicted, self.blocks.block_size
        passes = sum(s.num_passed for s in self.unfinished())
        prompts = [s for s in self.scheduler.running if len(s.token_ids) - s.num_computed > 1]
        plan = self.scheduler.schedule()
        self._check_plan(plan)
        self._check_time(plan, prompts)
        num_parts = sum(s.num_computed % size > 0 for s in plan.admitted)
        self.events["preempted"] += len(plan.preempted)
        self.events["evicted"] += self.blocks.num_evicted - num_evicted
        self.events["passed"] += sum(s.num_passed for s in self.unfinished()) - passes
        self.events["protected"] += sum(s.is_protected for s in plan.admitted)
        self.events["adopted_full_blocks"] += sum(s.num_computed >= size for s in plan.admitted)
        self.events["adopted_part_by_copy"] += num_parts
        self.events["copied_on_write"] += len(plan.copies) - num_parts
        return plan

    def step(self) -> StepPlan:
        plan = self.plan()
        num_forks = self.scheduler.counters.num_forks
        drawn = self.worker.run(plan, self.scheduler.running)
        advanced = self.scheduler.commit(plan, drawn)
        for sequence in [*advanced, *(chunk.sequence for chunk in plan.chunks)]:
            self.worker.learn_hashes(sequence)
        assert [s.token_ids[-1] for s in advanced] == drawn, "a token went to another sequence"
        for sequence in advanced:
            self.sequences[sequence.request.request_id][sequence.index] = sequence
        self.events["forked"] += self.scheduler.counters.num_forks - num_forks
        self.num_steps += 1
        self.check()
        return plan

    def run_to_end(self, limit: int = 100_000) -> None:
        """Step until nothing is left, then check every answer against the request run alone."""
        for _ in range(limit):
            if not len(self.scheduler):
                break
            self.step()
        assert not len(self.scheduler), f"unfinished after {limit} steps"
        self.check_answers()

    # --- checking -------------------------------------------------------------------------------

    def check(self) -> None:
        self.scheduler.check()
        self.worker.check_findable()
        assert all(s.num_preemptions <= MAX_PREEMPTIONS for s in self.unfinished())
        if not self.scheduler.running:
            assert self.blocks.pool.num_free == self.blocks.pool.num_blocks, "a block leaked"

    def _check_plan(self, plan: StepPlan) -> None:
        self.scheduler.check()
        scheduler = self.scheduler
        assert plan.num_tokens == sum(chunk.length for chunk in plan.chunks)
        assert plan.num_tokens <= plan.budget <= scheduler.max_num_batched_tokens
        assert plan.budget in (plan.num_tokens, scheduler.max_num_batched_tokens)
        assert all(1 <= c.length <= scheduler.max_chunk_tokens for c in plan.chunks)
        for sequence in plan.admitted:
            reads = sequence.request.params.prompt_logprobs is None
            assert reads or not sequence.num_computed, "blocks hold no logits"
        assert len({id(c.sequence) for c in plan.chunks}) == len(plan.chunks)
        assert bool(plan.chunks) == bool(len(scheduler)), "nothing advances"
        if not scheduler.running:
            assert not scheduler.waiting, "sequences wait while nothing runs"
        decoding = [s for s in scheduler.running if len(s.token_ids) - s.num_computed == 1]
        planned = {id(c.sequence) for c in plan.chunks}
        assert all(id(s) in planned for s in decoding if s not in plan.admitted), "a stream stops"

    def _check_time(self, plan: StepPlan, prompts: list[Sequence]) -> None:
        """Prompts leave a step within its target, but never stand still."""
        scheduler = self.scheduler
        assert scheduler.cost is not None
        grants = {id(c.sequence): c.length for c in plan.chunks if not _is_decode(c, prompts, plan)}
        num_decodes = len(plan.chunks) - len(grants)
        prompts = [s for s in prompts if s not in plan.preempted]
        if prompts:
            first = prompts[0]
            pending = len(first.token_ids) - first.num_computed
            left = scheduler.max_num_batched_tokens - num_decodes
            least = min(MIN_CHUNK, pending, scheduler.max_chunk_tokens, left)
            assert grants.get(id(first), 0) >= least >= 1, "the first prompt stands still"
        is_streaming = len(scheduler.running) > len(prompts) + len(plan.admitted)
        if scheduler.target_itl is None or not is_streaming:
            assert plan.budget == scheduler.max_num_batched_tokens
            return
        streams = scheduler.cost.price(
            [(c.start, c.length) for c in plan.chunks if id(c.sequence) not in grants], 0
        )
        limit = max(scheduler.target_itl, streams.seconds / (1 - MIN_SHARE))
        is_in_time = (
            scheduler.cost.price([(c.start, c.length) for c in plan.chunks], 0).seconds <= limit
        )
        assert is_in_time or sum(grants.values()) <= MIN_CHUNK, "the step takes too long"
        self.events["shortened"] += plan.budget < scheduler.max_num_batched_tokens

    def check_answers(self) -> None:
        """Require of every accepted request all its answers; of the aborted, a beginning."""
        for request_id, request in self.requests.items():
            alone, got = run_alone(request), self.sequences[request_id]
            if got[0].finish_reason is FinishReason.ABORT and not got[0].output_token_ids:
                continue  # before its samples forked
            for index, expected in enumerate(alone):
                output = got[index].output_token_ids
                if got[index].finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                    assert output == expected[: len(output)], f"{request_id}/{index}"
                else:
                    assert output == expected, f"{request_id}/{index}"
                    is_stop = expected[-1] in request.stop_ids
                    reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
                    assert got[index].finish_reason is reason


def _is_decode(chunk: Chunk, prompts: list[Sequence], plan: StepPlan) -> bool:
    return not any(chunk.sequence is s for s in [*prompts, *plan.admitted])


def run_blind(scheduler: Scheduler, token_id: int = 1) -> int:
    """Run to the end without a worker, every token the same; return how many steps it took."""
    num_steps = 0
    while len(scheduler):
        plan = scheduler.schedule()
        assert plan.chunks, "nothing advances"
        scheduler.commit(plan, [token_id] * sum(chunk.num_samples for chunk in plan.chunks))
        num_steps += 1
    return num_steps
