"""What is written beside the code says what the code says."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main

from octavo.cli.commands import app

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import reference_docs  # noqa: E402

TEXTS = {".md", ".py", ".toml", ".yml", ".yaml", ".txt", ".json", ".cfg", ""}
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:root|work|home/\w+)/")


def tracked() -> list[Path]:
    """Every file of the repository that is text, tracked or about to be."""
    try:
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    files = [ROOT / line for line in listed.stdout.splitlines()]
    return [f for f in files if f.suffix in TEXTS and f.is_file() and f.stat().st_size < 1 << 20]


def test_no_file_names_a_path_of_one_machine() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in tracked()
        if file != Path(__file__)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found


def test_reference_pages_are_what_the_code_says() -> None:
    assert reference_docs.main(["--check"]) == 0


def test_stale_reference_page_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reference_docs.main([], root=tmp_path) == 0
    assert reference_docs.main(["--check"], root=tmp_path) == 0
    page = tmp_path / "docs" / "reference" / "settings.md"
    page.write_text(page.read_text().replace("block_size", "page_size"))
    assert reference_docs.main(["--check"], root=tmp_path) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "docs/reference/settings.md" in line
    assert "tools/reference_docs.py" in line


def test_every_setting_is_described() -> None:
    page = reference_docs.settings_page()
    assert [line for line in page.splitlines() if line.endswith("|  |")] == []


def test_readme_lists_the_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [re.split(r"[<>=~!\[; ]", line)[0] for line in project["dependencies"]]
    section = (ROOT / "README.md").read_text().partition("## Dependencies")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)`", section, re.MULTILINE) == sorted(needed)


def test_every_dependency_has_a_lower_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert all(">=" in line for line in project["dependencies"])


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.stem)
def test_commands_in_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z][a-z-]+)", text, re.MULTILINE)) <= targets
    commands = set(typer.main.get_command(app).commands)
    assert set(re.findall(r"(?:^|bin/|`)octavo ([a-z]+)", text, re.MULTILINE)) <= commands
