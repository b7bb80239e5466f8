"""The synchronous heart: endings, failures, order and figures, on a tiny model."""

import gc
import random
import tracemalloc

import pytest

from octavo.core.blocks import BlockManager
from octavo.core.scheduler import Scheduler
from octavo.engine.clock import monotonic
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.errors import (
    BadRequestError,
    InvalidParameterError,
    OctavoError,
    PoolTooSmallError,
)
from tests.engines import (
    FailingExecutor,
    InstantExecutor,
    assert_idle,
    drain,
    drawn,
    greedy,
    only,
    tiny,
    tokens,
)


@pytest.fixture
def llm():
    with tiny(block_size=16) as llm:
        yield llm


@pytest.fixture
def engine(llm):
    return llm.engine


def endings(deltas, request_id):
    """The finish reason of each sequence of a request; there must be one last delta, the last."""
    own = [delta for delta in deltas if delta.request_id == request_id]
    assert [delta.is_last for delta in own] == [False] * (len(own) - 1) + [True]
    reasons = {}
    for delta in own:
        assert delta.index not in reasons, "a sequence spoke after its end"
        if delta.finish_reason is not None:
            reasons[delta.index] = delta.finish_reason
    return [reasons[index] for index in sorted(reasons)]


def sampled(engine, prompt, params):
    """The tokens of each sample of one request."""
    request = engine.add(prompt, params)
    samples = [[] for _ in range(request.params.n)]
    for delta in drain(engine):
        samples[delta.index] += delta.token_ids
    return samples


def virtual_clock():
    """A clock that advances by a second each time it is read."""
    ticks = iter(range(10**9))
    return lambda: float(next(ticks))


def instant_engine(*, num_blocks=64, block_size=16, **settings):
    """An engine that schedules for real and computes nothing."""
    executor = InstantExecutor(num_blocks, block_size)
    return Engine(
        executor=executor,
        scheduler=Scheduler(BlockManager(num_blocks, block_size), **settings),
        intake=Intake(
            tokenizer=None,
            vocab_size=300,
            max_model_len=100_000,
            max_pool_tokens=num_blocks * block_size,
            seed=0,
        ),
        decoder=None,
        clock=virtual_clock(),
    )


class TestEndings:
    @pytest.mark.parametrize("n", [1, 3])
    def test_a_request_that_runs_out_ends_each_sequence_once(self, engine, n):
        request = engine.add(tokens(20), drawn(5, n=n))
        deltas = drain(engine)
        assert endings(deltas, request.request_id) == ["length"] * n
        assert sum(len(delta.token_ids) for delta in deltas) == 5 * n
        assert_idle(engine)

    @pytest.mark.parametrize("n", [1, 3])
    @pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
    def test_an_abort_before_during_or_after_the_fork_ends_each_sequence_once(self, n, num_steps):
        # Three steps for the prompt: the fork comes with the third.
        with tiny(block_size=16, long_prefill_token_threshold=16) as llm:
            engine = llm.engine
            only(llm, tokens(8), greedy(1))
            request = engine.add(tokens(40), drawn(20, n=n))
            deltas = [delta for _ in range(num_steps) for delta in engine.step()]
            engine.abort(request.request_id)
            engine.abort(request.request_id)
            assert engine.stats().num_used_blocks == 0
            deltas += engine.step()
            assert len({delta.num_cached_tokens for delta in deltas}) == 1
            assert endings(deltas, request.request_id) == ["abort"] * n
            assert_idle(engine)

    def test_an_abort_leaves_the_samples_that_had_ended_as_they_were(self, engine):
        """One of two samples stops at a token of its own, before the other is aborted."""
        first, second = sampled(engine, tokens(20), drawn(6, n=2, seed=5))
        stop = next(token for token in first if token not in second)
        request = engine.add(tokens(20), drawn(50, n=2, seed=5, stop_token_ids=[stop]))
        deltas = [delta for _ in range(8) for delta in engine.step()]
        engine.abort(request.request_id)
        deltas += engine.step()
        assert endings(deltas, request.request_id) == ["stop", "abort"]
        assert_idle(engine)

    def test_an_abort_while_waiting_leaves_the_others_alone(self):
        with tiny(max_num_seqs=1) as llm:
            engine = llm.engine
            runs = engine.add(tokens(20), greedy(4))
            waits = engine.add(tokens(30, 1), greedy(4))
            deltas = engine.step()
            assert dict(engine.stats().waiting) == {"max_num_seqs": 1}
            engine.abort(waits.request_id)
            deltas += drain(engine)
            assert endings(deltas, runs.request_id) == ["length"]
            assert endings(deltas, waits.request_id) == ["abort"]
            assert [d.token_ids for d in deltas if d.request_id == waits.request_id] == [[]]
            assert_idle(engine)

    def test_an_abort_while_preempted_ends_the_request(self):
        with tiny(block_size=16, num_gpu_blocks_override=6) as llm:
            engine = llm.engine
            requests = [engine.add(tokens(30, seed), greedy(40)) for seed in range(2)]
            deltas = []
            while not engine.stats().num_preemptions:
                deltas += engine.step()
            assert engine.stats().waiting["preempted"] == 1
            engine.abort(requests[1].request_id)
            deltas += drain(engine)
            assert [endings(deltas, r.request_id) for r in requests] == [["length"], ["abort"]]
            assert deltas[-1].metrics.num_preemptions == 0
            assert_idle(engine)

    def test_an_abort_of_an_unknown_or_finished_request_is_ignored(self, engine):
        request = engine.add(tokens(5), greedy(1))
        drain(engine)
        engine.abort(request.request_id)
        engine.abort("never heard of")
        assert engine.step() == []

    @pytest.mark.case("S57")
    def test_500_random_aborts_in_a_small_pool_give_every_block_back(self):
        choose = random.Random(57)
        engine = instant_engine(num_blocks=40, block_size=8, max_num_seqs=16)
        ids, deltas = [], []
        for number in range(500):
            prompt = tokens(choose.randint(1, 120), number % 7)
            params = drawn(choose.randint(1, 60), n=choose.choice([1, 1, 2, 4]))
            ids.append(engine.add(prompt, params).request_id)
            for _ in range(choose.randint(0, 3)):
                deltas += engine.step()
                engine.scheduler.check()
            engine.abort(choose.choice(ids[-20:]))
        deltas += drain(engine)
        own = {request_id: [] for request_id in ids}
        for delta in deltas:
            own[delta.request_id].append(delta)
        reasons = [r for request_id in ids for r in endings(own[request_id], request_id)]
        assert set(reasons) == {"abort", "length"}
        assert engine.stats().num_preemptions > 0
        assert_idle(engine)

    def test_a_request_id_in_use_is_refused_and_free_again_afterwards(self, engine):
        engine.add(tokens(5), greedy(1), request_id="mine")
        with pytest.raises(InvalidParameterError, match="request_id"):
            engine.add(tokens(5), greedy(1), request_id="mine")
        assert endings(drain(engine), "mine") == ["length"]
        engine.add(tokens(5), greedy(1), request_id="mine")
        assert endings(drain(engine), "mine") == ["length"]

    def test_a_refused_request_leaves_nothing_behind(self, engine):
        with pytest.raises(PoolTooSmallError):
            instant_engine(num_blocks=2).add(tokens(20), drawn(50))
        with pytest.raises(InvalidParameterError, match="n must be at most max_num_seqs"):
            engine.add(tokens(5), drawn(n=65))
        assert_idle(engine)

    def test_a_step_of_an_idle_engine_does_nothing(self, engine):
        assert engine.step() == []
        assert engine.stats().step == 0

    def test_closing_aborts_what_runs_once_and_refuses_what_comes(self):
        engine = tiny().engine
        request = engine.add(tokens(5), greedy(20))
        engine.step()
        engine.close()
        engine.close()
        assert endings(engine.step(), request.request_id) == ["abort"]
        with pytest.raises(OctavoError, match="closed"):
            engine.add(tokens(5), greedy(1))


class TestFailedSteps:
    @pytest.mark.parametrize("at", [1, 2, 5])
    def test_each_request_in_a_failed_step_ends_with_the_error_and_later_ones_run(
        self, llm, engine, at
    ):
        expected = only(llm, tokens(20), greedy(6))
        error = RuntimeError("the device fell off")
        engine.executor = FailingExecutor(engine.executor, {at}, error)
        family = engine.add(tokens(20, 1), drawn(9, n=3))
        single = engine.add(tokens(20, 2), greedy(9))
        deltas = drain(engine)
        assert endings(deltas, family.request_id) == ["error"] * 3
        assert endings(deltas, single.request_id) == ["error"]
        assert all(delta.error is error for delta in deltas if delta.finish_reason)
        assert_idle(engine)
        assert only(llm, tokens(20), greedy(6)) == expected

    def test_requests_that_were_not_in_the_failed_step_are_undisturbed(self):
        with tiny(max_num_seqs=2) as llm:
            engine = llm.engine
            expected = [only(llm, tokens(20, seed), greedy(6)).token_ids for seed in range(4)]
            engine.executor = FailingExecutor(engine.executor, {3}, RuntimeError("lost"))
            outputs = llm.generate([tokens(20, seed) for seed in range(4)], greedy(6))
            assert [o.outputs[0].finish_reason for o in outputs] == ["error"] * 2 + ["length"] * 2
            assert [o.outputs[0].token_ids for o in outputs[2:]] == expected[2:]
            assert_idle(engine)

    @pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
    def test_a_block_copy_that_a_failed_step_did_not_make_is_never_found(self, llm, engine, error):
        """The second prompt adopts a part of the first one's block by a copy, which then fails."""
        first, second = tokens(40), tokens(40)
        second["prompt_token_ids"][36:] = [1, 2, 3, 4]
        with tiny(block_size=16, enable_prefix_caching=False) as other:
            expected = only(other, second, greedy(logprobs=3))
        only(llm, first, greedy(1))
        real = engine.executor
        engine.executor = FailingExecutor(real, {1}, error)
        engine.add(second, greedy())
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert endings(drain(engine), "1") == ["error"]
        engine.executor = real
        assert only(llm, second, greedy(logprobs=3)) == expected

    @pytest.mark.parametrize("at", [1, 3])
    def test_an_interrupted_step_reaches_the_caller_and_ends_its_requests(self, llm, engine, at):
        engine.executor = FailingExecutor(engine.executor, {at}, KeyboardInterrupt())
        request = engine.add(tokens(20), drawn(n=2))
        deltas = [delta for _ in range(at - 1) for delta in engine.step()]
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        deltas += drain(engine)
        assert endings(deltas, request.request_id) == ["error"] * 2
        assert isinstance(deltas[-1].error, OctavoError)
        assert_idle(engine)
        assert only(llm, tokens(5), greedy(3)).finish_reason == "length"


class TestOrder:
    def test_the_priority_policy_runs_lower_numbers_first(self):
        with tiny(max_num_seqs=1, scheduling_policy="priority") as llm:
            for name, priority in (("last", 5), ("first", -5), ("second", 0), ("third", 0)):
                llm.engine.add(tokens(5), greedy(2), request_id=name, priority=priority)
            order = [delta.request_id for delta in drain(llm.engine) if delta.is_last]
        assert order == ["first", "second", "third", "last"]

    def test_first_come_first_served_does_not_look_at_the_priority(self):
        with tiny(max_num_seqs=1) as llm:
            for name, priority in (("first", 5), ("second", -5)):
                llm.engine.add(tokens(5), greedy(2), request_id=name, priority=priority)
            order = [delta.request_id for delta in drain(llm.engine) if delta.is_last]
        assert order == ["first", "second"]

    @pytest.mark.case("S60")
    def test_a_long_prompt_and_a_stream_both_advance_in_every_step(self):
        with tiny(max_num_seqs=8, max_num_batched_tokens=32) as llm:
            engine = llm.engine
            stream = engine.add(tokens(5), greedy(100))
            engine.step()
            long = engine.add(tokens(600, 1), greedy(1))
            computed = engine.stats().num_computed_tokens
            is_done = False
            while not is_done:
                deltas = engine.step()
                assert [d.request_id for d in deltas].count(stream.request_id) == 1
                step = engine.stats().num_computed_tokens - computed
                computed += step
                assert 2 <= step <= 32
                is_done = any(d.request_id == long.request_id and d.is_last for d in deltas)
            assert engine.stats().step <= 2 + 600 // 31 + 1

    @pytest.mark.case("V12")
    @pytest.mark.case("V53")
    def test_crowded_requests_finish_with_few_preemptions_each_and_the_oldest_first(self):
        engine = instant_engine(num_blocks=6 * 8, block_size=16, max_num_seqs=16)
        ids = [engine.add(tokens(64, i), drawn(64)).request_id for i in range(16)]
        deltas = drain(engine)
        last = {d.request_id: d.metrics for d in deltas if d.is_last}
        assert [endings(deltas, request_id) for request_id in ids] == [["length"]] * 16
        assert max(metrics.num_preemptions for metrics in last.values()) <= 3
        assert sum(m.num_preemptions for m in last.values()) == engine.stats().num_preemptions > 0
        assert next(iter(last)) == ids[0]
        assert_idle(engine)


class TestFigures:
    def test_times_of_a_request_are_in_order_and_on_the_engines_clock(self):
        engine = instant_engine()
        engine.add(tokens(20), drawn(3))
        metrics = drain(engine)[-1].metrics
        times = [
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.finished_time,
        ]
        assert times == sorted(set(times))

    @pytest.mark.case("V55")
    def test_as_many_first_token_times_as_requests_that_produced_a_token(self):
        """100 requests, some of two samples, some aborted before or after their first token."""
        engine = instant_engine(num_blocks=200, max_num_seqs=8)
        kinds = {}
        for number in range(100):
            request = engine.add(tokens(20, number), drawn(5, n=1 + number % 2))
            kinds[request.request_id] = number % 4
        for request_id, kind in kinds.items():
            if kind == 3:
                engine.abort(request_id)
        deltas = []
        while engine.has_unfinished:
            step = engine.step()
            deltas += step
            for delta in step:
                if kinds[delta.request_id] == 2:
                    engine.abort(delta.request_id)
        spoke = {delta.request_id for delta in deltas if delta.token_ids}
        last = {delta.request_id: delta.metrics for delta in deltas if delta.is_last}
        assert len(last) == 100
        assert {i for i, m in last.items() if m.first_token_time is not None} == spoke
        assert spoke == {i for i, kind in kinds.items() if kind != 3}
        for metrics in last.values():
            if metrics.first_token_time is not None:
                queue = metrics.first_scheduled_time - metrics.arrival_time
                prefill = metrics.first_token_time - metrics.first_scheduled_time
                decode = metrics.finished_time - metrics.first_token_time
                assert min(queue, prefill, decode) >= 0
                assert queue + prefill + decode == metrics.finished_time - metrics.arrival_time
        assert_idle(engine)

    def test_a_snapshot_counts_running_waiting_blocks_slots_and_tokens(self):
        with tiny(block_size=16, max_num_seqs=2) as llm:
            engine = llm.engine
            for seed in range(3):
                engine.add(tokens(20, seed), greedy(4))
            engine.step()
            stats = engine.stats()
            assert (stats.step, stats.num_running, stats.num_waiting) == (1, 2, 1)
            assert dict(stats.waiting) == {"max_num_seqs": 1}
            assert (stats.num_used_blocks, stats.num_free_blocks) == (4, 124)
            assert stats.kv_cache_usage == 4 / 128
            assert (stats.num_empty_slots, stats.waste) == (2 * 12, 24 / 64)
            assert (stats.num_cached_blocks, stats.num_shared_blocks) == (2, 0)
            assert (stats.num_prompt_tokens, stats.num_computed_tokens) == (40, 40)
            assert (stats.num_generated_tokens, stats.num_reused_tokens) == (2, 0)
            assert stats.step_time > 0
            drain(engine)
            stats = engine.stats()
            assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (60, 12)
            assert (stats.kv_cache_usage, stats.waste, stats.num_preemptions) == (0, 0, 0)

    def test_forked_samples_share_blocks_and_copy_the_one_they_write(self):
        with tiny(block_size=16) as llm:
            engine = llm.engine
            engine.add(tokens(20), drawn(4, n=3))
            engine.step()
            stats = engine.stats()
            assert (stats.num_running, stats.num_shared_blocks, stats.num_used_blocks) == (3, 2, 2)
            engine.step()
            stats = engine.stats()
            assert (stats.num_shared_blocks, stats.num_used_blocks) == (1, 4)
            drain(engine)
            assert engine.scheduler.counters.num_forks == 2
            assert_idle(engine)

    @pytest.mark.case("V11")
    def test_recomputing_a_preempted_request_is_no_cache_hit(self):
        engine = instant_engine(num_blocks=24, block_size=16, max_num_seqs=16)
        requests = [engine.add(tokens(60, seed), drawn(60)) for seed in range(12)]
        deltas = drain(engine)
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert (stats.num_reused_tokens, stats.num_prompt_tokens) == (0, 12 * 60)
        assert {delta.num_cached_tokens for delta in deltas} == {0}
        assert len(requests) == sum(delta.is_last for delta in deltas)

    @pytest.mark.case("V14")
    def test_thousands_of_short_requests_leave_no_memory_behind(self):
        engine = instant_engine(num_blocks=64, block_size=16)

        def serve(first):
            for number in range(first, first + 200):
                prompt = {**tokens(450, number), "cache_salt": f"caller {number % 5}"}
                engine.add(prompt, drawn(1))
                drain(engine)
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            warm = serve(0)
            # One list of 450 ids takes 3,600 bytes.
            assert serve(200) - warm < 200 * 50
        finally:
            tracemalloc.stop()


# --- quiet requests -----------------------------------------------------------------------------


def test_a_quiet_request_brings_all_its_tokens_at_its_end(engine):
    prompt, params = tokens(20), greedy(6, detokenize=False)
    (spoken,) = sampled(engine, prompt, params)
    request = engine.add(prompt, params, is_quiet=True)
    assert engine.step() == []
    after_first = monotonic()
    (delta,) = drain(engine)
    assert (delta.request_id, delta.token_ids, delta.is_last) == (request.request_id, spoken, True)
    assert delta.finish_reason == "length"
    metrics = delta.metrics
    assert metrics.first_scheduled_time <= metrics.first_token_time <= after_first
    assert metrics.finished_time > after_first
    assert_idle(engine)


def test_each_sample_of_a_quiet_request_ends_with_its_own_tokens(engine):
    prompt, params = tokens(20), drawn(5, n=3, seed=1, detokenize=False)
    expected = sampled(engine, prompt, params)
    request = engine.add(prompt, params, is_quiet=True)
    deltas = drain(engine)
    assert endings(deltas, request.request_id) == ["length"] * 3
    assert [delta.token_ids for delta in sorted(deltas, key=lambda d: d.index)] == expected


def test_an_aborted_quiet_request_brings_what_it_has(engine):
    request = engine.add(tokens(20), greedy(50, detokenize=False), is_quiet=True)
    assert [engine.step() for _ in range(4)] == [[]] * 4
    engine.abort(request.request_id)
    (delta,) = drain(engine)
    assert (delta.finish_reason, len(delta.token_ids)) == ("abort", 4)
    assert_idle(engine)


@pytest.mark.parametrize(
    "params",
    [{}, {"detokenize": False, "logprobs": 1}, {"detokenize": False, "prompt_logprobs": 0}],
)
def test_what_wants_something_of_each_token_cannot_be_quiet(engine, params):
    with pytest.raises(BadRequestError, match="quiet request has no text"):
        engine.add(tokens(20), greedy(5, **params), is_quiet=True)
    assert_idle(engine)
