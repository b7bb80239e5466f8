import pytest

from benchmarks.peers.record import Record, RunResult
from benchmarks.peers.table import render
from benchmarks.peers.work import SMALL, Row, Work
from octavo.planning.throughput import Load

RATE = Row(title="rate", figure="rate", more_is_better=True, must=2.0, aim=3.0, digits=1)
DELAY = Row(title="delay", figure="delay", more_is_better=False, must=0.5)
WORK = Work(
    name="w",
    model=SMALL,
    load=Load(streams=1, prompt_tokens=1, output_tokens=1),
    rows=(RATE, DELAY),
)


@pytest.fixture
def record(tmp_path):
    record = Record.open(tmp_path / "record.json", {"cpu": "X", "commit": "abc"})
    for name in ("octavo", "a", "b"):
        record.describe_peer(name, name.upper(), {name: "1.0"}, None)
        record.keep_command(name, "w", f"{name} --run")
    return record


def add(record, peer, rate=None, delay=None, **fields):
    figures = {"rate": rate, "delay": delay, "seconds": 60.0}
    given = {name: value for name, value in figures.items() if value is not None}
    repeat = fields.pop("repeat", 1)
    record.add(RunResult(work="w", peer=peer, repeat=repeat, figures=given, **fields))


def rows(record):
    return render(record, [WORK]).splitlines()[2:4]


def test_octavo_is_compared_with_the_best_of_the_others_whichever_way_is_better(record):
    add(record, "octavo", 10.0, 1.0)
    add(record, "a", 4.0, 4.0)
    add(record, "b", 2.0, 2.0)
    rate, delay = rows(record)
    assert "2.50 of A | 2, aim 3" in rate
    assert "0.50 of B | 0.5" in delay


def test_a_must_that_is_missed_is_said(record):
    add(record, "octavo", 7.0, 1.1)
    add(record, "a", 4.0, 2.0)
    rate, delay = rows(record)
    assert "1.75 of A, missed" in rate
    assert "0.55 of A, missed" in delay


def test_octavos_server_is_its_entry_where_there_is_one(record):
    record.describe_peer("octavo-http", "OH", {}, None)
    add(record, "octavo", 10.0)
    add(record, "octavo-http", 8.0)
    add(record, "a", 4.0)
    assert "2.00 of A" in rows(record)[0]


def test_failures_cuts_versions_and_commands_are_told(record):
    record.describe_peer("c", "C", {}, "no compiler")
    add(record, "octavo", 10.0, repeat=1)
    add(record, "octavo", 14.0, repeat=2)
    add(record, "a", 4.0, cut=True)
    add(record, "b", error="it fell")
    text = render(record, [WORK])
    assert "| rate | 12.0 (10.0-14.0) | 4.0 (cut) | failed |" in text
    assert "w by a was cut after 60 s" in text
    assert "w by b, run 1 failed: it fell" in text
    assert "Missing: no compiler" in text
    assert "| C |" not in text
    assert "a 1.0" in text
    assert "w: `a --run`" in text


def test_a_table_of_no_runs_has_dashes(record):
    assert rows(record)[0] == "| rate | - | - | - | - | 2, aim 3 |"


def test_without_others_there_is_no_ratio(record):
    add(record, "octavo", 10.0)
    assert "| 10.0 | - | - | - |" in rows(record)[0]


def test_a_run_that_was_disturbed_is_marked_and_told(record):
    figures = {"rate": 10.0, "other_cpus": 0.84}
    record.add(RunResult(work="w", peer="a", repeat=2, figures=figures))
    text = render(record, [WORK])
    assert "10.0 (disturbed)" in text
    assert "w by a, run 2: others used 0.8 CPUs meanwhile" in text
