"""What changes logits before the temperature: penalties, biases, bans and masks."""

import math

import numpy as np
import pytest

from octavo.errors import OctavoError
from octavo.executors.sampling import distribution, sample
from tests.executors.rows import INF, draw, draws, floats, logits_of, make_row, softmax


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
            common = {"position": position, "temperature": temperature}
            listed = make_row(**common, allowed_token_ids=allowed)
            masked = make_row(**common, mask=packed(allowed, vocab))
            assert draw(logits, masked) == draw(logits, listed)

    def test_bias_and_penalties_do_not_bring_back_what_is_masked(self):
        asked = {"temperature": 0, "logit_bias": {3: 100.0}, "frequency_penalty": -2}
        row = make_row(output=[3], mask=packed([1, 2], 4), **asked)
        assert draw(floats(0, 1, 2, 9), row) == 2

    def test_bans_give_way_before_a_mask(self):
        row = make_row(stop_ids=[2], min_tokens=5, max_tokens=9, mask=packed([2], 4))
        assert draw(floats(9, 1, 0, 3), row) == 2

    def test_a_whitelist_gives_way_before_a_mask(self):
        row = make_row(allowed_token_ids=[0], mask=packed([2, 3], 4))
        assert draw(floats(9, 1, 0, 3), row) == 3

    def test_bits_past_the_vocabulary_are_nothing(self):
        row = make_row(temperature=0, mask=np.full(1, 2**32 - 1, np.uint32))
        assert draw(floats(0, 1, 2), row) == 2

    def test_mask_without_a_token_fails_its_request(self):
        row = make_row(mask=packed([], 4))
        with pytest.raises(OctavoError, match="allows no token"):
            draw(floats(0, 1, 2, 3), row)

    def test_a_mask_of_too_few_words_is_an_error(self):
        with pytest.raises(ValueError, match="1 words is too short for 33 tokens"):
            draw(np.zeros(33, np.float32), make_row(mask=packed([1], 32)))

    def test_logprobs_are_those_of_the_unmasked_distribution(self):
        logits = logits_of(7)
        _, free = sample(logits, make_row(temperature=0, logprobs=3))
        _, held = sample(logits, make_row(temperature=0, logprobs=3, mask=packed([11], 500)))
        assert (held.token_id, held.top_ids) == (11, free.top_ids)
        assert held.logprob == pytest.approx(math.log(softmax(logits)[11]))
