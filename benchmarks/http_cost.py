"""What HTTP costs: output tokens/s through a server against the same engine in this process.

Both are up at once and take turns with the same work, so that a busy machine treats them alike;
the one that waits computes nothing. The client shares the server's cores: its CPU time stands
beside.
"""

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

from benchmarks.served import MODELS, Server
from octavo import LLM
from octavo.planning.machine import describe_machine
from octavo.planning.throughput import Load, run_load


def in_process(llm: LLM, load: Load, seed: str) -> dict[str, Any]:
    """Run a load on the engine of this process."""
    before = time.process_time()
    run = run_load(llm.engine, load, seed)
    spent = time.process_time() - before
    return {
        "output_tokens_per_s": round(run.output_rate, 1),
        "cpu_seconds": {"engine": round(spent, 2)},
    }


def compare(llm: LLM, server: Server, load: Load, rounds: int) -> dict[str, Any]:
    """Return both ways' rates, round by round, and what HTTP leaves of the rate.

    cpu_ratio: the engine's CPU time in this process over that of engine, server and client, which
    is the ratio of rates that a machine with nothing else to do would have, were all of it busy.
    """
    rows = []
    for turn in range(rounds):
        inside = in_process(llm, load, f"http cost {turn}")
        served = server.load(load.streams, load.count, load.prompt_tokens, load.output_tokens)
        rows.append({"in_process": inside, "http": served})
        print(json.dumps({"streams": load.streams, **rows[-1]}), file=sys.stderr, flush=True)
    rates = {
        kind: median(row[kind]["output_tokens_per_s"] for row in rows)
        for kind in ("in_process", "http")
    }
    spent = [row["http"]["cpu_seconds"] for row in rows]
    alone = sum(row["in_process"]["cpu_seconds"]["engine"] for row in rows)
    outside = sum(
        row["http"]["client_cpu_seconds"] + sum(row["http"]["cpu_seconds"].values()) for row in rows
    )
    return {
        "streams": load.streams,
        "rates": rates,
        "ratio": round(rates["http"] / rates["in_process"], 3),
        "cpu_ratio": round(alone / outside, 3),
        "server_of_engine_cpu": round(
            sum(s["server"] for s in spent) / sum(s["engine"] for s in spent), 4
        ),
        "rounds": rows,
    }


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--requests", type=int, default=1, help="per stream; at least 4 in all")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    rows = []
    with LLM(MODELS[options.model], max_num_seqs=64) as llm, Server(options.model) as server:
        for streams in options.streams:
            load = Load(
                streams=streams,
                prompt_tokens=options.prompt_tokens,
                output_tokens=options.tokens,
                num_requests=max(4, options.requests * streams),
            )
            rows.append(compare(llm, server, load, options.rounds))
    print(json.dumps({"machine": describe_machine(), "model": options.model, "rows": rows}))


if __name__ == "__main__":
    main()
