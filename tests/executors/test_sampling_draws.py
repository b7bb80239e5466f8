"""The draw itself: its random numbers, the sums that it inverts, and chance."""

import itertools
import math

import numpy as np
import pytest

from octavo.executors.sampling import (
    SEGMENT,
    _draw,
    _exponentials,
    _mix,
    _sum,
    distribution,
    sample,
    uniform,
)
from tests.executors.rows import (
    INF,
    chi_square,
    chi_square_bound,
    draw,
    draws,
    floats,
    logits_of,
    make_row,
    softmax,
)


class TestUniform:
    def test_mixing_is_published_splitmix64(self):
        golden = 0x9E3779B97F4A7C15
        outputs = [_mix(1234567 + golden * i) for i in (1, 2, 3)]
        assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]

    @pytest.mark.case("V20")
    def test_values_are_the_same_on_every_platform_and_after_a_restart(self):
        assert [uniform(42, 0, 0), uniform(42, 1, 0), uniform(42, 0, 1), uniform(-1, 3, 9)] == [
            0.3869742762400409,
            0.03375472633327581,
            0.9213172250065323,
            0.3445982779273308,
        ]

    @pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1])
    def test_numbers_are_at_least_0_below_1_and_have_53_bits(self, seed):
        values = [uniform(seed, index, position) for index in range(4) for position in range(500)]
        assert all(0 <= u < 1 for u in values)
        assert all((u * 2**53).is_integer() for u in values)
        assert len(set(values)) == len(values)

    @pytest.mark.parametrize("varying", ["position", "index", "seed"])
    def test_uniform_along_each_number(self, varying):
        n, bins = 20_000, 100
        fixed = {"seed": 7, "index": 0, "position": 11}
        values = [uniform(**{**fixed, varying: i}) for i in range(n)]
        counts = np.histogram(values, bins=bins, range=(0, 1))[0]
        assert chi_square(counts, n / bins) < chi_square_bound(bins - 1)

    @pytest.mark.parametrize(
        "neighbour", [(7, 0, 1), (7, 1, 0), (8, 0, 0), (7 + 2**32, 0, 0), (7 - 2**63, 0, 0)]
    )
    def test_neighbours_in_position_index_and_seed_are_independent(self, neighbour):
        n, bins = 20_000, 10
        seed, index, ahead = neighbour
        first = [uniform(7, 0, p) for p in range(n)]
        second = [uniform(seed, index, p + ahead) for p in range(n)]
        counts = np.histogram2d(first, second, bins=bins, range=[[0, 1], [0, 1]])[0]
        assert chi_square(counts, n / bins**2) < chi_square_bound(bins**2 - 1)

    def test_swapping_the_numbers_changes_the_draw(self):
        assert len({uniform(*p) for p in itertools.permutations((1, 2, 3))}) == 6


class TestSums:
    """What makes the bits the same everywhere."""

    def test_exponentials_are_within_a_unit_in_the_last_place(self):
        x = np.concatenate([-np.logspace(-300, 2.85, 4001), np.linspace(-708, 0, 9001)])
        found = _exponentials(x)
        expected = np.array([math.exp(value) for value in x])
        np.testing.assert_array_max_ulp(found, expected, maxulp=1)

    def test_exponentials_end_in_exactly_1_and_0(self):
        found = _exponentials(np.array([0.0, -0.0, -1e-320, -708.0, -708.5, -1e300, -INF]))
        assert found[:3].tolist() == [1, 1, 1]
        assert 0 < found[3] < 1e-307
        assert found[4:].tolist() == [0, 0, 0]

    @pytest.mark.parametrize("count", [1, 31, 32, 33, 999, SEGMENT])
    def test_a_segment_is_added_lane_by_lane_in_order(self, count):
        weights = np.random.default_rng(count).random(count)
        lanes = [0.0] * 32
        for place, weight in enumerate(weights.tolist()):
            lanes[place % 32] += weight
        total = 0.0
        for lane in lanes:
            total += lane
        assert _sum(weights) == total


class TestGreedy:
    def test_takes_the_likeliest_and_of_ties_the_smallest_id(self):
        assert draw(floats(1, 3, 3, 2), make_row(temperature=0)) == 1

    def test_ignores_seed_and_filters(self):
        logits = logits_of(3)
        rows = [make_row(temperature=0, seed=s, top_p=0.5, top_k=9, min_p=0.1) for s in range(5)]
        assert {draw(logits, row) for row in rows} == {int(logits.argmax())}

    def test_tie_made_by_a_bias_takes_the_smallest_id(self):
        assert draw(floats(1, 3, 2), make_row(temperature=0, logit_bias={0: 2.0})) == 0

    def test_one_token_vocabulary(self):
        for temperature in (0, 1.0):
            assert draw(floats(-4), make_row(temperature=temperature, top_p=0.1, top_k=3)) == 0


class TestDraw:
    def test_is_the_first_id_whose_running_probability_exceeds_u(self):
        logits = logits_of(9, vocab=2 * SEGMENT + 100, scale=1.0)
        for settings in ({}, {"top_k": 50}, {"top_p": 0.7}, {"min_p": 0.2, "temperature": 2.0}):
            running = np.cumsum(distribution(logits, make_row(**settings)))
            for position in range(100):
                u = uniform(1, 0, position)
                expected = int(np.flatnonzero(running > u)[0])
                assert draw(logits, make_row(position=position, **settings)) == expected

    def test_frequencies_follow_the_distribution(self):
        logits, n = floats(2, 1, 0.5, 0, -1, 1.5, -0.3, 0.7), 10_000
        counts = np.bincount(draws(logits, n), minlength=8)
        assert chi_square(counts, n * softmax(logits)) < chi_square_bound(7)

    def test_frequencies_over_seeds_follow_the_distribution(self):
        logits, n = floats(2, 1, 0.5, 0), 5_000
        tokens = [draw(logits, make_row(seed=s, temperature=2.0)) for s in range(n)]
        expected = n * softmax(logits / 2)
        assert chi_square(np.bincount(tokens, minlength=4), expected) < chi_square_bound(3)

    @pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
    def test_weight_zero_is_never_drawn_however_rounding_falls(self, u):
        for num_alive in range(1, 60):
            values = np.full(2 * SEGMENT, -INF)
            values[100 : 100 + num_alive] = np.linspace(0, -1, num_alive)
            assert 100 <= _draw(values, 0.0, 1.0, u) < 100 + num_alive

    @pytest.mark.case("V19")
    @pytest.mark.case("S28")
    def test_a_request_draws_the_same_whatever_is_drawn_between(self):
        logits, row = logits_of(6), make_row(seed=42, temperature=0.8)
        alone = draw(logits, row)
        for seed in range(20):
            draw(logits, make_row(seed=seed))
            assert draw(logits, row) == alone

    @pytest.mark.case("V20")
    def test_samples_of_one_request_differ_and_repeat(self):
        logits = logits_of(8, scale=1.0)

        def answers():
            return [tuple(draws(logits, 20, seed=123, index=i, temperature=0.5)) for i in range(4)]

        assert len(set(answers())) == 4
        assert answers() == answers()

    @pytest.mark.case("V17")
    @pytest.mark.case("V44")
    def test_bits_depend_on_the_row_alone_not_on_its_place_in_memory(self):
        logits = logits_of(12, vocab=SEGMENT + 333)
        row = make_row(temperature=1.3, top_p=0.95, logprobs=20)
        expected = sample(logits, row)
        for offset in range(1, 17):
            batch = np.zeros(3 * len(logits) + offset, np.float32)
            batch[len(logits) + offset : 2 * len(logits) + offset] = logits
            assert sample(batch[len(logits) + offset : 2 * len(logits) + offset], row) == expected

    def test_the_logits_are_left_unchanged(self):
        logits = logits_of(1)
        before = logits.copy()
        settings = {"logit_bias": {3: 5.0}, "presence_penalty": 1.0, "allowed_token_ids": [3, 4]}
        sample(logits, make_row((1, 2), (3,), logprobs=3, stop_ids={5}, min_tokens=4, **settings))
        assert np.array_equal(logits, before)
