"""Metrics over a real engine with the tiny model: what was counted is what happened."""

import re
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.outputs import OutputDelta
from octavo.request import FinishReason, RequestMetrics
from octavo.server.metric_table import METRICS
from octavo.server.metrics import ServerMetrics
from tests.engines import FailingExecutor, assert_idle, drawn, greedy, tiny, tokens

B = 16


class Scraped:
    """An engine whose steps and deltas are observed, and what a scrape then says."""

    def __init__(self, engine, **labels):
        self.engine, self.registry, self.deltas = engine, CollectorRegistry(), []
        self.metrics = ServerMetrics(self.registry, "tiny", **labels)
        self.now = 0.0

    def add(self, *request):
        return self.engine.add(*request).request_id

    def step(self):
        added = self.engine.step()
        for delta in added:
            self.now += 0.125
            self.metrics.observe_delta(delta, self.now)
        self.metrics.observe_step(self.engine.stats())
        self.deltas += added
        return added

    def drain(self):
        while self.engine.has_unfinished:
            self.step()

    def samples(self):
        """Every series by its name and its labels beside the model's name."""
        found = {}
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model_name") == "tiny"
                found[sample.name, *labels.values()] = sample.value
        return found

    def __getitem__(self, name):
        return self.samples()[(name,) if isinstance(name, str) else name]

    def count(self, name):
        return self[f"vllm:{name}_count"]

    def sum(self, name):
        return self[f"vllm:{name}_sum"]


@pytest.fixture
def scraped(llm):
    return Scraped(llm.engine)


def reasons(scraped):
    return {reason: scraped["vllm:request_success_total", reason] for reason in FinishReason}


# --- requests -----------------------------------------------------------------------------------


@pytest.mark.case("V55")
def test_times_are_counted_once_per_request_that_reached_them_and_gauges_fall_to_0():
    """100 requests: half of two samples, some aborted in the queue, some after a token."""
    with tiny(block_size=B, num_gpu_blocks_override=200, max_num_seqs=8) as llm:
        scraped = Scraped(llm.engine)
        kinds = {scraped.add(tokens(20, i), drawn(5, n=1 + i % 2)): i % 4 for i in range(100)}
        for request_id, kind in kinds.items():
            if kind == 3:
                llm.engine.abort(request_id)
        while llm.engine.has_unfinished:
            for delta in scraped.step():
                if kinds[delta.request_id] == 2 and delta.token_ids:
                    llm.engine.abort(delta.request_id)
        assert_idle(llm.engine)
    last = [delta for delta in scraped.deltas if delta.is_last]
    spoke = {delta.request_id for delta in scraped.deltas if delta.token_ids}
    assert len(last) == sum(reasons(scraped).values()) == 100
    assert reasons(scraped) == {"stop": 0, "length": 50, "abort": 50, "error": 0}
    assert len(spoke) == scraped.count("time_to_first_token_seconds") == 75
    assert scraped.count("e2e_request_latency_seconds") == 100
    assert scraped.count("request_queue_time_seconds") == 100
    assert scraped.count("request_prefill_time_seconds") == 75
    assert scraped.count("request_decode_time_seconds") == 75
    phases = ("queue", "prefill", "decode")
    total = sum(scraped.sum(f"request_{phase}_time_seconds") for phase in phases)
    assert total == pytest.approx(scraped.sum("e2e_request_latency_seconds"), rel=1e-9)
    inference = scraped.sum("request_inference_time_seconds")
    parts = scraped.sum("request_prefill_time_seconds") + scraped.sum("request_decode_time_seconds")
    assert inference == pytest.approx(parts, rel=1e-9)
    gauges = [m.name for m in METRICS if m.kind == "gauge" and not m.label]
    state = {name: scraped[name] for name in gauges if name.startswith("vllm:")}
    assert set(state.values()) == {0}
    assert scraped["octavo:kv_blocks_free"] == 200


@pytest.mark.case("V55")
def test_no_phase_is_negative(scraped):
    for seed in range(8):
        scraped.add(tokens(20, seed), drawn(3, n=2))
    scraped.drain()
    for delta in scraped.deltas:
        times = delta.metrics
        assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time
        assert times.first_token_time <= times.finished_time


def test_gauges_tell_of_the_step_just_taken():
    with tiny(block_size=B, max_num_seqs=2) as llm:
        scraped = Scraped(llm.engine)
        for seed in range(3):
            scraped.add(tokens(20, seed), greedy(4))
        scraped.step()
        assert scraped["vllm:num_requests_running"] == 2
        assert scraped["vllm:num_requests_waiting"] == 1
        assert scraped["octavo:num_requests_waiting_by_reason", "max_num_seqs"] == 1
        assert scraped["octavo:num_requests_waiting_by_reason", "preempted"] == 0
        assert scraped["vllm:kv_cache_usage_perc"] == 4 / 128
        assert scraped["vllm:gpu_cache_usage_perc"] == 4 / 128
        scraped.drain()
        assert scraped["vllm:num_requests_running"] == scraped["vllm:num_requests_waiting"] == 0


def test_tokens_of_a_sequence_are_one_fewer_gaps_and_samples_do_not_mix(scraped):
    scraped.add(tokens(20), drawn(4, n=3))
    scraped.drain()
    assert scraped["vllm:generation_tokens_total"] == 12
    assert scraped.count("inter_token_latency_seconds") == 3 * 3
    assert scraped.count("time_per_output_token_seconds") == 3 * 3
    # Each step brings three deltas an eighth of a second apart.
    assert scraped.sum("inter_token_latency_seconds") == 9 * 3 * 0.125
    assert scraped.sum("request_generation_tokens") == 12
    assert scraped.sum("request_max_num_generation_tokens") == 4
    assert scraped.count("request_generation_tokens") == 1
    assert scraped["octavo:forks_total"] == 2


def test_answer_of_one_token_has_no_time_per_token(scraped):
    scraped.add(tokens(20), greedy(1))
    scraped.drain()
    assert scraped.count("request_time_per_output_token_seconds") == 0
    assert scraped.count("inter_token_latency_seconds") == 0
    assert scraped.count("request_decode_time_seconds") == 1


def test_steps_are_counted_with_their_tokens(scraped):
    scraped.add(tokens(20), greedy(4))
    scraped.drain()
    assert scraped["octavo:steps_total"] == scraped.count("iteration_tokens_total") == 4
    assert scraped.sum("iteration_tokens_total") == scraped["octavo:computed_tokens_total"] == 23
    assert scraped["vllm:iteration_tokens_total_bucket", "1.0"] == 3
    assert scraped["octavo:step_time_seconds_count"] == 4
    assert scraped["octavo:step_time_seconds_sum"] > 0


def test_steps_that_nobody_observed_count_with_their_mean(scraped):
    scraped.add(tokens(20), greedy(4))
    while scraped.engine.has_unfinished:
        scraped.engine.step()
    scraped.metrics.observe_step(scraped.engine.stats())
    assert scraped.count("iteration_tokens_total") == 4
    assert scraped.sum("iteration_tokens_total") == 23


def test_snapshot_seen_twice_counts_once(scraped):
    scraped.add(tokens(20), greedy(2))
    scraped.drain()
    before = scraped.samples()
    scraped.metrics.observe_step(scraped.engine.stats())
    assert scraped.samples() == before


def test_failed_step_is_an_error_of_each_request_in_it():
    with tiny(block_size=B) as llm:
        executor = llm.engine.executor
        llm.engine.executor = FailingExecutor(executor, at=[2], error=RuntimeError("broken"))
        scraped = Scraped(llm.engine)
        scraped.add(tokens(20), greedy(4))
        scraped.add(tokens(20, 1), drawn(4, n=2))
        scraped.drain()
    assert reasons(scraped) == {"stop": 0, "length": 0, "abort": 0, "error": 2}
    assert scraped.count("time_to_first_token_seconds") == 2
    assert scraped.sum("request_generation_tokens") == 3


def test_error_told_by_somebody_else_than_the_engine_has_no_times(scraped):
    """An engine that died tells nothing of the requests that it had."""
    request_id = scraped.add(tokens(20), greedy(4))
    scraped.step()
    dead = OutputDelta(
        request_id=request_id,
        index=0,
        text="",
        token_ids=[],
        finish_reason="error",
        is_last=True,
        num_prompt_tokens=20,
        error=RuntimeError("the engine died"),
    )
    scraped.metrics.observe_delta(dead, 1.0)
    assert reasons(scraped)["error"] == 1
    assert scraped.count("e2e_request_latency_seconds") == 0
    assert scraped.sum("request_prompt_tokens") == 20
    assert scraped.sum("request_generation_tokens") == 1


def test_request_that_ended_before_its_times_were_known_has_none(scraped):
    delta = OutputDelta(
        request_id="a",
        index=0,
        text="",
        token_ids=[],
        finish_reason="abort",
        is_last=True,
        metrics=RequestMetrics(arrival_time=1.0),
    )
    scraped.metrics.observe_delta(delta, 1.0)
    assert reasons(scraped)["abort"] == 1
    assert scraped.count("e2e_request_latency_seconds") == 0


# --- the cache ----------------------------------------------------------------------------------


@pytest.mark.case("V01")
@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 2 * B + 1])
def test_repeated_prompt_hits_all_but_its_last_token(scraped, length):
    for _ in range(2):
        scraped.add(tokens(length), greedy(1))
        scraped.drain()
    assert scraped["vllm:prefix_cache_queries_total"] == 2 * length
    assert scraped["vllm:prefix_cache_hits_total"] == length - 1
    assert scraped["vllm:prompt_tokens_total"] == 2 * length
    assert scraped["vllm:prompt_tokens_cached_total"] == length - 1
    assert scraped.sum("request_prefill_kv_computed_tokens") == length + 1


def test_prompt_whose_logprobs_are_wanted_asks_the_cache_for_nothing(scraped):
    scraped.add(tokens(40), greedy(1))
    scraped.add(tokens(40), greedy(1, prompt_logprobs=1))
    scraped.drain()
    assert scraped["vllm:prompt_tokens_total"] == 80
    assert scraped["vllm:prefix_cache_queries_total"] == 40


def test_engine_without_a_prefix_cache_has_no_queries(cold):
    scraped = Scraped(cold.engine)
    scraped.add(tokens(40), greedy(1))
    scraped.drain()
    assert scraped["vllm:prefix_cache_queries_total"] == 0


@pytest.mark.case("V11")
def test_recomputed_tokens_are_no_cache_hits_and_counted_apart():
    with tiny(block_size=B, num_gpu_blocks_override=24, max_num_seqs=16) as llm:
        scraped = Scraped(llm.engine)
        for seed in range(12):
            scraped.add(tokens(60, seed), drawn(60))
        scraped.drain()
    assert scraped["vllm:num_preemptions_total"] > 0
    assert scraped["octavo:request_preemptions_sum"] == scraped["vllm:num_preemptions_total"]
    assert scraped["octavo:request_preemptions_count"] == 12
    assert scraped["vllm:prefix_cache_hits_total"] == 0
    assert scraped["vllm:prefix_cache_queries_total"] == 12 * 60
    assert scraped["octavo:recomputed_tokens_total"] > 0


def test_settings_of_the_cache_are_labels(llm):
    scraped = Scraped(llm.engine, cache_labels={"cache_dtype": "bfloat16"})
    scraped.metrics.observe_step(llm.engine.stats())
    text = generate_latest(scraped.registry).decode()
    (line,) = re.findall(r"^vllm:cache_config_info\{.*", text, re.MULTILINE)
    for label in ('block_size="16"', 'num_gpu_blocks="128"', 'cache_dtype="bfloat16"'):
        assert label in line
    assert line.endswith(" 1.0")


# --- engines come and go ------------------------------------------------------------------------


def test_totals_outlive_an_engine_that_is_replaced(scraped):
    scraped.add(tokens(20), greedy(4))
    scraped.drain()
    with tiny(block_size=B) as second:
        scraped.engine = second.engine
        scraped.add(tokens(30), greedy(2))
        scraped.drain()
    assert scraped["vllm:prompt_tokens_total"] == 50
    assert scraped["vllm:generation_tokens_total"] == 6
    assert scraped.count("iteration_tokens_total") == scraped["octavo:steps_total"] == 6


def test_gauges_of_an_engine_that_is_gone_are_0_and_its_totals_stay(scraped):
    scraped.add(tokens(20), greedy(4))
    scraped.step()
    assert scraped["vllm:num_requests_running"] == 1
    scraped.metrics.forget_engine()
    scraped.metrics.forget_engine()
    assert scraped["vllm:num_requests_running"] == 0
    assert scraped["vllm:generation_tokens_total"] == 1


def test_counters_never_fall(scraped):
    def totals():
        found = scraped.samples().items()
        return {name: value for name, value in found if name[0].endswith(("_total", "_count"))}

    seen = totals()
    scraped.add(tokens(20), greedy(4))
    while scraped.engine.has_unfinished:
        scraped.step()
        now = totals()
        assert all(now[name] >= value for name, value in seen.items())
        seen = now
    scraped.metrics.observe_step(replace(scraped.engine.stats(), step=0, num_prompt_tokens=0))
    assert all(totals()[name] >= value for name, value in seen.items())


# --- the table ----------------------------------------------------------------------------------


def test_every_metric_is_reported_before_the_first_step(scraped):
    text = generate_latest(scraped.registry).decode()
    told = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    for metric in METRICS:
        assert metric.name + ("_total" if metric.kind == "counter" else "") in told
    assert not [name for name in told if name.endswith("_created")]


def test_names_are_of_vllm_or_our_own_and_stand_once():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"(vllm|octavo):[a-z0-9_]+", name) for name in names)


def test_buckets_of_histograms_rise():
    for metric in METRICS:
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_two_models_in_one_registry_are_refused(llm):
    """One registry, one engine: the same series twice would be no valid page."""
    registry = CollectorRegistry()
    ServerMetrics(registry, "a")
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        ServerMetrics(registry, "b")


# --- steps --------------------------------------------------------------------------------------


def test_flops_and_bytes_are_those_of_the_last_step_and_the_mean_of_all(scraped):
    """Two steps that differ: a prompt of 20 tokens, and a decode of one."""
    scraped.add(tokens(20), greedy(2))
    scraped.step()
    first = {name: scraped[f"octavo:step_{name}", "last"] for name in ("flops", "bytes")}
    scraped.step()
    for name, total in (("flops", "octavo:flops_total"), ("bytes", "octavo:bytes_moved_total")):
        last = scraped[f"octavo:step_{name}", "last"]
        assert 0 < last < first[name]
        assert scraped[f"octavo:step_{name}", "mean"] == pytest.approx((first[name] + last) / 2)
        assert scraped[total] == first[name] + last


def test_intensity_is_flops_per_byte_and_grows_with_the_rows(scraped):
    scraped.add(tokens(60), greedy(2))
    scraped.step()
    prompt = scraped["octavo:step_intensity", "last"]
    flops, moved = scraped["octavo:step_flops", "last"], scraped["octavo:step_bytes", "last"]
    assert prompt == pytest.approx(flops / moved)
    scraped.step()
    assert scraped["octavo:step_intensity", "last"] < prompt


def test_share_of_the_roofline_is_the_least_time_by_the_measured_one(scraped):
    scraped.add(tokens(20), greedy(6))
    scraped.drain()
    seconds = scraped["octavo:step_time_seconds_sum"]
    least = scraped["octavo:roofline_seconds_total"]
    assert scraped["octavo:step_roofline_ratio", "mean"] == pytest.approx(least / seconds)


def test_waste_and_shared_blocks_are_counted_once_per_step(scraped):
    scraped.add(tokens(2 * B), drawn(4, n=3))
    scraped.drain()
    steps = scraped["octavo:steps_total"]
    assert scraped["octavo:step_kv_waste_ratio_count"] == steps
    assert scraped["octavo:step_kv_blocks_shared_count"] == steps
    # Of two full blocks, three samples share both, from the step of the fork to the last but one.
    assert scraped["octavo:step_kv_blocks_shared_sum"] == 2 * (steps - 1)
    assert 0 < scraped["octavo:step_kv_waste_ratio_sum"] < steps
