"""`octavo bench` on the tiny model: figures on stdout, progress on stderr, one line for errors."""

import json
import re
import sys
from pathlib import Path

import pytest

import octavo as package
from tests.cli.conftest import SMALL, TINY, Octavo

TEXT = "The keys and values of all tokens before it are what a token reads. " * 8
TINY_ON_REFERENCE = (str(TINY), *SMALL, "--executor", "reference")
PERPLEXITY = ("bench", "perplexity", *TINY_ON_REFERENCE, "--context", "64")
THROUGHPUT = ("bench", "throughput", *TINY_ON_REFERENCE)
QUICK = (*THROUGHPUT, "--prompt-tokens", "4", "--output-tokens", "3", "--streams", "1,2")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


# --- perplexity ---------------------------------------------------------------------------------


def test_perplexity_is_a_table_with_what_it_depends_on(octavo: Octavo, text: Path) -> None:
    done = octavo(*PERPLEXITY, "--text", str(text))
    assert done.code == 0
    first, headings, row, last = done.out.splitlines()
    assert re.search(r"on text.txt: [\d,]+ tokens count, in \d+ windows of 64", first)
    assert headings.split()[:2] == ["executor", "perplexity"]
    assert re.fullmatch(r"reference +[\d.]+ +[\d.]+ ± [\d.]+ +[\d.]+ +[\d,]+", row)
    assert f"octavo {package.__version__}" in last
    assert "llama on the reference executor" in done.err


def test_perplexity_as_json_is_one_object(octavo: Octavo, text: Path) -> None:
    done = octavo(*PERPLEXITY, "--text", str(text), "--json")
    found = json.loads(done.out)
    (score,) = found["scores"]
    assert score["executor"] == "reference"
    assert score["tokens"] > 100
    assert score["perplexity"] > 1
    assert found["context"] == 64
    assert found["machine"]["octavo"] == package.__version__
    assert "comparison" not in found


def test_progress_is_shown_on_a_terminal_and_is_no_part_of_the_figures(
    octavo: Octavo, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (*PERPLEXITY, "--text", str(text), "--json")
    silent = octavo(*given)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    shown = octavo(*given)
    assert re.search(r"Reading .* \d+ of \d+ tokens", shown.err)
    assert "Reading" not in silent.err
    assert len(shown.out.splitlines()) == len(silent.out.splitlines()) == 1


def test_default_text_is_pythons_help_topics_from_their_beginning(octavo: Octavo) -> None:
    found = json.loads(octavo(*PERPLEXITY, "--tokens", "50", "--json").out)
    assert "help topics of Python 3" in found["text"]
    assert found["scores"][0]["tokens"] in (49, 50)


def test_executors_are_compared_on_the_same_tokens(octavo: Octavo, text: Path) -> None:
    pytest.importorskip("octavo.native._octavo", reason="the native library is not built")
    given = (*PERPLEXITY, "--text", str(text), "--compare", "cpu", "--kv-cache-dtype", "float32")
    done = octavo(*given)
    assert done.code == 0, done.err
    line = done.out.splitlines()[-2]
    assert re.search(r"reference over cpu .*: [+-][\d.]+ % ± [\d.]+ % \(perplexity ratio", line)
    found = json.loads(octavo(*given, "--json").out)
    ours, theirs = found["scores"]
    assert ours["tokens"] == theirs["tokens"]
    ratio = ours["perplexity"] / theirs["perplexity"]
    assert found["comparison"]["ratio"] == pytest.approx(ratio)
    assert found["comparison"]["percent"] == pytest.approx(100 * (ratio - 1))


# --- throughput ---------------------------------------------------------------------------------


def test_throughput_has_a_row_per_number_of_streams(octavo: Octavo) -> None:
    done = octavo(*QUICK, "--requests", "3", "--repeats", "2", "--shared-prefix", "40")
    assert done.code == 0, done.err
    first, headings, *rows, last = done.out.splitlines()
    assert "on reference: prompts of 40 shared + 4 tokens, answers of 3" in first
    assert headings.split()[:3] == ["streams", "requests", "tokens/s"]
    assert [row.split()[:2] for row in rows] == [["1", "3"], ["2", "3"]]
    assert f"octavo {package.__version__}" in last
    told = [line for line in done.err.splitlines() if " of 2: " in line]
    assert len(told) == 4
    assert all(re.fullmatch(r"\[\d of 2: \d streams?: [\d.,]+ tokens/s\]", line) for line in told)


def test_throughput_as_json_has_medians_and_ranges(octavo: Octavo) -> None:
    done = octavo(*QUICK, "--requests", "2", "--repeats", "2", "--json")
    found = json.loads(done.out)
    assert [row["streams"] for row in found["rows"]] == [1, 2]
    for row in found["rows"]:
        for name in ("output_tokens_per_s", "prompt_tokens_per_s", "ttft_p50_ms", "tpot_p95_ms"):
            assert 0 < row[name]["min"] <= row[name]["median"] <= row[name]["max"]
    assert found["executor"] == "reference"


def test_answer_of_one_token_shows_no_time_per_token(octavo: Octavo) -> None:
    quick = (*QUICK, "--output-tokens", "1", "--streams", "1", "--repeats", "1")
    assert octavo(*quick).out.splitlines()[2].split()[-3:] == ["-", "-", "0"]
    (row,) = json.loads(octavo(*quick, "--json").out)["rows"]
    assert row["tpot_p50_ms"] is None


@pytest.mark.parametrize("streams", ["1,2", "1 2", "1, 2"])
def test_streams_are_told_with_commas_or_spaces(octavo: Octavo, streams: str) -> None:
    given = (*QUICK, "--streams", streams, "--requests", "2", "--repeats", "1", "--json")
    assert [row["streams"] for row in json.loads(octavo(*given).out)["rows"]] == [1, 2]


# --- what the user gets wrong -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options", "parts"),
    [
        ("perplexity", ["--tokens", "1"], ["--tokens"]),
        ("perplexity", ["--context", "1"], ["--context"]),
        ("throughput", ["--repeats", "0"], ["--repeats"]),
        ("throughput", ["--prompt-tokens", "0"], ["--prompt-tokens"]),
        ("throughput", ["--shared-prefix", "-1"], ["--shared-prefix"]),
        ("speed", [], ["speed"]),
    ],
)
def test_wrong_usage_exits_with_2(
    octavo: Octavo, command: str, options: list[str], parts: list[str]
) -> None:
    done = octavo("bench", command, *options)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert all(part in done.err for part in parts)


@pytest.mark.parametrize(
    ("command", "options", "parts"),
    [
        ("perplexity", ["--text", "/no/such/file"], ["/no/such/file"]),
        ("perplexity", ["--text", str(TINY)], [str(TINY)]),
        ("perplexity", ["--text", str(TINY / "model.safetensors")], ["UTF-8"]),
        ("perplexity", ["--compare", "cuda"], ["compare", "cpu or reference", "cuda"]),
        ("perplexity", ["--executor", "reference", "--compare", "reference"], ["both", "refer"]),
        ("perplexity", ["--block-size", "33"], ["block_size", "33"]),
        ("throughput", ["--streams", "many"], ["streams", "many", "1,8,32"]),
        ("throughput", ["--streams", ""], ["streams"]),
        ("throughput", ["--streams", "1,0"], ["streams", "at least 1", "0"]),
        ("throughput", ["--streams", "8", "--requests", "7"], ["requests", "8 streams", "7"]),
        ("throughput", ["--executor", "cuda"], ["executor", "cuda"]),
    ],
)
def test_mistake_is_told_before_the_model_is_looked_for(
    octavo: Octavo, command: str, options: list[str], parts: list[str]
) -> None:
    done = octavo("bench", command, "/no/such/model.gguf", *options)
    assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
    assert all(part in done.err for part in parts)


@pytest.mark.parametrize(
    ("content", "words"), [("", "is empty"), ("a", "tokens, of which"), ("\n", "tokens, of which")]
)
def test_text_without_enough_tokens(
    octavo: Octavo, tmp_path: Path, content: str, words: str
) -> None:
    file = tmp_path / "short.txt"
    file.write_text(content)
    done = octavo(*PERPLEXITY, "--text", str(file))
    assert (done.code, done.out) == (1, "")
    assert words in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "options", "parts"),
    [
        (PERPLEXITY, ["--context", "1024"], ["1,024", "at most 1,023"]),
        (PERPLEXITY, ["--max-model-len", "64"], ["64 tokens", "at most 63", "--max-model-len"]),
        (THROUGHPUT, ["--prompt-tokens", "1000"], ["1,128", "1,024"]),
        (THROUGHPUT, ["--streams", "1,65"], ["65 streams", "max_num_seqs is 64"]),
    ],
)
def test_work_that_the_model_or_the_settings_do_not_allow(
    octavo: Octavo, command: tuple[str, ...], options: list[str], parts: list[str]
) -> None:
    done = octavo(*command, *options)
    assert (done.code, done.out) == (1, "")
    assert all(part in done.err.splitlines()[-1] for part in parts)
