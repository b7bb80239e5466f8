"""Log-probabilities against float64 formulas, tiles of rows, and logits that are no numbers."""

import itertools
import math

import numpy as np
import pytest

from octavo.errors import OctavoError
from octavo.executors.executor import PromptRow
from octavo.executors.sampling import SEGMENT, prompt_logprobs, sample, sample_tiles
from tests.executors.checkpoints import Piece, batch
from tests.executors.rows import INF, draws, floats, logits_of, make_row


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
        samples = [make_row(logit_row=row, temperature=0, logprobs=0) for row in rows]
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
        samples = [make_row(logit_row=row, temperature=0) for row in (1, 3)]
        known = [PromptRow(row, f"r{row}", 1, 9, 0) for row in (1, 2, 3)]
        result = sample_tiles(self.step(samples, known), [(0, logits)])
        assert list(result.errors) == ["r2"]
        assert [found is None for found in result.prompt_logprobs] == [False, True, False]
        assert result.token_ids == logits[[1, 3]].argmax(axis=1).tolist()


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
