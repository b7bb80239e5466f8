import json
from dataclasses import replace

import pytest

from benchmarks.peers.record import Record, RecordError, RunResult

BEGUN = {"cpu": "X", "commit": "abc"}
RUN = RunResult(work="w", peer="p", repeat=1, figures={"rate": 2.0})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "record.json"


def test_a_record_goes_on_where_it_stopped(path):
    first = Record.open(path, BEGUN)
    first.describe_peer("p", "P", {"p": "1"}, None)
    first.keep_command("p", "w", "p --run")
    first.add(RUN)
    again = Record.open(path, BEGUN)
    assert again.runs == [RUN]
    assert not again.needs("w", "p", 1, 60.0)
    assert again.needs("w", "p", 2, 60.0)
    assert again.needs("w", "q", 1, 60.0)
    again.describe_peer("p", "P", {"p": "2"}, None)
    assert again.peers["p"]["commands"] == {"w": "p --run"}


def test_a_run_that_failed_is_made_again_and_its_error_is_forgotten(path):
    record = Record.open(path, BEGUN)
    record.add(replace(RUN, figures={}, error="it fell"))
    assert record.needs("w", "p", 1, 60.0)
    record.add(RUN)
    assert record.runs == [RUN]


def test_a_run_that_was_disturbed_is_made_again_even_if_it_was_cut(path):
    record = Record.open(path, BEGUN)
    disturbed = replace(RUN, cut=True, figures={"rate": 1.0, "other_cpus": 0.8})
    record.add(disturbed)
    assert disturbed.was_disturbed
    assert record.needs("w", "p", 1, 60.0)
    record.add(replace(RUN, figures={"rate": 2.0, "other_cpus": 0.02}))
    assert not record.needs("w", "p", 1, 60.0)
    assert record.spread("w", "p", "rate") == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("fields", "is_repeated"),
    [
        ({"cut": True}, False),
        ({"figures": {"seconds": 61.0}}, False),
        ({"figures": {"seconds": 59.0}}, True),
    ],
)
def test_a_run_beyond_the_limit_is_not_repeated(path, fields, is_repeated):
    record = Record.open(path, BEGUN)
    record.add(replace(RUN, **fields))
    assert record.needs("w", "p", 2, 60.0) == is_repeated


@pytest.mark.parametrize(
    "changed", [{"cpu": "X", "commit": "abd"}, {"cpu": "X"}, {**BEGUN, "limit_s": 3}]
)
def test_runs_of_another_machine_or_commit_are_not_mixed_in(path, changed):
    Record.open(path, BEGUN).add(RUN)
    with pytest.raises(RecordError, match=r"commit|limit_s"):
        Record.open(path, changed)
    assert json.loads(path.read_text())["begun"] == BEGUN


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"begun": {}, "peers": {}, "runs": [{"work": "w"}]}']
)
def test_a_file_that_is_no_record_is_refused_and_left_alone(path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RecordError, match="--fresh"):
        Record.open(path, BEGUN)
    assert path.read_text() == text


def test_a_spread_is_over_the_runs_that_gave_the_figure(path):
    record = Record.open(path, BEGUN)
    for repeat, rate in enumerate((3.0, 1.0, 2.0), start=1):
        record.add(replace(RUN, repeat=repeat, figures={"rate": rate}))
    record.add(replace(RUN, repeat=4, figures={}, error="it fell"))
    assert record.spread("w", "p", "rate") == (2.0, 1.0, 3.0)
    assert record.spread("w", "p", "other") is None
