"""`octavo program`: a model's operations as a table.

Decides how the rows of `program.describe` look on a terminal. Invariant: a directory's weights are
never opened; its `config.json` is enough.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from octavo.engine.load import read_config
from octavo.models.config import ModelConfig
from octavo.models.registry import build_program
from octavo.program.describe import Row, describe
from octavo.program.fuse import fuse
from octavo.program.program import Program

_HEADINGS = ("layers", "operation", "values", "parameters", "numbers", "flops", "bytes")
_NUM_TEXTS = 4  # columns that are texts; the rest are numbers


def run_program(model: str, *, context: int, plain: bool) -> None:
    """Print a model's operations and what they cost for one token that sees `context` positions."""
    config = read_config(model)
    program = build_program(config)
    if not plain:
        program = fuse(program)
    rows = describe(program, context)
    for line in _table(_cells(rows)):
        print(line)
    print()
    for line in _totals(config, program, rows, context):
        print(line)


def _cells(rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    above: tuple[int, int] | None = None
    for row in rows:
        first, last = row.layers or (0, 0)
        layers = f"{first}-{last}" if last > first else str(first)
        window = f" {row.window}" if row.window else ""
        yield (
            layers if row.layers and row.layers != above else "",
            row.operation + window,
            f"{_names(row.reads) or 'token'} -> {_names(row.writes) or _END[row.operation]}",
            _names(row.parameters),
            _short(row.num_parameters),
            _short(row.flops),
            _short(row.bytes),
        )
        above = row.layers


# What an operation without a named output writes to.
_END = {"WriteKV": "pages", "Sample": "token"}


def _names(values: Sequence[str]) -> str:
    """Join names; those of the row's own layer need no number, P is the layer before."""
    return ", ".join(v.replace("layers.N.", "").replace("layers.P.", "P.") for v in values)


def _table(cells: Iterable[tuple[str, ...]]) -> Iterator[str]:
    lines = [_HEADINGS, *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (
            text.ljust(width) if index < _NUM_TEXTS else text.rjust(width)
            for index, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(padded).rstrip()


def _totals(
    config: ModelConfig, program: Program, rows: Sequence[Row], context: int
) -> Iterator[str]:
    num_parameters = sum(map(math.prod, program.parameters.values()))
    flops = program.flops_per_token(context)
    num_bytes = int(sum(row.bytes * row.count for row in rows))
    kv_bytes = int(program.kv_bytes_per_token())
    if any("layers.P." in name for row in rows for name in (*row.reads, *row.writes)):
        yield "P. stands for the layer before; numbers, flops and bytes are of one layer."
    num_layers, num_operations = len(config.layers), len(program.operations)
    yield (
        f"{config.architecture}: {num_layers} layers, {num_operations} operations, "
        f"{num_parameters:,} parameters"
    )
    yield f"{flops:,} flops for one token that sees {context:,} positions"
    yield (
        f"{num_bytes:,} bytes for it, with weights in float32: "
        f"{flops / num_bytes:.2f} flops per byte"
    )
    yield f"{kv_bytes:,} bytes of KV cache per token, in bfloat16"


def _short(number: float) -> str:
    """Return a number with three digits and a unit, or nothing for 0."""
    if not number:
        return ""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"
