"""`octavo doctor`: what this machine can do, and what in its set-up costs speed.

Decides how a diagnosis looks on a terminal and as JSON. Invariant: the first line names executor
and instruction set; progress goes to standard error.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from octavo.engine import clock
from octavo.engine.kept import keep
from octavo.native import library, why_missing
from octavo.planning.doctor import Diagnosis, diagnose, meanings
from octavo.planning.probes import FORMATS, WORKING_SETS, Prober


def run_doctor(*, as_json: bool, save: bool = True) -> None:
    """Measure, print, and keep the result for `octavo plan`."""
    prober = Prober(library, clock.monotonic)
    diagnosis = diagnose(library, why_missing, prober, _report)
    place = keep(diagnosis.machine) if save and diagnosis.machine is not None else None
    if as_json:
        print(json.dumps(diagnosis_json(diagnosis)))
        return
    for line in _lines(diagnosis):
        print(line)
    if place is not None:
        print(f"\nKept in {place}; `octavo plan` uses it.")


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as plain values: rates per second, times in seconds."""
    return {**asdict(diagnosis), "meanings": list(meanings(diagnosis))}


def _report(what: str) -> None:
    print(f"measuring {what} ...", file=sys.stderr)


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.machine is None:
        yield f"reference executor (NumPy, one thread): {diagnosis.obstacle}"
    else:
        sets = diagnosis.instruction_sets
        yield (
            f"cpu executor with {sets[0]} (of {', '.join(sets)}), "
            f"{diagnosis.num_threads} thread{'s'[: diagnosis.num_threads > 1]}"
        )
        yield ""
        yield from _bandwidth(diagnosis)
        yield ""
        yield from _products(diagnosis)
        yield ""
        yield "What that means"
        yield from (f"  {line}" for line in meanings(diagnosis))
    yield ""
    yield "Set-up (! costs speed)"
    for finding in diagnosis.findings:
        yield f"  {'!' if finding.costs_speed else ' '} {finding.text}"


def _bandwidth(diagnosis: Diagnosis) -> Iterator[str]:
    yield "Reading weights, in GB/s, by threads and size of the weights"
    yield "  threads  " + "".join(f"{_size(size):>10}" for size in WORKING_SETS)
    for threads, rates in diagnosis.bandwidth.items():
        cells = (f"{rates[size] / 1e9:10.1f}" for size in WORKING_SETS)
        yield f"  {threads:7}  " + "".join(cells)


def _products(diagnosis: Diagnosis) -> Iterator[str]:
    yield "Products of a prompt, in Gflop/s, by instruction set and weight format"
    yield "  " + " " * 10 + "".join(f"{form:>12}" for form in (*FORMATS, "attention"))
    for name, rates in diagnosis.products.items():
        cells = (
            f"{rates[form] / 1e9:12,.0f}" if form in rates else " " * 12
            for form in (*FORMATS, "attention")
        )
        yield f"  {name:10}" + "".join(cells).rstrip()


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
