"""Generating with the KV cache and without it: flops from the program, seconds from a clock.

The experiment is `octavo.planning.study.cache_gain`'s; here it is on a text, for the table of
record. The two ways must generate the same tokens.
"""

import argparse
import json
import sys
from typing import Any

from octavo import LLM
from octavo.engine.clock import monotonic
from octavo.engine.load import open_model
from octavo.models.registry import build_program
from octavo.planning.machine import describe_machine
from octavo.planning.study.cache_gain import Row, Way, compare
from octavo.planning.study.workbench import warm_up

PROMPT = (
    "The history of the lighthouse begins with fires on hilltops, lit to guide ships home. " * 8
)


def main() -> int:
    """Print one row per answer length; return 1 if the two ways generated different tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 32, 64])
    options = parser.parse_args()
    program = build_program(open_model(options.model).config)
    rows = []
    with LLM(options.model, enable_prefix_caching=False, max_num_batched_tokens=4096) as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(PROMPT)
        warm_up(llm.engine, len(ids))
        for num_new in options.lengths:
            print(f"{num_new} tokens after {len(ids)} ...", file=sys.stderr)
            row = compare(llm.engine, program, ids, num_new, monotonic)
            if not row.is_same:
                print("The tokens differ with and without the cache.", file=sys.stderr)
                return 1
            rows.append({"prompt": len(ids), **_figures(row)})
    _print_table(rows)
    print(json.dumps({"machine": describe_machine(), "model": options.model, "rows": rows}))
    return 0


def _figures(row: Row) -> dict[str, Any]:
    return {
        "generated": row.num_new,
        "cached": _way_figures(row.cached),
        "uncached": _way_figures(row.uncached),
    }


def _way_figures(way: Way) -> dict[str, float]:
    return {
        **{kind: round(count, 3) for kind, count in way.flops.items()},
        "seconds": round(way.seconds, 3),
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    columns = ("projections", "attention", "rest", "seconds")
    print("GFLOP of " + ", ".join(columns[:-1]) + " / seconds, with the cache | without | ratio")
    for row in rows:
        cells = [
            " / ".join(f"{row[way][c]:,.2f}" for c in columns) for way in ("cached", "uncached")
        ]
        ratio = row["uncached"]["seconds"] / row["cached"]["seconds"]
        print(f"{row['generated']:>4} tokens | {cells[0]} | {cells[1]} | {ratio:.1f}x")


if __name__ == "__main__":
    sys.exit(main())
