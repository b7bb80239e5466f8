"""Blocks: who owns them, who may write them, and in which order they are given up."""

from dataclasses import replace

import pytest

from octavo.core.blocks import BlockManager, BlockPool
from octavo.core.scheduler import Scheduler
from octavo.request import FinishReason, Sequence
from tests.core.oracle import Driver, make_request, run_blind


def finish_one(driver: Driver, prompt: list[int], **fields: object) -> Sequence:
    """Run one request alone in `driver` and return its first sequence."""
    request_id = str(len(driver.requests))
    sequence = driver.add(make_request(prompt, request_id=request_id, **fields))  # type: ignore[arg-type]
    driver.run_to_end()
    return sequence


def num_findable(driver: Driver, prompt: list[int]) -> int:
    """Return how many beginning tokens of `prompt` the cache holds, changing nothing."""
    return driver.blocks.match(Sequence(make_request(prompt), 0, (0, 0, 0))).num_tokens


# --- the pool ---------------------------------------------------------------------------------


def test_pool_takes_least_recently_freed_first() -> None:
    pool = BlockPool(3)
    taken = pool.take(3)
    for block in (taken[1], taken[0], taken[2]):
        pool.release(block, is_cached=True)
    assert pool.take(3) == [taken[1], taken[0], taken[2]]


def test_pool_takes_blocks_without_content_before_any_cached_one() -> None:
    pool = BlockPool(2)
    cached, empty = pool.take(2)
    pool.release(cached, is_cached=True)
    pool.release(empty, is_cached=False)
    assert pool.take(1) == [empty]


def test_touched_block_is_taken_last() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.release(first, is_cached=True)
    pool.release(second, is_cached=True)
    pool.touch(first)
    assert pool.take(2) == [second, first]


def test_touching_a_block_in_use_does_not_free_it() -> None:
    pool = BlockPool(1)
    pool.touch(*pool.take(1))
    assert pool.num_free == 0


def test_shared_block_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.share(block)
    pool.release(block, is_cached=False)
    assert not pool.is_free(block)
    pool.release(block, is_cached=False)
    assert pool.is_free(block)


# --- growing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16, 32, 64, 100, 128, 256])
@pytest.mark.case("V15")
def test_every_block_size_serves(block_size: int) -> None:
    driver = Driver.build(2 + 600 // block_size, block_size, budget=300)
    for length in (1, block_size - 1, block_size, block_size + 1, 2 * block_size + 1):
        if length:
            finish_one(driver, [length % 8] * length, max_tokens=block_size % 7 + 2)


def test_sequence_holds_no_more_blocks_than_its_tokens_need() -> None:
    driver = Driver.build(20, 4)
    driver.add(make_request(range(7), max_tokens=30))
    while len(driver.scheduler):
        driver.step()
        for sequence in driver.scheduler.running:
            assert len(sequence.block_table) == driver.blocks.blocks_for(sequence.num_computed)


def test_refused_growth_changes_nothing() -> None:
    blocks = BlockManager(2, 4)
    sequence = Sequence(make_request(range(8)), 0, (0, 0, 0))
    assert blocks.grow(sequence, 4)
    assert not blocks.grow(sequence, 13)
    assert (len(sequence.block_table), blocks.pool.num_free, sequence.capacity) == (1, 1, 4)
    blocks.check([sequence])


def test_refused_admission_changes_nothing() -> None:
    driver = Driver.build(8, 4)
    finish_one(driver, list(range(10)))
    newcomer = Sequence(make_request(range(12)), 0, (0, 1, 0))
    match = driver.blocks.match(newcomer)
    assert match.num_tokens == 10
    assert match.partial_block is not None
    assert not driver.blocks.admit(newcomer, match, 12, headroom=6)
    assert newcomer.block_table == []
    assert driver.blocks.pool.num_free == 8
    assert driver.blocks.drain_copies() == []
    driver.check()
    assert driver.blocks.admit(newcomer, match, 12, headroom=5)


def test_admission_counts_revived_blocks_as_taken() -> None:
    driver = Driver.build(4, 4)
    finish_one(driver, list(range(13)))  # the cache fills the pool: three full blocks and a part
    newcomer = Sequence(make_request(range(16)), 0, (0, 1, 0))
    match = driver.blocks.match(newcomer)
    assert len(match.blocks) == 3
    assert not driver.blocks.admit(newcomer, match, 16, headroom=1)
    assert driver.blocks.admit(newcomer, match, 16, headroom=0)


# --- forks --------------------------------------------------------------------------------------


def test_forked_sequence_writes_to_its_own_block() -> None:
    driver = Driver.build(20, 4)
    parent = driver.add(make_request(range(6), n=3, max_tokens=5))
    driver.step()
    shared = list(parent.block_table)
    assert all(s.block_table == shared for s in driver.scheduler.running)
    assert driver.blocks.pool.num_shared == 2
    plan = driver.step()
    tails = [s.block_table[1] for s in driver.scheduler.running]
    assert len(set(tails)) == 3
    assert [c.source for c in plan.copies] == [shared[1]] * 2  # the last to write keeps the block
    assert all(s.block_table[0] == shared[0] for s in driver.scheduler.running)
    driver.run_to_end()


def test_fork_at_a_block_boundary_copies_nothing() -> None:
    driver = Driver.build(20, 4)
    driver.add(make_request(range(8), n=4, max_tokens=3))
    driver.run_to_end()
    assert driver.events["forked"] == 3
    assert driver.events["copied_on_write"] == 0


def test_fork_that_ends_early_frees_only_its_share() -> None:
    driver = Driver.build(20, 4)
    driver.add(make_request(range(6), n=4, max_tokens=9))
    driver.step()
    for sequence in driver.scheduler.running[1:3]:
        driver.abort(sequence)
    driver.run_to_end()


def test_samples_with_one_token_share_everything_until_the_end() -> None:
    driver = Driver.build(2, 4)
    driver.add(make_request(range(7), n=8, max_tokens=1))
    driver.run_to_end()
    assert driver.events["copied_on_write"] == 0


def test_copy_on_write_leaves_a_protected_parent_its_reserved_blocks() -> None:
    """A protected sequence holds all it can need; its fork's copy may not eat of that.

    Otherwise it would make an older sequence yield in the middle of a step already planned.
    """
    driver = Driver.build(6, 4)
    older = driver.add(make_request(range(4), request_id="older", max_tokens=13))
    parent = driver.add(make_request([7, 7, 7], request_id="parent", n=2, max_tokens=9))
    parent.is_protected = True
    driver.step()
    driver.step()
    assert parent.num_reserved + len(parent.block_table) == 3
    driver.abort(driver.sequences["parent"][1])
    driver.run_to_end()
    assert older.num_preemptions == parent.num_preemptions == 0


def test_protected_parent_without_room_to_copy_makes_its_own_samples_yield() -> None:
    driver = Driver.build(4, 4)
    older = driver.add(make_request(range(4), request_id="older", max_tokens=6))
    parent = driver.add(make_request([7, 7, 7], request_id="parent", n=4, max_tokens=5))
    parent.is_protected = True
    driver.step()
    plan = driver.step()
    assert [s.request.request_id for s in plan.preempted] == ["parent"] * 3
    assert not plan.copies
    driver.run_to_end()
    assert older.num_preemptions == 0


# --- eviction -----------------------------------------------------------------------------------


def test_eviction_takes_least_recently_used_first_and_tails_before_heads() -> None:
    driver = Driver.build(6, 4)
    first, second = [1] * 12, [2] * 12
    finish_one(driver, first)
    finish_one(driver, second)
    left = []
    for _ in range(6):
        driver.blocks._take(1)
        left.append((num_findable(driver, [*first, 0]), num_findable(driver, [*second, 0])))
    assert left == [(8, 12), (4, 12), (0, 12), (0, 8), (0, 4), (0, 0)]
    assert driver.blocks.num_evicted == 6


def test_adopted_prefix_counts_as_used() -> None:
    driver = Driver.build(6, 4)
    first, second = [1] * 12, [2] * 12
    finish_one(driver, first)
    finish_one(driver, second)
    finish_one(driver, first)
    for _ in range(3):
        driver.blocks._take(1)
    assert num_findable(driver, [*first, 0]) == 12
    assert num_findable(driver, [*second, 0]) == 0


def test_part_that_was_copied_counts_as_used() -> None:
    driver = Driver.build(5, 4)
    finish_one(driver, [1, 1])
    finish_one(driver, [2, 2])
    finish_one(driver, [1, 1, 3, 3])  # adopts by copy, from the oldest block
    for _ in range(3):
        driver.blocks._take(1)
    assert num_findable(driver, [1, 1, 0]) == 2
    assert num_findable(driver, [2, 2, 0]) == 0


def test_blocks_in_use_are_never_evicted() -> None:
    driver = Driver.build(6, 4)
    finish_one(driver, [1] * 8)
    holder = driver.add(make_request([1] * 9, request_id="holder", max_tokens=12))
    driver.step()
    held = list(holder.block_table)
    driver.add(make_request([2] * 10, request_id="other"))
    driver.step()
    assert holder.block_table[:2] == held[:2]
    driver.run_to_end()
    assert num_findable(driver, [1] * 9) == 8


# --- adopting a part of a block -----------------------------------------------------------------


def test_partial_last_block_is_reused_by_copy_and_never_shared_while_written() -> None:
    driver = Driver.build(10, 4)
    finish_one(driver, [1, 2, 3, 4, 5, 6])
    source = driver.blocks.match(
        Sequence(make_request([1, 2, 3, 4, 5, 6, 7]), 0, (0, 0, 0))
    ).partial_block
    assert source is not None
    before = list(driver.worker.slots[source])
    reader = driver.add(make_request([1, 2, 3, 4, 5, 6, 7, 0], request_id="r", max_tokens=3))
    plan = driver.step()
    assert [c.source for c in plan.copies] == [source]
    assert source not in reader.block_table
    assert [(c.start, c.length) for c in plan.chunks] == [(6, 2)]
    driver.run_to_end()
    assert driver.worker.slots[source][:2] == before[:2]


def test_shared_tail_is_published_by_its_last_owner_only() -> None:
    driver = Driver.build(10, 4)
    parent = driver.add(make_request([1, 2, 3, 4, 5], n=2, max_tokens=2))
    driver.step()
    child = driver.scheduler.running[1]
    driver.abort(parent)
    assert num_findable(driver, [1, 2, 3, 4, 5, 6]) == 4
    driver.abort(child)
    assert num_findable(driver, [1, 2, 3, 4, 5, 6]) == 5


def lose_a_step(driver: Driver) -> None:
    """Plan a step whose copies and writes never happen, and end whoever is in it."""
    for chunk in driver.plan().chunks:
        driver.scheduler.finish(chunk.sequence, FinishReason.ERROR)
    driver.worker.poison_unfindable(range(driver.blocks.pool.num_blocks))
    driver.check()


def test_failed_step_leaves_no_part_findable_that_was_never_copied() -> None:
    driver = Driver.build(12, 4)
    finish_one(driver, [1, 2, 3, 4, 5, 6])
    driver.add(make_request([1, 2, 3, 4, 5, 6, 7, 0], request_id="adopts by copy"))
    lose_a_step(driver)
    assert num_findable(driver, [1, 2, 3, 4, 5, 6, 0]) == 6  # from before
    finish_one(driver, [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3], max_tokens=4)


def test_failed_step_leaves_no_tail_findable_that_was_never_copied_on_write() -> None:
    driver = Driver.build(12, 4)
    driver.add(make_request([7] * 6, request_id="forks", n=3, max_tokens=9))
    driver.step()
    lose_a_step(driver)
    assert num_findable(driver, [7] * 7) == 4
    finish_one(driver, [7] * 9, n=2, max_tokens=4)


def test_failed_step_leaves_none_of_its_own_writes_findable() -> None:
    driver = Driver.build(12, 4, budget=8, max_num_seqs=8)
    driver.add(make_request(range(20), request_id="long"))
    driver.step()
    lose_a_step(driver)
    assert num_findable(driver, list(range(20))) == 8
    finish_one(driver, list(range(20)))


# --- accounting ---------------------------------------------------------------------------------


def test_empty_slots_of_a_shared_block_count_once() -> None:
    driver = Driver.build(10, 4)
    driver.add(make_request(range(6), n=3, max_tokens=4))
    driver.step()
    assert driver.blocks.num_empty_slots(driver.scheduler.running) == 2
    driver.step()  # three tails of their own, three of four slots full
    assert driver.blocks.num_empty_slots(driver.scheduler.running) == 3


def test_less_than_a_block_per_sequence_is_empty() -> None:
    driver = Driver.build(40, 8)
    for number in range(6):
        request = make_request([number] * (3 + 5 * number), request_id=str(number), max_tokens=9)
        driver.add(request)
    while len(driver.scheduler):
        driver.step()
        running = driver.scheduler.running
        assert driver.blocks.num_empty_slots(running) <= 7 * len(running)


@pytest.mark.case("V14")
def test_bookkeeping_stays_flat_over_many_unique_requests() -> None:
    blocks = BlockManager(64, 16)
    scheduler = Scheduler(blocks, max_num_batched_tokens=512, max_num_seqs=16)
    cache = blocks.cache
    template = make_request([0])
    sizes = []
    for batch in range(500):
        for number in range(batch * 100, batch * 100 + 100):
            ids, salt = [number] * 33, (str(number),)
            scheduler.add(replace(template, prompt_token_ids=ids, extra_keys=salt))
        run_blind(scheduler)
        kept = (cache._entries, cache._by_hash, cache._children, cache._roots)
        sizes.append([len(index) for index in kept])
    assert sizes[20:] == [[64, s[1], s[2], s[3]] for s in sizes[20:]]
    assert all(s[1] <= 64 and s[2] <= 64 and s[3] <= 1024 for s in sizes)
    assert not blocks._copies
    assert len(scheduler) == blocks.num_reserved == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda b, s: b.pool.ref_counts.__setitem__(s.block_table[0], 2),
        lambda b, s: s.block_table.pop(),
        lambda b, s: s.block_table.append(s.block_table[0]),
        lambda b, s: b.pool._free.__setitem__(s.block_table[0], None),
        lambda b, s: setattr(b, "num_reserved", 3),
        lambda b, s: setattr(s, "num_computed", 99),
        lambda b, s: b.cache._by_hash.clear(),
        lambda b, s: b.cache._children.clear(),
    ],
)
def test_check_finds_damage(damage) -> None:  # type: ignore[no-untyped-def]
    driver = Driver.build(8, 4)
    sequence = driver.add(make_request(range(10), max_tokens=4))
    driver.step()
    damage(driver.blocks, sequence)
    with pytest.raises(AssertionError):
        driver.blocks.check([sequence])
