"""Recorded arrivals and lengths of production services, in two public formats.

Azure's CSV has TIMESTAMP, ContextTokens and GeneratedTokens; Mooncake's JSON lines have timestamp
in milliseconds, input_length, output_length and the hash ids of the prompt's 512-token blocks.
Decides what a sound line is. Knows nothing of tokens or servers.

Invariant: arrivals are seconds after the first line's, in the file's order, and never fall.
"""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from octavo.errors import BadRequestError, shorten

T = TypeVar("T")
# Tokens of a block that one hash id of a Mooncake trace stands for.
TRACE_BLOCK = 512
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request: seconds after the first one, tokens, and hashes of its blocks if known."""

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()


def read_trace(path: Path) -> list[TraceLine]:
    """Return the lines of a trace; a `BadRequestError` names file, line, column and value."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequestError(f"Cannot read {path} as a trace: {error}.") from None
    rows = text.splitlines()
    is_json = bool(rows) and rows[0].lstrip().startswith("{")
    lines = list(_checked(path, _mooncake(rows) if is_json else _azure(path, rows)))
    if not lines:
        raise BadRequestError(f"{path} has no requests.")
    return lines


def _checked(path: Path, parsed: Iterable[tuple[int, Any]]) -> Iterator[TraceLine]:
    """Shift arrivals to begin at 0, and refuse what no request can be."""
    start = last = None
    for number, found in parsed:
        if isinstance(found, Exception):
            raise BadRequestError(f"{path}, line {number}: {found}.")
        start = found.arrival if start is None else start
        if found.num_prompt_tokens < 1 or found.num_output_tokens < 1:
            raise BadRequestError(
                f"{path}, line {number}: {found.num_prompt_tokens} prompt tokens and "
                f"{found.num_output_tokens} generated ones; both must be at least 1."
            )
        if not math.isfinite(found.arrival) or (last is not None and found.arrival < last):
            raise BadRequestError(
                f"{path}, line {number}: {found.arrival} s is no time after the line above it."
            )
        last = found.arrival
        yield TraceLine(
            found.arrival - start,
            found.num_prompt_tokens,
            found.num_output_tokens,
            found.block_hashes,
        )


def _azure(path: Path, rows: list[str]) -> Iterator[tuple[int, TraceLine | Exception]]:
    reader = csv.DictReader(rows)
    missing = [name for name in _AZURE if name not in (reader.fieldnames or ())]
    if missing:
        raise BadRequestError(
            f"{path} is no trace: it begins neither with {{ as Mooncake's JSON lines do nor with "
            f"the columns {', '.join(_AZURE)}."
        )
    for row in reader:
        try:
            # Seven digits of a second; Python reads six.
            arrived = _field(row, "TIMESTAMP", lambda text: datetime.fromisoformat(text[:26]))
            found = TraceLine(
                arrived.replace(tzinfo=UTC).timestamp(),
                _field(row, "ContextTokens", int),
                _field(row, "GeneratedTokens", int),
            )
        except (ValueError, OverflowError) as error:
            yield reader.line_num, error
        else:
            yield reader.line_num, found


def _mooncake(rows: list[str]) -> Iterator[tuple[int, TraceLine | Exception]]:
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            yield number, _mooncake_line(row)
        except json.JSONDecodeError as error:
            yield number, ValueError(f"column {error.colno}: {error.msg} in {shorten(row)}")
        except (ValueError, RecursionError) as error:
            yield number, error


def _mooncake_line(row: str) -> TraceLine:
    value = json.loads(row)
    if not isinstance(value, dict):
        raise ValueError(f"column 1: {shorten(row)} is no object")
    found = TraceLine(
        _field(value, "timestamp", float) / 1e3,
        _field(value, "input_length", int),
        _field(value, "output_length", int),
        _field({"hash_ids": (), **value}, "hash_ids", lambda ids: tuple(map(int, ids))),
    )
    if found.block_hashes and len(found.block_hashes) != -(-found.num_prompt_tokens // TRACE_BLOCK):
        raise ValueError(
            f"hash_ids: {len(found.block_hashes)} of them for {found.num_prompt_tokens} tokens"
        )
    return found


def _field(row: Mapping[str, Any], name: str, convert: Callable[[Any], T]) -> T:
    """Return a column's value; a `ValueError` names the column and what stands there."""
    try:
        return convert(row[name])
    except KeyError:
        raise ValueError(f"{name} is missing in {shorten(row)}") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{name}: {shorten(row[name])}: {error}") from None
