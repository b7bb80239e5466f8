import pytest

from benchmarks.peers.figures import Answer, Seen, Spread, figures_of

WHOLE = (Answer(0.0, 1.0, 3.0, 5), Answer(0.5, 2.5, 4.5, 3))


def test_rates_count_every_token_and_latencies_are_medians_in_milliseconds():
    figures = figures_of(Seen(WHOLE, 4.0))
    assert figures["output_tokens_per_s"] == 2.0
    assert figures["ttft_p50_ms"] == 1500.0  # of 1 s and 2 s
    assert figures["tpot_p50_ms"] == 750.0  # of 2 s over 4 gaps and 2 s over 2


def test_a_request_without_a_token_has_no_latency_but_the_others_have():
    figures = figures_of(Seen((*WHOLE, Answer(1.0, None, None, 0)), 4.0, cut=True))
    assert figures["ttft_p50_ms"] == 1500.0
    assert figures["output_tokens"] == 8


def test_a_run_that_saw_no_token_has_a_rate_of_zero_and_no_latency():
    figures = figures_of(Seen((Answer(0.0, None, None, 0),), 60.0, cut=True))
    assert figures == {"seconds": 60.0, "output_tokens": 0.0, "output_tokens_per_s": 0.0}


def test_answers_of_one_token_have_no_time_per_token():
    assert "tpot_p50_ms" not in figures_of(Seen((Answer(0.0, 1.0, 1.0, 1),), 1.0))


def test_a_workers_reply_is_read_and_one_that_lacks_a_field_is_refused():
    answer = {"sent": 0.0, "first": None, "last": None, "tokens": 0}
    values = {"answers": [answer], "seconds": 1.0, "cut": True}
    assert Seen.from_json(values) == Seen((Answer(0.0, None, None, 0),), 1.0, True)
    with pytest.raises(KeyError):
        Seen.from_json({"answers": []})
    with pytest.raises(TypeError):
        Seen.from_json({**values, "answers": [{"sent": 0.0}]})


def test_a_spread_is_median_and_range_and_hides_a_range_that_rounds_away():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread(1234.5, 1000.0, 2000.0).text(1) == "1,234.5 (1,000.0-2,000.0)"
    assert Spread(1.04, 1.01, 1.04).text(1) == "1.0"


def test_there_is_no_spread_of_nothing():
    with pytest.raises(ValueError):
        Spread.of([])
