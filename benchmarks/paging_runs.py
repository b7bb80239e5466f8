"""What `paging.py` measures beside the memory of recorded traffic, which `planning.study` serves.

Decides what a cache without end would serve, and how the scheduler's own time is taken.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import repeat

from octavo.core.blocks import BlockManager
from octavo.core.scheduler import Scheduler
from octavo.planning.load.traces import TRACE_BLOCK, TraceLine
from octavo.request import Request, SamplingParams

_GREEDY = SamplingParams(max_tokens=None)


def endless_share(lines: Iterable[TraceLine]) -> float:
    """Return the share of prompt tokens that a cache without end would serve, at once."""
    seen: set[int] = set()
    num_served = num_tokens = 0
    for line in lines:
        known = 0
        while known < len(line.block_hashes) and line.block_hashes[known] in seen:
            known += 1
        # The last token is always computed, since somebody must draw from it.
        num_served += min(known * TRACE_BLOCK, line.num_prompt_tokens - 1)
        num_tokens += line.num_prompt_tokens
        seen.update(line.block_hashes)
    return num_served / num_tokens


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
