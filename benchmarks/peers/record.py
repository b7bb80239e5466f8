"""The record of a comparison: one JSON file, written again after each run, read to go on.

Decides what makes two runs comparable: the same machine, commit, Octavo settings and limit.
Invariant: the file on disk is always whole; a run that is in it is not made again.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Figures, Spread

FORMAT = 1
# CPUs, on average over a run, that others may use before it counts as disturbed.
DISTURBED_CPUS = 0.15
Json = dict[str, Any]


class RecordError(Exception):
    """A record that cannot be read, or that another machine or commit began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run of one work by one engine: figures, or the error that it ended in."""

    work: str
    peer: str
    repeat: int
    figures: Figures = field(default_factory=dict)
    cut: bool = False
    error: str | None = None

    @property
    def was_disturbed(self) -> bool:
        """Whether something else used the CPUs meanwhile: some engines then fall to a third."""
        return self.figures.get("other_cpus", 0) > DISTURBED_CPUS


class Record:
    """Runs so far, and what stands beside them.

    begun: what all runs have in common. peers: of each engine its title, versions, commands by
    work, and why it is missing.
    """

    def __init__(self, path: Path, begun: Json) -> None:
        self.path = path
        self.begun = begun
        self.peers: dict[str, Json] = {}
        self.runs: list[RunResult] = []

    @classmethod
    def open(cls, path: Path, begun: Json) -> "Record":
        """Go on with a record, or begin one. Raises RecordError if they cannot be compared."""
        record = cls(path, begun)
        if path.exists():
            record._read()
        return record

    def _read(self) -> None:
        try:
            values = json.loads(self.path.read_text())
            begun, self.peers = values["begun"], values["peers"]
            self.runs = [RunResult(**run) for run in values["runs"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RecordError(
                f"{self.path} is no record of a comparison ({error!r}). Name another file with "
                "--record, or begin it anew with --fresh."
            ) from None
        different = [
            f"{key}: {begun.get(key)!r} then, {self.begun.get(key)!r} now"
            for key in sorted({*begun, *self.begun})
            if begun.get(key) != self.begun.get(key)
        ]
        if different:
            raise RecordError(
                f"{self.path} was begun under other conditions ({'; '.join(different)}). Name "
                "another file with --record, or begin it anew with --fresh."
            )

    def describe_peer(self, name: str, title: str, versions: Json, missing: str | None) -> None:
        """Keep what an engine is, or why it is not there."""
        commands = self.peers.get(name, {}).get("commands", {})
        self.peers[name] = {
            "title": title,
            "versions": versions,
            "missing": missing,
            "commands": commands,
        }
        self.save()

    def keep_command(self, peer: str, work: str, command: str) -> None:
        """Keep how an engine was started for a work."""
        self.peers[peer]["commands"][work] = command

    def add(self, run: RunResult) -> None:
        """Keep a run; an earlier one in its place, which failed or was disturbed, is forgotten."""
        self.runs = [old for old in self.runs if _place(old) != _place(run)]
        self.runs.append(run)
        self.save()

    def needs(self, work: str, peer: str, repeat: int, limit: float) -> bool:
        """Return whether a run is still to be made.

        Not if it was, nor if an earlier repeat took more seconds than `limit`: once is enough.
        What failed or was disturbed is made again.
        """
        made = [r for r in self.runs_of(work, peer) if not r.error and not r.was_disturbed]
        return not any(
            run.repeat == repeat or run.cut or run.figures.get("seconds", 0) > limit for run in made
        )

    def runs_of(self, work: str, peer: str) -> list[RunResult]:
        """Return the runs of a work by an engine."""
        return [run for run in self.runs if (run.work, run.peer) == (work, peer)]

    def spread(self, work: str, peer: str, figure: str) -> Spread | None:
        """Return a figure over the repeats that gave it, or None if none did."""
        values = [run.figures[figure] for run in self.runs_of(work, peer) if figure in run.figures]
        return Spread.of(values) if values else None

    def save(self) -> None:
        """Replace the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_name(self.path.name + ".new")
        scratch.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        os.replace(scratch, self.path)

    def as_json(self) -> Json:
        """Return all of it."""
        return {
            "format": FORMAT,
            "begun": self.begun,
            "peers": self.peers,
            "runs": [asdict(run) for run in self.runs],
        }


def _place(run: RunResult) -> tuple[str, str, int]:
    return run.work, run.peer, run.repeat
