"""Which machine this is: as measured before, else as assumed.

Decides when a measurement still holds: for the same CPU model, the same CPUs allowed and the same
version. Files lie in the cache folder; one that cannot be read counts as none.

Invariant: nothing here measures or waits.
"""

import hashlib
import json
import os
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from octavo.cost.hardware import Efficiency, Machine, assumed_machine
from octavo.engine.machine import available_cpus, available_memory, cpu_model
from octavo.native import library
from octavo.weights.fetch import cache_folder


def this_machine() -> Machine:
    """Return this machine's limits, with the memory that is free now."""
    kept = read_kept()
    if kept is not None:
        return replace(kept, memory_bytes=available_memory())
    sets = library.instruction_sets() if library is not None else ["generic"]
    title = f"this machine ({cpu_model()})"
    return assumed_machine(title, sets[0], available_cpus(), available_memory())


def kept_path() -> Path:
    """Return where the measurement of this CPU, affinity and version is kept."""
    affinity = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    key = f"{cpu_model()}|{affinity}|{available_cpus()}|{_version()}"
    return cache_folder() / "machines" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def read_kept() -> Machine | None:
    """Return what was measured here before, or None."""
    try:
        values = json.loads(kept_path().read_text(encoding="utf-8"))
        values["efficiency"] = Efficiency(*values["efficiency"])
        machine = Machine(**values)
        rates = [*machine.products.values(), machine.bandwidth, *machine.efficiency[:2]]
        is_sound = all(isinstance(r, int | float) and r > 0 for r in rates)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return machine if is_sound and "bf16" in machine.products else None


def keep(machine: Machine) -> Path:
    """Write a measurement of this machine whole or not at all; return its file."""
    path = kept_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(machine), indent=1), encoding="utf-8")
    unfinished.replace(path)
    return path


def _version() -> str:
    try:
        return version("octavo")
    except PackageNotFoundError:  # run from its sources
        return ""
