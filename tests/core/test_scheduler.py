"""The scheduler: who advances, who yields, who waits, and that nobody waits for ever."""

from typing import Any

import pytest

from octavo.core.blocks import BlockManager
from octavo.core.scheduler import MAX_PASSES, MAX_PREEMPTIONS, Scheduler
from octavo.errors import InvalidParameterError, PoolTooSmallError
from octavo.request import FinishReason, Sequence, SequenceStatus
from tests.core.oracle import Driver, make_request, run_blind


def add(driver: Driver, length: int, name: str, **fields: Any) -> Sequence:
    """Add a request whose prompt no other request shares."""
    number = len(driver.requests)
    prompt = [1000 + number] * length
    return driver.add(make_request(prompt, request_id=name, **fields))


def names(sequences: list[Sequence]) -> list[str]:
    return [s.request.request_id for s in sequences]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.case("V09")
def test_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    driver = Driver.build(49, 16, budget=2048)
    for number in range(5):
        with pytest.raises(PoolTooSmallError) as refusal:
            add(driver, 1002, str(number), max_tokens=1)
        for part in ("1,002 prompt tokens", "63 blocks", "pool has 49", "Lower max_tokens"):
            assert part in str(refusal.value)
    assert refusal.value.status == 400
    assert len(driver.scheduler) == 0
    add(driver, 300, "other", max_tokens=20)
    driver.run_to_end()


@pytest.mark.parametrize(("prompt", "max_tokens"), [(1, 32), (31, 2), (32, 1), (16, 17)])
@pytest.mark.case("V09")
def test_request_that_just_fits_finishes_and_one_token_more_is_refused(
    prompt: int, max_tokens: int
) -> None:
    driver = Driver.build(8, 4)
    add(driver, prompt, "fits", max_tokens=max_tokens)
    driver.run_to_end()
    with pytest.raises(PoolTooSmallError):
        add(driver, prompt, "too long", max_tokens=max_tokens + 1)
    with pytest.raises(PoolTooSmallError):
        add(driver, prompt + 1, "too long", max_tokens=max_tokens)


def test_more_samples_than_may_run_are_refused_with_the_limit() -> None:
    driver = Driver.build(50, 4, max_num_seqs=4)
    with pytest.raises(InvalidParameterError, match="max_num_seqs, which is 4, not 5") as refusal:
        add(driver, 3, "0", n=5)
    assert refusal.value.field == "n"
    add(driver, 3, "1", n=4, max_tokens=5)
    driver.run_to_end()


def test_samples_that_only_fit_one_after_another_all_finish() -> None:
    driver = Driver.build(4, 4)
    add(driver, 7, "0", n=4, max_tokens=10)
    driver.run_to_end()
    assert driver.events["preempted"] > 0


# --- entering and leaving -------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "running", "preempted"])
def test_finished_sequence_leaves_nothing_behind(when: str) -> None:
    driver = Driver.build(6, 4)
    sequence = add(driver, 8, "0", max_tokens=12)
    if when != "waiting":
        driver.step()
    if when == "preempted":
        driver.scheduler._preempt(sequence)
    driver.abort(sequence)
    assert sequence.status is SequenceStatus.FINISHED
    assert sequence.finish_reason is FinishReason.ABORT
    assert (sequence.block_table, sequence.num_computed) == ([], 0)
    assert len(driver.scheduler) == driver.blocks.num_reserved == 0


def test_finishing_twice_keeps_the_first_reason() -> None:
    driver = Driver.build(6, 4)
    sequence = add(driver, 3, "0")
    driver.run_to_end()
    driver.scheduler.finish(sequence, FinishReason.ABORT)
    assert sequence.finish_reason is FinishReason.LENGTH
    driver.check()


def test_abort_before_the_fork_frees_all_its_seats() -> None:
    driver = Driver.build(30, 4, budget=16, max_num_seqs=4, max_chunk_tokens=8)
    first = add(driver, 20, "first", n=4, max_tokens=3)
    second = add(driver, 3, "second", n=4, max_tokens=3)
    driver.step()
    assert second.why_waiting == "max_num_seqs"
    driver.abort(first)
    driver.run_to_end()
    assert second.num_output_tokens == 3


@pytest.mark.case("V55")
def test_everything_that_runs_or_is_held_returns_to_zero() -> None:
    driver = Driver.build(16, 4, budget=16, max_num_seqs=8)
    for number in range(40):
        sequence = add(driver, 5 + number % 17, str(number), n=1 + number % 2, max_tokens=9)
        driver.step()
        if number % 5 == 0 and sequence.status is not SequenceStatus.FINISHED:
            driver.abort(sequence)
    driver.run_to_end()
    assert driver.scheduler._num_seats == driver.blocks.num_reserved == 0
    assert driver.blocks.pool.num_free == 16
    assert driver.blocks.pool.num_shared == 0


# --- the budget -----------------------------------------------------------------------------------


@pytest.mark.case("S60")
def test_long_prompt_stops_no_stream_and_progresses_every_step() -> None:
    driver = Driver.build(400, 4, budget=8, max_num_seqs=8)
    streams = [add(driver, 2, f"stream{i}", max_tokens=200) for i in range(7)]
    for _ in range(3):
        driver.step()
    long = add(driver, 150, "long", max_tokens=5)
    while not long.num_output_tokens:
        before = [s.num_output_tokens for s in streams]
        computed = long.num_computed
        driver.step()
        assert [s.num_output_tokens for s in streams] == [b + 1 for b in before]
        assert long.num_computed > computed
    driver.run_to_end()


@pytest.mark.parametrize(
    ("budget", "chunk", "expected"), [(64, None, 1), (8, None, 5), (64, 3, 14)]
)
def test_prompt_is_cut_by_the_budget_and_by_the_longest_chunk(
    budget: int, chunk: int | None, expected: int
) -> None:
    driver = Driver.build(20, 4, budget=budget, max_num_seqs=4, max_chunk_tokens=chunk)
    add(driver, 40, "0", max_tokens=1)
    driver.run_to_end()
    assert driver.num_steps == expected


def test_longest_chunk_leaves_budget_to_the_next_prompt() -> None:
    driver = Driver.build(40, 4, budget=16, max_chunk_tokens=6)
    for name in "abc":
        add(driver, 20, name)
    plan = driver.step()
    assert [(c.sequence.request.request_id, c.length) for c in plan.chunks] == [
        ("a", 6),
        ("b", 6),
        ("c", 4),
    ]
    assert plan.num_tokens == plan.budget == 16
    driver.run_to_end()


def test_first_come_is_first_served() -> None:
    driver = Driver.build(40, 4, budget=8, max_num_seqs=2)
    for name in "abcd":
        add(driver, 6, name, max_tokens=4)
    first_scheduled: list[str] = []
    while len(driver.scheduler):
        first_scheduled += names(driver.step().admitted)
    assert first_scheduled == ["a", "b", "c", "d"]


# --- yielding -------------------------------------------------------------------------------------


def test_last_in_order_yields_and_resumes_with_the_same_tokens() -> None:
    driver = Driver.build(6, 4)
    for name in "abc":
        add(driver, 7, name, max_tokens=12)
    preempted: list[str] = []
    while len(driver.scheduler):
        preempted += names(driver.step().preempted)
    assert preempted
    assert "a" not in preempted
    driver.check_answers()


@pytest.mark.parametrize(
    ("policy", "expected"), [("priority", ["young low", "low", "young"]), ("fcfs", None)]
)
def test_lowest_priority_then_youngest_yields_first(
    policy: str, expected: list[str] | None
) -> None:
    driver = Driver.build(12, 4, policy=policy)
    add(driver, 8, "low", max_tokens=9, priority=5)
    add(driver, 8, "old", max_tokens=9)
    add(driver, 8, "young low", max_tokens=9, priority=5)
    add(driver, 8, "young", max_tokens=9)
    driver.step()
    yielded: list[str] = []
    for _ in range(3):
        victim = driver.scheduler.running[-1]
        driver.scheduler._preempt(victim)
        yielded += names([victim])
    assert yielded == (expected or ["young", "young low", "old"])
    driver.run_to_end()


def test_higher_priority_is_admitted_first_and_equal_ones_by_arrival() -> None:
    driver = Driver.build(40, 4, budget=4, max_num_seqs=1, policy="priority")
    for name, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0)):
        add(driver, 3, name, priority=priority)
    admitted: list[str] = []
    while len(driver.scheduler):
        admitted += names(driver.step().admitted)
    assert admitted == ["c", "b", "d", "a"]


def test_first_come_first_served_ignores_priority() -> None:
    driver = Driver.build(40, 4, budget=4, max_num_seqs=1)
    for name, priority in (("a", 1), ("b", -1)):
        add(driver, 3, name, priority=priority)
    assert names(driver.step().admitted) == ["a"]
    driver.run_to_end()


@pytest.mark.case("V53")
def test_preemptions_are_bounded_and_the_oldest_never_yields() -> None:
    driver = Driver.build(10, 2, budget=16, max_num_seqs=8, policy="priority")
    sequences = []
    for number in range(60):
        sequences.append(add(driver, 3, str(number), max_tokens=14))
        driver.step()
    driver.run_to_end()
    assert sequences[0].num_preemptions == 0
    assert driver.scheduler.counters.num_preemptions > 0
    assert all(s.num_preemptions <= MAX_PREEMPTIONS for s in sequences)


def test_protected_sequence_has_all_its_blocks_before_it_starts() -> None:
    driver = Driver.build(8, 4)
    sequence = add(driver, 5, "0", max_tokens=20)
    sequence.is_protected = True
    driver.step()
    assert len(sequence.block_table) + sequence.num_reserved == 6
    for number in range(3):
        add(driver, 3, f"other{number}", max_tokens=10)
    driver.run_to_end()
    assert sequence.num_preemptions == 0


def test_sequence_that_yielded_often_enough_yields_no_more() -> None:
    driver = Driver.build(8, 4)
    older = add(driver, 4, "older", max_tokens=20)
    sequence = add(driver, 9, "0", max_tokens=9)
    for _ in range(MAX_PREEMPTIONS):
        driver.step()
        assert not sequence.is_protected
        driver.scheduler._preempt(sequence)
    assert sequence.is_protected
    driver.run_to_end()
    assert sequence.num_preemptions == MAX_PREEMPTIONS
    assert older.num_output_tokens == 20


@pytest.mark.case("V12")
def test_preemption_storm_is_no_slower_than_running_as_many_as_fit() -> None:
    num_steps = {}
    for max_num_seqs in (6, 16):
        blocks = BlockManager(6 * 2048 // 16, 16)
        scheduler = Scheduler(blocks, max_num_batched_tokens=2048, max_num_seqs=max_num_seqs)
        sequences = [
            scheduler.add(make_request([n] * 1024, request_id=str(n), max_tokens=1024))
            for n in range(16)
        ]
        num_steps[max_num_seqs] = run_blind(scheduler)
        assert all(s.num_output_tokens == 1024 for s in sequences)
        assert all(s.num_preemptions <= MAX_PREEMPTIONS for s in sequences)
    assert num_steps[16] <= num_steps[6]


def test_preempted_sequence_says_what_it_lost_and_why_it_waits() -> None:
    driver = Driver.build(8, 4)
    sequence = add(driver, 9, "0", max_tokens=9)
    driver.step()
    driver.scheduler._preempt(sequence)
    assert (sequence.why_waiting, sequence.num_lost) == ("preempted", 9)
    driver.run_to_end()


# --- waiting --------------------------------------------------------------------------------------


def test_small_requests_pass_a_large_one_which_still_starts() -> None:
    driver = Driver.build(20, 4, budget=64, max_num_seqs=16)
    add(driver, 20, "running", max_tokens=40)
    driver.step()
    large = add(driver, 64, "large", max_tokens=4)
    passed, number = 0, 0
    while large.status is SequenceStatus.WAITING:
        for _ in range(2):
            add(driver, 3, f"small{number}", max_tokens=2)
            number += 1
        plan = driver.step()
        passed += sum(name.startswith("small") for name in names(plan.admitted))
        if large.status is SequenceStatus.WAITING:
            assert large.why_waiting == "blocks"
    assert 0 < passed <= MAX_PASSES
    driver.run_to_end()


def test_nobody_passes_once_too_many_have() -> None:
    driver = Driver.build(20, 4)
    add(driver, 20, "running", max_tokens=40)
    driver.step()
    large = add(driver, 64, "large", max_tokens=4)
    large.num_passed = MAX_PASSES
    small = add(driver, 3, "small", max_tokens=2)
    while large.status is SequenceStatus.WAITING:
        driver.step()
        assert small.status is SequenceStatus.WAITING or large.status is SequenceStatus.RUNNING
    driver.run_to_end()


def test_newcomer_leaves_a_block_to_each_that_runs() -> None:
    driver = Driver.build(8, 4)
    add(driver, 15, "running", max_tokens=6)
    driver.step()
    four = add(driver, 16, "four blocks", max_tokens=4)
    three = add(driver, 12, "three blocks", max_tokens=1)
    driver.step()
    assert four.why_waiting == "blocks"
    assert three.num_output_tokens == 1
    driver.run_to_end()
    assert driver.events["preempted"] == 0


def test_samples_that_have_not_forked_yet_hold_their_seats() -> None:
    driver = Driver.build(50, 4, max_num_seqs=4)
    add(driver, 3, "three", n=3, max_tokens=2)
    two = add(driver, 3, "two", n=2, max_tokens=2)
    one = add(driver, 3, "one", max_tokens=2)
    driver.step()
    assert two.why_waiting == "max_num_seqs"
    assert one.status is SequenceStatus.RUNNING
    assert len(driver.scheduler.running) == 4
    driver.run_to_end()


def test_more_than_may_run_wait_for_a_seat() -> None:
    driver = Driver.build(50, 4, max_num_seqs=3)
    for name in "abcde":
        add(driver, 3, name, max_tokens=4)
    driver.step()
    assert len(driver.scheduler.running) == 3
    assert {s.why_waiting for s in driver.scheduler.waiting} == {"max_num_seqs"}
    driver.run_to_end()


def test_prefix_that_is_being_computed_lets_a_blocked_request_start_early() -> None:
    driver = Driver.build(14, 4, budget=64)
    prompt = [5] * 39
    driver.add(make_request(prompt, request_id="first", max_tokens=5))
    second = driver.add(make_request([*prompt, 1], request_id="second", max_tokens=5))
    driver.step()
    assert second.why_waiting == "blocks"
    driver.step()
    assert second.status is SequenceStatus.RUNNING
    assert second.num_cached_tokens == 36
    driver.run_to_end()


# --- counters -------------------------------------------------------------------------------------


@pytest.mark.case("V11")
def test_recomputed_tokens_are_no_cache_hits() -> None:
    driver = Driver.build(10, 4, budget=32, max_num_seqs=8)
    sequences = [add(driver, 9, str(n), max_tokens=15) for n in range(8)]
    driver.run_to_end()
    counters = driver.scheduler.counters
    assert counters.num_preemptions > 0
    assert counters.num_recomputed_tokens > 0
    assert counters.num_reused_tokens == 0
    assert counters.num_prompt_tokens == 72
    assert all(s.num_cached_tokens == 0 for s in sequences)


def test_every_computed_token_is_counted_once() -> None:
    driver = Driver.build(10, 4, budget=32, max_num_seqs=8)
    sequences = [add(driver, 9, str(n), max_tokens=15) for n in range(8)]
    driver.run_to_end()
    counters = driver.scheduler.counters
    assert counters.num_computed_tokens == driver.worker.num_computed_tokens
    assert counters.num_generated_tokens == sum(s.num_output_tokens for s in sequences) == 120
    # Each sequence computes all of its tokens but the last, and again those that it lost.
    assert counters.num_computed_tokens == 8 * (9 + 14) + counters.num_recomputed_tokens


def test_recomputed_tokens_never_shrink_when_others_computed_more() -> None:
    driver = Driver.build(30, 4, budget=8, max_num_seqs=4)
    prompt = [3] * 30
    driver.add(make_request(prompt, request_id="fast"))
    driver.step()
    slow = driver.add(make_request([*prompt, 1], request_id="slow"))
    slow.num_cached_tokens, slow.num_lost, slow.num_preemptions = 0, 8, 1  # it yielded before
    driver.scheduler.waiting.remove(slow)
    while len(driver.scheduler):
        driver.step()
    driver.scheduler.waiting.append(slow)
    driver.run_to_end()
    assert driver.scheduler.counters.num_recomputed_tokens == 0


def test_forks_are_counted_and_share_their_cached_tokens() -> None:
    driver = Driver.build(30, 4)
    driver.add(make_request([1] * 9, request_id="first"))
    driver.run_to_end()
    driver.add(make_request([1] * 9, request_id="second", n=3, max_tokens=2))
    driver.run_to_end()
    assert driver.scheduler.counters.num_forks == 2
    assert [s.num_cached_tokens for s in driver.sequences["second"].values()] == [8, 8, 8]
    assert driver.scheduler.counters.num_reused_tokens == 8


def test_check_finds_a_sequence_in_the_wrong_queue() -> None:
    driver = Driver.build(8, 4)
    sequence = add(driver, 3, "0", max_tokens=4)
    driver.step()
    driver.scheduler.check()
    sequence.status = SequenceStatus.WAITING
    with pytest.raises(AssertionError, match="wrong queue"):
        driver.scheduler.check()


# --- held sequences -------------------------------------------------------------------------------


def test_held_sequence_keeps_its_place_and_gets_no_tokens() -> None:
    driver = Driver.build(20, 4)
    first, second = add(driver, 5, "a", max_tokens=9), add(driver, 5, "b", max_tokens=9)
    scheduler = driver.scheduler
    plan = scheduler.schedule({first})
    assert names([c.sequence for c in plan.chunks]) == ["b"]
    scheduler.commit(plan, [7])
    plan = scheduler.schedule({second})
    assert names([c.sequence for c in plan.chunks]) == ["a"]
    scheduler.commit(plan, [7])
    assert scheduler.running == [first, second]
    assert not scheduler.schedule({first, second}).chunks
    assert [c.length for c in scheduler.schedule().chunks] == [1, 1]
    scheduler.check()
