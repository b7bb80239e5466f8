"""Throughput: what an engine in this process reaches in a closed loop of streams.

Decides the work: each stream has one request in flight and starts the next when it ends; prompts
are random token ids, answers greedy and of a fixed length. Knows no executor, and no clock but the
engine's. What its caller prints is the same as a load client sees of a server, less the HTTP.

Invariant: no two prompts begin alike but for the shared prefix, so a prefix cache carries nothing
from one run to the next.
"""

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import islice

import numpy as np

from octavo.engine.engine import Engine
from octavo.errors import BadRequestError, InvalidParameterError, SettingError
from octavo.request import RequestMetrics, SamplingParams

Prompt = list[int]

# Ids from which prompts are drawn where the vocabulary has them: not the first, rare or special.
_ID_RANGE = (1000, 40_000)
# How many tokens warm up a run, and how many requests a stream makes in it.
_WARM_TOKENS = 8
_REQUESTS_PER_STREAM = 3
_MIN_REQUESTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One row of work. Lengths are in tokens; `prompt_tokens` come after the shared prefix.

    num_requests: None is three per stream, and at least eight.
    """

    streams: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix: int = 0
    num_requests: int | None = None

    def __post_init__(self) -> None:
        for name in ("streams", "prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise InvalidParameterError(name, getattr(self, name), "at least 1")
        if self.shared_prefix < 0:
            raise InvalidParameterError("shared_prefix", self.shared_prefix, "at least 0")
        if self.num_requests is not None and self.num_requests < self.streams:
            raise InvalidParameterError(
                "requests", self.num_requests, f"at least one for each of {self.streams} streams"
            )

    @property
    def count(self) -> int:
        """Requests of a run."""
        default = max(_MIN_REQUESTS, _REQUESTS_PER_STREAM * self.streams)
        return default if self.num_requests is None else self.num_requests

    def prompts(self, count: int, vocab_size: int, seed: object) -> tuple[Prompt, list[Prompt]]:
        """Return the shared prefix, and `count` prompts that begin with it; the seed decides."""
        drawn = random.Random(f"{seed}/{self.streams}/{self.prompt_tokens}/{self.shared_prefix}")
        low, high = _ID_RANGE if vocab_size >= _ID_RANGE[1] else (0, vocab_size)

        def ids(length: int) -> Prompt:
            return [drawn.randrange(low, high) for _ in range(length)]

        shared = ids(self.shared_prefix)
        return shared, [shared + ids(self.prompt_tokens) for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of a load took, in seconds on the engine's clock.

    ttft: from a request's arrival to its first token, one per request. tpot: from there to its
    last, per token after the first; empty if answers have one token. num_preemptions: sequences
    that lost their blocks to others, so a pool too small for the load.
    """

    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    num_preemptions: int

    @property
    def output_rate(self) -> float:
        """Generated tokens per second."""
        return self.num_output_tokens / self.seconds

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second, those found in the cache included."""
        return self.num_prompt_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Return the spread of at least one value."""
        found = list(values)
        return cls(float(np.median(found)), min(found), max(found))


def percentile(values: Ordered[float], rank: int) -> float:
    """Return the value below which `rank` percent lie, interpolated linearly."""
    return float(np.percentile(values, rank))


def check_load(engine: Engine, load: Load) -> None:
    """Raise before any work if the engine could not run a load as it says."""
    limit = engine.scheduler.max_num_seqs
    if load.streams > limit:
        raise SettingError(
            f"{load.streams:,} streams cannot run at once: max_num_seqs is {limit:,}. Lower the "
            "streams or raise --max-num-seqs."
        )
    held = engine.intake.max_model_len
    length = load.shared_prefix + load.prompt_tokens + load.output_tokens
    if length > held:
        raise BadRequestError(
            f"Prefix, prompt and answer are {length:,} tokens but the model holds {held:,}. "
            "Shorten them, or start with a larger --max-model-len."
        )


def run_load(engine: Engine, load: Load, seed: object) -> Run:
    """Warm the engine up, run every request of a load, and return the figures."""
    vocab_size = engine.intake.vocab_size
    _, (warm,) = load.prompts(1, vocab_size, f"{seed}/warm")
    shared, prompts = load.prompts(load.count, vocab_size, seed)
    _loop(engine, [warm], 1, min(_WARM_TOKENS, load.output_tokens))
    if shared:
        _loop(engine, [shared], 1, 1)  # its blocks are in the cache from here on
    finished = _loop(engine, prompts, load.streams, load.output_tokens)
    return _figures(load, finished)


def _loop(
    engine: Engine, prompts: list[Prompt], streams: int, output_tokens: int
) -> list[RequestMetrics]:
    """Keep `streams` requests in flight until every prompt is answered; raise what fails."""
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    waiting = iter(prompts)
    finished: list[RequestMetrics] = []

    def start(count: int) -> None:
        for prompt in islice(waiting, count):
            engine.add({"prompt_token_ids": prompt}, params)

    start(streams)
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.error is not None:
                raise delta.error
            if delta.is_last:
                assert delta.metrics is not None
                finished.append(delta.metrics)
                start(1)
    return finished


def _figures(load: Load, finished: Ordered[RequestMetrics]) -> Run:
    times = [(m.arrival_time, m.first_token_time or 0, m.finished_time or 0) for m in finished]
    after_first = load.output_tokens - 1
    return Run(
        seconds=max(end for *_, end in times) - min(start for start, *_ in times),
        num_prompt_tokens=len(finished) * (load.shared_prefix + load.prompt_tokens),
        num_output_tokens=len(finished) * load.output_tokens,
        ttft=tuple(first - start for start, first, _ in times),
        tpot=tuple((end - first) / after_first for _, first, end in times if after_first),
        num_preemptions=sum(m.num_preemptions for m in finished),
    )


def run_loads(
    engine: Engine,
    loads: Ordered[Load],
    repeats: int,
    on_run: Callable[[int, Load, Run], None] = lambda repeat, load, run: None,
) -> list[list[Run]]:
    """Run every load `repeats` times, and return the runs of each.

    Repeats are interleaved, so that a machine that slows down slows every row. on_run: told of
    each run as it ends, with the number of its repeat from 1.
    """
    for load in loads:
        check_load(engine, load)
    runs: list[list[Run]] = [[] for _ in loads]
    for repeat in range(1, repeats + 1):
        for row, (load, kept) in enumerate(zip(loads, runs, strict=True)):
            kept.append(run_load(engine, load, f"{repeat}/{row}"))
            on_run(repeat, load, kept[-1])
    return runs
