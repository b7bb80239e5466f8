"""How a step's time grows, beside the bound of this machine.

Decoding over batch and context, and prompts over their length, on an idle machine. The bound of an
operation is what its flops take at the measured peak of its format, or its bytes of weights, keys
and values at the measured bandwidth, whichever is longer; a step's is the sum of them. What is
counted is `octavo.cost`'s account, the peaks are `octavo doctor`'s.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from octavo.config import EngineConfig
from octavo.cost.accounting import PreparedProgram, account
from octavo.cost.hardware import Machine
from octavo.engine import clock
from octavo.engine.start import start_engine
from octavo.native import library, why_missing
from octavo.planning.doctor import diagnose
from octavo.planning.machine import describe_machine
from octavo.planning.plan import prepared_for
from octavo.planning.probes import Prober
from octavo.planning.steps import num_blocks, step_seconds
from octavo.planning.subject import read_subject
from octavo.program.program import Chunk

BATCHES = (1, 4, 16, 64)
CONTEXTS = (64, 256, 1024, 4096)
PROMPTS = (128, 512, 1024, 2048, 4096)
STEP = 512  # tokens of a prompt in one step
MOST_TOKENS = 140_000  # 3 GB of SmolLM2's keys and values


def bound_seconds(prepared: PreparedProgram, chunks: Sequence[Chunk], machine: Machine) -> float:
    """Return the least time of a step at the machine's peaks."""
    return sum(
        max(
            cost.flops / machine.rate(cost.form),
            (cost.traffic.total - cost.traffic.activations) / machine.bandwidth,
        )
        for cost in account(prepared, chunks, len(chunks))
    )


def prompt_steps(length: int) -> list[list[Chunk]]:
    """Return the steps that compute a prompt."""
    ends = [*range(STEP, length, STEP), length]
    return [[Chunk(end - begin, end)] for begin, end in zip([0, *ends], ends, strict=False)]


def works() -> dict[tuple[str, int, int], list[list[Chunk]]]:
    """Return the steps of each cell, by what it is: batch and context, or a prompt's length."""
    decodes = {
        ("decode", batch, context): [[Chunk(1, context)] * batch]
        for batch in BATCHES
        for context in CONTEXTS
        if batch * context <= MOST_TOKENS
    }
    return decodes | {("prompt", 1, length): prompt_steps(length) for length in PROMPTS}


def measure(model: str, repeats: int) -> list[dict[str, Any]]:
    """Return each cell's milliseconds and its bound."""
    machine = diagnose(library, why_missing, Prober(library, clock.monotonic)).machine
    if machine is None:
        sys.exit(f"There is nothing to measure: {why_missing}.")
    steps = works()
    most = max(num_blocks(step, 32) for each in steps.values() for step in each)
    config = EngineConfig.from_dict(
        {
            "model": model,
            "num_gpu_blocks_override": most,
            "max_num_seqs": max(BATCHES),
            "max_num_batched_tokens": STEP,
        }
    )
    prepared = prepared_for(read_subject(model), machine, config)
    executor: Any = start_engine(config).engine.executor
    executor.pages[:] = 0x3F  # an untouched page would be read from one cache line
    found = []
    for (kind, batch, tokens), each in steps.items():
        seconds = sum(step_seconds(executor, step, repeats) for step in each)
        bound = sum(bound_seconds(prepared, step, machine) for step in each)
        found.append(
            {
                "work": kind,
                "batch": batch,
                "tokens": tokens,
                "ms": round(seconds * 1e3, 2),
                "bound_ms": round(bound * 1e3, 2),
                "share": round(bound / seconds, 2),
            }
        )
        print(*found[-1].values(), file=sys.stderr)
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the cells as two tables: milliseconds, and the bound's share of them."""
    cells = {(f["batch"], f["tokens"]): f for f in found if f["work"] == "decode"}
    lines = ["| decode: batch | " + " | ".join(f"context {c:,}" for c in CONTEXTS) + " |"]
    lines.append("| --- " * (len(CONTEXTS) + 1) + "|")
    for batch in BATCHES:
        row = [cells.get((batch, context)) for context in CONTEXTS]
        texts = [f"{f['ms']:.1f} ms, {f['share']:.0%}" if f else "" for f in row]
        lines.append(f"| {batch} | " + " | ".join(texts) + " |")
    lines += ["", "| prompt | ms | tokens/s | bound's share |", "| --- | --- | --- | --- |"]
    for f in found:
        if f["work"] == "prompt":
            rate = f["tokens"] / f["ms"] * 1e3
            lines.append(f"| {f['tokens']:,} | {f['ms']:,.0f} | {rate:,.0f} | {f['share']:.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5, help="of each step; the median counts")
    options = parser.parse_args()
    found = measure(options.model, options.repeats)
    print(table(found))
    print(json.dumps({"machine": describe_machine(), "model": options.model, "steps": found}))


if __name__ == "__main__":
    main()
