"""What `/metrics` says: the table of metrics, kept for one model in a registry of the caller's.

Decides how totals outlive an engine that was restarted, and what of a stream of deltas counts as a
token, a first token and a finished request. The table decides names and meanings; routes decide
when to observe.

Invariant: counters never fall, and queue + prefill + decode add up to e2e over all requests.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from octavo.engine.outputs import OutputDelta
from octavo.engine.stats import EngineStats
from octavo.request import RequestMetrics
from octavo.server.metric_table import (
    METRICS,
    FinishedRequest,
    FirstToken,
    Metric,
    NextToken,
    Reading,
    StepTaken,
)


@dataclass(slots=True)
class _Stream:
    """A request whose tokens come: per sample, how many, and when the last one did."""

    num_tokens: dict[int, int] = field(default_factory=dict)
    last_times: dict[int, float] = field(default_factory=dict)


class ServerMetrics:
    """Metrics of one model, and a collector that reports them to `registry`.

    Not for several threads. cache_labels: more labels of `vllm:cache_config_info`.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        cache_labels: Mapping[str, str] | None = None,
    ) -> None:
        self._model_name = model_name
        self._cache_labels = dict(cache_labels or {})
        self._stats: EngineStats | None = None
        self._streams: dict[str, _Stream] = {}
        # Totals of engines that are gone, by metric.
        self._carried: dict[str, float] = defaultdict(float)
        self._events = {
            metric.name: _event_metric(metric, model_name)
            for metric in METRICS
            if metric.source is not EngineStats
        }
        # Finding a label's series costs as much as counting in it, and tokens are many.
        self._histograms = {
            name: kept.labels(model_name)
            for name, kept in self._events.items()
            if isinstance(kept, Histogram)
        }
        registry.register(self)

    # --- observing ------------------------------------------------------------------------------

    def observe_step(self, stats: EngineStats) -> None:
        """Take the engine's latest snapshot; those of steps between may be left out."""
        if self._stats is not None and stats.step < self._stats.step:
            self.forget_engine()
        last, self._stats = self._stats, stats
        num_steps = stats.step - (last.step if last else 0)
        num_tokens = stats.num_computed_tokens - (last.num_computed_tokens if last else 0)
        for _ in range(num_steps):
            tokens, shared = num_tokens / num_steps, stats.num_shared_blocks
            self._observe(StepTaken(tokens, stats.step_time, stats.waste, shared))

    def forget_engine(self) -> None:
        """Keep the totals of an engine that is gone; its gauges fall to 0."""
        if self._stats is not None:
            for metric in METRICS:
                if metric.source is EngineStats and metric.kind == "counter":
                    self._carried[metric.name] += _number(metric.read(self._stats))
        self._stats = None

    def observe_delta(self, delta: OutputDelta, now: float) -> None:
        """Count what one delta brings. now: seconds on any clock that never goes back."""
        stream = self._streams.get(delta.request_id)
        if stream is None:
            stream = self._streams[delta.request_id] = _Stream()
        if delta.token_ids:
            self._observe_tokens(stream, delta, now)
        if delta.is_last:
            del self._streams[delta.request_id]
            self._observe(_finished(delta, stream))

    def _observe_tokens(self, stream: _Stream, delta: OutputDelta, now: float) -> None:
        if not stream.num_tokens and delta.metrics is not None:
            first = delta.metrics.first_token_time
            assert first is not None, "a token has come"
            self._observe(FirstToken(first - delta.metrics.arrival_time))
        before = stream.last_times.get(delta.index)
        if before is not None:
            self._observe(NextToken(now - before))
        stream.last_times[delta.index] = now
        stream.num_tokens[delta.index] = stream.num_tokens.get(delta.index, 0) + len(
            delta.token_ids
        )

    def _observe(self, event: StepTaken | FirstToken | NextToken | FinishedRequest) -> None:
        for metric in _OF_EVENT[type(event)]:
            reading = metric.read(event)
            if reading is None:
                continue
            histogram = self._histograms.get(metric.name)
            if histogram is not None:
                histogram.observe(_number(reading))
                continue
            counter = self._events[metric.name]
            assert isinstance(reading, Mapping)
            assert isinstance(counter, Counter)
            for value, count in reading.items():
                counter.labels(self._model_name, value).inc(count)

    # --- reporting ------------------------------------------------------------------------------

    def collect(self) -> Iterator[Family]:
        """Yield every metric in the order of the table, as `registry` asks for them."""
        for metric in METRICS:
            if metric.source is EngineStats:
                yield self._family(metric)
            else:
                for family in self._events[metric.name].collect():
                    # Times of creation would add a series to every other one.
                    family.samples = [s for s in family.samples if not s.name.endswith("_created")]
                    yield family

    def describe(self) -> Iterator[Family]:
        """Yield the metrics, so that `registry` knows their names and refuses a second of each."""
        yield from self.collect()

    def _family(self, metric: Metric) -> Family:
        """Return a metric that is read from the engine's last snapshot."""
        reading = None if self._stats is None else metric.read(self._stats)
        if metric.kind == "info":
            return self._info(metric, reading)
        if metric.kind == "counter":
            total = self._carried[metric.name] + _number(reading or 0)
            counter = CounterMetricFamily(metric.name, metric.help, labels=["model_name"])
            counter.add_metric([self._model_name], total)
            return counter
        gauge = GaugeMetricFamily(metric.name, metric.help, labels=_labels(metric))
        if metric.label:
            found = reading if isinstance(reading, Mapping) else {}
            for value in dict.fromkeys((*metric.values, *found)):
                gauge.add_metric([self._model_name, value], found.get(value, 0))
        else:
            gauge.add_metric([self._model_name], _number(reading or 0))
        return gauge

    def _info(self, metric: Metric, reading: Reading) -> Family:
        if not isinstance(reading, Mapping):
            return GaugeMetricFamily(metric.name, metric.help, labels=["model_name"])
        settings = {"model_name": self._model_name, **reading, **self._cache_labels}
        family = GaugeMetricFamily(metric.name, metric.help, labels=list(settings))
        family.add_metric([str(value) for value in settings.values()], 1)
        return family


_OF_EVENT: Mapping[type, tuple[Metric, ...]] = {
    event: tuple(metric for metric in METRICS if metric.source is event)
    for event in (StepTaken, FirstToken, NextToken, FinishedRequest)
}


def _event_metric(metric: Metric, model_name: str) -> Counter | Histogram:
    """Return a metric that counts events from 0; the collector alone is in the registry."""
    made: Counter | Histogram
    if metric.kind == "counter":
        made = Counter(metric.name, metric.help, _labels(metric), registry=None)
    else:
        made = Histogram(
            metric.name, metric.help, _labels(metric), buckets=metric.buckets, registry=None
        )
    for value in metric.values or (None,):
        made.labels(model_name, *([] if value is None else [value]))
    return made


def _labels(metric: Metric) -> list[str]:
    return ["model_name", metric.label] if metric.label else ["model_name"]


def _number(reading: Reading) -> float:
    assert isinstance(reading, (int, float))
    return reading


def _finished(delta: OutputDelta, stream: _Stream) -> FinishedRequest:
    times = {} if delta.metrics is None else _phases(delta.metrics)
    return FinishedRequest(
        reason=delta.finish_reason or "error",
        num_prompt_tokens=delta.num_prompt_tokens,
        num_cached_tokens=delta.num_cached_tokens,
        num_generated_tokens=sum(stream.num_tokens.values()),
        num_longest=max(stream.num_tokens.values(), default=0),
        num_preemptions=0 if delta.metrics is None else delta.metrics.num_preemptions,
        **times,
    )


def _phases(metrics: RequestMetrics) -> dict[str, float]:
    """Return the seconds of each phase that a finished request reached, and of all of them."""
    arrived, end = metrics.arrival_time, metrics.finished_time
    if end is None:
        return {}
    scheduled, first = metrics.first_scheduled_time, metrics.first_token_time
    phases = {"e2e": end - arrived, "queue": (end if scheduled is None else scheduled) - arrived}
    if scheduled is not None:
        phases["prefill"] = (end if first is None else first) - scheduled
    if first is not None:
        phases["decode"] = end - first
    return phases
