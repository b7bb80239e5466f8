"""`octavo study`: where the page goes, what it may replace, and how it is broken off."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.planning.study.page import MARK
from octavo.weights.fetch import cached_path
from tests.cli.conftest import TINY, Octavo
from tests.executors.native import needs_library

QUICK = ("study", str(TINY), "--quick", "-o")


@needs_library
def test_the_findings_are_printed_and_an_older_page_is_replaced(
    octavo: Octavo, cache: Path, tmp_path: Path
) -> None:
    output = tmp_path / "report.html"
    output.write_text(MARK + "<p>an older one")
    done = octavo(*QUICK, str(output))
    assert done.code == 0, done.err
    assert [line[:2] for line in done.out.splitlines()[::2]] == [f"{n}." for n in range(1, 8)]
    assert f"Replaced {output}" in done.err
    assert "an older one" not in output.read_text()
    assert os.listdir(tmp_path) == ["report.html"]


@needs_library
def test_one_cpu_is_enough_and_is_told(octavo: Octavo, cache: Path, tmp_path: Path) -> None:
    output, allowed = tmp_path / "report.html", os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        done = octavo(*QUICK, str(output))
    finally:
        os.sched_setaffinity(0, allowed)
    assert done.code == 0, done.err
    assert "One CPU may be used" in output.read_text(encoding="utf-8")


def test_another_file_is_not_replaced(octavo: Octavo, tmp_path: Path) -> None:
    output = tmp_path / "thesis.html"
    output.write_text("years of work")
    done = octavo(*QUICK, str(output))
    assert done.code == 1
    assert "is no page of an earlier study" in done.err
    assert output.read_text() == "years of work"
    assert "..." not in done.err  # nothing has run


@pytest.mark.parametrize(
    ("place", "words"),
    [("", "is a folder"), ("missing/report.html", "No such file"), ("file/x.html", "Not a dir")],
)
def test_a_place_that_cannot_be_written_is_told_first(
    octavo: Octavo, tmp_path: Path, place: str, words: str
) -> None:
    (tmp_path / "file").write_text("")
    done = octavo(*QUICK, str(tmp_path / place))
    assert done.code == 1
    assert words in done.err
    assert "..." not in done.err
    assert len(done.err.splitlines()) == 1


def test_without_plotly_the_error_names_the_extra(
    octavo: Octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    done = octavo(*QUICK, str(tmp_path / "report.html"))
    assert done.code == 1
    assert "pip install 'octavo[plots]'" in done.err
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_there_is_told_in_a_line(octavo: Octavo, tmp_path: Path) -> None:
    done = octavo("study", str(tmp_path / "none"), "-o", str(tmp_path / "report.html"))
    assert done.code == 1
    assert "none" in done.err
    assert not list(tmp_path.iterdir())


@needs_library
def test_an_interrupt_leaves_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from octavo.cli.main import main; main()", *QUICK]
    output = tmp_path / "report.html"
    environment = {**os.environ, "OCTAVO_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(
        [*command, str(output)], stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stderr is not None
        assert "limits of the machine" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert not list(tmp_path.iterdir())


@needs_library
@pytest.mark.real
def test_quick_study_of_the_default_model(octavo: Octavo, tmp_path: Path) -> None:
    if cached_path("smollm2-135m") is None:
        pytest.skip("smollm2-135m has not been fetched; `octavo pull` does it")
    output = tmp_path / "report.html"
    done = octavo("study", "--quick", "-o", str(output))
    assert done.code == 0, done.err
    assert "The tokens are the same." in done.out
    assert output.read_text(encoding="utf-8").startswith(MARK)
