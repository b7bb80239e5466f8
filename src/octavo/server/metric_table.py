"""Every metric once: name, type, help, and how it is read.

Decides what is reported under `vllm:`, with vLLM's meanings, and under `octavo:`. Knows nothing of
Prometheus: `ServerMetrics` keeps the numbers, and the reference page is generated from `METRICS`.

Invariant: what is read from `EngineStats` is a state or a total since the engine's start; what is
read from an event counts once per event.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.engine.lives import Work
from octavo.engine.stats import EngineStats
from octavo.request import FinishReason


@dataclass(frozen=True, slots=True)
class StepTaken:
    """One step: computed tokens, and the seconds it took.

    waste: share of the allocated token slots that held nothing; num_shared: blocks that several
    sequences held.
    """

    num_tokens: float
    seconds: float
    waste: float = 0.0
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request's first token: seconds since the request arrived."""

    seconds: float


@dataclass(frozen=True, slots=True)
class NextToken:
    """A later token of a sequence: seconds since the token before it."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """One request after its last token, abort or error. Times are in seconds.

    queue: from arrival until it first ran; prefill: from there to its first token; decode: from
    there to its end. A phase that it never reached is None, and the one it ended in lasts until its
    end, so that the phases add up to e2e. All are None for a request whose times are unknown.
    num_longest: generated tokens of its longest sample.
    """

    reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_longest: int
    num_preemptions: int
    e2e: float | None = None
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None

    @property
    def inference(self) -> float | None:
        """Seconds since it first ran."""
        return None if self.prefill is None else self.prefill + (self.decode or 0.0)

    @property
    def time_per_token(self) -> float | None:
        """Seconds per token after the first of its longest sample."""
        is_timed = self.decode is not None and self.num_longest > 1
        return self.decode / (self.num_longest - 1) if is_timed and self.decode else None


# What a reading gives: a number, a number per value of the label, the labels of a metric that is
# always 1, or None for nothing to count.
Reading = float | Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table.

    label: its own label beside `model_name`, whose `values` are reported from the start. kind:
    "info" is a gauge that is always 1, and whose reading is its labels. name: a counter's series
    end in `_total`.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram", "info"]
    help: str
    source: type
    read: Callable[[Any], Reading]
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_TOKEN = (*_STEPS, 10, 30)
_FIRST = (*_STEPS, 7.5, 10, 15, 20, 30, 60, 120, 300, 600)
_REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_FEW = (0, 1, 2, 3, 5, 10)
_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1)
_WAITS = ("new", "preempted", "blocks", "max_num_seqs")
_WHICH = ("last", "mean")  # the last step, or the mean of all since the engine's start

_ENGINE, _STEP, _DONE = EngineStats, StepTaken, FinishedRequest


def _steps(read: Callable[[Work], float | None]) -> Callable[[EngineStats], Reading]:
    """Return how a figure is read of the last step, and of a mean one."""

    def reading(stats: EngineStats) -> Reading:
        last, mean = read(stats.last_step), read(stats.all_steps)
        return {"last": last or 0.0, "mean": mean or 0.0}

    return reading


def _each(number: float, work: Work) -> float:
    return number / work.num_steps if work.num_steps else 0.0


# fmt: off
METRICS: tuple[Metric, ...] = (
    # the engine's state
    Metric("vllm:num_requests_running", "gauge", "Sequences that run.", _ENGINE, lambda s: s.num_running),
    Metric("vllm:num_requests_waiting", "gauge", "Sequences that wait.", _ENGINE, lambda s: s.num_waiting),
    Metric("vllm:kv_cache_usage_perc", "gauge", "Share of the KV blocks in use, 0 to 1.", _ENGINE, lambda s: s.kv_cache_usage),
    Metric("vllm:gpu_cache_usage_perc", "gauge", "The older name of kv_cache_usage_perc.", _ENGINE, lambda s: s.kv_cache_usage),
    Metric("octavo:num_requests_waiting_by_reason", "gauge", "Sequences that wait, by what they wait for.", _ENGINE, lambda s: s.waiting, "reason", _WAITS),
    Metric("octavo:kv_blocks_free", "gauge", "KV blocks that no sequence holds.", _ENGINE, lambda s: s.num_free_blocks),
    Metric("octavo:kv_blocks_cached", "gauge", "KV blocks, free or used, that can be found by their tokens.", _ENGINE, lambda s: s.num_cached_blocks),
    Metric("octavo:kv_blocks_shared", "gauge", "KV blocks that several sequences hold.", _ENGINE, lambda s: s.num_shared_blocks),
    Metric("octavo:kv_waste_ratio", "gauge", "Share of the allocated token slots that hold nothing, 0 to 1.", _ENGINE, lambda s: s.waste),
    Metric("octavo:step_flops", "gauge", "Floating-point operations of a step: the last one, and the mean of all.", _ENGINE, _steps(lambda w: _each(w.flops, w)), "which", _WHICH),
    Metric("octavo:step_bytes", "gauge", "Bytes that a step moves, of weights, activations, keys and values.", _ENGINE, _steps(lambda w: _each(w.num_bytes, w)), "which", _WHICH),
    Metric("octavo:step_intensity", "gauge", "Flops per byte moved.", _ENGINE, _steps(lambda w: w.intensity), "which", _WHICH),
    Metric("octavo:step_roofline_ratio", "gauge", "Share of the machine's limits that a step reached: the least time that they allow, by the measured one.", _ENGINE, _steps(lambda w: w.roofline_share), "which", _WHICH),
    Metric("vllm:cache_config_info", "info", "The cache's settings, as labels.", _ENGINE, lambda s: {"block_size": s.block_size, "num_gpu_blocks": s.num_blocks}),
    # the engine's totals
    Metric("vllm:prompt_tokens", "counter", "Prompt tokens of requests that ran, cached ones included.", _ENGINE, lambda s: s.num_prompt_tokens),
    Metric("vllm:prompt_tokens_cached", "counter", "Prompt tokens that were found in the cache.", _ENGINE, lambda s: s.num_reused_tokens),
    Metric("vllm:generation_tokens", "counter", "Generated tokens.", _ENGINE, lambda s: s.num_generated_tokens),
    Metric("vllm:prefix_cache_queries", "counter", "Prompt tokens that the prefix cache was asked for, once per request.", _ENGINE, lambda s: s.num_queried_tokens),
    Metric("vllm:prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache, once per request.", _ENGINE, lambda s: s.num_reused_tokens),
    Metric("vllm:num_preemptions", "counter", "Times that a running sequence gave up its blocks.", _ENGINE, lambda s: s.num_preemptions),
    Metric("octavo:recomputed_tokens", "counter", "Tokens computed again after a preemption.", _ENGINE, lambda s: s.num_recomputed_tokens),
    Metric("octavo:computed_tokens", "counter", "Tokens computed, of prompts and of answers.", _ENGINE, lambda s: s.num_computed_tokens),
    Metric("octavo:steps", "counter", "Steps.", _ENGINE, lambda s: s.step),
    Metric("octavo:forks", "counter", "Sequences split off after a shared prompt.", _ENGINE, lambda s: s.num_forks),
    Metric("octavo:kv_blocks_evicted", "counter", "KV blocks whose cached content gave way to new tokens.", _ENGINE, lambda s: s.num_evicted_blocks),
    Metric("octavo:flops", "counter", "Floating-point operations of all steps.", _ENGINE, lambda s: s.all_steps.flops),
    Metric("octavo:bytes_moved", "counter", "Bytes that all steps moved.", _ENGINE, lambda s: s.all_steps.num_bytes),
    Metric("octavo:roofline_seconds", "counter", "Least time that the machine's limits allow for all steps.", _ENGINE, lambda s: s.all_steps.limit),
    # each step
    Metric("vllm:iteration_tokens_total", "histogram", "Tokens computed in a step.", _STEP, lambda s: s.num_tokens, buckets=_BATCH),
    Metric("octavo:step_time_seconds", "histogram", "Time of a step.", _STEP, lambda s: s.seconds, buckets=_STEPS),
    Metric("octavo:step_kv_waste_ratio", "histogram", "Share of the allocated token slots that hold nothing, step by step.", _STEP, lambda s: s.waste, buckets=_SHARES),
    Metric("octavo:step_kv_blocks_shared", "histogram", "KV blocks that several sequences hold, step by step.", _STEP, lambda s: s.num_shared, buckets=(0, *_BATCH)),
    # each token
    Metric("vllm:time_to_first_token_seconds", "histogram", "From a request's arrival to its first token; once per request that has one.", FirstToken, lambda t: t.seconds, buckets=_FIRST),
    Metric("vllm:inter_token_latency_seconds", "histogram", "Between two tokens of a sequence.", NextToken, lambda t: t.seconds, buckets=_TOKEN),
    Metric("vllm:time_per_output_token_seconds", "histogram", "The older name of inter_token_latency_seconds.", NextToken, lambda t: t.seconds, buckets=_TOKEN),
    # each request
    Metric("vllm:request_success", "counter", "Requests that ended, by how the last sample did.", _DONE, lambda r: {r.reason: 1}, "finished_reason", tuple(FinishReason)),
    Metric("vllm:e2e_request_latency_seconds", "histogram", "From a request's arrival to its end.", _DONE, lambda r: r.e2e, buckets=_REQUEST),
    Metric("vllm:request_queue_time_seconds", "histogram", "From a request's arrival until it first ran, or ended.", _DONE, lambda r: r.queue, buckets=_REQUEST),
    Metric("vllm:request_prefill_time_seconds", "histogram", "From there to its first token, or its end.", _DONE, lambda r: r.prefill, buckets=_REQUEST),
    Metric("vllm:request_decode_time_seconds", "histogram", "From its first token to its end.", _DONE, lambda r: r.decode, buckets=_REQUEST),
    Metric("vllm:request_inference_time_seconds", "histogram", "Prefill and decode.", _DONE, lambda r: r.inference, buckets=_REQUEST),
    Metric("vllm:request_time_per_output_token_seconds", "histogram", "Decode time per token after the first of the longest sample.", _DONE, lambda r: r.time_per_token, buckets=_TOKEN),
    Metric("vllm:request_prompt_tokens", "histogram", "Prompt tokens of a request.", _DONE, lambda r: r.num_prompt_tokens, buckets=_COUNTS),
    Metric("vllm:request_prefill_kv_computed_tokens", "histogram", "Prompt tokens of a request that were not cached.", _DONE, lambda r: r.num_prompt_tokens - r.num_cached_tokens, buckets=_COUNTS),
    Metric("vllm:request_generation_tokens", "histogram", "Generated tokens of a request, all samples.", _DONE, lambda r: r.num_generated_tokens, buckets=_COUNTS),
    Metric("vllm:request_max_num_generation_tokens", "histogram", "Generated tokens of a request's longest sample.", _DONE, lambda r: r.num_longest, buckets=_COUNTS),
    Metric("octavo:request_preemptions", "histogram", "Times that a request was preempted.", _DONE, lambda r: r.num_preemptions, buckets=_FEW),
)
# fmt: on
