"""One immutable snapshot per step, behind the log line, the metrics and the page.

Decides what the engine says of itself. Computes nothing that another module owns.

Invariant: used + free blocks are the pool, and the counters never fall.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.core.scheduler import Scheduler
from octavo.engine.lives import NO_WORK, Work
from octavo.engine.outlook import Outlook


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine after one step. Counts in sequences, blocks, tokens; times in seconds.

    waiting: why sequences wait ("new", "preempted", "blocks", "max_num_seqs"; "grammar":
        it is being compiled) to how many do.
    num_cached_blocks: blocks, free or used, whose content can be found by its tokens.
    num_empty_slots: allocated token slots that hold nothing; waste is their share.
    num_queried_tokens, num_reused_tokens: prompt tokens that the cache was asked for, and found
        in it, counted once per request.
    num_recomputed_tokens: tokens lost by preemption and computed again.
    outlook: predicted steps; None without a cost model.
    last_step, all_steps: what they did, as far as the cost model accounts for it.
    """

    step: int
    num_running: int
    waiting: Mapping[str, int]
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_shared_blocks: int
    num_empty_slots: int
    block_size: int
    num_prompt_tokens: int
    num_queried_tokens: int
    num_reused_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    num_forks: int
    num_evicted_blocks: int
    step_time: float
    outlook: Outlook | None = None
    last_step: Work = NO_WORK
    all_steps: Work = NO_WORK

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, for whatever reason."""
        return sum(self.waiting.values())

    @property
    def num_used_blocks(self) -> int:
        """Blocks that stand in a table."""
        return self.num_blocks - self.num_free_blocks

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return self.num_used_blocks / self.num_blocks

    @property
    def waste(self) -> float:
        """Share of the allocated token slots that hold nothing, 0 to 1."""
        slots = self.num_used_blocks * self.block_size
        return self.num_empty_slots / slots if slots else 0.0


def take_snapshot(
    scheduler: Scheduler,
    *,
    step: int,
    step_time: float,
    num_compiling: int = 0,
    outlook: Outlook | None = None,
    last_step: Work = NO_WORK,
    all_steps: Work = NO_WORK,
) -> EngineStats:
    """Return the state of `scheduler` as it stands between two steps.

    num_compiling: requests whose grammars are being compiled, which it has not seen. last_step,
    all_steps: what they did.
    """
    blocks, counters = scheduler.blocks, scheduler.counters
    waiting = Counter(s.why_waiting for s in scheduler.waiting)
    if num_compiling:
        waiting["grammar"] = num_compiling
    return EngineStats(
        step=step,
        num_running=len(scheduler.running),
        waiting=dict(waiting),
        num_blocks=blocks.pool.num_blocks,
        num_free_blocks=blocks.pool.num_free,
        num_cached_blocks=blocks.num_cached,
        num_shared_blocks=blocks.pool.num_shared,
        num_empty_slots=blocks.num_empty_slots(scheduler.running),
        block_size=blocks.block_size,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_queried_tokens=counters.num_queried_tokens,
        num_reused_tokens=counters.num_reused_tokens,
        num_computed_tokens=counters.num_computed_tokens,
        num_generated_tokens=counters.num_generated_tokens,
        num_recomputed_tokens=counters.num_recomputed_tokens,
        num_preemptions=counters.num_preemptions,
        num_forks=counters.num_forks,
        num_evicted_blocks=blocks.num_evicted,
        step_time=step_time,
        outlook=outlook,
        last_step=last_step,
        all_steps=all_steps,
    )
