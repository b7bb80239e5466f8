"""Temperature, min_p, top_k and top_p against Hugging Face's processors and brute force."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from octavo.executors.sampling import SEGMENT, distribution, sample
from octavo.request import SamplingParams
from tests.executors.rows import draws, floats, logits_of, make_row, softmax

GOLDEN = Path(__file__).parents[1] / "golden"


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
