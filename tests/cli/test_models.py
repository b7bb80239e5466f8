"""`octavo pull`, `list` and `rm` on a cache folder of their own, without a network."""

import json
from pathlib import Path

import pytest

from octavo.weights.catalog import MODELS
from tests.cli.conftest import Octavo

SMOLLM = MODELS["smollm2-135m"]


@pytest.fixture
def fetched(cache: Path) -> Path:
    """A file of the default model's size where `pull` would have put it (it takes no space)."""
    folder = cache / "models" / SMOLLM.name
    (folder / "files").mkdir(parents=True)
    file = folder / "files" / SMOLLM.file_name
    with file.open("wb") as sparse:
        sparse.truncate(SMOLLM.num_bytes)
    record = {"name": SMOLLM.name, "file": SMOLLM.file_name, "licence": SMOLLM.licence}
    (folder / "octavo.json").write_text(json.dumps(record))
    return file


def test_list_shows_what_can_be_fetched(octavo: Octavo, cache: Path) -> None:
    done = octavo("list")
    assert (done.code, done.err) == (0, "")
    *rows, last = done.out.splitlines()
    assert [row.split()[0] for row in rows] == list(MODELS)
    assert all("not here" in row for row in rows)
    assert last == f"in {cache}"


def test_list_shows_what_was_fetched_first(octavo: Octavo, fetched: Path) -> None:
    first, second, _ = octavo("list").out.splitlines()
    assert first.split()[:3] == ["smollm2-135m", "98", "MB"]
    assert "not here" not in first
    assert "Apache-2.0" in first
    assert "not here" in second


def test_pull_prints_where_a_fetched_model_lies(octavo: Octavo, fetched: Path) -> None:
    done = octavo("pull")
    assert (done.code, done.out, done.err) == (0, f"{fetched}\n", "")


def test_pull_of_a_path_prints_it(octavo: Octavo, tmp_path: Path) -> None:
    assert octavo("pull", str(tmp_path)).out == f"{tmp_path}\n"


def test_rm_deletes_a_model_and_says_what_it_freed(octavo: Octavo, fetched: Path) -> None:
    done = octavo("rm", "smollm2-135m")
    assert (done.code, done.out) == (0, "Removed smollm2-135m, 98 MB.\n")
    assert not fetched.exists()
    assert "not here" in octavo("list").out.splitlines()[0]


def test_rm_of_an_unknown_model_names_the_nearest(octavo: Octavo, fetched: Path) -> None:
    done = octavo("rm", "smollm-135m")
    assert done.code == 1
    assert "'smollm2-135m'" in done.err
    assert fetched.exists()
