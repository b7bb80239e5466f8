"""The sampler against Hugging Face's processors, against float64 formulas, and against chance.

Statistical tests draw with fixed seeds, so they pass or fail for good. Their bounds are the 1e-6
quantiles of the chi-square distribution (Wilson and Hilferty's approximation).
"""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from octavo.errors import OctavoError
from octavo.executors.executor import PromptRow, SampleRow
from octavo.executors.sampling import (
    SEGMENT,
    _draw,
    _exponentials,
    _mix,
    _sum,
    distribution,
    prompt_logprobs,
    sample,
    sample_tiles,
    uniform,
)
from octavo.request import Request, SamplingParams
from tests.executors.checkpoints import Piece, batch

GOLDEN = Path(__file__).parents[1] / "golden"
INF = math.inf


def make_row(
    prompt=(0,), output=(), *, seed=1, index=0, position=None, stop_ids=(), bad_words=(), **params
) -> SampleRow:
    """The row that draws the token after `prompt` and `output`."""
    sampling = SamplingParams(**{"max_tokens": None, **params})
    request = Request(
        request_id="r",
        prompt_token_ids=list(prompt),
        params=sampling,
        max_tokens=100,
        seed=seed,
        stop_ids=frozenset(stop_ids),
        bad_word_ids=tuple(bad_words),
    )
    history = [*prompt, *output] if sampling.needs_history or bad_words else ()
    place = len(prompt) + len(output) if position is None else position
    return SampleRow(0, request, index, place, len(output), history)


def logits_of(seed: int, vocab: int = 500, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def draw(logits, row) -> int:
    return sample(logits, row)[0]


def draws(logits, n, **settings) -> list[int]:
    return [draw(logits, make_row(position=p, **settings)) for p in range(n)]


def softmax(logits) -> np.ndarray:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()


def chi_square(counts, expected) -> float:
    return float((((counts - expected) ** 2) / expected).sum())


def chi_square_bound(degrees: int) -> float:
    """The value that a chi-square variable exceeds once in a million."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.7534 * math.sqrt(spread)) ** 3


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


def load_goldens():
    goldens = json.loads((GOLDEN / "sampling.json").read_text())
    arrays = np.load(GOLDEN / "sampling.npz")
    for case, expected in zip(goldens["cases"], arrays["probabilities"], strict=True):
        row = case["row"]
        yield case["processors"], arrays["logits"][row], goldens["histories"][row], expected


ORDER = ["repetition_penalty", "temperature", "min_p", "top_k", "top_p"]


class TestAgainstHuggingFace:
    def test_distribution_is_that_of_its_processors_in_our_order(self):
        num_compared = num_differing = 0
        for processors, logits, history, expected in load_goldens():
            names = [name for name, _ in processors]
            settings = {k: int(v) if k == "top_k" else v for k, v in processors}
            found = distribution(logits, make_row(history, **settings))
            if names == sorted(names, key=ORDER.index):
                assert np.array_equal(found > 0, expected > 0), processors
                np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-9)
                num_compared += 1
            else:
                num_differing += not np.array_equal(found > 0, expected > 0)
        assert num_compared >= 80
        assert num_differing > 0, "some case must show that the order matters"


def brute_force(logits, params: SamplingParams) -> np.ndarray:
    """min_p, top_k and top_p by sorting the whole row, each renormalised, in float64."""
    probabilities = softmax(np.asarray(logits, np.float64) / params.temperature)
    order = sorted(range(len(logits)), key=lambda i: (-probabilities[i], i))
    order = [i for i in order if probabilities[i] >= params.min_p * probabilities[order[0]]]
    order = order[: params.top_k] if params.top_k > 0 else order
    total, kept, mass = sum(probabilities[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        mass += probabilities[i] / total
        if mass >= params.top_p < 1:
            break
    result = np.zeros(len(logits))
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


class TestFilters:
    @pytest.mark.parametrize("scale", [0.3, 3.0, 10.0])
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"temperature": 0.5},
            {"top_k": 1},
            {"top_k": 7},
            {"top_k": 499},
            {"top_k": -1},
            {"top_p": 0.3},
            {"top_p": 0.9},
            {"top_p": 0.999999},
            {"min_p": 0.1},
            {"min_p": 1.0},
            {"temperature": 1.7, "min_p": 0.03, "top_k": 60, "top_p": 0.8},
            {"temperature": 0.2, "top_k": 300, "top_p": 0.95},
        ],
    )
    def test_distribution_equals_brute_force_by_sorting(self, settings, scale):
        logits = logits_of(11, scale=scale)
        row = make_row(**settings)
        expected = brute_force(logits, row.request.params)
        found = distribution(logits, row)
        assert np.array_equal(found > 0, expected > 0)
        np.testing.assert_allclose(found, expected, rtol=1e-9)

    @pytest.mark.parametrize("min_p", [0.1, 0.2, 0.3, 0.4, 0.6, 0.7])
    def test_min_p_is_not_rounded_to_float32(self, min_p):
        logits = np.array([0, math.log(min_p)], np.float32)
        kept = distribution(logits, make_row(min_p=min_p))[1] > 0
        assert kept == (float(logits[1]) >= math.log(min_p))

    @pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_p": 0.5, "min_p": 1e-4}])
    @pytest.mark.parametrize("scale", [0.3, 4.0])
    def test_rows_of_several_segments_equal_brute_force(self, settings, scale):
        logits = logits_of(23, 2 * SEGMENT + 55, scale)
        row = make_row(**settings)
        found = distribution(logits, row)
        expected = brute_force(logits, row.request.params)
        assert np.array_equal(found > 0, expected > 0)
        np.testing.assert_allclose(found, expected, rtol=1e-9)

    @pytest.mark.parametrize("vocab", [5, 64, 1000, 3 * SEGMENT + 17])
    @pytest.mark.parametrize("top_k", [1, 2, 5, 40, 999])
    def test_top_k_of_tied_logits_keeps_exactly_k_smallest_ids(self, vocab, top_k):
        logits = np.round(logits_of(5, vocab, scale=1.0))
        expected = sorted(range(vocab), key=lambda i: (-logits[i], i))[:top_k]
        kept = np.flatnonzero(distribution(logits, make_row(top_k=top_k)))
        assert kept.tolist() == sorted(expected)

    def test_top_p_of_tied_logits_keeps_the_smallest_ids(self):
        kept = np.flatnonzero(distribution(np.zeros(100, np.float32), make_row(top_p=0.25)))
        assert kept.tolist() == list(range(25))

    def test_top_p_reached_exactly_adds_no_further_token(self):
        logits = floats(0, 0, 0, 0)
        assert np.count_nonzero(distribution(logits, make_row(top_p=0.5))) == 2
        assert np.count_nonzero(distribution(logits, make_row(top_p=0.51))) == 3

    @pytest.mark.parametrize("top_p", [1e-300, 1e-9, 1 - 2**-53])
    def test_extreme_top_p_keeps_one_or_all(self, top_p):
        logits = logits_of(2, scale=0.1)
        kept = np.count_nonzero(distribution(logits, make_row(top_p=top_p)))
        assert kept == (1 if top_p < 0.5 else len(logits))

    @pytest.mark.parametrize("top_k", [500, 501, 2**63 - 1])
    def test_top_k_of_the_vocabulary_or_more_keeps_all(self, top_k):
        logits = logits_of(4)
        expected = distribution(logits, make_row())
        assert np.array_equal(distribution(logits, make_row(top_k=top_k)), expected)

    def test_banned_tokens_within_top_k_are_never_drawn(self):
        logits = floats(5, 4, 3, 2)
        seen = set(draws(logits, 200, top_k=3, allowed_token_ids=[2, 3], temperature=2.0))
        assert seen == {2, 3}


class TestTemperature:
    @pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-60, 1e-40, 1e-6])
    def test_tiny_temperature_is_greedy_without_overflow(self, temperature):
        logits = floats(-3e38, 0, 1, 1 + 2**-23, 3e38 / 2**100)
        assert set(draws(logits, 50, temperature=temperature)) == {4}
        assert set(draws(floats(0, 1, np.nextafter(np.float32(1), 2)), 50, temperature=1e-9)) == {2}

    def test_tiny_temperature_with_ties_draws_among_the_ties(self):
        assert set(draws(floats(1, 2, 2), 100, temperature=1e-300, top_p=0.9)) == {1, 2}

    def test_huge_temperature_is_nearly_uniform(self):
        found = distribution(logits_of(1), make_row(temperature=1e6))
        np.testing.assert_allclose(found, 1 / 500, rtol=1e-4)

    @pytest.mark.parametrize("temperature", [0, 1e-6, 1.0, 1e6])
    def test_largest_float32_logits_do_not_overflow(self, temperature):
        largest = float(np.finfo(np.float32).max)
        row = make_row(temperature=temperature, logprobs=2, top_p=0.9, min_p=0.1)
        token, logprobs = sample(floats(-largest, largest), row)
        assert token == 1
        assert logprobs.top_logprobs == [0.0, -2 * largest]


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


def shift(row, vocab=8) -> np.ndarray:
    """What the parameters do to the log-odds of each token, from equal logits of 1."""
    return np.log(distribution(np.ones(vocab, np.float32), row)[0:vocab])


class TestPenalties:
    @pytest.mark.case("V21")
    @pytest.mark.parametrize(("frequency", "presence"), [(2, 0), (-2, 0), (0, 2), (0.5, -1.5)])
    def test_frequency_and_presence_count_only_generated_tokens(self, frequency, presence):
        row = make_row(
            (1, 1, 1, 2), (2, 3, 3, 3), frequency_penalty=frequency, presence_penalty=presence
        )
        found = shift(row) - shift(row)[0]
        expected = -np.array(
            [0, 0, frequency + presence, 3 * frequency + presence, 0, 0, 0, 0], float
        )
        np.testing.assert_allclose(found, expected, atol=1e-12)

    @pytest.mark.case("V21")
    def test_repetition_sees_the_prompt_before_anything_is_generated(self):
        token = draw(floats(0, 3, 2.5), make_row((1,), (), repetition_penalty=1.5, temperature=0))
        assert token == 2

    @pytest.mark.case("V21")
    def test_repetition_divides_positive_and_multiplies_negative_logits_once(self):
        row = make_row((0, 0, 2), (2, 3), repetition_penalty=2.0)
        found = distribution(floats(4, 4, -4, 0), row)
        np.testing.assert_allclose(found, softmax([2, 4, -8, 0]), rtol=1e-12)

    def test_repetition_comes_before_frequency(self):
        row = make_row((0,), (1,), repetition_penalty=2.0, frequency_penalty=1.0)
        np.testing.assert_allclose(
            distribution(floats(4, 4, 4), row), softmax([2, 1, 4]), rtol=1e-12
        )

    def test_bias_comes_before_penalties(self):
        row = make_row((0,), repetition_penalty=2.0, logit_bias={0: 6.0})
        np.testing.assert_allclose(distribution(floats(-2, 0), row), softmax([2, 0]), rtol=1e-12)

    def test_most_extreme_penalties_stay_finite(self):
        largest = float(np.finfo(np.float32).max)
        row = make_row((0, 1), (1,), repetition_penalty=1e-6, frequency_penalty=-2.0)
        found = distribution(floats(largest, -largest, 0), row)
        assert found.tolist() == [1, 0, 0]


class TestBans:
    @pytest.mark.case("V23")
    @pytest.mark.parametrize(("num_output", "banned"), [(0, True), (2, True), (3, False)])
    def test_every_stop_id_is_banned_before_min_tokens_generated(self, num_output, banned):
        row = make_row((1,) * 50, (4,) * num_output, stop_ids={0, 5}, min_tokens=3)
        found = distribution(np.zeros(8, np.float32), row)
        assert ((found[[0, 5]] == 0) == banned).all()
        assert (found[[1, 2, 3, 4, 6, 7]] > 0).all()

    @pytest.mark.case("V24")
    def test_a_token_that_is_no_stop_id_is_never_banned_by_min_tokens(self):
        row = make_row(min_tokens=50, ignore_eos=True)
        assert (distribution(np.zeros(8, np.float32), row) > 0).all()

    def test_only_allowed_ids_are_drawn(self):
        assert set(draws(logits_of(1), 100, allowed_token_ids=[7, 3, 7], temperature=3.0)) == {3, 7}

    @pytest.mark.parametrize(
        ("prompt", "output", "banned"),
        [
            ((0,), (), {6}),
            ((0,), (1,), {2, 6}),
            ((0,), (3, 1), {2, 6, 4}),
            ((3,), (1,), {2, 6}),
            ((1,), (), {6}),
            ((0,), (1, 2), {6}),
        ],
    )
    def test_the_last_id_of_a_bad_word_is_banned_after_its_generated_others(
        self, prompt, output, banned
    ):
        words = ((1, 2), (6,), (3, 1, 4))
        found = distribution(np.zeros(8, np.float32), make_row(prompt, output, bad_words=words))
        assert set(np.flatnonzero(found == 0).tolist()) == banned

    def test_a_bias_moves_log_odds_and_revives_no_banned_token(self):
        row = make_row(logit_bias={1: 2.5, 2: -100.0, 3: 100.0}, stop_ids={3}, min_tokens=1)
        found = distribution(np.zeros(4, np.float32), row)
        np.testing.assert_allclose(found, softmax([0, 2.5, -100, -INF]), rtol=1e-12)

    @pytest.mark.case("V48")
    @pytest.mark.parametrize("token_id", [4, 10**9, 2**31, 2**63 - 1, 2**70])
    def test_ids_past_the_vocabulary_change_nothing(self, token_id):
        batch = floats(0, 1, 2, 3, 99)  # 99 is the neighbour's
        logits = batch[:4]
        row = make_row(
            (0, token_id),
            (1, token_id),
            logit_bias={token_id: 100.0},
            stop_ids={token_id},
            min_tokens=9,
            bad_words=((token_id,), (token_id, token_id)),
            allowed_token_ids=[0, 1, 2, 3, token_id],
            frequency_penalty=1.0,
            repetition_penalty=2.0,
            temperature=0,
        )
        assert draw(logits, row) == 3
        assert batch.tolist() == [0, 1, 2, 3, 99]


class TestNothingLeft:
    @pytest.mark.parametrize("temperature", [0, 1.0])
    @pytest.mark.parametrize(
        ("settings", "token"),
        [
            # The whitelist holds, the ban on its only members gives way.
            ({"allowed_token_ids": [0, 2], "stop_ids": {0, 2}, "min_tokens": 5}, 2),
            ({"allowed_token_ids": [0], "bad_words": ((0,),)}, 0),
            ({"bad_words": ((0,), (1,), (2,), (3,))}, 3),
            ({"stop_ids": {0, 1, 2, 3}, "min_tokens": 1, "logit_bias": {1: 9.0}}, 3),
            ({"allowed_token_ids": [9, 10**9]}, 3),
        ],
    )
    def test_bans_give_way_and_the_likeliest_allowed_token_is_taken(
        self, settings, token, temperature
    ):
        row = make_row(temperature=temperature, logprobs=0, **settings)
        found, logprobs = sample(floats(0, 1, 2, 3), row)
        assert found == token
        assert math.isfinite(logprobs.logprob)
        assert not distribution(floats(0, 1, 2, 3), row).any()

    def test_allowed_tokens_of_probability_0_give_the_smallest(self):
        assert draw(floats(-INF, -INF, 0), make_row(allowed_token_ids=[1, 0])) == 0


class TestUnusableLogits:
    @pytest.mark.parametrize("temperature", [0, 1.0])
    @pytest.mark.parametrize(
        "logits", [(0, math.nan, 1), (0, INF, 1), (-INF, -INF), (-INF, math.nan)]
    )
    def test_nan_and_inf_raise_an_error_that_names_request_and_token(self, logits, temperature):
        with pytest.raises(OctavoError, match="token 17 of request r"):
            sample(floats(*logits), make_row(position=17, temperature=temperature))
        with pytest.raises(OctavoError, match="token 17 of request p"):
            prompt_logprobs(floats(*logits), PromptRow(0, "p", 17, 0, 1))

    def test_minus_inf_is_probability_0(self):
        assert set(draws(floats(-INF, 0, -INF, 0), 100)) == {1, 3}


def log_softmax(logits) -> np.ndarray:
    shifted = np.asarray(logits, np.float64) - np.max(logits)
    return shifted - math.log(math.fsum(np.exp(shifted)))


class TestLogprobs:
    @pytest.mark.parametrize("vocab", [3, 500, SEGMENT, 2 * SEGMENT + 5])
    @pytest.mark.parametrize("num_top", [0, 1, 5, 20, -1])
    def test_equal_float64_log_softmax_with_exact_lengths(self, vocab, num_top):
        logits = logits_of(21, vocab)
        token, report = sample(logits, make_row(logprobs=num_top))
        expected = log_softmax(logits)
        order = sorted(range(vocab), key=lambda i: (-logits[i], i))
        assert report.top_ids == order[: vocab if num_top == -1 else num_top]
        assert report.token_id == token
        assert report.rank == order.index(token) + 1
        assert math.isclose(report.logprob, expected[token], rel_tol=1e-13)
        np.testing.assert_allclose(report.top_logprobs, expected[report.top_ids], rtol=1e-13)

    def test_none_is_reported_unless_asked(self):
        assert sample(logits_of(1), make_row())[1] is None

    @pytest.mark.case("S52")
    def test_the_drawn_token_is_reported_also_outside_the_top(self):
        logits = floats(0, 5, 4)
        token, report = sample(logits, make_row(logprobs=0, allowed_token_ids=[0]))
        assert (token, report.rank, list(report.top_ids)) == (0, 3, [])
        assert report.logprob == log_softmax(logits)[0]

    @pytest.mark.parametrize("vocab", [10, 700, SEGMENT + 9])
    def test_ties_are_listed_and_ranked_by_smaller_id(self, vocab):
        logits = np.round(logits_of(13, vocab, scale=1.0))
        order = sorted(range(vocab), key=lambda i: (-logits[i], i))
        for token in (*order[:3], order[vocab // 2], order[-1]):
            report = prompt_logprobs(logits, PromptRow(0, "p", 1, token, 9))
            assert report.rank == order.index(token) + 1
            assert report.top_ids == order[:9]

    def test_are_of_the_distribution_before_any_parameter(self):
        logits = logits_of(14)
        row = make_row(
            (1, 2),
            (3,),
            logprobs=5,
            temperature=0.1,
            top_k=2,
            logit_bias={9: 100.0},
            presence_penalty=2.0,
        )
        token, report = sample(logits, row)
        assert token == 9
        assert report == prompt_logprobs(logits, PromptRow(0, "p", 4, 9, 5))

    def test_minus_inf_stands_only_for_probability_0(self):
        report = prompt_logprobs(floats(-INF, 0, 1), PromptRow(0, "p", 1, 0, None))
        assert (report.logprob, report.rank, report.top_ids) == (-INF, 3, [2, 1, 0])
        assert report.top_logprobs[2] == -INF
        assert all(map(math.isfinite, report.top_logprobs[:2]))
        narrow = prompt_logprobs(floats(-INF, 0, 1), PromptRow(0, "p", 1, 1, 2))
        assert all(map(math.isfinite, narrow.top_logprobs))

    def test_unlikely_tokens_keep_precision(self):
        report = prompt_logprobs(floats(1e4, 0, -1e30), PromptRow(0, "p", 1, 1, 3))
        assert report.top_logprobs == [0.0, -1e4, float(np.float32(-1e30)) - 1e4]

    @pytest.mark.case("V44")
    def test_prompt_and_sample_report_the_same_bits(self):
        logits = logits_of(15, vocab=SEGMENT + 1)
        token, report = sample(logits, make_row(logprobs=20))
        assert report == prompt_logprobs(logits, PromptRow(3, "other", 99, token, 20))


class TestTiles:
    LOGITS = np.random.default_rng(5).standard_normal((7, 50)).astype(np.float32)

    def step(self, samples=(), known=()):
        piece = Piece(np.arange(7), 0, 7, [0])
        return batch(piece, samples=tuple(samples), prompt_rows=tuple(known))

    @pytest.mark.parametrize("cuts", [[0, 7], [0, 1, 4, 7], [0, 3, 6, 7]])
    def test_results_have_the_order_of_their_rows_whatever_the_tiles(self, cuts):
        rows = [6, 0, 3, 3, 5, 1]
        samples = [replace(make_row(temperature=0, logprobs=0), logit_row=row) for row in rows]
        known = [PromptRow(row, "r", 1, 9, 0) for row in rows]
        tiles = [(a, self.LOGITS[a:b]) for a, b in itertools.pairwise(cuts)]
        result = sample_tiles(self.step(samples, known), tiles)
        assert result.token_ids == self.LOGITS[rows].argmax(axis=1).tolist()
        assert [found.token_id for found in result.logprobs] == result.token_ids
        alone = [prompt_logprobs(self.LOGITS[row], known[0]).logprob for row in rows]
        assert [found.logprob for found in result.prompt_logprobs] == alone

    def test_a_row_of_no_logits_is_an_error_and_not_a_token(self):
        for samples, known in (([make_row()], []), ([], [PromptRow(0, "r", 1, 9, 0)])):
            with pytest.raises(ValueError, match="not among the batch's logit_rows"):
                sample_tiles(self.step(samples, known), [])

    @pytest.mark.parametrize("bad", [math.nan, INF])
    def test_only_the_request_of_a_row_without_numbers_fails(self, bad):
        logits = self.LOGITS.copy()
        logits[2, 4] = bad
        samples = [replace(make_row(temperature=0), logit_row=row) for row in (1, 3)]
        known = [PromptRow(row, f"r{row}", 1, 9, 0) for row in (1, 2, 3)]
        result = sample_tiles(self.step(samples, known), [(0, logits)])
        assert list(result.errors) == ["r2"]
        assert [found is None for found in result.prompt_logprobs] == [False, True, False]
        assert result.token_ids == logits[[1, 3]].argmax(axis=1).tolist()


def packed(allowed, vocab):
    """The mask of `SampleRow` that allows these ids."""
    mask = np.zeros((vocab + 31) // 32, np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


class TestMask:
    @pytest.mark.parametrize("vocab", [5, 32, 33, 500])
    @pytest.mark.parametrize("temperature", [0, 1.0])
    def test_a_mask_allows_what_a_list_of_its_ids_allows(self, vocab, temperature):
        logits = logits_of(vocab, vocab)
        allowed = sorted({0, 1, vocab // 2, vocab - 1})
        for position in range(40):
            listed = make_row(position=position, temperature=temperature, allowed_token_ids=allowed)
            masked = replace(
                make_row(position=position, temperature=temperature), mask=packed(allowed, vocab)
            )
            assert draw(logits, masked) == draw(logits, listed)

    def test_bias_and_penalties_do_not_bring_back_what_is_masked(self):
        row = make_row(output=[3], temperature=0, logit_bias={3: 100.0}, frequency_penalty=-2)
        assert draw(floats(0, 1, 2, 9), replace(row, mask=packed([1, 2], 4))) == 2

    def test_bans_give_way_before_a_mask(self):
        row = make_row(stop_ids=[2], min_tokens=5, max_tokens=9)
        assert draw(floats(9, 1, 0, 3), replace(row, mask=packed([2], 4))) == 2

    def test_a_whitelist_gives_way_before_a_mask(self):
        row = replace(make_row(allowed_token_ids=[0]), mask=packed([2, 3], 4))
        assert draw(floats(9, 1, 0, 3), row) == 3

    def test_bits_past_the_vocabulary_are_nothing(self):
        row = replace(make_row(temperature=0), mask=np.full(1, 2**32 - 1, np.uint32))
        assert draw(floats(0, 1, 2), row) == 2

    def test_mask_without_a_token_fails_its_request(self):
        row = replace(make_row(), mask=packed([], 4))
        with pytest.raises(OctavoError, match="allows no token"):
            draw(floats(0, 1, 2, 3), row)

    def test_a_mask_of_too_few_words_is_an_error(self):
        with pytest.raises(ValueError, match="1 words is too short for 33 tokens"):
            draw(np.zeros(33, np.float32), replace(make_row(), mask=packed([1], 32)))

    def test_logprobs_are_those_of_the_unmasked_distribution(self):
        logits = logits_of(7)
        plain, masked = make_row(temperature=0, logprobs=3), make_row(temperature=0, logprobs=3)
        _, free = sample(logits, plain)
        _, held = sample(logits, replace(masked, mask=packed([11], 500)))
        assert (held.token_id, held.top_ids) == (11, free.top_ids)
        assert held.logprob == pytest.approx(math.log(softmax(logits)[11]))
