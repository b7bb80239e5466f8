"""The closed loop on a clock that ticks once per step, so that every figure is known."""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from octavo.engine.engine import Engine
from octavo.errors import BadRequestError, InvalidParameterError, OctavoError, SettingError
from octavo.executors.executor import Batch, StepResult
from octavo.planning.throughput import Load, Run, Spread, percentile, run_load, run_loads
from tests.engines import FailingExecutor, InstantExecutor, assert_idle, tiny

BLOCK = 32


class TickingExecutor(InstantExecutor):
    """Computes nothing, a second per step; keeps how many sequences each step had."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK)
        self.seconds = 0.0
        self.num_chunks: list[int] = []

    def submit(self, batch: Batch) -> Future[StepResult]:
        self.seconds += 1
        self.num_chunks.append(len(batch.chunk_starts) - 1)
        return super().submit(batch)


def make_engine(**settings: Any) -> tuple[Engine, TickingExecutor]:
    with tiny(**settings) as llm:
        parts = llm.engine
        executor = TickingExecutor(parts.executor.num_blocks)
        engine = Engine(
            executor=executor,  # type: ignore[arg-type]
            scheduler=parts.scheduler,
            intake=parts.intake,
            decoder=parts.decoder,
            clock=lambda: executor.seconds,
        )
    return engine, executor


@pytest.fixture
def engine() -> Iterator[Engine]:
    made, _ = make_engine()
    yield made
    assert_idle(made)


def load(streams: int = 1, **fields: Any) -> Load:
    return Load(streams=streams, **{"prompt_tokens": 8, "output_tokens": 5, **fields})


# --- the loop -----------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 3])
def test_figures_follow_from_the_steps(engine: Engine, streams: int) -> None:
    run = run_load(engine, load(streams, num_requests=4 * streams), seed=1)
    # Each request takes one step for its prompt and first token, and four for the others.
    assert run.seconds == 4 * 5
    assert run.num_output_tokens == 4 * streams * 5
    assert run.num_prompt_tokens == 4 * streams * 8
    assert run.output_rate == streams
    assert run.prompt_rate == streams * 8 / 5
    assert run.ttft == (1.0,) * 4 * streams
    assert run.tpot == (1.0,) * 4 * streams
    assert run.num_preemptions == 0


def test_streams_stay_full_until_no_prompt_is_left() -> None:
    engine, executor = make_engine()
    run_load(engine, load(3, num_requests=7, output_tokens=4), seed=1)
    measured = executor.num_chunks[4:]  # the warm-up's answer has four tokens too
    assert measured == [3] * 8 + [1] * 4


def test_request_beyond_the_token_budget_waits_for_its_first_token() -> None:
    engine, _ = make_engine(max_num_batched_tokens=64, max_num_seqs=64)
    run = run_load(engine, load(2, prompt_tokens=64, num_requests=2), seed=1)
    # A step takes one prompt, and the next only 63 tokens beside the first one's second token.
    assert run.ttft == (1.0, 3.0)


def test_answer_of_one_token_has_no_time_per_token(engine: Engine) -> None:
    run = run_load(engine, load(output_tokens=1), seed=1)
    assert run.tpot == ()
    assert len(run.ttft) == 8


def test_preemptions_are_counted() -> None:
    engine, _ = make_engine(num_gpu_blocks_override=4)
    run = run_load(engine, load(4, prompt_tokens=BLOCK - 2, output_tokens=40), seed=1)
    assert run.num_preemptions > 0


def test_shared_prefix_is_computed_once(engine: Engine) -> None:
    run = run_load(engine, load(2, shared_prefix=3 * BLOCK, num_requests=6), seed=1)
    assert engine.stats().num_reused_tokens == 6 * 3 * BLOCK
    assert run.num_prompt_tokens == 6 * (3 * BLOCK + 8)


def test_nothing_is_carried_from_one_run_to_the_next(engine: Engine) -> None:
    # One and two streams make as many requests.
    rows = [load(streams, prompt_tokens=3 * BLOCK, output_tokens=1) for streams in (1, 2, 1)]
    run_loads(engine, rows, repeats=2)
    # Of 300 ids some prompts happen to share the first; a carried prompt has three blocks.
    assert engine.stats().num_reused_tokens < BLOCK


def test_repeats_are_interleaved(engine: Engine) -> None:
    told: list[tuple[int, int]] = []

    def tell(repeat: int, row: Load, run: Run) -> None:
        assert run.num_output_tokens == row.count * 5
        told.append((repeat, row.streams))

    runs = run_loads(engine, [load(1), load(2)], 2, tell)
    assert told == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [len(row) for row in runs] == [2, 2]


def test_failure_of_a_request_is_raised() -> None:
    engine, executor = make_engine()
    engine.executor = FailingExecutor(executor, {7}, OctavoError("broken"))  # type: ignore[assignment]
    with pytest.raises(OctavoError, match="broken"):
        run_load(engine, load(), seed=1)


# --- the work -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("streams", "expected"), [(1, 8), (2, 8), (3, 9), (64, 192)])
def test_three_requests_per_stream_and_at_least_eight(streams: int, expected: int) -> None:
    assert load(streams).count == expected


@pytest.mark.parametrize(("vocab_size", "low", "high"), [(300, 0, 300), (49_152, 1000, 40_000)])
def test_prompts_are_distinct_ids_of_the_vocabulary(vocab_size: int, low: int, high: int) -> None:
    shared, prompts = load(shared_prefix=40).prompts(20, vocab_size, seed=1)
    assert all(prompt[:40] == shared and len(prompt) == 48 for prompt in prompts)
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 20
    assert all(low <= token < high for prompt in prompts for token in prompt)


def test_same_seed_same_prompts() -> None:
    first, again, other = (load(shared_prefix=5).prompts(3, 300, seed) for seed in (1, 1, 2))
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"streams": 0}, "streams must be at least 1, not 0"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"output_tokens": 0}, "output_tokens"),
        ({"shared_prefix": -1}, "shared_prefix must be at least 0, not -1"),
        ({"streams": 3, "num_requests": 2}, "requests must be at least one for each of 3"),
    ],
)
def test_impossible_load_is_refused(fields: dict[str, int], words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words):
        load(**fields)


def test_more_streams_than_may_run_are_refused_before_any_run() -> None:
    engine, executor = make_engine(max_num_seqs=2)
    with pytest.raises(SettingError, match=r"3 streams .* max_num_seqs is 2"):
        run_loads(engine, [load(1), load(3)], 1)
    assert executor.num_chunks == []


def test_requests_longer_than_the_model_holds_are_refused_before_any_run() -> None:
    engine, executor = make_engine()
    with pytest.raises(BadRequestError, match=r"1,025 tokens .* 1,024"):
        run_loads(engine, [load(), load(prompt_tokens=1000, shared_prefix=20)], 1)
    assert executor.num_chunks == []
    run_loads(engine, [load(prompt_tokens=1000, shared_prefix=19, num_requests=1)], 1)


# --- figures ------------------------------------------------------------------------------------


def test_percentiles_are_interpolated() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)
    assert percentile([3.0], 95) == 3.0


def test_spread_is_the_median_and_both_ends() -> None:
    assert Spread.of(iter([5.0, 1.0, 2.0])) == Spread(2.0, 1.0, 5.0)
