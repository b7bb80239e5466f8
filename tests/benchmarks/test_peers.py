import asyncio
import os
import sys
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as bench
from benchmarks.peers import llama
from benchmarks.peers.comparison import Comparison
from benchmarks.peers.engines import Command, Engine, EngineError
from benchmarks.peers.install import UnavailableError, last_line, once, run_step
from benchmarks.peers.record import Record
from benchmarks.peers.work import LARGE, SMALL, WORKS, Row, Work
from octavo.planning.throughput import Load
from tests.benchmarks.test_closed_loop import WORKER as ONE_TOKEN_WORKER

WORKERS = os.path.join(os.path.dirname(llama.__file__), "workers")
# Takes any prompt and gives a token of its answer in each step.
WORKER = """
from closed_loop import obey
class Engine:
    def __init__(self): self.left = {}
    def add(self, prompt, output_tokens):
        if prompt[0] < 0: raise ValueError("no such token")
        key = len(self.left)
        self.left[key] = output_tokens
        return key
    def step(self):
        for key in [key for key, left in self.left.items() if left]:
            self.left[key] -= 1
            yield key, 1, self.left[key] == 0
    def abort(self, keys): pass
obey(lambda: (Engine(), {}))
"""
ROW = Row(title="rate", figure="output_tokens_per_s", more_is_better=True)
LOAD = Load(streams=2, prompt_tokens=4, output_tokens=3, num_requests=4, shared_prefix=8)
WORK = Work(name="w", model=SMALL, load=LOAD, rows=(ROW,))
START = Work(name="start", model=SMALL, load=None, rows=(ROW,))


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    """No run counts as disturbed, however busy the machine that tests."""
    monkeypatch.setattr("benchmarks.peers.record.DISTURBED_CPUS", float("inf"))


class FakePeer:
    def __init__(self, name, code=WORKER, missing=None):
        self.name = self.title = name
        self.code = code
        self.missing = missing

    def install(self):
        if self.missing:
            raise UnavailableError(self.missing)

    def versions(self):
        return {"fake": "1"}

    def command(self, work):
        return Command(
            argv=(sys.executable, "-c", self.code), environment=(("PYTHONPATH", WORKERS),)
        )


def compare(tmp_path, peers, works, repeats=1):
    record = Record.open(tmp_path / "record.json", {})
    for peer in peers:
        record.describe_peer(peer.name, peer.title, peer.versions(), None)
    comparison = Comparison(record, peers, limit=30.0, logs=tmp_path / "logs")
    asyncio.run(comparison.run(works, repeats))
    return record


def test_engines_take_turns_repeat_by_repeat(tmp_path):
    record = compare(tmp_path, [FakePeer("a"), FakePeer("b")], [WORK], repeats=2)
    assert [(run.repeat, run.peer) for run in record.runs] == [
        (1, "a"),
        (1, "b"),
        (2, "a"),
        (2, "b"),
    ]
    assert all(run.figures["output_tokens"] == 12 for run in record.runs)


def test_a_go_that_goes_on_runs_only_what_is_missing(tmp_path):
    compare(tmp_path, [FakePeer("a")], [WORK])
    peers = [FakePeer("a", code="raise SystemExit('started again')"), FakePeer("b")]
    record = compare(tmp_path, peers, [WORK])
    assert [run.peer for run in record.runs] == ["a", "b"]
    assert not any(run.error for run in record.runs)


def test_a_fresh_process_tells_its_start_and_its_memory(tmp_path):
    record = compare(tmp_path, [FakePeer("a")], [START])
    figures = record.runs[0].figures
    assert 0 < figures["start_s"] <= figures["seconds"]
    assert 0 < figures["loaded_gb"] < 1


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise SystemExit('no such model')", "no such model"),
        ('print(\'{"error": "no memory"}\', flush=True)', "no memory"),
        (ONE_TOKEN_WORKER, "1 of 3 tokens|KeyError"),
        (WORKER.replace("< 0", ">= 0"), "no such token"),
    ],
)
def test_an_engine_that_fails_is_told_and_the_others_go_on(tmp_path, code, told):
    record = compare(tmp_path, [FakePeer("bad", code), FakePeer("good")], [WORK], repeats=2)
    bad, *good = record.runs
    assert bad.peer == "bad"
    assert bad.error is not None
    assert [run.peer for run in good] == ["good", "good"]
    assert any(part in bad.error for part in told.split("|"))


def test_an_engine_that_is_not_ready_in_time_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.peers.engines.START_SECONDS", 0.3)
    command = Command(argv=(sys.executable, "-c", "import time; time.sleep(600)"))
    with pytest.raises(EngineError, match="not ready"):
        asyncio.run(Engine.start(command, tmp_path / "log"))


def test_a_peer_that_cannot_be_installed_is_told_with_the_reason(capsys):
    peers = [FakePeer("a", missing="no compiler"), FakePeer("b")]
    assert bench.install(peers) == {"a": "no compiler", "b": None}
    assert "no compiler" in capsys.readouterr().err


# --- what is asked for --------------------------------------------------------------------------


def test_nothing_named_is_everything_and_the_order_is_the_tables():
    assert bench.choose(WORKS, "", "work") == list(WORKS)
    chosen = bench.choose(WORKS, "start, decode-1", "work")
    assert [work.name for work in chosen] == ["decode-1", "start"]


def test_an_unknown_name_is_told_with_the_closest(capsys):
    assert bench.main(["--work", "decode-9"]) == 2
    assert "decode-8" in capsys.readouterr().err
    assert bench.main(["--peers", "lama"]) == 2
    assert "llama" in capsys.readouterr().err


def test_settings_are_json_where_they_can_be():
    assert bench.parse_settings(["a=1", "b=int8", "c=null"]) == {"a": 1, "b": "int8", "c": None}
    for wrong in ("a", "=1", ""):
        with pytest.raises(bench.UsageError, match="NAME=VALUE"):
            bench.parse_settings([wrong])


def test_two_timed_runs_at_once_are_refused_with_the_process(tmp_path):
    refused = pytest.raises(bench.UsageError, match=str(os.getpid()))
    with bench.timing_lock(tmp_path), refused, bench.timing_lock(tmp_path):
        pass
    with bench.timing_lock(tmp_path):
        pass


def test_a_record_of_other_conditions_is_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "quick.json").write_text('{"begun": {"commit": "x"}, "peers": {}, "runs": []}')
    assert bench.main(["--quick", "--cache", str(tmp_path), "--peers", "octavo"]) == 2
    assert "--fresh" in capsys.readouterr().err


# --- works and recipes --------------------------------------------------------------------------


def test_every_run_has_prompts_of_its_own_that_are_the_same_for_all_engines():
    loads = [work for work in WORKS if work.load]
    heads = set()
    for work in loads:
        assert work.prompts(1) == work.prompts(1)
        for repeat in (1, 2):
            shared, prompts = work.prompts(repeat)
            assert len(prompts) == work.load.count
            assert all(len(prompt) + work.load.output_tokens <= 4096 for prompt in prompts)
            heads.add(tuple((shared or prompts[0])[:32]))
    assert len(heads) == 2 * len(loads)


def test_works_have_names_and_figures_of_their_own():
    assert len({work.name for work in WORKS}) == len(WORKS)
    assert {work.model for work in WORKS} == {SMALL, LARGE}
    assert len({row.title for work in WORKS for row in work.rows}) == 11


def test_a_ratio_must_be_high_for_rates_and_low_for_delays():
    rate = Row(title="", figure="", more_is_better=True, must=2.0)
    delay = Row(title="", figure="", more_is_better=False, must=0.5)
    assert rate.meets(2.0)
    assert not rate.meets(1.9)
    assert delay.meets(0.5)
    assert not delay.meets(0.6)
    assert ROW.meets(0.0)


def test_a_recipe_is_followed_once_and_again_when_it_changes_or_failed(tmp_path):
    folder, made = tmp_path / "engine", []

    def build():
        made.append(sorted(folder.iterdir()))
        (folder / "part").touch()

    def fail():
        build()
        raise UnavailableError("no")

    with pytest.raises(UnavailableError):
        once(folder, "1", fail)
    once(folder, "1", build)
    once(folder, "1", build)
    once(folder, "2", build)
    assert made == [[], [], []]


def test_a_step_that_fails_tells_its_last_line(tmp_path):
    log = tmp_path / "log"
    run_step([sys.executable, "-c", "print('fine')"], log)
    with pytest.raises(UnavailableError, match="no space left"):
        run_step([sys.executable, "-c", "raise SystemExit('no space left\\n\\n')"], log)
    with pytest.raises(UnavailableError, match="nosuchprogram"):
        run_step(["/nosuchprogram"], log)
    (tmp_path / "empty").touch()
    assert last_line(tmp_path / "empty") == "it printed nothing"


def test_the_patch_is_put_before_the_one_place_or_refused(tmp_path):
    source = tmp_path / "mmq.cpp"
    source.write_text(f"void f() {{\n{llama._LOAD_TILES}}}\n")
    llama._patch(source)
    assert llama._BARRIER + llama._LOAD_TILES in source.read_text()
    source.write_text("void f() {}\n")
    with pytest.raises(UnavailableError, match=r"mmq\.cpp"):
        llama._patch(source)


def test_a_command_is_shown_as_it_is_typed_without_this_machines_folders():
    argv = (f"{Path.cwd()}/.venv/bin/serve", "a b", f"{Path.home()}/m.gguf", "--port={port}")
    command = Command(argv=argv, environment=(("A", "1"),))
    assert str(command) == "A=1 .venv/bin/serve 'a b' ~/m.gguf --port=8000"
