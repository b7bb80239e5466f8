"""How fast each operator of the native library runs, by instruction set, shape and number of rows.

Weights are cycled through more memory than the caches hold. GB/s count packed weights (attention:
keys and values), GFLOP/s two operations per multiplication. Instruction sets take turns, so that
what else the machine does falls on all alike; the figure is the fastest of the rounds.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from octavo.executors.executor import SampleRow
from octavo.executors.native_sampling import NativeSampling
from octavo.executors.packing import HugePages
from octavo.native import library
from octavo.planning.machine import describe_machine
from octavo.request import Request, SamplingParams

# (inputs, outputs): of SmolLM2-135M, and of a model of 1 billion weights.
SHAPES = {
    "smollm2 qkv": (576, 960),
    "smollm2 gate_up": (576, 3072),
    "smollm2 down": (1536, 576),
    "1b gate_up": (2048, 16384),
    "1b down": (8192, 2048),
}
QUICK_SHAPES = ("smollm2 gate_up", "smollm2 down")
# (heads, kv_heads, head_dim)
HEADS = {"smollm2 attention": (9, 3, 64), "1b attention": (32, 8, 64)}
# Rows of logits that fall like a language's, by the logarithm of the rank.
VOCABULARIES = {"smollm2 sample": 49_152, "gemma3 sample": 262_144}
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "logprobs 5": {"temperature": 0, "logprobs": 5},
    "penalties": {"temperature": 0, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
}
# Operations on each element that has a weight.
WEIGHT_FLOPS = 34
FORMATS = ("int4", "int8", "int4_group", "int8_group", "bf16")
ROWS = (1, 8, 64, 512)
CYCLED_BYTES = 100_000_000
BLOCK_SIZE = 32
# Of a decoded row; the context of a prompt is its own length.
CONTEXT = 256


class Case(NamedTuple):
    """One call of the library, and what it moves and computes."""

    run: Callable[[], None]
    num_bytes: float
    flops: float


def product_case(
    lib: Any, isa: str, threads: int, form: str, shape: tuple[int, int], rows: int
) -> Case:
    """Multiply `rows` rows with as many matrices as outgrow the caches."""
    inputs, outputs = shape
    size = -(-outputs // 16) * lib.panel_bytes(form, inputs)
    copies = max(1, CYCLED_BYTES // size) if rows < 64 else 2
    # From 32 to 63: scales and floats of ordinary size, none subnormal.
    panels = HugePages().zeros(copies * size).reshape(copies, size)
    panels[:] = np.random.default_rng(0).integers(32, 64, size, np.uint8)
    x = np.random.default_rng(1).standard_normal((rows, inputs), np.float32)
    out = np.zeros((rows, outputs), np.float32)
    tape = lib.Tape(isa, 0, 1, BLOCK_SIZE, 1, 16, 2, rows, threads)
    for panel in panels:
        op = lib.Operation(lib.Kind.linear)
        op.x, op.out = _value(lib, x), _value(lib, out)
        op.matrices = [lib.Matrix(panel.ctypes.data, outputs, inputs, form)]
        op.set_biases([0])
        tape.add(op)
    step = _Step([(1, 1)] * rows)
    kept = (panels, x, out)

    def run(_: Any = kept) -> None:
        tape.run(step.native(lib), 0, copies)

    return Case(run, copies * size, 2.0 * copies * rows * inputs * outputs)


def attention_case(
    lib: Any, isa: str, threads: int, heads: tuple[int, int, int], element: int, rows: int
) -> Case:
    """Attend with up to 64 decoded rows, or with one prompt of more.

    element: bytes of a number in the pages; 1 is int8, 2 bfloat16.
    """
    num, kv_heads, dim = heads
    chunks = [(1, CONTEXT)] * rows if rows <= 64 else [(rows, rows)]
    step = _Step(chunks)
    layers = 8
    # A page, as halves: small numbers of either type, and float scales of ordinary size.
    page = np.random.default_rng(0).integers(0x3C00, 0x3F00, element * BLOCK_SIZE * dim, np.uint16)
    if element == 1:
        scales = np.full(2 * BLOCK_SIZE, 0.01, np.float32)
        page = np.concatenate([page, scales.view(np.uint16)])
    num_pages = step.num_blocks * layers * kv_heads
    pages = HugePages().zeros(num_pages * page.nbytes).view(np.uint16).reshape(num_pages, -1)
    pages[:] = page
    q = np.random.default_rng(1).standard_normal((rows, num * dim), np.float32)
    out = np.zeros_like(q)
    tape = lib.Tape(
        isa, pages.ctypes.data, layers, BLOCK_SIZE, kv_heads, dim, element, rows, threads
    )
    for layer in range(layers):
        op = lib.Operation(lib.Kind.attention)
        op.x, op.out, op.layer = _value(lib, q), _value(lib, out), layer
        op.heads, op.kv_heads, op.head_dim, op.scale = num, kv_heads, dim, dim**-0.5
        tape.add(op)
    positions = sum(context for _, context in chunks)
    seen = sum(tokens * (2 * context - tokens + 1) / 2 for tokens, context in chunks)
    kept = (pages, q, out)

    def run(_: Any = kept) -> None:
        tape.run(step.native(lib), 0, layers)

    num_bytes = layers * positions * kv_heads * page.nbytes / BLOCK_SIZE
    return Case(run, num_bytes, layers * seen * num * dim * 4.0)


class _Batch(NamedTuple):
    """What `NativeSampling` reads of a batch."""

    logit_rows: range
    samples: tuple[SampleRow, ...]
    prompt_rows: tuple[()] = ()


def sample_case(
    lib: Any, isa: str, threads: int, vocab: int, asked: dict[str, Any], rows: int
) -> Case:
    """Draw from `rows` rows of logits, lists made of the parameters and of the tokens included."""
    rng = np.random.default_rng(0)
    ranks = np.stack([rng.permutation(vocab) for _ in range(rows)])
    logits = (-1.5 * np.log1p(ranks)).astype(np.float32)
    params = SamplingParams(**asked)
    prompt = list(range(100))
    history = (*prompt, *range(50, 150)) if params.needs_history else ()
    requests = [
        Request(request_id="r", prompt_token_ids=prompt, params=params, max_tokens=9, seed=n)
        for n in range(rows)
    ]
    samples = [SampleRow(n, r, 0, 200, 100, history) for n, r in enumerate(requests)]
    batch, sampling = _Batch(range(rows), tuple(samples)), NativeSampling(lib, vocab)
    tape = lib.Tape(isa, 0, 1, BLOCK_SIZE, 1, 16, 2, rows, threads)
    op = lib.Operation(lib.Kind.sample)
    op.x = _value(lib, logits)
    nothing = lib.Operation(lib.Kind.select_rows)  # of no width: the logits are there
    tape.add(nothing)
    tape.add(op)
    step = _Step([(1, 1)] * rows)

    def run(_: Any = logits) -> None:
        draws = sampling.prepare(batch)  # type: ignore[arg-type]
        tape.sample(step.native(lib), rows, draws)
        sampling.collect(batch, draws)  # type: ignore[arg-type]

    weighed = set(asked) & {"top_p", "logprobs"} or asked.get("temperature")
    return Case(run, rows * vocab * 4.0, rows * vocab * WEIGHT_FLOPS * bool(weighed))


class _Step:
    """The arrays of a step of chunks, each (tokens, context)."""

    def __init__(self, chunks: list[tuple[int, int]]) -> None:
        widest = max(-(-context // BLOCK_SIZE) for _, context in chunks)
        self.num_blocks = widest * len(chunks)
        rows = sum(tokens for tokens, _ in chunks)
        self.arrays = [
            np.zeros(rows),
            np.concatenate([np.arange(context - tokens, context) for tokens, context in chunks]),
            np.cumsum([0] + [tokens for tokens, _ in chunks]),
            np.arange(self.num_blocks),
            np.array([context for _, context in chunks]),
            np.zeros(1),
        ]
        self.arrays = [np.ascontiguousarray(array, np.int32) for array in self.arrays]
        self.sizes = [rows, len(chunks), widest, rows]

    def native(self, lib: Any) -> Any:
        return lib.Step([array.ctypes.data for array in self.arrays], self.sizes)


def _value(lib: Any, array: np.ndarray) -> Any:
    return lib.Value(array.ctypes.data, array.strides[0] // 4, array.shape[1])


def measure(cases: dict[str, Case], rounds: int) -> dict[str, float]:
    """Return for each case the least seconds of `rounds`, the cases taking turns."""
    best = dict.fromkeys(cases, float("inf"))
    for round_ in range(rounds + 1):  # the first only warms up
        for name, case in cases.items():
            started = time.perf_counter()
            case.run()
            if round_:
                best[name] = min(best[name], time.perf_counter() - started)
    return best


def all_cases(
    lib: Any, isas: list[str], threads: int, shapes: tuple[str, ...], formats: tuple[str, ...]
) -> Iterator[tuple[str, str, int, dict[str, Case]]]:
    """Give (operator, format, rows, a case per instruction set)."""
    for name in shapes:
        for form in formats:
            for rows in ROWS:
                shape = SHAPES[name]
                yield (
                    name,
                    form,
                    rows,
                    {isa: product_case(lib, isa, threads, form, shape, rows) for isa in isas},
                )
    for name, heads in HEADS.items():
        for element, form in ((2, "bfloat16 pages"), (1, "int8 pages")):
            for rows in ROWS:
                yield (
                    name,
                    form,
                    rows,
                    {isa: attention_case(lib, isa, threads, heads, element, rows) for isa in isas},
                )


def sample_cases(
    lib: Any, isas: list[str], threads: int
) -> Iterator[tuple[str, str, int, dict[str, Case]]]:
    """Give the cases of sampling like `all_cases` gives the others."""
    for name, vocab in VOCABULARIES.items():
        for asked_name, asked in PARAMETERS.items():
            for rows in (1, 64):
                yield (
                    name,
                    asked_name,
                    rows,
                    {isa: sample_case(lib, isa, threads, vocab, asked, rows) for isa in isas},
                )


def main() -> None:
    """Print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few shapes, two rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", nargs="*", help="instruction sets; all but generic if not given")
    parser.add_argument("--sample", action="store_true", help="sampling alone")
    parser.add_argument("--format", nargs="*", default=FORMATS, choices=FORMATS)
    args = parser.parse_args()
    if library is None:
        sys.exit("The native library is not built.")
    isas = args.isa or [isa for isa in library.instruction_sets() if isa != "generic"]
    shapes = QUICK_SHAPES if args.quick else tuple(SHAPES)
    results = []
    print(f"{'operator':18} {'format':14} {'rows':>4}  " + "".join(f"{isa:>40}" for isa in isas))
    cases_of_all = itertools.chain(
        () if args.sample else all_cases(library, isas, args.threads, shapes, args.format),
        sample_cases(library, isas, args.threads),
    )
    for name, form, rows, cases in cases_of_all:
        best = measure(cases, 2 if args.quick else 5)
        line = f"{name:18} {form:14} {rows:4}  "
        for isa, case in cases.items():
            gigabytes, gigaflops = case.num_bytes / best[isa] / 1e9, case.flops / best[isa] / 1e9
            line += (
                f"{gigabytes:9.1f} GB/s {gigaflops:7.0f} GF {best[isa] / rows * 1e6:8.1f} us/row"
            )
            results.append(
                {"operator": name, "format": form, "rows": rows, "isa": isa}
                | {"us_per_row": round(best[isa] / rows * 1e6, 2)}
                | {"gigabytes_per_s": round(gigabytes, 2), "gigaflops": round(gigaflops, 1)}
            )
        print(line, flush=True)
    print(json.dumps({"machine": describe_machine(), "threads": args.threads, "results": results}))


if __name__ == "__main__":
    main()
