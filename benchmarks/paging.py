"""What paging, prefix sharing and scheduling cost and save, without any model.

Drives the real `core/` in virtual time (20 ms per step, constant tokens) over production traces:
(a) allocated token slots that hold nothing, (b) requests that run at once in the same memory,
(c) prompt tokens served from shared blocks, (d) scheduling time per sequence and step.
Prints Markdown tables, then one JSON line per row with machine and commit.

    python benchmarks/paging.py [--traces DIR] [--quick] [--tables abcd]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from paging_runs import decode_times, endless_share

from octavo.core.scheduler import Scheduler
from octavo.planning.load.traces import TraceLine, read_trace
from octavo.planning.machine import describe_machine
from octavo.planning.study.paging import FINAL, LONGEST, build_memory
from octavo.planning.study.traffic import STEP_SECONDS, PagedMemory, Usage, run

HERE = Path(__file__).resolve().parent
LONGEST_BUFFER = 14_050 + 39  # the longest prompt of the Azure trace, and its answer
POOLS = (250_000, 1_000_000, 4_000_000)
BLOCK_SIZES = (16, 32, 128)
BATCHES = (8, 64, 512, 4096)
Row = dict[str, Any]


def azure_row(kind: str, pool: int, lines: list[TraceLine], *, as_backlog: bool) -> Row:
    """Serve the Azure trace once and return its row of tables (a) and (b)."""
    scheduler = Scheduler(
        build_memory(kind, pool, LONGEST_BUFFER),  # type: ignore[arg-type]
        max_num_batched_tokens=65_536 if as_backlog else 2048,
        max_num_seqs=8192 if as_backlog else 256,
    )
    usage: Usage = run(scheduler, lines, as_backlog=as_backlog)
    return {
        "table": "b" if as_backlog else "a",
        "pool": pool,
        "memory": kind,
        "empty_mean": usage.mean_share,
        "empty_p95": usage.quantile(0.95),
        "empty_max": usage.quantile(1),
        "running": usage.mean_running,
        "most_running": usage.most_running,
        "most_allocated": usage.most_allocated,
        "num_steps": usage.num_steps,
        "num_preemptions": scheduler.counters.num_preemptions,
        "num_requests": len(lines),
    }


def mooncake_row(pool: int, block_size: int, lines: list[TraceLine]) -> Row:
    """Serve the Mooncake trace once and return its row of table (c)."""
    blocks = PagedMemory(pool // block_size, block_size)
    scheduler = Scheduler(blocks, max_num_batched_tokens=2048, max_num_seqs=256)
    usage = run(scheduler, lines, as_backlog=False, measure=False)
    counters = scheduler.counters
    return {
        "table": "c",
        "pool": pool,
        "memory": f"blocks of {block_size}",
        "served": counters.num_reused_tokens / counters.num_prompt_tokens,
        "endless": endless_share(lines),
        "running": usage.mean_running,
        "num_steps": usage.num_steps,
        "num_preemptions": counters.num_preemptions,
        "num_evicted": blocks.num_evicted,
        "num_requests": len(lines),
    }


def decode_row(num_seqs: int, num_repetitions: int) -> Row:
    """Time steady decode and return its row of table (d), in microseconds."""
    times = [1e6 * t for t in decode_times(num_seqs, num_repetitions=num_repetitions)]
    return {
        "table": "d",
        "num_seqs": num_seqs,
        "min_us": min(times),
        "median_us": statistics.median(times),
        "num_repetitions": num_repetitions,
    }


def collect(traces: Path, tables: str, *, quick: bool, full: bool) -> list[Row]:
    """Run every cell and return the rows; progress goes to stderr."""
    rows: list[Row] = []
    started = time.perf_counter()

    def note(row: Row, label: str) -> None:
        rows.append(row)
        print(f"[{time.perf_counter() - started:6.1f} s] {label}", file=sys.stderr, flush=True)

    pools = POOLS[:1] if quick else POOLS
    kinds = [*(f"blocks of {size}" for size in BLOCK_SIZES), FINAL, LONGEST]
    if "d" in tables:
        for num_seqs in BATCHES[:2] if quick else BATCHES:
            note(decode_row(num_seqs, 3 if quick else 7), f"(d) {num_seqs} sequences decode")
    azure = read_trace(traces / "azure_conv.csv")[: 1000 if quick else None]
    if "a" in tables:
        for kind in kinds:
            # By its own clock the trace needs less than the middle pool: one pool stands for all.
            row = azure_row(kind, pools[0] if quick else POOLS[1], azure, as_backlog=False)
            note(row, f"(a) by the trace's clock, {kind}")
    if "b" in tables:
        for pool in pools:
            # The middle pool shows all block sizes; the others, to save time, the usual one.
            for kind in kinds if quick or full or pool == POOLS[1] else kinds[1:2] + kinds[3:]:
                row = azure_row(kind, pool, azure, as_backlog=True)
                note(row, f"(b) backlog, {pool:,} slots, {kind}")
    if "c" in tables:
        mooncake = read_trace(traces / "mooncake_conversation.jsonl")[: 500 if quick else None]
        for pool in pools:
            note(mooncake_row(pool, 32, mooncake), f"(c) shared prefixes, {pool:,} slots")
        # Large enough to evict nothing; large blocks only to keep the benchmark itself small.
        note(mooncake_row(120_000_000, 512, mooncake), "(c) shared prefixes, nothing evicted")
    return rows


# --- printing -------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """Write a share with two decimals."""
    return f"{100 * share:.2f} %"


def print_table(title: str, header: list[str], lines: list[list[str]]) -> None:
    """Print a Markdown table, padded so that it also reads as text."""
    if not lines:
        return
    widths = [max(len(row[i]) for row in [header, *lines]) for i in range(len(header))]
    print(f"\n{title}\n")
    for row in (header, ["-" * width for width in widths], *lines):
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |")


def print_tables(rows: list[Row]) -> None:
    """Print the four tables."""
    by = {table: [row for row in rows if row["table"] == table] for table in "abcd"}
    for table, title in (
        (
            "a",
            "(a) Allocated slots that hold nothing, Azure conversations by their own clock, which"
            " never fill the pool, so one stands for all",
        ),
        (
            "b",
            "(b) Azure conversations, all waiting from the start: who runs at once, empty slots"
            " (without --full, blocks of 16 and 128 in the middle pool only)",
        ),
    ):
        print_table(
            title,
            ["pool", "memory", "running", "empty, mean", "p95", "max", "steps", "preempted"],
            [
                [
                    f"{r['pool'] / 1e6:g} M",
                    r["memory"],
                    f"{r['running']:,.0f}" if table == "b" else f"at most {r['most_running']}",
                    percent(r["empty_mean"]),
                    percent(r["empty_p95"]),
                    percent(r["empty_max"]),
                    f"{r['num_steps']:,}",
                    f"{r['num_preemptions']:,}",
                ]
                for r in by[table]
            ],
        )
    print_table(
        "(c) Prompt tokens served from shared blocks, Mooncake conversations",
        ["pool", "memory", "served", "endless cache", "steps", "preempted", "evicted"],
        [
            [
                f"{r['pool'] / 1e6:g} M",
                r["memory"],
                percent(r["served"]),
                percent(r["endless"]),
                f"{r['num_steps']:,}",
                f"{r['num_preemptions']:,}",
                f"{r['num_evicted']:,}",
            ]
            for r in by["c"]
        ],
    )
    print_table(
        "(d) Microseconds to schedule and commit, per sequence and step, steady decode",
        ["running", "min", "median"],
        [[f"{r['num_seqs']:,}", f"{r['min_us']:.2f}", f"{r['median_us']:.2f}"] for r in by["d"]],
    )


def main() -> int:
    """Run the benchmark; 2 if the traces are missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--traces", type=Path, default=HERE.parent.parent / "shared" / "traces")
    parser.add_argument(
        "--quick", action="store_true", help="the beginning of each trace, one pool"
    )
    parser.add_argument("--full", action="store_true", help="every block size in every pool of (b)")
    parser.add_argument("--tables", default="abcd", help="which of the tables a, b, c, d")
    options = parser.parse_args()
    if not (options.traces / "azure_conv.csv").exists():
        print(f"No traces in {options.traces}: give their folder with --traces.", file=sys.stderr)
        return 2
    rows = collect(options.traces, options.tables, quick=options.quick, full=options.full)
    print_tables(rows)
    print()
    about = {"benchmark": "paging", **describe_machine(), "quick": options.quick}
    for row in rows:
        print(json.dumps(about | {"step_seconds": STEP_SECONDS} | row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
