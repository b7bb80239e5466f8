"""Lives of requests: their parts add up, and say where the time went."""

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.blocks import BlockManager
from octavo.core.lookup import CacheMiss
from octavo.core.scheduler import Scheduler
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.engine.lives import Life, LifeRecorder, Part
from octavo.errors import OctavoError
from octavo.executors.simulated import VirtualClock
from octavo.request import StructuredOutputs
from tests.engines import FailingExecutor, InstantExecutor, drain, drawn, greedy, tiny, tokens

STEP, TICK = 0.25, 1 / 1024  # seconds of a step, and of each look at the clock


class SlowExecutor(InstantExecutor):
    """Computes nothing, and takes `STEP` seconds for it."""

    def __init__(self, clock: VirtualClock, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.clock = clock

    def submit(self, batch):
        self.clock.advance(STEP)
        return super().submit(batch)


class Watched:
    """An engine on a clock that advances by steps and whenever it is read."""

    def __init__(
        self, *, num_blocks: int = 64, max_kept: int = 1000, caching: bool = True, **settings
    ) -> None:
        self.clock = VirtualClock()
        executor = SlowExecutor(self.clock, num_blocks, 16)
        self.engine = Engine(
            executor=executor,
            scheduler=Scheduler(
                BlockManager(num_blocks, 16, enable_prefix_caching=caching), **settings
            ),
            intake=Intake(
                tokenizer=None,
                vocab_size=300,
                max_model_len=100_000,
                max_pool_tokens=num_blocks * 16,
                seed=0,
            ),
            decoder=None,
            clock=self.read,
            lives=LifeRecorder(max_kept),
        )

    def read(self) -> float:
        self.clock.advance(TICK)
        return self.clock.now

    def add(self, length: int = 20, max_tokens: int = 4, *, seed: int = 0, **params) -> str:
        return self.engine.add(tokens(length, seed), greedy(max_tokens, **params)).request_id

    def lives(self) -> dict[str, Life]:
        """Run to the end, and return the lives that ended."""
        drain(self.engine)
        return {life.request_id: life for life in self.engine.lives.take_ended()}

    def alone(self, *args, **kwargs) -> Life:
        request_id = self.add(*args, **kwargs)
        return self.lives()[request_id]


def part(life: Life, name: str, reason: str = "") -> Part:
    return next(p for p in life.parts if (p.name, p.reason) == (name, reason))


def names(life: Life) -> list[str]:
    return [p.name for p in life.parts]


def assert_adds_up(life: Life) -> None:
    assert sum(p.seconds for p in life.parts) == pytest.approx(life.until - life.arrival_time)
    assert all(p.seconds >= -1e-9 for p in life.parts), life.parts
    assert all(p.work.seconds == pytest.approx(p.seconds) for p in life.parts if p.work.num_steps)


# --- the parts ----------------------------------------------------------------------------------


def test_request_alone_is_a_prefill_and_decodes() -> None:
    life = Watched().alone(40, 5)
    prefill, decode = part(life, "prefill"), part(life, "decode")
    assert (prefill.work.num_steps, prefill.num_tokens, prefill.num_beside) == (1, 40, 0)
    assert (decode.work.num_steps, decode.work.num_chunks) == (4, 4)
    assert decode.seconds == pytest.approx(4 * STEP, rel=0.02)
    assert life.num_generated_tokens == 5
    assert life.finish_reason == "length"
    assert names(life) == ["queued", "prefill", "decode", "between"]
    assert_adds_up(life)


def test_long_prompt_is_cut_into_steps_beside_the_decodes_of_others() -> None:
    watched = Watched(max_num_batched_tokens=32, max_num_seqs=8)
    for seed in range(3):
        watched.add(8, 40, seed=seed)
    for _ in range(3):
        watched.engine.step()
    late = watched.add(80, 3, seed=9)
    life = watched.lives()[late]
    prefill = part(life, "prefill")
    assert prefill.work.num_steps == 3  # 29 tokens of each step's 32
    assert prefill.num_beside == 3 * 3
    assert prefill.num_tokens == 80
    assert part(life, "decode").work.num_chunks == 2 * 4
    assert_adds_up(life)


def test_prompt_whose_budget_others_use_sits_steps_out() -> None:
    watched = Watched(max_num_batched_tokens=16, max_num_seqs=16, max_chunk_tokens=7)
    watched.add(50, 1, seed=1)
    second = watched.add(50, 1, seed=2)
    watched.add(1, 5, seed=3, n=9)  # from the second step on, 9 of 16 tokens are theirs
    life = watched.lives()[second]
    assert part(life, "sat out").seconds == pytest.approx(4 * STEP, rel=0.02)
    assert part(life, "prefill").num_tokens == 50
    assert_adds_up(life)


def test_queue_says_why_and_for_how_long() -> None:
    watched = Watched(max_num_seqs=1)
    first, second = watched.add(20, 6, seed=1), watched.add(20, 2, seed=2)
    life = watched.lives()[second]
    seats = part(life, "queued", "max_num_seqs")
    assert seats.seconds == pytest.approx(6 * STEP, rel=0.1)
    assert first != second
    assert_adds_up(life)


def test_queue_for_blocks_says_so() -> None:
    watched = Watched(num_blocks=4)
    watched.add(40, 8, seed=1)
    second = watched.add(40, 2, seed=2)
    life = watched.lives()[second]
    assert part(life, "queued", "blocks").seconds > 6 * STEP
    assert_adds_up(life)


def test_lookup_is_told_with_the_age_of_what_it_found() -> None:
    watched = Watched()
    first = watched.alone(40, 2, seed=3)
    watched.clock.advance(12.0)
    life = watched.alone(40, 2, seed=3)
    assert life.cache is not None
    assert (life.cache.num_tokens, life.cache.miss) == (39, CacheMiss.NOTHING)
    assert life.admitted_at is not None
    assert life.cache.newest is not None
    assert 12 < life.admitted_at - life.cache.newest < 12 + 3 * STEP
    assert first.cache is not None
    assert first.cache.miss is CacheMiss.ENDS


def test_eviction_after_idle_time_is_as_old_as_it_is() -> None:
    watched = Watched(num_blocks=4)
    watched.alone(40, 2, seed=1)
    watched.clock.advance(1000.0)
    watched.alone(60, 2, seed=2)
    life = watched.alone(40, 2, seed=1)
    assert life.cache is not None
    assert life.cache.miss is CacheMiss.EVICTED
    assert life.admitted_at is not None
    assert life.cache.evicted_at is not None
    assert life.admitted_at - life.cache.evicted_at < 5 * STEP


def test_preempted_requests_say_what_was_computed_again() -> None:
    watched = Watched(num_blocks=6)
    ids = [watched.add(30, 40, seed=seed) for seed in range(3)]
    lives = watched.lives()
    counters = watched.engine.scheduler.counters
    assert sum(lives[i].num_preemptions for i in ids) == counters.num_preemptions > 0
    assert sum(lives[i].num_recomputed_tokens for i in ids) == counters.num_recomputed_tokens > 0
    preempted = next(life for life in lives.values() if life.num_recomputed_tokens)
    assert part(preempted, "recompute").seconds > 0
    assert sum(p.seconds for p in preempted.parts if p.name == "preempted") > STEP
    for life in lives.values():
        assert_adds_up(life)


def test_tokens_lost_twice_on_their_way_back_are_counted_as_often_as_computed() -> None:
    watched = Watched(
        num_blocks=8, max_num_batched_tokens=10, max_num_seqs=8, max_chunk_tokens=1, caching=False
    )
    for seed, (prompt, max_tokens) in enumerate([(11, 95), (20, 42), (39, 37)]):
        watched.add(prompt, max_tokens, seed=seed)
    lives = watched.lives().values()
    counters = watched.engine.scheduler.counters
    assert sum(life.num_recomputed_tokens for life in lives) == counters.num_recomputed_tokens
    generated = sum(life.num_generated_tokens for life in lives)
    needed = 11 + 20 + 39 + generated - len(lives)  # nobody computes the last token of an answer
    assert counters.num_computed_tokens == needed + counters.num_recomputed_tokens


def test_samples_of_one_prompt_share_one_life() -> None:
    life = Watched().alone(40, 5, n=3)
    assert life.num_generated_tokens == 15
    assert life.num_samples == 3
    assert part(life, "decode").work.num_chunks == 3 * 4
    assert part(life, "prefill").num_tokens == 40
    assert_adds_up(life)


def test_sample_that_ends_with_its_first_token_leaves_the_others_running() -> None:
    with tiny(block_size=16) as llm:
        request = llm.engine.add(tokens(20), drawn(6, n=3, seed=5))
        samples: dict[int, list[int]] = {}
        for delta in drain(llm.engine):
            samples.setdefault(delta.index, []).extend(delta.token_ids)
        stop = next(s[0] for s in samples.values() if sum(s[0] in o for o in samples.values()) == 1)
        llm.engine.lives.take_ended()
        params = drawn(6, n=3, seed=5, stop_token_ids=[stop])
        llm.engine.add(tokens(20), params)
        drain(llm.engine)
        (life,) = llm.engine.lives.take_ended()
    assert request.params.n == 3
    assert life.num_generated_tokens == 1 + 6 + 6
    assert "preempted" not in names(life)
    assert part(life, "decode").work.num_steps == 5
    assert_adds_up(life)


def test_aborted_request_has_a_life_to_its_abort() -> None:
    watched = Watched(max_num_seqs=1)
    runs, waits = watched.add(20, 50, seed=1), watched.add(20, 50, seed=2)
    for _ in range(5):
        watched.engine.step()
    for request_id in (runs, waits):
        watched.engine.abort(request_id)
    lives = watched.lives()
    assert [lives[i].finish_reason for i in (runs, waits)] == ["abort", "abort"]
    assert lives[waits].admitted_at is None
    assert lives[waits].cache is None
    assert names(lives[waits]) == ["queued"] or set(names(lives[waits])) == {"queued"}
    for life in lives.values():
        assert_adds_up(life)


def test_failed_step_ends_a_life_that_still_adds_up() -> None:
    watched = Watched()
    watched.engine.executor = FailingExecutor(watched.engine.executor, {3}, OctavoError("broken"))
    life = watched.alone(40, 9)
    assert life.finish_reason == "error"
    assert part(life, "decode").work.num_steps == 1
    assert_adds_up(life)


def test_life_so_far_is_that_of_a_request_that_runs() -> None:
    watched = Watched()
    request_id = watched.add(20, 50)
    for _ in range(4):
        watched.engine.step()
    life = watched.engine.life_of(request_id)
    assert life is not None
    assert life.finish_reason is None
    assert life.num_generated_tokens == 4
    assert part(life, "decode").work.num_steps == 3
    assert_adds_up(life)
    again = watched.engine.life_of(request_id)
    assert again is not None
    assert part(again, "decode") == part(life, "decode"), "asking changes nothing"


def test_structured_output_waits_for_its_grammar_and_its_masks() -> None:
    wanted = StructuredOutputs(regex="[a-z]{30}")
    with tiny(block_size=16) as llm:
        llm.engine.add("Say", drawn(40, structured_outputs=wanted, ignore_eos=False))
        drain(llm.engine)
        (life,) = llm.engine.lives.take_ended()
    assert names(life)[0] == "grammar"
    assert part(life, "grammar").seconds > 0
    assert part(life, "decode").work.num_steps > 0
    assert_adds_up(life)


@pytest.mark.parametrize("has_company", [False, True])
def test_mask_that_is_late_holds_up_its_own_request(has_company: bool) -> None:
    """Nobody is left to compute masks: the request is held, and its company goes on."""
    wanted = StructuredOutputs(regex="[a-z]{30}")
    gate = threading.Event()
    with tiny(block_size=16) as llm:
        engine = llm.engine
        if has_company:
            company = engine.add(tokens(20), greedy(100)).request_id
        held = engine.add("Say", drawn(40, structured_outputs=wanted, ignore_eos=False)).request_id
        while not any(d.request_id == held and d.token_ids for d in engine.step()):
            pass
        for _ in range(2):
            engine._constraints._threads.submit(gate.wait)
        for _ in range(5):
            engine.step()
        gate.set()
        drain(engine)
        lives = {life.request_id: life for life in engine.lives.take_ended()}
    assert part(lives[held], "mask").seconds > 0
    assert_adds_up(lives[held])
    if has_company:
        assert "mask" not in names(lives[company])
        assert_adds_up(lives[company])


# --- how many are kept --------------------------------------------------------------------------


def test_recorder_that_is_off_keeps_nothing_but_totals() -> None:
    watched = Watched(max_kept=0)
    request_id = watched.add(20, 4)
    assert watched.engine.life_of(request_id) is None
    assert watched.lives() == {}
    assert watched.engine.lives.total.num_steps == 4
    assert watched.engine.stats().all_steps.num_steps == 4


def test_only_so_many_ended_lives_wait_to_be_taken() -> None:
    watched = Watched(max_kept=3)
    ids = [watched.add(20, 1, seed=seed) for seed in range(8)]
    assert list(watched.lives()) == ids[-3:]


def test_unknown_request_has_no_life() -> None:
    assert Watched().engine.life_of("none") is None


# --- any load -----------------------------------------------------------------------------------


@st.composite
def loads(draw) -> list[tuple[int, int, int, int]]:
    """Requests as (steps before it, prompt, tokens, samples)."""
    request = st.tuples(
        st.integers(0, 3), st.integers(1, 60), st.integers(1, 20), st.sampled_from([1, 1, 2, 3])
    )
    return draw(st.lists(request, min_size=1, max_size=10))


@given(load=loads(), aborts=st.sets(st.integers(0, 9)), num_blocks=st.integers(15, 30))
@settings(max_examples=60, deadline=None)
def test_parts_add_up_whatever_the_load(load, aborts, num_blocks) -> None:
    watched = Watched(
        num_blocks=num_blocks, max_num_batched_tokens=32, max_num_seqs=6, max_chunk_tokens=24
    )
    ids = list(_run(watched, load, aborts))
    lives = watched.lives()
    assert sorted(lives) == sorted(ids)
    for life in lives.values():
        assert_adds_up(life)
    recomputed = sum(life.num_recomputed_tokens for life in lives.values())
    if not aborts:
        assert recomputed == watched.engine.scheduler.counters.num_recomputed_tokens
    recorder = watched.engine.lives
    assert not recorder._open
    assert not recorder._filling, "a sequence that has ended is kept"


def _run(watched, load, aborts) -> Iterator[str]:
    for number, (steps, prompt, max_tokens, n) in enumerate(load):
        for _ in range(steps):
            watched.engine.step()
        request_id = watched.add(prompt, max_tokens, seed=number % 4, n=n)
        yield request_id
        if number in aborts:
            watched.engine.step()
            watched.engine.abort(request_id)
