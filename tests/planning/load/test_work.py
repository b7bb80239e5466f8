"""Lengths, sharing and arrivals: the same settings give the same work."""

import math

import numpy as np
import pytest

from octavo.errors import BadRequestError, InvalidParameterError
from octavo.planning.load.traces import TraceLine
from octavo.planning.load.work import IdRange, Replay, Session, Shape, gamma_arrivals

IDS = IdRange(100, 1000)


def common(first: Session, second: Session) -> int:
    """How many tokens two sessions' first prompts share."""
    a, b = first.turns[0].tokens, second.turns[0].tokens
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if differ.size else length


# --- shapes -------------------------------------------------------------------------------------


def test_sessions_share_the_prefix_and_nothing_else() -> None:
    first, second, third = Shape(prompt_tokens=50, shared_prefix=40).sessions(3, IDS, seed=1)
    assert len(first.turns[0].tokens) == 90
    assert {common(first, second), common(second, third)} <= {40, 41, 42}
    assert np.array_equal(first.turns[0].tokens[:40], Shape(shared_prefix=40).prefix(IDS, 1))


def test_seed_decides_the_work_and_another_kind_shares_only_the_prefix() -> None:
    shape = Shape(prompt_tokens=50, shared_prefix=10)

    def tokens(seed: int, kind: int = 1) -> list[int]:
        (session,) = shape.sessions(1, IDS, seed, kind)
        return session.turns[0].tokens.tolist()

    assert tokens(1) == tokens(1) != tokens(2)
    assert tokens(1)[:10] == tokens(1, kind=5)[:10]
    assert tokens(1)[10:] != tokens(1, kind=5)[10:]


def test_turns_after_the_first_have_no_prefix_and_differ() -> None:
    (session,) = Shape(prompt_tokens=8, shared_prefix=4, turns=3).sessions(1, IDS, seed=0)
    assert [len(turn.tokens) for turn in session.turns] == [12, 8, 8]
    assert not np.array_equal(session.turns[1].tokens, session.turns[2].tokens)


def test_ids_stay_in_their_range() -> None:
    drawn = IdRange(5, 7).draw(1000, 0)
    assert set(drawn.tolist()) == {5, 6}


@pytest.mark.parametrize(("low", "high"), [(5, 5), (7, 5), (-1, 5), (0, 2**40)])
def test_ranges_without_ids_are_refused(low: int, high: int) -> None:
    with pytest.raises(InvalidParameterError, match="token_ids"):
        IdRange(low, high)


@pytest.mark.parametrize("name", ["prompt_tokens", "output_tokens", "turns"])
def test_lengths_below_one_are_refused(name: str) -> None:
    with pytest.raises(InvalidParameterError, match=name):
        Shape(**{name: 0})
    with pytest.raises(InvalidParameterError, match="shared_prefix"):
        Shape(shared_prefix=-1)


# --- arrivals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed_with_the_rates_mean(burstiness: float) -> None:
    gaps = np.diff(gamma_arrivals(40_000, 5.0, burstiness, seed=3))
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.05)
    # A gamma distribution of shape k has a standard deviation of its mean / sqrt(k).
    assert gaps.std() == pytest.approx(1 / 5 / math.sqrt(burstiness), rel=0.05)
    assert gaps.min() >= 0


def test_first_session_is_due_at_once_and_infinite_burstiness_is_even() -> None:
    assert gamma_arrivals(3, 2.0, math.inf, seed=0) == [0.0, 0.5, 1.0]
    assert gamma_arrivals(1, 2.0, 1.0, seed=0) == [0.0]
    assert gamma_arrivals(0, 2.0, 1.0, seed=0) == []
    assert gamma_arrivals(5, 2.0, 1.0, seed=0) == gamma_arrivals(5, 2.0, 1.0, seed=0)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_rates_that_are_none_are_refused(rate: float) -> None:
    with pytest.raises(InvalidParameterError, match="request_rate"):
        gamma_arrivals(2, rate, 1.0, seed=0)


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.nan])
def test_burstiness_must_be_above_zero(burstiness: float) -> None:
    with pytest.raises(InvalidParameterError, match="burstiness"):
        gamma_arrivals(2, 1.0, burstiness, seed=0)


# --- traces -------------------------------------------------------------------------------------

LINES = [
    TraceLine(0.0, 1500, 10, (0, 1, 2)),
    TraceLine(4.0, 1100, 20, (0, 1, 3)),
    TraceLine(6.0, 300, 30, (9,)),
]


def test_prompts_share_the_blocks_that_the_trace_says() -> None:
    sessions, num_left_out = Replay().sessions(LINES, IDS, seed=0)
    first, second, third = sessions
    assert num_left_out == 0
    assert [len(s.turns[0].tokens) for s in sessions] == [1500, 1100, 300]
    assert [s.turns[0].num_output_tokens for s in sessions] == [10, 20, 30]
    assert 1024 <= common(first, second) <= 1026
    assert common(first, third) <= 2


def test_scaled_lengths_keep_what_is_shared() -> None:
    sessions, _ = Replay(length_scale=1 / 16).sessions(LINES, IDS, seed=0)
    first, second, _ = sessions
    assert [len(s.turns[0].tokens) for s in sessions] == [94, 69, 19]
    assert 64 <= common(first, second) <= 66
    assert [s.turns[0].num_output_tokens for s in sessions] == [1, 2, 2]


def test_lines_without_hash_ids_share_nothing() -> None:
    lines = [TraceLine(float(i), 100, 1) for i in range(2)]
    first, second = Replay().sessions(lines, IDS, seed=0)[0]
    assert common(first, second) <= 2


def test_speed_moves_arrivals_and_long_lines_are_counted_not_cut() -> None:
    replay = Replay(speed=2.0, max_tokens=1200)
    sessions, num_left_out = replay.sessions(LINES, IDS, seed=0)
    assert num_left_out == 1
    assert [s.arrival for s in sessions] == [0.0, 1.0]


def test_limit_counts_the_lines_that_are_kept() -> None:
    sessions, num_left_out = Replay(max_tokens=1200, limit=1).sessions(LINES, IDS, seed=0)
    assert (len(sessions), num_left_out) == (1, 1)


def test_trace_whose_lines_are_all_too_long_is_an_error() -> None:
    with pytest.raises(BadRequestError, match="All 3 requests of the trace are longer than 5"):
        Replay(max_tokens=5).sessions(LINES, IDS, seed=0)


@pytest.mark.parametrize("name", ["speed", "length_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_speed_and_scale_are_above_zero(name: str, value: float) -> None:
    with pytest.raises(InvalidParameterError, match=f"trace_{name}"):
        Replay(**{name: value})
