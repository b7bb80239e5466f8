"""Deltas add up to outputs, and log-probabilities take vLLM's shape."""

import pytest

from octavo.engine.outputs import OutputCollector, OutputDelta, to_logprobs
from octavo.executors.executor import TokenLogprobs
from octavo.request import Logprob, Request, RequestMetrics, SamplingParams


def collector(n=1):
    request = Request(
        request_id="r",
        prompt_token_ids=[1, 2],
        params=SamplingParams(n=n),
        max_tokens=16,
        seed=0,
    )
    return OutputCollector(request, "shown")


def delta(text="", token_ids=(), index=0, **fields):
    return OutputDelta(request_id="r", index=index, text=text, token_ids=list(token_ids), **fields)


def entry(token_id, logprob):
    return {token_id: Logprob(logprob, 1, "x")}


class TestCollector:
    def test_it_begins_with_one_empty_answer_per_sample(self):
        output = collector(n=3).output
        assert [(c.index, c.text, c.token_ids) for c in output.outputs] == [
            (0, "", []),
            (1, "", []),
            (2, "", []),
        ]
        assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "shown", [1, 2])
        assert not output.finished

    def test_text_and_tokens_of_each_sample_are_joined_apart(self):
        collected = collector(n=2)
        for part in (
            delta("a", [5]),
            delta("x", [7], index=1),
            delta("b", [6], finish_reason="stop", stop_reason="c"),
            delta("y", [8], index=1, finish_reason="length", is_last=True),
        ):
            collected.add(part)
        first, second = collected.output.outputs
        assert (first.text, first.token_ids, first.finish_reason) == ("ab", [5, 6], "stop")
        assert (second.text, second.token_ids, second.finish_reason) == ("xy", [7, 8], "length")
        assert (first.stop_reason, second.stop_reason) == ("c", None)
        assert first.finished()
        assert collected.output.finished

    def test_logprobs_are_joined_and_summed_and_the_deltas_stay_as_they_were(self):
        collected = collector()
        parts = [
            delta("a", [5], logprobs=[entry(5, -1.0)]),
            delta("b", [6], logprobs=[entry(6, -2.0)]),
        ]
        for part in parts:
            collected.add(part)
        completion = collected.output.outputs[0]
        assert completion.logprobs == [entry(5, -1.0), entry(6, -2.0)]
        assert completion.cumulative_logprob == -3.0
        assert [len(part.logprobs) for part in parts] == [1, 1]

    def test_without_logprobs_there_are_none(self):
        collected = collector()
        collected.add(delta("a", [5]))
        completion = collected.output.outputs[0]
        assert (completion.logprobs, completion.cumulative_logprob) == (None, None)

    def test_prompt_logprobs_metrics_cached_tokens_and_the_first_error_are_kept(self):
        collected = collector(n=2)
        metrics, error = RequestMetrics(arrival_time=1.0), RuntimeError("lost")
        common = {"num_cached_tokens": 9, "metrics": metrics}
        failed = {"finish_reason": "error", **common}
        collected.add(delta("a", [5], prompt_logprobs=[None], **common))
        collected.add(delta(error=error, **failed))
        collected.add(delta(index=1, error=RuntimeError("later"), is_last=True, **failed))
        output = collected.output
        assert output.prompt_logprobs == [None]
        assert output.num_cached_tokens == 9
        assert output.metrics is metrics
        assert output.error is error


class TestLogprobs:
    def test_the_actual_token_comes_first_then_the_likeliest_with_their_ranks(self):
        found = TokenLogprobs(7, -5.0, 40, [3, 4], [-0.5, -1.5])
        shown = to_logprobs(found, str)
        assert list(shown) == [7, 3, 4]
        assert shown[7] == Logprob(-5.0, 40, "7")
        assert shown[4] == Logprob(-1.5, 2, "4")

    def test_a_token_among_the_likeliest_appears_once(self):
        found = TokenLogprobs(4, -1.5, 2, [3, 4], [-0.5, -1.5])
        assert to_logprobs(found, None) == {4: Logprob(-1.5, 2), 3: Logprob(-0.5, 1)}

    @pytest.mark.parametrize("top", [[], [7]])
    def test_there_may_be_no_others(self, top):
        found = TokenLogprobs(7, -0.1, 1, top, [-0.1] * len(top))
        assert list(to_logprobs(found, str)) == [7]
