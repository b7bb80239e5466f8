"""What the prefix cache says of a lookup: how much, from when, and why no more."""

import pytest

from octavo.core.blocks import BlockManager
from octavo.core.lookup import CacheLookup, CacheMiss
from octavo.core.prefix import EVICTED_REMEMBERED, PrefixCache, pack
from octavo.core.scheduler import Scheduler
from tests.core.oracle import make_request

SIZE = 4


class Cache:
    """A scheduler whose requests run at given moments, and what each one's lookup said."""

    def __init__(self, num_blocks: int = 64, *, caching: bool = True) -> None:
        self.blocks = BlockManager(num_blocks, SIZE, enable_prefix_caching=caching)
        self.scheduler = Scheduler(self.blocks)
        self.num_requests = 0

    def serve(self, prompt: list[int], now: float = 0.0, **fields: object) -> CacheLookup:
        """Run one request to its end at `now`, and return its lookup."""
        self.num_requests += 1
        self.blocks.now = now
        request_id = str(self.num_requests)
        self.scheduler.add(make_request(prompt, request_id=request_id, **fields))  # type: ignore[arg-type]
        found: list[CacheLookup] = []
        while len(self.scheduler):
            plan = self.scheduler.schedule()
            assert len(plan.lookups) == len(plan.admitted)
            found += plan.lookups
            self.scheduler.commit(plan, [1] * sum(c.num_samples for c in plan.chunks))
            self.scheduler.check()
        (lookup,) = found
        return lookup


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_blocks_say_when_and_for_how_many_requests_they_were_computed() -> None:
    cache = Cache()
    cache.serve([*PROMPT[:4], 0], now=1.0)
    cache.serve(PROMPT, now=3.0)
    found = cache.serve([*PROMPT, 0, 0], now=15.0)
    assert (found.num_tokens, found.num_sources) == (10, 2)
    assert (found.oldest, found.newest) == (1.0, 3.0)


def test_all_but_the_last_token_is_no_miss() -> None:
    cache = Cache()
    cache.serve(PROMPT)
    found = cache.serve(PROMPT)
    assert (found.num_tokens, found.miss) == (9, CacheMiss.NOTHING)


@pytest.mark.parametrize("same", range(1, 9))
def test_first_differing_token_is_the_one_after_those_found(same: int) -> None:
    cache = Cache()
    cache.serve(PROMPT)
    found = cache.serve([*PROMPT[:same], 77, *PROMPT[same + 1 :]])
    assert (found.num_tokens, found.miss) == (same, CacheMiss.DIFFERS)


def test_text_that_differs_from_its_first_token_finds_nothing() -> None:
    cache = Cache()
    cache.serve(PROMPT)
    found = cache.serve([77, *PROMPT])
    assert (found.num_tokens, found.miss) == (0, CacheMiss.DIFFERS)
    assert (found.oldest, found.newest, found.num_sources) == (None, None, 0)


def test_text_that_goes_on_where_the_cached_one_ends_does_not_differ() -> None:
    cache = Cache()
    assert cache.serve(PROMPT, max_tokens=1).miss is CacheMiss.ENDS
    found = cache.serve([*PROMPT, 3, 4, 5, 6, 7])
    assert (found.num_tokens, found.miss) == (10, CacheMiss.ENDS)


def test_neighbour_that_goes_on_is_told_before_one_that_ends() -> None:
    cache = Cache()
    cache.serve([1, 2, 3], max_tokens=1)
    cache.serve([1, 2, 3, 9, 9], max_tokens=1)
    assert cache.serve([1, 2, 3, 4, 4, 4]).miss is CacheMiss.DIFFERS


def test_evicted_block_says_when_it_went() -> None:
    cache = Cache(num_blocks=6)
    cache.serve(PROMPT, now=1.0)
    cache.serve([50 + i for i in range(23)], now=5.0)  # needs the whole pool
    found = cache.serve(PROMPT, now=9.0)
    assert (found.num_tokens, found.miss, found.evicted_at) == (0, CacheMiss.EVICTED, 5.0)
    assert cache.serve(PROMPT, now=10.0).miss is CacheMiss.NOTHING


def test_only_the_latest_evictions_are_remembered() -> None:
    cache = PrefixCache()
    root = cache.root(())
    hashes = [cache.hash_block(root, pack([i])) for i in range(EVICTED_REMEMBERED + 1)]
    for i, block_hash in enumerate(hashes):
        cache.insert(0, root, pack([i]), block_hash)
        assert cache.evict([0], float(i)) == 1
    assert cache.evicted_at(hashes[0]) is None
    assert cache.evicted_at(hashes[1]) == 1.0
    cache.check()


def test_reset_cache_remembers_nothing_of_what_it_held() -> None:
    cache = Cache(num_blocks=6)
    cache.serve(PROMPT, now=1.0)
    cache.serve([50 + i for i in range(23)], now=5.0)
    cache.blocks.forget()
    assert cache.serve(PROMPT, now=9.0).miss is CacheMiss.ENDS


@pytest.mark.parametrize("num_blocks", [6, 64])
def test_nothing_tells_of_what_stands_under_another_salt(num_blocks: int) -> None:
    """Whether another tenant sent the same prompt, and whether it was evicted, makes no odds."""
    told = []
    for others in ((), ("theirs", None)):
        cache = Cache(num_blocks)
        for salt in others:
            cache.serve(PROMPT, now=1.0, salt=salt)
        cache.serve([50 + i for i in range(23)], now=5.0, salt="theirs")
        told.append(cache.serve(PROMPT, now=9.0, salt="mine"))
    assert told[0] == told[1]
    assert told[0].is_salted
    assert (told[0].num_tokens, told[0].miss) == (0, CacheMiss.ENDS)


def test_one_token_is_too_short() -> None:
    assert Cache().serve([1]).miss is CacheMiss.TOO_SHORT


def test_request_for_every_row_says_that_the_cache_was_not_asked() -> None:
    cache = Cache()
    cache.serve(PROMPT)
    assert cache.serve(PROMPT, prompt_logprobs=0).miss is CacheMiss.NOT_ASKED


def test_cache_that_is_off_says_so() -> None:
    cache = Cache(caching=False)
    cache.serve(PROMPT)
    assert cache.serve(PROMPT).miss is CacheMiss.OFF
