"""Figures from outcomes that are known."""

import pytest

from octavo.errors import InvalidParameterError
from octavo.planning.load.client import Outcome
from octavo.planning.load.config import LIMITED, parse_goodput
from octavo.planning.load.report import Report, Spread, meets
from octavo.planning.load.run import Run


def outcome(ttft: float = 0.5, gap: float = 0.1, tokens: int = 5, **fields: object) -> Outcome:
    gaps = [gap] * (tokens - 1)
    values = {"num_output_tokens": tokens, "num_wanted": tokens, "gaps": gaps, **fields}
    return Outcome(
        sent=0.0,
        num_prompt_tokens=10,
        ttft=ttft,
        e2e=ttft + sum(gaps),
        **values,  # type: ignore[arg-type]
    )


def failed(error: str = "gone") -> Outcome:
    return Outcome(sent=0.0, num_prompt_tokens=10, num_wanted=5, ttft=9.0, error=error)


def report(*outcomes: Outcome, seconds: float = 2.0, **limits: float) -> Report:
    return Report(Run(list(outcomes), seconds=seconds, cpu_seconds=0.25), limits)


def test_rates_and_latencies_are_of_answered_requests_alone() -> None:
    found = report(outcome(0.2), outcome(0.4), failed()).as_json()
    assert (found["requests"], found["failed"], found["errors"]) == (3, 1, {"gone": 1})
    assert (found["prompt_tokens"], found["output_tokens"]) == (20, 10)
    assert (found["requests_per_s"], found["output_tokens_per_s"]) == (1.0, 5.0)
    assert found["ttft_ms"]["mean"] == pytest.approx(300)
    assert found["ttft_ms"]["max"] == pytest.approx(400)
    assert found["client_cpu_seconds"] == 0.25


def test_errors_are_counted_by_their_words_the_most_frequent_first() -> None:
    found = report(failed("a"), failed("b"), failed("b")).as_json()
    assert list(found["errors"].items()) == [("b", 2), ("a", 1)]
    assert found["ttft_ms"] is found["tpot_ms"] is found["itl_ms"] is found["e2e_ms"] is None
    assert found["output_tokens_per_s"] == 0


def test_percentiles_are_interpolated() -> None:
    spread = Spread.of([1.0, 2.0, 3.0, 4.0])
    assert spread is not None
    assert spread.mean == 2.5
    assert spread.percentiles[50] == 2.5
    assert spread.percentiles[90] == pytest.approx(3.7)
    assert Spread.of([]) is None


def test_gaps_count_each_and_time_per_token_once_per_request() -> None:
    found = report(outcome(gap=0.1, tokens=11), outcome(gap=0.4, tokens=2)).as_json()
    assert found["itl_ms"]["mean"] == pytest.approx((10 * 100 + 400) / 11, abs=1e-3)
    assert found["tpot_ms"]["mean"] == pytest.approx(250)


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    fast, slow_start, slow_tokens = outcome(), outcome(ttft=2.0), outcome(gap=0.9)
    found = report(fast, slow_start, slow_tokens, failed(), ttft=1.0, tpot=0.5).as_json()
    assert found["goodput"]["requests"] == 1
    assert found["goodput"]["share"] == 0.25
    assert found["goodput"]["requests_per_s"] == 0.5
    assert found["goodput"]["limits_ms"] == {"ttft": 1000.0, "tpot": 500.0}


def test_limit_is_kept_by_what_is_equal_to_it_or_does_not_exist() -> None:
    assert meets(outcome(ttft=0.5), {"ttft": 0.5})
    assert not meets(outcome(ttft=0.5), {"ttft": 0.499})
    assert meets(outcome(tokens=1), {"tpot": 0.001, "itl": 0.001})
    assert not meets(outcome(gaps=[0.1, 0.9], tokens=3), {"itl": 0.5})
    assert not meets(outcome(), {"e2e": 0.5})


def test_without_limits_there_is_no_goodput() -> None:
    assert "goodput" not in report(outcome()).as_json()


def test_nothing_sent_has_figures_too() -> None:
    found = report(seconds=0.0, ttft=1.0).as_json()
    assert (found["requests_per_s"], found["goodput"]["share"]) == (0, 0)


def test_details_have_every_request() -> None:
    good, bad = report(outcome(), failed()).requests_json()
    assert (good["ttft"], good["error"], good["output_tokens"]) == (0.5, None, 5)
    assert bad["error"] == "gone"


def test_limits_are_read_in_milliseconds() -> None:
    assert parse_goodput("ttft:500,tpot:50") == {"ttft": 0.5, "tpot": 0.05}
    assert parse_goodput("itl:1.5 e2e:2000") == {"itl": 0.0015, "e2e": 2.0}
    assert set(parse_goodput(",".join(f"{name}:1" for name in LIMITED))) == set(LIMITED)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:", "ttft:fast", "speed:5", "ttft:0", "ttft:-1", "ttft:nan", "5"]
)
def test_limits_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidParameterError, match="goodput"):
        parse_goodput(text)
