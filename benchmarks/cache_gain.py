"""Generating with the KV cache and without it: flops from the program, seconds from a clock.

Without a cache every token recomputes all tokens before it, so the projections (every product with
a weight) grow with the square of the answer's length; with it they grow linearly. Attention is its
own term: quadratic with a cache, cubic without. The two ways must generate the same tokens.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from typing import Any

from octavo import LLM, SamplingParams
from octavo.engine.load import open_model
from octavo.models.registry import build_program
from octavo.planning.machine import describe_machine
from octavo.program.ops import Attention, Linear, Operation
from octavo.program.program import Chunk, Program

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPT = (
    "The history of the lighthouse begins with fires on hilltops, lit to guide ships home. " * 8
)


def gigaflops(program: Program, steps: Iterable[Chunk]) -> dict[str, float]:
    """Return 10^9 flops of projections, attention and the rest; each step draws one token."""
    sums = {"projections": 0, "attention": 0, "rest": 0}
    for step in steps:
        for op in program.body:
            sums[_kind(op)] += op.flops(*step)
        for op in program.head:
            sums[_kind(op)] += op.flops(1)
    return {kind: round(count / 1e9, 3) for kind, count in sums.items()}


def _kind(op: Operation) -> str:
    if isinstance(op, Linear):
        return "projections"
    return "attention" if isinstance(op, Attention) else "rest"


def cached_steps(num_prompt: int, num_new: int) -> list[Chunk]:
    """Return the chunks computed with a cache: the prompt, then one token at a time."""
    return [Chunk(num_prompt, num_prompt)] + [Chunk(1, num_prompt + i) for i in range(1, num_new)]


def uncached_steps(num_prompt: int, num_new: int) -> list[Chunk]:
    """Return the chunks computed without one: everything so far, for each token."""
    return [Chunk(num_prompt + i, num_prompt + i) for i in range(num_new)]


def run_cached(llm: LLM, ids: list[int], num_new: int) -> tuple[list[int], float]:
    """Generate through the cache; return the tokens and the seconds."""
    started = time.perf_counter()
    params = SamplingParams(max_tokens=num_new, **GREEDY)
    output = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
    return output.outputs[0].token_ids, time.perf_counter() - started


def run_uncached(llm: LLM, ids: list[int], num_new: int) -> tuple[list[int], float]:
    """Generate each token by a request of its own, which shares nothing with the ones before."""
    started = time.perf_counter()
    tokens: list[int] = []
    params = SamplingParams(max_tokens=1, **GREEDY)
    for _ in range(num_new):
        output = llm.generate({"prompt_token_ids": ids + tokens}, params, use_tqdm=False)[0]
        tokens += output.outputs[0].token_ids
    return tokens, time.perf_counter() - started


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
        run_cached(llm, ids, 2)  # warm-up: pages and weights are touched once
        for num_new in options.lengths:
            print(f"{num_new} tokens after {len(ids)} ...", file=sys.stderr)
            with_cache, cached_seconds = run_cached(llm, ids, num_new)
            without, uncached_seconds = run_uncached(llm, ids, num_new)
            if with_cache != without:
                print("The tokens differ with and without the cache.", file=sys.stderr)
                return 1
            rows.append(
                {
                    "prompt": len(ids),
                    "generated": num_new,
                    "cached": _figures(program, cached_steps(len(ids), num_new), cached_seconds),
                    "uncached": _figures(
                        program, uncached_steps(len(ids), num_new), uncached_seconds
                    ),
                }
            )
    _print_table(rows)
    print(json.dumps({"machine": describe_machine(), "model": options.model, "rows": rows}))
    return 0


def _figures(program: Program, steps: list[Chunk], seconds: float) -> dict[str, float]:
    return {**gigaflops(program, steps), "seconds": round(seconds, 3)}


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
