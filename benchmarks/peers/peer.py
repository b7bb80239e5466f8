"""What the comparison needs of an engine. Each module that carries an engine's name has one."""

import os
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.engines import Command
from benchmarks.peers.work import Work


class Peer(Protocol):
    """One engine.

    name: what `--peers` calls it. title: what the table calls it.
    """

    name: str
    title: str

    def install(self) -> None:
        """Make it and its model files ready to start; raises UnavailableError."""
        ...

    def versions(self) -> dict[str, Any]:
        """Return what it is made of."""
        ...

    def command(self, work: Work) -> Command:
        """Return how to start it for a work; equal commands mean one start."""
        ...


def usable_cpus() -> list[int]:
    """Return the CPUs that every engine may use: those of this process."""
    return sorted(os.sched_getaffinity(0))


def package_versions(programs: Path, *packages: str) -> dict[str, str]:
    """Return the versions of packages in the environment whose programs lie there."""
    found = {}
    for package in packages:
        name = package.replace("-", "_")
        for entry in programs.parent.glob(f"lib/python*/site-packages/{name}-*.dist-info"):
            found[package] = entry.name.removesuffix(".dist-info").partition("-")[2]
    return found
