"""`octavo doctor`, smoke: figures are the machine's and are not asserted."""

import json
from pathlib import Path

import pytest

from octavo.cli import doctor
from octavo.engine import kept
from tests.cli.conftest import TINY, Octavo
from tests.executors.native import needs_library


@needs_library
def test_first_line_names_executor_and_instruction_set_and_the_result_is_kept(
    octavo: Octavo, cache: Path
) -> None:
    done = octavo("doctor")
    assert done.code == 0
    first = done.out.splitlines()[0]
    assert first.startswith("cpu executor with ")
    machine = kept.read_kept()
    assert machine is not None
    assert machine.instruction_set is not None
    assert machine.instruction_set in first
    assert str(kept.kept_path()) in done.out
    assert "measuring" in done.err


@needs_library
def test_a_plan_uses_what_was_kept_and_json_is_one_object(octavo: Octavo, cache: Path) -> None:
    values = json.loads(octavo("doctor", "--json").out)
    assert set(values["machine"]["products"]) >= {"bf16", "int8", "int4", "attention"}
    assert values["meanings"]
    done = octavo("plan", str(TINY), "--prompt-tokens", "9", "--output-tokens", "9")
    assert "measured by octavo doctor" in done.out


def test_without_the_library_it_names_the_reference_and_keeps_nothing(
    octavo: Octavo, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "library", None)
    monkeypatch.setattr(doctor, "why_missing", "no compiler")
    done = octavo("doctor")
    assert done.out.startswith("reference executor (NumPy, one thread): no compiler")
    assert kept.read_kept() is None
