"""Streams that wait for prompts: a fixed budget per step against `--target-itl-ms`.

Some streams decode, then long prompts arrive. With the fixed budget each step takes as much of a
prompt as it may; with a target only what is predicted to fit beside the streams. Printed are the
times between two tokens of a stream, from the arrival of the prompts to the first token of the last
one, and the prompt tokens per second of that span.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from octavo import LLM, SamplingParams
from octavo.engine.engine import Engine
from octavo.planning.machine import describe_machine

STREAM_PROMPT = 32
VOCABULARY = 40_000
Clock = Callable[[], float]
NUM_DECODES = 12  # steps that tell how long one takes without prompts


@dataclass(frozen=True)
class Load:
    """So many streams, then so many prompts of a length."""

    streams: int
    prompts: int
    length: int


def measure(
    model: str, load: Load, target_ms: float | None, now: Clock, num_threads: int | None
) -> dict[str, float]:
    """Run the load on a new engine and return its figures, in milliseconds and tokens."""
    settings: dict[str, Any] = {
        "enable_prefix_caching": False,
        "target_itl_ms": target_ms,
        "num_threads": num_threads,
    }
    with LLM(model, **settings) as llm:
        engine: Any = llm.engine
        engine.executor._clock = now
        source = random.Random(1)
        for number in range(load.streams):
            add(engine, source, f"stream {number}", STREAM_PROMPT, 1900)
        steps_until(engine, lambda: len(streaming(engine)) == load.streams, now)
        decode = median(gaps_of(engine, NUM_DECODES, now))
        for number in range(load.prompts):
            add(engine, source, f"prompt {number}", load.length, 1)
        started = now()
        gaps = steps_until(engine, lambda: all_stream(engine), now)
        seconds = now() - started
    milliseconds = 1e3 * np.array(gaps)
    p50, p95, p99 = np.percentile(milliseconds, (50, 95, 99))
    return {
        "decode_ms": 1e3 * decode,
        "itl_p50": p50,
        "itl_p95": p95,
        "itl_p99": p99,
        "itl_max": milliseconds.max(),
        "steps": len(gaps),
        "prompt_tokens_per_second": load.prompts * load.length / seconds,
    }


def add(engine: Engine, source: random.Random, name: str, length: int, max_tokens: int) -> None:
    """Queue a prompt of random ids."""
    ids = [source.randrange(VOCABULARY) for _ in range(length)]
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False
    )
    engine.add({"prompt_token_ids": ids}, params, request_id=name)


def streaming(engine: Engine) -> list[str]:
    """Return the requests whose prompts are computed."""
    running = engine.scheduler.running
    return [s.request.request_id for s in running if len(s.token_ids) - s.num_computed == 1]


def all_stream(engine: Engine) -> bool:
    """Whether nobody's prompt is being computed or waits."""
    return not engine.scheduler.waiting and len(streaming(engine)) == len(engine.scheduler.running)


def steps_until(engine: Engine, is_done: Callable[[], bool], now: Clock) -> list[float]:
    """Step until something holds; return the seconds of each step, which every stream waits."""
    gaps = []
    while not is_done():
        gaps += gaps_of(engine, 1, now)
    return gaps


def gaps_of(engine: Engine, count: int, now: Clock) -> list[float]:
    """Return the seconds of some steps, all that the engine does between them included."""
    gaps = []
    for _ in range(count):
        started = now()
        engine.step()
        gaps.append(now() - started)
    return gaps


def main() -> int:
    """Measure the fixed budget, then each target; print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument(
        "--targets",
        type=float,
        nargs="+",
        default=[1.5, 2.0, 5.0],
        help="in steps of the streams alone",
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, and its CPU seconds instead of the clock's, for a machine that is busy",
    )
    options = parser.parse_args()
    now = time.process_time if options.cpu_time else time.perf_counter
    way = (now, 1 if options.cpu_time else None)
    load = Load(options.streams, options.prompts, options.length)
    print("fixed budget ...", file=sys.stderr)
    fixed = measure(options.model, load, None, *way)
    rows = [{"target_ms": None, **fixed}]
    for factor in options.targets:
        target = round(factor * fixed["decode_ms"], 1)
        print(f"target {target} ms ...", file=sys.stderr)
        rows.append({"target_ms": target, **measure(options.model, load, target, *way)})
    for row in rows:
        row["prompt_share"] = row["prompt_tokens_per_second"] / fixed["prompt_tokens_per_second"]
        row["attainable_share"] = attainable(row["target_ms"], fixed)
    print_table(rows)
    about = {
        "machine": describe_machine(),
        "model": options.model,
        "load": vars(load),
        "cpu_time": options.cpu_time,
    }
    print(json.dumps({**about, "rows": rows}))
    return 0


def attainable(target_ms: float | None, fixed: dict[str, float]) -> float:
    """Return the share of the fixed budget's prompt tokens that is left beside the streams.

    If prompts take the same time per token in steps of any length, and every step is as long as
    the target: the streams' own part of each is lost for prompts.
    """
    if target_ms is None:
        return 1.0
    return (1 - fixed["decode_ms"] / target_ms) / (1 - fixed["decode_ms"] / fixed["itl_p50"])


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per way."""
    print(
        "| target, ms | streams alone, ms | ITL p50 | p95 | p99 | most | p95 / target "
        "| prompt tokens/s | of the fixed budget's | attainable |"
    )
    print("| --- " * 10 + "|")
    for row in rows:
        target = row["target_ms"]
        cells = [
            "none" if target is None else f"{target:.0f}",
            *(f"{row[k]:.0f}" for k in ("decode_ms", "itl_p50", "itl_p95", "itl_p99", "itl_max")),
            "" if target is None else f"{row['itl_p95'] / target:.2f}",
            f"{row['prompt_tokens_per_second']:.0f}",
            f"{row['prompt_share']:.0%}",
            f"{row['attainable_share']:.0%}",
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    sys.exit(main())
