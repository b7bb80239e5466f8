"""Which machine this is."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.cost.hardware import MACHINES, Machine
from octavo.engine import kept

MEASURED = replace(MACHINES["xeon-8480"], name="this", title="measured", source="octavo doctor")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path


def test_a_machine_that_nobody_measured_is_assumed_and_says_so() -> None:
    machine = kept.this_machine()
    assert machine.name == "this"
    assert "octavo doctor" in machine.source
    assert machine.memory_bytes > 0


def test_what_was_measured_is_used_with_the_memory_that_is_free_now(cache: Path) -> None:
    path = kept.keep(MEASURED)
    assert path.is_relative_to(cache)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    found = kept.this_machine()
    assert found.memory_bytes != MEASURED.memory_bytes
    assert replace(found, memory_bytes=MEASURED.memory_bytes) == MEASURED


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json",
        b"[1]",
        b"\xff",
        b"{}",
        b'{"efficiency": 3}',
        json.dumps({"efficiency": [1, 1, 1], "name": "this"}).encode(),
    ],
)
def test_a_damaged_file_counts_as_none(content: bytes) -> None:
    kept.keep(MEASURED).write_bytes(content)
    assert kept.read_kept() is None
    assert kept.this_machine().title != "measured"


@pytest.mark.parametrize("change", [{"bandwidth": 0}, {"bandwidth": "fast"}, {"products": {}}])
def test_impossible_limits_count_as_none(change: dict[str, object]) -> None:
    path = kept.keep(MEASURED)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert kept.read_kept() is None


def test_another_affinity_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    kept.keep(MEASURED)
    as_many = {1000 + cpu for cpu in os.sched_getaffinity(0)}
    monkeypatch.setattr("os.sched_getaffinity", lambda _: as_many)
    assert kept.read_kept() is None


def test_machines_survive_the_file_as_they_were() -> None:
    kept.keep(MEASURED)
    found = kept.read_kept()
    assert isinstance(found, Machine)
    assert found == MEASURED
