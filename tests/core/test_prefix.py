"""The prefix cache: what is found is what was computed, and as much of it as there is."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.blocks import BlockManager
from octavo.core.prefix import PrefixCache, pack
from octavo.core.scheduler import Scheduler
from octavo.request import FinishReason, Sequence
from tests.core.oracle import Driver, make_request, run_alone, run_blind

TOKENS = st.lists(st.integers(0, 2), max_size=6)


def serve(driver: Driver, prompt: list[int], **fields: object) -> Sequence:
    """Run one request alone in `driver` and return its first sequence."""
    request_id = str(len(driver.requests))
    sequence = driver.add(make_request(prompt, request_id=request_id, **fields))  # type: ignore[arg-type]
    driver.run_to_end()
    return sequence


# --- how much is found --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 12, 13])
@pytest.mark.case("V01")
def test_second_time_all_but_the_last_token_is_cached(length: int) -> None:
    driver = Driver.build(20, 4)
    prompt = [i % 8 for i in range(length)]
    assert serve(driver, prompt).num_cached_tokens == 0
    before = driver.worker.num_computed_tokens
    assert serve(driver, prompt).num_cached_tokens == length - 1
    assert driver.worker.num_computed_tokens - before == 1
    assert driver.scheduler.counters.num_reused_tokens == length - 1
    assert driver.scheduler.counters.num_prompt_tokens == 2 * length


def test_without_caching_nothing_is_found_or_kept() -> None:
    driver = Driver.build(20, 4, caching=False)
    for _ in range(2):
        assert serve(driver, [1, 2, 3, 4, 5]).num_cached_tokens == 0
    assert driver.blocks.num_cached == 0


@pytest.mark.case("S30")
def test_second_turn_finds_all_that_the_first_computed() -> None:
    driver = Driver.build(40, 8)
    first = serve(driver, [i % 7 for i in range(29)], max_tokens=14)
    second = serve(driver, [*first.token_ids, 3, 1, 4], max_tokens=5)
    # The last token of the first turn was drawn but never computed.
    assert second.num_cached_tokens == len(first.token_ids) - 1


@pytest.mark.case("S24")
@pytest.mark.parametrize("block_size", [16, 256])
def test_very_long_prompt_runs_cold_and_warm(block_size: int) -> None:
    blocks = BlockManager(120_000 // block_size, block_size)
    scheduler = Scheduler(blocks, max_num_batched_tokens=4096)
    prompt = [i * 7919 % 50_000 for i in range(60_001)]
    for expected in (0, 60_000):
        sequence = scheduler.add(make_request(prompt, max_tokens=8))
        run_blind(scheduler)
        assert sequence.num_cached_tokens == expected
        assert sequence.output_token_ids == [1] * 8
        assert sequence.finish_reason is FinishReason.LENGTH


@pytest.mark.case("S26")
def test_answer_is_the_same_cold_warm_and_half_warm() -> None:
    driver = Driver.build(60, 8)
    prompt = [i * 5 % 8 for i in range(43)]
    answers = [serve(driver, prompt, max_tokens=20).output_token_ids for _ in range(2)]
    serve(driver, [*prompt[:19], 0, 0, 0], max_tokens=3)
    answers.append(serve(driver, prompt, max_tokens=20).output_token_ids)
    assert answers == [run_alone(make_request(prompt, max_tokens=20))[0]] * 3


@given(known=st.lists(TOKENS.filter(bool), max_size=8), wanted=TOKENS)
@settings(max_examples=200, deadline=None)
def test_partial_match_is_the_longest_common_beginning(
    known: list[list[int]], wanted: list[int]
) -> None:
    cache = PrefixCache()
    root = cache.root(())
    for block, tokens in enumerate(known):
        cache.insert(block, root, pack(tokens), None)
    block, length = cache.find_partial(root, pack(wanted))
    shared = [
        next((i for i, (a, b) in enumerate(zip(k, wanted, strict=False)) if a != b), None)
        for k in known
    ]
    best = max(
        (min(len(k), len(wanted)) if s is None else s for k, s in zip(known, shared, strict=True)),
        default=0,
    )
    assert length == best
    assert (block is None) == (best == 0)
    if block is not None:
        assert known[block][:length] == wanted[:length]


# --- that it is right ---------------------------------------------------------------------------


@pytest.mark.case("S23")
def test_blocks_with_one_hash_are_told_apart_by_their_tokens() -> None:
    cache = PrefixCache()
    root = cache.root(())
    # To a polynomial hash of base 31 these two are equal.
    first, second = pack([5, 40, 2, 3]), pack([5 + 1, 40 - 31, 2, 3])
    cache.insert(0, root, first, b"same")
    cache.insert(1, root, second, b"same")
    assert cache.find(b"same", root, first) == 0
    assert cache.find(b"same", root, second) is None
    assert cache.find(b"same", b"another beginning", first) is None
    cache.check()


@pytest.mark.case("S23")
def test_request_with_a_colliding_block_adopts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "hash_block", staticmethod(lambda parent, tokens: b"same"))
    driver = Driver.build(20, 4)
    serve(driver, [1, 2, 3, 4])
    other = Sequence(make_request([5, 6, 7, 0, 1]), 0, (0, 0, 0))
    twice = Sequence(make_request([1, 2, 3, 4, 1, 2, 3, 4, 1]), 0, (0, 0, 0))
    assert driver.blocks.match(other).num_tokens == 0
    assert driver.blocks.match(twice).num_tokens == 4


def test_equal_tokens_after_another_beginning_are_not_shared() -> None:
    driver = Driver.build(20, 4)
    serve(driver, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert serve(driver, [0, 1, 1, 1, 2, 2, 2, 2, 3]).num_cached_tokens == 0


@pytest.mark.case("V06")
@pytest.mark.case("S35")
def test_salts_separate_and_the_same_salt_shares() -> None:
    driver = Driver.build(40, 4)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    assert serve(driver, prompt).num_cached_tokens == 0
    for salt in ("a", "b"):
        assert serve(driver, prompt, salt=salt).num_cached_tokens == 0
    for salt in (None, "a", "b"):
        assert serve(driver, prompt, salt=salt).num_cached_tokens == 6


@pytest.mark.case("V06")
def test_no_two_lists_of_extra_keys_have_one_root() -> None:
    keys = [(), ("",), ("", ""), ("a", "b"), ("ab",), ("a\0b",), ("a', 'b",), ("\ud800",)]
    assert len({PrefixCache().root(key) for key in keys}) == len(keys)
    assert PrefixCache("a").root(("b",)) != PrefixCache("a\0b").root(())
    assert PrefixCache("a").root(()) != PrefixCache("b").root(())


def test_root_is_the_same_after_many_other_salts() -> None:
    cache = PrefixCache("f")
    root = cache.root(("mine",))
    for number in range(3000):
        cache.root((str(number),))
    assert cache.root(("mine",)) == root
    assert len(cache._roots) <= 1024


def test_hashes_are_the_same_in_every_process() -> None:
    program = (
        "from octavo.core.prefix import PrefixCache, pack\n"
        "cache = PrefixCache('model'); root = cache.root(('salt', 'adapter'))\n"
        "print(root.hex(), cache.hash_block(root, pack([1, 2, 3])).hex())"
    )
    printed = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = [sys.executable, "-c", program]
        printed.add(subprocess.run(run, env=environment, capture_output=True, check=True).stdout)
    assert len(printed) == 1
    assert len(printed.pop().split()) == 2


@pytest.mark.case("V03")
def test_prompt_logprobs_read_nothing_and_publish() -> None:
    driver = Driver.build(40, 4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 0, 1]
    for _ in range(2):
        sequence = serve(driver, prompt, prompt_logprobs=0)
        assert sequence.num_cached_tokens == 0
    assert serve(driver, prompt).num_cached_tokens == 8


@pytest.mark.case("V03")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_prompt_logprobs_compute_every_position_in_every_order(order: tuple[int, ...]) -> None:
    driver = Driver.build(40, 4)
    shared = [1, 2, 3, 4, 5, 6, 7]
    computed: dict[str, int] = {}
    for i in order:
        driver.add(make_request([*shared, i], request_id=str(i), prompt_logprobs=1))
    while len(driver.scheduler):
        for chunk in driver.step().chunks:
            key = chunk.sequence.request.request_id
            computed[key] = computed.get(key, 0) + chunk.length
    assert computed == {str(i): 8 for i in order}


def test_block_is_findable_only_after_it_is_computed() -> None:
    driver = Driver.build(20, 4)
    prompt = [1, 2, 3, 4, 5, 6]
    driver.add(make_request(prompt, request_id="first"))
    plan = driver.plan()
    assert driver.blocks.num_cached == 0
    driver.scheduler.commit(plan, driver.worker.run(plan, driver.scheduler.running))
    assert driver.blocks.num_cached == 2


def test_running_sequence_shares_its_full_blocks_with_a_newcomer() -> None:
    driver = Driver.build(20, 4)
    first = driver.add(make_request([1, 2, 3, 4, 5, 6], request_id="first", max_tokens=20))
    driver.step()
    second = driver.add(make_request([1, 2, 3, 4, 5, 6], request_id="second", max_tokens=20))
    driver.step()
    assert second.block_table[0] == first.block_table[0]
    assert second.num_cached_tokens == 4  # a block that is still written to is not offered
    driver.run_to_end()


@pytest.mark.case("S32")
def test_tokens_past_a_stop_are_not_findable() -> None:
    driver = Driver.build(20, 4)
    sequence = driver.add(make_request([1, 2, 3], max_tokens=9))
    for _ in range(4):
        driver.step()
    driver.scheduler.finish(sequence, FinishReason.STOP)  # the engine saw a stop string
    driver.check()
    kept = sequence.token_ids
    again = driver.add(make_request([*kept, 0, 0], request_id="again", max_tokens=3))
    driver.step()
    # The last token was drawn but never computed.
    assert again.num_cached_tokens == len(kept) - 1
    driver.scheduler.finish(again, FinishReason.ABORT)


def test_known_content_stays_where_it_was() -> None:
    cache = PrefixCache()
    root = cache.root(())
    packed = pack([1, 2])
    block_hash = cache.hash_block(root, packed)
    cache.insert(3, root, packed, block_hash)
    cache.insert(4, root, packed, block_hash)
    assert cache.find(block_hash, root, packed) == 3
    assert not cache.holds(4)
    assert not cache.remove(4)
    assert cache.remove(3)
    assert cache.find(block_hash, root, packed) is None
    assert len(cache) == 0
    cache.check()
